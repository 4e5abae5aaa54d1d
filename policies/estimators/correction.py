"""How much later than predicted first tokens come at the moment: a factor on predictions, quick to learn and to forget.

The step model learns an engine's speed from hundreds of observations; what holds for a minute (foreign traffic, clocks held
down, a cache that helps) is over before it notices. The factor is a mean of seen over predicted, of late; it stays in BOUNDS
and fades to 1. Only works that waited for no other's prompt teach it, and those are works that were let in: it may make
others more careful, or choose among engines. It must refuse nobody, since whoever is refused never shows that it was wrong.
"""

from __future__ import annotations

import math

WEIGHT = 0.2
"""Of one first token against all before it."""
BOUNDS = (0.7, 1.4)
FADES_S = 30.0


class Correction:
    """See the module header. One per engine."""

    __slots__ = ("_factor", "_seen_s")

    def __init__(self) -> None:
        self._factor = 1.0
        self._seen_s = -math.inf

    def saw(self, seen_s: float, predicted_s: float, now_s: float) -> None:
        """A first token took seen_s."""
        if not (math.isfinite(seen_s) and seen_s > 0 and predicted_s > 0):
            return
        low, high = BOUNDS
        before = self.factor(now_s)
        self._factor = before + WEIGHT * (min(high, max(low, seen_s / predicted_s)) - before)
        self._seen_s = now_s

    def factor(self, now_s: float) -> float:
        """Times the predicted time to a first token; 1 where nothing was seen of late."""
        return 1 + (self._factor - 1) * math.exp(-max(0.0, now_s - self._seen_s) / FADES_S)

    def __repr__(self) -> str:
        return f"<Correction {self._factor:.2f}>"
