"""What must hold at every instant, looked at all the time: engines' own counts, and who says that it leads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from tests.end_to_end.engine_process import EngineProcess
from tests.end_to_end.gateway_process import GatewayProcess
from tests.gateway.ingress.raw_client import RawClient, request

ENGINES_EVERY_S = 0.02
LEADERS_EVERY_S = 0.1
LOOK_S = 1.0
"""A gateway that tells nothing for so long is taken to say nothing."""


@dataclass
class WindowWatch:
    """most: the most that an engine ever ran and had waiting, by its own count, and when that was.

    looks   how often it was looked at
    """

    most: float = 0.0
    most_at_s: float = 0.0
    looks: int = 0

    async def engine(self, engine: EngineProcess) -> None:
        """Look until cancelled."""
        async with RawClient(engine.port) as client:
            while True:
                page = (await client.ask(request("GET", "/metrics"), "GET")).body
                busy = sum(
                    float(line.rsplit(b" ", 1)[1])
                    for line in page.splitlines()
                    if line.startswith((b"vllm:num_requests_running", b"vllm:num_requests_waiting{"))
                )
                self.looks += 1
                if busy > self.most:
                    self.most, self.most_at_s = busy, time.monotonic()
                await asyncio.sleep(ENGINES_EVERY_S)


@dataclass(frozen=True)
class Look:
    """What a gateway's metrics said between two instants."""

    name: str
    asked_s: float
    told_s: float
    leads: bool


@dataclass
class LeaderWatch:
    """Every look at every gateway's `headrace_leader`, in order."""

    looks: list[Look] = field(default_factory=list)

    async def gateway(self, name: str, gateway: GatewayProcess) -> None:
        """Look until cancelled. A gateway that is dead or frozen says nothing, so it does not say that it leads."""
        while True:
            asked_s, leads = time.monotonic(), False
            try:
                async with asyncio.timeout(LOOK_S):
                    leads = (await gateway.metrics()).get('headrace_leader{pool="default"}', 0.0) == 1
            except (TimeoutError, httpx.TransportError):
                pass
            self.looks.append(Look(name, asked_s, time.monotonic(), leads))
            await asyncio.sleep(LEADERS_EVERY_S)

    def at_once(self) -> list[tuple[Look, Look, Look]]:
        """Two who led at once: one that said so before and after the other did."""
        leading = [look for look in self.looks if look.leads]
        found = []
        for name in {look.name for look in self.looks}:
            own = [look for look in self.looks if look.name == name]
            for before, after in pairwise(own):
                if before.leads and after.leads:
                    found += [
                        (before, look, after)
                        for look in leading
                        if look.name != name and before.told_s <= look.asked_s and look.told_s <= after.asked_s
                    ]
        return found

    def first_s(self, name: str, since_s: float) -> float:
        """Seconds from then until a gateway first said that it leads."""
        return next(
            look.told_s - since_s for look in self.looks if look.name == name and look.leads and look.asked_s > since_s
        )


@asynccontextmanager
async def watched(
    engines: list[EngineProcess], gateways: Mapping[str, GatewayProcess]
) -> AsyncIterator[tuple[WindowWatch, LeaderWatch]]:
    """Look all the time, for as long as the context lasts."""
    windows, leaders = WindowWatch(), LeaderWatch()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(windows.engine(engine)) for engine in engines]
        tasks += [group.create_task(leaders.gateway(name, gateway)) for name, gateway in gateways.items()]
        try:
            yield windows, leaders
        finally:
            for task in tasks:
                task.cancel()
