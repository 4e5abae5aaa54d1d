"""One process's membership in a pool: the parts that every process has, wired to each other.

    presence   session, leadership, clock            herald    engines as the leader sees them
    owner      works whose sockets are here          steward   what a leader does for the others
    dispatcher who may start where                   credit    what may start without asking
    capacity   what clients are told would fit

Which of them acts depends on one fact that can change at any time: whether this process leads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace

from gateway.clock import PoolClock
from gateway.control.herald import Herald, OpenKind
from gateway.control.policy_store import PolicyStore
from gateway.control.presence import Presence
from gateway.control.roster import Engine, Roster
from gateway.dispatch.capacity import Capacity
from gateway.dispatch.credit import CreditBook
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.ledger import Ledger
from gateway.dispatch.owner import Owner
from gateway.dispatch.planner import Meter, Sink
from gateway.dispatch.steward import Steward
from gateway.logs import Log
from gateway.queue.base import Expired, Queue, Renewed, SessionReport
from gateway.queue.batcher import Batcher
from policies.behaviour import Behaviours
from policies.sizing import SizingPolicy

Run = Callable[[], Coroutine[None, None, None]]


class Member:
    """See the module header. The parts are public; their owner runs what `background` lists.

    sole        nobody else can reach the queue's store
    candidate   this process may lead
    serves      this process takes requests; one that does not needs no credit and no share
    """

    def __init__(
        self,
        queue: Queue,
        *,
        session_id: str,
        sole: bool,
        candidate: bool,
        serves: bool = True,
        store: PolicyStore,
        sizing: SizingPolicy,
        roster: Roster,
        ledger: Ledger,
        clock: PoolClock,
        rng: random.Random,
        log: Log,
        open_kind: OpenKind,
        sink: Sink,
        on_heard: Callable[[Engine], None],
        on_led: Callable[[], None] = lambda: None,
        behaviours: Behaviours | None = None,
        meter: Meter | None = None,
        make_dispatcher: Callable[..., Dispatcher] = Dispatcher,
    ) -> None:
        """session_id must be unique among all processes ever started, e.g. 64 random bits. The ledger is the roster's."""
        self._log = log
        self._clock = clock
        self._serves = serves
        self._sizing = sizing
        self._behaviours = Behaviours() if behaviours is None else behaviours
        self.credit = CreditBook()
        self.presence = Presence(
            queue,
            clock,
            session_id=session_id,
            sole=sole,
            candidate=candidate,
            rng=rng,
            report=self._report,
            on_renewed=self._renewed,
            on_registered=self._registered,
            on_expired=self._expired,
            on_led=on_led,
        )
        self.batcher = Batcher(queue, session=lambda: self.presence.session, now_ms=self.presence.now_ms)
        self.owner = Owner(queue, self.batcher, self.presence, clock)
        self.steward = Steward(
            queue=queue,
            presence=self.presence,
            store=store,
            sizing=sizing,
            roster=roster,
            ledger=ledger,
            clock=clock,
        )
        self.dispatcher = make_dispatcher(
            queue=queue,
            presence=self.presence,
            store=store,
            sizing=sizing,
            roster=roster,
            ledger=ledger,
            steward=self.steward,
            credit=self.credit,
            clock=clock,
            rng=rng,
            deliver=self.owner.granted,
            refuse=self.owner.refused,
            sink=sink,
            meter=meter,
        )
        self.owner.serve(self.dispatcher)
        self.capacity = Capacity(
            store=store, roster=roster, sizing=sizing, presence=self.presence, dispatcher=self.dispatcher, clock=clock
        )
        self.herald = Herald(
            queue,
            self.presence,
            roster,
            clock,
            open_kind=open_kind,
            learned=self._learned,
            restore=self._restore,
            on_heard=on_heard,
            on_learned=self._followed,
        )

    def background(self) -> Mapping[str, Run]:
        """What has to run for as long as the process is a member, by name."""
        runs: dict[str, Run] = {
            "presence": self.presence.run,
            "dispatcher": self.dispatcher.run,
            "owner": self.owner.run,
        }
        if not self.presence.sole:
            runs["herald"] = self.herald.run
        return runs

    def _report(self) -> SessionReport:
        report = self.owner.report()
        return report if self._serves else replace(report, serves=False)

    def _renewed(self, renewed: Renewed, sent_s: float, now_ms: int) -> None:
        self.credit.renewed(renewed, sent_s=sent_s, now_ms=now_ms, error_s=self._clock.error_s)
        self.dispatcher.renewed()
        self.herald.there_is(renewed.snapshot_version)

    def _registered(self) -> None:
        self._log.warning("session registered anew: the queue had lost it", session=self.presence.session.id)
        self.dispatcher.registered()
        self.owner.registered()

    def _expired(self, expired: Expired) -> None:
        if expired.owner_gone:
            self._log.warning("works of a dead process settled", works=len(expired.owner_gone))
        if expired.ended:
            self.dispatcher.ended(expired.ended)

    async def _learned(self) -> Mapping[str, object]:
        capacity = await self.capacity.published()
        return {
            "sizing": self._sizing.snapshot(),
            "tenants": self.dispatcher.planner.tenants.snapshot(),
            "capacity": capacity,
        }

    def _followed(self, learned: Mapping[str, object]) -> None:
        """What the leader has learned and this process makes use of."""
        room = learned.get("capacity")
        if isinstance(room, Mapping):
            self.capacity.heard(room)

    def _restore(self, learned: Mapping[str, object]) -> None:
        parts = (
            ("sizing", self._sizing.restore),
            ("tenants", self.dispatcher.planner.tenants.restore),
            ("behaviours", self._behaviours.restore),
        )
        for part, restore in parts:
            state = learned.get(part)
            if isinstance(state, Mapping):
                restore(state)
