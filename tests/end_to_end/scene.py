"""A pool of gateways under load and under watch, while a test harms some of it.

Whatever the harm, the engines' own counts never exceed the windows, no two gateways say at once that they lead, and
interactive work is in time again soon: that is looked at here, once for all tests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.end_to_end.traffic import Told, Traffic, traffic
from tests.end_to_end.two_gateways import OBJECTIVE_S, Pool, holders
from tests.end_to_end.watches import LeaderWatch, WindowWatch, watched

BACK_S = 3.0
LOOKED_AT_S = 2.5


@dataclass
class Scene:
    """See the module header. leader, other: the gateways' parts when the scene began.

    in_time_s   for a first token: the objective, or the worst before any harm where the machine alone is later than that
    """

    pool: Pool
    leader: str
    other: str
    streams: Traffic
    windows: WindowWatch
    leaders: LeaderWatch
    in_time_s: float
    late: list[Told] = field(default_factory=list)

    async def kill(self, name: str, *victims: int) -> set[int]:
        """kill -9 processes of a gateway at one instant; the client's ports of the connections that die with them."""
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        dying = set(holders(self.pool.gateways[name].port, victims))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        return dying

    async def attained(self, harmed_s: float, *names: str) -> None:
        """Watch interactive streams until enough were started more than BACK_S after the harm: all are in time again."""
        await asyncio.sleep(harmed_s + BACK_S + LOOKED_AT_S + self.in_time_s - time.monotonic())
        self.late += self.streams.late(harmed_s + BACK_S, self.in_time_s, *names)


@asynccontextmanager
async def loaded(pool: Pool) -> AsyncIterator[Scene]:
    """Load on both gateways until the block ends; checks what holds in every scene when all streams have ended."""
    leader, other = await pool.roles()
    ports = {name: gateway.port for name, gateway in pool.gateways.items()}
    async with watched(pool.engines, pool.gateways) as (windows, leaders):
        async with traffic(ports, pool.engines[0].port) as streams:
            streams.steady(interactive_per_s=8, bulk=2 * pool.for_bulk)
            await streams.flows(leader, other)
            usual_s = max(told.ttft_s for told in streams.of("interactive") if told.first_s)
            scene = Scene(pool, leader, other, streams, windows, leaders, max(OBJECTIVE_S, usual_s))
            yield scene
    assert windows.most in range(pool.for_bulk + 1, pool.places + 1)
    assert leaders.at_once() == []
    assert scene.late == []
