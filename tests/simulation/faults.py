"""What goes wrong in one run: drawn from the seed before the run starts, so that a plan can be printed and read.

Each seed first draws which *kinds* of fault it has at all, then how often. A run with every kind at once looks the same
for every seed and hides what only shows when one fault acts alone (swarm testing: Groce et al., ISSTA 2012).

`FaultyQueue` is the store behind a network: a call may be late, may never arrive, may be done while its answer is lost,
or may be done after its caller has given up; the caller cannot tell them apart. What was sent arrives, also when its
sender is stopped or dies meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from gateway.queue.base import (
    Claimed,
    Credit,
    Enqueued,
    Expired,
    GrantTaken,
    Heard,
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
from tests.simulation.invariants import InvariantBroken
from tests.simulation.net import Link

Answer = TypeVar("Answer")


class FaultKind(StrEnum):
    """Kinds of fault with a place and a duration. After it, what failed works again.

    A drained engine is to get nothing new. QUEUE_AWAY is the store gone for all, QUEUE_CUT for one gateway. A frozen gateway
    is stopped as by SIGSTOP; a drained one is asked to leave and started again, as in a rolling upgrade. A policy edit
    moves the windows and stays.
    """

    ENGINE_CRASH = "engine_crash"
    ENGINE_FREEZE = "engine_freeze"
    ENGINE_STUCK = "engine_stuck"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_RESET = "engine_reset"
    ENGINE_DRAIN = "engine_drain"
    QUEUE_AWAY = "queue_away"
    QUEUE_FLUSH = "queue_flush"
    QUEUE_CUT = "queue_cut"
    GATEWAY_CRASH = "gateway_crash"
    GATEWAY_FREEZE = "gateway_freeze"
    GATEWAY_DRAIN = "gateway_drain"
    POLICY_EDIT = "policy_edit"


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
    """One fault. at_s and for_s are seconds from the start of the run; gateway: only between the target and that one."""

    kind: FaultKind
    at_s: float
    for_s: float
    target: str = ""
    gateway: int = 0

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
    """One client. words: prompt length; patience_s: when it does what its behaviour says; gateway: whom it asks."""

    number: int
    at_s: float
    behaviour: Behaviour
    class_name: str
    stream: bool
    words: int
    max_tokens: int
    patience_s: float
    gateway: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run. duration_s is the safety phase: after it every fault has ended.

    engine_speed   slow engines hold works long with few tokens, so that windows are full at little cost
    """

    duration_s: float
    gateways: int
    engines: int
    seats: int
    engine_speed: float
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


LATE = QueueFaults(delay_max_s=0.02, late_p=0.15, late_max_s=3.0, reply_lost_p=0.05, bell_lost_p=0.3)
"""Calls that arrive long after their caller has given up, as from a paused proxy or a full buffer."""
STORM_SPEED = 0.03
STORM_TOKENS = (2, 8, 24)
STORM_HOLD_S = 3.0
"""About how long such a work runs on so slow an engine."""


class Kind(StrEnum):
    """What a run is about: the path of requests through one gateway; the agreement among many; the same few faults of the
    agreement again and again while every place is wanted."""

    SINGLE = "single"
    MANY = "many"
    STORM = "storm"


def draw_plan(rng: random.Random, kind: Kind = Kind.SINGLE) -> Plan:
    """Draw a run: its load first, then which kinds of fault it has."""
    return {Kind.SINGLE: _draw_single, Kind.MANY: _draw_many, Kind.STORM: _draw_storm}[kind](rng)


def _draw_single(rng: random.Random) -> Plan:
    duration_s = rng.uniform(10, 40)
    engines = rng.randint(1, 3)
    bulk_window = rng.randint(1, 4)
    kinds = [one for one in FaultKind if one not in _BETWEEN_GATEWAYS and rng.random() < 0.35]
    load = _Load(
        clients=rng.randint(5, 80),
        behaviours=_draw_behaviours(rng, 0.4),
        classes=("interactive", "bulk"),
        max_tokens=(1, 5, 40, 120),
        burst=rng.random() < 0.3,
    )
    return Plan(
        duration_s=duration_s,
        gateways=1,
        engines=engines,
        seats=rng.choice((2, 4, 16)),
        engine_speed=1.0,
        interactive_window=bulk_window + rng.randint(1, 6),
        bulk_window=bulk_window,
        max_queue=rng.choice((3, 20, 1000)),
        sole=rng.random() < 0.5,
        engine_link=_draw_link(rng),
        client_link=_draw_link(rng),
        queue=_draw_queue_faults(rng),
        faults=_draw_faults(rng, kinds, gateways=1, engines=engines, duration_s=duration_s),
        clients=load.draw(rng, duration_s, 1),
    )


def _draw_many(rng: random.Random) -> Plan:
    duration_s = rng.uniform(10, 25)
    gateways = rng.randint(2, 5)
    engines = rng.choice((1, 1, 1, 2, 2, 3, 4))
    bulk_window = rng.randint(1, 4)
    # Faults of engines are told by single gateways; here they only take the load away.
    kinds = [one for one in FaultKind if rng.random() < (0.12 if one.value.startswith("engine") else 0.35)]
    load = _Load(
        clients=rng.randint(20, 90),
        behaviours=_draw_behaviours(rng, 0.15),
        classes=("interactive", "interactive", "interactive", "bulk"),
        max_tokens=(1, 6, 20, 50),
        burst=rng.random() < 0.1,
    )
    return Plan(
        duration_s=duration_s,
        gateways=gateways,
        engines=engines,
        seats=rng.choice((4, 16, 16)),
        engine_speed=rng.choice((0.05, 0.05, 0.2)),
        interactive_window=bulk_window + rng.randint(1, 4),
        bulk_window=bulk_window,
        max_queue=rng.choice((3, 20, 1000)),
        sole=False,
        engine_link=_draw_link(rng),
        client_link=_draw_link(rng),
        queue=_draw_queue_faults(rng),
        faults=_draw_faults(rng, kinds, gateways=gateways, engines=engines, duration_s=duration_s),
        clients=load.draw(rng, duration_s, gateways),
    )


def _draw_storm(rng: random.Random) -> Plan:
    """One slow engine and patient clients, as many as keep its window about full; a few kinds of fault."""
    duration_s = rng.uniform(12, 20)
    gateways = rng.randint(2, 3)
    bulk_window = rng.randint(2, 4)
    interactive_window = bulk_window + rng.randint(1, 4)
    at_once = duration_s / STORM_HOLD_S * interactive_window
    load = _Load(
        clients=int(at_once * rng.uniform(0.5, 1.0)),
        behaviours=[Behaviour.PATIENT],
        classes=("interactive", "interactive", "interactive", "bulk"),
        max_tokens=STORM_TOKENS,
        burst=False,
    )
    kinds = rng.sample(_AGREEMENT, k=rng.randint(2, 4))
    return Plan(
        duration_s=duration_s,
        gateways=gateways,
        engines=1,
        seats=16,
        engine_speed=STORM_SPEED,
        interactive_window=interactive_window,
        bulk_window=bulk_window,
        max_queue=rng.choice((4, 1000, 1000, 1000)),
        sole=False,
        engine_link=Link(),
        client_link=Link(),
        queue=rng.choice((QueueFaults(), LATE, LATE, _draw_queue_faults(rng))),
        faults=_draw_faults(rng, kinds, gateways=gateways, engines=1, duration_s=duration_s),
        clients=load.draw(rng, duration_s, gateways),
    )


class FaultyQueue:
    """A `Queue` in front of another one; see the module header.

    away   while true nothing reaches the store and nothing comes back
    dead   the process that used it was killed: nothing is sent any more
    credits   as the last renewal told them
    """

    def __init__(self, queue: Queue, faults: QueueFaults, rng: random.Random, *, timeout_s: float = 0.5) -> None:
        """timeout_s: how long a caller waits for an answer that does not come. `queue` must never suspend."""
        self.away = self.dead = False
        self.credits: Mapping[Place, Credit] = {}
        self._queue = queue
        self._faults = faults
        self._rng = rng
        self._timeout_s = timeout_s
        self._wire = Context()

    def end_faults(self) -> None:
        """From now on the store answers, in time."""
        self.away = False
        self._faults = QueueFaults()

    async def renew_session(
        self, session: Session, *, now_ms: int, valid_for_ms: int, report: SessionReport, ring: bool = False
    ) -> Renewed | None:
        renewed = await self._call(
            lambda: self._queue.renew_session(
                session, now_ms=now_ms, valid_for_ms=valid_for_ms, report=report, ring=ring
            )
        )
        self.credits = {} if renewed is None else renewed.credits
        return renewed

    async def hear(self, *, now_ms: int, after_seq: int = 0) -> Heard:
        return await self._call(lambda: self._queue.hear(now_ms=now_ms, after_seq=after_seq))

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
        if self.dead:
            raise QueueUnavailable("the process was killed")
        loop, faults = asyncio.get_running_loop(), self._faults
        answer: asyncio.Future[Answer] = loop.create_future()
        there_s, back_s = self._delay_s(), self._delay_s()
        lost = self._rng.random() < faults.request_lost_p or self.away
        unheard = self._rng.random() < faults.reply_lost_p

        def arrive() -> None:
            if not lost and not self.away:
                told = _told(call())
                if not unheard:
                    loop.call_later(back_s, return_, told, context=self._wire)

        def return_(told: Callable[[asyncio.Future[Answer]], None]) -> None:
            if not self.away and not answer.done():
                told(answer)

        loop.call_later(there_s, arrive, context=self._wire)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            raise QueueUnavailable("the store did not answer in time") from None

    def _delay_s(self) -> float:
        faults = self._faults
        if faults.late_p and self._rng.random() < faults.late_p:
            return self._rng.uniform(0, faults.late_max_s)
        return self._rng.uniform(0, faults.delay_max_s)


def _told(call: Awaitable[Answer]) -> Callable[[asyncio.Future[Answer]], None]:
    """Have a store that never suspends do a call now; returns how to tell a future of what came of it."""
    try:
        next(call.__await__())
    except StopIteration as done:
        result: Answer = done.value
        return lambda answer: answer.set_result(result)
    except InvariantBroken:
        raise  # whether or not anybody would hear of it
    except Exception as error:  # a refusal is an answer too
        failed = error
        return lambda answer: answer.set_exception(failed)
    raise RuntimeError("the store suspended: expected one in memory")


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
        late_p=rng.choice((0.0, 0.0, 0.05, 0.1)),
        late_max_s=rng.choice((0.2, 1.0, 3.0)) * rng.random(),
        request_lost_p=rng.choice((0.0, 0.0, 0.02, 0.1)),
        reply_lost_p=rng.choice((0.0, 0.0, 0.02, 0.1)),
        bell_lost_p=rng.choice((0.0, 0.0, 0.5, 1.0)),
    )


_BETWEEN_GATEWAYS = frozenset({FaultKind.QUEUE_CUT, FaultKind.GATEWAY_DRAIN})
_AGREEMENT = (
    FaultKind.QUEUE_CUT,
    FaultKind.QUEUE_AWAY,
    FaultKind.QUEUE_FLUSH,
    FaultKind.GATEWAY_CRASH,
    FaultKind.GATEWAY_FREEZE,
    FaultKind.GATEWAY_DRAIN,
)
_INSTANT = frozenset({FaultKind.ENGINE_RESET, FaultKind.QUEUE_FLUSH, FaultKind.POLICY_EDIT})
LONGEST_FREEZE_S = 10.0


def _draw_faults(
    rng: random.Random, kinds: Sequence[FaultKind], *, gateways: int, engines: int, duration_s: float
) -> tuple[Fault, ...]:
    """Up to four of each kind; all of them over before the safety phase ends. Those of one target never overlap."""
    faults: list[Fault] = []
    for kind in kinds:
        for _ in range(rng.randint(1, 4)):
            for_s = 0.0 if kind in _INSTANT else rng.choice((0.05, 1.0, 4.0, 15.0)) * rng.uniform(0.5, 1.5)
            if kind is FaultKind.GATEWAY_FREEZE:
                for_s = min(for_s, LONGEST_FREEZE_S)
            only = rng.randint(1, gateways) if kind is FaultKind.ENGINE_UNREACHABLE and rng.random() < 0.5 else 0
            target = _draw_target(rng, kind, gateways, engines)
            fault = Fault(kind, rng.uniform(0.5, duration_s), for_s, target, only)
            if fault.at_s + for_s < duration_s and not any(fault.overlaps(other) for other in faults):
                faults.append(fault)
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _draw_target(rng: random.Random, kind: FaultKind, gateways: int, engines: int) -> str:
    if kind.value.startswith("engine"):
        return f"engine-{rng.randint(1, engines)}"
    if kind is FaultKind.QUEUE_CUT or kind.value.startswith("gateway"):
        place = "queue of " if kind is FaultKind.QUEUE_CUT else ""
        return f"{place}gateway-{rng.randint(1, gateways)}"
    return kind.value.partition("_")[0]


def _draw_behaviours(rng: random.Random, chance: float) -> list[Behaviour]:
    return [one for one in Behaviour if one is Behaviour.PATIENT or rng.random() < chance]


@dataclass(frozen=True, slots=True)
class _Load:
    """How many clients come, and what they are drawn from. burst: all at once."""

    clients: int
    behaviours: Sequence[Behaviour]
    classes: Sequence[str]
    max_tokens: Sequence[int]
    burst: bool

    def draw(self, rng: random.Random, duration_s: float, gateways: int) -> tuple[ClientPlan, ...]:
        """Whom the clients ask is drawn too."""
        ask = rng.choice((_in_turn, _in_turn, _sticky, _one_sided))
        clients = []
        for number in range(self.clients):
            client = ClientPlan(
                number=number,
                at_s=rng.uniform(0, 0.5 if self.burst else duration_s * 0.9),
                behaviour=rng.choice(self.behaviours),
                class_name=rng.choice(self.classes),
                stream=rng.random() < 0.7,
                words=rng.choice((1, 20, 400)),
                max_tokens=rng.choice(self.max_tokens),
                patience_s=rng.choice((0.0, 0.01, 0.2, 2.0)) * rng.random(),
            )
            clients.append(replace(client, gateway=ask(client, gateways)))
        return tuple(clients)


def _in_turn(client: ClientPlan, gateways: int) -> int:
    return client.number % gateways + 1


def _sticky(client: ClientPlan, gateways: int) -> int:
    """As a proxy with affinity: people to one end, bulk to the other."""
    return 1 if client.class_name == "interactive" else gateways


def _one_sided(client: ClientPlan, gateways: int) -> int:
    return 1 if client.number % 8 else gateways
