"""What a leader does for the pool's other processes: counts what they run, gives them credit, takes over their grants.

The ledger of a leader holds its own attempts, grants that a session has not reported yet, and for every other session
one sum per place: what it reported, plus the credit it has not spent, and never less than the share that it may keep
when it is cut off. So every process together stays inside the window, whichever of them the leader can hear.

A session that ended properly leaves at once. One that expired may be cut off and alive: its share stays reserved and
halves every 10 s, for a minute. A new leader first takes over what its predecessors granted and allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gateway.clock import Clock
from gateway.control.policy_store import PolicyStore
from gateway.control.presence import Presence
from gateway.control.roster import Roster
from gateway.dispatch.credit import NOTHING, RESERVED_S, share_left
from gateway.dispatch.ledger import Entry, Ledger
from gateway.queue.base import Credit, InFlight, Outstanding, Place, Queue, Session, SessionReport
from policies.credit import Allowance, allot, creditable
from policies.sizing import SizingPolicy

CREDIT_VALID_S = 2.0
TYPICAL_PROMPT_TOKENS = 512
_RATE_WEIGHT = 0.3


@dataclass(slots=True)
class _Other:
    """One session as the leader knows it. rates: works started per second on credit, by place."""

    report: SessionReport = field(default_factory=SessionReport)
    heard_s: float = 0.0
    rates: dict[Place, float] = field(default_factory=dict)
    credits: dict[Place, Credit] = field(default_factory=dict)


class Steward:
    """See the module header. Used by the dispatcher, and only while this process leads."""

    __slots__ = (
        "_clock",
        "_ledger",
        "_lost",
        "_others",
        "_presence",
        "_queue",
        "_roster",
        "_sizing",
        "_store",
        "_typical",
    )

    def __init__(
        self,
        *,
        queue: Queue,
        presence: Presence,
        store: PolicyStore,
        sizing: SizingPolicy,
        roster: Roster,
        ledger: Ledger,
        clock: Clock,
    ) -> None:
        self._queue = queue
        self._presence = presence
        self._store = store
        self._sizing = sizing
        self._roster = roster
        self._ledger = ledger
        self._clock = clock
        self._others: dict[Session, _Other] = {}
        self._lost: dict[Session, _Other] = {}
        self._typical: dict[str, float] = {}

    @property
    def alone(self) -> bool:
        """No other session has been heard of: there is nobody to count."""
        return not self._lost and all(session == self._presence.session for session in self._others)

    async def take_over(self) -> list[Outstanding]:
        """Begin an epoch: count what predecessors granted and allowed. Returns grants to this very process.

        Raises QueueUnavailable.
        """
        now_ms = self._presence.now_ms()
        standing = await self._queue.standing(now_ms=now_ms)
        self._ledger.only_here()
        self._others.clear()
        own = self._presence.session
        mine: list[Outstanding] = []
        for one in standing.outstanding:
            if one.claimed.owner == own:
                mine.append(one)
                continue
            ledger = self._ledger[one.grant.engine]
            if (one.work.id, one.grant.attempt) not in ledger.entries:
                ledger.add(one.work, one.grant.attempt, self._clock.pool_s())
                ledger.entries[one.work.id, one.grant.attempt].claimed = one.claimed
        for session, given in standing.credits.items():
            self._others[session] = _Other(heard_s=self._clock.pool_s(), credits=dict(given))
        await self.hear()
        return mine

    async def hear(self) -> list[Entry]:
        """Read all reports and bring the ledger up to them. Returns entries that are in a session's sums from now on.

        Raises QueueUnavailable.
        """
        reports = await self._queue.sessions(now_ms=self._presence.now_ms())
        now_s = self._clock.pool_s()
        taken: list[Entry] = []
        for session, report in reports.items():
            other = self._others.setdefault(session, _Other())
            self._learn_rates(other, report)
            other.report, other.heard_s = report, report.renewed_ms / 1000
            if session != self._presence.session:
                taken += self._ledger.taken_over(session, report.grants_seq)
            self._count(session, other, now_s)
        for session in [session for session in self._others if session not in reports]:
            self._gone(session)
        for session, lost in list(self._lost.items()):
            self._count(session, lost, now_s)
            if now_s - lost.heard_s > RESERVED_S:
                del self._lost[session]
        return taken

    def expired(self, sessions: Iterable[str]) -> None:
        """Sessions swept for not renewing: unlike one that ended, each may be alive and cut off."""
        names = set(sessions)
        for session, other in list(self._others.items()):
            if session.id in names and session != self._presence.session:
                self._lost[session] = other

    def spent(self, started: Mapping[Place, InFlight]) -> None:
        """This process started a work on its own credit: the sums hold one unspent work less. started: its totals."""
        own = self._others.get(self._presence.session)
        if own is not None:
            own.report = replace(own.report, started=dict(started))
            self._count(self._presence.session, own, self._clock.pool_s())

    async def give(self, waiting: Mapping[str, int], own_started: Mapping[Place, InFlight]) -> None:
        """Write the credit of all sessions where it has to change or would run out. Raises QueueUnavailable.

        waiting       works waiting, by class
        own_started   this process's totals, ahead of its report
        """
        now_s = self._clock.pool_s()
        own = self._others.get(self._presence.session)
        if own is not None:
            own.report = replace(own.report, started=dict(own_started))
        sessions = sorted(self._others, key=lambda session: (session.id, session.epoch))
        wanted = self._wanted(sessions, waiting, now_s)
        changed: dict[Session, dict[Place, Credit]] = {}
        for session in sessions:
            other = self._others[session]
            fresh = {
                place: credit
                for place in wanted[session].keys() | other.credits.keys()
                if (credit := _renewed(other, place, wanted[session].get(place, _NOTHING), now_s)) is not None
            }
            if fresh != other.credits:
                changed[session] = fresh
        if changed and await self._queue.give_credit(
            changed, epoch=self._presence.epoch, now_ms=self._presence.now_ms()
        ):
            for session, given in changed.items():
                self._others[session].credits = given
                self._count(session, self._others[session], now_s)

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _wanted(
        self, sessions: list[Session], waiting: Mapping[str, int], now_s: float
    ) -> dict[Session, dict[Place, Allowance]]:
        wanted: dict[Session, dict[Place, Allowance]] = {session: {} for session in sessions}
        views = self._roster.views(self._clock.now_s())
        for class_name in creditable(self._store.current, waiting):
            for view in views:
                place = (view.name, class_name)
                others = [self._others[session] for session in sessions]
                allowances = allot(
                    class_name,
                    view,
                    self._sizing,
                    [other.rates.get(place, 0.0) for other in others],
                    prompt_tokens=int(self._typical.get(class_name, TYPICAL_PROMPT_TOKENS)),
                    unspent=sum(_unspent(other, place, now_s).works for other in others),
                    now_s=now_s,
                )
                for session, allowance in zip(sessions, allowances, strict=True):
                    wanted[session][place] = allowance
        return wanted

    def _learn_rates(self, other: _Other, report: SessionReport) -> None:
        passed_s = report.renewed_ms / 1000 - other.heard_s
        if not 0 < passed_s < RESERVED_S:
            return
        for place, started in report.started.items():
            before = other.report.started.get(place, NOTHING)
            works = max(0, started.works - before.works)
            rate = works / passed_s
            other.rates[place] = other.rates.get(place, rate) * (1 - _RATE_WEIGHT) + rate * _RATE_WEIGHT
            if works:
                prompt_tokens = (started.prefill_tokens - before.prefill_tokens) / works
                typical = self._typical.get(place[1], prompt_tokens)
                self._typical[place[1]] = typical * (1 - _RATE_WEIGHT) + prompt_tokens * _RATE_WEIGHT

    def _count(self, session: Session, other: _Other, now_s: float) -> None:
        """Put into the ledger what a session is taken to have on each engine."""
        here = session == self._presence.session
        lost = session in self._lost
        sums: dict[str, dict[str, InFlight]] = {engine.name: {} for engine in self._roster}
        allowed: dict[str, dict[str, int]] = {engine.name: {} for engine in self._roster}
        for place in other.report.in_flight.keys() | other.credits.keys():
            engine, class_name = place
            if engine not in sums:
                continue
            runs = NOTHING if here or lost else other.report.in_flight.get(place, NOTHING)
            unspent = NOTHING if lost else _unspent(other, place, now_s)
            credit = other.credits.get(place)
            share = 0 if here or credit is None else share_left(credit.share, max(0.0, now_s - other.heard_s))
            works = max(runs.works + unspent.works, share)
            if works:
                sums[engine][class_name] = InFlight(
                    works, runs.kv_tokens + unspent.kv_tokens, runs.prefill_tokens + unspent.prefill_tokens
                )
                allowed[engine][class_name] = works - runs.works
        for engine, by_class in sums.items():
            self._ledger[engine].elsewhere(session, by_class, allowed[engine])

    def _gone(self, session: Session) -> None:
        """A session is in the store no more: its grants are settled; its sums stay only if it was lost."""
        del self._others[session]
        for engine in self._roster:
            ledger = self._ledger[engine.name]
            for (work_id, attempt), entry in list(ledger.entries.items()):
                if entry.claimed is not None and entry.claimed.owner == session:
                    ledger.remove(work_id, attempt)
            if session not in self._lost:
                ledger.elsewhere(session, {}, {})

    def __repr__(self) -> str:
        return f"<Steward sessions={len(self._others)} lost={len(self._lost)}>"


_NOTHING = Allowance(0, 0, 0)


def _unspent(other: _Other, place: Place, now_s: float) -> InFlight:
    credit = other.credits.get(place)
    if credit is None or credit.expires_ms / 1000 <= now_s:
        return NOTHING
    allowed, started = credit.allowed, other.report.started.get(place, NOTHING)
    return InFlight(
        max(0, allowed.works - started.works),
        max(0, allowed.kv_tokens - started.kv_tokens),
        max(0, allowed.prefill_tokens - started.prefill_tokens),
    )


def _renewed(other: _Other, place: Place, wanted: Allowance, now_s: float) -> Credit | None:
    """The credit to stand from now on. What was given cannot be taken back before it expires, only not be renewed."""
    before = other.credits.get(place)
    valid = before is not None and before.expires_ms / 1000 > now_s
    unspent = _unspent(other, place, now_s)
    if valid and before is not None:
        if wanted.works < unspent.works:
            return before
        half_gone = before.expires_ms / 1000 - now_s < CREDIT_VALID_S / 2
        if wanted.works == unspent.works and not half_gone:
            return before
    if not wanted.works:
        return None
    started = other.report.started.get(place, NOTHING)
    allowed = InFlight(
        started.works + wanted.works,
        started.kv_tokens + max(wanted.kv_tokens, unspent.kv_tokens),
        started.prefill_tokens + max(wanted.prefill_tokens, unspent.prefill_tokens),
    )
    share = other.report.in_flight.get(place, NOTHING).works + wanted.works
    return Credit(allowed, share, int((now_s + CREDIT_VALID_S) * 1000))
