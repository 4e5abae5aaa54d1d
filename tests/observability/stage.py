"""A gateway with two workers on which everything happens that a dashboard shows: load, refusals, retries, preemptions,
foreign traffic, hot GPUs, an engine that breaks, a new policy.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from aiohttp import web

from tests.end_to_end.engine_process import EngineProcess, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import Asked, ScriptedEngine, Wire

MODEL = "sim-8b"
DCGM_PAGE = Path(__file__).parents[1] / "data" / "gpu" / "dcgm_two_cards.txt"
OF_CARD = 'gpu="0",UUID="GPU-aaaa",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="node-1"'
HW_THERMAL = 0x40
MORE = "".join(
    f"DCGM_FI_DEV_{name}{{{OF_CARD}}} {value}\n"
    for name, value in (
        ("CLOCKS_EVENT_REASONS", HW_THERMAL),
        ("SLOWDOWN_TEMP", 63),
        ("GPU_TEMP_LIMIT", 2),
        ("ENFORCED_POWER_LIMIT", 700),
    )
)
"""A card that its hardware slows down for heat."""
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
POLICY = """\
version: 1
classes:
  interactive: {{ttft_sla_s: 0.5, max_queue: 50, max_wait_s: 20}}
  bulk: {{max_queue: {bulk_queue}, max_wait_s: 60, deadline_s: 45}}
sizing: {{policy: token_ledger}}
"""


@dataclass
class Stage:
    """What a test of dashboards looks at."""

    gateway: GatewayProcess
    engine: EngineProcess
    broken: ScriptedEngine
    cards: Cards
    policy: Path

    def new_policy(self, bulk_queue: int) -> None:
        self.policy.write_text(POLICY.format(bulk_queue=bulk_queue))


class Cards:
    """A DCGM exporter of two cards that use energy and, one of them, run hot."""

    def __init__(self) -> None:
        self._page = DCGM_PAGE.read_text()
        self._reads = itertools.count()
        self.url = ""
        self.busy = False

    async def _metrics(self, _request: web.Request) -> web.Response:
        used_mj = 500_000 * next(self._reads)
        page = re.sub(
            r"(?m)^(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION\S*\{.*\}) (\d+)$",
            lambda found: f"{found[1]} {int(found[2]) + used_mj}",
            self._page,
        )
        if not self.busy:
            page = re.sub(r"(?m)^(DCGM_FI_DEV_GPU_UTIL\{.*\}) \d+$", r"\1 0", page)
        return web.Response(text=page + MORE)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Cards]:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()


async def reset(_asked: Asked, wire: Wire) -> None:
    """An engine that takes requests and drops them."""
    wire.rst()


@asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    """Everything running, without load."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(
            simulated(folder, "--kv-tokens", "8000", "--max-num-seqs", "32", model=MODEL)
        )
        broken = await stack.enter_async_context(ScriptedEngine(models=[MODEL]))
        broken.play = reset
        cards = await stack.enter_async_context(Cards().serving())
        policy = folder / "policy.yaml"
        policy.write_text(POLICY.format(bulk_queue=8))
        gateway = await stack.enter_async_context(
            GatewayProcess(
                folder / "gateway",
                f"engines:\n  - {{name: e1, url: '{engine.url}', profile: h100_llama31_8b_tp1, gpu_hour_price: 2.5, gpu: {{source: dcgm, url: '{cards.url}'}}}}\n"
                f"  - {{name: e2, url: '{broken.url}'}}\n"
                f"kwh_price: 0.3\npoll_s: 0.2\nworkers: 2\npolicy_file: {policy}\ntimeouts: {{drain_s: 5}}\n",
            )
        )
        await gateway.until_ready()
        yield Stage(gateway, engine, broken, cards, policy)


@asynccontextmanager
async def loaded(on: Stage) -> AsyncIterator[None]:
    """Load on the gateway, and some that the engine gets from others, for as long as the context lasts."""
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_again(http, on.gateway.public_url, "interactive", 16, 1), name=f"interactive {number}")
            for number in range(3)
        ]
        tasks += [
            group.create_task(_again(http, on.gateway.public_url, "bulk", 300, 2), name=f"bulk {number}")
            for number in range(24)
        ]
        # The engine's other users fill its memory, so that it throws sequences out.
        tasks += [group.create_task(_again(http, on.engine.url, "", 900, 1), name=f"foreign {n}") for n in range(10)]
        on.cards.busy = True
        yield
        for task in tasks:
            task.cancel()


async def _again(http: httpx.AsyncClient, url: str, class_name: str, tokens: int, sequences: int) -> None:
    body = {
        "model": MODEL,
        "prompt": "water " * (400 if class_name == "interactive" else 40),  # long enough to be known by its beginning
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "n": sequences,
    }
    headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    if class_name:
        headers["x-headrace-class"] = class_name
    while True:
        try:
            async with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
                async for _ in answer.aiter_bytes():
                    pass
                refused = answer.status_code != 200
        except httpx.TransportError:
            refused = True
        await asyncio.sleep(0.3 if refused else 0.05)
