"""One limit on the works in flight on an engine, shared among the classes: for policies that learn such a number.

Classes without a TTFT objective together never fill the last eighth of it, nor of the engine's known seats, at least
one place, so that works with an objective always find room; and they are bound by what they hold, not by what is free,
so that a steady urgent load does not shut them out. A limit is at least two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from policies.limits.fixed import taken, whole_seats
from policies.schema import Policy
from policies.sizing import Window
from policies.vocabulary import EngineView, Guard, GuardReading, Verdict, Work


class SharedLimit:
    """See the module header. `limits` holds the limit in force by engine, as a real number; `start` is a new one's."""

    __slots__ = ("_least", "_most", "_urgent", "limits", "start")

    def __init__(self, policy: Policy, *, start: int, least: int, most: int) -> None:
        self._urgent: Collection[str] = [name for name, one in policy.classes.items() if one.has_ttft_objective]
        self._least = least
        self._most = max(least, most)
        self.start = self._within(start)
        self.limits: dict[str, float] = {}

    def of(self, engine: str) -> float:
        """The limit as it is moved; works are held to its whole part."""
        return self.limits.get(engine, self.start)

    def move(self, engine: str, limit: float) -> None:
        """Set a limit, kept within bounds."""
        self.limits[engine] = self._within(limit)

    def urgent(self, class_name: str) -> bool:
        """True for a class with a TTFT objective."""
        return class_name in self._urgent

    def verdict(self, work: Work, engine: EngineView) -> Verdict:
        """May the engine take the work now? A work of many sequences asks for half of a bound at most."""
        in_flight, sequences = engine.sequences_total, work.sequences
        limit, seats = int(self.of(engine.name)), whole_seats(engine.seats.value, engine.seats.quality)
        guards = [_reading(Guard.WINDOW, in_flight + taken(sequences, limit), limit)]
        if seats is not None:
            guards.append(_reading(Guard.SEATS, in_flight + taken(sequences, seats), seats))
        if not self.urgent(work.class_name):
            patient = in_flight - sum(map(engine.sequences, self._urgent))
            bound = _for_patient(limit)
            guards.append(_reading(Guard.WINDOW, patient + taken(sequences, bound), bound))
            if seats is not None:
                bound = _for_patient(seats)
                guards.append(_reading(Guard.SEATS, patient + taken(sequences, bound), bound))
        return Verdict.of(guards)

    def window(self, engine: EngineView, class_name: str) -> Window:
        """The limit, or what of it a class without objective may take."""
        seats = whole_seats(engine.seats.value, engine.seats.quality)
        limit = int(self.of(engine.name)) if seats is None else min(int(self.of(engine.name)), seats)
        return Window(requests=limit if self.urgent(class_name) else _for_patient(limit))

    def snapshot(self) -> Mapping[str, object]:
        """The limits, JSON-ready."""
        return {"limits": dict(self.limits)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over limits; what cannot be read is left out."""
        limits = state.get("limits")
        if isinstance(limits, Mapping):
            for engine, limit in limits.items():
                if isinstance(limit, int | float):
                    self.move(str(engine), float(limit))

    def _within(self, limit: float) -> float:
        return min(max(limit, self._least), self._most)

    def __repr__(self) -> str:
        return f"<SharedLimit {' '.join(f'{engine}={limit:.1f}' for engine, limit in self.limits.items()) or 'new'}>"


def _for_patient(limit: int) -> int:
    return max(1, limit - max(1, limit // 8))


def _reading(guard: Guard, value: int, threshold: int) -> GuardReading:
    return GuardReading(guard, value, threshold, value <= threshold)
