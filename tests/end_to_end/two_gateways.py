"""Two gateways with two workers each, on one Valkey, before two simulated engines: all real processes.

Each gateway is a supervisor, a decider and two workers, so six processes decide about the same engines' places and two
of them may lead. The places are few and the same on both engines, so that a place taken twice shows at once in what the
engines count themselves.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gateway.queue.keys import prefix
from gateway.queue.redis_client import connect
from tests.end_to_end.engine_process import EngineProcess, eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.redis_servers import Server

OBJECTIVE_S = 1.0
POLICY = f"""\
version: 1
classes:
  interactive: {{ttft_sla_s: {OBJECTIVE_S}, max_queue: 500, max_wait_s: 30}}
  bulk: {{max_queue: 500, max_wait_s: 60}}
sizing:
  policy: fixed
  fixed: {{total: PLACES, windows: {{interactive: PLACES, bulk: BULK}}}}
"""
WORKERS = 2
READY_S = 20.0
SPEED = "0.5"
"""Engines at half speed make a token in 14 ms: load enough for the places, not for the machine that runs the tests."""


@dataclass
class Pool:
    """See the module header.

    stores               the address at which each gateway finds the store
    places, for_bulk     on each engine: of all classes, and of bulk
    """

    folder: Path
    store: Server
    engines: list[EngineProcess]
    stores: Mapping[str, str]
    stack: AsyncExitStack
    places: int
    for_bulk: int
    gateways: dict[str, GatewayProcess] = field(default_factory=dict)

    async def start(self, *names: str) -> None:
        """Start these gateways, or start them again."""

        async def one(name: str) -> None:
            gateway = GatewayProcess(self.folder / name, self._config(name))
            self.gateways[name] = await self.stack.enter_async_context(gateway)

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(one(name))

    async def settled(self) -> None:
        """Start again what was killed, and wait until every process serves, one leads, and nothing runs or waits."""
        ended = [name for name, gateway in self.gateways.items() if gateway.ended]
        await self.start(*ended)

        async def look() -> bool:
            for gateway in self.gateways.values():
                if await self.unready(gateway):
                    return False
            return await self.leader() is not None and sum(await self.busy()) == 0

        await eventually(look, within_s=READY_S)

    async def unready(self, gateway: GatewayProcess) -> str:
        """Why a gateway is not whole; "" when it is."""
        states = [one["state"] for one in (await gateway.status())["workers"]]
        if states != ["up"] * WORKERS:
            return f"workers are {states}"
        await gateway.until_ready()
        return ""

    async def leader(self) -> str | None:
        """The gateway that leads, as the gateways tell; None when none says so, or several do."""
        leading = [name for name, gateway in self.gateways.items() if (await gateway.status()).get("leads")]
        return leading[0] if len(leading) == 1 else None

    async def roles(self) -> tuple[str, str]:
        """The gateway that leads and the other one."""
        await self.settled()
        leader = await self.leader()
        assert leader is not None
        (other,) = self.gateways.keys() - {leader}
        return leader, other

    async def processes(self, name: str) -> Processes:
        gateway = self.gateways[name]
        status = await gateway.status()
        return Processes(gateway.pid, status["decider"]["pid"], [one["pid"] for one in status["workers"]])

    async def busy(self) -> list[float]:
        """What each engine runs and has waiting, by its own count."""
        return [
            await engine.metric("vllm:num_requests_running") + await engine.metric("vllm:num_requests_waiting")
            for engine in self.engines
        ]

    async def entries(self) -> dict[str, int]:
        """What the store holds of works, by key; nothing when it holds nothing."""
        client = connect(self.store.url)
        try:
            works = await client.hlen(prefix("default") + "works")
            sets = {name: await client.zcard(prefix("default") + name) for name in ("waiting", "owned", "grants")}
        finally:
            await client.aclose()
        return {name: count for name, count in {"works": works, **sets}.items() if count}

    def _config(self, name: str) -> str:
        policy = self.folder / "policy.yaml"
        policy.write_text(POLICY.replace("PLACES", str(self.places)).replace("BULK", str(self.for_bulk)))
        engines = ", ".join(f"{{name: e{number}, url: '{engine.url}'}}" for number, engine in enumerate(self.engines))
        return (
            f"engines: [{engines}]\nredis_url: {self.stores[name]}\nworkers: {WORKERS}\npoll_s: 0.2\n"
            f"policy_file: {policy}\ntimeouts: {{drain_s: 10}}\n"
        )


@dataclass(frozen=True)
class Processes:
    """One gateway's."""

    supervisor: int
    decider: int
    workers: list[int]

    @property
    def all(self) -> list[int]:
        return [self.supervisor, self.decider, *self.workers]


@asynccontextmanager
async def two_gateways(
    folder: Path, store: Server, *, stores: Mapping[str, str] | None = None, places: int = 6, for_bulk: int = 4
) -> AsyncIterator[Pool]:
    """Gateways a and b, which find the store at its own address by default; see `Pool`."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(simulated(folder, "--speed", SPEED)) for _ in range(2)]
        pool = Pool(folder, store, engines, stores or {"a": store.url, "b": store.url}, stack, places, for_bulk)
        await pool.start("a", "b")
        yield pool


@asynccontextmanager
async def frozen(pids: Iterable[int]) -> AsyncIterator[None]:
    """SIGSTOP now, SIGCONT at the end."""
    stopped = list(pids)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def gone(pids: Iterable[int]) -> bool:
    """None of them exists any more, except as a zombie that nobody has waited for yet."""
    return all(_state(pid) in {"", "Z"} for pid in pids)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def holders(server_port: int, pids: Iterable[int]) -> dict[int, int]:
    """Which process holds each connection that a server has accepted: client's port -> pid."""
    inodes: dict[str, int] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
        if local == server_port and remote:
            inodes[f"socket:[{fields[9]}]"] = remote
    held: dict[int, int] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            client = inodes.get(str(fd.readlink()))
            if client is not None:
                held[client] = pid
    return held
