"""How much each process may start without asking: the leader's room, handed out ahead of demand.

Credit buys away the round trips of the queue for classes with a TTFT objective. It is counted as used from the moment
it is written, so it must never be more than what the guards allow, and room that nobody uses while others queue is
waste. So: a class gets credit only while nothing waits that would go before it, an engine hands out at most HANDED_OUT
of what it could still take, each process gets in proportion to what it started lately (one work more while nothing
waits at all), and what is not wanted any more runs out by itself.

A **floor** is one work that a process may keep in flight on one engine when it is cut off, also if it ran nothing there.
It is kept free for it all the time, so it is given where it costs nothing (it runs something there already) or where there
is room, and at most FLOORS of what an engine can hold of a class are floors; none while it holds more than it should.

Pure: the views count everything in flight, unspent credit included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.schema import Policy
from policies.sizing import SizingPolicy
from policies.vocabulary import EngineState, EngineView, Guard, Work

HANDED_OUT = 0.5
"""Part of an engine's room that is given away as credit; the rest serves what comes by the queue."""
AHEAD_S = 1.0
"""A process gets what it would start in this time at its latest rate."""
FLOORS = 0.5
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
        view = view.with_more(work)
    return found


def over_window(work: Work, engine: EngineView, sizing: SizingPolicy, now_s: float) -> bool:
    """More is in flight than the window in force, or than the engine has seats: one work more would be too many by two."""
    return any(
        one.guard in (Guard.WINDOW, Guard.SEATS) and one.value > one.threshold + 1
        for one in sizing.admit(work, engine, now_s).guards
    )


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


def split(amount: int, started_per_s: Sequence[float], *, spare: int = 1) -> list[int]:
    """Share `amount` works among processes by their rates, in order; never more than what each could use.

    Each gets what it would start in AHEAD_S and `spare` more; when that is more than there is, in proportion, the rest
    one by one from the first on.
    """
    wanted = [int(rate * AHEAD_S) + spare for rate in started_per_s]
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
    unspent: Sequence[int],
    now_s: float,
    spare: int = 1,
) -> list[Allowance]:
    """Credit of one class on one engine for each process, in the order of `started_per_s`.

    prompt_tokens   of a typical work of the class; each allowed work allows so many tokens
    unspent         works that earlier credit of this class still allows each here; the view counts them as in flight
    spare           works beyond what a process would start at its rate

    What one process is to have less is free only when its credit has run out: until then the others get what is free now.
    """
    if engine.state is not EngineState.UP or not started_per_s:
        return [_NOTHING] * len(started_per_s)
    free = room(typical(class_name, prompt_tokens, now_s), engine, sizing, now_s)
    works = split(int((free + sum(unspent)) * HANDED_OUT), started_per_s, spare=spare)
    for index, (wanted, held) in enumerate(zip(works, unspent, strict=True)):
        works[index] = min(wanted, held + free)
        free -= max(0, works[index] - held)
    return [Allowance(each, each * prompt_tokens, each * prompt_tokens) for each in works]


def typical(class_name: str, prompt_tokens: int, now_s: float) -> Work:
    """A work of a class as the guards are asked for it before it is there."""
    return Work(
        id="",
        class_name=class_name,
        tenant="",
        model="",
        path="",
        accepted_s=now_s,
        rank=now_s,
        prompt_tokens=prompt_tokens,
    )


def homes(
    held: Sequence[Sequence[int]],
    runs: Sequence[Sequence[int]],
    started_per_s: Sequence[float],
    *,
    room: Sequence[int],
    most: Sequence[int],
) -> list[int | None]:
    """The engine on which each process has its floor of a class, None for one that gets none; in the order of `held`.

    held   the engines on which each has one by now: it stays on one of them as long as there may be so many
    runs   by process and engine, works there, unspent credit included: a floor under them costs nothing
    room   by engine, how many works more would fit; most: how many floors it may have

    One that is taken back is in force until its credit ends, so that it counts until then, and nobody else has its place.
    """
    free, left = list(room), list(most)
    given: list[int | None] = [None] * len(held)
    order = sorted(range(len(held)), key=lambda at: (not any(runs[at]), -started_per_s[at], at))
    for at in order:
        for engine in held[at]:
            if given[at] is None and left[engine] > 0:
                given[at] = engine
            left[engine] -= 1
    for at in order:
        if given[at] is not None:
            continue
        for engine in sorted(range(len(left)), key=lambda one: (-runs[at][one], -left[one], one)):
            costs = not runs[at][engine]
            if left[engine] > 0 and (not costs or free[engine] > 0):
                given[at] = engine
                left[engine] -= 1
                free[engine] -= costs
                break
    return given


_NOTHING = Allowance(0, 0, 0)
