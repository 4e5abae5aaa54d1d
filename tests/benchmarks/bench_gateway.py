"""The data path: what the gateway adds to a first token, and what a request, a chunk and an open stream cost it.

    python -m tests.benchmarks.bench_gateway [--quick] [--json FILE]

Engine, gateway and generator are processes of this machine; the generator is `headrace load`'s, the engine
`tests.benchmarks.fast_engine`. Latency is measured directly and through the gateway in turn, so that what the machine
does meanwhile falls on both; CPU and memory are the gateway process's own accounting, which other processes hardly touch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Protocol

import httpx
import uvloop

from gateway.load.arrivals import arrivals, steady
from gateway.load.client import Client, Exchange, Target
from gateway.load.figures import Objectives, Record, figures
from gateway.load.run import ClosedLoop, answered, open_loop
from gateway.replay.trace import Request
from tests.end_to_end.engine_process import EngineProcess
from tests.end_to_end.gateway_process import GatewayProcess

POLICY = """
version: 1
classes:
  interactive: {ttft_sla_s: 30.0, max_queue: 4000}
  bulk: {}
sizing: {policy: fixed, fixed: {total: 4096, windows: {interactive: 4000, bulk: 16}}}
"""
PROMPT_TOKENS = 60
RATE_RPS = 20.0
STREAM_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int = 5
    round_s: float = 10.0
    requests: int = 20_000
    chunk_streams: int = 64
    chunk_tokens: int = 1_000
    held_streams: int = 1_200


QUICK = Size(rounds=2, round_s=2.0, requests=1_500, chunk_streams=32, chunk_tokens=200, held_streams=200)


@dataclass(frozen=True, slots=True)
class Measured:
    """All of it. CPU in microseconds; a generator's and an engine's share is told beside the gateway's."""

    direct_ttft_p50_us: float
    direct_ttft_p99_us: float
    added_ttft_p50_us: float
    added_ttft_p99_us: float
    gateway_us_per_request: float
    generator_us_per_request: float
    gateway_us_per_chunk: float
    generator_us_per_chunk: float
    engine_us_per_chunk: float
    rss_idle_mib: float
    rss_kib_per_stream: float
    streams_held: int
    failed: int


def _alone(pid: int) -> Sequence[int]:
    return (pid,)


class Served(Protocol):
    """A gateway, ours or another, as a process."""

    @property
    def public_url(self) -> str: ...

    @property
    def pid(self) -> int: ...


class Bench:
    """One gateway before one engine. counted: of which processes CPU and memory are told, by the gateway's id."""

    def __init__(
        self, engine: EngineProcess, gateway: Served, size: Size, *, counted: Callable[[int], Sequence[int]] = _alone
    ) -> None:
        self._engine = engine
        self._gateway = gateway
        self._size = size
        self._counted = counted
        self.failed = 0

    async def all(self) -> Measured:
        """Everything, one after another."""
        await self._looped(self._gateway.public_url, 500, clients=8, stream=False)
        idle_kib = self._rss_kib()
        direct, added = await self._added_ttft()
        per_request = await self._per_request()
        per_chunk = await self._per_chunk()
        held, held_kib = await self._held()
        return Measured(
            direct_ttft_p50_us=direct[0],
            direct_ttft_p99_us=direct[1],
            added_ttft_p50_us=added[0],
            added_ttft_p99_us=added[1],
            gateway_us_per_request=per_request[0],
            generator_us_per_request=per_request[1],
            gateway_us_per_chunk=per_chunk[0],
            generator_us_per_chunk=per_chunk[1],
            engine_us_per_chunk=per_chunk[2],
            rss_idle_mib=idle_kib / 1024,
            rss_kib_per_stream=held_kib,
            streams_held=held,
            failed=self.failed,
        )

    async def _added_ttft(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """p50 and p99 direct, and what the gateway adds to each: medians of the rounds."""
        found: dict[str, list[tuple[float, float]]] = {"direct": [], "through": []}
        for number in range(self._size.rounds):
            pair = [("direct", self._engine.url), ("through", self._gateway.public_url)]
            for name, url in pair if number % 2 else reversed(pair):
                found[name].append(await self._ttft(url, number))
        direct = tuple(statistics.median(one[at] for one in found["direct"]) for at in (0, 1))
        added = tuple(
            statistics.median(
                through[at] - alone[at] for through, alone in zip(found["through"], found["direct"], strict=True)
            )
            for at in (0, 1)
        )
        return (1e6 * direct[0], 1e6 * direct[1]), (1e6 * added[0], 1e6 * added[1])

    async def _ttft(self, url: str, seed: int) -> tuple[float, float]:
        record, client = self._client(url)
        times = arrivals(steady(RATE_RPS, self._size.round_s), cv=1.0, seed=seed)
        await open_loop(client, (Request(time_s, PROMPT_TOKENS, STREAM_TOKENS) for time_s in times))
        await self._ended(client, record)
        ttft = figures([record], self._size.round_s).ttft
        assert ttft.p50_s is not None
        assert ttft.p99_s is not None
        return ttft.p50_s, ttft.p99_s

    async def _per_request(self) -> tuple[float, float]:
        """CPU of one whole answer: the gateway's and the generator's, microseconds."""
        url, count = self._gateway.public_url, self._size.requests
        before, mine = self._cpu_s(), time.process_time()
        await self._looped(url, count, clients=32, stream=False)
        return 1e6 * (self._cpu_s() - before) / count, 1e6 * (time.process_time() - mine) / count

    async def _per_chunk(self) -> tuple[float, float, float]:
        """CPU of one chunk of a stream, less what the request itself costs (measured as a stream of one chunk)."""
        size, url = self._size, self._gateway.public_url
        shares: list[tuple[float, float, float]] = []
        assert self._engine.process is not None
        engine_pid = self._engine.process.pid
        for tokens in (1, size.chunk_tokens):
            before = self._cpu_s(), time.process_time(), cpu_s(engine_pid)
            await self._looped(url, size.chunk_streams, clients=size.chunk_streams, stream=True, tokens=tokens)
            after = self._cpu_s(), time.process_time(), cpu_s(engine_pid)
            shares.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
        chunks = size.chunk_streams * (size.chunk_tokens - 1)
        first, rest = shares
        return (
            1e6 * (rest[0] - first[0]) / chunks,
            1e6 * (rest[1] - first[1]) / chunks,
            1e6 * (rest[2] - first[2]) / chunks,
        )

    async def _held(self) -> tuple[int, float]:
        """So many streams open at once, and the memory that each takes, KiB."""
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.get(f"{self._engine.url}/tick/0.5")
            before_kib = self._rss_kib()
            begun = Begun()
            client = Client(Target(self._gateway.public_url, "fast"), {"": begun})
            for _ in range(self._size.held_streams):
                client.send(Request(0.0, PROMPT_TOKENS, 10_000), client.clock())
                await asyncio.sleep(0.001)
            async with asyncio.timeout(60):
                while begun.streams < self._size.held_streams:
                    await asyncio.sleep(0.05)
            held, grown_kib = client.under_way, self._rss_kib() - before_kib
            await client.close()
            await http.get(f"{self._engine.url}/tick/0.01")
        return held, grown_kib / held

    async def _looped(self, url: str, count: int, *, clients: int, stream: bool, tokens: int = 1) -> None:
        record, client = self._client(url, stream=stream)
        requests: Iterator[Request] = iter(request for request, _ in zip(_same(tokens), range(count), strict=False))
        await ClosedLoop(client, requests, clients=clients).run()
        await self._ended(client, record)

    async def _ended(self, client: Client, record: Record) -> None:
        await answered(client, within_s=30.0)
        await client.close()
        self.failed += sum(record.errors.values())

    def _client(self, url: str, *, stream: bool = True) -> tuple[Record, Client]:
        record = Record(time.monotonic, Objectives())
        return record, Client(Target(url, "fast", stream=stream), {"": record})

    def _cpu_s(self) -> float:
        return sum(map(cpu_s, self._counted(self._gateway.pid)))

    def _rss_kib(self) -> int:
        return sum(map(rss_kib, self._counted(self._gateway.pid)))


class Begun:
    """Counts streams that have shown something."""

    def __init__(self) -> None:
        self.streams = 0

    def start(self) -> None:
        """Nothing to count yet."""

    def first_token(self, ttft_s: float) -> None:
        self.streams += 1

    def tokens(self, count: int, gap_s: float | None) -> None:
        """More of the same."""

    def ended(self, exchange: Exchange) -> None:
        """Cut by the benchmark."""


def _same(tokens: int) -> Iterator[Request]:
    return repeat(Request(0.0, PROMPT_TOKENS, tokens))


def rss_kib(pid: int) -> int:
    """Resident memory of one process now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def cpu_s(pid: int) -> float:
    """User and system time of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main(size: Size) -> Measured:
    """Start everything, measure, end everything."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        engine = await stack.enter_async_context(EngineProcess(folder, "tests.benchmarks.fast_engine"))
        policy = folder / "policy.yaml"
        policy.write_text(POLICY)
        config = (
            f"engines: [{{name: e, url: '{engine.url}', kind: vllm, gpu: {{source: none}}}}]\npolicy_file: {policy}\n"
        )
        gateway = await stack.enter_async_context(GatewayProcess(folder / "gateway", config))
        return await Bench(engine, gateway, size).all()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        measured = asdict(runner.run(main(QUICK if args.quick else Size())))
    for name, value in measured.items():
        print(f"{name:28} {value:12,.1f}")
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
