"""Runs whose faults are written out instead of drawn: each aims at one meeting of faults that a storm seldom has.

A scene is a plan like any other; what is left to the seed are clocks, beats and the order of what comes at once. A gateway
must pass every scene, and the mutants that name one must not. gateway-1 is started first and leads.

Windows are small and works are long, so that a place too many shows at once. Where a scene aims at one moment, its times
follow from the validities of `gateway.control.presence` (5 s a session, 2 s leadership) and of credit (2 s).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tests.simulation.faults import (
    STORM_SPEED,
    Behaviour,
    Call,
    CallFault,
    ClientPlan,
    Fault,
    FaultKind,
    Plan,
    QueueFaults,
)
from tests.simulation.net import Link

SHORT, MIDDLE, LONG, VERY_LONG = 2, 8, 24, 100
"""Tokens of works that hold their places for about 0.5, 2, 6 and 23 s."""
BEFORE = -1.0
"""For calls: from the gateway's start on."""


def _plan(
    duration_s: float,
    *,
    gateways: int,
    window: int,
    clients: Iterable[Iterable[ClientPlan]] = (),
    faults: Iterable[Fault] = (),
    calls: Iterable[CallFault] = (),
    max_queue: int = 1000,
    delay_max_s: float = 0.002,
) -> Plan:
    numbered = [one for group in clients for one in group]
    return Plan(
        duration_s=duration_s,
        gateways=gateways,
        engines=1,
        seats=64,
        engine_speed=STORM_SPEED,
        interactive_window=window,
        bulk_window=1,
        max_queue=max_queue,
        sole=False,
        engine_link=Link(),
        client_link=Link(),
        queue=QueueFaults(delay_max_s),
        faults=tuple(faults),
        calls=tuple(calls),
        clients=tuple(replace(one, number=number) for number, one in enumerate(numbered)),
    )


def _clients(
    gateway: int,
    at_s: float,
    count: int,
    tokens: int,
    *,
    every_s: float = 0.01,
    behaviour: Behaviour = Behaviour.PATIENT,
    patience_s: float = 0.0,
    words: int = 1,
) -> list[ClientPlan]:
    """So many clients of one gateway, one after the other."""
    return [
        ClientPlan(0, at_s + number * every_s, behaviour, "interactive", True, words, tokens, patience_s, gateway)
        for number in range(count)
    ]


def _cut(gateway: int, at_s: float, for_s: float) -> Fault:
    return Fault(FaultKind.QUEUE_CUT, at_s, for_s, f"queue of gateway-{gateway}")


def _on(kind: FaultKind, gateway: int, at_s: float, for_s: float) -> Fault:
    return Fault(kind, at_s, for_s, f"gateway-{gateway}")


OTHERS = (2, 3, 4, 5)

SCENES: Mapping[str, Plan] = {
    # -- Nothing fails ----------------------------------------------------------------------------------------------------
    # Clients of three gateways come at the same moments, at about the rate that the window serves.
    "in_step": _plan(
        5.0, gateways=3, window=6, clients=[_clients(gateway, 0.4, 9, LONG, every_s=0.5) for gateway in (1, 2, 3)]
    ),
    # An engine that holds one work, for two gateways.
    "one_place": _plan(4.0, gateways=2, window=1, clients=[_clients(1, 0.5, 2, MIDDLE), _clients(2, 1.0, 2, SHORT)]),
    # Works come and are granted within one millisecond.
    "at_one_moment": _plan(
        16.0, gateways=2, window=12, delay_max_s=0.0, clients=[_clients(2, 0.5, 20, MIDDLE, every_s=0.0002)]
    ),
    # Prompts are much longer than those that credit was given for.
    "long_prompts": _plan(4.0, gateways=2, window=12, clients=[_clients(2, 0.5, 2, SHORT, words=2000)]),
    # -- Who leads --------------------------------------------------------------------------------------------------------
    # A leader whose calls to lead are answered late, and then no more.
    "late_lead": _plan(
        8.0,
        gateways=5,
        window=4,
        clients=[_clients(2, 0.5, 3, MIDDLE)],
        calls=[
            CallFault(1, Call.LEAD, 1.0, 2.0, answer_late_s=0.45),
            CallFault(1, Call.LEAD, 3.0, 4.5, lost=True),
        ],
    ),
    # Clocks as far apart as they may be, and a leader that is cut off.
    "clocks_apart": _plan(
        8.0,
        gateways=5,
        window=4,
        clients=[_clients(2, 0.5, 3, MIDDLE)],
        calls=[
            CallFault(1, Call.TIME, BEFORE, 7.5, answer_late_s=0.17),
            *(CallFault(other, Call.TIME, BEFORE, 7.5, late_s=0.17) for other in OTHERS),
            CallFault(1, Call.LEAD, 3.0, 4.5, lost=True),
        ],
    ),
    # Clocks farther apart than that.
    "clocks_wrong": _plan(
        8.0,
        gateways=5,
        window=4,
        clients=[_clients(2, 0.5, 3, MIDDLE)],
        calls=[
            CallFault(1, Call.TIME, BEFORE, 7.5, answer_late_s=0.17),
            *(CallFault(other, Call.TIME, BEFORE, 7.5, late_s=0.47) for other in OTHERS),
            CallFault(1, Call.LEAD, 3.0, 4.5, lost=True),
        ],
    ),
    # A flush while two calls of a candidate are under way: the first makes a record, the second makes it outlast its mark.
    "own_late_leads": _plan(
        9.0,
        gateways=2,
        window=4,
        clients=[_clients(2, 0.5, 3, MIDDLE)],
        faults=[Fault(FaultKind.QUEUE_FLUSH, 5.0, 0.0, "queue")],
        calls=[
            CallFault(2, Call.LEAD, 3.4, 1.0, times=2, late_s=1.62),
            CallFault(2, Call.LEAD, 3.4, 2.5, lost=True),
            CallFault(1, Call.LEAD, 4.95, 3.0, lost=True),
        ],
    ),
    # A leader leaves, and its word comes when another leads.
    "late_resign": _plan(
        10.0,
        gateways=5,
        window=4,
        clients=[_clients(2, 0.5, 3, MIDDLE)],
        faults=[_on(FaultKind.GATEWAY_DRAIN, 1, 1.0, 8.0)],
        calls=[CallFault(1, Call.RESIGN, 0.5, 5.0, late_s=2.75)],
    ),
    # A leader reads the queue while it is stopped, and decides when another has.
    "stopped_leader": _plan(
        14.0,
        gateways=2,
        window=3,
        clients=[_clients(1, 0.5, 12, MIDDLE), _clients(2, 0.5, 8, MIDDLE)],
        faults=[_on(FaultKind.GATEWAY_FREEZE, 1, 3.0, 5.0)],
        calls=[CallFault(1, Call.PEEK, 1.0, 6.0, late_s=0.2, answer_late_s=0.2)],
    ),
    # A leader is stopped while it claims, for longer than a grant is valid.
    "stopped_leader_claims": _plan(
        14.0,
        gateways=2,
        window=3,
        clients=[_clients(1, 0.5, 12, MIDDLE), _clients(2, 0.6, 6, MIDDLE)],
        faults=[_on(FaultKind.GATEWAY_FREEZE, 1, 3.0, 6.0)],
        calls=[CallFault(1, Call.CLAIM, 1.0, 4.0, answer_late_s=0.4), CallFault(1, Call.TAKE, 1.0, 2.5, lost=True)],
    ),
    # -- Sessions ---------------------------------------------------------------------------------------------------------
    # A process with a long queue is stopped until its session is over.
    "stopped_owner": _plan(
        28.0,
        gateways=2,
        window=3,
        clients=[_clients(2, 0.5, 18, LONG), _clients(1, 0.6, 2, LONG)],
        faults=[_on(FaultKind.GATEWAY_FREEZE, 2, 3.0, 7.0)],
    ),
    # A process hears that its session is lost, and not what became of the new one.
    "renewal_lost_after_flush": _plan(
        10.0,
        gateways=2,
        window=10,
        clients=[
            _clients(2, 0.2, 14, SHORT, every_s=0.2),
            _clients(1, 3.2, 20, VERY_LONG),
            _clients(2, 3.9, 20, MIDDLE, every_s=0.05),
        ],
        faults=[Fault(FaultKind.QUEUE_FLUSH, 3.0, 0.0, "queue")],
        calls=[CallFault(2, Call.RENEW, 3.0, 2.0, spared=1, unheard=True)],
    ),
    # The store loses everything while windows are full.
    "flushes": _plan(
        24.0,
        gateways=3,
        window=6,
        clients=[_clients(gateway, 0.4, 16, MIDDLE, every_s=0.5) for gateway in (1, 2, 3)],
        faults=[Fault(FaultKind.QUEUE_FLUSH, at_s, 0.0, "queue") for at_s in (3.0, 7.3, 12.1)],
    ),
    # The store is away for longer than a session, with windows full on both sides.
    "store_away": _plan(
        24.0,
        gateways=3,
        window=6,
        clients=[_clients(gateway, 0.4, 12, LONG, every_s=0.5) for gateway in (1, 2, 3)],
        faults=[Fault(FaultKind.QUEUE_AWAY, 4.0, 7.0, "queue")],
    ),
    # -- Credit and shares ------------------------------------------------------------------------------------------------
    # A process holds credit and does not hear that it ended; the leader gives the room to others.
    "credit_unheard": _plan(
        12.0,
        gateways=2,
        window=12,
        clients=[
            _clients(2, 0.2, 12, SHORT, every_s=0.22),
            _clients(1, 3.1, 20, VERY_LONG),
            _clients(2, 5.3, 14, MIDDLE, every_s=0.15),
        ],
        calls=[CallFault(2, Call.RENEW, 3.0, 6.0, unheard=True)],
    ),
    # The same, while it may use its credit still.
    "credit_unheard_at_its_end": _plan(
        12.0,
        gateways=2,
        window=12,
        clients=[
            _clients(2, 0.2, 12, SHORT, every_s=0.22),
            _clients(1, 3.1, 20, VERY_LONG),
            _clients(2, 4.6, 14, MIDDLE, every_s=0.2),
        ],
        calls=[CallFault(2, Call.RENEW, 3.0, 6.0, unheard=True)],
    ),
    # Credit is given to processes that leave, and arrives when they have left.
    "late_credit": _plan(
        8.0,
        gateways=3,
        window=8,
        clients=[_clients(gateway, 0.3, 8, SHORT, every_s=0.25) for gateway in (2, 3)],
        faults=[_on(FaultKind.GATEWAY_DRAIN, 2, 2.5, 1.0), _on(FaultKind.GATEWAY_DRAIN, 3, 4.5, 1.0)],
        calls=[CallFault(1, Call.CREDIT, 1.0, 6.0, late_s=0.45)],
    ),
    # A process that is not heard of starts what its credit still allows.
    "silent_with_credit": _plan(
        10.0,
        gateways=2,
        window=12,
        clients=[
            _clients(2, 0.2, 12, SHORT, every_s=0.22),
            _clients(1, 3.0, 20, VERY_LONG),
            _clients(2, 4.45, 6, MIDDLE, every_s=0.06),
        ],
        calls=[CallFault(2, Call.RENEW, 2.95, 5.0, lost=True)],
    ),
    # A process with many works is cut off from the store, and goes on with them.
    "silent_with_works": _plan(
        14.0,
        gateways=2,
        window=8,
        clients=[_clients(2, 0.5, 6, VERY_LONG), _clients(1, 1.0, 10, VERY_LONG)],
        faults=[_cut(2, 3.0, 8.0)],
    ),
    # A process that is idle in a busy pool is cut off, and uses its floor just before its session is over.
    "floor_used_late": _plan(
        14.0,
        gateways=2,
        window=4,
        clients=[_clients(1, 1.0, 8, VERY_LONG), _clients(2, 7.6, 2, MIDDLE, every_s=0.4)],
        faults=[_cut(2, 4.0, 8.0)],
    ),
    # A process starts when every place is taken, and is cut off.
    "full_when_it_comes": _plan(
        14.0,
        gateways=2,
        window=4,
        clients=[_clients(1, 1.5, 8, VERY_LONG), _clients(2, 10.6, 2, MIDDLE, every_s=0.8)],
        faults=[_on(FaultKind.GATEWAY_DRAIN, 2, 0.37, 3.0), _cut(2, 9.0, 4.5)],
    ),
    # A process that is cut off has all the works, and the leader many that wait.
    "cut_with_all": _plan(
        24.0,
        gateways=2,
        window=6,
        clients=[_clients(2, 0.2, 6, LONG), _clients(2, 4.0, 20, LONG), _clients(1, 3.0, 16, LONG)],
        faults=[_cut(2, 4.2, 14.0)],
    ),
    # A process is cut off for long while both sides are wanted.
    "long_cut": _plan(
        38.0,
        gateways=2,
        window=8,
        clients=[_clients(2, 0.2, 70, MIDDLE, every_s=0.5), _clients(1, 3.0, 40, MIDDLE, every_s=0.8)],
        faults=[_cut(2, 4.0, 30.0)],
    ),
    # What a process has started on its share waits in the store still; it tells so while another begins to lead, and once more.
    "share_told_twice": _plan(
        12.0,
        gateways=3,
        window=6,
        clients=[_clients(3, 0.5, 3, LONG), _clients(2, 0.6, 2, MIDDLE), _clients(2, 0.8, 5, LONG)],
        faults=[_cut(2, 2.0, 3.0), _on(FaultKind.GATEWAY_DRAIN, 1, 4.0, 6.0)],
        calls=[
            CallFault(2, Call.LEAD, 3.5, 6.0, lost=True),
            CallFault(2, Call.RENEW, 4.9, 2.5, unheard=True),
            CallFault(2, Call.TAKE, 4.9, 3.5, lost=True),
        ],
    ),
    # A leader that cannot renew its session has given its places away.
    "leader_without_renewals": _plan(
        12.0,
        gateways=2,
        window=6,
        clients=[_clients(1, 1.0, 6, MIDDLE), _clients(2, 1.2, 10, LONG), _clients(1, 3.6, 4, MIDDLE, every_s=0.1)],
        calls=[CallFault(1, Call.RENEW, 2.9, 2.0, lost=True)],
    ),
    # The same, but that its works end and their places are given away in its last moment, and it has told that it runs them.
    "leader_without_leadership": _plan(
        7.0,
        gateways=2,
        window=8,
        clients=[
            _clients(1, 1.6, 7, MIDDLE, every_s=0.1),
            _clients(2, 2.4, 8, LONG),
            _clients(1, 4.2, 10, SHORT, every_s=0.05),
        ],
        calls=[
            CallFault(1, Call.LEAD, 3.0, 3.5, lost=True),
            CallFault(1, Call.RENEW, 3.0, 3.5, answer_late_s=0.4),
        ],
    ),
    # Windows get smaller, and the store is away before anybody is told that it has no floor any more.
    "resized_and_away": _plan(
        10.0,
        gateways=5,
        window=12,
        clients=[_clients(gateway, 6.0, 2, MIDDLE, every_s=0.3) for gateway in (1, 2, 3, 4, 5)],
        faults=[Fault(FaultKind.POLICY_EDIT, 1.0, 0.0, "policy"), Fault(FaultKind.QUEUE_AWAY, 2.9, 6.0, "queue")],
    ),
    # The same, later: everybody has been told, and what was begun before runs still, more than the window.
    "resized_before_away": _plan(
        16.0,
        gateways=5,
        window=12,
        clients=[
            *(_clients(gateway, 0.5, 2, 40, every_s=0.1) for gateway in (1, 2, 3, 4, 5)),
            *(_clients(gateway, 8.2, 2, MIDDLE, every_s=0.2) for gateway in (1, 2, 3, 4, 5)),
        ],
        faults=[Fault(FaultKind.POLICY_EDIT, 1.0, 0.0, "policy"), Fault(FaultKind.QUEUE_AWAY, 8.0, 6.0, "queue")],
    ),
    # -- Claims and grants ------------------------------------------------------------------------------------------------
    # Claims are made and the leader does not hear of it, whose owner reads its grants late.
    "claims_unheard": _plan(
        12.0,
        gateways=2,
        window=8,
        clients=[_clients(1, 0.4, 3, VERY_LONG), _clients(2, 0.5, 24, MIDDLE)],
        calls=[
            CallFault(1, Call.CLAIM, 2.0, 2.0, times=2, unheard=True),
            CallFault(2, Call.TAKE, 2.0, 3.0, lost=True),
            CallFault(1, Call.CLAIM, 6.5, 2.0, times=2, unheard=True),
            CallFault(2, Call.TAKE, 6.5, 3.0, lost=True),
        ],
    ),
    # The same, but that the repeated claim is answered.
    "claims_heard_late": _plan(
        12.0,
        gateways=2,
        window=8,
        clients=[_clients(1, 0.4, 3, VERY_LONG), _clients(2, 0.5, 24, MIDDLE)],
        calls=[
            CallFault(1, Call.CLAIM, 2.0, 1.0, times=1, unheard=True),
            CallFault(2, Call.TAKE, 2.0, 2.5, lost=True),
            CallFault(1, Call.CLAIM, 6.5, 1.0, times=1, unheard=True),
            CallFault(2, Call.TAKE, 6.5, 2.5, lost=True),
        ],
    ),
    # Claims arrive late, after their caller has repeated them and after they were decided anew.
    "claims_late": _plan(
        14.0,
        gateways=2,
        window=3,
        clients=[_clients(2, 0.5, 10, MIDDLE), _clients(1, 0.6, 8, MIDDLE)],
        calls=[
            CallFault(1, Call.CLAIM, 1.0 + 1.5 * at, 1.4, times=1 + at % 3, late_s=0.6 + 0.3 * at) for at in range(6)
        ],
    ),
    # A process with works is stopped, and claims are answered so late that works start long after their grants.
    "claims_heard_late_beside_a_stopped_one": _plan(
        14.0,
        gateways=2,
        window=6,
        clients=[_clients(2, 0.5, 3, VERY_LONG), _clients(1, 1.0, 24, MIDDLE, every_s=0.2)],
        faults=[_on(FaultKind.GATEWAY_FREEZE, 2, 3.0, 7.0)],
        calls=[
            *(
                CallFault(1, Call.CLAIM, 4.6, 6.0, times=1, unheard=unheard, answer_late_s=0.35)
                for unheard in (True, False) * 8
            ),
            CallFault(1, Call.TAKE, 4.6, 6.0, lost=True),
        ],
    ),
    # A leader's time runs out while its claims are on the way, and it may use its share.
    "claims_without_leading": _plan(
        12.0,
        gateways=2,
        window=6,
        clients=[_clients(1, 1.0, 30, MIDDLE, every_s=0.1), _clients(2, 1.2, 4, LONG)],
        calls=[
            CallFault(1, Call.RENEW, 3.0, 4.0, lost=True),
            CallFault(1, Call.CLAIM, 3.0, 4.0, unheard=True),
            CallFault(1, Call.TAKE, 3.0, 4.0, lost=True),
        ],
    ),
    # The same, when its own works end one after the other and it has a share to use.
    "claims_outlived": _plan(
        12.0,
        gateways=2,
        window=8,
        clients=[_clients(1, 0.5, 8, LONG, every_s=0.15), _clients(1, 2.0, 10, MIDDLE)],
        calls=[
            CallFault(1, Call.RENEW, 5.0, 4.0, lost=True),
            CallFault(1, Call.CLAIM, 5.0, 4.0, unheard=True),
            CallFault(1, Call.TAKE, 5.0, 4.0, lost=True),
        ],
    ),
    # A leader has claimed works of another process, and is answered when its time is over and it may use its share.
    "claims_heard_without_leading": _plan(
        7.0,
        gateways=2,
        window=8,
        clients=[
            _clients(1, 1.5, 7, MIDDLE, every_s=0.1),
            _clients(2, 2.4, 8, LONG),
            _clients(1, 4.2, 10, SHORT, every_s=0.05),
        ],
        calls=[
            CallFault(1, Call.LEAD, 3.0, 3.5, lost=True),
            CallFault(1, Call.CLAIM, 3.0, 3.5, answer_late_s=0.4),
        ],
    ),
    # Grants are not read until they have expired.
    "expired_grant": _plan(
        16.0,
        gateways=2,
        window=4,
        clients=[_clients(2, 0.5, 10, MIDDLE), _clients(1, 0.6, 4, MIDDLE)],
        calls=[
            CallFault(2, Call.TAKE, 1.0, 6.5, lost=True),
            CallFault(2, Call.REQUEUE, 7.0, 1.0, lost=True),
        ],
    ),
    # A process leads before it has read what its predecessor granted it.
    "untaken_grants": _plan(
        12.0,
        gateways=2,
        window=5,
        clients=[_clients(1, 1.2, 5, MIDDLE), _clients(2, 1.3, 14, LONG)],
        faults=[_on(FaultKind.GATEWAY_DRAIN, 1, 3.8, 6.0)],
        calls=[CallFault(2, Call.TAKE, 3.0, 3.0, lost=True)],
    ),
    # -- Successors -------------------------------------------------------------------------------------------------------
    # The leader leaves when another process has taken up grants of it, and could not report them yet.
    "left_grants": _plan(
        10.0,
        gateways=3,
        window=6,
        clients=[_clients(1, 1.2, 6, MIDDLE), _clients(3, 1.3, 6, LONG), _clients(2, 1.5, 8, LONG)],
        faults=[_on(FaultKind.GATEWAY_DRAIN, 1, 3.75, 5.0)],
        calls=[CallFault(3, Call.RENEW, 3.45, 2.5, lost=True)],
    ),
    # The leader dies while another process starts what it was allowed and granted, and cannot report it.
    "killed_leader_credit": _plan(
        14.0,
        gateways=3,
        window=12,
        clients=[
            _clients(3, 0.2, 16, SHORT, every_s=0.22),
            _clients(3, 5.0, 6, LONG, every_s=0.08),
            _clients(2, 5.5, 20, VERY_LONG),
        ],
        faults=[_on(FaultKind.GATEWAY_CRASH, 1, 4.0, 9.0)],
        calls=[CallFault(3, Call.RENEW, 3.9, 4.5, lost=True)],
    ),
    # -- What waits -------------------------------------------------------------------------------------------------------
    # Works are written late, after their clients have gone.
    "late_enqueue": _plan(
        8.0,
        gateways=2,
        window=2,
        clients=[
            _clients(1, 0.5, 4, LONG),
            _clients(2, 1.0, 6, SHORT, every_s=0.2, behaviour=Behaviour.LEAVES_BEFORE_HEAD, patience_s=0.4),
            _clients(2, 1.1, 4, SHORT, every_s=0.2),
        ],
        calls=[CallFault(2, Call.ENQUEUE, 0.9, 1.6, late_s=2.5)],
    ),
    # A work is refused by a full queue, and an earlier call that asked for it arrives when there is room.
    "refused_and_late": _plan(
        18.0,
        gateways=2,
        window=2,
        max_queue=2,
        clients=[_clients(1, 0.5, 2, LONG), _clients(1, 0.7, 3, SHORT), _clients(2, 1.0, 1, SHORT)],
        calls=[CallFault(2, Call.ENQUEUE, 0.9, 1.6, times=1, late_s=9.0)],
    ),
    # The store is not told at once what has ended.
    "settles_lost": _plan(
        6.0,
        gateways=2,
        window=2,
        clients=[_clients(2, 0.5, 6, MIDDLE)],
        calls=[CallFault(2, Call.SETTLE, 2.0, 3.0, times=2, lost=True)],
    ),
}
"""By the names that tell in `make simulate KIND=late_lead SEED=1`."""
