"""What a decision is made by, and the decision: a round's or one arrival's, from views of the engines and what was learned.

All of it is synchronous, and pure but for what it has learned from single attempts: paces, first tokens on idle engines,
beginnings that engines may keep, each tenant's share. The dispatcher reads the queue before and claims after.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from gateway.clock import Clock
from gateway.control.roster import Roster
from gateway.dispatch.ledger import Ledger
from policies.dispatching import Placement, look_for_room, place_one, plan_batches
from policies.estimators.alone import Alone
from policies.estimators.pace import Pace
from policies.estimators.prefix_caches import PrefixCaches
from policies.ordering import TenantCounters, urgent
from policies.ordering.crowd import Crowd
from policies.ordering.feasibility import Outlook
from policies.ordering.shedding import Infeasible, Shedding, crowding
from policies.preemption import by_memory, plan_recalls
from policies.schema import Policy
from policies.sizing import Finished, FirstToken, Granted, SizingPolicy
from policies.vocabulary import Decision, DispatchBatch, EngineState, EngineView, Work

BATCHES_KEPT = 64

Sink = Callable[[Decision], None]
"""Where decisions are told: the telemetry, the recorder, the console. Called synchronously; must not raise."""


class Meter(Protocol):
    """Where the figures of decisions are counted. Called synchronously; must not raise."""

    def decided(self, kind: str, seconds: float) -> None:
        """A decision took so long; kind is "round" or "arrival"."""
        ...

    def dispatched(self, batch: DispatchBatch) -> None:
        """One round sends this to one engine."""
        ...


LEAST_SEEN = 12
"""Observations of an engine after which its learned speed is better than none."""


class Unmetered:
    """Counts nothing."""

    def decided(self, kind: str, seconds: float) -> None: ...

    def dispatched(self, batch: DispatchBatch) -> None: ...


class Planner:
    """See the module header. One for each dispatcher."""

    __slots__ = (
        "_alone",
        "_caches",
        "_clock",
        "_crowd",
        "_ledger",
        "_meter",
        "_pace",
        "_refuse",
        "_rng",
        "_roster",
        "_shedding",
        "_sink",
        "_sizing",
        "latest_batches",
        "tenants",
    )

    def __init__(
        self,
        *,
        sizing: SizingPolicy,
        roster: Roster,
        ledger: Ledger,
        clock: Clock,
        rng: random.Random,
        refuse: Callable[[Infeasible], bool],
        sink: Sink,
        meter: Meter | None = None,
    ) -> None:
        """refuse tells the owner in this process; False when the work is not waiting here."""
        self._sizing = sizing
        self._roster = roster
        self._ledger = ledger
        self._clock = clock
        self._rng = rng
        self._refuse = refuse
        self._sink = sink
        self._meter = meter or Unmetered()
        self.tenants = TenantCounters()
        self.latest_batches: deque[DispatchBatch] = deque(maxlen=BATCHES_KEPT)
        self._pace = Pace()
        self._alone = Alone()
        self._caches = PrefixCaches()
        self._crowd = Crowd()
        self._shedding = Shedding()

    def place(self, work: Work, policy: Policy, now_s: float) -> Placement | None:
        """Where a work that nothing waits before starts; None: nowhere now, or it is a round's to refuse it."""
        begun_s = self._clock.now_s()
        views = self._roster.views(begun_s)
        draw = self._rng.random()
        placement = None
        if not (work.deadline_s is not None and self._crowd.long(work) and self._crowds(work, views, policy, now_s)):
            placement = place_one(
                work, views, self._sizing, policy, now_s, draw, tenants=self.tenants, caches=self._caches
            )
        self._meter.decided("arrival", self._clock.now_s() - begun_s)
        return placement

    def plan(self, waiting: Sequence[Work], policy: Policy, now_s: float) -> tuple[list[Placement], list[Work]]:
        """What starts now, and who with an objective still waits then, in order, where giving up others could help. Those
        that cannot be in time are refused, where their class says so.

        Most rounds find no room: what orders works is asked only when some can start, be refused or gain from a recall.
        """
        begun_s = self._clock.now_s()
        views = self._roster.views(begun_s)
        draw = self._rng.random()
        names = sorted({work.class_name for work in waiting})
        full = look_for_room(names, views, self._sizing, now_s)
        due: list[Work] = []
        if any(
            one.has_ttft_objective
            and (name not in full.shut or one.on_infeasible != "late" or by_memory(full.refusals[name].values()))
            for name, one in ((name, policy.class_policy(name)) for name in names)
        ):
            by_deadline = self._caches.waiting(urgent(waiting, policy, self.tenants), _up(views), now_s)
            outlook = Outlook(by_deadline, views, self._pace, now_s, never=policy.relative)
            due = outlook.order(policy)
            if refused := self._refuse_infeasible(outlook, policy, now_s):
                due = [work for work in due if work.id not in refused]
        placements, batches = plan_batches(
            waiting,
            views,
            self._sizing,
            policy,
            now_s,
            draw,
            tenants=self.tenants,
            due=due,
            full=full,
            caches=self._caches,
        )
        self.latest_batches.extend(batches)
        for batch in batches:
            self._meter.dispatched(batch)
        placed = {placement.work.id for placement in placements}
        self._meter.decided("round", self._clock.now_s() - begun_s)
        return placements, [work for work in due if work.id not in placed]

    def make_way(self, due: Sequence[Work], policy: Policy, now_s: float) -> None:
        """Give up works that run here for those with an objective that wait for memory alone."""
        if not due:
            return
        recalls = plan_recalls(
            due,
            self._roster.views(self._clock.now_s()),
            self._sizing,
            policy,
            now_s,
            lambda engine: self._ledger[engine].recallable(),
        )
        for one in recalls:
            self._sink(one.decision)
            for victim in one.victims:
                self._ledger[one.engine].recall(victim.work.id, victim.attempt)

    def counted(self, work: Work, policy: Policy) -> None:
        """A work has its place, whoever gave it: it counts for its tenant from now on."""
        self.tenants.granted(work, policy.tenant(work.tenant).weight)

    def granted(self, work: Work, policy: Policy, now_s: float) -> None:
        """A placement becomes a grant."""
        self.counted(work, policy)
        if work.deadline_s is not None:
            self._shedding.granted(work.tenant, now_s)

    def learn(self, at_s: float, event: Granted | FirstToken | Finished) -> Work:
        """From what happens to single attempts, here or in another process. The work, as predictions take it on its engine."""
        work = event.work
        match event:
            case Granted():
                work = self._caches.granted(event.engine, work, event.attempt)
                event = replace(event, work=work)
                self._pace.granted(event.engine, work, event.attempt, at_s)
                if event.attempt == 1:
                    self._crowd.came(work, at_s)
            case FirstToken():
                if not self._caches.first_token(work.id, event.attempt):
                    self._alone.first_token(work.model, work.prompt_tokens, event.engine_ttft_s)
                self._pace.first_token(work.id, event.attempt, at_s)
            case Finished():
                work = self._caches.ended(event.engine, work, event.attempt, event.outcome)
                self._pace.ended(work.id, event.attempt)
                self._look_at_speed(event)
                self.tenants.on_event(work, event.outcome)
        self._sizing.on_event(event, at_s)
        return work

    def _look_at_speed(self, event: Finished) -> None:
        """Clients that do not stream show no first token: what the sizing policy makes of whole answers has to do."""
        if event.work.streams:
            return
        step = self._sizing.learned_step(event.engine)
        if step is not None and step.seen >= LEAST_SEEN:
            self._pace.suppose(event.engine, step.per_prompt_token_s)

    def heard(self, view: EngineView) -> None:
        """What an engine says, as of the control tick."""
        self._caches.heard(view)

    def untold(self, work: Work) -> None:
        """The next attempt of a work was granted, and nobody will tell what comes of it."""
        self._pace.ended(work.id, work.attempt + 1)
        self._caches.forget(work.id, work.attempt + 1)
        self.tenants.on_event(work, None)

    def alone_s(self, model: str, prompt_tokens: int) -> float | None:
        """What a prompt of this size takes to its first token on an idle engine; None: nobody has seen one yet."""
        return self._alone.seconds(model, prompt_tokens)

    def _crowds(self, work: Work, views: Sequence[EngineView], policy: Policy, now_s: float) -> bool:
        """Others would be late for it, were it taken in."""
        (work,) = self._caches.waiting([work], _up(views), now_s)
        return crowding(work, Outlook((), views, self._pace, now_s), self._crowd, policy, now_s) is not None

    def _refuse_infeasible(self, outlook: Outlook, policy: Policy, now_s: float) -> set[str]:
        """Refuse what cannot be in time where its class says so; ids of those that heard it. Works of other processes
        keep their place behind the rest: their owners give them up at their deadlines."""
        refused = self._shedding.refuse(outlook, self._crowd, policy, now_s, self._tell)
        for one in refused:
            if policy.class_policy(one.work.class_name).on_infeasible == "shed":  # else it comes again
                self._crowd.came(one.work, now_s)
            self._sink(one.decision(policy, now_s))
        return {one.work.id for one in refused}

    def _tell(self, one: Infeasible) -> bool:
        """Nobody is refused for tokens that a cache may have, before it has been looked for them."""
        return self._caches.looked_for(one.work) and self._refuse(one)


def _up(views: Sequence[EngineView]) -> frozenset[str]:
    return frozenset(view.name for view in views if view.state is EngineState.UP)
