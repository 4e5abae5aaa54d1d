"""The queue's private server killed, emptied, frozen or orphaned while works run and wait: nothing hangs, nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.queue.redis_client import connect
from tests.end_to_end.engine_process import eventually
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.two_engines import Engines, at_least, holds, loaded, server_of, servers, total, two_engines

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    async with two_engines(tmp_path_factory.mktemp("engines")) as both:
        yield both


async def test_after_kill_9_the_next_gateway_adopts_the_orphaned_server(engines: Engines, tmp_path: Path) -> None:
    config = engines.config(tmp_path)
    async with GatewayProcess(tmp_path / "gateway", config) as gateway:
        before = server_of(tmp_path)
        async with loaded(gateway) as load:
            load.start("bulk", 10, tokens=400)
            await eventually(at_least(gateway, "headrace_queued", 6))
            await gateway.stop(signal.SIGKILL)
        assert not any(told.done for told in load.told["bulk"])

    async with GatewayProcess(tmp_path / "gateway", config) as successor:
        after = server_of(tmp_path)
        serving = servers(tmp_path)
        async with loaded(successor) as load:
            load.start("bulk", 10, tokens=20)
            load.start("interactive", 10, tokens=20)
        # What the dead one had queued is nobody's: it is swept once its session has expired, and is never run.
        await eventually(holds(successor, "headrace_queued", 0))
        assert await successor.stop() == 0

    assert after == before
    assert serving == [before.pid]
    assert all(told.done for told in load.all_told())
    assert servers(tmp_path) == []


async def kill_server(folder: Path) -> None:
    os.kill(server_of(folder).pid, signal.SIGKILL)


async def flush_server(folder: Path) -> None:
    client = connect(f"unix://{server_of(folder).socket}")
    await client.flushall()
    await client.aclose()


@pytest.mark.parametrize("harm", [kill_server, flush_server])
async def test_works_survive_what_happens_to_the_queues_server(
    engines: Engines, tmp_path: Path, harm: Callable[[Path], Awaitable[None]]
) -> None:
    async with GatewayProcess(tmp_path / "gateway", engines.config(tmp_path)) as gateway:
        async with loaded(gateway) as load, loaded(gateway) as newcomers:
            load.start("bulk", 24, tokens=60)
            load.start("interactive", 12, tokens=60)
            await eventually(at_least(gateway, "headrace_queued", 16, 'class="bulk"'))

            await harm(tmp_path)
            harmed_s = time.monotonic()
            before = load.ended("bulk")
            newcomers.start("interactive", 6, tokens=20)
            newcomers.start("bulk", 6, tokens=20)
            await eventually(lambda: load.ended("bulk") > before + 4, within_s=5.0)
            recovered_s = time.monotonic() - harmed_s
            await eventually(holds(gateway, "headrace_redis_up", 1), within_s=5.0)
        await eventually(holds(gateway, "headrace_queued", 0))
        in_flight = await total(gateway, "headrace_in_flight")
        serving = servers(tmp_path)
        server = server_of(tmp_path)

    assert [told.status for told in load.all_told() if not told.done] == []
    assert len(load.all_told()) == 36
    assert [told.status for told in newcomers.all_told() if not told.done] == []
    assert len(newcomers.all_told()) == 12
    assert recovered_s < 5.0
    assert in_flight == 0
    assert serving == [server.pid]


async def test_a_frozen_server_of_the_queue_stops_no_running_stream_and_works_go_on_after(
    engines: Engines, tmp_path: Path
) -> None:
    async with GatewayProcess(tmp_path / "gateway", engines.config(tmp_path)) as gateway:
        pid = server_of(tmp_path).pid
        async with loaded(gateway) as load:
            load.start("bulk", 16, tokens=80)
            await eventually(at_least(gateway, "headrace_queued", 8))
            os.kill(pid, signal.SIGSTOP)
            try:
                await eventually(lambda: load.ended("bulk") >= 4)
                await eventually(holds(gateway, "headrace_redis_up", 0))
            finally:
                os.kill(pid, signal.SIGCONT)
            await eventually(holds(gateway, "headrace_redis_up", 1), within_s=5.0)
        assert await total(gateway, "headrace_in_flight") == 0

    assert [told.done for told in load.told["bulk"]] == [True] * 16
