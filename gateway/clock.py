"""Two clocks: one for measuring here, one that every process of a pool agrees on.

`now_s` is this process's monotonic clock: durations, time-outs, TTFT. `pool_s` is our estimate of Redis TIME
(offset from the minimum-round-trip sample, advanced by the monotonic clock): ranks, deadlines, validity of sessions
and grants. Neither is the wall clock. Time comes through constructors, so that the whole gateway runs on a virtual
loop and a failing run is a seed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

SAMPLES_KEPT = 12
"""A minute of samples at one every 5 s."""

DRIFT_PER_S = 1e-4
"""How fast two machines' clocks may drift apart: 100 ppm, twice what a bad quartz does."""

CLOCK_ERROR_MAX_S = 0.1
"""What an estimate of the pool clock may be wrong by where processes judge each other: two of them, in opposite directions,
stay inside the tenth of a leader's validity that is kept back."""

RESOLUTION_S = 0.001
"""The store's clock is read in whole milliseconds."""


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

    A reply was written somewhere between sending and receiving, so half the round trip bounds a sample's error. Of the
    last SAMPLES_KEPT samples the one with the least error *now* is believed: its half round trip plus what the two
    clocks may have drifted apart since. A slow reply therefore changes nothing, and a good old one is given up in time.

    error_s is that error of the sample believed, as of the last correction; inf before the first one, when the offset is
    the wall clock's.
    """

    __slots__ = ("_monotonic", "_samples", "error_s", "offset_s")

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, *, offset_s: float | None = None) -> None:
        self._monotonic = monotonic
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_KEPT)
        self.offset_s = time.time() - monotonic() if offset_s is None else offset_s
        self.error_s = math.inf if offset_s is None else 0.0

    def now_s(self) -> float:
        return self._monotonic()

    def pool_s(self) -> float:
        return self._monotonic() + self.offset_s

    def correct(self, *, redis_s: float, sent_s: float, received_s: float) -> None:
        """Fold one Redis TIME reply: redis_s as answered, sent_s and received_s on this process's monotonic clock.

        A sample that contradicts an older one by more than both can be wrong (the server's clock was set, another server
        took over) ends the belief in all older ones.
        """
        sample = _Sample(redis_s - (sent_s + received_s) / 2, (received_s - sent_s) / 2, received_s)
        if any(sample.contradicts(one) for one in self._samples):
            self._samples.clear()
        self._samples.append(sample)
        best = min(self._samples, key=lambda one: one.error_s(received_s))
        self.offset_s = best.offset_s
        self.error_s = best.error_s(received_s)

    def __repr__(self) -> str:
        return f"<PoolClock offset={self.offset_s:.3f}s error={self.error_s * 1000:.1f}ms>"


@dataclass(frozen=True, slots=True)
class _Sample:
    """One TIME reply: the offset if it was written half-way, and how wrong that may be."""

    offset_s: float
    half_trip_s: float
    taken_s: float

    def error_s(self, now_s: float) -> float:
        return self.half_trip_s + (now_s - self.taken_s) * DRIFT_PER_S

    def contradicts(self, older: _Sample) -> bool:
        apart_s = abs(self.offset_s - older.offset_s)
        return apart_s > self.half_trip_s + older.error_s(self.taken_s) + RESOLUTION_S
