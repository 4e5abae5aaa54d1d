"""One round: which waiting works start now, and where. Values in, placements out; the caller does what awaits.

Works are offered in the order of `policies.ordering`, each to the engines that may take it (`policies.placement`), and
the sizing policy says whether there is room. Every placement is counted in the round's own copy of the engine's view
before the next work is looked at, so that one round can never overfill a window. A work that fits nowhere blocks
nobody of another class, model or tenant behind it, and no smaller one of its own. What bounds the round's cost: a work
at least as large as one that was refused in this round is not asked for again (room only shrinks in a round), nor is one that
is longer than a refusal said that any may be; a kind for which not even the smallest work has room is closed; and after
LOOK_AHEAD refusals a tenant's works of one kind are left alone until the next.

One that is overdue does block works without an objective, on one engine in a round: where it only waits for prompts to be taken
in, and for a quarter of the time where it waits for memory. Smaller ones would take what comes free each time, and it would wait
for ever.

Random draws are arguments: the round's k-th choice uses the k-th point of a low-discrepancy sequence that starts at
`draw`. The result does not depend on the order in which works or engines are handed in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from policies.estimators.prefix_caches import PrefixCaches
from policies.ordering import OVERDUE_SHARE, Backlog, TenantCounters, backlogs, entitled, pressed, urgent
from policies.placement import Candidate, Chosen, able, choose, longest, passed_over
from policies.schema import Policy
from policies.sizing import SizingPolicy, least
from policies.vocabulary import Action, Decision, DispatchBatch, EngineState, EngineView, Guard, Verdict, Work

LOOK_AHEAD = 24
"""Refusals in a round after which a tenant's works of one kind are not looked at again."""
MOST_PLACED = 64
"""Works that one round places: what waits beyond is the next round's, which follows at once, and streams are served between."""
EPSILON_TOKENS = 1e-3
"""More than rounding makes of a limit in tokens."""
GOLDEN = 0.6180339887498949
BY_PROMPTS = frozenset({Guard.STALL, Guard.TTFT})
"""What may let a work in as soon as the prompts that are pending have been taken in."""
BY_ENDS = BY_PROMPTS | {Guard.KV}
"""What may let a work in once others have ended."""
KEPT_S, KEPT_EVERY_S = 30.0, 120.0
"""For so long, and so often, an engine is kept for one that waits for memory: it may be too large for ever."""

Kind = tuple[str, str, str, str | None, frozenset[str], frozenset[str], bool]
"""(class, model, path, pin, avoid, canaries passed over, late): works of one kind may run on the same engines, and are bound by
the same guards."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A work, as predictions take it there, starts on an engine; `decision` says by which turn and with what every guard read."""

    work: Work
    engine: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Full:
    """Which engines have no room even for the least work of a class, and so for none. It holds for a round: room only shrinks.

    refusals   by class and engine
    shut       classes that no engine that is up has room for
    """

    refusals: Mapping[str, Mapping[str, Verdict]] = field(default_factory=dict)
    shut: frozenset[str] = frozenset()


NONE_FULL = Full()


def look_for_room(names: Iterable[str], engines: Sequence[EngineView], sizing: SizingPolicy, now_s: float) -> Full:
    """Ask for the least work of each of these classes, O(names x engines)."""
    up = [view for view in engines if view.state is EngineState.UP]
    refusals = {}
    for name in names:
        work = least(name, now_s)
        verdicts = ((view.name, sizing.admit(work, view, now_s)) for view in up)
        refusals[name] = {engine: verdict for engine, verdict in verdicts if not verdict.admitted}
    return Full(refusals, frozenset(name for name, refused in refusals.items() if len(refused) == len(up)))


def plan_batches(  # noqa: PLR0917 - one signature with place_one, read in this order
    waiting: Sequence[Work],
    engines: Sequence[EngineView],
    sizing: SizingPolicy,
    policy: Policy,
    now_s: float,
    draw: float,
    *,
    tenants: TenantCounters | None = None,
    due: Sequence[Work] | None = None,
    full: Full = NONE_FULL,
    caches: PrefixCaches | None = None,
) -> tuple[list[Placement], list[DispatchBatch]]:
    """Plan one round over a look-ahead into the queue: what starts where, and what that comes to for each engine.

    waiting   works to place, in any order; O(n log n), so hand in a bounded look-ahead
    engines   views of all engines of the pool; unknown and down ones are left out here
    draw      uniform in [0, 1)
    tenants   service so far and works in flight by tenant; read, never changed. None: all tenants are level
    due       the works with a deadline in the order in which they are offered (`feasibility.Outlook`); None: by deadline
    full      as `look_for_room` found: who finds no room there is not asked for again
    caches    what engines have of prompts; read, never changed. None: nothing
    """
    counters = TenantCounters() if tenants is None else tenants
    room = _Round(engines, sizing, policy, now_s=now_s, draw=draw, tenants=counters, full=full, caches=caches)
    if full.shut:
        waiting = [work for work in waiting if work.class_name not in full.shut]
        due = None if due is None else [work for work in due if work.class_name not in full.shut]
    patient = backlogs(waiting, policy, counters, now_s)
    room.catch_up(patient)
    due = urgent(waiting, policy, counters) if due is None else due
    asked = {work.class_name for work in due}
    for work in due:
        if room.offer(work, "deadline"):
            room.catch_up(patient)
        elif room.full >= asked or len(room.placements) >= MOST_PLACED:
            break
    for work in pressed(waiting, now_s):
        room.offer(work, "slack")
    for backlog in patient:
        while backlog.take_fair(room.fair):
            pass
    return room.placements, room.batches()


def plan_round(  # noqa: PLR0917 - one signature with place_one, read in this order
    waiting: Sequence[Work],
    engines: Sequence[EngineView],
    sizing: SizingPolicy,
    policy: Policy,
    now_s: float,
    draw: float,
    *,
    tenants: TenantCounters | None = None,
    due: Sequence[Work] | None = None,
) -> list[Placement]:
    """The placements of `plan_batches`."""
    return plan_batches(waiting, engines, sizing, policy, now_s, draw, tenants=tenants, due=due)[0]


def place_one(  # noqa: PLR0917 - one signature with plan_round, read in this order
    work: Work,
    engines: Sequence[EngineView],
    sizing: SizingPolicy,
    policy: Policy,
    now_s: float,
    draw: float,
    *,
    tenants: TenantCounters | None = None,
    caches: PrefixCaches | None = None,
) -> Placement | None:
    """Place a work that nothing waits before, O(engines); None: no room now, it has to wait."""
    if tenants is not None and _capped(work, policy, tenants.in_flight(work.tenant)):
        return None
    candidates = [Candidate(view) for view in able(work, engines)]
    candidates.sort(key=_name)
    chosen = choose(work, candidates, sizing, now_s, spread=_spread(work, policy), draw=draw, caches=caches)
    if chosen is None:
        return None
    return _placement(chosen, policy, now_s, "uncontended")


class _Round:
    """What one round knows: engines as placements fill them, and which kinds of work found no room."""

    __slots__ = (
        "_by_kind",
        "_caches",
        "_canaries",
        "_candidates",
        "_closed",
        "_draw",
        "_grants",
        "_in_flight",
        "_kept",
        "_longest",
        "_now_s",
        "_placed",
        "_placed_by_tenant",
        "_policy",
        "_refusals",
        "_refused",
        "_sizing",
        "_tenants",
        "_up",
        "full",
        "placements",
    )

    def __init__(
        self,
        engines: Sequence[EngineView],
        sizing: SizingPolicy,
        policy: Policy,
        *,
        now_s: float,
        draw: float,
        tenants: TenantCounters,
        full: Full,
        caches: PrefixCaches | None,
    ) -> None:
        self.placements: list[Placement] = []
        self.full: set[str] = set()
        self._up = sum(view.state is EngineState.UP for view in engines)
        self._candidates = sorted(map(Candidate, engines), key=_name)
        self._refusals = full.refusals
        for refusals in full.refusals.values():
            for candidate in self._candidates:
                if candidate.view.name in refusals:
                    candidate.refused = "", refusals[candidate.view.name]
        self._sizing, self._policy, self._now_s, self._draw, self._tenants = sizing, policy, now_s, draw, tenants
        self._caches = caches
        self._canaries = [view for view in engines if view.canary < 1]
        self._grants = tenants.grants()
        self._by_kind: dict[Kind, _Able] = {}
        self._in_flight: dict[str, dict[str, float]] = {}
        self._refused: dict[tuple[Kind, str], _Refused] = {}
        self._longest: dict[Kind, float] = {}
        self._closed: set[Kind] = set()
        self._kept: Candidate | None = None
        self._placed: set[str] = set()
        self._placed_by_tenant: dict[str, float] = {}

    def offer(self, work: Work, turn: str) -> bool:
        """Place the work if an engine has room for it and its tenant may have more in flight."""
        if work.class_name in self.full or len(self.placements) >= MOST_PLACED:
            return False
        late = self._policy.late(work, self._now_s)
        skipped = passed_over(work, self._canaries) if self._canaries else frozenset()
        kind = (work.class_name, work.model, work.path, work.pinned_engine, work.avoid, skipped, late)
        if kind in self._closed:
            return False
        refused = self._refused.get((kind, work.tenant))
        if (refused is not None and refused.covers(work)) or work.id in self._placed:
            return False
        # Of a prompt whose beginning may be cached nobody knows yet what is left to compute.
        if kind in self._longest and not work.prefix and work.computed_tokens > self._longest[kind] + EPSILON_TOKENS:
            self._refused[kind, work.tenant] = _Refused.first(work) if refused is None else refused.after(work)
            return False
        in_flight = self._tenants.in_flight(work.tenant) + self._placed_by_tenant.get(work.tenant, 0)
        if _capped(work, self._policy, in_flight):
            return False
        spread = _spread(work, self._policy)
        mine = self._able(kind, work)
        offered = mine.not_full if spread else [one for one in mine.not_full if one is not self._kept]
        if mine.not_full and not offered:
            return False
        chosen = choose(
            work,
            offered,
            self._sizing,
            self._now_s,
            spread=spread,
            draw=self._draw,
            caches=self._caches,
            longest_context=mine.longest_context,
        )
        if chosen is None:
            if self._kept is None and self._policy.overdue(work, self._now_s):
                self._kept = _draining(offered, work, self._now_s)
            if refused is None and not self._least_fits(work, offered, late=late):
                self._closed.add(kind)
                if not late and mine.all_up:
                    self.full.add(work.class_name)
            longest = max((_longest_tokens(one, work) for one in mine.not_full), default=math.inf)
            self._longest[kind] = min(longest, self._longest.get(kind, math.inf))
            self._refused[kind, work.tenant] = _Refused.first(work) if refused is None else refused.after(work)
            return False
        self._place(work, chosen, turn)
        return True

    def share(self, work: Work) -> bool:
        return self.offer(work, "share")

    def fair(self, work: Work) -> bool:
        return self.offer(work, "fair")

    def catch_up(self, patient: Iterable[Backlog]) -> None:
        """Place what classes without an objective are owed by now: overdue works, then their minimum share."""
        for backlog in patient:
            while backlog.overdue and self._owed(backlog, OVERDUE_SHARE):
                self.offer(backlog.overdue.popleft(), "overdue")
            while self._owed(backlog, backlog.min_share) and backlog.take_fair(self.share):
                pass

    def _owed(self, backlog: Backlog, share: float) -> bool:
        in_flight = self._in_flight.get(backlog.model)
        if in_flight is None:
            in_flight = self._in_flight[backlog.model] = {}
            for candidate in self._candidates:
                if backlog.model in candidate.view.models:
                    for class_name, count in candidate.view.in_flight.items():
                        in_flight[class_name] = in_flight.get(class_name, 0) + count
        return entitled(backlog.class_name, share, in_flight=in_flight, granted=self._grants)

    def batches(self) -> list[DispatchBatch]:
        """What the round sends to each engine, in the order of their names."""
        sent: dict[str, list[Work]] = {}
        for placement in self.placements:
            sent.setdefault(placement.engine, []).append(placement.work)
        return [
            DispatchBatch(
                self._now_s,
                one.view.name,
                dict(Counter(work.class_name for work in works)),
                sum(work.sequences for work in works),
                sum(work.prompt_tokens for work in works),
                Guard.NONE if one.refused is None else one.refused[1].binding,
            )
            for one in self._candidates
            if (works := sent.get(one.view.name))
        ]

    def _place(self, work: Work, chosen: Chosen, turn: str) -> None:
        self.placements.append(_placement(chosen, self._policy, self._now_s, turn))
        view = chosen.candidate.view
        chosen.candidate.take(chosen.work)
        self._placed.add(work.id)
        self._draw = (self._draw + GOLDEN) % 1.0
        _count(self._placed_by_tenant, work.tenant)
        _count(self._grants, work.class_name)
        for model in view.models & self._in_flight.keys():
            _count(self._in_flight[model], work.class_name)

    def _least_fits(self, work: Work, candidates: Sequence[Candidate], *, late: bool) -> bool:
        """Whether one of the engines has room for the smallest work of the kind, whoever asks."""
        if candidates and not late and not self.placements and work.class_name in self._refusals:
            return True  # `look_for_room` has asked, and left out who had none
        least = replace(work, tenant="", prompt_tokens=0, cached_tokens=0, max_tokens=1, sequences=1)
        return any(self._sizing.admit(least, one.view, self._now_s).admitted for one in candidates)

    def _able(self, kind: Kind, work: Work) -> _Able:
        found = self._by_kind.get(kind)
        if found is None:
            names = {view.name for view in able(work, [one.view for one in self._candidates])}
            candidates = [one for one in self._candidates if one.view.name in names]
            full = self._refusals.get(work.class_name, {})
            not_full = [candidate for candidate in candidates if candidate.view.name not in full]
            found = self._by_kind[kind] = _Able(not_full, longest(candidates), len(candidates) == self._up)
        return found


@dataclass(frozen=True, slots=True)
class _Able:
    """The engines that may run a kind of work. not_full: those that are not known to be full; all_up: they are all that are up."""

    not_full: list[Candidate]
    longest_context: float
    all_up: bool


@dataclass(frozen=True, slots=True)
class _Refused:
    """The smallest work of a kind and tenant that found no room in this round, and how many were refused."""

    prompt_tokens: int
    computed_tokens: int
    sequences: int
    output_tokens: float
    count: int

    @staticmethod
    def first(work: Work, count: int = 1) -> _Refused:
        return _Refused(work.prompt_tokens, work.computed_tokens, work.sequences, _output_limit(work), count)

    def after(self, work: Work) -> _Refused:
        """One more was refused."""
        smaller = (
            work.prompt_tokens <= self.prompt_tokens
            and work.computed_tokens <= self.computed_tokens
            and work.sequences <= self.sequences
            and _output_limit(work) <= self.output_tokens
        )
        if smaller:
            return _Refused.first(work, self.count + 1)
        return _Refused(
            self.prompt_tokens, self.computed_tokens, self.sequences, self.output_tokens, self.count + 1
        )  # `replace` takes three times as long, and this is done for most works of a round

    def covers(self, work: Work) -> bool:
        """True when asking for this work cannot help: it is no smaller, or enough were refused."""
        return self.count >= LOOK_AHEAD or (
            work.prompt_tokens >= self.prompt_tokens
            and work.computed_tokens >= self.computed_tokens
            and work.sequences >= self.sequences
            and (work.max_tokens is None or work.max_tokens >= self.output_tokens)
        )


def _longest_tokens(candidate: Candidate, work: Work) -> float:
    """What refused the work there says of longer ones; inf where it was not asked for."""
    refusal = candidate.refusal(work)
    return math.inf if refusal is None else refusal.longest_tokens


def _draining(candidates: Iterable[Candidate], work: Work, now_s: float) -> Candidate | None:
    """Where the work is refused for nothing but what passes, prompts that will soon be taken in or memory, and would be let in the
    soonest; None: nowhere."""
    passing = BY_ENDS if now_s % KEPT_EVERY_S < KEPT_S else BY_PROMPTS
    found: list[tuple[float, Candidate]] = []
    for one in candidates:
        refusal = one.refusal(work)
        failed = set() if refusal is None else {reading.guard for reading in refusal.guards if not reading.passed}
        if refusal is not None and failed <= passing and not failed <= {Guard.TTFT}:
            found.append((refusal.longest_tokens, one))
    return max(found, key=itemgetter(0))[1] if found else None


def _output_limit(work: Work) -> float:
    return math.inf if work.max_tokens is None else work.max_tokens


def _placement(chosen: Chosen, policy: Policy, now_s: float, turn: str) -> Placement:
    work, engine, verdict = chosen.work, chosen.candidate.view.name, chosen.verdict
    decision = Decision(
        action=Action.DISPATCH,
        at_s=now_s,
        policy_version=policy.version,
        class_name=work.class_name,
        engine=engine,
        work_id=work.id,
        guards=verdict.guards,
        reason=turn,
        steps_to_overflow=verdict.steps_to_overflow,
        first_token_s=verdict.first_token_s,
        cached_tokens=chosen.cached_tokens,
    )
    return Placement(work, engine, decision)


def _count(counts: dict[str, float], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _capped(work: Work, policy: Policy, in_flight: float) -> bool:
    most = policy.tenant(work.tenant).max_in_flight
    return most is not None and in_flight >= most


def _spread(work: Work, policy: Policy) -> bool:
    return policy.class_policy(work.class_name).has_ttft_objective


def _name(candidate: Candidate) -> str:
    return candidate.view.name
