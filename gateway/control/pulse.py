"""What this process sees of one engine by its own calls: how they ended, and when something last moved.

Nothing is done per token: a relay keeps the time of its last byte anyway, and that is read when somebody asks.
Health pages say that a web server lives; only this says that an engine works.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Protocol

from gateway.clock import Clock
from gateway.queue.base import Vitals


class Blame(StrEnum):
    """What the end of a call says of its engine."""

    SERVED = "served"
    """It did its part: a whole answer, or a proper refusal of a bad request."""
    FAILED = "failed"
    """It broke, or kept silent past a bound."""
    DRAINING = "draining"
    """It said that it is shutting down."""
    NEITHER = "neither"
    """Busy, or cut short by the client or by us."""


class Heard(Protocol):
    """A call under way. Times are monotonic."""

    sent_s: float
    streams: bool

    @property
    def moved_s(self) -> float | None:
        """When something of its answer last came; None before anything did."""
        ...


class Pulse:
    """See the module header. Written by the process's calls, read by whoever reports or judges."""

    __slots__ = ("_draining", "_failed", "_moved_s", "_served", "_under_way")

    def __init__(self) -> None:
        self._under_way: dict[int, Heard] = {}
        self._served = self._failed = self._draining = 0
        self._moved_s = -math.inf

    def began(self, call: Heard) -> None:
        """A call was sent."""
        self._under_way[id(call)] = call

    def ended(self, call: Heard, blame: Blame) -> None:
        """It is over. Idempotent: only the first end counts."""
        if self._under_way.pop(id(call), None) is None:
            return
        if call.moved_s is not None:
            self._moved_s = max(self._moved_s, call.moved_s)
        if blame is Blame.SERVED:
            self._served += 1
        elif blame is Blame.FAILED:
            self._failed += 1
        elif blame is Blame.DRAINING:
            self._draining += 1

    def vitals(self, clock: Clock) -> Vitals:
        """All of it, in pool time. O(calls under way)."""
        moved_s = self._moved_s
        waiting_s = math.inf
        for call in self._under_way.values():
            if call.moved_s is not None and call.moved_s > moved_s:
                moved_s = call.moved_s
            # A whole answer shows nothing until its end, so that its silence says nothing.
            if call.streams and call.sent_s < waiting_s:
                waiting_s = call.sent_s
        ahead_s = clock.pool_s() - clock.now_s()
        return Vitals(
            served=self._served,
            failed=self._failed,
            draining=self._draining,
            moved_ms=0 if moved_s == -math.inf else int((moved_s + ahead_s) * 1000),
            waiting_ms=0 if waiting_s == math.inf else int((waiting_s + ahead_s) * 1000),
        )

    def __repr__(self) -> str:
        return f"<Pulse {len(self._under_way)} under way, {self._served} served, {self._failed} failed>"
