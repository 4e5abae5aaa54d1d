"""The virtual engine's clock: runs steps one after another and jumps over many at once where nothing can change.

A step that is under way is fixed; whoever arrives or leaves meanwhile is seen when it ends. The step that is due at
time t takes in all that arrived up to and including t, so it is begun only when somebody looks past t: a caller may
`advance(t)`, react to the events, `submit` at the same t, and the work is in that step.

With `lookahead` the engine plans a step while the one before it runs, as vLLM's asynchronous scheduling does: what
arrives during a step is taken in at its end, when the next step is planned already, and is in the one after that. An
idle engine plans at once. What such an engine also does, it is not made to do here: it learns of an answer's end one
step late, which costs a seat one step in several hundred.

`advance` costs O(1) per step and less: runs of pure decode steps are one arithmetic series (see `step_model`), cut at
the next end of a sequence, shortage of memory or admission, so that an hour of an engine with hundreds of sequences
is a matter of seconds. Deterministic: the same submissions at the same times give the same events.
"""

from __future__ import annotations

import math

from backends.simulated.scheduler import Plan, Scheduler, Totals
from backends.simulated.sequence import Event, Sequence, SequenceState
from backends.simulated.step_model import PowerModel, StepModel

ROUNDING_S = 1e-9
"""A step that ends no later than this after `until_s` has ended by it: timers and sums of floats are no finer."""


class Engine:
    """See the module header. All times are seconds on the engine's own clock, which starts at 0.

    totals      counters since start, shared with the scheduler
    lookahead   steps are planned one ahead; see the module header
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_model: StepModel,
        totals: Totals,
        *,
        power_model: PowerModel | None = None,
        lookahead: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.totals = totals
        self._step_model = step_model
        self._power_model = power_model
        self._lookahead = lookahead
        self._arrived: list[Sequence] = []
        self._clock_s = 0.0
        self._plan: Plan | None = None
        self._step_end_s = math.inf
        self._events: list[Event] = []

    @property
    def clock_s(self) -> float:
        """Start of the step under way, which is the end of the one before; the last look when idle."""
        return self._clock_s

    @property
    def busy(self) -> bool:
        """True while anybody runs or waits."""
        return self._plan is not None or bool(self._arrived) or self.scheduler.running + self.scheduler.waiting > 0

    def submit(self, sequence: Sequence, now_s: float) -> None:
        """Hand over a sequence at now_s, which must not lie before an earlier call.

        Raises ValueError for one that could never run.
        """
        self.scheduler.check(sequence)
        self._run(now_s)
        sequence.arrival_s = now_s
        self._arrived.append(sequence)
        if not self._lookahead:
            self.scheduler.add(sequence)

    def abort(self, sequence: Sequence, now_s: float) -> None:
        """Give up a sequence: no event follows, its seat and memory are free when the step under way ends."""
        self._run(now_s)
        unseen = sequence in self._arrived
        if unseen:
            self._arrived.remove(sequence)
        if unseen and self._lookahead:
            sequence.state = SequenceState.ABORTED
        else:
            self.scheduler.abort(sequence)
        if self._plan is None:
            self.scheduler.settle_aborts()

    def advance(self, until_s: float) -> list[Event]:
        """Run every step that ends by until_s; return what happened since the last call, in time order."""
        self._run(until_s)
        events, self._events = self._events, []
        return events

    def next_step_s(self) -> float:
        """When the step under way, or the one due now, ends; inf when idle. Begins the due one.

        For a driver that shows every token as it comes.
        """
        if self._plan is None and self.busy:
            self._begin()
        return self._step_end_s

    def next_event_s(self) -> float:
        """A time before which no event comes unless somebody submits or aborts; inf when idle.

        For a driver in virtual time: it skips over steps that show nothing new. May begin the step that is due.
        """
        if self._plan is None and self.busy:
            steps = self._steady_steps()
            if steps:
                return self._clock_s + self._decode_run_s(steps)
            self._begin()
        return self._step_end_s

    def _run(self, until_s: float) -> None:
        while True:
            if self._plan is not None:
                if self._step_end_s > until_s + ROUNDING_S:
                    return
                self._commit(self._plan)
            if self._clock_s >= until_s - ROUNDING_S:  # a wake at a step's end, rounded up, must not begin the next
                return
            if not self.busy:
                self._clock_s = until_s
                return
            if not self._jump(until_s):
                self._begin()

    def _jump(self, until_s: float) -> bool:
        """Run all pure decode steps that are sure and end by until_s, at once; False when there is none."""
        scheduler = self.scheduler
        steps = self._step_model.decode_steps_within(
            scheduler.decoding,
            scheduler.context_tokens,
            until_s + ROUNDING_S - self._clock_s,
            at_most=self._steady_steps(),
        )
        if not steps:
            return False
        self._take_in()
        duration_s = self._decode_run_s(steps)
        self._spend(duration_s, scheduler.decoding)
        self._clock_s += duration_s
        self.totals.steps += steps
        scheduler.run_steady(steps, self._clock_s, self._events)
        return True

    def _steady_steps(self) -> int:
        return 0 if self._lookahead and self._arrived else self.scheduler.steady_steps()

    def _begin(self) -> None:
        scheduler = self.scheduler
        if not (self._lookahead and scheduler.running + scheduler.waiting):
            self._take_in()
        plan = self._plan = scheduler.plan(self._clock_s, self._events)
        self._take_in()
        decoding = scheduler.decoding if plan.decodes else 0
        context_tokens = scheduler.context_tokens if plan.decodes else 0
        pieces = [(tokens, before) for _, tokens, before in plan.chunks]
        duration_s = self._step_model.step_s(decoding, context_tokens, pieces)
        self._spend(duration_s, decoding + len(pieces))
        self._step_end_s = self._clock_s + duration_s

    def _take_in(self) -> None:
        """Show the scheduler what has arrived since the last step began."""
        for sequence in self._arrived:
            sequence.taken_s = self._clock_s
            if self._lookahead:
                self.scheduler.add(sequence)
        self._arrived.clear()

    def _commit(self, plan: Plan) -> None:
        self._clock_s, self._step_end_s, self._plan = self._step_end_s, math.inf, None
        self.totals.steps += 1
        self.scheduler.commit(plan, self._clock_s, self._events)
        self.scheduler.settle_aborts()

    def _decode_run_s(self, steps: int) -> float:
        return self._step_model.decode_run_s(self.scheduler.decoding, self.scheduler.context_tokens, steps)

    def _spend(self, duration_s: float, batch_size: int) -> None:
        self.totals.busy_s += duration_s
        if self._power_model is not None:
            self.totals.energy_j += duration_s * self._power_model.power_w(batch_size)

    def __repr__(self) -> str:
        return f"<Engine t={self._clock_s:.3f}s {self.scheduler!r}>"
