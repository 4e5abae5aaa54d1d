"""The queue in Redis or Valkey: each method is one Lua script (`scripts/`), so that each is atomic and one round trip.

The client library's own retries are off: with them one lost reply runs a command twice without a word. Every script is
repeatable instead, and the caller decides whether to repeat. Every command has one deadline, which covers waiting for a
connection, connecting, sending and the reply; a connection whose command was cut short is closed, never reused.

After READONLY, LOADING, MASTERDOWN, CLUSTERDOWN, MOVED or a silence all idle connections are dropped, so that the next
command resolves the name anew, or asks Sentinels or the cluster again (`primary`), and finds the new primary. A command
that was answered MOVED was not done and is sent once more; nothing else is. After a loss of data (FLUSHALL, a restart without a file) nothing has to be set
up again: scripts are sent when the server asks for them, keys come with the first write, and a session that the store
forgot is told so at its next renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import unquote

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from structlog.typing import FilteringBoundLogger

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
    Place,
    QueueUnavailable,
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
from gateway.queue.keys import (
    LEADER_KEEP_MS,
    SCHEMA,
    TABLE,
    keys,
    pool_channel,
    rank_part,
    session_channel,
    session_from,
    session_part,
)
from gateway.queue.keys import encoded as _encoded
from gateway.queue.lua import load
from gateway.queue.primary import PrimaryUnknown
from gateway.queue.wire import (
    BODY_LETTERS,
    owner_in,
    pack_avoid,
    pack_credits,
    pack_events,
    pack_report,
    pack_work,
    queue_part,
    unpack_credits,
    unpack_events,
    unpack_outstanding,
    unpack_report,
    unpack_work,
)
from policies.vocabulary import Grant, Work

COMMAND_TIMEOUT_S = 2.0
WORKS_PER_SCRIPT = 256
"""Longer plural calls are sent in pieces, so that no script keeps the server from others for more than a few ms."""
SWEEP_BUDGET = 512
BELL_IDLE_S = 5.0
BELL_BACKOFF_S = (0.1, 2.0)

_SCRIPTS = (
    "claim",
    "enqueue",
    "give_credit",
    "hear",
    "lead",
    "peek",
    "publish",
    "renew",
    "requeue",
    "resign",
    "settle",
    "standing",
    "sweep",
    "take_grants",
)
_ENQUEUED = (Enqueued.QUEUED, Enqueued.FULL, Enqueued.TAKEN)
_SETTLED = (Settled.DONE, Settled.GONE, Settled.FENCED)
_STALE_NODE = (ReadOnlyError, BusyLoadingError, ClusterDownError, AskError, TimeoutError, RedisTimeoutError)
_NOT_NOW = ("MISCONF", "NOREPLICAS", "BUSY", "UNKILLABLE")
_OUR_FAULTS = ("script", "unknown command", "wrong number of arguments", "syntax error", "value is not")
SAID_MAX_CHARS = 80

T = TypeVar("T")
_Arg = str | bytes | int


OnCall = Callable[[str, float, bool], None]
"""Told a call's operation, how long it took in seconds, and whether it was answered. Must not raise."""


class RedisQueue:
    """See the module header. One instance per process and pool; it owns the client that it is given."""

    __slots__ = (
        "_ahead",
        "_client",
        "_command_timeout_s",
        "_execute",
        "_key",
        "_keys",
        "_log",
        "_monotonic",
        "_node_changes",
        "_on_call",
        "_pool",
        "_registered",
        "_rng",
        "_scripts",
    )

    def __init__(
        self,
        client: Redis,
        *,
        log: FilteringBoundLogger,
        rng: random.Random,
        pool: str = "default",
        command_timeout_s: float = COMMAND_TIMEOUT_S,
        on_call: OnCall | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_call: told of every command that was answered or that failed."""
        self._client = client
        self._execute: Callable[..., Awaitable[Any]] = client.execute_command
        self._log = log
        self._rng = rng
        self._pool = pool
        self._command_timeout_s = command_timeout_s
        self._on_call = on_call or _untold
        self._monotonic = monotonic
        self._keys = keys(pool)
        self._key = dict(zip((key.name for key in TABLE), self._keys, strict=False))
        self._scripts = {name: load(name) for name in _SCRIPTS}
        self._registered: dict[str, int] = {}
        self._node_changes = 0
        self._ahead: dict[bytes, tuple[bytes, Work, Session | None]] = {}

    # -- sessions and leadership -----------------------------------------------------------------------------------

    async def renew_session(
        self, session: Session, *, now_ms: int, valid_for_ms: int, report: SessionReport, ring: bool = False
    ) -> Renewed | None:
        registered = self._registered.get(session.id) == session.epoch
        bell = pool_channel(self._pool) if ring else ""
        answer = await self._run(
            "renew",
            session_part(session),
            now_ms,
            valid_for_ms,
            int(registered),
            pack_report(report),
            bell,
            pack_events(report.events) if report.events else "",
            TOLD_KEPT,
            2 * SETTLED_KEEP_MS,
            LEADER_KEEP_MS,
        )
        self._registered[session.id] = session.epoch
        if answer is None:
            return None
        given, epoch, version = answer
        return Renewed(unpack_credits(given, now_ms), int(epoch), int(version))

    async def hear(self, *, now_ms: int, after_seq: int = 0) -> Heard:
        sessions, renewals = await self._run("hear", after_seq)
        reports: dict[Session, SessionReport] = {}
        for part, value in _pairs(sessions):
            line, _, report = value.partition(b"\n")
            renewed_ms, expires_ms = map(int, line.split(b"\t")[:2])
            if expires_ms > now_ms:
                reports[session_from(part.decode())] = replace(unpack_report(report), renewed_ms=renewed_ms)
        events: dict[Session, tuple[Told, ...]] = {}
        seq = after_seq
        for renewal in renewals:
            name, _, text = renewal.partition(b"\n")
            part, _, number = name.decode().rpartition("/")
            session, seq = session_from(part), int(number)
            events[session] = events.get(session, ()) + unpack_events(text)
        return Heard(reports, events, seq)

    async def end_session(self, session: Session) -> Expired:
        self._registered.pop(session.id, None)
        return await self._sweep(0, session_part(session), None)

    async def expire_sessions(self, *, now_ms: int, after_seq: int | None = None) -> Expired:
        return await self._sweep(now_ms, "", after_seq)

    async def _sweep(self, now_ms: int, ended: str, after_seq: int | None) -> Expired:
        told: dict[str, None] = {}
        after = "" if after_seq is None else after_seq
        more, seq = 1, 0
        while more:
            more, highest, entries = await self._run(
                "sweep",
                now_ms,
                ended,
                after,
                SWEEP_BUDGET,
                LEADER_KEEP_MS,
                2 * SETTLED_KEEP_MS,
                pool_channel(self._pool),
            )
            seq = int(highest) or seq
            told.update(dict.fromkeys(entry.decode() for entry in entries))
        kinds: dict[str, list[str]] = {"r": [], "g": [], "s": [], "e": []}
        for entry in told:
            kind, owner, _epoch, work_id = entry.split("/", 3)
            kinds.setdefault(kind, []).append(work_id or unquote(owner))
        sessions = kinds["s"] + kinds["e"] if ended else kinds["s"]
        return Expired(tuple(kinds["r"]), tuple(kinds["g"]), tuple(sessions), seq, () if ended else tuple(kinds["e"]))

    async def lead(self, candidate: str, *, now_ms: int, valid_for_ms: int) -> Leadership:
        leader, epoch, expires_ms, fresh = await self._run("lead", candidate, now_ms, valid_for_ms, LEADER_KEEP_MS)
        return Leadership(leader.decode(), int(epoch), int(expires_ms), bool(fresh))

    async def resign(self, leader: str, *, epoch: int) -> None:
        await self._run("resign", leader, epoch)

    # -- works -----------------------------------------------------------------------------------------------------

    async def enqueue_many(
        self, works: Sequence[Work], *, session: Session, max_queue: Mapping[str, int], now_ms: int
    ) -> list[Enqueued]:
        answers: list[Enqueued] = []
        for piece in _pieces(works):
            bounds = {work.class_name: max_queue[work.class_name] for work in piece}
            args: list[str | bytes | int] = [
                session_part(session),
                now_ms,
                SETTLED_KEEP_MS,
                pool_channel(self._pool),
                len(bounds),
            ]
            for class_name, bound in bounds.items():
                args += (_encoded(class_name), bound)
            for work in piece:
                args += (work.id, queue_part(work), rank_part(work.rank), work.attempt, BODY_LETTERS[work.body])
                args += (pack_avoid(work), pack_work(work))
            codes = await self._run("enqueue", *args)
            if codes is None:
                msg = f"session {session.id} epoch {session.epoch}: expected a registered one; register anew, then enqueue"
                raise SessionLost(msg)
            answers += [_ENQUEUED[code - 1] for code in codes]
        return answers

    async def peek(self, *, bounds: Mapping[str, int], default_bound: int, now_ms: int) -> Waiting:
        args: list[str | int] = [now_ms, default_bound, rank_part(now_ms / 1000)]
        for class_name, bound in bounds.items():
            args += (_encoded(class_name), bound)
        by_queue, ahead = await self._run("peek", *args)
        works, owners = self._unpacked(ahead)
        queues = {tuple(queue.decode().split("/")): int(works) for queue, works in _pairs(by_queue) if b"/" in queue}
        depths = {(unquote(name), unquote(tenant)): depth for (name, tenant), depth in queues.items()}
        return Waiting(works, depths, owners)

    def _unpacked(self, ahead: Iterable[bytes]) -> tuple[tuple[Work, ...], dict[str, Session]]:
        """Works of a look-ahead, and whose they are; those that the last one showed, unchanged, are not decoded again."""
        last, self._ahead = self._ahead, {}
        for work_id, record in _pairs(ahead):
            known = last.get(work_id)
            if known is None or known[0] != record:
                part = owner_in(record)
                known = record, unpack_work(work_id.decode(), record), session_from(part) if part else None
            self._ahead[work_id] = known
        shown = self._ahead.values()
        return tuple(work for _, work, _ in shown), {work.id: owner for _, work, owner in shown if owner is not None}

    async def claim_many(self, grants: Sequence[Grant], *, now_ms: int) -> list[Claimed | None]:
        answers: list[Claimed | None] = []
        for piece in _pieces(grants):
            args: list[str | int] = [now_ms, LEADER_KEEP_MS, pool_channel(self._pool) + ":"]
            for grant in piece:
                expires_ms = int(grant.expires_s * 1000)
                args += (grant.work_id, _encoded(grant.engine), grant.epoch, grant.attempt, expires_ms)
            for owner, seq in _pairs(await self._run("claim", *args)):
                answers.append(Claimed(session_from(owner.decode()), int(seq)) if owner else None)
        return answers

    # -- the leader's words ----------------------------------------------------------------------------------------

    async def give_credit(self, credits: Mapping[Session, Mapping[Place, Credit]], *, epoch: int, now_ms: int) -> bool:
        given = True
        for piece in list(_pieces(list(credits.items()))) or [()]:
            args: list[str | bytes | int] = [epoch, now_ms, LEADER_KEEP_MS]
            for session, places in piece:
                args += (session_part(session), pack_credits(places))
            given = bool(await self._run("give_credit", *args)) and given
        return given

    async def publish(self, snapshot: Snapshot, *, epoch: int, now_ms: int) -> bool:
        del now_ms  # the epoch and the version alone say what is newer
        check_size(snapshot)
        return bool(await self._run("publish", epoch, LEADER_KEEP_MS, snapshot.version, snapshot.content))

    async def snapshot(self) -> Snapshot | None:
        version, content = await self._command("HMGET", self._key["snapshot"], "version", "content")
        return None if version is None else Snapshot(int(version), content)

    async def standing(self, *, now_ms: int) -> Standing:
        granted, values = await self._run("standing")
        given = {session_from(owner.decode()): unpack_credits(value, now_ms) for owner, value in _pairs(values)}
        return Standing(
            tuple(unpack_outstanding(work_id.decode(), record) for work_id, record in _pairs(granted)),
            {session: places for session, places in given.items() if places},
        )

    # -- works that were granted -----------------------------------------------------------------------------------

    async def take_grants(self, session: Session, *, after_seq: int) -> list[GrantTaken]:
        flat = await self._run("take_grants", session_part(session), after_seq)
        return [
            GrantTaken(
                int(seq), Grant(work_id.decode(), unquote(engine.decode()), int(epoch), int(attempt), int(ms) / 1000)
            )
            for seq, work_id, engine, epoch, attempt, ms in zip(*[iter(flat)] * 6, strict=True)
        ]

    async def requeue_many(
        self, works: Sequence[Work], *, session: Session, now_ms: int, seqs: Sequence[int] | None = None
    ) -> list[bool]:
        del now_ms  # a work goes back to a rank, not to a time
        answers: list[bool] = []
        given: Sequence[int | str] = seqs if seqs is not None else [""] * len(works)
        numbered = list(zip(works, given, strict=True))
        for piece in _pieces(numbered):
            args: list[str | int] = [session_part(session), pool_channel(self._pool)]
            for work, seq in piece:
                args += (work.id, work.attempt, seq, pack_avoid(work))
            answers += map(bool, await self._run("requeue", *args))
        return answers

    async def settle_many(self, ids: Sequence[tuple[str, int]], *, session: Session, now_ms: int) -> list[Settled]:
        answers: list[Settled] = []
        for piece in _pieces(ids):
            args: list[str | int] = [session_part(session), now_ms, SETTLED_KEEP_MS, pool_channel(self._pool)]
            for work_id, attempt in piece:
                args += (work_id, attempt)
            answers += [_SETTLED[code - 1] for code in await self._run("settle", *args)]
        return answers

    # -- the store itself ------------------------------------------------------------------------------------------

    async def time_ms(self) -> int:
        seconds, microseconds = await self._command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def eviction_warning(self) -> str | None:
        """What an operator should know of the server's memory settings; None when they cannot lose queue entries."""
        memory: dict[str, Any] = await self._command("INFO", "memory")
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy == "noeviction" or not int(memory.get("maxmemory", 0)):
            return None
        return f"maxmemory-policy {policy}: expected noeviction; with it a full server drops queue entries unseen"

    async def close(self) -> None:
        await self._client.aclose()

    async def bell(self, session: Session | None) -> AsyncGenerator[None, None]:
        channel = pool_channel(self._pool) if session is None else session_channel(self._pool, session)
        failures = 0
        while True:
            try:
                async with contextlib.aclosing(self._rings(channel)) as rings:
                    async for _ in rings:
                        failures = 0
                        yield
            except (RedisError, OSError) as error:
                self._log.warning("queue bell lost", repeat_key="queue bell", reason=_reason(error))
            first_s, most_s = BELL_BACKOFF_S
            await asyncio.sleep(self._rng.uniform(first_s / 2, min(most_s, first_s * 2 ** min(failures, 8))))
            failures += 1

    async def _rings(self, channel: str) -> AsyncGenerator[None, None]:
        """One subscription until it breaks or points to a node that is not the primary any more.

        The confirmation of the subscription is the first ring: something may have rung while nobody listened.
        """
        node_changes = self._node_changes
        async with self._client.pubsub() as pubsub:
            async with asyncio.timeout(self._command_timeout_s):
                await pubsub.subscribe(channel)
            while node_changes == self._node_changes:
                if await pubsub.get_message(timeout=BELL_IDLE_S) is None:
                    await self._check(pubsub)
                yield

    async def _check(self, pubsub: PubSub) -> None:
        """A quiet while may be a connection that died unseen: raise unless the server answers a ping."""
        async with asyncio.timeout(self._command_timeout_s):
            await pubsub.ping()
            while await pubsub.get_message(timeout=self._command_timeout_s) is None:
                pass

    # -- one round trip --------------------------------------------------------------------------------------------

    async def _run(self, name: str, *args: _Arg) -> Any:
        script = self._scripts[name]

        async def evaluate() -> Any:
            try:
                return await self._execute("EVALSHA", script.sha, len(self._keys), *self._keys, *args)
            except NoScriptError:
                return await self._execute("EVAL", script.text, len(self._keys), *self._keys, *args)

        return await self._bounded(name, evaluate)

    async def _command(self, *args: str) -> Any:
        return await self._bounded(args[0].lower(), lambda: self._execute(*args))

    async def _bounded(self, operation: str, send: Callable[[], Awaitable[Any]]) -> Any:
        """One command within its deadline. Raises QueueUnavailable for what the world did to us."""
        begun_s = self._monotonic()
        try:
            async with asyncio.timeout(self._command_timeout_s):
                try:
                    answer = await send()
                except MovedError:
                    await self._leave_node()
                    answer = await send()
            self._on_call(operation, self._monotonic() - begun_s, True)
            return answer
        except (RedisError, OSError) as error:
            self._on_call(operation, self._monotonic() - begun_s, False)
            if isinstance(error, _STALE_NODE):
                await self._leave_node()
            reason = _reason(error)
            if reason:
                raise QueueUnavailable(reason) from error
            raise

    async def _leave_node(self) -> None:
        """Let the next command connect anew, to the primary of then; bells follow at their next beat.

        A connection that cannot be closed in good order (TLS waits for the other side) is gone all the same.
        """
        self._node_changes += 1
        with contextlib.suppress(RedisError, OSError):
            await self._client.connection_pool.disconnect(inuse_connections=False)

    def __repr__(self) -> str:
        return f"<RedisQueue pool={self._pool} session epochs={self._registered} node changes={self._node_changes}>"


def _untold(_operation: str, _seconds: float, _answered: bool) -> None:
    """Nobody counts the calls."""


def _reason(error: Exception) -> str:
    """Why the store is unavailable, in words; "" when the error does not mean that."""
    if isinstance(error, PrimaryUnknown):
        return f"queue store's primary is not known: {error}"
    for kinds, reason in _REASONS:
        if isinstance(error, kinds):
            return reason
    code, _, rest = str(error).partition(" ")
    if isinstance(error, ResponseError) and code == "NEWERSCHEMA":
        return f"queue store's pool speaks schema {rest}: expected {SCHEMA}; upgrade this process, or give it another store"
    if isinstance(error, ResponseError) and code in _NOT_NOW:
        return f"queue store answers {code}: expected it to take writes; see its log"
    if isinstance(error, ResponseError) and "unauthenticated" in rest:
        # What it says instead of NOAUTH to a command of more than ten words, before it closes the connection.
        return "queue store has come to ask for a password: expected the one in the Redis URL, or none"
    if isinstance(error, ResponseError) and code == "WRONGTYPE":
        return "queue store has something else under a key of the pool: expected it for this pool alone; remove the key"
    if isinstance(error, ResponseError) and not any(words in str(error) for words in _OUR_FAULTS):
        # Proxies and managed stores have errors of their own. Some repeat what was sent: only the beginning is told.
        said = re.split(r"[,:'\"]", str(error), maxsplit=1)[0][:SAID_MAX_CHARS]
        return f"queue store answers {said!r}: expected an answer to a command of ours; see its log, or its proxy's"
    return ""


def _pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), WORKS_PER_SCRIPT):
        yield items[start : start + WORKS_PER_SCRIPT]


def _pairs(flat: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    them = iter(flat)
    return zip(them, them, strict=True)


_REASONS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (
        OutOfMemoryError,
        "queue store is out of memory: expected room for an entry; raise its maxmemory or drain the queue",
    ),
    (ReadOnlyError, "queue store is a read-only replica: expected the primary; its name is resolved anew"),
    (BusyLoadingError, "queue store is loading its data: expected it ready; it is asked again"),
    (MasterDownError, "queue store has lost its primary: expected a failover; its name is resolved anew"),
    (ClusterDownError, "queue store's cluster is down: expected all slots served; it is asked again"),
    (
        (AskError, TryAgainError),
        "queue store's cluster is moving our slot: expected it in one place; it is asked again",
    ),
    (
        NoPermissionError,
        "queue store's user lacks a right: expected leave to run scripts and commands on the pool's keys; see its ACL",
    ),
    (AuthenticationError, "queue store refused our credentials: expected a valid user and password in the Redis URL"),
    ((TimeoutError, RedisTimeoutError), "queue store did not answer in time"),
    ((RedisConnectionError, OSError, InvalidResponse), "queue store is not reachable"),
)
"""First match wins; subclasses before their parents."""
