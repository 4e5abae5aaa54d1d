"""A leader that is stopped for ten seconds and goes on: another leads meanwhile, and it never decides on old knowledge."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.end_to_end.engine_process import eventually
from tests.end_to_end.scene import loaded
from tests.end_to_end.two_gateways import Pool, frozen, two_gateways
from tests.redis_servers import serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.many]

FROZEN_S = 10.0
TAKEOVER_S = 3.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    with serving("valkey-9") as store:
        async with two_gateways(tmp_path_factory.mktemp("pool"), store) as pool:
            yield pool


async def test_another_decides_while_the_deciding_process_is_frozen_and_no_stream_is_touched(pool: Pool) -> None:
    async with loaded(pool) as scene:
        processes = await pool.processes(scene.leader)
        frozen_s = time.monotonic()
        async with frozen([processes.decider]):
            await scene.streams.flows(scene.leader, scene.other)
            await scene.attained(frozen_s)
            await asyncio.sleep(frozen_s + FROZEN_S - time.monotonic())
        thawed_s = time.monotonic()
        await scene.streams.flows(scene.leader, scene.other)
        await scene.attained(thawed_s)
        took_over_s = scene.leaders.first_s(scene.other, frozen_s)

    assert took_over_s < TAKEOVER_S
    assert scene.streams.wrong() == []


async def test_a_gateway_frozen_whole_goes_on_with_its_live_streams_and_decides_nothing(pool: Pool) -> None:
    async with loaded(pool) as scene:
        processes = await pool.processes(scene.leader)
        await eventually(lambda: scene.streams.live(scene.leader))
        frozen_s = time.monotonic()
        async with frozen(processes.all):
            live = scene.streams.live(scene.leader)
            await scene.attained(frozen_s, scene.other)
            await scene.streams.flows(scene.other)
            await asyncio.sleep(frozen_s + FROZEN_S - time.monotonic())
        thawed_s = time.monotonic()
        await scene.streams.flows(scene.leader, scene.other)
        await scene.attained(thawed_s)
        took_over_s = scene.leaders.first_s(scene.other, frozen_s)

    assert live
    assert took_over_s < TAKEOVER_S
    assert scene.streams.wrong() == []
