"""Virtual time against real time: the same load over real HTTP and in a replay gives the same first tokens and tokens/s.

A gateway process before a simulated engine in a process of its own, and a client that sends as the trace says; beside
it the same trace, profile and policy in a replay. What a replay leaves out (sockets, bodies, the relay) costs
milliseconds; a prompt of a thousand tokens takes this engine a fifth of a second, so that the bar of ten per cent is about
time in queue and engine. All the minute's requests count: of its long prompts alone, half see an empty engine and half
a busy one, and their median is the toss of which of two came first. A machine that is busy with other things cannot keep
real time, and the test says so.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import aiohttp
import pytest

from backends.simulated.profiles import load_profile
from gateway.load.text import prompt_text
from gateway.replay.figures import quantile
from gateway.replay.host import EngineSpec
from gateway.replay.trace import Request, read_trace, segment
from gateway.replay.world import Plan, replay
from policies import presets
from tests.end_to_end.engine_process import EngineProcess
from tests.end_to_end.gateway_process import GatewayProcess
from tests.gateway.replay.quiet import QUIET

TRACE = Path(__file__).parents[1] / "data/azure_conv_10min.csv"
PROFILE = "a100x4_llama3_70b_tp4"
RATE = 0.5
BAR = 0.10
LAG_MAX_S = 0.02
"""Above this median lateness of a timer the machine does not keep real time."""


class Client:
    """Sends each request at its time over real HTTP; first tokens by request, tokens of all, and the lateness of timers."""

    def __init__(self, url: str) -> None:
        self._url = url + "/v1/completions"
        self.ttft_s: list[float] = []
        self.late_s: list[float] = []
        self.tokens = 0
        self.end_s = 0.0

    async def play(self, requests: list[Request]) -> None:
        loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            begun_s = loop.time() + 0.1
            for number, request in enumerate(requests):
                due_s = begun_s + request.arrival_s
                await asyncio.sleep(due_s - loop.time())
                self.late_s.append(loop.time() - due_s)
                group.create_task(self._send(session, number, request, due_s, begun_s))

    async def _send(
        self, session: aiohttp.ClientSession, number: int, request: Request, due_s: float, begun_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        body = {
            "model": "sim",
            "prompt": prompt_text(request.prompt_tokens, number),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        seen, tail = False, b""
        async with session.post(self._url, json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for chunk in reply.content.iter_any():
                tail = (tail + chunk)[-_TAIL_BYTES:]
                if not seen and _EVENT in tail:
                    seen = True
                    self.ttft_s.append(loop.time() - due_s)
        usage = _USAGE.search(tail)
        assert usage is not None
        assert int(usage[1]) == request.output_tokens
        self.tokens += request.output_tokens
        self.end_s = max(self.end_s, loop.time() - begun_s)


_EVENT = b"data: {"
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
"""Events are not tokens: an engine that is behind sends several in one."""
_TAIL_BYTES = 4096


@pytest.mark.many
async def test_a_replay_agrees_with_real_time_within_ten_per_cent(tmp_path: Path) -> None:
    requests = segment(read_trace(TRACE), rate_scale=RATE, from_s=20.0, duration_s=60.0)
    plan = Plan((EngineSpec("e", load_profile(PROFILE)),), presets.load(), requests)
    played = await asyncio.to_thread(replay, plan, QUIET)
    simulate = ("gateway.cli", "simulate", "--listen", "127.0.0.1:0", "--model", "sim", "--profile", PROFILE)
    async with (
        EngineProcess(tmp_path, *simulate) as engine,
        GatewayProcess(tmp_path / "gateway", f"engines: [{{name: e, url: '{engine.url}'}}]\n") as gateway,
    ):
        client = Client(gateway.public_url)
        await client.play(requests)

    lag_s = quantile(sorted(client.late_s), 0.5)
    if lag_s is not None and lag_s > LAG_MAX_S:
        pytest.skip(
            f"timers are {lag_s * 1000:.0f} ms late (load {os.getloadavg()[0]:.1f}): no real time to compare with"
        )
    virtual_ttft_s = quantile(sorted(row.ttft_s for row in played.rows if row.ttft_s is not None), 0.5)
    virtual_end_s = max(row.end_s for row in played.rows)
    assert len(client.ttft_s) == len(requests)
    assert quantile(sorted(client.ttft_s), 0.5) == pytest.approx(virtual_ttft_s, rel=BAR)
    assert client.tokens / client.end_s == pytest.approx(
        sum(row.output_tokens for row in played.rows) / virtual_end_s, rel=BAR
    )
