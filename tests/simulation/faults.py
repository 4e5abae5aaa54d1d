"""What goes wrong in one run: drawn from the seed before the run starts, so that a plan can be printed and read.

Each seed first draws which *kinds* of fault it has at all, then how often. A run with every kind at once looks the same
for every seed and hides what only shows when one fault acts alone (swarm testing: Groce et al., ISSTA 2012).

`FaultyQueue` is the store behind a network: a call may be late, may never arrive, or may be done while its answer is
lost, and the caller cannot tell the last two apart.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from gateway.queue.base import (
    Claimed,
    Credit,
    Enqueued,
    Expired,
    GrantTaken,
    Leadership,
    Place,
    Queue,
    QueueUnavailable,
    Renewed,
    Session,
    SessionReport,
    Settled,
    Snapshot,
    Standing,
    Waiting,
)
from policies.vocabulary import Grant, Work
from tests.simulation.net import Link

Answer = TypeVar("Answer")


class FaultKind(StrEnum):
    """Kinds of fault with a place and a duration. After it, what failed works again."""

    ENGINE_CRASH = "engine_crash"
    ENGINE_FREEZE = "engine_freeze"
    ENGINE_STUCK = "engine_stuck"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_RESET = "engine_reset"
    QUEUE_AWAY = "queue_away"
    QUEUE_FLUSH = "queue_flush"
    GATEWAY_CRASH = "gateway_crash"


class Behaviour(StrEnum):
    """What a client does. The first four wait for their whole answer."""

    PATIENT = "patient"
    READS_SLOWLY = "reads_slowly"
    SENDS_SLOWLY = "sends_slowly"
    KEEPS_ALIVE = "keeps_alive"
    LEAVES_BEFORE_HEAD = "leaves_before_head"
    LEAVES_MIDWAY = "leaves_midway"
    RESETS_MIDWAY = "resets_midway"
    STOPS_READING = "stops_reading"
    HALF_CLOSES = "half_closes"

    @property
    def stays(self) -> bool:
        """Whether it is owed a whole answer."""
        return self in {self.PATIENT, self.READS_SLOWLY, self.SENDS_SLOWLY, self.KEEPS_ALIVE}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. at_s and for_s are seconds from the start of the run."""

    kind: FaultKind
    at_s: float
    for_s: float
    target: str = ""

    def overlaps(self, other: Fault) -> bool:
        """Whether both act on one target at one moment."""
        return (
            self.target == other.target
            and self.at_s <= other.at_s + other.for_s
            and other.at_s <= self.at_s + self.for_s
        )


@dataclass(frozen=True, slots=True)
class QueueFaults:
    """Chances per call of the store, and how late its answers are."""

    delay_max_s: float = 0.002
    late_p: float = 0.0
    late_max_s: float = 0.0
    request_lost_p: float = 0.0
    reply_lost_p: float = 0.0
    bell_lost_p: float = 0.0


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One client. words: prompt length; patience_s: when it does what its behaviour says."""

    number: int
    at_s: float
    behaviour: Behaviour
    class_name: str
    stream: bool
    words: int
    max_tokens: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run. duration_s is the safety phase: after it every fault has ended."""

    duration_s: float
    engines: int
    seats: int
    interactive_window: int
    bulk_window: int
    max_queue: int
    sole: bool
    engine_link: Link
    client_link: Link
    queue: QueueFaults
    faults: tuple[Fault, ...] = ()
    clients: tuple[ClientPlan, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [f"  {fault.at_s:7.3f} s {fault.kind} {fault.target} for {fault.for_s:.3f} s" for fault in self.faults]
        return "\n".join([repr(self), *lines])


def draw_plan(rng: random.Random) -> Plan:
    """Draw a run: its load first, then which kinds of fault it has."""
    duration_s = rng.uniform(10, 60)
    engines = rng.randint(1, 3)
    bulk_window = rng.randint(1, 4)
    kinds = [kind for kind in FaultKind if rng.random() < 0.35]
    behaviours = [one for one in Behaviour if one is Behaviour.PATIENT or rng.random() < 0.4]
    return Plan(
        duration_s=duration_s,
        engines=engines,
        seats=rng.choice((2, 4, 16)),
        interactive_window=bulk_window + rng.randint(1, 6),
        bulk_window=bulk_window,
        max_queue=rng.choice((3, 20, 1000)),
        sole=rng.random() < 0.5,
        engine_link=_draw_link(rng),
        client_link=_draw_link(rng),
        queue=_draw_queue_faults(rng),
        faults=_draw_faults(rng, kinds, engines, duration_s),
        clients=_draw_clients(rng, behaviours, duration_s),
    )


class FaultyQueue:
    """A `Queue` in front of another one; see the module header.

    away   while true nothing reaches the store and nothing comes back
    """

    def __init__(self, queue: Queue, faults: QueueFaults, rng: random.Random, *, timeout_s: float = 0.5) -> None:
        """timeout_s: how long a caller waits for an answer that does not come."""
        self.away = False
        self._queue = queue
        self._faults = faults
        self._rng = rng
        self._timeout_s = timeout_s

    def end_faults(self) -> None:
        """From now on the store answers, in time."""
        self.away = False
        self._faults = QueueFaults()

    async def renew_session(
        self, session: Session, *, now_ms: int, valid_for_ms: int, report: SessionReport, ring: bool = False
    ) -> Renewed | None:
        return await self._call(
            lambda: self._queue.renew_session(
                session, now_ms=now_ms, valid_for_ms=valid_for_ms, report=report, ring=ring
            )
        )

    async def sessions(self, *, now_ms: int) -> Mapping[Session, SessionReport]:
        return await self._call(lambda: self._queue.sessions(now_ms=now_ms))

    async def end_session(self, session: Session) -> Expired:
        return await self._call(lambda: self._queue.end_session(session))

    async def expire_sessions(self, *, now_ms: int, after_seq: int | None = None) -> Expired:
        return await self._call(lambda: self._queue.expire_sessions(now_ms=now_ms, after_seq=after_seq))

    async def lead(self, candidate: str, *, now_ms: int, valid_for_ms: int) -> Leadership:
        return await self._call(lambda: self._queue.lead(candidate, now_ms=now_ms, valid_for_ms=valid_for_ms))

    async def resign(self, leader: str, *, epoch: int) -> None:
        await self._call(lambda: self._queue.resign(leader, epoch=epoch))

    async def enqueue_many(
        self, works: Sequence[Work], *, session: Session, max_queue: Mapping[str, int], now_ms: int
    ) -> list[Enqueued]:
        return await self._call(
            lambda: self._queue.enqueue_many(works, session=session, max_queue=max_queue, now_ms=now_ms)
        )

    async def peek(self, *, bounds: Mapping[str, int], default_bound: int, now_ms: int) -> Waiting:
        return await self._call(lambda: self._queue.peek(bounds=bounds, default_bound=default_bound, now_ms=now_ms))

    async def claim_many(
        self, grants: Sequence[Grant], *, now_ms: int, runner: Session | None = None
    ) -> list[Claimed | None]:
        return await self._call(lambda: self._queue.claim_many(grants, now_ms=now_ms, runner=runner))

    async def give_credit(self, credits: Mapping[Session, Mapping[Place, Credit]], *, epoch: int, now_ms: int) -> bool:
        return await self._call(lambda: self._queue.give_credit(credits, epoch=epoch, now_ms=now_ms))

    async def publish(self, snapshot: Snapshot, *, epoch: int, now_ms: int) -> bool:
        return await self._call(lambda: self._queue.publish(snapshot, epoch=epoch, now_ms=now_ms))

    async def snapshot(self) -> Snapshot | None:
        return await self._call(self._queue.snapshot)

    async def standing(self, *, now_ms: int) -> Standing:
        return await self._call(lambda: self._queue.standing(now_ms=now_ms))

    async def take_grants(self, session: Session, *, after_seq: int) -> list[GrantTaken]:
        return await self._call(lambda: self._queue.take_grants(session, after_seq=after_seq))

    async def requeue_many(
        self, works: Sequence[Work], *, session: Session, now_ms: int, seqs: Sequence[int] | None = None
    ) -> list[bool]:
        return await self._call(lambda: self._queue.requeue_many(works, session=session, now_ms=now_ms, seqs=seqs))

    async def settle_many(self, ids: Sequence[tuple[str, int]], *, session: Session, now_ms: int) -> list[Settled]:
        return await self._call(lambda: self._queue.settle_many(ids, session=session, now_ms=now_ms))

    async def rescore_many(self, ranks: Sequence[tuple[str, float]], *, epoch: int, now_ms: int) -> list[bool]:
        return await self._call(lambda: self._queue.rescore_many(ranks, epoch=epoch, now_ms=now_ms))

    async def time_ms(self) -> int:
        return await self._call(self._queue.time_ms)

    async def bell(self, session: Session | None) -> AsyncIterator[None]:
        rings = self._queue.bell(session)
        assert isinstance(rings, AsyncGenerator), "only a generator can be closed by whoever stops listening"
        async with aclosing(rings):
            async for _ in rings:
                if not self.away and self._rng.random() >= self._faults.bell_lost_p:
                    yield

    async def close(self) -> None:
        """The store belongs to whoever made it."""

    async def _call(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        await asyncio.sleep(self._delay_s())
        if self.away or self._rng.random() < self._faults.request_lost_p:
            await asyncio.sleep(self._timeout_s)
            raise QueueUnavailable("the store did not answer in time")
        answer = await call()
        await asyncio.sleep(self._delay_s())
        if self.away or self._rng.random() < self._faults.reply_lost_p:
            await asyncio.sleep(self._timeout_s)
            raise QueueUnavailable("the store did not answer in time")
        return answer

    def _delay_s(self) -> float:
        faults = self._faults
        if faults.late_p and self._rng.random() < faults.late_p:
            return self._rng.uniform(0, faults.late_max_s)
        return self._rng.uniform(0, faults.delay_max_s)


def _draw_link(rng: random.Random) -> Link:
    return Link(
        latency_s=rng.choice((0.000_05, 0.000_5, 0.02)),
        jitter_s=rng.choice((0.0, 0.000_5, 0.02)),
        bytes_per_s=rng.choice((1e6, 1e8, 1e9)),
        window_bytes=rng.choice((4096, 65_536)),
        segment_bytes=rng.choice((536, 1460, 16_384)),
        short_read_p=rng.choice((0.0, 0.0, 0.3)),
    )


def _draw_queue_faults(rng: random.Random) -> QueueFaults:
    return QueueFaults(
        delay_max_s=rng.choice((0.0, 0.001, 0.02)),
        late_p=rng.choice((0.0, 0.0, 0.05)),
        late_max_s=rng.uniform(0.1, 1.0),
        request_lost_p=rng.choice((0.0, 0.0, 0.02, 0.1)),
        reply_lost_p=rng.choice((0.0, 0.0, 0.02, 0.1)),
        bell_lost_p=rng.choice((0.0, 0.0, 0.5, 1.0)),
    )


def _draw_faults(rng: random.Random, kinds: Sequence[FaultKind], engines: int, duration_s: float) -> tuple[Fault, ...]:
    """Up to four of each kind; all of them over before the safety phase ends. Those of one target never overlap."""
    faults: list[Fault] = []
    for kind in kinds:
        for _ in range(rng.randint(1, 4)):
            for_s = 0.0 if kind in _INSTANT else rng.choice((0.05, 1.0, 4.0, 15.0)) * rng.uniform(0.5, 1.5)
            fault = Fault(kind, rng.uniform(0.5, duration_s), for_s, _draw_target(rng, kind, engines))
            if fault.at_s + for_s < duration_s and not any(fault.overlaps(other) for other in faults):
                faults.append(fault)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


_INSTANT = frozenset({FaultKind.ENGINE_RESET, FaultKind.QUEUE_FLUSH})


def _draw_target(rng: random.Random, kind: FaultKind, engines: int) -> str:
    if kind.value.startswith("engine"):
        return f"engine-{rng.randint(1, engines)}"
    return "queue" if kind.value.startswith("queue") else "gateway"


def _draw_clients(rng: random.Random, behaviours: Sequence[Behaviour], duration_s: float) -> tuple[ClientPlan, ...]:
    """A number of clients that some seeds spread and others let come all at once."""
    burst = rng.random() < 0.3
    clients = []
    for number in range(rng.randint(5, 80)):
        at_s = rng.uniform(0, 0.5 if burst else duration_s * 0.9)
        clients.append(
            ClientPlan(
                number=number,
                at_s=at_s,
                behaviour=rng.choice(behaviours),
                class_name=rng.choice(("interactive", "bulk")),
                stream=rng.random() < 0.7,
                words=rng.choice((1, 20, 400)),
                max_tokens=rng.choice((1, 5, 40, 200)),
                patience_s=rng.choice((0.0, 0.01, 0.2, 2.0)) * rng.random(),
            )
        )
    return tuple(clients)
