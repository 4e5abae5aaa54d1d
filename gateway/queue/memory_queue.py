"""The queue in plain Python: the verified fake behind the simulation and `replay`.

It passes the contract suite of the real one, order of answers included, and a stateful test compares the two call by
call. One instance is a whole store: several processes of a simulation share it, each with its own session. It never
loses a reply and is never unavailable by itself; a wrapper adds faults.

Waiting works are a sorted list per class and tenant: inserting moves memory, which for 100,000 entries costs less than
the dictionary work around it.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import unquote

from gateway.queue.base import (
    SETTLED_KEEP_MS,
    TOLD_KEPT,
    Claimed,
    Credit,
    Enqueued,
    Expired,
    GrantTaken,
    Heard,
    Leadership,
    Outstanding,
    Place,
    Renewed,
    Session,
    SessionLost,
    SessionReport,
    Settled,
    Snapshot,
    Standing,
    Told,
    Waiting,
    check_size,
)
from gateway.queue.keys import encoded, rank_part, session_from, session_of, session_part
from gateway.queue.wire import queue_part
from policies.vocabulary import BodyAt, Grant, Work

_NEVER_HERE = -1


@dataclass(slots=True)
class _Held:
    """A work in the store. owner "" is a blob work that nobody runs; grant None: it waits."""

    work: Work
    owner: str
    queue: str
    grant: Grant | None = None
    seq: int = 0


@dataclass(slots=True)
class _Present:
    """A registered session."""

    renewed_ms: int
    expires_ms: int
    report: SessionReport


@dataclass(frozen=True, slots=True)
class _Given:
    """A session's credits and the (epoch, now_ms) under which they were given."""

    at: tuple[int, int]
    credits: Mapping[Place, Credit]

    def unexpired(self, now_ms: int) -> dict[Place, Credit]:
        return {place: one for place, one in self.credits.items() if one.expires_ms > now_ms}


@dataclass(slots=True)
class _Record:
    """The leadership record; expires_ms None: there is none."""

    leader: str = ""
    epoch: int = 0
    expires_ms: int | None = None
    fresh_until_ms: int = 0
    seq: int = 0


class MemoryQueue:
    """See the module header. time_ms is the store's own clock, for a pool clock to be corrected by."""

    __slots__ = (
        "_bells",
        "_credits",
        "_depths",
        "_owned",
        "_record",
        "_registered",
        "_sessions",
        "_settled",
        "_snapshot",
        "_swept",
        "_time_ms",
        "_told",
        "_waiting",
        "_works",
    )

    def __init__(self, time_ms: Callable[[], int]) -> None:
        self._time_ms = time_ms
        self._bells: defaultdict[str, dict[asyncio.Event, None]] = defaultdict(dict)
        self._registered: dict[str, int] = {}
        self.forget()

    def forget(self) -> None:
        """Lose everything at once, as a flushed server does."""
        self._sessions: dict[str, _Present] = {}
        self._record = _Record()
        self._works: dict[str, _Held] = {}
        self._waiting: dict[str, list[tuple[float, str]]] = {}
        self._depths: defaultdict[str, int] = defaultdict(int)
        self._owned: defaultdict[str, set[str]] = defaultdict(set)
        self._settled: dict[str, tuple[int, int]] = {}
        self._swept: dict[tuple[str, str, str], int] = {}
        self._credits: dict[str, _Given] = {}
        self._snapshot: tuple[int, Snapshot] | None = None
        self._told: deque[tuple[int, str, tuple[Told, ...]]] = deque(maxlen=TOLD_KEPT)

    # -- sessions and leadership -----------------------------------------------------------------------------------

    async def renew_session(
        self, session: Session, *, now_ms: int, valid_for_ms: int, report: SessionReport, ring: bool = False
    ) -> Renewed | None:
        owner = session_part(session)
        registered = self._registered.get(session.id) == session.epoch
        self._registered[session.id] = session.epoch
        known = self._sessions.get(owner)
        kept = SessionReport(
            dict(report.in_flight),
            dict(report.started),
            report.grants_seq,
            dict(report.vitals),
            serves=report.serves,
            floors=dict(report.floors),
        )
        if known is None:
            if registered:
                return None
            self._sessions[owner] = _Present(now_ms, now_ms + valid_for_ms, kept)
        elif known.renewed_ms <= now_ms:
            known.renewed_ms = now_ms
            known.expires_ms = max(known.expires_ms, now_ms + valid_for_ms)
            known.report = kept
        if report.events:
            self._told.append((self._next_seq(now_ms), owner, report.events))
        if ring and self._waiting:
            self._ring("")
        given = self._credits.get(owner)
        return Renewed(
            {} if given is None else given.unexpired(now_ms),
            self._record.epoch,
            0 if self._snapshot is None else self._snapshot[1].version,
        )

    async def hear(self, *, now_ms: int, after_seq: int = 0) -> Heard:
        while self._told and self._told[0][0] <= after_seq:
            self._told.popleft()
        reports = {
            session_from(owner): replace(present.report, renewed_ms=present.renewed_ms)
            for owner, present in self._sessions.items()
            if present.expires_ms > now_ms
        }
        events: dict[Session, tuple[Told, ...]] = {}
        for _, owner, told in self._told:
            session = session_from(owner)
            events[session] = events.get(session, ()) + told
        return Heard(reports, events, self._told[-1][0] if self._told else after_seq)

    async def end_session(self, session: Session) -> Expired:
        owner = session_part(session)
        self._registered.pop(session.id, None)
        present = self._sessions.get(owner)
        if present is not None or self._owned.get(owner):
            self._sweep(owner, present.expires_ms if present is not None else 0, kind="e")
        return _told(((entry, seq) for entry, seq in self._swept.items() if entry[1] == owner), "se")

    async def expire_sessions(self, *, now_ms: int, after_seq: int | None = None) -> Expired:
        over = sorted(owner for owner, present in self._sessions.items() if present.expires_ms <= now_ms)
        over += sorted(owner for owner, ids in self._owned.items() if ids and owner not in self._sessions)
        if after_seq is not None:
            self._swept = {entry: seq for entry, seq in self._swept.items() if seq > after_seq}
        before = set(self._swept.values())
        for owner in over:
            self._sweep(owner, now_ms, kind="s")
        told = self._swept.items()
        return _told(((entry, seq) for entry, seq in told if after_seq is not None or seq not in before), "s")

    def _sweep(self, owner: str, now_ms: int, *, kind: str) -> None:
        self._sessions.pop(owner, None)
        self._credits.pop(owner, None)
        for work_id in sorted(self._owned.pop(owner, ()), key=str.encode):
            held = self._works[work_id]
            self._leave(held)
            became = "g"
            if held.work.body is BodyAt.BLOB:
                became, held.owner = "r", ""
                self._wait(held)
            else:
                del self._works[work_id]
            self._swept[became, owner, work_id] = self._next_seq(now_ms)
        self._swept[kind, owner, ""] = self._next_seq(now_ms)
        self._ring("")

    async def lead(self, candidate: str, *, now_ms: int, valid_for_ms: int) -> Leadership:
        record = self._record
        if record.expires_ms is None or now_ms >= record.expires_ms:
            outlived = record.expires_ms == 0 or (record.expires_ms or 0) >= record.fresh_until_ms + valid_for_ms
            if record.expires_ms is None or not outlived:
                record.fresh_until_ms = now_ms + valid_for_ms
            record.leader = candidate
            record.epoch = max(record.epoch + 1, now_ms)
            record.expires_ms = now_ms + valid_for_ms
        elif record.leader == candidate:
            record.expires_ms = max(record.expires_ms, now_ms + valid_for_ms)
        return Leadership(record.leader, record.epoch, record.expires_ms, now_ms < record.fresh_until_ms)

    async def resign(self, leader: str, *, epoch: int) -> None:
        if (self._record.leader, self._record.epoch) == (leader, epoch):
            self._record.leader = ""
            self._record.expires_ms = 0

    # -- works -----------------------------------------------------------------------------------------------------

    async def enqueue_many(
        self, works: Sequence[Work], *, session: Session, max_queue: Mapping[str, int], now_ms: int
    ) -> list[Enqueued]:
        owner = session_part(session)
        ranks_checked = [rank_part(work.rank) for work in works]
        bounds = [max_queue[work.class_name] for work in works]
        if ranks_checked and owner not in self._sessions:
            msg = f"session {session.id} epoch {session.epoch}: expected a registered one; register anew, then enqueue"
            raise SessionLost(msg)
        before = len(self._works)
        answers = [self._enqueue(work, owner, bound, now_ms) for work, bound in zip(works, bounds, strict=True)]
        if len(self._works) > before:
            self._ring("")
        return answers

    def _enqueue(self, work: Work, owner: str, bound: int, now_ms: int) -> Enqueued:
        held = self._works.get(work.id)
        if held is not None:
            if held.owner == "":
                held.owner = owner
                self._owned[owner].add(work.id)
            return Enqueued.QUEUED if held.owner == owner else Enqueued.TAKEN
        settled_ms, _ = self._settled.get(f"{owner}/{work.id}", (-math.inf, 0))
        if settled_ms >= now_ms - SETTLED_KEEP_MS:
            return Enqueued.TAKEN
        if self._depths[encoded(work.class_name)] >= bound:
            return Enqueued.FULL
        held = self._works[work.id] = _Held(work, owner, queue_part(work))
        self._owned[owner].add(work.id)
        self._wait(held)
        return Enqueued.QUEUED

    async def peek(self, *, bounds: Mapping[str, int], default_bound: int, now_ms: int) -> Waiting:
        by_class: defaultdict[str, list[str]] = defaultdict(list)
        for queue in sorted(self._waiting):
            by_class[queue.partition("/")[0]].append(queue)
        works: list[Work] = []
        for name in sorted(by_class):
            queues = _rotated(by_class[name], now_ms)
            depths = [len(self._waiting[queue]) for queue in queues]
            shares = _deal(depths, bounds.get(unquote(name), default_bound))
            for queue, share in zip(queues, shares, strict=True):
                ahead = _ahead(self._waiting[queue], share, now_ms / 1000)
                works += [self._works[work_id].work for _, work_id in ahead]
        by_queue = {_names(queue): len(ranks) for queue, ranks in self._waiting.items()}
        owners = {work.id: session_from(owner) for work in works if (owner := self._works[work.id].owner)}
        return Waiting(tuple(works), by_queue, owners)

    async def claim_many(self, grants: Sequence[Grant], *, now_ms: int) -> list[Claimed | None]:
        rung: dict[str, None] = {}
        answers = [self._claim(grant, now_ms, rung) for grant in grants]
        for one in rung:
            self._ring(one)
        return answers

    def _claim(self, grant: Grant, now_ms: int, rung: dict[str, None]) -> Claimed | None:
        if self._fenced(grant.epoch):
            return None
        held = self._works.get(grant.work_id)
        if held is None:
            return None
        if held.grant is not None:
            same = (held.grant.epoch, held.grant.attempt, held.grant.engine)
            return _claimed(held) if same == (grant.epoch, grant.attempt, grant.engine) else None
        if grant.attempt <= held.work.attempt or not held.owner:
            return None
        self._leave(held)
        held.grant = replace(grant, expires_s=int(grant.expires_s * 1000) / 1000)
        held.work = replace(held.work, attempt=grant.attempt)
        held.seq = self._next_seq(now_ms)
        rung[held.owner] = None
        return _claimed(held)

    # -- the leader's words ----------------------------------------------------------------------------------------

    async def give_credit(self, credits: Mapping[Session, Mapping[Place, Credit]], *, epoch: int, now_ms: int) -> bool:
        if self._fenced(epoch):
            return False
        for session, places in credits.items():
            owner = session_part(session)
            present, given = self._sessions.get(owner), self._credits.get(owner)
            if present is not None and (given is None or given.at <= (epoch, now_ms)):
                self._credits[owner] = _Given((epoch, now_ms), dict(places) if present.expires_ms > now_ms else {})
        return True

    async def publish(self, snapshot: Snapshot, *, epoch: int, now_ms: int) -> bool:
        del now_ms  # the epoch and the version alone say what is newer
        check_size(snapshot)
        if self._fenced(epoch):
            return False
        known = self._snapshot
        if known is None or known[0] != epoch or known[1].version < snapshot.version:
            self._snapshot = epoch, snapshot
        return True

    async def snapshot(self) -> Snapshot | None:
        return None if self._snapshot is None else self._snapshot[1]

    async def standing(self, *, now_ms: int) -> Standing:
        held = [one for one in self._works.values() if one.grant is not None]
        held.sort(key=lambda one: f"{one.owner}/{one.seq:016}/{one.work.id}".encode())
        given = {session_from(owner): one.unexpired(now_ms) for owner, one in self._credits.items()}
        return Standing(
            tuple(Outstanding(one.work, one.grant, _claimed(one)) for one in held if one.grant is not None),
            {session: places for session, places in given.items() if places},
        )

    def _fenced(self, epoch: int) -> bool:
        """True when a higher leader epoch was seen; else this one is the highest from now on."""
        if epoch < self._record.epoch:
            return True
        self._record.epoch = epoch
        return False

    # -- works that were granted -----------------------------------------------------------------------------------

    async def take_grants(self, session: Session, *, after_seq: int) -> list[GrantTaken]:
        held = (self._works[work_id] for work_id in self._owned.get(session_part(session), ()))
        taken = [GrantTaken(one.seq, one.grant) for one in held if one.grant is not None and one.seq > after_seq]
        return sorted(taken, key=lambda one: one.seq)

    async def requeue_many(
        self, works: Sequence[Work], *, session: Session, now_ms: int, seqs: Sequence[int] | None = None
    ) -> list[bool]:
        del now_ms  # a work goes back to a rank, not to a time
        owner = session_part(session)
        numbered = zip(works, seqs if seqs is not None else [None] * len(works), strict=True)
        answers = [self._requeue(work, owner, seq) for work, seq in numbered]
        if any(answers):
            self._ring("")
        return answers

    def _requeue(self, work: Work, owner: str, seq: int | None) -> bool:
        held = self._works.get(work.id)
        if held is None or held.owner != owner:
            return False
        if held.grant is None and work.attempt > held.work.attempt:
            held.work = replace(held.work, attempt=work.attempt, avoid=work.avoid)
        stale = held.grant is None or (seq is not None and seq != held.seq) or held.work.attempt > work.attempt + 1
        if not stale:
            self._leave(held)
            held.work = replace(held.work, attempt=work.attempt, avoid=work.avoid)
            self._wait(held)
        return True

    async def settle_many(self, ids: Sequence[tuple[str, int]], *, session: Session, now_ms: int) -> list[Settled]:
        owner = session_part(session)
        self._forget_settled(now_ms)
        before = len(self._works)
        answers = [self._settle(work_id, attempt, owner, now_ms) for work_id, attempt in ids]
        if len(self._works) < before:
            self._ring("")
        return answers

    def _settle(self, work_id: str, attempt: int, owner: str, now_ms: int) -> Settled:
        memory = f"{owner}/{work_id}"
        held = self._works.get(work_id)
        if held is not None:
            if held.owner != owner:
                return Settled.FENCED
            self._leave(held)
            self._owned[owner].discard(work_id)
            del self._works[work_id]
            self._settled.pop(memory, None)
            self._settled[memory] = (now_ms, attempt)
            return Settled.DONE
        _, settled_attempt = self._settled.setdefault(memory, (now_ms, _NEVER_HERE))
        return Settled.DONE if settled_attempt == attempt else Settled.GONE

    def _forget_settled(self, now_ms: int) -> None:
        """Memories are in the order of their making, up to the small differences of processes' clocks."""
        while self._settled:
            memory, (settled_ms, _) = next(iter(self._settled.items()))
            if settled_ms >= now_ms - SETTLED_KEEP_MS:
                return
            del self._settled[memory]

    # -- the store itself ------------------------------------------------------------------------------------------

    async def time_ms(self) -> int:
        return self._time_ms()

    async def bell(self, session: Session | None) -> AsyncGenerator[None, None]:
        rung = asyncio.Event()
        listeners = self._bells["" if session is None else session_part(session)]
        listeners[rung] = None
        try:
            yield
            while True:
                await rung.wait()
                rung.clear()
                yield
        finally:
            listeners.pop(rung, None)

    async def close(self) -> None:
        """Nothing to close: the instance is the store, and others may share it."""

    def _wait(self, held: _Held) -> None:
        held.grant, held.seq = None, 0
        insort(self._waiting.setdefault(held.queue, []), (held.work.rank, held.work.id))
        self._depths[held.queue.partition("/")[0]] += 1

    def _leave(self, held: _Held) -> None:
        if held.grant is not None:
            return
        ranks = self._waiting[held.queue]
        del ranks[bisect_left(ranks, (held.work.rank, held.work.id))]
        if not ranks:
            del self._waiting[held.queue]
        self._depths[held.queue.partition("/")[0]] -= 1

    def _next_seq(self, now_ms: int) -> int:
        self._record.seq = max(self._record.seq + 1, now_ms * 1024)
        return self._record.seq

    def _ring(self, owner: str) -> None:
        for rung in self._bells.get(owner, {}):
            rung.set()

    def __repr__(self) -> str:
        waiting = sum(map(len, self._waiting.values()))
        return f"<MemoryQueue waiting={waiting} granted={len(self._works) - waiting} sessions={len(self._sessions)}>"


def _told(entries: Iterable[tuple[tuple[str, str, str], int]], session_kinds: str) -> Expired:
    ordered = sorted(entries, key=lambda one: one[1])
    kinds: dict[str, list[str]] = {"r": [], "g": [], "s": [], "e": []}
    for (kind, owner, work_id), _ in ordered:
        kinds[kind].append(work_id or unquote(session_of(owner)[0]))
    sessions = [name for kind in session_kinds for name in kinds[kind]]
    ended = () if "e" in session_kinds else tuple(kinds["e"])
    return Expired(tuple(kinds["r"]), tuple(kinds["g"]), tuple(sessions), ordered[-1][1] if ordered else 0, ended)


def _claimed(held: _Held) -> Claimed:
    return Claimed(session_from(held.owner), held.seq)


def _names(queue: str) -> tuple[str, str]:
    class_name, _, tenant = queue.partition("/")
    return unquote(class_name), unquote(tenant)


def _rotated(queues: list[str], now_ms: int) -> list[str]:
    """As in peek.lua: who is dealt first moves with time, and no regular beat meets always the same."""
    turn = (now_ms % 65536) ** 2 * 0.6180339887498949
    start = math.floor((turn - math.floor(turn)) * len(queues))
    return queues[start:] + queues[:start]


def _ahead(ranks: list[tuple[float, str]], share: int, now_s: float) -> list[tuple[float, str]]:
    """As in peek.lua: works of ranks from now on, and of what is due already an eighth at least."""
    now = bisect_left(ranks, (now_s, ""))
    later = min(len(ranks) - now, share - share // 8)
    before = min(now, share - later)
    return ranks[:before] + ranks[now : now + share - before]


def _deal(depths: Sequence[int], places: int) -> list[int]:
    """How many each queue gets when one is dealt to each in turn until the places or the works are used up."""
    shares = [0] * len(depths)
    still = [i for i, depth in enumerate(depths) if depth]
    while places > 0 and still:
        each = max(1, places // len(still))
        for i in still:
            take = min(each, depths[i] - shares[i], places)
            shares[i] += take
            places -= take
        still = [i for i in still if shares[i] < depths[i]]
    return shares
