"""When not all can be in time: who still can, and who goes after them.

Earliest deadline first is the best order as long as everybody can be in time; beyond that it makes everybody late, since it
always serves whoever is about to miss. Moore and Hodgson: go through the works by deadline, and whenever the next one would
be late, give up the longest so far. That keeps the most works in time. Those given up go last.

A pool is taken for one server that prefills as fast as its engines together. Predictions are stretched by STRETCH, and
SPARE of each objective is left over, since a work that is just in time by prediction is late every other time. A work that
nobody could serve in time by that measure, alone on the idle pool, is judged like any other: it goes last when it is late.

The pace is learned from prompts that were served, at any load. That is good enough to order works, and to refuse those that
others make late; `policies.ordering.shedding` says which.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappush, heappushpop
from itertools import takewhile

from policies.estimators.pace import Pace, prefill_tokens
from policies.schema import Policy
from policies.vocabulary import EngineState, EngineView, Work

STRETCH = 1.2
SPARE = 0.1


@dataclass(frozen=True, slots=True)
class Triage:
    """hopeful: who can be in time, in their order; given_up: the others, in theirs; by_size: ids of those given up for their
    length and not for coming last; free_s: by model, when its pool will have taken in the hopeful ones, from now."""

    hopeful: list[Work]
    given_up: list[Work] = field(default_factory=list)
    by_size: frozenset[str] = frozenset()
    free_s: dict[str, float] = field(default_factory=dict)


def triage(
    works: Sequence[Work],
    per_token_s: Mapping[str, float],
    ahead_s: Mapping[str, float],
    now_s: float,
    *,
    never: Container[str] = (),
) -> Triage:
    """Moore and Hodgson, O(n log n); O(n) where all can be in time.

    works         by deadline, each with what is cached of it where it would go
    per_token_s   by model, seconds for each of `prefill_tokens`, the pool to itself; a work of another is taken to be in time
    ahead_s       by model, prefill time of what its pool has been given already
    never         classes whose works are not given up
    """
    by_model: dict[str, list[Work]] = {}
    for work in works:
        if work.deadline_s is not None and work.class_name not in never:
            by_model.setdefault(work.model, []).append(work)
    given_up: set[str] = set()
    by_size: set[str] = set()
    free_s: dict[str, float] = {}
    for model, its_works in by_model.items():
        if model in per_token_s:
            begins_s = now_s + STRETCH * ahead_s.get(model, 0.0)
            free_s[model] = _give_up(its_works, per_token_s[model], begins_s, given_up, by_size) - now_s
    if not given_up:
        return Triage(list(works), free_s=free_s)
    hopeful: list[Work] = []
    others: list[Work] = []
    for one in works:
        (others if one.id in given_up else hopeful).append(one)
    return Triage(hopeful, others, frozenset(by_size), free_s)


def _give_up(works: Sequence[Work], each_s: float, free_s: float, given_up: set[str], by_size: set[str]) -> float:
    """Add to `given_up` and `by_size`; when the server, which is free at `free_s`, will have taken in the others. One loop
    over all that wait, in every round: no step of it may be dear, so what `latest_s` says is written out."""
    stretched_s, heaped = STRETCH * each_s, False
    longest: list[tuple[float, str]] = []
    for work in works:
        tokens = prefill_tokens(work.prompt_tokens, work.cached_tokens)
        loses_s = -stretched_s * tokens
        free_s -= loses_s
        deadline_s = work.deadline_s
        if deadline_s is None or free_s <= deadline_s - SPARE * (deadline_s - work.accepted_s):
            if heaped:
                heappush(longest, (loses_s, work.id))
            else:
                longest.append((loses_s, work.id))
            continue
        if not heaped:
            heaped = True
            heapify(longest)
        gained_s, worst = heappushpop(longest, (loses_s, work.id))
        free_s += gained_s
        given_up.add(worst)
        if worst != work.id:
            by_size.add(worst)
    return free_s


def latest_s(work: Work) -> float:
    """Pool time by which a first token has to be predicted for the work to count as in time."""
    assert work.deadline_s is not None
    return work.deadline_s - SPARE * (work.deadline_s - work.accepted_s)


class Outlook:
    """What one round expects of the works with a deadline: `triage` by the pace that the engines were seen to have."""

    __slots__ = ("_now_s", "_per_token_s", "triage")

    def __init__(
        self,
        due: Sequence[Work],
        engines: Sequence[EngineView],
        pace: Pace,
        now_s: float,
        *,
        never: Container[str] = (),
    ) -> None:
        """due: by deadline; never: classes whose works are not given up. For each model its engines are one server of their
        joint speed."""
        self._now_s = now_s
        per_s: dict[str, float] = {}
        pending: dict[str, float] = {}
        for view in engines:
            each_s = pace.seconds_per_token(view.name)
            if view.state is EngineState.UP and each_s:
                ahead = pace.ahead_tokens(view.name, view.prefill_tokens, now_s)
                for model in view.models:
                    per_s[model] = per_s.get(model, 0.0) + 1 / each_s
                    pending[model] = pending.get(model, 0.0) + ahead
        self._per_token_s = {model: 1 / rate for model, rate in per_s.items()}
        ahead_s = {model: pending[model] / rate for model, rate in per_s.items()}
        self.triage = triage(due, self._per_token_s, ahead_s, now_s, never=never)

    def order(self, policy: Policy) -> list[Work]:
        """All due works: those that can be in time, those that have been late for long enough, and the others."""
        given_up, now_s = self.triage.given_up, self._now_s
        late = [*takewhile(lambda work: work.deadline_s is not None and work.deadline_s < now_s, given_up)]
        others = given_up[len(late) :]
        late.sort(key=lambda work: not policy.late_for_long(work, now_s))
        return [*self.triage.hopeful, *late, *others]

    def seconds_per_token(self, model: str) -> float | None:
        """Of each of `prefill_tokens`, the idle pool to itself; None: not known."""
        return self._per_token_s.get(model)

    def alone_s(self, work: Work) -> float | None:
        """Prefill time on the idle pool; None: not known."""
        each_s = self._per_token_s.get(work.model)
        return None if each_s is None else prefill_tokens(work.prompt_tokens, work.cached_tokens) * each_s

    def hopeless(self, work: Work) -> bool:
        """Even alone on the idle pool, and without any spare, it would be late by now."""
        alone_s = self.alone_s(work)
        return alone_s is not None and work.deadline_s is not None and self._now_s + alone_s > work.deadline_s

    def first_token_in_s(self, work: Work) -> float | None:
        """From now, behind what is hopeful; None: not known."""
        alone_s = self.alone_s(work)
        free_s = self.triage.free_s.get(work.model)
        return None if alone_s is None or free_s is None else free_s + STRETCH * alone_s
