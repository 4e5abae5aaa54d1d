"""Two engines, two classes, one private Valkey, all real processes, and load that says how each request ended.

Engines are simulated ones of 7 ms a token, so that works last as long as a test says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson

from tests.end_to_end.engine_process import EngineProcess, simulated
from tests.end_to_end.gateway_process import GatewayProcess

MODEL = "sim-8b"
POLICY = """\
version: 1
classes:
  interactive: {ttft_sla_s: 0.5, max_queue: 200, max_wait_s: 30}
  bulk: {max_queue: 500, max_wait_s: 60}
sizing:
  policy: fixed
  fixed: {total: 4, windows: {interactive: 4, bulk: 2}}
"""
ALL_ENDED_S = 25.0


@dataclass
class Engines:
    """Two simulated vLLMs."""

    first: EngineProcess
    second: EngineProcess

    def config(self, folder: Path) -> str:
        """Settings of a gateway before both; its policy is `folder/policy.yaml`."""
        (folder / "policy.yaml").write_text(POLICY)
        return (
            f"engines: [{{name: e1, url: '{self.first.url}'}}, {{name: e2, url: '{self.second.url}'}}]\n"
            f"poll_s: 0.2\npolicy_file: {folder / 'policy.yaml'}\ntimeouts: {{drain_s: 20}}\n"
        )

    async def running(self) -> list[float]:
        return [await engine.metric("vllm:num_requests_running") for engine in (self.first, self.second)]


@dataclass
class Told:
    """How one request ended for its client. status 0: its connection broke."""

    status: int = 0
    ttft_s: float = 0.0
    done: bool = False


@dataclass
class Load:
    """Requests under way against one gateway, and what has become of them."""

    gateway: GatewayProcess
    group: asyncio.TaskGroup
    http: httpx.AsyncClient
    told: dict[str, list[Told]] = field(default_factory=lambda: {"interactive": [], "bulk": []})

    def start(self, class_name: str, count: int, *, tokens: int) -> None:
        for _ in range(count):
            self.group.create_task(self._one(class_name, tokens))

    def ended(self, class_name: str) -> int:
        return len(self.told[class_name])

    def all_told(self) -> list[Told]:
        return [told for of_class in self.told.values() for told in of_class]

    async def _one(self, class_name: str, tokens: int) -> None:
        told = Told()
        body = {"model": MODEL, "prompt": "water", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        headers = {"x-headrace-class": class_name}
        started_s = time.monotonic()
        try:
            async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as answered:
                told.status = answered.status_code
                async for line in answered.aiter_lines():
                    if line.startswith("data: {") and not told.ttft_s:
                        told.ttft_s = time.monotonic() - started_s
                    told.done |= line == "data: [DONE]"
        except httpx.TransportError:
            told.done = False
        self.told[class_name].append(told)


@asynccontextmanager
async def loaded(gateway: GatewayProcess) -> AsyncIterator[Load]:
    """Everything that was started must have ended ALL_ENDED_S after the block, or it counts as hanging."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=gateway.public_url, limits=limits, timeout=ALL_ENDED_S, trust_env=False
    ) as http:
        async with asyncio.timeout(2 * ALL_ENDED_S), asyncio.TaskGroup() as group:
            yield Load(gateway, group, http)


@asynccontextmanager
async def two_engines(folder: Path) -> AsyncIterator[Engines]:
    """Both, for as long as the context lasts."""
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(simulated(folder)) for _ in range(2)]
        yield Engines(*both)


async def total(gateway: GatewayProcess, name: str, *labels: str) -> float:
    page = await gateway.metrics()
    return sum(
        value
        for series, value in page.items()
        if series.partition("{")[0] == name and all(label in series for label in labels)
    )


def holds(gateway: GatewayProcess, name: str, value: float, *labels: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return await total(gateway, name, *labels) == value

    return look


def at_least(gateway: GatewayProcess, name: str, value: float, *labels: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return await total(gateway, name, *labels) >= value

    return look


@dataclass(frozen=True)
class ServerRecord:
    """What a gateway wrote down of its private Valkey."""

    socket: str
    pid: int
    run_id: str


def server_of(folder: Path) -> ServerRecord:
    """The private server of the gateway below a folder."""
    return ServerRecord(**orjson.loads((folder / "gateway" / "state" / "server.json").read_bytes()))


def servers(folder: Path) -> list[int]:
    """All processes that hold the lock of a state directory's server, which it inherits and keeps for life."""
    lock = folder / "gateway" / "state" / "server.lock"
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and any(fd.readlink() == lock for fd in (process / "fd").iterdir()):
                found.append(int(process.name))
        except OSError:
            continue
    return found
