"""How much each process may start without asking: the leader's room, handed out ahead of demand.

Credit buys away the round trips of the queue for classes with a TTFT objective. It is counted as used from the moment
it is written, so it must never be more than what the guards allow, and room that nobody uses while others queue is
waste. So: a class gets credit only while nothing waits that would go before it, an engine hands out at most HANDED_OUT
of what it could still take, each process gets in proportion to what it started lately (one work at least while the
room lasts), and what is not wanted any more runs out by itself.

Pure: the views count everything in flight, unspent credit included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from policies.schema import Policy
from policies.sizing import SizingPolicy
from policies.vocabulary import EngineState, EngineView, Work

HANDED_OUT = 0.5
"""Part of an engine's room that is given away as credit; the rest serves what comes by the queue."""
AHEAD_S = 1.0
"""A process gets what it would start in this time at its latest rate."""
MOST = 64
"""Works of one class that credit on one engine may allow at once, over all processes."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one process may start on one (engine, class)."""

    works: int
    kv_tokens: int
    prefill_tokens: int


def room(work: Work, engine: EngineView, sizing: SizingPolicy, now_s: float, *, most: int = MOST) -> int:
    """How many works like this one the guards would let in, one after the other; at most `most`."""
    view, found = engine, 0
    while found < most and sizing.admit(work, view, now_s).admitted:
        found += 1
        in_flight = {**view.in_flight, work.class_name: view.in_flight.get(work.class_name, 0) + 1}
        view = replace(
            view,
            in_flight=in_flight,
            kv_tokens=view.kv_tokens + work.prompt_tokens,
            prefill_tokens=view.prefill_tokens + work.prompt_tokens,
        )
    return found


def creditable(policy: Policy, waiting: Mapping[str, int]) -> list[str]:
    """Classes that may have credit now: with a TTFT objective, and nothing waiting in them or before them.

    waiting   works waiting, by class
    """
    found = []
    for name in policy.precedence:
        if waiting.get(name):
            break
        if policy.class_policy(name).has_ttft_objective:
            found.append(name)
    return found


def split(amount: int, started_per_s: Sequence[float]) -> list[int]:
    """Share `amount` works among processes by their rates, in order; never more than what each could use.

    Each gets what it would start in AHEAD_S and one more; when that is more than there is, in proportion, the rest one
    by one from the first on.
    """
    wanted = [int(rate * AHEAD_S) + 1 for rate in started_per_s]
    total = sum(wanted)
    if total <= amount:
        return wanted
    shares = [amount * want // total for want in wanted]
    left = amount - sum(shares)
    for index in range(len(shares)):
        if left and shares[index] < wanted[index]:
            shares[index] += 1
            left -= 1
    return shares


def allot(
    class_name: str,
    engine: EngineView,
    sizing: SizingPolicy,
    started_per_s: Sequence[float],
    *,
    prompt_tokens: int,
    unspent: int,
    now_s: float,
) -> list[Allowance]:
    """Credit of one class on one engine for each process, in the order of `started_per_s`.

    prompt_tokens   of a typical work of the class; each allowed work allows so many tokens
    unspent         works that earlier credit of this class still allows here; the view counts them as in flight
    """
    if engine.state is not EngineState.UP or not started_per_s:
        return [_NOTHING] * len(started_per_s)
    typical = Work(
        id="",
        class_name=class_name,
        tenant="",
        model="",
        path="",
        accepted_s=now_s,
        rank=now_s,
        prompt_tokens=prompt_tokens,
    )
    amount = int((room(typical, engine, sizing, now_s) + unspent) * HANDED_OUT)
    return [Allowance(works, works * prompt_tokens, works * prompt_tokens) for works in split(amount, started_per_s)]


_NOTHING = Allowance(0, 0, 0)
