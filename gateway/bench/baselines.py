"""What the scheduler is measured against: what others do, behind the contracts that our own policies have.

`pass_*`          no gateway queue: each request goes straight to an engine, chosen in turn or by fewest outstanding
`static_shared_W` one window of W works an engine for both classes; our queue lets interactive works go first
`static_bulk_W`   bulk has a window of W works an engine, interactive works none; any W from 1 to CLIENTS_IN_FLIGHT
`engine_priority_W` the same, and the engine itself orders by priority and preempts by it
`saturation_gate` as llm-d's flow control: a class may start while max(queue/5, kv/0.8) is under its ceiling
`aimd`, `gradient`, `rules`, `token_ledger`   the sizing policies of the product, with their defaults

A bulk client that nothing holds back keeps CLIENTS_IN_FLIGHT works open an engine: an endless backlog has to be cut
somewhere, and no job keeps more connections than that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backends.simulated.continuous import SchedulingPolicy
from gateway.bench.cells import BULK, INTERACTIVE
from policies.limits import LIMITS
from policies.schema import Policy
from policies.sizing import LearnedStep, SizingEvent, SizingPolicy, Window
from policies.vocabulary import EngineView, Guard, GuardReading, Reading, Verdict, Work

CLIENTS_IN_FLIGHT = 512
SHARED_WINDOWS = (8, 32, 64, 256)
SWEPT = "static_bulk_"
FIRST_WINDOWS = (10, 48)
"""Of bulk, where the search for the best window begins: two, so that it has work for two cores."""
PRIORITY_WINDOWS = (64, 128, 512)
PRODUCT = ("aimd", "gradient", "rules", "token_ledger")
OURS = "token_ledger"
UNPROTECTED = "pass_round_robin"

Front = Callable[[Sequence[str], Mapping[str, int]], str]


@dataclass(frozen=True, slots=True)
class Contender:
    """One policy of the benchmark.

    document   the sizing policy that the document names
    sizing     in place of it
    front      makes a balancer in front of the pool
    """

    name: str
    document: str = "fixed"
    sizing: Callable[[Policy], SizingPolicy] | None = None
    front: Callable[[], Front] | None = None
    engine_order: SchedulingPolicy = SchedulingPolicy.FCFS


def contender(name: str) -> Contender:
    """By its name; of windows of bulk there are as many as numbers. Raises KeyError for one that there is not."""
    window = name.removeprefix(SWEPT)
    if window != name and window.isdigit():
        return Contender(name, sizing=_windows(None, int(window)))
    return contenders()[name]


def contenders() -> dict[str, Contender]:
    """All by name, in the order of a table; of the windows of bulk, those that the search begins with."""
    found = [
        Contender(UNPROTECTED, sizing=_windows(None, CLIENTS_IN_FLIGHT), front=RoundRobin),
        Contender("pass_least_outstanding", sizing=_windows(None, CLIENTS_IN_FLIGHT), front=lambda: least_outstanding),
        *(Contender(f"static_shared_{window}", sizing=_windows(window, window)) for window in SHARED_WINDOWS),
        *(contender(f"{SWEPT}{window}") for window in FIRST_WINDOWS),
        *(Contender(name, document=name) for name in PRODUCT if name in LIMITS),
        *(
            Contender(
                f"engine_priority_{window}", sizing=_windows(None, window), engine_order=SchedulingPolicy.PRIORITY
            )
            for window in PRIORITY_WINDOWS
        ),
        Contender("saturation_gate", sizing=lambda _policy: SaturationGate()),
    ]
    return {one.name: one for one in found}


def _windows(total: int | None, bulk: int) -> Callable[[Policy], SizingPolicy]:
    return lambda _policy: Windows(total=total, bulk=bulk)


class Unlearning:
    """What policies have in common that learn nothing."""

    __slots__ = ()

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        """Nothing to learn."""

    def learned_step(self, engine: str) -> LearnedStep | None:  # noqa: ARG002, the contract's
        return None

    def snapshot(self) -> Mapping[str, object]:
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Nothing to take over."""


class Windows(Unlearning):
    """Works in flight on one engine: of all classes at most `total`, of bulk at most `bulk`."""

    __slots__ = ("_bulk", "_total")

    def __init__(self, *, total: int | None, bulk: int) -> None:
        self._total = total
        self._bulk = bulk

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:  # noqa: ARG002 - the contract's
        guards = []
        if self._total is not None:
            guards.append(_reading(Guard.WINDOW, engine.in_flight_total + 1, self._total))
        if work.class_name == BULK:
            guards.append(_reading(Guard.WINDOW, engine.in_flight.get(BULK, 0) + 1, self._bulk))
        return Verdict.of(guards)

    def window(self, engine: EngineView, class_name: str) -> Window:  # noqa: ARG002 - the contract's
        return Window(requests=self._bulk if class_name == BULK else self._total)


class SaturationGate(Unlearning):
    """llm-d's detector: saturation is max(waiting / 5, KV used / 0.8); bulk starts below 0.4, interactive below 0.9.

    What was sent since the last poll counts as waiting: telemetry comes twice a second here, and a literal reading would
    let the whole backlog through between two polls. An engine that tells nothing is not saturated.
    """

    __slots__ = ()

    QUEUE_DEPTH = 5.0
    KV_FRACTION = 0.8
    CEILINGS: Mapping[str, float] = {BULK: 0.4, INTERACTIVE: 0.9}

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:  # noqa: ARG002 - the contract's
        held = _value(engine.running) + _value(engine.waiting)
        queue = _value(engine.waiting) + max(0.0, engine.in_flight_total - held)
        ceiling = self.CEILINGS[work.class_name]
        guards = [
            _reading(Guard.STALL, queue / self.QUEUE_DEPTH, ceiling),
            _reading(Guard.STALL, _value(engine.kv_used_fraction) / self.KV_FRACTION, ceiling),
        ]
        if work.class_name == BULK:
            guards.append(_reading(Guard.WINDOW, engine.in_flight.get(BULK, 0) + 1, CLIENTS_IN_FLIGHT))
        return Verdict.of(guards)

    def window(self, engine: EngineView, class_name: str) -> Window:  # noqa: ARG002 - the contract's
        return Window(requests=CLIENTS_IN_FLIGHT if class_name == BULK else None)


class RoundRobin:
    """A balancer that takes engines in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, up: Sequence[str], outstanding: Mapping[str, int]) -> str:
        del outstanding
        self._turn += 1
        return up[self._turn % len(up)]


def least_outstanding(up: Sequence[str], outstanding: Mapping[str, int]) -> str:
    """A balancer that takes the engine with the fewest works outstanding, the first of equals."""
    return min(up, key=lambda name: outstanding[name])


def _value(reading: Reading) -> float:
    return reading.value if reading.known and reading.value is not None else 0.0


def _reading(guard: Guard, value: float, threshold: float) -> GuardReading:
    return GuardReading(guard, value, threshold, value <= threshold)
