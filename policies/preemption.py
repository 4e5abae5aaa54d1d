"""Which running works give way, so that one with an objective that waits for KV memory alone can start.

An engine keeps what it has begun, whatever waits (its priorities order its queue, and evict only for what runs): so the
gateway gives up works itself. Preempted are works of classes without an objective that say `preemptible`, on an engine
where KV memory is all that refuses a work which has waited for WAITED_SHARE of its time and is not late yet; the newest
first, since they have the least to lose, and no more of them than it takes. A preempted work goes back to the queue and
begins anew: what it had made is waste, so it is left in peace for PEACE_S after that, and for good after REQUEUES_MAX times.

Who can be given up without harm is the caller's to say: not a work whose answer has begun to reach its client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from policies.placement import suited
from policies.schema import Policy
from policies.sizing import SizingPolicy
from policies.vocabulary import Action, Decision, EngineView, Guard, GuardReading, Verdict, Work

WAITED_SHARE = 0.25
PEACE_S = 30.0
REQUEUES_MAX = 3
LOOK_AHEAD = 4
"""Waiting works that are looked at in a round: the next will do for the rest."""


@dataclass(frozen=True, slots=True)
class Victim:
    """An attempt that could be given up. kv_tokens: what it holds."""

    work: Work
    attempt: int
    granted_s: float
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Give these up on an engine."""

    engine: str
    victims: tuple[Victim, ...]
    decision: Decision


def plan_recalls(  # noqa: PLR0917 - one signature with plan_round, read in this order
    waiting: Sequence[Work],
    engines: Iterable[EngineView],
    sizing: SizingPolicy,
    policy: Policy,
    now_s: float,
    running: Callable[[str], Sequence[Victim]],
) -> list[Recall]:
    """At most one for each engine.

    waiting   works with an objective that found no room in this round, in their order
    engines   as they are after the round's placements
    running   what could be given up on an engine; none where some are being given up already
    """
    by_name = sorted(engines, key=lambda view: view.name)
    left = {view.name for view in by_name}
    found: list[Recall] = []
    for work in [one for one in waiting if _pressing(one, now_s) and not policy.late(one, now_s)][:LOOK_AHEAD]:
        options = []
        for view in suited(work, by_name):
            if view.name not in left:
                continue
            verdict = sizing.admit(work, view, now_s)
            reading = _memory_alone(verdict.guards)
            victims = () if reading is None else _newest(running(view.name), reading, policy, now_s)
            if reading is not None and victims:
                options.append((sum(one.kv_tokens for one in victims), view.name, victims, reading, verdict))
        if options:
            _, name, victims, reading, verdict = min(options, key=lambda one: one[:2])
            decision = Decision(
                Action.PREEMPT,
                now_s,
                policy.version,
                work.class_name,
                name,
                work.id,
                Guard.KV,
                (reading,),
                "memory",
                verdict.steps_to_overflow,
            )
            found.append(Recall(name, victims, decision))
            left.remove(name)
    return found


def by_memory(refusals: Iterable[Verdict]) -> bool:
    """Whether memory alone refuses on some engine: there a recall may help."""
    return any(_memory_alone(one.guards) is not None for one in refusals)


def _pressing(work: Work, now_s: float) -> bool:
    return work.deadline_s is not None and now_s - work.accepted_s >= WAITED_SHARE * (work.deadline_s - work.accepted_s)


def _memory_alone(guards: Sequence[GuardReading]) -> GuardReading | None:
    """The memory guard's reading, where it is the only one that refuses."""
    refused = [one for one in guards if not one.passed]
    return refused[0] if len(refused) == 1 and refused[0].guard is Guard.KV else None


def _newest(running: Sequence[Victim], reading: GuardReading, policy: Policy, now_s: float) -> tuple[Victim, ...]:
    """As many as free enough; none where all together would not."""
    missing, chosen = reading.value - reading.threshold, []
    for one in sorted(running, key=lambda one: (-one.granted_s, one.work.id)):
        of_class = policy.class_policy(one.work.class_name)
        requeues = one.attempt - 1
        if of_class.has_ttft_objective or not of_class.preemptible or requeues >= REQUEUES_MAX:
            continue
        if requeues and now_s - one.granted_s < PEACE_S:
            continue
        chosen.append(one)
        missing -= one.kv_tokens
        if missing <= 0:
            return tuple(chosen)
    return ()
