"""The queue contract, in prose and types. One suite (`tests/contracts/test_queue.py`) runs over every implementation.

A **pool** is a set of engines and models decided together. Its queue holds, for each work: where it waits (a rank
inside its class and tenant), who owns it (the session of the process that holds its socket, or the blob store),
and, once granted, which engine may run it. It is an *index*: whatever it forgets, the owner writes again.

States of a work, and who moves it:

    waiting ──claim (leader)──▶ granted ──take_grants (owner)──▶ the owner starts it, or lets the grant expire
       ▲                          │
       └────requeue (owner)───────┘        settle (owner) removes it from either state, once
    session expired: BLOB works go back to waiting at their old rank; OWNER works are settled as owner_gone

Rules that every implementation keeps:

* **Time is an argument.** `now_ms` is the caller's estimate of Redis TIME in integer milliseconds; no script asks for
  the time, no decision depends on EXPIRE.
* **Repeatable.** Each call may be repeated after a lost reply and answers the same: enqueue is keyed by work id and
  session, claim by (work id, epoch, attempt), settle by (work id, attempt) and remembered for `SETTLED_KEEP_MS`.
* **Fenced.** A leader's word (claim, credit, snapshot) below the highest leader epoch the pool has seen is refused; a
  settle or requeue by a session that no longer owns the work is refused.
* **Plural.** One call, one round trip, many works; answers come in the order asked. The client gathers single calls
  of one loop turn into one plural call (`Batcher`).
* **Bounded.** `enqueue_many` refuses a work when its class already holds `max_queue` waiting works; nothing grows with
  time; every key has an owner or a lifetime (`keys.py` is the table).
* **All keys of a pool share one hash tag** and are passed as KEYS, so that Redis Cluster works.

Errors: `QueueUnavailable` when the store cannot be reached or refuses writes (the caller decides what that means for
a client); a programming error raises as itself. Nothing is retried behind the caller's back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from policies.vocabulary import Grant, Outcome, Work

SETTLED_KEEP_MS = 60_000
SNAPSHOT_MAX_BYTES = 4 * 1024 * 1024
TOLD_KEPT = 4096
"""Renewals with events that the store keeps for a leader to read; what a leader has read is forgotten at once."""


class QueueUnavailable(Exception):
    """The store did not answer, or answered that it cannot take writes now. The message says which."""


class SessionLost(QueueUnavailable):
    """The session that would own the work is not registered (any more): register anew, then enqueue again."""


class Enqueued(StrEnum):
    """Answer of enqueue. QUEUED also when the same session enqueued the same work before, or adopts a blob work that
    nobody owns; TAKEN: another session owns it, or this one has settled it already."""

    QUEUED = "queued"
    FULL = "full"
    TAKEN = "taken"


class Settled(StrEnum):
    """Answer of settle. DONE also when this very settle was done before; GONE: unknown work; FENCED: not yours."""

    DONE = "done"
    GONE = "gone"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Session:
    """A process's renewable presence in a pool. A work names the (owner, epoch) pair, so a restarted process with the
    same id does not inherit what its predecessor held."""

    id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """What one session runs on one engine in one class; reported with each renewal."""

    works: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0


Place = tuple[str, str]
"""(engine, class)."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """What one process's own calls to an engine say of it (`gateway.control.pulse`). Counters only grow.

    served, failed, draining   calls that ended well, broke, or were refused by an engine that is shutting down
    moved_ms                   pool time at which something of an answer last came; 0 for never
    waiting_ms                 pool time at which the oldest stream that is still under way was sent; 0 for none
    """

    served: int = 0
    failed: int = 0
    draining: int = 0
    moved_ms: int = 0
    waiting_ms: int = 0


@dataclass(frozen=True, slots=True)
class Began:
    """An attempt was sent to an engine, or runs there since before the leader in force or the session began.

    shown_tokens, prefilled   as far as it is by now
    """

    work: Work
    engine: str
    attempt: int
    shown_tokens: int = 0
    prefilled: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """An attempt showed its first token. began: the number under which its beginning was told."""

    began: int
    engine_ttft_s: float


@dataclass(frozen=True, slots=True)
class Grew:
    """Output tokens shown so far by each attempt that runs, as (began, tokens).

    up_to   every attempt that began under a number below this one and is not named has ended
    """

    up_to: int
    shown: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt ended; outcome None: the work goes on elsewhere, or was never sent.

    An outcome travels without the names of work, class, tenant, model and engine, which its `Began` has.
    """

    began: int
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class Told:
    """Something that happened to an attempt of a session. number: from 1 on, without gaps; at_ms: on the pool clock."""

    number: int
    at_ms: int
    event: Began | Answered | Grew | Ended


@dataclass(frozen=True, slots=True)
class SessionReport:
    """What a session tells with each renewal: what it runs now, and which of the leader's words that includes.

    in_flight    sums of the attempts it runs now, by place
    started      attempts and their tokens that it ever started on credit, by place; only grows (see Credit)
    grants_seq   grants up to this one are inside in_flight, or have ended, or will never be started
    vitals       what its calls say of each engine
    renewed_ms   pool time of the renewal that told it; filled in by `Queue.hear`, ignored by `renew_session`
    serves       it takes requests: it can use credit and a share
    floors       works that it was told to keep when cut off, by place. What was taken back since counts until it says so
    events       what happened since the last renewal that was answered. Unlike the rest they are not replaced by the next
                 report but kept for the leader, so that it hears of each; `Queue.hear` tells them apart from the reports
    """

    in_flight: Mapping[Place, InFlight] = field(default_factory=dict)
    started: Mapping[Place, InFlight] = field(default_factory=dict)
    grants_seq: int = 0
    vitals: Mapping[str, Vitals] = field(default_factory=dict)
    renewed_ms: int = 0
    serves: bool = True
    floors: Mapping[Place, int] = field(default_factory=dict)
    events: tuple[Told, ...] = ()


@dataclass(frozen=True, slots=True)
class Heard:
    """All live sessions as the leader hears of them.

    reports   what each said last
    events    what happened in each, those of sessions that are over too. Oldest first; a renewal that was repeated
              tells the same numbers again, and a gap between numbers was dropped unread
    seq       of the last renewal whose events are here; the next call's `after_seq`
    """

    reports: Mapping[Session, SessionReport] = field(default_factory=dict)
    events: Mapping[Session, tuple[Told, ...]] = field(default_factory=dict)
    seq: int = 0


@dataclass(frozen=True, slots=True)
class Credit:
    """A session's bounded right to start works on one place without asking, written to the store before it is used.

    allowed      running totals that `SessionReport.started` may reach; what is unspent is allowed - started. Totals and
                 not amounts, so that neither a lost nor a repeated reply changes what may be started
    share        works that the session may keep in flight on this place once it is cut off from the store, also when it
                 reported to run fewer; halved every 10 s
    expires_ms   pool time after which nothing may be started on it
    """

    allowed: InFlight
    share: int
    expires_ms: int


@dataclass(frozen=True, slots=True)
class Renewed:
    """Answer to a session's renewal.

    credits            the session's credits that have not expired, by place
    epoch              the highest leader epoch that the pool has seen; an owner refuses grants below it
    snapshot_version   of the leader's snapshot in the store; 0 when there is none
    """

    credits: Mapping[Place, Credit] = field(default_factory=dict)
    epoch: int = 0
    snapshot_version: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the leader publishes for followers and successors: engines as it sees them, and what it has learned.

    content   JSON, up to SNAPSHOT_MAX_BYTES; holds no prompt, no key and no engine credential
    """

    version: int
    content: bytes


def check_size(snapshot: Snapshot) -> None:
    """Raise ValueError for a snapshot above its bound."""
    size_bytes = len(snapshot.content)
    if size_bytes > SNAPSHOT_MAX_BYTES:
        msg = f"snapshot of {size_bytes} bytes: expected at most {SNAPSHOT_MAX_BYTES}; publish less of what was learned"
        raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Leadership:
    """Who decides for the pool. `epoch` only grows; a new one is max(stored + 1, now_ms).

    fresh_record   the record was missing altogether (flushed, failed over), or was made so and its maker did not renew it
                   for a validity more: wait one full validity before deciding
    """

    leader: str
    epoch: int
    expires_ms: int
    fresh_record: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """A look-ahead into the queue: what the leader plans with.

    works      per class, EDF/rank order inside each (class, tenant), at most the bound asked for
    depths     all waiting works by (class, tenant), beyond the look-ahead too
    owners     whose each of `works` is, by id; those that nobody owns are not in it
    """

    works: tuple[Work, ...] = ()
    depths: Mapping[tuple[str, str], int] = field(default_factory=dict)
    owners: Mapping[str, Session] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class GrantTaken:
    """A grant as its owner reads it; `seq` orders a session's grants and only grows."""

    seq: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim that was made: the owner it was made for, and the grant's place in that session's order."""

    owner: Session
    seq: int


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A work that is granted in the store, as a new leader takes it over."""

    work: Work
    grant: Grant
    claimed: Claimed


@dataclass(frozen=True, slots=True)
class Standing:
    """Everything that binds a new leader: what its predecessors granted and allowed."""

    outstanding: tuple[Outstanding, ...] = ()
    credits: Mapping[Session, Mapping[Place, Credit]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expired:
    """What expire_sessions did: works put back (blob) and works whose owner is gone (settled).

    A work put back has no owner: it waits to be adopted by whoever enqueues it again.
    sessions   that did not renew; end_session answers with its own, and expire_sessions is not told of that one: a
               session that was ended holds nothing any more, while one that was swept may be alive and cut off
    ended      told by expire_sessions: those that were ended, by themselves or by who knows that they are gone
    seq        of the last entry told; the next call's `after_seq`
    """

    requeued: tuple[str, ...] = ()
    owner_gone: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    seq: int = 0
    ended: tuple[str, ...] = ()


class Queue(Protocol):
    """One pool's queue. See the module header for the rules; each method is one round trip."""

    async def renew_session(
        self, session: Session, *, now_ms: int, valid_for_ms: int, report: SessionReport, ring: bool = False
    ) -> Renewed | None:
        """Create or extend the session and replace its report. None: it had expired and was swept, or the store forgot
        it (register anew, with a higher epoch; None is final for this one).

        ring   ring the pool's bell too, if anything waits: what this report no longer holds is room for it
        """
        ...

    async def hear(self, *, now_ms: int, after_seq: int = 0) -> Heard:
        """Leader: the reports of all live sessions, and events told past `after_seq`; those up to it are forgotten."""
        ...

    async def end_session(self, session: Session) -> Expired:
        """Leave properly: what this session still owns is handled as if it had expired."""
        ...

    async def expire_sessions(self, *, now_ms: int, after_seq: int | None = None) -> Expired:
        """Sweep sessions whose validity has passed (leader).

        Without after_seq it tells what this call swept. With it, everything swept past that number, by a call whose
        reply was lost or by a predecessor too, and forgets what is not past it: the leader's way to miss nothing.
        """
        ...

    async def lead(self, candidate: str, *, now_ms: int, valid_for_ms: int) -> Leadership:
        """Become or stay leader if the record is free, expired or ours; else the record of whoever leads."""
        ...

    async def resign(self, leader: str, *, epoch: int) -> None:
        """Give leadership up at once, if still ours."""
        ...

    async def enqueue_many(
        self, works: Sequence[Work], *, session: Session, max_queue: Mapping[str, int], now_ms: int
    ) -> list[Enqueued]:
        """Let works wait, and ring the pool's bell. max_queue by class name."""
        ...

    async def peek(self, *, bounds: Mapping[str, int], default_bound: int, now_ms: int) -> Waiting:
        """Read the look-ahead: up to `bounds[class]` works of each class (default_bound where absent), shared among
        that class's tenants round-robin so that none is hidden behind another. Of a tenant's share an eighth at most is for
        ranks before now, unless there are too few from now on: what is late already hides nobody who can be in time."""
        ...

    async def claim_many(self, grants: Sequence[Grant], *, now_ms: int) -> list[Claimed | None]:
        """Leader: waiting -> granted. None: no longer waiting (cancelled, taken), nobody's, or the epoch is old. Rings
        owners."""
        ...

    async def give_credit(self, credits: Mapping[Session, Mapping[Place, Credit]], *, epoch: int, now_ms: int) -> bool:
        """Leader: replace the credits of these sessions (an empty mapping takes them away). False: the epoch is old.

        Credits go with their session; one that is over or unknown gets none. A call that arrives after a later one of
        its leader (by now_ms) changes nothing for the sessions that both name.
        """
        ...

    async def publish(self, snapshot: Snapshot, *, epoch: int, now_ms: int) -> bool:
        """Leader: replace the pool's snapshot. False: the epoch is old.

        A version below the stored one of the same epoch came late and changes nothing. Raises ValueError for a
        content above SNAPSHOT_MAX_BYTES.
        """
        ...

    async def snapshot(self) -> Snapshot | None:
        """The newest snapshot, None when there is none."""
        ...

    async def standing(self, *, now_ms: int) -> Standing:
        """What a new leader takes over: all granted works, all credits that have not expired."""
        ...

    async def take_grants(self, session: Session, *, after_seq: int) -> list[GrantTaken]:
        """The session's grants past `after_seq`, oldest first. Reading removes nothing."""
        ...

    async def requeue_many(
        self, works: Sequence[Work], *, session: Session, now_ms: int, seqs: Sequence[int] | None = None
    ) -> list[bool]:
        """Granted -> waiting at the old rank, with the work's new attempt count and avoid set. False: not ours.

        A grant that was never started is given back with the attempt count unchanged. A work that waits keeps what it
        has, unless the attempt count given is higher: then a store that lost its last writes is behind, and takes it.
        seqs   `GrantTaken.seq` of the grants given back; with them a late repeat cannot take back a newer grant
        """
        ...

    async def settle_many(self, ids: Sequence[tuple[str, int]], *, session: Session, now_ms: int) -> list[Settled]:
        """Remove works, (id, attempt) each, in whatever state they are. Cancelling a waiting work is the same call.

        A work that is not here (GONE) cannot be enqueued by this session for SETTLED_KEEP_MS either: whoever cancels an
        enqueue under way settles the work, and it is out of the queue in whichever order the two arrive.
        """
        ...

    async def time_ms(self) -> int:
        """The store's own clock, for `PoolClock.correct`; never used for a decision directly."""
        ...

    def bell(self, session: Session | None) -> AsyncIterator[None]:
        """Yields when there is something to look at: for None the pool's bell (new or freed work), else a session's
        bell (new grants). A bell may ring for nothing and may be lost; readers also look on a timer."""
        ...

    async def close(self) -> None:
        """Close connections. Idempotent."""
        ...
