"""What workers see of single requests reaches the process that decides: its sizing policy moves as one process's would."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.end_to_end.engine_process import eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.two_engines import at_least, loaded

pytestmark = pytest.mark.many

START, LEARNED = 4, 8
POLICY = f"""\
version: 1
classes:
  interactive: {{ttft_sla_s: 5, max_queue: 500, max_wait_s: 30}}
sizing:
  policy: aimd
  aimd: {{start: {START}, least: 2, most: 64}}
"""
WINDOW = "headrace_window", 'class="interactive"'


async def test_first_tokens_that_workers_relay_open_the_window_of_the_decider(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(simulated(tmp_path, "--speed", "0.5"))
        (tmp_path / "policy.yaml").write_text(POLICY)
        config = (
            f"engines: [{{name: e0, url: '{engine.url}'}}]\nworkers: 2\npoll_s: 0.2\n"
            f"policy_file: {tmp_path / 'policy.yaml'}\n"
        )
        gateway = await stack.enter_async_context(GatewayProcess(tmp_path / "gateway", config))
        async with loaded(gateway) as load:
            load.start("interactive", 64, tokens=40)
            await eventually(at_least(gateway, WINDOW[0], LEARNED, WINDOW[1]), within_s=20.0)

        assert all(told.done for told in load.all_told())
