"""Bulk that runs gives way to a request with a deadline that waits for KV memory alone, and is served later all the same."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from tests.end_to_end.conftest import StartGateway, engines_yaml
from tests.end_to_end.dialects import CHAT
from tests.end_to_end.scripted_engine import Asked, ScriptedEngine, Wire, answer, hello
from tests.gateway.ingress.raw_client import RawClient

POLICY = """\
version: 1
classes:
  interactive: {ttft_sla_s: 1.0}
  bulk: {}
sizing: {policy: token_ledger}
"""
CAPACITY_TOKENS = 16 * 250


def page(used_fraction: float) -> str:
    return f"""\
vllm:num_requests_running{{engine="0",model_name="{CHAT.model}"}} 1.0
vllm:num_requests_waiting{{engine="0",model_name="{CHAT.model}"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="{CHAT.model}"}} {used_fraction}
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{CAPACITY_TOKENS // 16}"}} 1.0
"""


LONG = [{"role": "user", "content": "word " * 3000}]


async def test_running_bulk_gives_way_to_a_request_that_waits_for_memory_and_is_served_after_it(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    tries = 0
    running = asyncio.Event()

    async def play(asked: Asked, wire: Wire) -> None:
        nonlocal tries
        if asked.json().get("stream"):
            await hello(asked, wire)
            return
        tries += 1
        engine.metrics = page(0.8)  # its prompt is in memory long before anything shows
        running.set()
        if tries == 1:
            await wire.gone.wait()
        await answer(200, CHAT.whole("late"))(asked, wire)

    async with (
        ScriptedEngine(play=play, models=[CHAT.model], metrics=page(0.0)) as engine,
        AsyncExitStack() as stack,
    ):
        config = f"{engines_yaml(engine)}policy_file: {tmp_path / 'policy.yaml'}\npoll_s: 0.2\n"
        gateway = await stack.enter_async_context(start_gateway(config))
        bulk, chat = [await stack.enter_async_context(RawClient(gateway.port, wait_s=30)) for _ in range(2)]
        later = asyncio.create_task(bulk.ask(CHAT.ask_whole("X-Headrace-Class: bulk", messages=LONG)))
        async with asyncio.timeout(10):
            await running.wait()
        urgent = await chat.ask(CHAT.ask("X-Headrace-Class: interactive", messages=LONG))
        served = await later
        metrics = await gateway.metrics()

    assert (urgent.status, urgent.whole) == (200, True)
    assert (served.status, served.whole, tries, engine.aborted) == (200, True, 2, 1)
    assert metrics['headrace_preempted_total{class="bulk",engine="e0"}'] == 1
