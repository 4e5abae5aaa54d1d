"""What a leader does for the pool's other processes: counts what they run, gives them credit, takes over their grants.

The ledger of a leader holds its own attempts, grants that a session has not reported yet, and for every other session
one sum per place: what it reported, plus the credit it may have spent since, and never less than the share that it may
keep when it is cut off. So every process together stays inside the window, whichever of them the leader can hear.

Credit counts from the moment it is sent, whether or not the store's answer comes, and until its holder reports after its
end: what was started last before it ran out is in no earlier report.

What a session is counted with is what it may keep when it is cut off; a floor of one work comes to it, so that also one that is
idle in a busy moment could go on.

A session that is no longer in the store may be cut off and alive, however it went. What it had stays reserved; once its
validity is over it halves every 10 s, for a minute, or ends when the same process reports under a new session. Where the
engines tell what they run, what they show of silent sessions counts instead (`sightings`). A new
leader first takes over what its predecessors granted and allowed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from gateway.clock import Clock
from gateway.control.policy_store import PolicyStore
from gateway.control.presence import SESSION_VALID_S, Presence
from gateway.control.roster import Roster
from gateway.dispatch.credit import NOTHING, RESERVED_S, share_left
from gateway.dispatch.elsewhere import Elsewhere, Key, News
from gateway.dispatch.ledger import Entry, Ledger
from gateway.dispatch.others import SILENT_S, Other
from gateway.dispatch.sightings import Sightings
from gateway.queue.base import Credit, InFlight, Place, Queue, QueueUnavailable, Session, SessionReport, Vitals
from policies.credit import FLOORS, Allowance, allot, creditable, homes, over_window, room, typical
from policies.sizing import Running, SizingPolicy
from policies.vocabulary import EngineState, EngineView, Work

UNREPORTED_S = 1.0
"""An owner reads its grants within a quarter of a second and reports at once; past this the store is asked."""
TYPICAL_PROMPT_TOKENS = 512
_RATE_WEIGHT = 0.3


@dataclass(slots=True)
class Hearing:
    """What a leader has heard of the others.

    handed_over   entries that are in a session's sums from now on, and of whose end nobody will tell
    news          what happened to single attempts, in the order in which it happened
    """

    handed_over: list[Entry] = field(default_factory=list)
    news: list[News] = field(default_factory=list)


class Steward:
    """See the module header. Used by the dispatcher while this process leads; `finished` and `spent` are told always."""

    __slots__ = (
        "_clock",
        "_elsewhere",
        "_heard_seq",
        "_ledger",
        "_lost",
        "_others",
        "_over",
        "_presence",
        "_queue",
        "_roster",
        "_sightings",
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
        self._others: dict[Session, Other] = {}
        self._lost: dict[Session, Other] = {}
        self._over: set[str] = set()
        self._typical: dict[str, float] = {}
        self._sightings = Sightings()
        self._elsewhere = Elsewhere(self._sightings.ended)
        self._heard_seq = 0

    @property
    def missed(self) -> int:
        """Events of others that were dropped before this process could read them."""
        return self._elsewhere.missed

    def running(self, engine: str) -> list[Running]:
        """Attempts of other processes on an engine, as far as they are known one by one."""
        return self._elsewhere.running(engine, self._clock.pool_s())

    @property
    def alone(self) -> bool:
        """No other session has been heard of: there is nobody to count."""
        return not self._lost and all(session == self._presence.session for session in self._others)

    def runs(self, work_id: str, attempt: int) -> bool:
        """Another process has told that it runs this attempt."""
        return (work_id, attempt) in self._elsewhere

    def silent(self, session: Session | None) -> bool:
        """A process that has told nothing for a while: dead, stopped or cut off, it reads no grant."""
        if session is None or session.id == self._presence.session.id:
            return False
        other = self._others.get(session) or self._lost.get(session)
        return other is not None and other.silent_s(self._clock.pool_s()) > SILENT_S

    def vitals(self, engine: str) -> dict[object, Vitals]:
        """What the calls of other processes say of an engine, by session, as they last reported."""
        return {
            session: other.report.vitals[engine]
            for session, other in self._others.items()
            if session != self._presence.session and engine in other.report.vitals
        }

    async def take_over(self) -> list[Work]:
        """Begin an epoch: count what predecessors granted and allowed; `hear` then replaces it by what is reported.

        Returns the works of other processes that were granted. Grants to this very process are left out: what it took up
        runs here, and what it did not it refuses from now on. Raises QueueUnavailable.
        """
        now_s = self._clock.pool_s()
        self._over.clear()
        # Credit that has run out since may have been used, and the share that came with it may still be.
        since_ms = self._presence.now_ms() - int(RESERVED_S * 1000)
        standing = await self._queue.standing(now_ms=since_ms)
        reports = self._not_over((await self._queue.hear(now_ms=since_ms)).reports)
        self._others.clear()
        self._heard_seq = 0
        works: list[Work] = []
        for one in standing.outstanding:
            if one.claimed.owner.id in self._over:
                continue
            ledger, key = self._ledger[one.grant.engine], (one.work.id, one.grant.attempt)
            if one.claimed.owner != self._presence.session and key not in ledger.entries:
                ledger.add(one.work, one.grant.attempt, now_s)
                ledger.entries[key].claimed = one.claimed
                works.append(one.work)
        for session, report in reports.items():
            self._lost.pop(session, None)  # in an earlier reign of ours: it is back, and counts by what it reports
            self._others[session] = Other(report, credits=dict(standing.credits.get(session, {})))
        return works

    async def hear(self) -> Hearing:
        """Read all reports and events, and bring the ledger up to them. Raises QueueUnavailable."""
        self._over.clear()
        heard = await self._queue.hear(now_ms=self._presence.now_ms(), after_seq=self._heard_seq)
        reports = self._not_over(heard.reports)
        self._heard_seq = heard.seq
        now_s = self._clock.pool_s()
        hearing = Hearing()
        for session, events in heard.events.items():
            if session != self._presence.session:
                hearing.news += self._elsewhere.hear(session, events, self._granted_here)
        taken = hearing.handed_over
        for session, report in reports.items():
            other = self._others.get(session)
            if other is None:
                other = self._others[session] = self._lost.pop(session, Other())
            self._learn_rates(other, report)
            other.report = report
            if session != self._presence.session:
                taken += [entry for _, entry in self._ledger.taken_over(session, report.grants_seq)]
            self._count(session, other, now_s)
        self._look_at_engines(now_s, reports)
        # A claim may have been made for a session that had run out and was not swept yet.
        for session in [one for one in {**self._others, **self._ledger.claimed()} if one not in reports]:
            taken += self._lose(session, now_s)
        hearing.news += self._elsewhere.forget_but(reports)
        for session, lost in list(self._lost.items()):
            replaced = any(one.id == session.id and one.epoch > session.epoch for one in reports)
            if replaced or lost.silent_s(now_s) > RESERVED_S:
                del self._lost[session]
                self._uncount(session)
            else:
                self._count(session, lost, now_s)
        taken += await self._drop_settled(now_s)
        hearing.news.sort(key=_when)
        return hearing

    def _not_over(self, reports: Mapping[Session, SessionReport]) -> dict[Session, SessionReport]:
        """One that ended while the store was asked may be in its answer still: counted again, it would be kept for as lost."""
        return {session: report for session, report in reports.items() if session.id not in self._over}

    def finished(self, engine: str, entry: Entry) -> None:
        """An attempt of this process has ended, or will not begin."""
        if entry.progress is not None:
            self._sightings.ended(engine, entry.taken_s, self._clock.pool_s())
        self._count_own(engine)  # its floor may not have been above what ran

    def _look_at_engines(self, now_s: float, reports: Mapping[Session, SessionReport]) -> None:
        """Compare the newest polls with what runs, as long as somebody is silent."""
        self._sightings.forget_old(now_s)
        if all(one.silent_s(now_s) <= SILENT_S for one in (*self._others.values(), *self._lost.values())):
            return
        to_pool_s = now_s - self._clock.now_s()
        for engine in self._roster:
            if engine.asked_s == -math.inf:
                continue  # what a predecessor published: nobody knows when it asked
            asked_s, taken_s = engine.asked_s + to_pool_s, engine.sample.taken_s + to_pool_s
            heard = {session for session, report in reports.items() if report.renewed_ms / 1000 > taken_s}

            def running(by_s: float, name: str = engine.name, heard: Container[Session] = heard) -> int:
                return self._ledger[name].sent_by(by_s) + self._elsewhere.count(name, by_s, heard)

            self._sightings.look(engine.name, engine.sample, asked_s=asked_s, taken_s=taken_s, running=running)

    def _granted_here(self, engine: str, key: Key) -> bool:
        """Whether an attempt that began elsewhere is one that we granted: it is in its session's sums from now on."""
        entry = self._ledger[engine].entries.get(key)
        return entry is not None and not entry.taken and self._ledger[engine].remove(*key)

    def ended(self, names: Iterable[str]) -> Hearing:
        """Sessions that are known to be over, not just silent: what they held is free at once."""
        over = set(names)
        self._over |= over
        hearing = Hearing()
        held = hearing.handed_over
        for session in [one for one in {**self._others, **self._lost} if one.id in over]:
            if session != self._presence.session:
                self._others.pop(session, None)
                self._lost.pop(session, None)
                held += [entry for _, entry in self._ledger.taken_over(session, math.inf)]
                hearing.news += self._elsewhere.forget(session)
                self._uncount(session)
        return hearing

    def step_down(self) -> Hearing:
        """This process leads no more: keep count of nothing but what runs here."""
        self._sightings.forget_all()
        self._others.clear()
        return Hearing(self._ledger.only_here(), self._elsewhere.forget_all())

    async def _drop_settled(self, now_s: float) -> list[Entry]:
        """A work that was settled before its owner read the grant is in no report: the store does not have it any more."""
        unreported = [
            (ledger, key, entry)
            for ledger, key, entry in self._ledger.claimed_before(now_s - UNREPORTED_S)
            if entry.claimed is not None and self._reported_since(entry.claimed.owner, entry.granted_s + UNREPORTED_S)
        ]
        if not unreported:
            return []
        try:
            standing = await self._queue.standing(now_ms=self._presence.now_ms())
        except QueueUnavailable:
            return []
        there = {(one.work.id, one.grant.attempt) for one in standing.outstanding}
        gone = [(ledger, key, entry) for ledger, key, entry in unreported if key not in there]
        for ledger, (work_id, attempt), _ in gone:
            ledger.remove(work_id, attempt)
        return [entry for _, _, entry in gone]

    def _reported_since(self, session: Session, pool_s: float) -> bool:
        other = self._others.get(session)
        return other is not None and other.report.renewed_ms / 1000 > pool_s

    def spent(self, engine: str, started: Mapping[Place, InFlight]) -> None:
        """This process started a work on its own credit: the sums hold one unspent work less. started: its totals."""
        own = self._others.get(self._presence.session)
        if own is not None:
            own.report = replace(own.report, started=dict(started))
        self._count_own(engine)

    async def give(self, waiting: Mapping[str, int], own_started: Mapping[Place, InFlight]) -> None:
        """Write the credit of all sessions where it has to change or would run out. Raises QueueUnavailable.

        waiting       works waiting, by class
        own_started   this process's totals, ahead of its report
        """
        now_s = self._clock.pool_s()
        own = self._others.get(self._presence.session)
        if own is not None:
            # Its report is older than the ledger: where a work of its own has ended since, it runs nothing.
            own.report = replace(own.report, in_flight=self._ledger.running_here(), started=dict(own_started))
        sessions = sorted(self._others, key=lambda session: (session.id, session.epoch))
        serving = [session for session in sessions if self._others[session].can_use_credit(now_s)]
        views = self._roster.views(self._clock.now_s())
        wanted = self._wanted(serving, views, waiting, now_s)
        floors = self._floors(serving, views, now_s)
        changed: dict[Session, dict[Place, Credit]] = {}
        for session in sessions:
            other = self._others[session]
            fresh = {
                place: credit
                for place in wanted[session].keys() | other.credits.keys() | floors[session]
                if (
                    credit := other.renewed(
                        place, wanted[session].get(place, _NOTHING), int(place in floors[session]), now_s
                    )
                )
                is not None
            }
            if fresh != other.credits or not other.told:
                changed[session] = fresh
        written = [self._others[session] for session in changed]  # one may end while the store is asked
        for (session, given), other in zip(changed.items(), written, strict=True):
            other.credits, other.told = given, False
            self._count(session, other, now_s)
        if changed and await self._queue.give_credit(
            changed, epoch=self._presence.epoch, now_ms=self._presence.now_ms()
        ):
            for other in written:
                other.told = True

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _wanted(
        self, sessions: list[Session], views: list[EngineView], waiting: Mapping[str, int], now_s: float
    ) -> defaultdict[Session, dict[Place, Allowance]]:
        """What each may start ahead. Counts it into the views."""
        wanted: defaultdict[Session, dict[Place, Allowance]] = defaultdict(dict)
        others = [self._others[session] for session in sessions]
        # While something waits, room is somebody's: then nobody holds more of it than it is about to use.
        spare = 0 if any(waiting.values()) else 1
        for class_name in creditable(self._store.current, waiting):
            prompt_tokens = self._typical_prompt(class_name)
            for index, view in enumerate(views):
                place = (view.name, class_name)
                unspent = [other.unspent(place).works for other in others]
                allowances = allot(
                    class_name,
                    view,
                    self._sizing,
                    [other.rates.get(place, 0.0) for other in others],
                    prompt_tokens=prompt_tokens,
                    unspent=unspent,
                    now_s=now_s,
                    spare=spare,
                )
                for session, allowance in zip(sessions, allowances, strict=True):
                    wanted[session][place] = allowance
                more = sum(max(0, one.works - held) for one, held in zip(allowances, unspent, strict=True))
                views[index] = view.with_more(typical(class_name, prompt_tokens, now_s), more)
        return wanted

    def _floors(
        self, sessions: list[Session], views: list[EngineView], now_s: float
    ) -> defaultdict[Session, set[Place]]:
        """Where each may keep one work if it is cut off, whatever it runs: for each class one of the engines of a kind."""
        floors: defaultdict[Session, set[Place]] = defaultdict(set)
        kinds: dict[frozenset[str], list[EngineView]] = {}
        for view in views:
            if view.state is EngineState.UP:
                kinds.setdefault(view.models, []).append(view)
        policy = self._store.current
        for class_name in [name for name in policy.precedence if policy.class_policy(name).has_ttft_objective]:
            one = typical(class_name, self._typical_prompt(class_name), now_s)
            for all_of_a_kind in kinds.values():
                # On a canary a process that is cut off could start nothing but the few works that are drawn for it.
                engines = [view for view in all_of_a_kind if view.canary >= 1] or all_of_a_kind
                others = [self._others[session] for session in sessions]
                spare = [room(one, view, self._sizing, now_s, most=2 * len(sessions)) for view in engines]
                holds = [
                    0
                    if over_window(one, view, self._sizing, now_s)
                    else int(FLOORS * (view.in_flight.get(class_name, 0) + more))
                    for view, more in zip(engines, spare, strict=True)
                ]
                found = homes(
                    [other.homes(class_name, engines) for other in others],
                    [[other.works((view.name, class_name)) for view in engines] for other in others],
                    [sum(other.rates.get((view.name, class_name), 0.0) for view in engines) for other in others],
                    room=spare,
                    most=holds,
                )
                for session, home in zip(sessions, found, strict=True):
                    if home is not None:
                        floors[session].add((engines[home].name, class_name))
        return floors

    def _typical_prompt(self, class_name: str) -> int:
        return int(self._typical.get(class_name, TYPICAL_PROMPT_TOKENS))

    def _learn_rates(self, other: Other, report: SessionReport) -> None:
        passed_s = (report.renewed_ms - other.report.renewed_ms) / 1000
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

    def _count(self, session: Session, other: Other, now_s: float, only: str | None = None) -> None:
        """Put into the ledger what a session is taken to have on each engine, or on this one only."""
        names = [engine.name for engine in self._roster if only in {None, engine.name}]
        sums: dict[str, dict[str, InFlight]] = {name: {} for name in names}
        allowed: dict[str, dict[str, InFlight]] = {name: {} for name in names}
        for place in other.report.in_flight.keys() | other.credits.keys() | other.report.floors.keys():
            engine, class_name = place
            if engine not in sums:
                continue
            here = session == self._presence.session
            runs = NOTHING if here else other.report.in_flight.get(place, NOTHING)
            most = self._most(session, other, place, runs, now_s)
            if most.works:
                sums[engine][class_name] = most
                allowed[engine][class_name] = most if session in self._lost else _beyond(most, runs)
        for engine, by_class in sums.items():
            self._ledger[engine].elsewhere(session, by_class, allowed[engine], lost=session in self._lost)

    def _count_own(self, engine: str) -> None:
        """What this process may start on an engine beside what runs here has changed: with each work that begins or ends, so
        that the other engines are left for the next tick."""
        own = self._others.get(self._presence.session)
        if own is not None:
            self._count(self._presence.session, own, self._clock.pool_s(), engine)

    def _most(self, session: Session, other: Other, place: Place, runs: InFlight, now_s: float) -> InFlight:
        """The most that a session can have on a place, now or at any moment before it is heard of again."""
        engine, class_name = place
        here, silent_s = session == self._presence.session, other.silent_s(now_s)
        unspent, credit = other.unspent(place), other.credits.get(place)
        could, share = runs.works + unspent.works, 0 if credit is None else credit.share
        share = max(share, other.report.floors.get(place, 0))  # one that was taken back, and it has not heard so yet
        if here:
            share -= self._ledger[engine].entries_of(class_name)
        seen = None if here or silent_s <= SILENT_S else self._seen(other, place)
        if seen is not None:
            # It starts nothing any more, but on its share.
            left = share_left(max(could, share), silent_s) if self._has_objective(class_name) else 0
            works = max(min(could, seen), left)
        elif session in self._lost and silent_s > SESSION_VALID_S and now_s > other.whole_s:
            works = share_left(max(could, share), silent_s)
        else:
            works = max(could, share_left(share, silent_s), 0)
        part = min(1.0, works / could) if could else 0.0
        return InFlight(
            works,
            int(part * (runs.kv_tokens + unspent.kv_tokens)),
            int(part * (runs.prefill_tokens + unspent.prefill_tokens)),
        )

    def _seen(self, other: Other, place: Place) -> int | None:
        """What the engine shows beyond the works of all others, since a silent session could start nothing there any more
        but on its share; None when that cannot be told."""
        credit = other.credits.get(place)
        since_s = other.report.renewed_ms / 1000 + SILENT_S
        if credit is not None and other.in_use(credit):
            since_s = max(since_s, credit.expires_ms / 1000)
        return self._sightings.at_most(place[0], max(since_s, other.whole_s))

    def _has_objective(self, class_name: str) -> bool:
        policy = self._store.current
        return class_name in policy.classes and policy.class_policy(class_name).has_ttft_objective

    def _uncount(self, session: Session) -> None:
        for engine in self._roster:
            self._ledger[engine.name].elsewhere(session, {}, {})

    def _lose(self, session: Session, now_s: float) -> list[Entry]:
        """A session is in the store no more. What was granted to it and not reported yet it may still take up."""
        other = self._others.pop(session, None) or self._lost.get(session) or Other()
        granted = self._ledger.taken_over(session, math.inf)
        if session.id == self._presence.session.id:
            self._uncount(session)
            return [entry for _, entry in granted]
        in_flight = dict(other.report.in_flight)
        for engine, entry in granted:
            place = (engine, entry.work.class_name)
            runs = in_flight.get(place, NOTHING)
            in_flight[place] = InFlight(
                runs.works + 1, runs.kv_tokens + entry.kv_tokens, runs.prefill_tokens + entry.prefill_tokens
            )
        other.report = replace(other.report, in_flight=in_flight)
        if granted:
            other.whole_s = now_s + SESSION_VALID_S  # as long as a grant is valid
        self._lost[session] = other
        return [entry for _, entry in granted]

    def __repr__(self) -> str:
        return f"<Steward sessions={len(self._others)} lost={len(self._lost)}>"


_NOTHING = Allowance(0, 0, 0)


def _when(news: News) -> float:
    return news[0]


def _beyond(most: InFlight, runs: InFlight) -> InFlight:
    """What may be started of it, but was not reported as running."""
    return InFlight(
        max(0, most.works - runs.works),
        max(0, most.kv_tokens - runs.kv_tokens),
        max(0, most.prefill_tokens - runs.prefill_tokens),
    )
