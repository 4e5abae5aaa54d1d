"""What goes wrong in one run: drawn from the seed before the run starts, so that a plan can be printed and read.

Each seed first draws which *kinds* of fault it has at all, then how often. A run with every kind at once looks the same
for every seed and hides what only shows when one fault acts alone (swarm testing: Groce et al., ISSTA 2012).

A plan can also be written out (`scenes`): then single calls to the store can be made to fail as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tests.simulation.net import Link


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


class Call(StrEnum):
    """Calls to the store, by the names of its methods."""

    RENEW = "renew_session"
    END = "end_session"
    HEAR = "hear"
    SWEEP = "expire_sessions"
    LEAD = "lead"
    RESIGN = "resign"
    ENQUEUE = "enqueue_many"
    PEEK = "peek"
    CLAIM = "claim_many"
    CREDIT = "give_credit"
    STANDING = "standing"
    PUBLISH = "publish"
    SNAPSHOT = "snapshot"
    TAKE = "take_grants"
    REQUEUE = "requeue_many"
    SETTLE = "settle_many"
    TIME = "time_ms"


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
class CallFault:
    """Calls of one gateway to the store go wrong: all that it sends from at_s on for for_s, at most `times`, the first
    `spared` excepted.

    at_s        from the start of the load; < 0: from the gateway's start on, and for_s counts from the start of the load
    late_s      they arrive so late; answer_late_s: and are answered so late
    lost        they never arrive; unheard: they are done, and the answer is lost
    """

    gateway: int
    call: Call
    at_s: float
    for_s: float
    times: int = 1_000_000
    spared: int = 0
    late_s: float = 0.0
    answer_late_s: float = 0.0
    lost: bool = False
    unheard: bool = False


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
    calls: tuple[CallFault, ...] = ()
    clients: tuple[ClientPlan, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [f"  {fault.at_s:7.3f} s {fault.kind} {fault.target} for {fault.for_s:.3f} s" for fault in self.faults]
        lines += [f"  {call}" for call in self.calls]
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
