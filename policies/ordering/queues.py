"""Waiting works in the order in which they are offered a place.

Three turns, and the first that takes a work keeps it:

1. *entitled*  classes without a TTFT objective that got less than their min_share of what is in flight and of what
               was granted of late;
2. *urgent*    works with a TTFT objective by deadline (EDF, whatever the class or tenant), and among them the works
               without one that have waited past max_age_s, by the moment at which they did. An overdue work therefore
               goes ahead of an urgent one that still has slack, and behind one that was due before it;
3. *patient*   the rest, classes in the document's order, tenants by fair share, a tenant's works by rank.

Turns 1 and 2 keep bulk from starving under any interactive load: works that arrive later are due later, so an overdue
work is overtaken by finitely many. They order works; they never lift a guard.

The result depends on the works, not on the order in which they are handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from policies.ordering.tenants import TenantCounters, prompt_cost
from policies.schema import Policy
from policies.vocabulary import Work


def urgent(waiting: Iterable[Work], policy: Policy, tenants: TenantCounters, now_s: float) -> list[Work]:
    """Turn 2: by due time, then the tenant with less service, then rank and id."""
    tags: dict[tuple[str, str], float] = {}
    due = []
    for work in waiting:
        due_s = policy.due_s(work)
        if due_s > now_s and not policy.class_policy(work.class_name).has_ttft_objective:
            continue
        key = (work.class_name, work.tenant)
        if key not in tags:
            tags[key] = tenants.tag(*key)
        due.append((due_s, tags[key], work.rank, work.id, work))
    due.sort(key=itemgetter(0, 1, 2, 3))
    return [row[4] for row in due]


def patient_lanes(waiting: Iterable[Work], policy: Policy, tenants: TenantCounters) -> list[list[Lane]]:
    """Turns 1 and 3: per class without a TTFT objective, most preferred first, one lane per tenant."""
    found: dict[str, dict[str, list[Work]]] = {}
    for work in waiting:
        if not policy.class_policy(work.class_name).has_ttft_objective:
            found.setdefault(work.class_name, {}).setdefault(work.tenant, []).append(work)
    return [
        [_lane(tenant, works, policy, tenants) for tenant, works in sorted(found[class_name].items())]
        for class_name in sorted(found, key=lambda name: (_turn(policy, name), name))
    ]


def entitled(class_name: str, policy: Policy, *, in_flight: Mapping[str, int], granted: Mapping[str, float]) -> bool:
    """Turn 1: is the class owed a place, the next work counted in?

    in_flight   by class, over the engines that could take the class's next work
    granted     grants of late by class
    Both must fall short of min_share: what is in flight alone would give a class the only seat of a small engine each
    time that it is free; grants alone would let a class catch up at once on the time in which it had nothing waiting.
    """
    share = policy.class_policy(class_name).min_share
    return all(held.get(class_name, 0) < share * (sum(held.values()) + 1) for held in (in_flight, granted))


@dataclass(slots=True)
class Lane:
    """One tenant's waiting works of one class, and its tag as this round moves it on."""

    tenant: str
    weight: float
    tag: float
    works: Sequence[Work]

    def charge(self, work: Work) -> None:
        """Count a placement of this round."""
        self.tag += prompt_cost(work) / self.weight


def _lane(tenant: str, works: list[Work], policy: Policy, tenants: TenantCounters) -> Lane:
    works.sort(key=_by_rank)
    return Lane(tenant, policy.tenant(tenant).weight, tenants.tag(works[0].class_name, tenant), works)


def _by_rank(work: Work) -> tuple[float, float, str]:
    return work.rank, work.accepted_s, work.id


def _turn(policy: Policy, class_name: str) -> int:
    """Place in the policy's precedence; a class that it no longer names comes last."""
    order = policy.precedence
    return order.index(class_name) if class_name in order else len(order)
