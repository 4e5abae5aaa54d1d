"""When not all can be in time: who still can, and who goes after them.

Earliest deadline first is the best order as long as everybody can be in time; beyond that it makes everybody late, since it
always serves whoever is about to miss. Moore and Hodgson: go through the works by deadline, and whenever the next one would
be late, give up the longest so far. That keeps the most works in time. Those given up go last; they are late, not refused.

A pool is taken for one server that prefills as fast as its engines together. Predictions are stretched by STRETCH, and
SPARE of each objective is left over, since a work that is just in time by prediction is late every other time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from policies.vocabulary import Work

STRETCH = 1.2
SPARE = 0.1


def hopeful_first(
    works: Sequence[Work], seconds: Callable[[Work], float | None], ahead_s: Callable[[Work], float], now_s: float
) -> list[Work]:
    """The works that can be in time, in their order, then the others, in theirs. O(n log n).

    works     by deadline
    seconds   a work's prefill time, its pool to itself; None: unknown, and it is taken to be in time
    ahead_s   prefill time of what its pool has been given already
    """
    given_up: set[str] = set()
    queues: dict[str, tuple[list[float], list[tuple[float, str]]]] = {}
    for work in works:
        takes_s = seconds(work)
        if work.deadline_s is None or takes_s is None:
            continue
        if work.model not in queues:
            queues[work.model] = [STRETCH * ahead_s(work)], []
        (free,), longest = queues[work.model]
        heapq.heappush(longest, (-STRETCH * takes_s, work.id))
        free += STRETCH * takes_s
        latest_s = work.deadline_s - SPARE * (work.deadline_s - work.accepted_s)
        if now_s + free > latest_s:
            gained, worst = heapq.heappop(longest)
            free += gained
            given_up.add(worst)
        queues[work.model][0][0] = free
    if not given_up:
        return list(works)
    return [one for one in works if one.id not in given_up] + [one for one in works if one.id in given_up]
