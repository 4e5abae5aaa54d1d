"""Sizing policy `fixed`: windows that an operator wrote down and nothing moves.

What it does: counts works in flight per engine against three bounds: the class's window, the total of all classes, and
the engine's own seats where it tells them. The total is shared while a class without a TTFT objective has a window
well below it, so bulk can never hold every place and an interactive work always finds room (or other interactive
works, which leave soon). For the same reason such classes together never fill the last eighth of known seats, at least
one. They are bound by what they hold and not by what is free, else they would starve beside a steady urgent load.

Inputs: the ledger's counts and the `seats` reading; no other telemetry, so it works on any engine. It learns nothing.
Trade-off: the right window depends on prompts and lengths that change by the minute; a fixed one is either too small
for short work or too large for long work. It is the safe start and the fallback, not the optimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from policies.schema import Policy
from policies.sizing import SizingEvent, Window
from policies.vocabulary import EngineView, Guard, GuardReading, Quality, Verdict, Work

VERDICTS_KEPT = 4096


class FixedLimits:
    """See the module header. Verdicts are kept by their few small integers, so that asking costs a look-up."""

    __slots__ = ("_bounds", "_policy", "_urgent", "_verdict")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._urgent = [name for name, one in policy.classes.items() if one.has_ttft_objective]
        self._bounds = lru_cache(maxsize=VERDICTS_KEPT)(self._bounds_of)
        self._verdict = lru_cache(maxsize=VERDICTS_KEPT)(_verdict)

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:  # noqa: ARG002 - the contract's
        """May the engine take the work now? An engine with nothing in flight takes a work of any number of sequences."""
        window, total, urgent = self._bounds(engine.name, work.class_name)
        in_flight = engine.in_flight_total
        held = in_flight if urgent else in_flight - self._urgent_works(engine)
        seats, patient_seats = _seats(engine)
        taken = work.sequences if in_flight else 1
        return self._verdict(
            (engine.in_flight.get(work.class_name, 0) + 1, window),
            (in_flight + 1, total),
            None if seats is None else (in_flight + taken, seats),
            None if patient_seats is None or urgent else (held + taken, patient_seats),
        )

    def window(self, engine: EngineView, class_name: str) -> Window:
        """The class's window, lowered to the total and to the seats it may take."""
        window, total, urgent = self._bounds(engine.name, class_name)
        seats = _seats(engine)[0 if urgent else 1]
        return Window(requests=min(window, total) if seats is None else min(window, total, seats))

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        """Nothing to learn."""

    def snapshot(self) -> Mapping[str, object]:
        """Nothing was learned."""
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Nothing to take over."""

    def _bounds_of(self, engine: str, class_name: str) -> tuple[int, int, bool]:
        """(class window, total, has a TTFT objective). A class no longer named keeps a quarter of the total to run dry."""
        fixed = self._policy.sizing.fixed
        one = fixed.engines.get(engine)
        total = fixed.total if one is None or one.total is None else one.total
        window = (fixed.windows if one is None else one.windows).get(class_name)
        urgent = self._policy.class_policy(class_name).has_ttft_objective
        return (max(1, total // 4) if window is None else window), total, urgent

    def _urgent_works(self, engine: EngineView) -> int:
        return sum(engine.in_flight.get(name, 0) for name in self._urgent)

    def __repr__(self) -> str:
        fixed = self._policy.sizing.fixed
        return f"<FixedLimits total={fixed.total} windows={dict(fixed.windows)}>"


def _seats(engine: EngineView) -> tuple[int, int] | tuple[None, None]:
    """(seats, seats for classes without an objective); None for an engine that does not tell.

    Old news counts: seats change by a restart only.
    """
    reading = engine.seats
    if reading.value is None or reading.quality not in (Quality.FRESH, Quality.STALE) or reading.value < 1:
        return None, None
    seats = int(reading.value)
    return seats, max(1, seats - max(1, seats // 8))


Bound = tuple[int, int]
"""(value, threshold)."""


def _verdict(window: Bound, total: Bound, seats: Bound | None, patient_seats: Bound | None) -> Verdict:
    bounds = ((Guard.WINDOW, window), (Guard.WINDOW, total), (Guard.SEATS, seats), (Guard.SEATS, patient_seats))
    guards = tuple(
        GuardReading(guard, bound[0], bound[1], bound[0] <= bound[1]) for guard, bound in bounds if bound is not None
    )
    return Verdict(all(guard.passed for guard in guards), guards)
