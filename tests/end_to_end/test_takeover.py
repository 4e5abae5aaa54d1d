"""What a leader has learned of its engines outlives it: the next one takes over within three seconds and knows it."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest

from gateway.queue.keys import prefix
from gateway.queue.redis_client import connect
from tests.end_to_end.engine_process import eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.two_engines import at_least, holds, loaded, total
from tests.redis_servers import serving

pytestmark = pytest.mark.many

START, LEARNED = 4, 7
POLICY = f"""\
version: 1
classes:
  interactive: {{ttft_sla_s: 5, max_queue: 500, max_wait_s: 30}}
sizing:
  policy: aimd
  aimd: {{start: {START}, least: 2, most: 64}}
"""
TAKEOVER_S = 3.0
PUBLISHED_S = 8.0
WINDOW = "headrace_window", 'class="interactive"'


async def learned(store_url: str) -> float:
    """The limit of the engine that the leader has published."""
    client = connect(store_url)
    try:
        content = await client.hget(prefix("default") + "snapshot", "content")
    finally:
        await client.aclose()
    assert content is not None
    found = orjson.loads(content)["learned"]["sizing"]["aimd"]["limits"].get("e0", 0.0)
    return float(found)


async def test_the_next_leader_goes_on_with_the_window_that_the_dead_one_had_learned(tmp_path: Path) -> None:
    with serving("valkey-9") as store:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(simulated(tmp_path, "--speed", "0.5"))
            (tmp_path / "policy.yaml").write_text(POLICY)
            config = (
                f"engines: [{{name: e0, url: '{engine.url}'}}]\nredis_url: {store.url}\npoll_s: 0.2\n"
                f"policy_file: {tmp_path / 'policy.yaml'}\n"
            )
            leader = await stack.enter_async_context(GatewayProcess(tmp_path / "leader", config))
            await eventually(holds(leader, "headrace_leader", 1))
            next_one = await stack.enter_async_context(GatewayProcess(tmp_path / "next", config))
            async with loaded(leader) as load:
                load.start("interactive", 24, tokens=20)
            await eventually(at_least(leader, WINDOW[0], LEARNED, WINDOW[1]))
            window = await total(leader, *WINDOW)
            async with asyncio.timeout(PUBLISHED_S):
                while int(await learned(store.url)) != window:
                    await asyncio.sleep(0.05)

            killed_s = time.monotonic()
            await leader.stop(signal.SIGKILL)
            await eventually(holds(next_one, "headrace_leader", 1))
            took_over_s = time.monotonic() - killed_s
            await eventually(holds(next_one, WINDOW[0], window, WINDOW[1]), within_s=1.0)

    assert window > START
    assert took_over_s < TAKEOVER_S
