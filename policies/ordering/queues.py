"""Waiting works in the order in which they are offered a place.

Five turns, and the first that takes a work keeps it:

1. *overdue*  works without a TTFT objective that are about to reach max_age_s, the longest due first, while their class
              has less than OVERDUE_SHARE;
2. *share*    works of classes without a TTFT objective that have less than their min_share;
3. *deadline* works with a TTFT objective, by deadline (EDF), whatever their class or tenant;
4. *slack*    works without one whose whole answer is due, when a quarter of their time is left, the first due first;
5. *fair*     the rest: classes in the document's order, tenants by fair share, a tenant's works by rank, mates together
              (`gather`).

After each work that turn 3 places, turns 1 and 2 are looked at again, since what runs has changed.

Turns 1 and 2 keep bulk from starving under any urgent load. They are bounded, since a backlog of bulk is overdue as a
whole and would otherwise starve the urgent in its turn; and they order works, they never lift a guard.

The result depends on the works, not on the order in which they are handed in.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import eq, itemgetter

from policies.ordering.gather import gathered
from policies.ordering.tenants import TenantCounters, prompt_cost
from policies.schema import SLACK_FRACTION, Policy
from policies.vocabulary import Work

OVERDUE_SHARE = 0.5
"""Part of what runs that the overdue works of one class may take while urgent works wait."""


def urgent(waiting: Iterable[Work], policy: Policy, tenants: TenantCounters) -> list[Work]:
    """Turn 3: by deadline, then the tenant with less service, then rank and id."""
    objective = {name for name, one in policy.classes.items() if one.has_ttft_objective}
    due = [work for work in waiting if work.class_name in objective]
    due.sort(key=_deadline_s)
    at_s = [*map(_deadline_s, due)]
    if any(map(eq, at_s, at_s[1:])):  # seldom, and what decides then is dear

        def whole(work: Work) -> tuple[float, float, float, str]:
            return _deadline_s(work), tenants.tag(work.class_name, work.tenant), work.rank, work.id

        due.sort(key=whole)
    return due


def pressed(waiting: Iterable[Work], now_s: float) -> list[Work]:
    """Turn 4. Who is due no more has nothing to gain, and waits for its fair turn."""
    found = [
        (work.finish_by_s, work.rank, work.id, work)
        for work in waiting
        if work.finish_by_s is not None
        and 0 < work.finish_by_s - now_s <= SLACK_FRACTION * (work.finish_by_s - work.accepted_s)
    ]
    found.sort(key=itemgetter(0, 1, 2))
    return [row[3] for row in found]


def late_by_class(
    seen: Iterable[Work], depths: Mapping[tuple[str, str], int], policy: Policy, now_s: float
) -> Mapping[str, int]:
    """Works of each class with an objective that wait and are late.

    seen     the look-ahead; works in time come before others there, so what waits beyond it is taken to be late
    depths   all that wait, by class and tenant
    """
    found: Counter[str] = Counter()
    for (name, _), count in depths.items():
        if policy.class_policy(name).has_ttft_objective:
            found[name] += count
    found.subtract(one.class_name for one in seen if one.class_name in found and not policy.late(one, now_s))
    return +found


def backlogs(waiting: Iterable[Work], policy: Policy, tenants: TenantCounters, now_s: float) -> list[Backlog]:
    """Turns 1, 2 and 5: the works without an objective by class and model, most preferred class first."""
    objective = {name for name, one in policy.classes.items() if one.has_ttft_objective}
    found: dict[tuple[str, str], dict[str, list[Work]]] = {}
    lane: list[Work] = []
    key: tuple[str, str, str] | None = None
    for work in [
        one for one in waiting if one.class_name not in objective
    ]:  # works of one class and tenant come one after another: the lane is looked up at each change
        if key != (work.class_name, work.model, work.tenant):
            key = (work.class_name, work.model, work.tenant)
            lane = found.setdefault((work.class_name, work.model), {}).setdefault(work.tenant, [])
        lane.append(work)
    return [
        _backlog(key, found[key], policy, tenants, now_s)
        for key in sorted(found, key=lambda key: (policy.place_of(key[0]), key))
    ]


def entitled(class_name: str, share: float, *, in_flight: Mapping[str, float], granted: Mapping[str, float]) -> bool:
    """Turns 1 and 2: has the class less than `share`, the next work counted in?

    in_flight   by class, over the engines that have the model of the class's next work
    granted     grants of late by class
    Both must fall short: what is in flight alone would give a class the only seat of a small engine each time that it
    is free; grants alone would let a class catch up at once on the time in which it had nothing waiting.
    """
    return all(held.get(class_name, 0) < share * (sum(held.values()) + 1) for held in (in_flight, granted))


@dataclass(slots=True)
class Backlog:
    """Waiting works of one class without an objective, and of one model, as a round takes them.

    overdue     pressing works, the longest due first
    min_share   the class's
    """

    class_name: str
    model: str
    min_share: float
    overdue: deque[Work]
    _lanes: list[tuple[float, str, float, Iterator[Work]]]

    def take_fair(self, offer: Callable[[Work], bool]) -> bool:
        """Offer works, next always the tenant with the least service, until one is taken; False when none is left.

        A work that is not taken is not offered again: room only shrinks in a round.
        """
        while self._lanes:
            tag, tenant, weight, works = self._lanes[0]
            taken = next((work for work in works if offer(work)), None)
            if taken is not None:
                heapq.heapreplace(self._lanes, (tag + prompt_cost(taken) / weight, tenant, weight, works))
                return True
            heapq.heappop(self._lanes)
        return False


def _backlog(
    key: tuple[str, str],
    by_tenant: Mapping[str, list[Work]],
    policy: Policy,
    tenants: TenantCounters,
    now_s: float,
) -> Backlog:
    class_name, model = key
    ages = policy.class_policy(class_name).max_age_s is not None
    pressing = [work for works in by_tenant.values() for work in works if ages and policy.overdue(work, now_s)]
    pressing.sort(key=lambda work: (policy.due_s(work), work.rank, work.id))
    lanes = [
        (
            tenants.tag(class_name, tenant),
            tenant,
            policy.tenant(tenant).weight,
            iter(gathered(sorted(works, key=_by_rank))),
        )
        for tenant, works in by_tenant.items()
    ]
    heapq.heapify(lanes)
    return Backlog(class_name, model, policy.class_policy(class_name).min_share, deque(pressing), lanes)


def _deadline_s(work: Work) -> float:
    return math.inf if work.deadline_s is None else work.deadline_s


def _by_rank(work: Work) -> tuple[float, float, str]:
    return work.rank, work.accepted_s, work.id
