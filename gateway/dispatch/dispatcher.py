"""Which waiting work starts where, now: the pool's one decider, and the only writer of its ledger.

Decide synchronously, then await: a round reads a look-ahead from the queue, plans with pure functions of `policies`
over that look-ahead and the engines' views, writes every placement into the ledger, and only then claims the works by
id. A claim that the queue refuses (cancelled, taken, an old epoch) is taken out of the ledger again. One whose answer was
lost is repeated as it was until it is answered, and holds its place until then.

A work that nothing waits before starts without a round trip (`start_now`). Where this process is the pool's only one
the ledger itself says whether there is room; where others could take over, it is credit that was written to the store
before, this process's own as well as any other's, so that a successor never finds more in flight than it can know of.

One exists in every process of the pool. Only the leader's decides; the others' keep count of their own attempts.

Wake-ups: the pool's bell, a freed place, an engine that came up, and every TICK_S while anything waits (guards that
depend on time alone) or other processes may have what waits (lost bells). A round that cannot reach the queue leaves
everything where it is.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

from gateway.clock import Clock
from gateway.control.policy_store import PolicyStore
from gateway.control.presence import Presence
from gateway.control.roster import Engine, Roster
from gateway.dispatch.credit import RESIZED_S, CreditBook
from gateway.dispatch.journal import Journal
from gateway.dispatch.ledger import Ledger, Progress
from gateway.dispatch.planner import Meter, Planner, Sink
from gateway.dispatch.queued import LOOK_AHEAD_OTHER, Queued
from gateway.dispatch.steward import Hearing, Steward
from gateway.queue.base import Claimed, InFlight, Place, Queue, QueueUnavailable, SessionReport, Vitals
from policies.dispatching import Placement
from policies.ordering.shedding import Infeasible
from policies.placement import suited
from policies.schema import Policy
from policies.sizing import Finished, FirstToken, Granted, Progressed, Sampled, SizingPolicy
from policies.vocabulary import Action, Decision, Grant, Guard, Outcome, Work

TICK_S = 0.25
GRANT_VALID_S = 5.0


class Dispatcher:
    """See the module header. One per pool and process; decides only while `presence.leads`."""

    __slots__ = (
        "_clock",
        "_credit",
        "_deciding",
        "_deliver",
        "_in_vain",
        "_journal",
        "_ledger",
        "_presence",
        "_queue",
        "_resized_s",
        "_rng",
        "_roster",
        "_sink",
        "_sizing",
        "_steward",
        "_store",
        "_took_over",
        "_uncertain",
        "_wake",
        "planner",
        "queued",
    )

    def __init__(
        self,
        *,
        queue: Queue,
        presence: Presence,
        store: PolicyStore,
        sizing: SizingPolicy,
        roster: Roster,
        ledger: Ledger,
        steward: Steward,
        credit: CreditBook,
        clock: Clock,
        rng: random.Random,
        deliver: Callable[[Grant], bool],
        refuse: Callable[[Infeasible], bool],
        sink: Sink,
        meter: Meter | None = None,
    ) -> None:
        """deliver hands a grant to the owner in this process; False when the work is not waiting here. refuse likewise."""
        self._queue = queue
        self._presence = presence
        self._store = store
        self._sizing = sizing
        self._roster = roster
        self._ledger = ledger
        self._journal = Journal(ledger)
        self._steward = steward
        self._credit = credit
        self._clock = clock
        self._rng = rng
        self._deliver = deliver
        self._sink = sink
        self.queued = Queued()
        self.planner = Planner(
            sizing=sizing, roster=roster, ledger=ledger, clock=clock, rng=rng, refuse=refuse, sink=sink, meter=meter
        )
        self._in_vain = 0
        self._resized_s = -math.inf
        self._uncertain: dict[tuple[str, int], Grant] = {}
        self._took_over = 0
        self._wake = asyncio.Event()
        # Rounds and a leader's duties take turns: what one reads of the store is not old when it acts on it.
        self._deciding = asyncio.Lock()

    # -- what owners tell ------------------------------------------------------------------------------------------

    def start_now(self, work: Work) -> Grant | None:
        """Grant a work that nothing waits before, without a round trip; None: it has to wait in the queue."""
        policy = self._store.current
        if self.queued.comes_before(work, policy):
            return None
        if self._presence.sole:
            if not self._decides or self.queued.overdue:
                return None
            now_s = self._clock.pool_s()
            placement = self.planner.place(work, policy, now_s)
            return None if placement is None else self._grant(placement, now_s)
        return self._start_on_credit(work, policy)

    def start_on_share(self, work: Work) -> Grant | None:
        """Grant a work that waits in this process while the store cannot be reached, if our share of a place is free."""
        if not self._on_share:
            return None
        attempt = work.attempt + 1
        uncertain = self._uncertain.get((work.id, attempt))
        if uncertain is not None:  # from when we led; where it was made, nobody starts it there any more
            self._take_back(uncertain)
        if self._ledger.engine_of(work.id, attempt) is not None:
            return None  # a claim of ours is on its way still
        return self._start_on_credit(work, self._store.current)

    def has_share(self, work: Work) -> bool:
        """Whether we are cut off and may run works like this one, now or when others have ended."""
        now_s = self._clock.now_s()
        return (
            self._on_share
            and self._store.current.class_policy(work.class_name).has_ttft_objective
            and any(
                self._credit.share((view.name, work.class_name), now_s)
                for view in suited(work, self._roster.views(now_s))
            )
        )

    def accept(self, work: Work, grant: Grant) -> None:
        """An owner in this process takes a grant up, whoever gave it: count it here if it is not counted yet."""
        self._found(grant)
        if (grant.work_id, grant.attempt) not in self._ledger[grant.engine].entries:
            there = self._count(work, grant.engine, grant.attempt, self._clock.pool_s())
            self.planner.counted(there, self._store.current)
        self._take(work, grant.engine, grant.attempt)

    def honours(self, grant: Grant) -> bool:
        """Whether a grant may be used: not expired on anybody's clock, not replaced by a leader that we heard of, for an
        engine that this process knows how to speak to by now."""
        return (
            self._presence.surely_before(grant.expires_s)
            and grant.epoch >= max(self._credit.epoch, self._presence.epoch)
            and grant.engine in self._roster
            and self._roster[grant.engine].backend is not None
        )

    def report(self, grants_seq: int) -> SessionReport:
        """What this process runs, as its session reports it; grants_seq: the last grant that was taken up."""
        epoch = 0 if self._presence.epoch or self._presence.sole else self._credit.epoch
        events = self._journal.to_tell(epoch, self._presence.now_ms())
        vitals = {engine.name: engine.pulse.vitals(self._clock) for engine in self._roster}
        running = self._ledger.running_here()
        self._credit.reporting(self._of_windows_in_force(running), self._clock.now_s())
        return SessionReport(
            running, dict(self._credit.started), grants_seq, vitals, floors=dict(self._credit.floors), events=events
        )

    def vitals(self, engine: Engine) -> dict[object, Vitals]:
        """What calls to an engine say of it, by process; this one's under None."""
        return {None: engine.pulse.vitals(self._clock), **self._steward.vitals(engine.name)}

    def policy_changed(self, old: Policy, new: Policy) -> None:
        """Another policy is in force."""
        if old.sizing != new.sizing:
            self._credit.resized(self._clock.now_s())
            self._resized_s = self._clock.pool_s() + RESIZED_S
        self.wake()

    def renewed(self) -> None:
        """The last report has arrived."""
        self._journal.answered()

    def registered(self) -> None:
        """Our session is another one."""
        self._credit.lost()
        self._journal.registered()

    @property
    def events_dropped(self) -> int:
        """Events of attempts that no leader could learn from: dropped here, or on the way here while this process led."""
        return self._journal.dropped + self._steward.missed

    def entered(self, work: Work) -> None:
        """A work began to wait in the queue."""
        self.queued.entered(work)
        self.wake()

    def left(self, work: Work) -> None:
        """A work stopped waiting: granted, cancelled or refused."""
        self.queued.left(work)

    def attach(self, grant: Grant, progress: Progress) -> None:
        """An attempt runs; its live token counter feeds the ledger."""
        self._ledger[grant.engine].attach(grant.work_id, grant.attempt, progress)

    def first_token(self, work: Work, grant: Grant, engine_ttft_s: float) -> None:
        """An attempt showed its first token. That of an answer told whole comes with its end, and says nothing of the prompt."""
        self._ledger[grant.engine].first_token(grant.work_id, grant.attempt)
        if not work.streams:
            return
        now_s = self._clock.pool_s()
        self._journal.first_token(grant.work_id, grant.attempt, engine_ttft_s, int(now_s * 1000))
        self.planner.learn(now_s, FirstToken(work, grant.engine, engine_ttft_s, grant.attempt))
        self.wake_if_waiting()

    def finished(self, work: Work, grant: Grant, outcome: Outcome | None) -> None:
        """An attempt ended, or its grant will not be used; frees its place. Idempotent per attempt."""
        entry = self._ledger[grant.engine].entries.get((grant.work_id, grant.attempt))
        if entry is not None and self._ledger[grant.engine].remove(grant.work_id, grant.attempt):
            now_s = self._clock.pool_s()
            if not self._presence.sole:
                self._steward.finished(grant.engine, entry)
            self._known(grant)
            self._journal.ended(grant.work_id, grant.attempt, outcome, int(now_s * 1000))
            self.planner.learn(now_s, Finished(work, grant.engine, outcome, grant.attempt))
            self.wake_if_waiting()
            if not self._presence.sole:
                self._presence.hurry()

    def ended(self, sessions: Iterable[str]) -> None:
        """Processes of the pool are over, by the ids of their sessions."""
        self._take_in(self._steward.ended(sessions))
        self.wake()

    def wake(self) -> None:
        """Look at the queue as soon as the loop turns."""
        self._wake.set()

    def wake_if_waiting(self) -> None:
        if self.queued.anything or self._uncertain:
            self._wake.set()

    @property
    def leads(self) -> bool:
        """This process decides for the pool."""
        return self._presence.leads

    # -- the loop --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Dispatch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(), name="pool bell")
            group.create_task(self._tick(), name="control tick")
            while True:
                await self._wake.wait()
                self._wake.clear()
                try:
                    while await self.round():
                        pass
                except QueueUnavailable:
                    continue

    async def round(self) -> bool:
        """One round; True when it placed something, so that another look may find more. Raises QueueUnavailable."""
        async with self._deciding:
            return await self._round()

    async def _round(self) -> bool:
        if not self._presence.leads:
            return False
        if self._took_over != self._presence.epoch:
            await self._take_over()
        elif not self._steward.alone:
            self._take_in(await self._steward.hear())
        policy = self._store.current
        waiting = await self._queue.peek(
            bounds=self.queued.bounds(policy), default_bound=LOOK_AHEAD_OTHER, now_ms=self._presence.now_ms()
        )
        self.queued.looked(waiting)
        if not self._decides:
            return False
        policy = self._store.current  # it may have changed while we read, and the sizing policy with it
        now_s = self._clock.pool_s()
        self.queued.overdue = policy.any_overdue(waiting.works, now_s)
        alone = self._steward.alone
        # A grant to a process that does not read it would hold a place until its session is over, and as long again.
        owners = () if alone else set(waiting.owners.values())
        fresh = self.queued.apart_from([one for one in owners if self._steward.silent(one)], waiting.owners)
        if not alone:  # what its owner has started on its share waits in the store still
            fresh = [work for work in fresh if not self._steward.runs(work.id, work.attempt + 1)]
        if self._uncertain:
            fresh = [work for work in fresh if (work.id, work.attempt + 1) not in self._uncertain]
        placements: list[Placement] = []
        due: list[Work] = []
        if fresh:
            self._giving()
            placements, due = self.planner.plan(fresh, policy, now_s)
        # A claim that may or may not have been made is repeated as it was, not decided anew: its place is still held.
        repeated = [replace(grant, expires_s=now_s + GRANT_VALID_S) for grant in self._uncertain.values()]
        grants = [*repeated, *(self._grant(placement, now_s) for placement in placements)]
        self.planner.make_way(due, policy, now_s)
        if not grants:
            return False
        await self._claim(grants)
        if self._in_vain > 1:
            self._wake.clear()  # another process leads by now, or will soon: look again with the next tick
        return bool(placements) and not self._in_vain

    async def _claim(self, grants: list[Grant]) -> None:
        """Make grants the works' state. A reply lost twice leaves them reserved until the next round repeats them."""
        try:
            answers = await self._claim_once_more(grants)
        except BaseException:
            for grant in grants:
                entry = self._ledger[grant.engine].entries.get((grant.work_id, grant.attempt))
                # One that its owner has found in the store meanwhile runs by now, or is over.
                if entry is not None and not entry.taken:
                    self._uncertain[grant.work_id, grant.attempt] = grant
            raise
        for grant, claimed in zip(grants, answers, strict=True):
            self._uncertain.pop((grant.work_id, grant.attempt), None)
            if claimed is None:
                self._take_back(grant)
            elif claimed.owner.id == self._presence.session.id:  # also if that session of ours was lost meanwhile
                if not (self.honours(grant) and self._deliver(grant)):
                    self._take_back(grant)
            elif self._presence.sole:  # left by a process that died before us: nobody takes it up, and it will be swept
                self._take_back(grant)
            else:
                entry = self._ledger[grant.engine].entries.get((grant.work_id, grant.attempt))
                if entry is not None:
                    entry.claimed = claimed
        self._in_vain = 0 if any(answers) else self._in_vain + 1

    async def _claim_once_more(self, grants: list[Grant]) -> list[Claimed | None]:
        try:
            return await self._queue.claim_many(grants, now_ms=self._presence.now_ms())
        except QueueUnavailable:
            return await self._queue.claim_many(grants, now_ms=self._presence.now_ms())

    def _grant(self, placement: Placement, now_s: float) -> Grant:
        work, engine = placement.work, placement.engine
        attempt = work.attempt + 1
        if (runs_on := self._ledger.engine_of(work.id, attempt)) is not None:
            # The store lost its data between our claim and the answer, and was told of this work as waiting.
            return Grant(work.id, runs_on, self._presence.epoch, attempt, now_s + GRANT_VALID_S)
        there = self._count(work, engine, attempt, now_s)
        self.planner.granted(there, self._store.current, now_s)
        self._sink(placement.decision)
        return Grant(work.id, engine, self._presence.epoch, attempt, now_s + GRANT_VALID_S)

    def _count(self, work: Work, engine: str, attempt: int, now_s: float) -> Work:
        """Count an attempt from now on: in the ledger, and with whoever decides by what runs. The work, as these take it there."""
        self._ledger[engine].add(work, attempt, now_s)
        self.queued.granted(work)
        return self.planner.learn(now_s, Granted(work, engine, attempt))

    def _take(self, work: Work, engine: str, attempt: int) -> None:
        """An attempt that is counted is for this process to run, from now on."""
        now_s = self._clock.pool_s()
        self._ledger[engine].entries[work.id, attempt].taken_s = now_s
        self._journal.began(work, engine, attempt, int(now_s * 1000))

    async def _listen(self) -> None:
        async for _ in self._queue.bell(None):
            self.wake()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S * self._rng.uniform(0.9, 1.0))
            self._ledger.refresh()
            now_s = self._clock.pool_s()
            queued, late = self.queued.depths(), self.queued.late(self._store.current, now_s)
            for view in self._roster.views(self._clock.now_s()):
                self.planner.heard(view)
                running = chain(self._ledger[view.name].progress(), self._steward.running(view.name))
                self._sizing.on_event(Progressed(view.name, running), now_s)
                self._sizing.on_event(Sampled(view, queued, late), now_s)
            if self._presence.sole or not self._presence.leads:
                self.wake_if_waiting()
            else:  # a bell that was lost has told us of nothing
                self.wake()
            if not self._presence.sole:
                try:
                    async with self._deciding:
                        await self._attend()
                except QueueUnavailable:
                    continue

    @property
    def _on_share(self) -> bool:
        """We may be cut off; a leader has no use for a share as long as it may decide."""
        return self._presence.failing and not self._presence.leads

    @property
    def _decides(self) -> bool:
        """We lead at this moment, and know what our predecessors left."""
        return self._presence.leads and self._took_over == self._presence.epoch

    async def _take_over(self) -> None:
        """Begin our epoch: everything that was granted or allowed before counts from here on."""
        epoch = self._presence.epoch
        if not self._presence.sole:
            self._took_over = _BEGUN
            self._forget_others()
            for work in await self._steward.take_over():
                self.planner.counted(work, self._store.current)
            self._take_in(await self._steward.hear())
        self._took_over = epoch

    def _step_down(self) -> None:
        """Another process leads: forget what only a leader counts."""
        self._took_over = 0
        self.queued.forget_look()
        self._forget_others()

    def _forget_others(self) -> None:
        """Keep count of nothing but what runs here. A claim of ours that is still uncertain is a successor's to find."""
        for grant in list(self._uncertain.values()):
            self._take_back(grant)
        self._take_in(self._steward.step_down())

    async def _attend(self) -> None:
        """The leader's duties towards the other processes, each tick."""
        if not self._presence.leads:
            if self._took_over and not self._presence.epoch:
                self._step_down()
            return
        if self._took_over != self._presence.epoch:
            await self._take_over()
        else:
            self._take_in(await self._steward.hear())
        if self._decides:
            late = self.queued.late(self._store.current, self._clock.pool_s())
            waiting = {name: self.queued.depth(name) - late.get(name, 0) for name in self._store.current.classes}
            self._giving()
            await self._steward.give(waiting, self._credit.started)

    def _giving(self) -> None:
        """What is free is about to be given away: what we have of it is no share of ours."""
        if not self._presence.sole:
            self._credit.giving(self._ledger.running_here(), self._clock.now_s())

    def _of_windows_in_force(self, running: dict[Place, InFlight]) -> dict[Place, InFlight]:
        """Of what runs here, what was begun since everybody goes by the windows in force."""
        if self._resized_s == -math.inf:
            return running
        begun = self._ledger.running_here(self._resized_s)
        if begun == running and self._clock.pool_s() > self._resized_s:
            self._resized_s = -math.inf  # all that is older has ended
        return begun

    def _take_in(self, hearing: Hearing) -> None:
        """Learn from what happened elsewhere as from what happens here."""
        for entry in hearing.handed_over:
            self.planner.untold(entry.work)
        now_s, policy = self._clock.pool_s(), self._store.current
        for at_s, event in hearing.news:
            there = self.planner.learn(min(at_s, now_s), event)
            if isinstance(event, Granted):
                self.planner.counted(there, policy)

    def _start_on_credit(self, work: Work, policy: Policy) -> Grant | None:
        if not policy.class_policy(work.class_name).has_ttft_objective:
            return None
        now_s = self._clock.now_s()
        engines = [view.name for view in suited(work, self._roster.views(now_s))]
        if not engines:
            return None
        engine = self._credit.spend(work, engines, now_s)
        if engine is None and self._on_share:
            engine = self._credit.spend_share(work, engines, self._ledger.running_here(), now_s)
        if engine is None:
            return None
        pool_s = self._clock.pool_s()
        attempt = work.attempt + 1
        self.planner.counted(self._count(work, engine, attempt, pool_s), policy)
        self._take(work, engine, attempt)
        self._steward.spent(engine, self._credit.started)
        self._sink(
            Decision(
                Action.DISPATCH,
                pool_s,
                policy.version,
                work.class_name,
                engine,
                work.id,
                Guard.NONE,
                reason="credit",
            )
        )
        return Grant(work.id, engine, self._credit.epoch, attempt, pool_s + GRANT_VALID_S)

    def _take_back(self, grant: Grant) -> None:
        """Free the place of a grant that nobody will use. One that its owner has found in the store meanwhile runs: a refused
        claim may have been made by an earlier call whose answer was lost."""
        self._known(grant)
        entry = self._ledger[grant.engine].entries.get((grant.work_id, grant.attempt))
        if entry is not None and not entry.taken:
            self.finished(entry.work, grant, None)

    def _known(self, grant: Grant) -> None:
        """The fate of a claim is certain now."""
        key = (grant.work_id, grant.attempt)
        uncertain = self._uncertain.get(key)
        if uncertain is not None and uncertain.engine == grant.engine:
            del self._uncertain[key]

    def _found(self, grant: Grant) -> None:
        """The store has granted a work so: as we claimed it, or elsewhere, and then our claim was not made."""
        self._known(grant)
        elsewhere = self._uncertain.get((grant.work_id, grant.attempt))
        if elsewhere is not None:
            self._take_back(elsewhere)

    def holds(self, grant: Grant) -> bool:
        """An owner found a grant in the store: True when its place is counted here, whether or not we heard so."""
        key = (grant.work_id, grant.attempt)
        self._found(grant)
        return key in self._ledger[grant.engine].entries

    def __repr__(self) -> str:
        return f"<Dispatcher waiting={self.queued.depths()} {self._ledger!r}>"


_BEGUN = -1
"""A take-over that has not come to its end: no epoch, and nothing to decide by, but others are counted."""
