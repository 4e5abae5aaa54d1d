"""Sizing policy `fixed`: windows that an operator wrote down and nothing moves.

What it does: counts sequences in flight per engine against three bounds: the class's window, the total of all classes, and
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
from dataclasses import dataclass
from functools import lru_cache

from policies.schema import Policy
from policies.sizing import LearnedStep, SizingEvent, Window
from policies.vocabulary import EngineView, Guard, GuardReading, Quality, Verdict, Work

KEPT = 4096


class FixedLimits:
    """See the module header. Bounds and verdicts are kept by the few small values they follow from."""

    __slots__ = ("_bounds", "_policy", "_urgent", "_verdict")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._urgent = [name for name, one in policy.classes.items() if one.has_ttft_objective]
        self._bounds = lru_cache(maxsize=KEPT)(self._bounds_of)
        self._verdict = lru_cache(maxsize=KEPT)(_verdict)

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:  # noqa: ARG002 - the contract's
        """May the engine take the work now? A work of many sequences asks for half of a bound at most."""
        bounds = self._bounds(engine.name, work.class_name, engine.seats.value, engine.seats.quality)
        in_flight = engine.sequences_total
        held = 0 if bounds.patient_seats is None else in_flight - sum(map(engine.sequences, self._urgent))
        return self._verdict(bounds, engine.sequences(work.class_name), in_flight, held, work.sequences)

    def window(self, engine: EngineView, class_name: str) -> Window:
        """The class's window, lowered to the total and to the seats it may take."""
        bounds = self._bounds(engine.name, class_name, engine.seats.value, engine.seats.quality)
        return bounds.tightest

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        """Nothing to learn."""

    def learned_step(self, engine: str) -> LearnedStep | None:  # noqa: ARG002, the contract's
        """This policy does not look."""
        return None

    def snapshot(self) -> Mapping[str, object]:
        """Nothing was learned."""
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Nothing to take over."""

    def _bounds_of(self, engine: str, class_name: str, seats: float | None, quality: Quality) -> _Bounds:
        """One class's bounds on one engine. A class that is no longer named keeps a quarter of the total to run dry."""
        fixed = self._policy.sizing.fixed
        one = fixed.engines.get(engine)
        total = fixed.total if one is None or one.total is None else one.total
        window = (fixed.windows if one is None else one.windows).get(class_name, max(1, total // 4))
        known = whole_seats(seats, quality)
        patient = known is not None and not self._policy.class_policy(class_name).has_ttft_objective
        return _Bounds(window, total, known, max(1, known - max(1, known // 8)) if known and patient else None)

    def __repr__(self) -> str:
        fixed = self._policy.sizing.fixed
        return f"<FixedLimits total={fixed.total} windows={dict(fixed.windows)}>"


@dataclass(frozen=True, slots=True, eq=False)
class _Bounds:
    """Thresholds in sequences; None: the engine does not tell, or the bound is not the class's.

    Told apart by identity, which is quick: one is kept for each engine and class.
    """

    window: int
    total: int
    seats: int | None
    patient_seats: int | None

    @property
    def tightest(self) -> Window:
        bounds = (self.window, self.total, self.seats, self.patient_seats)
        return Window(requests=min(bound for bound in bounds if bound is not None))


def whole_seats(seats: float | None, quality: Quality) -> int | None:
    """Seats as told. Old news counts, since seats change by a restart only; no news is None."""
    if seats is None or seats < 1 or quality not in (Quality.FRESH, Quality.STALE):
        return None
    return int(seats)


def taken(sequences: int, bound: int) -> int:
    """Places that a work of so many sequences asks of a bound: at most half of it, or it would wait for ever beside a
    steady load of small ones. Once it runs, all of them count."""
    return sequences if sequences <= 1 else max(1, min(sequences, bound // 2))


def _verdict(bounds: _Bounds, of_class: int, in_flight: int, patient: int, sequences: int) -> Verdict:
    """The verdict on one more work of so many sequences, beside those in flight: of its class, of all, of patient ones."""
    asked = (
        (Guard.WINDOW, of_class, bounds.window),
        (Guard.WINDOW, in_flight, bounds.total),
        (Guard.SEATS, in_flight, bounds.seats),
        (Guard.SEATS, patient, bounds.patient_seats),
    )
    needs = ((guard, held + taken(sequences, bound), bound) for guard, held, bound in asked if bound is not None)
    return Verdict.of(GuardReading(guard, value, bound, value <= bound) for guard, value, bound in needs)
