"""One dispatch round: order across classes and tenants, windows kept, nobody starved, the same plan for the same world."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.dispatching import (
    KEPT_EVERY_S,
    KEPT_S,
    LOOK_AHEAD,
    MOST_PLACED,
    Placement,
    look_for_room,
    place_one,
    plan_batches,
    plan_round,
)
from policies.estimators.prefix_caches import PrefixCaches
from policies.limits import build
from policies.ordering import TenantCounters, late_by_class
from policies.placement import eligible, suited
from policies.schema import PRESSING_FRACTION, Policy
from policies.sizing import LearnedStep, SizingEvent, Window
from policies.vocabulary import Action, EngineState, EngineView, Guard, GuardReading, Verdict, Work
from tests.policies.worlds import NOW_S, draws, engine, engines, fresh, policy, work, works

POLICY = policy()
SIZING = build(POLICY)
FULL = {"chat": 5, "night": 3}


def plan(
    waiting: Sequence[Work],
    views: Sequence[EngineView],
    *,
    policy: Policy = POLICY,
    draw: float = 0.0,
    tenants: TenantCounters | None = None,
) -> list[Placement]:
    return plan_round(waiting, views, build(policy), policy, NOW_S, draw, tenants=tenants)


def ids(placements: Sequence[Placement]) -> list[str]:
    return [placement.work.id for placement in placements]


# -- properties ------------------------------------------------------------------------------------------------------


@given(works, engines, draws)
def test_a_round_never_exceeds_a_window(waiting: list[Work], views: list[EngineView], draw: float) -> None:
    placements = plan(waiting, views, draw=draw)

    after = {view.name: Counter(view.in_flight) for view in views}
    touched = set()
    for placement in placements:
        after[placement.engine][placement.work.class_name] += 1
        touched.add((placement.engine, placement.work.class_name))
    fixed = POLICY.sizing.fixed
    for view in views:
        total = fixed.engines[view.name].total if view.name in fixed.engines else fixed.total
        if any(name == view.name for name, _ in touched):
            assert sum(after[view.name].values()) <= (total or 0)
        for name, class_name in touched:
            if name == view.name:
                assert after[name][class_name] <= (SIZING.window(view, class_name).requests or 0)


@given(works, engines, draws)
def test_a_work_is_placed_at_most_once_and_only_where_it_may_run(
    waiting: list[Work], views: list[EngineView], draw: float
) -> None:
    placements = plan(waiting, views, draw=draw)

    by_name = {view.name: view for view in views}
    assert len(set(ids(placements))) == len(placements)
    assert all(by_name[placement.engine].state is EngineState.UP for placement in placements)
    assert all(eligible(placement.work, by_name[placement.engine]) for placement in placements)


@given(works, engines, draws, st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_in_which_things_are_handed_in(
    waiting: list[Work], views: list[EngineView], draw: float, rng: random.Random
) -> None:
    shuffled_works, shuffled_views = waiting[:], views[:]
    rng.shuffle(shuffled_works)
    rng.shuffle(shuffled_views)

    assert plan(shuffled_works, shuffled_views, draw=draw) == plan(waiting, views, draw=draw)


@given(st.lists(st.tuples(st.sampled_from(["chat", "code"]), st.floats(NOW_S - 9, NOW_S)), max_size=30), draws)
def test_urgent_works_start_in_the_order_of_their_deadlines(drawn: list[tuple[str, float]], draw: float) -> None:
    waiting = [work(f"w{n}", name, accepted_s=at_s) for n, (name, at_s) in enumerate(drawn)]
    relaxed = policy("version: 1\nclasses: {chat: {ttft_sla_s: 0.5}, code: {ttft_sla_s: 5}}\n")

    placed = plan(waiting, [engine("e0", {"chat": 50}), engine("e1", {"code": 59})], policy=relaxed, draw=draw)

    deadlines = [one.work.deadline_s or 0 for one in placed]
    left = [one.deadline_s or 0 for one in waiting if one.id not in ids(placed)]
    assert deadlines == sorted(deadlines)
    assert len(placed) == min(len(waiting), 19)
    assert not left or min(left) >= max(deadlines)


@given(works, engines, draws)
def test_what_could_still_start_is_not_left_waiting(waiting: list[Work], views: list[EngineView], draw: float) -> None:
    waiting = [one for one in waiting if one.tenant != "small"][:LOOK_AHEAD]
    placements = plan(waiting, views, draw=draw)

    full = {view.name: dict(view.in_flight) for view in views}
    for placement in placements:
        counts = full[placement.engine]
        counts[placement.work.class_name] = counts.get(placement.work.class_name, 0) + 1
    extra: dict[str, dict[str, int]] = {view.name: dict(view.extra_sequences) for view in views}
    for placement in placements:
        more, name = extra[placement.engine], placement.work.class_name
        more[name] = more.get(name, 0) + placement.work.sequences - 1
    after = [replace(view, in_flight=full[view.name], extra_sequences=extra[view.name]) for view in views]
    left = [one for one in waiting if one.id not in ids(placements)]
    assert not [
        one for one in left for view in after if view in suited(one, after) and SIZING.admit(one, view, NOW_S).admitted
    ]


@given(works, engines, draws)
def test_a_tenant_never_has_more_in_flight_than_its_cap(
    waiting: list[Work], views: list[EngineView], draw: float
) -> None:
    tenants = TenantCounters()
    tenants.granted(work("earlier", "night", tenant="small"))

    placements = plan(waiting, views, draw=draw, tenants=tenants)

    assert sum(placement.work.tenant == "small" for placement in placements) <= 1


@settings(max_examples=20, deadline=None)
@given(seats=st.integers(1, 4), max_age_s=st.floats(10, 20), overload=st.floats(1.0, 2.0), draw=draws)
def test_nobody_starves_under_endless_urgent_load(seats: int, max_age_s: float, overload: float, draw: float) -> None:
    """Urgent works arrive faster than an engine (1 s a work) serves, for ever, and min_share gives bulk nothing."""
    night = f"{{max_age_s: {max_age_s}, min_share: 0}}"
    rules = policy(f"version: 1\nclasses: {{chat: {{ttft_sla_s: 0.5}}, night: {night}}}\n")
    arrivals = [n / seats / overload for n in range(int(3 * max_age_s * seats * overload))]
    works = [work(f"n{n}", "night", accepted_s=0.0) for n in range(4)]
    works += [work(f"c{n}", accepted_s=at_s) for n, at_s in enumerate(arrivals)]

    started = simulated(works, seats, rules, draw)

    assert max(started[f"n{n}"] for n in range(4)) <= PRESSING_FRACTION * max_age_s + 2 * 4 / seats + 2


def simulated(works: list[Work], seats: int, rules: Policy, draw: float) -> dict[str, float]:
    """When each work starts on one engine that needs 1 s a work; a round at every arrival and every end."""
    tenants, sizing = TenantCounters(), build(rules)
    arriving = deque(sorted(works, key=lambda one: one.accepted_s))
    waiting: dict[str, Work] = {}
    running: deque[tuple[float, str]] = deque()
    started: dict[str, float] = {}
    while arriving:
        now_s = min(arriving[0].accepted_s, running[0][0] if running else math.inf)
        while arriving and arriving[0].accepted_s <= now_s:
            arrived = arriving.popleft()
            waiting[arrived.id] = arrived
        while running and running[0][0] <= now_s:
            running.popleft()
        view = engine(in_flight=Counter(name for _, name in running), seats=fresh(seats))
        for placed in plan_round(list(waiting.values()), [view], sizing, rules, now_s, draw, tenants=tenants):
            started[placed.work.id] = now_s
            tenants.granted(placed.work)
            running.append((now_s + 1, placed.work.class_name))
            del waiting[placed.work.id]
    return started


# -- turns -----------------------------------------------------------------------------------------------------------


def test_an_overdue_work_goes_ahead_of_the_urgent() -> None:
    old = work("old", "night", accepted_s=NOW_S - 121)

    placed = plan([work("new"), old], [engine(in_flight={"chat": 6, "night": 1})])

    assert [(one.work.id, one.decision.reason) for one in placed] == [("old", "overdue")]


def test_a_backlog_that_is_overdue_as_a_whole_leaves_half_to_the_urgent() -> None:
    relaxed = policy(
        "version: 1\nclasses: {chat: {ttft_sla_s: 1}, night: {}}\nsizing: {fixed: {windows: {night: 60}}}\n"
    )
    backlog = [work(f"n{n:03}", "night", accepted_s=0.0) for n in range(100)]

    placed = plan([*backlog, *(work(f"c{n:03}") for n in range(100))], [engine()], policy=relaxed)

    assert Counter(one.work.class_name for one in placed) == {"chat": 32, "night": 32}


def promised(id: str, *, left_s: float, allowed_s: float = 100.0) -> Work:
    """Bulk of the last class whose whole answer is due in left_s of the allowed_s that it had."""
    return replace(work(id, "scrap", accepted_s=NOW_S - allowed_s + left_s), finish_by_s=NOW_S + left_s)


def test_bulk_with_little_slack_goes_before_other_bulk_and_after_the_urgent() -> None:
    waiting = [work("bulk", "night"), promised("soon", left_s=20), promised("sooner", left_s=10), work("urgent")]

    placed = plan(waiting, [engine()])

    assert [(one.work.id, one.decision.reason) for one in placed] == [
        ("bulk", "share"),
        ("urgent", "deadline"),
        ("sooner", "slack"),
        ("soon", "slack"),
    ]


@pytest.mark.parametrize("left_s", [30.0, -1.0], ids=["has time", "is late already"])
def test_bulk_that_nothing_presses_waits_for_its_turn(left_s: float) -> None:
    (placed,) = plan([promised("one", left_s=left_s)], [engine()])

    assert placed.decision.reason == "fair"


def test_bulk_with_little_slack_lifts_no_window() -> None:
    placed = plan([promised(f"w{number}", left_s=10) for number in range(9)], [engine()])

    assert [one.work.id for one in placed] == ["w0", "w1"]


def test_a_class_below_its_share_goes_first() -> None:
    placed = plan([work("urgent"), work("owed", "night")], [engine(in_flight={"chat": 7})])

    assert [(one.work.id, one.decision.reason) for one in placed] == [("owed", "share")]


def test_a_class_that_has_its_share_waits_for_the_urgent() -> None:
    placed = plan([work("urgent"), work("sated", "night")], [engine(in_flight={"chat": 6, "night": 1})])

    assert ids(placed) == ["urgent"]


def test_a_share_is_no_claim_on_every_turn_of_a_single_seat() -> None:
    tenants, placed = TenantCounters(), Counter[str]()
    for turn in range(100):
        waiting = [work(f"c{turn}"), work(f"n{turn}", "night")]
        for one in plan(waiting, [engine(seats=fresh(1))], tenants=tenants):
            tenants.granted(one.work)
            placed[one.work.class_name] += 1

    assert placed == {"chat": 90, "night": 10}


def test_patient_classes_take_their_turns_in_the_order_of_the_document() -> None:
    waiting = [work("scrap", "scrap"), work("night", "night"), work("gone", "gone")]

    placed = plan(waiting, [engine(in_flight={"chat": 5, "night": 1})])

    assert ids(placed) == ["night", "scrap"]


def test_among_tenants_the_one_with_less_service_goes_first() -> None:
    tenants = TenantCounters()
    for _ in range(5):
        tenants.granted(work("w", "night", tenant="a", prompt_tokens=1000))
    waiting = [work("a", "night", tenant="a", rank=1), work("b", "night", tenant="b", rank=2)]

    placed = plan(waiting, [engine(in_flight={"night": 2})], tenants=tenants)

    assert ids(placed) == ["b"]


def test_inside_a_round_tenants_alternate_by_weight() -> None:
    relaxed = policy("version: 1\nclasses: {night: {min_share: 0}}\ntenants: {heavy: {weight: 3}}\n")
    waiting = [work(f"{tenant}{n}", "night", tenant=tenant) for tenant in ("heavy", "light") for n in range(20)]

    placed = plan(waiting, [engine(in_flight={"night": 8})], policy=relaxed)

    assert Counter(one.work.tenant for one in placed) == {"heavy": 6, "light": 2}


def test_a_tenants_works_start_by_rank() -> None:
    waiting = [work("second", "night", rank=2.0), work("first", "night", rank=1.0)]

    placed = plan(waiting, [engine(in_flight={"night": 2})])

    assert ids(placed) == ["first"]


# -- what blocks nobody ----------------------------------------------------------------------------------------------


def test_a_work_that_fits_nowhere_does_not_block_another_model() -> None:
    waiting = [work("stuck", model="gone", accepted_s=0.0), work("free")]

    assert ids(plan(waiting, [engine()])) == ["free"]


def test_a_class_whose_window_is_full_does_not_block_another() -> None:
    waiting = [work("code", "code", accepted_s=NOW_S - 60), work("chat")]

    assert ids(plan(waiting, [engine(in_flight={"code": 6})])) == ["chat"]


def test_works_pinned_to_an_engine_that_is_down_block_nobody() -> None:
    pinned = [work(f"p{n:03}", accepted_s=0.0, pinned_engine="e1") for n in range(3 * LOOK_AHEAD)]

    placed = plan([*pinned, work("free")], [engine("e0"), engine("e1", state=EngineState.DOWN)])

    assert ids(placed) == ["free"]


def test_a_tenant_at_its_cap_does_not_block_the_next_tenant() -> None:
    capped = [work(f"s{n}", "night", tenant="small", accepted_s=NOW_S - 60) for n in range(5)]

    placed = plan([*capped, work("t", "night")], [engine()])

    assert sorted(ids(placed)) == ["s0", "s1", "t"]


class Tokens:
    """A sizing policy with room for so many prompt tokens, that counts how often it is asked."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked = 0

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
        self.asked += 1
        tokens = engine.kv_tokens + work.prompt_tokens
        return Verdict(tokens <= self.room, (GuardReading(Guard.KV, tokens, self.room, tokens <= self.room),))

    def window(self, engine: EngineView, class_name: str) -> Window:
        return Window(tokens=self.room)

    def on_event(self, event: SizingEvent, now_s: float) -> None:
        pass

    def learned_step(self, engine: str) -> LearnedStep | None:
        return None

    def snapshot(self) -> Mapping[str, object]:
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        pass


def test_a_smaller_work_behind_one_that_is_too_large_still_starts() -> None:
    waiting = [work("large", prompt_tokens=5000, accepted_s=0.0), work("small", prompt_tokens=10)]

    placed = plan_round(waiting, [engine()], Tokens(100), POLICY, NOW_S, 0.0)

    assert ids(placed) == ["small"]


def test_a_longer_prompt_of_which_more_is_cached_is_asked_for_behind_one_that_finds_no_room() -> None:
    class Computing(Tokens):
        def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
            return super().admit(replace(work, prompt_tokens=work.computed_tokens), engine, now_s)

    caches = PrefixCaches()
    caches.heard(replace(engine(), prefix_hits_total=fresh(0.0)))
    caches.granted("e0", replace(work("earlier", prompt_tokens=900), prefix="a.b.c"), 1)
    waiting = [work("whole", prompt_tokens=600), replace(work("known", prompt_tokens=900), prefix="a.b.c")]
    due = caches.waiting(waiting, {"e0"}, NOW_S)

    placed, _ = plan_batches(waiting, [engine()], Computing(450), POLICY, NOW_S, 0.5, due=due, caches=caches)

    assert ids(placed) == ["known"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_round_asks_a_bounded_number_of_times_however_many_wait(order: int) -> None:
    waiting = [
        work(f"w{n}", accepted_s=NOW_S - n, deadline_s=NOW_S + 900 - n, prompt_tokens=1000 + order * n)
        for n in range(900)
    ]
    late = [replace(one, id=f"late-{one.id}", deadline_s=NOW_S - 1) for one in waiting]
    sizing = Tokens(50)

    placed = plan_round(waiting, [engine()], sizing, POLICY, NOW_S, 0.0)
    asked = sizing.asked
    placed += plan_round([*waiting, *late], [engine()], sizing, POLICY, NOW_S, 0.0)

    assert placed == []
    assert asked <= LOOK_AHEAD + 1
    assert sizing.asked - asked <= 2 * (LOOK_AHEAD + 1), "late works are a kind of their own, and there are two"


# -- decisions and the short way ---------------------------------------------------------------------------------------


def test_a_kind_that_has_no_room_for_any_work_is_asked_for_twice_whatever_waits() -> None:
    sizing = Tokens(-1)
    waiting = [work(f"w{n}", "night", tenant=f"t{n}", prompt_tokens=1000 - n) for n in range(200)]

    placements = plan_round(waiting, [engine()], sizing, POLICY, NOW_S, 0.0)

    assert not placements
    assert sizing.asked == 2


def test_a_round_places_a_bounded_number_of_works_and_leaves_the_rest_to_the_next() -> None:
    waiting = [work(f"w{n}", "night", rank=n, prompt_tokens=1) for n in range(3 * MOST_PLACED)]

    placed = plan_round(waiting, [engine()], Tokens(10**9), POLICY, NOW_S, 0.0)

    assert [one.work.id for one in placed] == [f"w{n}" for n in range(MOST_PLACED)]


def test_a_class_that_no_engine_has_room_for_is_left_out_of_a_round_and_its_guard_is_told() -> None:
    sizing = Tokens(-1)
    waiting = [work(f"w{n}", "night", prompt_tokens=1000 - n) for n in range(200)]

    full = look_for_room(["night"], [engine()], sizing, NOW_S)
    asked = sizing.asked
    placements, _ = plan_batches(waiting, [engine()], sizing, POLICY, NOW_S, 0.0, full=full)

    assert full.shut == {"night"}
    assert not placements
    assert sizing.asked == asked == 1
    assert not look_for_room(["night"], [engine()], Tokens(50), NOW_S).shut


def test_an_engine_that_is_full_for_the_least_work_is_not_asked_again_in_a_round() -> None:
    class OnlyOn(Tokens):
        def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
            if engine.name == "e3":
                return super().admit(work, engine, now_s)
            self.asked += 1
            return Verdict(admitted=False)

    sizing, views = OnlyOn(3), [engine(f"e{n}") for n in range(8)]
    full = look_for_room(["night"], views, sizing, NOW_S)
    before = sizing.asked
    waiting = [work(f"w{n}", "night", rank=n, prompt_tokens=1) for n in range(20)]

    placements, _ = plan_batches(waiting, views, sizing, POLICY, NOW_S, 0.0, full=full)

    assert {one.engine for one in placements} == {"e3"}
    assert sizing.asked - before <= len(placements) + 2


@pytest.mark.parametrize("prompt_tokens", [1000, 8000])
def test_a_long_work_waits_for_the_engine_that_it_fits_into_also_when_that_one_is_full(prompt_tokens: int) -> None:
    """A short context is no better for a long one's being full: the work would be refused there."""
    views = [engine("e0", max_model_len=fresh(4096)), engine("e1", {"chat": 4}, max_model_len=fresh(32_768))]
    full = look_for_room(["chat"], views, SIZING, NOW_S)

    placements, _ = plan_batches([work("w", prompt_tokens=prompt_tokens)], views, SIZING, POLICY, NOW_S, 0.0, full=full)

    assert set(full.refusals["chat"]) == {"e1"}
    assert [one.engine for one in placements] == (["e0"] if prompt_tokens < 4096 else [])


def test_a_late_work_that_finds_no_room_leaves_it_to_those_in_time() -> None:
    class NoRoomForLate(Tokens):
        def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
            return (
                super().admit(work, engine, now_s)
                if not POLICY.late(work, now_s)
                else Tokens(-1).admit(work, engine, now_s)
            )

    late = work("late", accepted_s=NOW_S - 9, deadline_s=NOW_S - 8, prompt_tokens=1)
    in_time = work("in time", accepted_s=NOW_S, deadline_s=NOW_S + 1, prompt_tokens=1)

    placed = plan_round([late, in_time], [engine()], NoRoomForLate(50), POLICY, NOW_S, 0.0)

    assert [one.work.id for one in placed] == ["in time"]


def test_a_placement_says_under_which_policy_and_with_what_guards_it_was_made() -> None:
    (placed,) = plan([work("w")], [engine(in_flight={"chat": 2})])

    decision = placed.decision
    assert (decision.action, decision.work_id, decision.engine) == (Action.DISPATCH, "w", "e0")
    assert (decision.policy_version, decision.at_s, decision.reason) == (POLICY.version, NOW_S, "deadline")
    assert [(guard.value, guard.threshold) for guard in decision.guards] == [(3, 8)]
    assert decision.steps_to_overflow is None


def test_a_placement_says_how_far_its_engine_is_from_running_out_of_memory() -> None:
    class Forecasting(Tokens):
        def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
            return replace(super().admit(work, engine, now_s), steps_to_overflow=256.0)

    (placed,) = plan_round([work("w")], [engine()], Forecasting(50), POLICY, NOW_S, 0.0)

    assert placed.decision.steps_to_overflow == 256.0


@given(works, engines, draws)
def test_one_work_alone_is_placed_as_a_round_would_place_it(
    waiting: list[Work], views: list[EngineView], draw: float
) -> None:
    for one in waiting:
        alone = place_one(one, views, SIZING, POLICY, NOW_S, draw)
        in_round = plan([one], views, draw=draw)

        assert [placed.engine for placed in in_round] == ([] if alone is None else [alone.engine])


def test_a_tenant_at_its_cap_is_not_placed_alone_either() -> None:
    tenants = TenantCounters()
    for n in range(2):
        tenants.granted(work(f"s{n}", tenant="small"))

    assert place_one(work("w", tenant="small"), [engine()], SIZING, POLICY, NOW_S, 0.0, tenants=tenants) is None


@given(works, engines, draws)
def test_the_batches_of_a_round_are_its_placements_by_engine(
    waiting: list[Work], views: list[EngineView], draw: float
) -> None:
    placements, batches = plan_batches(waiting, views, SIZING, POLICY, NOW_S, draw)

    assert [batch.engine for batch in batches] == sorted({placement.engine for placement in placements})
    for batch in batches:
        sent = [placement.work for placement in placements if placement.engine == batch.engine]
        assert dict(batch.works) == Counter(one.class_name for one in sent)
        assert batch.sequences == sum(one.sequences for one in sent)
        assert batch.prompt_tokens == sum(one.prompt_tokens for one in sent)


@pytest.mark.parametrize(("waiting", "binding"), [(2, Guard.NONE), (5, Guard.WINDOW)])
def test_a_batch_names_the_guard_that_let_no_more_in(waiting: int, binding: Guard) -> None:
    _, (batch,) = plan_batches(
        [work(f"w{number}", "night") for number in range(waiting)], [engine()], SIZING, POLICY, NOW_S, 0.5
    )

    assert batch.binding is binding


def test_works_beyond_the_look_ahead_are_taken_to_be_late() -> None:
    late, soon = work("late", accepted_s=NOW_S - 9, deadline_s=NOW_S - 8), work("soon")
    depths = {("chat", "t"): 900, ("chat", "heavy"): 1, ("night", "t"): 5}

    assert late_by_class([late, soon, soon, work("n", "night")], depths, POLICY, NOW_S) == {"chat": 899}
    assert late_by_class([soon], {("chat", "t"): 1}, POLICY, NOW_S) == {}


class Telling(Tokens):
    """Says of what it refuses how long a prompt may be."""

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
        verdict = super().admit(work, engine, now_s)
        return verdict if verdict.admitted else replace(verdict, longest_tokens=self.room - engine.kv_tokens)


@given(st.lists(st.integers(1, 2000), max_size=60), st.integers(1, 4000), draws)
def test_what_a_refusal_says_of_longer_prompts_saves_questions_and_changes_no_plan(
    lengths: list[int], room: int, draw: float
) -> None:
    waiting = [work(f"w{n:02}", class_name="night", prompt_tokens=tokens) for n, tokens in enumerate(lengths)]
    silent, telling = Tokens(room), Telling(room)

    plans = [plan_round(waiting, [engine()], one, POLICY, NOW_S, draw) for one in (silent, telling)]

    assert ids(plans[0]) == ids(plans[1])
    assert telling.asked <= silent.asked


class Prompts(Tokens):
    """Lets a prompt in behind others only as far as `room` goes, in time and, where `memory` says so, in memory as well."""

    def __init__(self, room: int, *, memory: bool = False) -> None:
        super().__init__(room)
        self.memory = memory

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
        pending, tokens = engine.prefill_tokens, engine.prefill_tokens + work.computed_tokens
        stall = GuardReading(Guard.STALL, tokens, self.room, not pending or tokens <= self.room)
        kv = GuardReading(Guard.KV, tokens, self.room, not self.memory or tokens <= self.room)
        return Verdict(
            stall.passed and kv.passed, (kv, stall), longest_tokens=self.room - pending if pending else math.inf
        )


OVERDUE_S = NOW_S - PRESSING_FRACTION * 120 - 1
SHORT = [work(f"s{number}", "night", tenant="heavy", prompt_tokens=100) for number in range(3)]


@pytest.mark.parametrize(
    ("accepted_s", "pending", "placed"),
    [
        (OVERDUE_S, 800, []),
        (OVERDUE_S, 0, ["long"]),
        (NOW_S - 9, 800, ["s0", "s1"]),
    ],
)
def test_an_overdue_work_that_waits_for_prompts_alone_is_not_overtaken_by_shorter_ones(
    accepted_s: float, pending: int, placed: list[str]
) -> None:
    long = work("long", "night", prompt_tokens=5000, accepted_s=accepted_s)

    plan_ = plan_round([long, *SHORT], [engine(prefill_tokens=pending)], Prompts(1000), POLICY, NOW_S, 0.5)

    assert ids(plan_) == placed


@pytest.mark.parametrize(("after_s", "placed"), [(0, []), (KEPT_S - 1, []), (KEPT_S, ["s0", "s1"])])
def test_an_overdue_work_that_waits_for_memory_is_not_overtaken_for_a_quarter_of_the_time(
    after_s: float, placed: list[str]
) -> None:
    now_s = NOW_S - NOW_S % KEPT_EVERY_S + KEPT_EVERY_S + after_s
    long = work("long", "night", prompt_tokens=5000, accepted_s=now_s - 500)
    short = [replace(one, accepted_s=now_s) for one in SHORT]

    plan_ = plan_round([long, *short], [engine(prefill_tokens=800)], Prompts(1000, memory=True), POLICY, now_s, 0.5)

    assert ids(plan_) == placed


def test_it_keeps_the_engine_that_is_the_first_to_have_taken_in_its_prompts_and_nobody_with_an_objective() -> None:
    long = work("long", "night", prompt_tokens=5000, accepted_s=OVERDUE_S)
    views = [engine("e0", prefill_tokens=800), engine("e1", prefill_tokens=500)]

    plan_ = plan_round([long, *SHORT, work("c", prompt_tokens=10)], views, Prompts(1000), POLICY, NOW_S, 0.99)

    assert {one.engine for one in plan_ if one.work.class_name == "night"} == {"e0"}
    assert [one.engine for one in plan_ if one.work.id == "c"] == ["e1"]
