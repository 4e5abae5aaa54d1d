"""How fast works of a class leave the queue while some wait, for honest Retry-After hints: a count that fades with a half-life."""

from __future__ import annotations

import math

from policies.admission import WORK_UNKNOWN_S

HALF_LIFE_S = 10.0
WATCHED_S = HALF_LIFE_S / 10
"""For so long a class has to be watched before a rate is told."""
_DECAY_PER_S = math.log(2) / HALF_LIFE_S


class Flow:
    """Grants per second by class, exponentially faded; one float pair per class."""

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates: dict[str, tuple[float, float, float]] = {}

    def left(self, class_name: str, now_s: float) -> None:
        """A work of the class left the queue (or never had to wait)."""
        rate, at_s, since_s = self._rates.get(class_name, (0.0, now_s, now_s))
        faded = rate * math.exp(-_DECAY_PER_S * (now_s - at_s)) + _DECAY_PER_S
        self._rates[class_name] = (faded, now_s, since_s)

    def waits(self, class_name: str, now_s: float) -> None:
        """A work of the class begins to wait where none did: since the last one left, nobody wanted to leave.

        That time does not count. A rate so low that it says more of the demand than of the engines is forgotten.
        """
        found = self._rates.get(class_name)
        if found is None:
            return
        _, at_s, since_s = found
        known = self.per_s(class_name, at_s)
        if known is None or known * WORK_UNKNOWN_S < 1:
            del self._rates[class_name]
        else:
            self._rates[class_name] = (found[0], now_s, since_s + now_s - at_s)

    def per_s(self, class_name: str, now_s: float) -> float | None:
        """The rate now; None until a class has been watched for WATCHED_S."""
        found = self._rates.get(class_name)
        if found is None:
            return None
        rate, at_s, since_s = found
        watched_s = now_s - since_s
        if watched_s < WATCHED_S:
            return None
        complete = 1 - math.exp(-_DECAY_PER_S * watched_s)
        return rate * math.exp(-_DECAY_PER_S * (now_s - at_s)) / complete
