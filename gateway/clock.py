"""Two clocks: one for measuring here, one that every process of a pool agrees on.

`now_s` is this process's monotonic clock: durations, time-outs, TTFT. `pool_s` is our estimate of Redis TIME
(offset from the minimum-round-trip sample, advanced by the monotonic clock): ranks, deadlines, validity of sessions
and grants. Neither is the wall clock. Time comes through constructors, so that the whole gateway runs on a virtual
loop and a failing run is a seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def now_s(self) -> float:
        """Monotonic seconds of this process."""
        ...

    def pool_s(self) -> float:
        """Seconds on the pool clock (our estimate of Redis TIME)."""
        ...


class PoolClock:
    """Monotonic time plus a pool offset that the queue client corrects.

    error_s is half the round trip of the best sample kept: the offset's uncertainty.
    """

    __slots__ = ("_monotonic", "error_s", "offset_s")

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, *, offset_s: float | None = None) -> None:
        self._monotonic = monotonic
        self.offset_s = time.time() - monotonic() if offset_s is None else offset_s
        self.error_s = 0.0

    def now_s(self) -> float:
        return self._monotonic()

    def pool_s(self) -> float:
        return self._monotonic() + self.offset_s

    def correct(self, *, redis_s: float, sent_s: float, received_s: float) -> None:
        """Fold one Redis TIME reply: redis_s as answered, sent_s and received_s on this process's monotonic clock."""
        error_s = (received_s - sent_s) / 2
        self.offset_s = redis_s - (sent_s + received_s) / 2
        self.error_s = error_s

    def __repr__(self) -> str:
        return f"<PoolClock offset={self.offset_s:.3f}s error={self.error_s * 1000:.1f}ms>"
