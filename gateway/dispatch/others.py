"""One session as the pool's leader knows it: what it last reported, and the credit that it may be using."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.dispatch.credit import NOTHING
from gateway.queue.base import Credit, InFlight, Place, SessionReport
from policies.credit import Allowance
from policies.vocabulary import EngineView

CREDIT_VALID_S = 2.0
SILENT_S = 1.5
"""Three beats: a process that reports no more is dead, stopped or cut off."""


@dataclass(slots=True)
class Other:
    """One session as the leader knows it.

    rates     works started per second on credit, by place
    credits   as the leader last wrote them, or may have
    told      the store has confirmed them
    whole_s   until then a lost session is taken to have all it had: it may take up a grant for so long
    """

    report: SessionReport = field(default_factory=SessionReport)
    rates: dict[Place, float] = field(default_factory=dict)
    credits: dict[Place, Credit] = field(default_factory=dict)
    told: bool = True
    whole_s: float = 0.0

    def silent_s(self, now_s: float) -> float:
        """How long ago it reported."""
        return max(0.0, now_s - self.report.renewed_ms / 1000)

    def can_use_credit(self, now_s: float) -> bool:
        """Whether credit given now would be of use to anybody."""
        return self.report.serves and self.silent_s(now_s) <= SILENT_S

    def in_use(self, credit: Credit | None) -> bool:
        """Whether a credit may be used, or was used and not reported yet."""
        return credit is not None and self.report.renewed_ms < credit.expires_ms

    def unspent(self, place: Place) -> InFlight:
        """What it may have started on its credit since it reported."""
        credit = self.credits.get(place)
        if credit is None or not self.in_use(credit):
            return NOTHING
        allowed, started = credit.allowed, self.report.started.get(place, NOTHING)
        return InFlight(
            max(0, allowed.works - started.works),
            max(0, allowed.kv_tokens - started.kv_tokens),
            max(0, allowed.prefill_tokens - started.prefill_tokens),
        )

    def works(self, place: Place) -> int:
        """What a session runs on a place, or may at any moment."""
        return self.report.in_flight.get(place, NOTHING).works + self.unspent(place).works

    def homes(self, class_name: str, engines: list[EngineView]) -> list[int]:
        """The engines among these on which a session has a floor, one that is being taken back included."""
        given = [self.credits.get((view.name, class_name)) for view in engines]
        return [at for at, credit in enumerate(given) if credit is not None and credit.share]

    def renewed(self, place: Place, wanted: Allowance, floor: int, now_s: float) -> Credit | None:
        """The credit to stand from now on. What was given cannot be taken back before it expires, only not be renewed."""
        before = self.credits.get(place)
        unspent = self.unspent(place)
        if before is not None and self.in_use(before):
            if wanted.works < unspent.works or floor < before.share:
                return before
            half_gone = before.expires_ms / 1000 - now_s < CREDIT_VALID_S / 2
            if (wanted.works, floor) == (unspent.works, before.share) and not half_gone:
                return before
        if not wanted.works and not floor:
            return None
        started = self.report.started.get(place, NOTHING)
        allowed = InFlight(
            started.works + wanted.works,
            started.kv_tokens + max(wanted.kv_tokens, unspent.kv_tokens),
            started.prefill_tokens + max(wanted.prefill_tokens, unspent.prefill_tokens),
        )
        return Credit(allowed, floor, int((now_s + CREDIT_VALID_S) * 1000))
