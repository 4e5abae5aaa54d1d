"""How fast works of a class leave the queue, for honest Retry-After hints: a count that fades with a half-life."""

from __future__ import annotations

import math

HALF_LIFE_S = 10.0
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

    def per_s(self, class_name: str, now_s: float) -> float | None:
        """The rate now; None until a class has been watched for a tenth of the half-life."""
        found = self._rates.get(class_name)
        if found is None:
            return None
        rate, at_s, since_s = found
        watched_s = now_s - since_s
        if watched_s < HALF_LIFE_S / 10:
            return None
        complete = 1 - math.exp(-_DECAY_PER_S * watched_s)
        return rate * math.exp(-_DECAY_PER_S * (now_s - at_s)) / complete
