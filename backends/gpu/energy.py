"""Joules of one engine over time, busy and idle apart: from the cards' counters, else from their power.

A counter is exact over any gap, but it wraps (some count millijoules in 32 bits), starts anew when the driver does,
and is refreshed only every half minute behind a DCGM exporter. Power is there more often than a counter, but what
lies between two readings is a guess, so it is integrated over short gaps only. What neither tells is counted as
unmeasured time and never invented.

What stood still while nobody looked is told to the state in which it was used: an interval is busy if the engine was
busy at any time in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from backends.gpu.base import GpuField, GpuReading

GAP_MAX_S: Final = 10.0
"""Power between two readings further apart is not integrated."""

CARD_MAX_W: Final = 20_000.0
"""No card draws more: a counter that grew faster has jumped."""

WRAP_J: Final = 2**32 / 1000


@dataclass(frozen=True, slots=True)
class Energy:
    """What was used so far. busy_s and idle_s are the times over which the joules were measured."""

    busy_j: float = 0.0
    idle_j: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    unmeasured_s: float = 0.0

    @property
    def total_j(self) -> float:
        return self.busy_j + self.idle_j

    @property
    def idle_power_w(self) -> float | None:
        """Mean power while the engine had nothing to do; None before it ever had not."""
        return self.idle_j / self.idle_s if self.idle_s > 0 else None


class EnergyMeter:
    """Adds up one engine's readings; one owner."""

    __slots__ = ("_busy", "_cards", "_last_s", "_open_s", "total")

    def __init__(self) -> None:
        self.total = Energy()
        self._cards: dict[str, _CardMeter] = {}
        self._last_s: float | None = None
        self._open_s = 0.0
        self._busy = False

    def add(self, cards: Iterable[GpuReading], at_s: float, *, busy: bool) -> Energy:
        """Fold in one read and return the new total.

        at_s   monotonic, later than the last one
        busy   the engine had work at this moment
        """
        parts = [
            self._cards.setdefault(card.id, _CardMeter()).add(
                at_s, card.value(GpuField.ENERGY_J_TOTAL), card.value(GpuField.POWER_W)
            )
            for card in cards
        ]
        last_s, self._last_s = self._last_s, at_s
        self._busy |= busy
        if last_s is None:
            return self.total
        interval_s = at_s - last_s
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or not parts:
            self._put(sum(known), self._open_s, unmeasured_s=interval_s)
        elif (joules := sum(known)) > 0:
            self._put(joules, self._open_s + interval_s)
        else:
            self._open_s += interval_s  # the counters have not moved yet: this time belongs to their next step
            return self.total
        self._open_s = 0.0
        self._busy = busy
        return self.total

    def _put(self, joules: float, seconds: float, *, unmeasured_s: float = 0.0) -> None:
        of = self.total
        unmeasured_s += of.unmeasured_s
        if self._busy:
            self.total = replace(of, busy_j=of.busy_j + joules, busy_s=of.busy_s + seconds, unmeasured_s=unmeasured_s)
        else:
            self.total = replace(of, idle_j=of.idle_j + joules, idle_s=of.idle_s + seconds, unmeasured_s=unmeasured_s)


class _CardMeter:
    """Joules of one card between calls.

    _moved_s        when the counter last moved
    _by_power_j     joules told from power since the counter was last seen, which its next step holds again
    """

    __slots__ = ("_at_s", "_by_power_j", "_counter_j", "_moved_s", "_power_w")

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._power_w: float | None = None
        self._counter_j: float | None = None
        self._moved_s = 0.0
        self._by_power_j = 0.0

    def add(self, at_s: float, counter_j: float | None, power_w: float | None) -> float | None:
        """Joules since the last call; None when nothing tells."""
        counted = self._step(at_s, counter_j) if counter_j else None  # a counter at 0 counts nothing
        if counted is None:
            found = self._integrated(at_s, power_w)
            self._by_power_j += found or 0.0
        else:
            found = max(0.0, counted - self._by_power_j)
        if counter_j:
            if counter_j != self._counter_j:
                self._moved_s = at_s
            self._counter_j = counter_j
            self._by_power_j = 0.0
        self._at_s, self._power_w = at_s, power_w
        return found

    def _step(self, at_s: float, counter_j: float) -> float | None:
        if self._counter_j is None:
            return None
        most_j = CARD_MAX_W * max(1.0, at_s - self._moved_s)
        step_j = counter_j - self._counter_j
        if step_j < 0 and self._counter_j <= WRAP_J:
            wrapped_j = step_j + WRAP_J
            if wrapped_j <= most_j:
                return wrapped_j
        if step_j < 0:
            step_j = counter_j  # started anew: what it shows was used since
        return step_j if step_j <= most_j else None

    def _integrated(self, at_s: float, power_w: float | None) -> float | None:
        if self._at_s is None or self._power_w is None or power_w is None:
            return None
        gap_s = at_s - self._at_s
        return (self._power_w + power_w) / 2 * gap_s if gap_s <= GAP_MAX_S else None
