"""The store of a simulated world: the queue in memory, watched from where every process's word arrives.

What is checked here is what only the store can see: under which epoch a decision is taken in, that a bounded enqueue
keeps its bound, that nothing late replaces what is newer, that everything it holds has an owner. `check` looks at the whole; it is called now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from gateway.queue.base import (
    Claimed,
    Credit,
    Enqueued,
    Leadership,
    Place,
    Renewed,
    Session,
    SessionReport,
    Settled,
    Snapshot,
)
from gateway.queue.keys import encoded, session_from, session_part
from gateway.queue.memory_queue import MemoryQueue
from policies.vocabulary import Grant, Work
from tests.simulation.hosts import WALL_OFFSET_S
from tests.simulation.invariants import Invariant, InvariantBroken, Invariants

_Order = TypeVar("_Order", int, tuple[int, int])


class WatchedStore(MemoryQueue):
    """See the module header.

    flushed_s         when it last lost everything
    heard             each process's last report and when it arrived, by the id of its sessions
    granted_until_s   when each grant that was ever made expires, by (work, attempt)
    """

    __slots__ = ("_ended", "_invariants", "_time_s", "flushed_s", "granted_until_s", "heard")

    def __init__(self, time_s: Callable[[], float], offset_s: float, invariants: Invariants) -> None:
        self._time_s = time_s
        self._invariants = invariants
        self.flushed_s = float("-inf")
        self._ended: set[tuple[Session, str]] = set()
        self.heard: dict[str, tuple[float, SessionReport]] = {}
        self.granted_until_s: dict[tuple[str, int], float] = {}
        super().__init__(lambda: int((offset_s + time_s()) * 1000))

    def flush(self) -> None:
        self.flushed_s = self._time_s()
        self._ended.clear()
        self.forget()

    async def renew_session(
        self, session: Session, *, now_ms: int, valid_for_ms: int, report: SessionReport, ring: bool = False
    ) -> Renewed | None:
        before = self._sessions.get(session_part(session))
        renewed_ms = -1 if before is None else before.renewed_ms
        renewed = await super().renew_session(
            session, now_ms=now_ms, valid_for_ms=valid_for_ms, report=report, ring=ring
        )
        if renewed is not None:
            self._never_back(f"the report of {session}", self._sessions[session_part(session)].renewed_ms, renewed_ms)
            self.heard[session.id] = (self._time_s(), report)
        return renewed

    async def lead(self, candidate: str, *, now_ms: int, valid_for_ms: int) -> Leadership:
        leader, epoch, expires_ms = self._record.leader, self._record.epoch, self._record.expires_ms
        record = await super().lead(candidate, now_ms=now_ms, valid_for_ms=valid_for_ms)
        if expires_ms is not None and (record.leader, record.epoch) == (leader, epoch):
            self._never_back(f"the end of {leader}'s leadership", record.expires_ms, expires_ms)
        return record

    async def enqueue_many(
        self, works: Sequence[Work], *, session: Session, max_queue: Mapping[str, int], now_ms: int
    ) -> list[Enqueued]:
        before = dict(self._depths)
        known = {work.id for work in works if work.id in self._works}
        answers = await super().enqueue_many(works, session=session, max_queue=max_queue, now_ms=now_ms)
        for name, bound in max_queue.items():
            depth = self._depths[encoded(name)]
            if depth > max(bound, before.get(encoded(name), 0)):
                self._invariants.fail(
                    Invariant.QUEUE_BOUND,
                    f"at {self._time_s():.6f} s {depth} {name} works wait: enqueue's bound is {bound}",
                )
        for work in works:
            if work.id in self._works and work.id not in known and (session, work.id) in self._ended:
                self._invariants.fail(
                    Invariant.ENDED_STAYS, f"at {self._time_s():.6f} s work {work.id} waits: its owner has settled it"
                )
        return answers

    async def settle_many(self, ids: Sequence[tuple[str, int]], *, session: Session, now_ms: int) -> list[Settled]:
        answers = await super().settle_many(ids, session=session, now_ms=now_ms)
        # One that another session holds, an earlier one of the same process too, is not ended by this one.
        self._ended.update(
            (session, work_id)
            for (work_id, _), answer in zip(ids, answers, strict=True)
            if answer is not Settled.FENCED
        )
        return answers

    async def claim_many(self, grants: Sequence[Grant], *, now_ms: int) -> list[Claimed | None]:
        answers = await super().claim_many(grants, now_ms=now_ms)
        for grant, answer in zip(grants, answers, strict=True):
            if answer is not None:
                self._invariants.decided_under(grant.epoch, f"{grant.work_id} is claimed", self._time_s())
                self.granted_until_s[grant.work_id, grant.attempt] = grant.expires_s
        return answers

    async def give_credit(self, credits: Mapping[Session, Mapping[Place, Credit]], *, epoch: int, now_ms: int) -> bool:
        before = {session: self._credits.get(session_part(session)) for session in credits}
        taken = await super().give_credit(credits, epoch=epoch, now_ms=now_ms)
        if taken:
            # A store that has lost its record refuses no late call of before. Whoever has heard of a later epoch takes no
            # credit of it.
            if now_ms >= (WALL_OFFSET_S + self.flushed_s) * 1000:
                self._invariants.decided_under(epoch, "credit is given", self._time_s())
            for session, given in before.items():
                after = self._credits.get(session_part(session))
                if given is not None and after is not None:
                    self._never_back(f"the credit of {session}", after.at, given.at)
        return taken

    async def publish(self, snapshot: Snapshot, *, epoch: int, now_ms: int) -> bool:
        before = self._snapshot
        taken = await super().publish(snapshot, epoch=epoch, now_ms=now_ms)
        if before is not None and self._snapshot is not None:
            (old_epoch, old), (new_epoch, new) = before, self._snapshot
            self._never_back("the snapshot", (new_epoch, new.version), (old_epoch, old.version))
        return taken

    def _never_back(self, what: str, now: _Order, before: _Order) -> None:
        if now < before:
            self._invariants.fail(
                Invariant.NEWER_STAYS, f"at {self._time_s():.6f} s {what} is of {now} after it was of {before}"
            )

    def check(self) -> None:
        """Every key has its owner, and the indexes agree with the works."""
        depths: Counter[str] = Counter()
        waiting = {work_id for ranks in self._waiting.values() for _, work_id in ranks}
        for work_id, held in self._works.items():
            if held.owner not in self._sessions:
                raise InvariantBroken(Invariant.OWNED, f"work {work_id} belongs to {held.owner!r}, which is no session")
            if work_id not in self._owned.get(held.owner, ()):
                raise InvariantBroken(Invariant.OWNED, f"work {work_id} is not among what {held.owner!r} owns")
            if (held.grant is None) != (work_id in waiting):
                raise InvariantBroken(Invariant.NOT_FORGOTTEN, f"work {work_id} waits and is granted, or neither")
            if held.grant is None:
                depths[held.queue.partition("/")[0]] += 1
        if waiting - self._works.keys():
            raise InvariantBroken(Invariant.OWNED, f"{waiting - self._works.keys()} wait and are not there")
        if depths != Counter({name: depth for name, depth in self._depths.items() if depth}):
            raise InvariantBroken(Invariant.QUEUE_BOUND, f"depths {dict(self._depths)}: counted {dict(depths)}")
        if self._credits.keys() - self._sessions.keys():
            raise InvariantBroken(
                Invariant.OWNED, f"credit of no session: {self._credits.keys() - self._sessions.keys()}"
            )

    def present(self, session: Session) -> float:
        """When the session runs out, on the store's clock in seconds; -inf when there is none."""
        present = self._sessions.get(session_part(session))
        return float("-inf") if present is None else present.expires_ms / 1000

    def left_granted(self, session: Session, before_s: float) -> Iterator[tuple[str, int]]:
        """Attempts that were granted to the session before then and are still there."""
        for work_id in self._owned.get(session_part(session), ()):
            held = self._works[work_id]
            if held.grant is not None and held.seq < before_s * 1000 * 1024:
                yield work_id, held.grant.attempt

    def holds(self, work_id: str) -> bool:
        return work_id in self._works

    def session_ids(self) -> set[str]:
        return {session_from(owner).id for owner in self._sessions}

    def latest_end_s(self, session_id: str) -> float:
        """When the last session of that id runs out; -inf when there is none."""
        ends = [one.expires_ms for owner, one in self._sessions.items() if session_from(owner).id == session_id]
        return max(ends, default=float("-inf")) / 1000
