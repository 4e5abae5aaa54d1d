"""A gateway that cannot reach the store any more: interactive work goes on on its share, on both sides of the cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.end_to_end.cut_network import Wire
from tests.end_to_end.engine_process import eventually
from tests.end_to_end.scene import loaded
from tests.end_to_end.traffic import Told
from tests.end_to_end.two_gateways import Pool, two_gateways
from tests.redis_servers import serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.many]

CUT_S = 7.0
"""Longer than a session is valid."""
BACK_S = 5.0


@dataclass
class Cut:
    """A pool, and a wire from each of its gateways to the store."""

    pool: Pool
    wires: dict[str, Wire]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cut(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cut]:
    with serving("valkey-9") as store:
        async with Wire(store.url) as one, Wire(store.url) as other:
            wires = {"a": one, "b": other}
            stores = {name: wire.url for name, wire in wires.items()}
            async with two_gateways(
                tmp_path_factory.mktemp("pool"), store, stores=stores, places=16, for_bulk=6
            ) as pool:
                yield Cut(pool, wires)


@pytest.mark.parametrize("which", ["leader", "other"])
async def test_a_gateway_cut_off_from_the_store_serves_interactive_work_on_its_share_and_is_soon_back(
    cut: Cut, which: str
) -> None:
    async with loaded(cut.pool) as scene:
        off, on = (scene.leader, scene.other) if which == "leader" else (scene.other, scene.leader)
        cut.wires[off].cut()
        cut_s = time.monotonic()
        try:
            await scene.attained(cut_s, on)
            await asyncio.sleep(cut_s + CUT_S - time.monotonic())
            asked = [told for told in scene.streams.of("interactive", off) if told.started_s > cut_s]
            in_time = sum(told.ttft_s <= scene.in_time_s for told in asked)
        finally:
            cut.wires[off].heal()
        await eventually(lambda: whole_again(cut.pool), within_s=BACK_S)
        await scene.streams.flows(on, off)
    await cut.pool.settled()

    assert len(asked) > 20
    assert in_time >= len(asked) / 3
    assert [told for told in scene.streams.wrong() if not refused_meanwhile(told, off)] == []
    assert await cut.pool.entries() == {}


def refused_meanwhile(told: Told, off: str) -> bool:
    """Bulk that the cut-off gateway could not queue was told so, and to come again."""
    return (
        told.gateway == off and told.class_name == "bulk" and told.status == 503 and b"queue_unavailable" in told.body
    )


async def whole_again(pool: Pool) -> bool:
    """Every process is in the store again and one leads."""
    pages = [await gateway.metrics() for gateway in pool.gateways.values()]
    return all(page["headrace_redis_up"] == 1 for page in pages) and await pool.leader() is not None
