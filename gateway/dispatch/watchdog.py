"""One timer wheel for every wait that is bounded: a sweep over what is under way instead of a timer per request.

A relay touches its own `last_byte_s` on each chunk, which costs an attribute store; arming and cancelling a loop timer
per chunk would cost half a microsecond and a heap entry each. The price is precision: a bound fires up to
`SWEEP_S` late, which is far inside what any time-out here means.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.clock import Clock

SWEEP_S = 0.2


class Watched(Protocol):
    """Something with bounds on its waits."""

    def check(self, now_s: float) -> None:
        """Act on any bound that has passed. Called about every SWEEP_S; must not raise."""
        ...


class Watchdog:
    """Sweeps what is registered. Runs as one task owned by the gateway's TaskGroup."""

    __slots__ = ("_clock", "_watched")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watched: dict[int, Watched] = {}

    def add(self, watched: Watched) -> None:
        self._watched[id(watched)] = watched

    def discard(self, watched: Watched) -> None:
        self._watched.pop(id(watched), None)

    def __len__(self) -> int:
        return len(self._watched)

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._clock.now_s()
            for watched in list(self._watched.values()):
                watched.check(now_s)
