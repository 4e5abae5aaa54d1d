"""Which works are refused because they cannot be in time: for classes that say `on_infeasible: shed` or `degrade`.

A refusal at once is worth more to a client than an answer that comes too late, and gives the engines' time to somebody
who can still be in time. But a prediction may be wrong, and a rule that always gives up the longest would shut out whoever
has long prompts. So a work is refused

* when it could not be in time even alone on the idle pool any more: it has waited too long;
* when it came last, and those before it leave no time for it;
* when it was given up for its length, at most SHARE_BY_SIZE of its tenant's requests of the last minute. Beyond that it
  waits behind the others, and may be lucky;
* when it is so long that more than one of those to come would be late for it (`policies.ordering.crowd`); it counts as given up
  for its length. Not where the class says `degrade`: a shorter answer has the same prompt.

In the second and the third it has to be late also if the engines were faster than predicted by far (CERTAIN). Order is decided with
margins on the safe side, since they cost nothing there; a refusal gives up a work that might have been in time.

Never refused: a work that an engine had already (it was promised), and one whose prompt is too long to be in time on the
idle pool: no retry would help it.

The state, how many requests each tenant had of late, has one writer: the pool's dispatcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from policies.ordering.crowd import Crowd
from policies.ordering.feasibility import SPARE, STRETCH, Outlook, latest_s
from policies.schema import Policy
from policies.vocabulary import Action, Decision, Guard, GuardReading, Work

SHARE_BY_SIZE = 0.05
CERTAIN = 0.5
"""Part of the predicted time in which a first token would have to come, for a work to be worth keeping."""
FADES_IN_S = 60.0
TENANTS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why a work is refused. first_token_in_s: as predicted, from now; feasible_in_s: when one like it could be in time;
    by_size: for its length, while others that came later stay; most_s: it could be in time, and would keep the engines for
    longer than this; None: it could not."""

    work: Work
    first_token_in_s: float
    feasible_in_s: float
    by_size: bool
    most_s: float | None = None

    def decision(self, policy: Policy, now_s: float) -> Decision:
        """The record of the refusal: the time to its first token against what its objective leaves, from acceptance; or the time
        for which it would keep the engines against what others can bear."""
        work, reason = self.work, "infeasible"
        value, threshold = now_s - work.accepted_s + self.first_token_in_s, latest_s(work) - work.accepted_s
        if self.most_s is not None:
            value, threshold, reason = self.first_token_in_s, self.most_s, "crowding"
        reading = GuardReading(Guard.TTFT, value, threshold, passed=False)
        return Decision(
            Action.SHED, now_s, policy.version, work.class_name, "", work.id, Guard.TTFT, (reading,), reason
        )


class Shedding:
    """See the module header."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float, float]] = {}

    def granted(self, tenant: str, now_s: float) -> None:
        """A request of the tenant got its place."""
        self._count(tenant, now_s, by_size=False)

    def refuse(
        self, outlook: Outlook, crowd: Crowd, policy: Policy, now_s: float, tell: Callable[[Infeasible], bool]
    ) -> list[Infeasible]:
        """Refuse who is to be refused now; those that heard of it. tell: False for a work that cannot be told, which then counts
        for nothing."""
        found: list[Infeasible] = []
        for one in self._refusals(outlook, crowd, policy, now_s):
            if tell(one):
                self._count(one.work.tenant, now_s, by_size=one.by_size)
                found.append(one)
        return found

    def _refusals(self, outlook: Outlook, crowd: Crowd, policy: Policy, now_s: float) -> Iterator[Infeasible]:
        """Asked for one after the other: whether one more may go for its length depends on who has gone."""
        for work in outlook.triage.hopeful:
            one = crowding(work, outlook, crowd, policy, now_s) if crowd.long(work) else None
            if one is not None and self._may(work.tenant, now_s):
                yield one
        for work in outlook.triage.given_up:
            if policy.class_policy(work.class_name).on_infeasible == "late" or work.attempt:
                continue
            alone_s, first_s = outlook.alone_s(work), outlook.first_token_in_s(work)
            objective_s = policy.objective_s(work)
            if alone_s is None or first_s is None or objective_s is None or work.deadline_s is None:
                continue
            allowed_s = (1 - SPARE) * objective_s
            if STRETCH * alone_s > allowed_s:
                continue
            by_size = False
            if not outlook.hopeless(work):
                if now_s + CERTAIN * first_s / STRETCH <= work.deadline_s:
                    continue
                by_size = work.id in outlook.triage.by_size
                if by_size and not self._may(work.tenant, now_s):
                    continue
            yield Infeasible(work, first_s, max(0.0, first_s - allowed_s), by_size)

    def _may(self, tenant: str, now_s: float) -> bool:
        """Whether one more of the tenant's requests may be refused for its length."""
        seen, by_size, at_s = self._seen.get(tenant, (0.0, 0.0, now_s))
        fade = math.exp(min(0.0, at_s - now_s) / FADES_IN_S)
        return by_size * fade + 1 <= max(1.0, SHARE_BY_SIZE * seen * fade)

    def _count(self, tenant: str, now_s: float, *, by_size: bool) -> None:
        seen, shed, at_s = self._seen.pop(tenant, (0.0, 0.0, now_s))
        fade = math.exp(min(0.0, at_s - now_s) / FADES_IN_S)
        self._seen[tenant] = (seen * fade + 1, shed * fade + by_size, now_s)
        if len(self._seen) > TENANTS_KEPT:  # the one not heard of for the longest
            self._seen.pop(next(iter(self._seen)))

    def __repr__(self) -> str:
        return f"<Shedding tenants={len(self._seen)}>"


def crowding(work: Work, outlook: Outlook, crowd: Crowd, policy: Policy, now_s: float) -> Infeasible | None:
    """Why a work that could be in time is refused for those who are to come; None: it is not."""
    takes_s, each_s = outlook.alone_s(work), outlook.seconds_per_token(work.model)
    name = work.class_name
    if takes_s is None or each_s is None or work.attempt or name in policy.relative:
        return None
    if policy.class_policy(name).on_infeasible != "shed":
        return None
    most_s = crowd.most_s(work.model, each_s, now_s)
    if takes_s <= most_s:
        return None
    return Infeasible(
        work, takes_s, crowd.allowed_in_s(work.model, takes_s, each_s, now_s), by_size=True, most_s=most_s
    )
