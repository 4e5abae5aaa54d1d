"""Two gateways of two workers each under load: what dies takes its own streams with it and nothing else.

In every test the engines' own counts stay inside the windows at every instant, no two gateways say at once that they
lead, and every request that a living process has accepted is answered with the right bytes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.end_to_end.engine_process import eventually
from tests.end_to_end.scene import loaded
from tests.end_to_end.two_gateways import Pool, gone, holders, two_gateways
from tests.redis_servers import serving

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.many]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    with serving("valkey-9") as store:
        async with two_gateways(tmp_path_factory.mktemp("pool"), store) as pool:
            yield pool


async def test_a_killed_worker_takes_its_own_streams_and_no_others(pool: Pool) -> None:
    async with loaded(pool) as scene:
        victim = (await pool.processes(scene.other)).workers[0]
        await eventually(lambda: victim in holders(pool.gateways[scene.other].port, [victim]).values())

        dying = await scene.kill(scene.other, victim)
        killed_s = time.monotonic()

        await scene.streams.flows(scene.leader, scene.other)
        await scene.attained(killed_s)

    assert dying
    assert scene.streams.wrong(besides=dying) == []


async def test_when_the_deciding_process_is_killed_no_stream_is_touched(pool: Pool) -> None:
    async with loaded(pool) as scene:
        await scene.kill(scene.leader, (await pool.processes(scene.leader)).decider)
        killed_s = time.monotonic()

        await scene.streams.flows(scene.leader, scene.other)
        await scene.attained(killed_s)

    assert scene.streams.wrong() == []


@pytest.mark.parametrize("which", ["leader", "other"])
async def test_a_killed_gateway_takes_all_its_processes_and_the_other_gateway_goes_on(pool: Pool, which: str) -> None:
    async with loaded(pool) as scene:
        dead, living = (scene.leader, scene.other) if which == "leader" else (scene.other, scene.leader)
        processes = await pool.processes(dead)

        await scene.kill(dead, processes.supervisor)
        killed_s = time.monotonic()
        scene.streams.stop(dead)
        await eventually(lambda: gone(processes.all), within_s=2.0)

        await scene.attained(killed_s, living)
        await scene.streams.flows(living)

    assert [told for told in scene.streams.wrong() if told.gateway == living] == []
