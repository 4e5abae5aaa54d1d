"""Which waiting work starts where, now: the pool's one decider, and the only writer of its ledger.

Decide synchronously, then await: a round reads a look-ahead from the queue, plans with pure functions of `policies`
over that look-ahead and the engines' views, writes every placement into the ledger, and only then claims the works by
id. A claim that the queue refuses (cancelled, taken, an old epoch) is taken out of the ledger again.

A work that nothing waits before starts without a round trip (`start_now`): the ledger is at hand in this process, so
no credit is needed, and an entry that would be claimed in the same millisecond is never written.

Wake-ups: the pool's bell, a freed place, an engine that came up, and every TICK_S while anything waits (guards that
depend on time alone, lost bells). A round that cannot reach the queue leaves everything where it is.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from gateway.clock import Clock
from gateway.control.policy_store import PolicyStore
from gateway.control.presence import Presence
from gateway.control.roster import Roster
from gateway.dispatch.ledger import Ledger, Progress
from gateway.queue.base import Queue, QueueUnavailable
from policies.dispatching import Placement, place_one, plan_round
from policies.ordering import TenantCounters
from policies.schema import Policy
from policies.sizing import FirstToken, Finished, Sampled, SizingPolicy
from policies.vocabulary import Decision, Grant, Outcome, Work

TICK_S = 0.25
GRANT_VALID_S = 5.0
LOOK_AHEAD_TTFT_CLASS = 512
LOOK_AHEAD_OTHER = 64

Sink = Callable[[Decision], None]
"""Where decisions are told: the telemetry, the recorder, the console. Called synchronously; must not raise."""


class Dispatcher:
    """See the module header. One per pool and process; decides only while `presence.leads`."""

    __slots__ = (
        "_clock",
        "_deliver",
        "_depths",
        "_ledger",
        "_overdue",
        "_presence",
        "_queue",
        "_rng",
        "_roster",
        "_sink",
        "_sizing",
        "_store",
        "_tenants",
        "_uncertain",
        "_waiting_here",
        "_wake",
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
        clock: Clock,
        rng: random.Random,
        deliver: Callable[[Grant], bool],
        sink: Sink,
    ) -> None:
        """deliver hands a grant to the owner in this process; False when the work is not waiting here."""
        self._queue = queue
        self._presence = presence
        self._store = store
        self._sizing = sizing
        self._roster = roster
        self._ledger = ledger
        self._clock = clock
        self._rng = rng
        self._deliver = deliver
        self._sink = sink
        self._tenants = TenantCounters()
        self._depths: Mapping[tuple[str, str], int] = {}
        self._waiting_here: dict[str, int] = {}
        self._overdue = False
        self._uncertain: dict[tuple[str, int], Grant] = {}
        self._wake = asyncio.Event()

    # -- what owners tell ------------------------------------------------------------------------------------------

    def start_now(self, work: Work) -> Grant | None:
        """Grant a work that nothing waits before, without a round trip; None: it has to wait in the queue."""
        if not self._presence.leads or self._overdue:
            return None
        policy = self._store.current
        if self._others_first(work, policy):
            return None
        now_s = self._clock.pool_s()
        views = self._roster.views(self._clock.now_s())
        placement = place_one(work, views, self._sizing, policy, now_s, self._rng.random(), tenants=self._tenants)
        return None if placement is None else self._grant(placement, now_s)

    def entered(self, work: Work) -> None:
        """A work began to wait in the queue."""
        self._waiting_here[work.class_name] = self._waiting_here.get(work.class_name, 0) + 1
        self.wake()

    def left(self, work: Work) -> None:
        """A work stopped waiting: granted, cancelled or refused."""
        self._waiting_here[work.class_name] -= 1

    def attach(self, grant: Grant, progress: Progress) -> None:
        """An attempt runs; its live token counter feeds the ledger."""
        self._ledger[grant.engine].attach(grant.work_id, grant.attempt, progress)

    def first_token(self, work: Work, grant: Grant, engine_ttft_s: float) -> None:
        """An attempt showed its first token."""
        self._ledger[grant.engine].first_token(grant.work_id, grant.attempt)
        self._sizing.on_event(FirstToken(work, grant.engine, engine_ttft_s), self._clock.pool_s())
        self.wake_if_waiting()

    def finished(self, work: Work, grant: Grant, outcome: Outcome | None) -> None:
        """An attempt ended, or its grant will not be used; frees its place. Idempotent per attempt."""
        if self._ledger[grant.engine].remove(grant.work_id, grant.attempt):
            now_s = self._clock.pool_s()
            self._uncertain.pop((grant.work_id, grant.attempt), None)
            self._sizing.on_event(Finished(work, grant.engine, outcome), now_s)
            self._tenants.on_event(work, outcome)
            self.wake_if_waiting()

    def wake(self) -> None:
        """Look at the queue as soon as the loop turns."""
        self._wake.set()

    def wake_if_waiting(self) -> None:
        if any(self._waiting_here.values()) or self._depths:
            self._wake.set()

    @property
    def depth_seen(self) -> int:
        """Works that the queue held at our last look."""
        return sum(self._depths.values())

    def depth(self, class_name: str) -> int:
        """Works of a class waiting, as far as this process knows."""
        seen = sum(count for (name, _tenant), count in self._depths.items() if name == class_name)
        return max(self._waiting_here.get(class_name, 0), seen)

    def depths(self) -> dict[str, int]:
        """`depth` of every class with anything waiting."""
        names = {name for name, _tenant in self._depths} | set(self._waiting_here)
        return {name: self.depth(name) for name in names}

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
        """One round; True when it placed something, so that another look may find more."""
        if not self._presence.leads:
            return False
        policy = self._store.current
        bounds = {name: LOOK_AHEAD_TTFT_CLASS for name, one in policy.classes.items() if one.has_ttft_objective}
        waiting = await self._queue.peek(bounds=bounds, default_bound=LOOK_AHEAD_OTHER, now_ms=self._presence.now_ms())
        self._depths = waiting.depths
        now_s = self._clock.pool_s()
        self._overdue = any(policy.overdue(work, now_s) for work in waiting.works)
        if not waiting.works:
            return False
        views = self._roster.views(self._clock.now_s())
        fresh = [work for work in waiting.works if (work.id, work.attempt + 1) not in self._uncertain]
        placements = plan_round(fresh, views, self._sizing, policy, now_s, self._rng.random(), tenants=self._tenants)
        # A claim that may or may not have been made is repeated as it was, not decided anew: its place is still held.
        repeated = [
            grant for work in waiting.works if (grant := self._uncertain.get((work.id, work.attempt + 1))) is not None
        ]
        grants = [*repeated, *(self._grant(placement, now_s) for placement in placements)]
        if not grants:
            return False
        await self._claim(grants)
        return bool(placements)

    async def _claim(self, grants: list[Grant]) -> None:
        """Make grants the works' state. A reply lost twice leaves them reserved until they expire."""
        try:
            answers = await self._claim_once_more(grants)
        except BaseException:
            for grant in grants:
                self._uncertain[grant.work_id, grant.attempt] = grant
            raise
        for grant, claimed in zip(grants, answers, strict=True):
            self._uncertain.pop((grant.work_id, grant.attempt), None)
            if not claimed or not self._deliver(grant):
                self._take_back(grant)

    async def _claim_once_more(self, grants: list[Grant]) -> list[bool]:
        try:
            return await self._queue.claim_many(grants, now_ms=self._presence.now_ms())
        except QueueUnavailable:
            return await self._queue.claim_many(grants, now_ms=self._presence.now_ms())

    def _grant(self, placement: Placement, now_s: float) -> Grant:
        work, engine = placement.work, placement.engine
        attempt = work.attempt + 1
        self._ledger[engine].add(work, attempt, now_s)
        self._tenants.granted(work, self._store.current.tenant(work.tenant).weight)
        self._sink(placement.decision)
        return Grant(work.id, engine, self._presence.epoch, attempt, now_s + GRANT_VALID_S)

    def _others_first(self, work: Work, policy: Policy) -> bool:
        """True when a work of the same or a more urgent class waits."""
        own = _place(policy, work.class_name)
        return any(count and _place(policy, name) <= own for name, count in self._waiting_here.items())

    async def _listen(self) -> None:
        async for _ in self._queue.bell(None):
            self.wake()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S * self._rng.uniform(0.9, 1.0))
            self._ledger.refresh()
            now_s = self._clock.pool_s()
            queued = self.depths()
            for view in self._roster.views(self._clock.now_s()):
                self._sizing.on_event(Sampled(view, queued), now_s)
            self._drop_uncertain(now_s)
            self.wake_if_waiting()

    def _drop_uncertain(self, now_s: float) -> None:
        """Free what was reserved for claims whose fate never became known."""
        for key, grant in list(self._uncertain.items()):
            if grant.expires_s < now_s:
                del self._uncertain[key]
                self._take_back(grant)

    def _take_back(self, grant: Grant) -> None:
        """Free the place of a grant that nobody will use."""
        entry = self._ledger[grant.engine].entries.get((grant.work_id, grant.attempt))
        if entry is not None:
            self.finished(entry.work, grant, None)

    def settle_uncertain(self, grant: Grant) -> bool:
        """An owner found a grant whose claim's reply was lost: True when its place is still reserved."""
        return self._uncertain.pop((grant.work_id, grant.attempt), None) is not None

    def __repr__(self) -> str:
        return f"<Dispatcher waiting={self.depths()} {self._ledger!r}>"


def _place(policy: Policy, class_name: str) -> int:
    """How early a class's turn comes; one that the policy no longer names comes last."""
    order = policy.precedence
    return order.index(class_name) if class_name in order else len(order)
