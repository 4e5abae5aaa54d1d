"""What must hold at every moment of every run, written once and checked after every event.

The world shows what can be seen (`Look`, and the moments at which something is decided, accepted or settled); here is
what that may look like. Checks cost constant work per event. A broken one raises `InvariantBroken` at the event that
broke it, in the callback that did it, with the time and the figures.

`Invariant` is the list. Its first ten are promises of the design; the others are what those rest on, and what a client and
an engine may expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from policies.vocabulary import Action, Decision, Outcome, Result

ABORT_WITHIN_S = 2.0


class Invariant(StrEnum):
    """What must hold. A failure names one of these."""

    ONE_OUTCOME = "each accepted work has one outcome"
    INSIDE_WINDOW = "no grant lifts in-flight above the window in force"
    QUEUE_BOUND = "no more works wait than the bound says"
    ENGINE_UP = "an engine that is not up, or is drained, gets nothing new"
    ONE_POLICY = "a decision is taken under one policy version"
    BILLED = "tokens billed are tokens relayed"
    SESSION_ENDS = "no session outlives its process by more than its validity"
    OWNED = "every key has its owner"
    RECORDED_ONCE = "a result is recorded at most once"
    ONE_DECIDER = "at most one process decides for a pool at a time"

    EPOCHS_GROW = "nothing is decided under an epoch older than one that has decided"
    ONE_EPOCH_EACH = "no two processes decide under one epoch"
    INSIDE_CREDIT = "a process starts no more on credit than it was allowed"
    INSIDE_SHARE = "a process that is cut off starts no more than its share"
    GRANT_VALID = "no grant is started after its end"
    NEWER_STAYS = "a word that comes late replaces none that is newer"
    ENDED_STAYS = "what has ended is not let in again"
    RUNS_ONCE = "a work runs in one place at a time"
    NOT_FORGOTTEN = "what waits or is granted in a process is so in the store, and the other way round"
    TOLD_TRUE = "what a client saw is what its outcome says"
    LEFT_ALONE = "an engine works for nobody but those that are counted"
    CLEAN = "nothing is left over, and no error was logged"
    RECOVERS = "after the last fault somebody leads, and requests are served in full and in time"


class InvariantBroken(AssertionError):
    """The world did what it must never do. The message says what, where and when."""

    def __init__(self, invariant: Invariant, message: str) -> None:
        super().__init__(f"{message} ({invariant.name}: {invariant})")
        self.invariant = invariant


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
    broken: InvariantBroken | None = None
    _epoch: int = 0
    _decider: dict[int, str] = field(default_factory=dict)
    _last: dict[str, EngineLook] = field(default_factory=dict)
    _idle_since_s: dict[str, float] = field(default_factory=dict)

    def fail(self, invariant: Invariant, message: str) -> NoReturn:
        """For what is told from inside a gateway: raise InvariantBroken, and remember it, since the gateway may swallow it."""
        self.broken = self.broken or InvariantBroken(invariant, message)
        raise self.broken

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
                raise InvariantBroken(
                    Invariant.INSIDE_WINDOW, f"at {now_s:.6f} s engine {engine.name} has {count} {name} works in flight"
                )
            if count <= before.get(name, 0):
                continue
            if not engine.serving and (last is None or not last.serving):
                raise InvariantBroken(
                    Invariant.ENGINE_UP, f"at {now_s:.6f} s engine {engine.name} got a {name} work: it is not up"
                )
            cap = engine.window.get(name)
            if cap is not None and count > cap:
                raise InvariantBroken(
                    Invariant.INSIDE_WINDOW,
                    f"at {now_s:.6f} s engine {engine.name} got {name} work number {count}: its window is {cap}",
                )

    def decided(self, decision: Decision, *, policy_version: str, serving: bool) -> None:
        """A decision was taken, under the policy and the engine's state in force at that moment."""
        if decision.policy_version != policy_version:
            self.fail(
                Invariant.ONE_POLICY,
                f"a decision at {decision.at_s:.6f} s names policy {decision.policy_version}: in force is {policy_version}",
            )
        if decision.action is Action.DISPATCH and not serving:
            self.fail(Invariant.ENGINE_UP, f"work {decision.work_id} was dispatched to {decision.engine}: it is not up")

    def decided_under(self, epoch: int, what: str, now_s: float, *, by: str = "") -> None:
        """Something was decided for the pool under a leader's epoch. by: the process, where that is known."""
        if epoch < self._epoch:
            self.fail(
                Invariant.EPOCHS_GROW, f"at {now_s:.6f} s {what} under epoch {epoch}: {self._epoch} has decided already"
            )
        self._epoch = epoch
        if by and self._decider.setdefault(epoch, by) != by:
            self.fail(
                Invariant.ONE_EPOCH_EACH,
                f"at {now_s:.6f} s {what} under epoch {epoch}: it is that of {self._decider[epoch]}",
            )

    def settled(self, request_id: str, outcome: Outcome) -> None:
        """A work's outcome was recorded."""
        if request_id not in self.accepted:
            self.fail(
                Invariant.ONE_OUTCOME, f"request {request_id} has an outcome {outcome.result}: it was never accepted"
            )
        if request_id in self.outcomes:
            first = self.outcomes[request_id].result
            self.fail(Invariant.RECORDED_ONCE, f"request {request_id} has two outcomes: {first} and {outcome.result}")
        if outcome.attempts < 0 or outcome.output_tokens < 0 or outcome.total_s < 0:
            self.fail(Invariant.TOLD_TRUE, f"request {request_id} has an impossible outcome: {outcome}")
        if outcome.result is Result.COMPLETED and (outcome.status != 200 or not outcome.engine):
            self.fail(
                Invariant.TOLD_TRUE,
                f"request {request_id} completed with status {outcome.status} on {outcome.engine!r}",
            )
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
                Invariant.LEFT_ALONE,
                f"at {now_s:.6f} s engine {engine} has run {running} works since {since_s:.6f} s: {in_flight} are in flight",
            )

    # -- at a client's end and at the end of the run ------------------------------------------------------------------

    def answered(self, request_id: str, seen: Seen, *, max_tokens: int) -> None:
        """A client that waited has its answer: complete, or visibly failed, and as the outcome tells it."""
        outcome = self.outcomes.get(request_id)
        if outcome is None:
            raise InvariantBroken(Invariant.ONE_OUTCOME, f"request {request_id} was answered {seen}: it has no outcome")
        if not seen.status:
            raise InvariantBroken(
                Invariant.TOLD_TRUE, f"request {request_id} got no answer at all: its outcome is {outcome}"
            )
        clean = seen.complete and not seen.failed
        if clean != (outcome.result is Result.COMPLETED):
            raise InvariantBroken(Invariant.TOLD_TRUE, f"request {request_id} saw {seen}: its outcome is {outcome}")
        if not clean:
            return
        if seen.tokens is not None and not seen.tokens == outcome.output_tokens == max_tokens:
            raise InvariantBroken(
                Invariant.BILLED,
                f"request {request_id} asked for {max_tokens} tokens and was shown {seen.tokens}: {outcome.output_tokens}"
                " are billed",
            )

    def over(self, leftovers: Mapping[str, object]) -> None:
        """All clients are gone: every accepted request has its outcome, and nothing is left over (name -> what)."""
        without = sorted(self.accepted - self.outcomes.keys())
        if without:
            raise InvariantBroken(
                Invariant.ONE_OUTCOME, f"{len(without)} accepted requests have no outcome: {', '.join(without[:5])}"
            )
        left = {name: what for name, what in leftovers.items() if what}
        if left:
            raise InvariantBroken(Invariant.CLEAN, f"left over at the end: {left}")
