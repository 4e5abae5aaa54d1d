"""A scheduler that knows everything: the upper bound that a simulation can give. No policy, and never behind a gateway.

It is made from the world of a replay (`Plan.privileged`), and reads what no view has: true lengths of answers, the
arrivals to come, the engines' step models and their state at this moment. With that it lets a bulk work start whenever
`trajectory.Trajectory` finds that memory, first tokens and gaps stay within bounds to the end of that work's life.
Interactive works start by deadline on the engine that `foresight` has given them, while those pending fill no more than
a step; those that are hopeless were taken out before the run. It must come out at or above every static window, else it
is wrong: the benchmark checks that.

One trajectory serves all questions during one step of an engine, which takes nobody in before its end: what a round
places meanwhile, and what was granted and is on its way to the engine, is added to it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from gateway.bench.baselines import Unlearning
from gateway.bench.cells import BULK, INTERACTIVE
from gateway.bench.foresight import Coming, Foresight
from gateway.bench.trajectory import Arrivals, Trajectory
from gateway.replay.host import EngineHost
from gateway.replay.replica import Replica
from gateway.replay.trace import Request
from gateway.replay.world import World
from policies.sizing import Granted, SizingEvent, Window
from policies.vocabulary import EngineState, EngineView, Guard, GuardReading, Verdict, Work

LATELY_S = 5.0
BURST_PARTS = (1.0, 0.25)
"""How full a burst's steps may be taken to be, the boldest first: no step is half right for short prompts and for long ones,
so the clairvoyant is the first of these that reaches the bar."""
KEPT_S = 0.1
"""A trajectory of an engine that takes no steps is made anew after this."""
ADMITTED = Verdict(admitted=True, guards=(GuardReading(Guard.NONE, 0.0, 0.0, passed=True),))
REFUSED = {
    guard: Verdict(admitted=False, guards=(GuardReading(guard, 1.0, 0.0, passed=False),))
    for guard in (Guard.SEATS, Guard.TPOT, Guard.STALL, Guard.KV, Guard.TTFT, Guard.NONE, Guard.STALE)
}


class Clairvoyant(Unlearning):
    """See the module header. One per replica; only the leader's is asked."""

    def __init__(self, world: World, *, foresight: Foresight, tpot_sla_s: float, burst_part: float) -> None:
        self._world = world
        self._foresight = foresight
        self._engines = {
            name: _Engine(world, host, foresight.coming[name], tpot_sla_s, burst_part)
            for name, host in world.hosts.items()
        }

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
        course = self._world.courses.get(work.id)
        leader = self._leader
        one = self._engines[engine.name]
        if course is not None:
            request = course.request
        elif work.prompt_tokens:
            return REFUSED[Guard.NONE]
        else:  # the round asks whether the least work would find room
            request = Request(now_s, 1, 1, class_name=work.class_name)
        if work.prompt_tokens < request.prompt_tokens:  # the round asks whether the least work would find room
            request = replace(request, prompt_tokens=max(1, work.prompt_tokens), output_tokens=work.max_tokens or 1)
        if work.class_name == BULK:
            if leader.dispatcher.queued.depth(INTERACTIVE):
                return REFUSED[Guard.TTFT]
            bound = one.judge(request, engine, leader)
            if bound is Guard.NONE:
                one.asked(request)
            return ADMITTED if bound is Guard.NONE else REFUSED[bound]
        own = engine.name if course is None else self._foresight.engine_of.get(id(course.request), engine.name)
        if own != engine.name and leader.roster[own].state is EngineState.UP:
            return REFUSED[Guard.NONE]
        ledger = leader.roster[engine.name].ledger
        pending = sum(entry.prefill_tokens for entry in ledger.entries.values() if entry.work.class_name != BULK)
        room = one.host.scheduler.limits.max_num_batched_tokens
        if pending and pending + work.prompt_tokens > room:
            return REFUSED[Guard.STALL]
        one.asked(request)
        return ADMITTED

    def window(self, engine: EngineView, class_name: str) -> Window:  # noqa: ARG002 - the contract's
        return Window()

    def on_event(self, event: SizingEvent, now_s: float) -> None:  # noqa: ARG002 - the contract's
        if isinstance(event, Granted):
            self._engines[event.engine].granted(event.work.id)

    @property
    def _leader(self) -> Replica:
        replicas = self._world.replicas
        return next((one for one in replicas if one.presence.leads), replicas[0])


class _Engine:
    """One engine, and its trajectory as of the last question."""

    def __init__(self, world: World, host: EngineHost, coming: Coming, tpot_sla_s: float, burst_part: float) -> None:
        self.host = host
        self._world = world
        self._arrivals = Arrivals(coming)
        self._tpot_sla_s = tpot_sla_s
        self._burst_part = burst_part
        self._on_the_way: dict[str, None] = {}
        self._trajectory: Trajectory | None = None
        self._taken_s, self._steps = -math.inf, -1
        self._known, self._added = 0, 0
        self._marks: deque[tuple[float, float, int]] = deque([(-math.inf, 0.0, 0)], maxlen=2)
        self._last: Request | None = None

    def granted(self, work_id: str) -> None:
        """A work will reach the engine as soon as its owner has heard."""
        self._on_the_way[work_id] = None

    def asked(self, request: Request) -> None:
        """A work was let in; if the round places it here, the next view counts it."""
        self._last = request

    def judge(self, request: Request, view: EngineView, leader: Replica) -> Guard:
        """What keeps a bulk request from starting now; NONE when nothing does."""
        ledger = leader.roster[self.host.name].ledger
        self.host.catch_up()
        now_s, steps = self._world.now_s, self.host.engine.totals.steps
        more = view.in_flight_total - self._known - self._added
        if self._trajectory is not None and steps == self._steps and now_s - self._taken_s < KEPT_S:
            if more == 1 and self._last is not None:
                self._trajectory.add(self._last)
                self._added, self._last, more = self._added + 1, None, 0
            if not more:
                return self._trajectory.judge(request)
        self._trajectory, self._taken_s, self._steps = self._seen(), now_s, steps
        self._known, self._added = sum(ledger.in_flight.values()), 0
        if view.in_flight_total != self._known:
            return Guard.STALE  # placed in this round, and nobody knows what: the next round sees them
        return self._trajectory.judge(request)

    def _seen(self) -> Trajectory:
        """From the engine as it is, and what is on its way there."""
        host, world = self.host, self._world
        duration_s = world.plan.duration_s if world.plan.backlog is not None else None
        trajectory = Trajectory(
            self._arrivals,
            host,
            now_s=world.now_s,
            until_s=duration_s,
            tpot_sla_s=self._tpot_sla_s,
            lately_s=self._lately_s(),
            burst_part=self._burst_part,
            is_bulk=self._is_bulk,
        )
        self._last = None
        for work_id in list(self._on_the_way):
            course = world.courses.get(work_id)
            if course is None or course.attempt is not None:
                del self._on_the_way[work_id]
            else:
                trajectory.add(course.request)
        return trajectory

    def _lately_s(self) -> float:
        """What a step of the engine took on average over the last LATELY_S or two, prompts included."""
        now_s, totals = self._world.now_s, self.host.engine.totals
        if totals.steps < self._marks[-1][2]:  # another engine in its place
            self._marks.clear()
            self._marks.append((now_s, totals.busy_s, totals.steps))
        if now_s - self._marks[-1][0] >= LATELY_S:
            self._marks.append((now_s, totals.busy_s, totals.steps))
        _, busy_s, steps = self._marks[0]
        return (totals.busy_s - busy_s) / (totals.steps - steps) if totals.steps > steps else 0.0

    def _is_bulk(self, sequence_id: str) -> bool:
        course = self._world.courses.get(sequence_id)
        return course is not None and course.work.class_name == BULK
