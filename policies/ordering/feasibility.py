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

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from policies.estimators.pace import Pace
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
    works: Sequence[Work], seconds: Callable[[Work], float | None], ahead_s: Callable[[Work], float], now_s: float
) -> Triage:
    """Moore and Hodgson, O(n log n).

    works     by deadline
    seconds   a work's prefill time, its pool to itself; None: unknown, and it is taken to be in time
    ahead_s   prefill time of what its pool has been given already
    """
    given_up: set[str] = set()
    by_size: set[str] = set()
    free_s: dict[str, float] = {}
    longest_of: dict[str, list[tuple[float, str]]] = {}
    for work in works:
        takes_s = seconds(work)
        if work.deadline_s is None or takes_s is None:
            continue
        model = work.model
        if model not in free_s:
            free_s[model], longest_of[model] = STRETCH * ahead_s(work), []
        longest = longest_of[model]
        heapq.heappush(longest, (-STRETCH * takes_s, work.id))
        free = free_s[model] + STRETCH * takes_s
        if now_s + free > latest_s(work):
            gained, worst = heapq.heappop(longest)
            free += gained
            given_up.add(worst)
            if worst != work.id:
                by_size.add(worst)
        free_s[model] = free
    if not given_up:
        return Triage(list(works), free_s=free_s)
    return Triage(
        [one for one in works if one.id not in given_up],
        [one for one in works if one.id in given_up],
        frozenset(by_size),
        free_s,
    )


def latest_s(work: Work) -> float:
    """Pool time by which a first token has to be predicted for the work to count as in time."""
    assert work.deadline_s is not None
    return work.deadline_s - SPARE * (work.deadline_s - work.accepted_s)


class Outlook:
    """What one round expects of the works with a deadline: `triage` by the pace that the engines were seen to have."""

    __slots__ = ("_now_s", "_pending", "_per_s", "triage")

    def __init__(self, due: Sequence[Work], engines: Sequence[EngineView], pace: Pace, now_s: float) -> None:
        """due: by deadline. For each model its engines are one server of their joint speed."""
        self._now_s = now_s
        self._per_s: dict[str, float] = {}
        self._pending: dict[str, int] = {}
        for view in engines:
            each_s = pace.seconds_per_token(view.name)
            if view.state is EngineState.UP and each_s:
                for model in view.models:
                    self._per_s[model] = self._per_s.get(model, 0.0) + 1 / each_s
                    self._pending[model] = self._pending.get(model, 0) + view.prefill_tokens
        self.triage = triage(due, self.alone_s, self._ahead_s, now_s)

    @property
    def order(self) -> list[Work]:
        """All due works, those that can be in time first."""
        return [*self.triage.hopeful, *self.triage.given_up]

    def alone_s(self, work: Work) -> float | None:
        """Prefill time on the idle pool; None: not known."""
        per_s = self._per_s.get(work.model)
        return None if per_s is None else work.prompt_tokens / per_s

    def hopeless(self, work: Work) -> bool:
        """Even alone on the idle pool, and without any spare, it would be late by now."""
        alone_s = self.alone_s(work)
        return alone_s is not None and work.deadline_s is not None and self._now_s + alone_s > work.deadline_s

    def first_token_in_s(self, work: Work) -> float | None:
        """From now, behind what is hopeful; None: not known."""
        alone_s = self.alone_s(work)
        free_s = self.triage.free_s.get(work.model)
        return None if alone_s is None or free_s is None else free_s + STRETCH * alone_s

    def _ahead_s(self, work: Work) -> float:
        return self._pending[work.model] / self._per_s[work.model]
