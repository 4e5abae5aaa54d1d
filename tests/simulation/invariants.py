"""What must hold at every moment of every run, written once and checked after every event.

The world shows what can be seen (`Look`, and the moments at which something is decided, accepted or settled); here is
what that may look like. Checks cost constant work per event. A broken one raises `InvariantBroken` at the event that
broke it, in the callback that did it, with the time and the figures.

The list is that of docs/architecture.md, "Invariants": one outcome per accepted work; no grant lifts in-flight above the window in
force; the queue within its bound; an engine that is not up gets nothing new; one policy version per decision; tokens
billed equal tokens relayed; at most one process decides at a time. To these come: what a client saw fits the outcome
that was recorded, an engine is left alone within ABORT_WITHIN_S of the last client's leaving, and nothing is left over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.vocabulary import Action, Decision, Outcome, Result

ABORT_WITHIN_S = 2.0


class InvariantBroken(AssertionError):
    """The world did what it must never do. The message says what, where and when."""


@dataclass(frozen=True, slots=True)
class EngineLook:
    """One engine and what runs there, over all processes.

    serving     somebody takes it to be up
    in_flight   works by class that must be inside the window; "all" over all classes
    window      works by class, and for "all"
    """

    name: str
    serving: bool
    in_flight: Mapping[str, int]
    window: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the running world shows."""

    now_s: float
    engines: tuple[EngineLook, ...]


@dataclass(slots=True)
class Seen:
    """What one client saw of its answer.

    status        0 when no head came
    complete      the answer's framing ended properly
    failed        it says that it failed: an error status, or an error event inside the stream
    tokens        completion_tokens of the usage it was shown; None when it was shown none
    """

    status: int = 0
    complete: bool = False
    failed: bool = False
    tokens: int | None = None


@dataclass(slots=True)
class Invariants:
    """See the module header. One per run; `told` is how many events of any kind were looked at."""

    accepted: set[str] = field(default_factory=set)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    told: int = 0
    _epoch: int = 0
    _last: dict[str, EngineLook] = field(default_factory=dict)
    _idle_since_s: dict[str, float] = field(default_factory=dict)

    # -- after every event --------------------------------------------------------------------------------------------

    def look(self, look: Look) -> None:
        """Compare with the last look."""
        self.told += 1
        for engine in look.engines:
            self._no_growth_beyond(engine, look.now_s)
            self._last[engine.name] = engine

    def _no_growth_beyond(self, engine: EngineLook, now_s: float) -> None:
        """In-flight may stand above a window that shrank or an engine that went down, but must not rise there."""
        last = self._last.get(engine.name)
        before = {} if last is None else last.in_flight
        for name, count in engine.in_flight.items():
            if count < 0:
                raise InvariantBroken(f"at {now_s:.6f} s engine {engine.name} has {count} {name} works in flight")
            if count <= before.get(name, 0):
                continue
            if not engine.serving and (last is None or not last.serving):
                raise InvariantBroken(f"at {now_s:.6f} s engine {engine.name} got a {name} work: it is not up")
            cap = engine.window.get(name)
            if cap is not None and count > cap:
                raise InvariantBroken(
                    f"at {now_s:.6f} s engine {engine.name} got {name} work number {count}: its window is {cap}"
                )

    def decided(self, decision: Decision, *, policy_version: str, serving: bool) -> None:
        """A decision was taken, under the policy and the engine's state in force at that moment."""
        if decision.policy_version != policy_version:
            raise InvariantBroken(
                f"a decision at {decision.at_s:.6f} s names policy {decision.policy_version}: in force is {policy_version}"
            )
        if decision.action is Action.DISPATCH and not serving:
            raise InvariantBroken(f"work {decision.work_id} was dispatched to {decision.engine}: it is not up")

    def decided_under(self, epoch: int, what: str, now_s: float) -> None:
        """Something was decided for the pool under a leader's epoch."""
        if epoch < self._epoch:
            raise InvariantBroken(f"at {now_s:.6f} s {what} under epoch {epoch}: {self._epoch} has decided already")
        self._epoch = epoch

    def settled(self, request_id: str, outcome: Outcome) -> None:
        """A work's outcome was recorded."""
        if request_id not in self.accepted:
            raise InvariantBroken(f"request {request_id} has an outcome {outcome.result}: it was never accepted")
        if request_id in self.outcomes:
            first = self.outcomes[request_id].result
            raise InvariantBroken(f"request {request_id} has two outcomes: {first} and {outcome.result}")
        if outcome.attempts < 0 or outcome.output_tokens < 0 or outcome.total_s < 0:
            raise InvariantBroken(f"request {request_id} has an impossible outcome: {outcome}")
        if outcome.result is Result.COMPLETED and (outcome.status != 200 or not outcome.engine):
            raise InvariantBroken(f"request {request_id} completed with status {outcome.status} on {outcome.engine!r}")
        self.outcomes[request_id] = outcome

    # -- now and then -------------------------------------------------------------------------------------------------

    def engine_is_left_alone(self, engine: str, *, running: int, in_flight: int, reachable: bool, now_s: float) -> None:
        """An engine must not go on with works that the gateway no longer counts, for longer than ABORT_WITHIN_S."""
        if running <= in_flight or not reachable:
            self._idle_since_s.pop(engine, None)
            return
        since_s = self._idle_since_s.setdefault(engine, now_s)
        if now_s - since_s > ABORT_WITHIN_S:
            raise InvariantBroken(
                f"at {now_s:.6f} s engine {engine} has run {running} works since {since_s:.6f} s: {in_flight} are in flight"
            )

    # -- at a client's end and at the end of the run ------------------------------------------------------------------

    def answered(self, request_id: str, seen: Seen, *, max_tokens: int) -> None:
        """A client that waited has its answer: complete, or visibly failed, and as the outcome tells it."""
        outcome = self.outcomes.get(request_id)
        if outcome is None:
            raise InvariantBroken(f"request {request_id} was answered {seen}: it has no outcome")
        if not seen.status:
            raise InvariantBroken(f"request {request_id} got no answer at all: its outcome is {outcome}")
        clean = seen.complete and not seen.failed
        if clean != (outcome.result is Result.COMPLETED):
            raise InvariantBroken(f"request {request_id} saw {seen}: its outcome is {outcome}")
        if not clean:
            return
        if seen.tokens is not None and not seen.tokens == outcome.output_tokens == max_tokens:
            raise InvariantBroken(
                f"request {request_id} asked for {max_tokens} tokens and was shown {seen.tokens}: {outcome.output_tokens}"
                " are billed"
            )

    def over(self, leftovers: Mapping[str, object]) -> None:
        """All clients are gone: every accepted request has its outcome, and nothing is left over (name -> what)."""
        without = sorted(self.accepted - self.outcomes.keys())
        if without:
            raise InvariantBroken(f"{len(without)} accepted requests have no outcome: {', '.join(without[:5])}")
        left = {name: what for name, what in leftovers.items() if what}
        if left:
            raise InvariantBroken(f"left over at the end: {left}")
