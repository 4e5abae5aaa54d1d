"""Which signals of an engine stand still while our own streams there move: numbers that nobody writes any more.

A page may be served from a cache, by a proxy, or by an exporter whose engine has left it; a renamed gauge may stay at 0 for
ever beside its successor. Such a number is fresh by its age. So it is judged by what must have changed it:

    all that moves   tokens came on our streams for FROZEN_S and longer, and the token counters of the page are as before
    KV in use        our works there hold more than a tenth of the capacity, and it says that under a hundredth is used

A frozen signal is known to policies as such, and used by none of them, until it moves again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.base import Sample, Signal

FROZEN_S = 5.0
HELD_SHARE, EMPTY = 0.1, 0.01
MOVING = (
    Signal.RUNNING,
    Signal.WAITING,
    Signal.KV_USED_FRACTION,
    Signal.GENERATION_TOKENS_TOTAL,
    Signal.PROMPT_TOKENS_TOTAL,
    Signal.PREEMPTIONS_TOTAL,
)
_COUNTERS = (Signal.GENERATION_TOKENS_TOTAL, Signal.PROMPT_TOKENS_TOTAL)


@dataclass(slots=True)
class FrozenWatch:
    """One engine's. Times are monotonic."""

    frozen: Mapping[Signal, float] = field(default_factory=dict)
    _counted: tuple[float | None, ...] = ()
    _counted_s: float = -math.inf
    _moving_since_s: float = math.inf
    _moved_s: float = -math.inf
    _full_since_s: float = math.inf

    def look(self, sample: Sample, *, moved_s: float, held_tokens: int, now_s: float) -> Mapping[Signal, float]:
        """For how long each frozen signal has stood still.

        moved_s       when a token last came on a stream of ours there
        held_tokens   KV that our works hold there, by the ledger
        """
        found: dict[Signal, float] = {}
        counted = tuple(sample.value(counter) for counter in _COUNTERS)
        # Streams count as moving from the first token after the counters' last change, without a pause of a second.
        if counted != self._counted or moved_s - self._moved_s > 1.0 or now_s - moved_s > 1.0:
            self._moving_since_s = math.inf
        if counted != self._counted:
            self._counted, self._counted_s = counted, now_s
        elif moved_s > self._moved_s:
            self._moving_since_s = min(self._moving_since_s, moved_s)
        self._moved_s = max(self._moved_s, moved_s)
        if any(value is not None for value in counted) and now_s - self._moving_since_s > FROZEN_S:
            found = {signal: now_s - self._counted_s for signal in MOVING if signal in sample.values}
        self._look_at_kv(sample, held_tokens, now_s, found)
        self.frozen = found
        return found

    def _look_at_kv(self, sample: Sample, held_tokens: int, now_s: float, found: dict[Signal, float]) -> None:
        used, capacity = sample.value(Signal.KV_USED_FRACTION), sample.value(Signal.KV_CAPACITY_TOKENS)
        if used is None or capacity is None or used > EMPTY or held_tokens <= HELD_SHARE * capacity:
            self._full_since_s = math.inf
            return
        self._full_since_s = min(self._full_since_s, now_s)
        if now_s - self._full_since_s > FROZEN_S:
            found[Signal.KV_USED_FRACTION] = now_s - self._full_since_s
