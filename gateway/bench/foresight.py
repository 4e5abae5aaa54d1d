"""What the clairvoyant works out before a run: who goes where, whom to give up, and how much slower prompts may get when.

**Who goes where.** Each urgent request gets an engine, so that all are busy with them for the same part of their time,
as in the fluid bound; a prompt that would take one engine a large part of its objective goes to the fastest. An engine
that is not there (interrupted, killed) gets nothing meanwhile.

**Whom to give up.** Where bursts exceed capacity somebody is late, and a scheduler that knows it does not start them.
Moore and Hodgson say whom, on an engine `slower` times as slow as it is, since bulk decodes beside: the slowest at which
the bar can still be reached. Where everybody can be in time nobody is given up for bulk.

**How much slower when.** The same for ever slower engines: who is late at a speed, but not at the one before, sets the
speed that the engine has to keep in the busy stretch in which he comes. Outside of such stretches any will do.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backends.simulated.profiles import Profile
from gateway.bench.bounds import BAR, CEILING_SHARE, SLOWDOWNS, decode_s, given_up, prefill_s
from gateway.replay.host import EngineSpec
from gateway.replay.trace import Request

LARGE_PART = 0.5
"""Of its objective, that a prompt may take an idle engine."""

Objective = Callable[[Request], float]
"""Seconds that a request's first token may take."""


@dataclass(frozen=True, slots=True)
class Known:
    """An arrival to come at an engine. due_s inf: nobody asks when its first token comes."""

    arrival_s: float
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    due_s: float

    @property
    def prompt_tokens(self) -> int:
        return self.computed_tokens + self.cached_tokens


class Coming:
    """All arrivals at one engine, and what they tolerate."""

    __slots__ = ("_tolerated", "_usually", "known", "times_s")

    def __init__(self, known: Sequence[Known], tolerated: Mapping[int, float], *, usually: float = math.inf) -> None:
        """tolerated: second -> how many times slower prompts may be computed in it; `usually` in those not named."""
        self._usually = usually
        self.known = sorted(known, key=lambda one: one.arrival_s)
        self.times_s = [one.arrival_s for one in self.known]
        self._tolerated = dict(tolerated)

    def after(self, now_s: float) -> int:
        """Index of the first that is still to come."""
        return bisect_right(self.times_s, now_s)

    def tolerated(self, from_s: float, until_s: float) -> float:
        """How many times slower prompts may be computed in that time."""
        if not self._tolerated:
            return self._usually
        return min(
            (self._tolerated.get(second, self._usually) for second in range(int(from_s), int(until_s) + 1)),
            default=math.inf,
        )


@dataclass(frozen=True, slots=True)
class Foresight:
    """See the module header. engine_of: by id() of the request; hopeless: those to refuse, likewise."""

    coming: Mapping[str, Coming]
    engine_of: Mapping[int, str]
    hopeless: frozenset[int]


def foresee(
    engines: Sequence[EngineSpec],
    urgent: Sequence[Request],
    foreign: Sequence[tuple[str, Request]],
    objective: Objective,
    *,
    for_bulk: bool = True,
) -> Foresight:
    """Look at a whole run.

    urgent    requests with an objective, by arrival
    foreign   those that pass the gateway by, and where
    for_bulk  where bursts exceed capacity, give up as many as the bar allows; False: as few as can be
    """
    engine_of = _assigned(engines, urgent, objective)
    hopeless: set[int] = set()
    coming: dict[str, Coming] = {}
    for spec in engines:
        mine = [one for one in urgent if engine_of[id(one)] == spec.name]
        late_at = {slower: given_up(mine, [spec.profile], objective=objective, slowdown=slower) for slower in SLOWDOWNS}
        slower = _affordable({slower: len(lost) for slower, lost in late_at.items()}, len(mine), for_bulk=for_bulk)
        lost = late_at[slower]
        hopeless |= {id(mine[index]) for index in lost}
        kept = [one for index, one in enumerate(mine) if index not in lost]
        known = [_known(one, one.arrival_s + objective(one)) for one in kept]
        known += [_known(one, math.inf) for name, one in foreign if name == spec.name]
        overloaded = len(mine) > 0 and min(map(len, late_at.values())) > (1 - BAR) * len(mine)
        coming[spec.name] = Coming(
            known,
            _tolerated(kept, spec.profile, objective, at_least=slower),
            usually=slower if overloaded else math.inf,  # bursts come on bursts: there is no time in which bulk is free
        )
    return Foresight(coming, engine_of, frozenset(hopeless))


def _affordable(late: Mapping[float, int], requests: int, *, for_bulk: bool) -> float:
    """How many times slower the engine may be made by bulk, in any burst, so that the bar is reached."""
    if not requests:
        return max(late)
    on_time = {slower: 1 - count / requests for slower, count in late.items()}
    best = max(on_time.values())
    if best >= BAR or not for_bulk:
        return max(slower for slower, share in on_time.items() if share == best)
    return max(slower for slower, share in on_time.items() if share >= CEILING_SHARE * best)


def _tolerated(kept: Sequence[Request], profile: Profile, objective: Objective, *, at_least: float) -> dict[int, float]:
    """Second -> times slower; see the module header."""
    found: dict[int, float] = {}
    before = at_least
    full_s = profile.step_model.step_s(0, 0, ((profile.max_num_batched_tokens, 0),))

    def patience_s(request: Request) -> float:
        """Whoever comes in a burst waits for a full step before his own begins."""
        return max(objective(request) / 2, objective(request) - full_s)

    levels = [slower for slower in SLOWDOWNS if slower > at_least]
    for slower in levels:
        for index, busy_since_s in given_up(kept, [profile], objective=patience_s, slowdown=slower).items():
            due_s = kept[index].arrival_s + objective(kept[index])
            for second in range(int(busy_since_s), int(due_s) + 1):
                found.setdefault(second, before)
        before = slower
    return found


def _assigned(engines: Sequence[EngineSpec], urgent: Sequence[Request], objective: Objective) -> dict[int, str]:
    if len(engines) == 1:
        return {id(one): engines[0].name for one in urgent}
    spent_s = dict.fromkeys((spec.name for spec in engines), 0.0)
    fastest = min(engines, key=lambda spec: spec.profile.step_model.e)
    found: dict[int, str] = {}
    for one in urgent:
        there = [spec for spec in engines if _there(spec, one.arrival_s)] or list(engines)
        able = [spec for spec in there if prefill_s([spec.profile], one) <= LARGE_PART * objective(one)] or [
            fastest if fastest in there else there[0]
        ]
        chosen = min(able, key=lambda spec: spent_s[spec.name])
        spent_s[chosen.name] += prefill_s([chosen.profile], one) + decode_s([chosen.profile], one)
        for spec in engines:
            if spec not in there:  # nobody makes up for the time in which it was away
                spent_s[spec.name] = max(spent_s[spec.name], min(spent_s[other.name] for other in there))
        found[id(one)] = chosen.name
    return found


def _there(spec: EngineSpec, at_s: float) -> bool:
    if spec.interrupted_at_s is not None and at_s >= spec.interrupted_at_s - spec.notice_s:
        return False
    return spec.killed_at_s is None or not spec.killed_at_s <= at_s < spec.killed_at_s + spec.down_s


def _known(request: Request, due_s: float) -> Known:
    cached = min(request.cached_prompt_tokens, request.prompt_tokens - 1)
    return Known(request.arrival_s, request.prompt_tokens - cached, cached, request.output_tokens, due_s)
