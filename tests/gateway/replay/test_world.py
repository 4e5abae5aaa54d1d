"""A replay runs the gateway's own parts: every request once, the same rows everywhere, no knowledge nobody can have."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from backends.simulated.engine import Engine
from backends.simulated.profiles import EngineOptions, load_profile
from gateway.replay.alone import alone
from gateway.replay.figures import figures
from gateway.replay.host import EngineSpec
from gateway.replay.rows import COMPLETED, UNFINISHED
from gateway.replay.trace import Request, read_trace, segment
from gateway.replay.world import WAITING, Backlog, Course, Plan, Played, World, replay
from policies import sizing, vocabulary
from policies.document import parse
from policies.estimators.prefix_trust import PrefixTrust
from policies.limits import LIMITS
from policies.limits.fixed import FixedLimits
from policies.schema import Policy, usual_alone_s
from policies.vocabulary import Decision
from tests.gateway.replay.quiet import QUIET

ROOT = Path(__file__).parents[3]
TRACE = ROOT / "tests/data/azure_conv_10min.csv"
H100 = load_profile("h100_llama31_8b_tp1")
RTX4090 = load_profile("rtx4090_llama31_8b_tp1")
ENGINE = (EngineSpec("e", H100),)
BULK = Backlog([(2000, 100), (3000, 300), (1000, 200)])


def policy(sizing: str = "fixed", *, total: int = 64, bulk: int = 16, more: str = "") -> Policy:
    text = f"""
version: 1
classes:
  interactive: {{ttft_sla_s: 1.0{more}}}
  bulk: {{max_age_s: null, min_share: 0}}
sizing: {{policy: {sizing}, fixed: {{total: {total}, windows: {{interactive: {total}, bulk: {bulk}}}}}}}
"""
    return parse(text, "test.yaml")


def conversation(seconds: float) -> list[Request]:
    return segment(read_trace(TRACE), rate_scale=1.0, from_s=0.0, duration_s=seconds)


def burst(count: int, at_s: float = 0.0, *, prompt: int = 500, output: int = 20) -> list[Request]:
    return [Request(at_s + number / 1000, prompt, output) for number in range(count)]


def digest(played: Played) -> str:
    return hashlib.sha256(repr((played.rows, played.seen)).encode()).hexdigest()


def talks(count: int, seconds: float) -> list[Request]:
    """Conversations: each turn repeats all before it and adds 1,024 tokens."""
    rng, found = random.Random(1), []
    for _ in range(count):
        at_s, ids = rng.uniform(0, 8), [rng.getrandbits(40) for _ in range(2)]
        while at_s < seconds:
            found.append(
                Request(at_s, 512 * len(ids), 50, class_name="interactive", prefix_ids=tuple(ids), id_tokens=512)
            )
            at_s += rng.uniform(4, 12)
            ids += [rng.getrandbits(40) for _ in range(2)]
    return sorted(found, key=lambda one: one.arrival_s)


# -- every request


def test_every_request_ends_once_with_its_own_length() -> None:
    requests = conversation(60)

    played = replay(Plan(ENGINE, policy(), requests), QUIET)

    assert [row.outcome for row in played.rows] == [COMPLETED] * len(requests)
    sizes = sorted((row.arrival_s, row.prompt_tokens, row.output_tokens) for row in played.rows)
    assert sizes == sorted((one.arrival_s, one.prompt_tokens, one.output_tokens) for one in requests)


def test_a_lone_request_takes_what_its_profile_says() -> None:
    played = replay(Plan(ENGINE, policy(), [Request(5.0, 1000, 2)]), QUIET)

    (row,) = played.rows
    step = H100.step_model
    assert row.sent_s == pytest.approx(5.0)
    assert row.ttft_s == pytest.approx(step.step_s(0, 0, [(1000, 0)]), rel=1e-4)
    assert row.first_token_s is not None
    assert row.end_s - row.first_token_s == pytest.approx(step.step_s(1, 1000), rel=1e-3)


def test_what_waits_longer_than_its_class_allows_is_shed() -> None:
    tight = policy(total=2, bulk=1, more=", max_wait_s: 1, max_queue: 3")

    played = replay(Plan(ENGINE, tight, burst(8, output=400)), QUIET)

    outcomes = [row.outcome for row in played.rows]
    assert outcomes.count("completed") == 2
    assert outcomes.count("shed") == 6
    assert {row.end_s - row.arrival_s > 0.9 for row in played.rows if row.outcome == "shed"} == {True, False}


def test_a_class_that_the_trace_names_is_taken() -> None:
    played = replay(Plan(ENGINE, policy(), [Request(0.0, 10, 5, class_name="bulk"), Request(0.1, 10, 5)]), QUIET)

    assert sorted(row.class_name for row in played.rows) == ["bulk", "interactive"]


def test_a_backlog_keeps_its_window_full_and_ends_with_the_run() -> None:
    plan = Plan(ENGINE, policy(bulk=7), conversation(60), backlog=BULK, duration_s=60.0)

    played = replay(plan, QUIET)

    bulk = [row for row in played.rows if row.class_name == "bulk"]
    full = [seen.in_flight.get("bulk") for seen in played.seen if 1 < seen.at_s < 60]
    assert set(full) == {7}
    unfinished = [row for row in bulk if row.outcome == UNFINISHED]
    assert sum(row.sent_s is not None for row in unfinished) == 7
    assert sum(row.sent_s is None for row in unfinished) == WAITING
    assert all(row.end_s <= 60.0 + 1e-6 for row in bulk)
    assert sum(row.class_name == "interactive" for row in played.rows) == len(plan.requests)


def test_who_leaves_the_backlog_is_followed_by_another_of_the_tenant() -> None:
    """An order that serves one tenant alone leaves the others with what they had: it cannot look fair."""
    backlog = replace(BULK, tenants=("a", "b", "c"))
    only = parse(
        """
version: 1
classes: {interactive: {ttft_sla_s: 1.0}, bulk: {max_age_s: null, min_share: 0}}
tenants: {a: {weight: 1000}, b: {weight: 0.001}, c: {weight: 0.001}}
sizing: {policy: fixed, fixed: {total: 9, windows: {interactive: 9, bulk: 8}}}
""",
        "test.yaml",
    )

    fair, unfair = (
        figures(replay(Plan(ENGINE, one, [], backlog=backlog, duration_s=30.0), QUIET), one, duration_s=30.0)
        for one in (policy(bulk=8), only)
    )

    assert (fair.jain or 0) > 0.95
    assert (unfair.jain or 0) < 0.5


def watched(plan: Plan, look: Callable[[Course], object]) -> Played:
    """Play a plan under fixed windows and look at everything that is on its way, once a second."""
    worlds: list[World] = []

    class Windows(FixedLimits):
        def __init__(self, world: World) -> None:
            super().__init__(world.plan.policy)
            worlds.append(world)

    def on_time(_now_s: float) -> None:
        for course in worlds[0].courses.values():
            look(course)

    return replay(replace(plan, privileged=Windows, on_time=on_time), QUIET)


@pytest.mark.parametrize(("whole", "told"), [(True, (False, True)), (False, (True, False))])
def test_answers_told_whole_show_nothing_before_their_end_and_can_be_given_up_until_then(
    *, whole: bool, told: tuple[bool, bool]
) -> None:
    plan = Plan(ENGINE, policy(bulk=2), [], Backlog([(500, 4000)]), 5.0, whole_bulk=whole)
    seen: set[tuple[bool, bool]] = set()

    def look(course: Course) -> None:
        if course.attempt is not None and course.first_token_s is not None:
            seen.add((course.attempt.output_tokens > 0, course.attempt.recallable))

    watched(plan, look)

    assert seen == {told}


def test_what_an_engine_had_made_when_it_died_is_wasted() -> None:
    dying = EngineSpec("e", H100, killed_at_s=2.0, down_s=1.0)
    plan = Plan((dying,), policy(bulk=1), [], Backlog([(500, 400)]), duration_s=12.0, whole_bulk=True)

    played = replay(plan, QUIET)

    wasted = [row.wasted_tokens for row in played.rows if row.wasted_tokens]
    assert len(wasted) == 1
    assert 500 < wasted[0] < 900


def test_estimates_of_prompts_may_be_off_and_the_engine_knows_better() -> None:
    plan = Plan(ENGINE, policy(), conversation(60), estimate_error=0.3)
    ratios: list[float] = []

    played = watched(plan, lambda one: ratios.append(one.work.prompt_tokens / one.request.prompt_tokens))

    assert min(ratios) < 0.8
    assert max(ratios) > 1.2
    assert all(0.69 < one < 1.31 for one in ratios)
    assert sorted(row.prompt_tokens for row in played.rows) == sorted(one.prompt_tokens for one in plan.requests)


def test_cached_prompt_tokens_are_not_computed_again() -> None:
    cold, warm = (
        replay(Plan(ENGINE, policy(), [Request(0.0, 8000, 2, cached_prompt_tokens=cached)]), QUIET).rows[0]
        for cached in (0, 7000)
    )

    assert (warm.ttft_s or 0) < 0.3 * (cold.ttft_s or 0)


# -- pools, failures, replicas


def test_a_spot_engine_gets_nothing_after_its_notice_and_loses_what_ran_at_its_end() -> None:
    spot = EngineSpec("spot", H100, interrupted_at_s=20.0, notice_s=5.0)
    plan = Plan((spot, EngineSpec("own", H100)), policy(bulk=4), conversation(40), backlog=BULK, duration_s=40.0)

    played = replay(plan, QUIET)

    sent_s = [row.sent_s for row in played.rows if row.engine == "spot" and row.sent_s is not None]
    assert 10 < max(sent_s) < 15.0
    assert {row.outcome for row in played.rows if row.class_name == "interactive"} <= {COMPLETED, "engine_failed"}


def test_a_killed_engine_fails_what_it_showed_retries_what_it_did_not_and_comes_back() -> None:
    dying = EngineSpec("dying", RTX4090, killed_at_s=10.0, down_s=5.0)
    requests = [Request(9.999, 4000, 50), Request(9.0, 100, 500), *burst(20, 20.0)]
    plan = Plan((dying, EngineSpec("own", RTX4090)), policy(), sorted(requests, key=lambda one: one.arrival_s), seed=3)

    played = replay(plan, QUIET)

    early = [row for row in played.rows if row.arrival_s < 10]
    assert {row.outcome for row in early} <= {COMPLETED, "engine_failed"}
    assert all(row.outcome == COMPLETED for row in played.rows if row.arrival_s >= 20)
    assert {row.engine for row in played.rows if row.arrival_s >= 20} == {"dying", "own"}


def test_foreign_traffic_slows_an_engine_and_leaves_no_rows() -> None:
    foreign = [("e", Request(number * 0.05, 6000, 200)) for number in range(300)]
    plan = Plan(ENGINE, policy(), conversation(20))

    alone, beside = replay(plan, QUIET), replay(replace(plan, foreign=foreign), QUIET)

    assert len(alone.rows) == len(beside.rows)
    assert sum(row.ttft_s or 0 for row in beside.rows) > 2 * sum(row.ttft_s or 0 for row in alone.rows)


# -- determinism


def varied(seed: int = 1) -> Plan:
    engines = (EngineSpec("a", RTX4090, killed_at_s=15.0, down_s=5.0), EngineSpec("b", H100))
    return Plan(engines, policy("rules"), conversation(30), backlog=BULK, duration_s=30.0, seed=seed)


def test_the_same_seed_is_the_same_run_in_every_process_and_under_every_hash_seed() -> None:
    source = "from tests.gateway.replay.test_world import QUIET, digest, replay, varied; print(digest(replay(varied(), QUIET)))"
    digests = set()
    for hash_seed in ("0", "1", "31337"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60
        )
        assert result.returncode == 0, result.stderr
        digests.add(result.stdout)

    assert len(digests) == 1


def test_another_seed_is_another_run() -> None:
    assert digest(replay(varied(1), QUIET)) != digest(replay(varied(2), QUIET))


# -- what policies know


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_lengths_that_nobody_has_seen_change_no_decision(name: str) -> None:
    """Answers end at other times when lengths are permuted; until the first such end every decision is the same."""
    requests = conversation(20)
    lengths = [one.output_tokens for one in requests]
    random.Random(7).shuffle(lengths)
    permuted = [replace(one, output_tokens=length) for one, length in zip(requests, lengths, strict=True)]
    played, decisions = zip(*(logged(name, one) for one in (requests, permuted)), strict=True)

    first_end_s = min(row.end_s for one in played for row in one.rows)
    before = [[one for one in log if one.at_s < first_end_s + 3.0] for log in decisions]
    whole = [list(log) for log in decisions]

    assert before[0] == before[1]
    assert len(before[0]) > 2
    assert whole[0] != whole[1]


def logged(name: str, requests: Sequence[Request]) -> tuple[Played, list[Decision]]:
    decisions: list[Decision] = []
    plan = Plan(ENGINE, policy(name, total=6, bulk=4), requests, on_decision=decisions.append)
    return replay(replace(plan, backlog=Backlog([(500, 900)]), duration_s=20.0), QUIET), decisions


def test_views_and_works_have_no_field_for_true_lengths_or_engine_parameters() -> None:
    seen = {
        field.name
        for module in (vocabulary, sizing)
        for one in vars(module).values()
        if isinstance(one, type) and dataclasses.is_dataclass(one) and one is not vocabulary.Outcome
        for field in dataclasses.fields(one)
    }

    seen.discard("steps_to_overflow")  # a forecast of ours, told with a decision

    assert "prompt_tokens" in seen
    assert not [name for name in seen if "output" in name or "step" in name or "length" in name or "profile" in name]


def test_conversations_return_to_the_engine_that_has_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = tuple(EngineSpec(name, H100, EngineOptions(prefix_caching=True)) for name in ("e0", "e1", "e2"))
    plan = Plan(engines, policy(), talks(40, 60))

    def typical_s() -> float:
        return statistics.median(row.ttft_s for row in replay(plan, QUIET).rows if row.ttft_s is not None)

    remembered_s = typical_s()
    monkeypatch.setattr(Request, "prefix", "")

    assert remembered_s < 0.7 * typical_s()


def test_predictions_that_know_what_engines_hold_keep_conversations_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = tuple(EngineSpec(name, H100, EngineOptions(prefix_caching=True)) for name in ("e0", "e1"))
    text = "version: 1\nclasses: {interactive: {ttft_sla_s: 0.3}}\nsizing: {policy: token_ledger}\n"
    plan = Plan(engines, parse(text, "test.yaml"), talks(50, 90))

    def late() -> int:
        return sum(row.ttft_s is None or row.ttft_s > 0.3 for row in replay(plan, QUIET).rows)

    known = late()
    monkeypatch.setattr(PrefixTrust, "told", property(lambda _: False, lambda _, told: None))

    assert known < 0.5 * late()


def test_of_an_engine_without_a_prefix_cache_predictions_count_on_nothing_after_a_while() -> None:
    expected: list[int] = []

    def note(decision: Decision) -> None:
        expected.append(decision.cached_tokens)

    replay(Plan(ENGINE, policy("token_ledger"), talks(20, 90), on_decision=note), QUIET)

    assert max(expected[: len(expected) // 4]) > 500
    assert max(expected[-20:]) < 100


@pytest.mark.parametrize(("on_infeasible", "late"), [("shed", 0), ("late", 5)])
def test_a_prompt_that_would_make_those_to_come_late_is_refused_though_nothing_waits(
    on_infeasible: str, late: int
) -> None:
    people = [Request(number / 3, 2000, 20, class_name="interactive") for number in range(200)]
    giant = Request(50.1, 100_000, 20, class_name="interactive")
    rules = policy("token_ledger", more=f", ttft_sla_per_1k_tokens_s: 0.2, on_infeasible: {on_infeasible}")

    played = replay(Plan(ENGINE, rules, sorted([*people, giant], key=lambda one: one.arrival_s)), QUIET)

    rows = [row for row in played.rows if row.prompt_tokens == 2000]
    (one,) = (row for row in played.rows if row.prompt_tokens != 2000)
    assert one.outcome == ("shed" if on_infeasible == "shed" else COMPLETED)
    too_late = sum(row.first_token_s is None or row.first_token_s - row.arrival_s > 1.4 for row in rows)
    assert (too_late >= late) if late else (too_late == 0)


def test_bulk_that_may_wait_a_while_costs_half_the_energy() -> None:
    rng, arrivals, at_s = random.Random(1), [], 0.0
    while at_s < 120:
        at_s += rng.expovariate(2.0)
        arrivals.append(Request(at_s, 300, rng.randint(50, 250), class_name="bulk"))

    def spent_j(wait_s: str) -> float:
        text = f"""
version: 1
classes: {{interactive: {{ttft_sla_s: 1.0}}, bulk: {{max_age_s: null}}}}
sizing: {{policy: token_ledger, token_ledger: {{burst_wait_s: {wait_s}}}}}
"""
        played = replay(Plan(ENGINE, parse(text, "test.yaml"), arrivals), QUIET)
        assert {row.outcome for row in played.rows} == {COMPLETED}
        return played.energy_j or 0.0

    assert 0 < spent_j("20") < 0.6 * spent_j("null")


def test_a_slowdown_is_measured_by_what_the_first_tokens_of_a_model_took() -> None:
    """Alone the engine takes 0.3 s for the prompt, not the 0.1 s that are usual: later works are promised accordingly."""
    engine = load_profile("a100x4_llama3_70b_tp4")
    text = "version: 1\nclasses: {interactive: {ttft_slowdown: 2.0}, bulk: {}}\n"
    requests = [Request(10.0 * number, 1000, 20, class_name="interactive") for number in range(8)]
    plan = Plan((EngineSpec("e", engine),), parse(text, "p"), requests)
    alone_s = alone([engine])(1000)

    deadlines: list[float] = []

    class Listening(FixedLimits):
        def on_event(self, event: sizing.SizingEvent, now_s: float) -> None:
            if isinstance(event, sizing.Granted):
                deadlines.append((event.work.deadline_s or 0.0) - event.work.accepted_s)

    played = replay(replace(plan, sizing=Listening), QUIET)

    assert alone_s > 1.5 * usual_alone_s(1000)
    assert deadlines[0] == pytest.approx(2 * usual_alone_s(1000))
    assert deadlines[-1] == pytest.approx(2 * alone_s, rel=0.1)
    found = figures(played, plan.policy, duration_s=80.0, alone=alone([engine]))
    assert found.attainment == 1.0


# -- speed


def test_an_engine_wakes_for_what_it_shows_and_not_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []
    begin = Engine._begin

    def counted(engine: Engine) -> None:
        begun.append(engine._clock_s)
        begin(engine)

    monkeypatch.setattr(Engine, "_begin", counted)

    played = replay(Plan(ENGINE, policy(), conversation(30.0)), QUIET)

    assert len(begun) < 10 * len(played.rows) < sum(row.output_tokens for row in played.rows) / 10


@pytest.mark.many  # a bar for a whole core of today: `make test` counts steps instead, which no slow machine changes
def test_five_requests_a_second_replay_three_hundred_times_as_fast_as_they_came() -> None:
    plan = Plan(ENGINE, policy(), segment(read_trace(TRACE), rate_scale=5 / 4.78, from_s=0.0, duration_s=570.0))

    def speed() -> float:
        """Replayed seconds for a second of CPU; a machine that others keep busy makes even that longer."""
        begun_s = time.process_time()
        return replay(plan, QUIET).end_s / (time.process_time() - begun_s)

    assert any(speed() > 300 for _ in range(3))


def test_the_control_tick_tells_sizing_policies_how_much_waits() -> None:
    told: list[int] = []

    class Listening(FixedLimits):
        def on_event(self, event: sizing.SizingEvent, now_s: float) -> None:
            if isinstance(event, sizing.Sampled):
                told.append(event.queued.get("interactive", 0))

    replay(Plan(ENGINE, policy(total=2, bulk=1), burst(9, output=200), sizing=Listening), QUIET)

    assert max(told) == 7
