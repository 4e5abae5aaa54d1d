"""Two gateways whose queue is on a Sentinel set, and its primary is lost while works run and wait."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.queue.keys import keys
from tests.end_to_end.engine_process import eventually
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.two_engines import Engines, at_least, loaded, two_engines
from tests.redis_topologies import sentinels

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.many]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    async with two_engines(tmp_path_factory.mktemp("engines")) as both:
        yield both


async def test_what_was_accepted_ends_well_and_new_work_is_taken_again_within_ten_seconds(
    engines: Engines, tmp_path: Path
) -> None:
    with sentinels() as store:
        config = engines.config(tmp_path) + f"redis_url: {store.url}\n"
        async with (
            GatewayProcess(tmp_path / "one", config) as one,
            GatewayProcess(tmp_path / "two", config) as two,
            loaded(one) as at_one,
            loaded(two) as at_two,
            loaded(two) as later,
            loaded(one) as meanwhile,
        ):
            for gateway in (one, two):
                await gateway.until_ready()
            for load in (at_one, at_two):
                load.start("bulk", 12, tokens=60)
                load.start("interactive", 6, tokens=60)
            await eventually(at_least(one, "headrace_queued", 8, 'class="bulk"'))

            store.primary_of(keys("default")[0]).kill()
            lost_s = time.monotonic()
            meanwhile.start("interactive", 4, tokens=10)
            meanwhile.start("bulk", 4, tokens=10)
            await eventually(lambda: store.has_primary_of(keys("default")[0]))
            later.start("interactive", 6, tokens=10)
            await eventually(lambda: later.ended("interactive") == 6, within_s=10.0)
            back_s = time.monotonic() - lost_s
            later.start("bulk", 6, tokens=10)

    assert [told.status for load in (at_one, at_two, later) for told in load.all_told() if not told.done] == []
    assert [told.status for told in meanwhile.all_told() if not told.done and told.status != 503] == []
    assert (len(later.all_told()), len(meanwhile.all_told())) == (12, 8)
    assert back_s < 10
