"""Two classes on two engines: what bulk takes, what interactive keeps, and what edits and stop signals change."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.end_to_end.engine_process import eventually
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.two_engines import POLICY, Engines, at_least, holds, loaded, servers, total, two_engines

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    async with two_engines(tmp_path_factory.mktemp("engines")) as both:
        yield both


# -- two classes -------------------------------------------------------------------------------------------------------


async def test_bulk_fills_what_is_left_and_interactive_keeps_its_first_token(engines: Engines, tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path / "gateway", engines.config(tmp_path)) as gateway:
        async with loaded(gateway) as load:
            load.start("bulk", 30, tokens=50)
            await eventually(at_least(gateway, "headrace_queued", 20, 'class="bulk"'))
            most_bulk = most_running = 0.0
            while load.ended("bulk") < 20:
                load.start("interactive", 1, tokens=8)
                await asyncio.sleep(0.1)
                most_bulk = max(most_bulk, await total(gateway, "headrace_in_flight", 'class="bulk"', 'engine="e1"'))
                most_running = max(most_running, *await engines.running())
        missed = await total(gateway, "headrace_ttft_sla_total", 'outcome="missed"')

    assert all(told.done for told in load.all_told())
    assert len(load.told["bulk"]) == 30
    assert (most_bulk, most_running <= 4) == (2, True)
    assert max(told.ttft_s for told in load.told["interactive"]) < 0.5
    assert missed == 0
    assert max(told.ttft_s for told in load.told["bulk"]) > 1.0


async def test_windows_follow_the_policy_file_and_a_bad_edit_changes_nothing(engines: Engines, tmp_path: Path) -> None:
    config = engines.config(tmp_path)
    policy = tmp_path / "policy.yaml"
    async with GatewayProcess(tmp_path / "gateway", config) as gateway:
        async with loaded(gateway) as load:
            load.start("bulk", 24, tokens=150)
            await eventually(holds(gateway, "headrace_in_flight", 4))

            policy.write_text(POLICY.replace("bulk: 2}", "bulk: 3}"))
            await eventually(holds(gateway, "headrace_policy_generation", 2))
            await eventually(holds(gateway, "headrace_in_flight", 6))
            widened = await total(gateway, "headrace_window", 'engine="e1"', 'class="bulk"')

            policy.write_text(POLICY.replace("ttft_sla_s: 0.5", "ttft_sla_s: -3"))
            await eventually(holds(gateway, "headrace_policy_reload_failed", 1))
            kept = await total(gateway, "headrace_window", 'engine="e1"', 'class="bulk"')
            generation = await total(gateway, "headrace_policy_generation")

            policy.write_text(POLICY.replace("bulk: 2}", "bulk: 1}"))
            await eventually(holds(gateway, "headrace_policy_generation", 3))
            narrowed = await total(gateway, "headrace_window", 'engine="e1"', 'class="bulk"')
            failed = await total(gateway, "headrace_policy_reload_failed")
        log = gateway.log

    assert (widened, kept, generation, narrowed, failed) == (3, 3, 2, 1, 0)
    assert "ttft_sla_s" in log
    assert all(told.done for told in load.told["bulk"])


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_a_stop_signal_lets_running_and_waiting_works_finish(engines: Engines, tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path / "gateway", engines.config(tmp_path)) as gateway:
        async with loaded(gateway) as load:
            load.start("bulk", 10, tokens=60)
            load.start("interactive", 6, tokens=120)
            await eventually(at_least(gateway, "headrace_queued", 1, 'class="bulk"'))
            await eventually(at_least(gateway, "headrace_in_flight", 4))
            stopping = asyncio.ensure_future(gateway.stop())
            await eventually(lambda: "draining" in gateway.log)
            with pytest.raises(httpx.ConnectError):
                await httpx.AsyncClient(trust_env=False).get(f"{gateway.public_url}/health")
        code = await stopping

    assert code == 0
    assert [told.done for told in load.all_told()] == [True] * 16
    assert servers(tmp_path) == []


async def test_a_second_stop_signal_ends_at_once_and_leaves_no_server(engines: Engines, tmp_path: Path) -> None:
    async with GatewayProcess(tmp_path / "gateway", engines.config(tmp_path)) as gateway:
        async with loaded(gateway) as load:
            load.start("bulk", 20, tokens=1500)
            await eventually(at_least(gateway, "headrace_queued", 10))
            assert gateway.process is not None
            gateway.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "draining" in gateway.log)
            hurried_s = time.monotonic()
            code = await gateway.stop()
            took_s = time.monotonic() - hurried_s

    assert code == 1
    assert took_s < 3.0
    assert not any(told.done for told in load.told["bulk"])
    assert servers(tmp_path) == []
    await eventually(lambda: _idle(engines), within_s=2.0)


async def _idle(engines: Engines) -> bool:
    return await engines.running() == [0, 0]
