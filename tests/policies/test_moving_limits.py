"""The sizing policies that move one limit an engine: aimd, gradient, rules. One test a row of the rules' table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from policies.limits.aimd import Aimd
from policies.limits.gradient import Gradient
from policies.limits.rules import (
    Readings,
    Rules,
    Vote,
    decide,
    gpu_row,
    heat_row,
    latency_row,
    memory_row,
    queue_row,
)
from policies.schema import RulesSizing
from policies.sizing import Finished, FirstToken, Sampled, SizingPolicy
from policies.vocabulary import Outcome, Result
from tests.policies.worlds import NOW_S, engine, fresh, policy, work

TEXT = """
version: 1
classes: {chat: {ttft_sla_s: 1}, night: {}}
sizing:
  policy: aimd
  aimd: {start: 10, least: 4, most: 40, backoff: 0.5, cut_every_s: 2}
  gradient: {start: 20, least: 4, most: 40, headroom: 4, tolerance: 1.5, smoothing: 0.2}
  rules: {start: 10, least: 4, most: 40, grow_by: 0.1, shrink_to: 0.5}
"""
POLICY = policy(TEXT)
FIELDS = RulesSizing()


def limit(sizing: SizingPolicy) -> int | None:
    return sizing.window(engine(), "chat").requests


def busy(in_flight: int = 40) -> Sampled:
    return Sampled(engine(in_flight={"chat": in_flight}))


@pytest.mark.parametrize("make", [Aimd, Gradient])
def test_a_limit_is_used_by_sequences_as_it_is_kept(make: type[Aimd | Gradient]) -> None:
    sizing = make(POLICY)
    start = limit(sizing) or 0
    sizing.on_event(Sampled(engine(in_flight={"chat": 2}, extra_sequences={"chat": 14})), NOW_S)

    sizing.on_event(FirstToken(work("w", deadline_s=NOW_S + 1), "e0", 0.1), NOW_S)
    sizing.on_event(FirstToken(work("w", deadline_s=NOW_S + 1), "e0", 0.1), NOW_S)

    assert (limit(sizing) or 0) > start


# -- aimd


def test_aimd_adds_one_for_a_first_token_in_time() -> None:
    aimd = Aimd(POLICY)
    aimd.on_event(busy(), NOW_S)

    aimd.on_event(FirstToken(work("w", deadline_s=NOW_S + 1), "e0", 0.1), NOW_S)

    assert limit(aimd) == 11


def test_aimd_does_not_grow_a_limit_that_nobody_uses() -> None:
    aimd = Aimd(POLICY)
    aimd.on_event(busy(4), NOW_S)

    aimd.on_event(FirstToken(work("w", deadline_s=NOW_S + 1), "e0", 0.1), NOW_S)

    assert limit(aimd) == 10


def test_aimd_cuts_once_for_a_burst_of_late_first_tokens() -> None:
    aimd = Aimd(POLICY)

    for late_s in (0.1, 0.5, 1.9):
        aimd.on_event(FirstToken(work("w", deadline_s=NOW_S), "e0", 3.0), NOW_S + late_s)
    once = limit(aimd)
    aimd.on_event(FirstToken(work("w", deadline_s=NOW_S), "e0", 3.0), NOW_S + 2.2)

    assert (once, limit(aimd)) == (5, 4)


# -- gradient


def test_gradient_grows_by_its_headroom_while_latency_stands() -> None:
    gradient = Gradient(POLICY)
    gradient.on_event(busy(), NOW_S)

    for _ in range(5):
        gradient.on_event(FirstToken(work("w"), "e0", 0.2), NOW_S)

    assert limit(gradient) == 24


def test_gradient_shrinks_when_first_tokens_take_longer_than_the_tolerance() -> None:
    gradient = Gradient(POLICY)
    gradient.on_event(busy(), NOW_S)
    for _ in range(20):
        gradient.on_event(FirstToken(work("w"), "e0", 0.2), NOW_S)
    before = limit(gradient)

    for _ in range(20):
        gradient.on_event(FirstToken(work("w"), "e0", 2.0), NOW_S)

    assert before is not None
    assert (limit(gradient) or 0) < before / 2


def test_gradient_stays_where_the_limit_is_not_used() -> None:
    gradient = Gradient(POLICY)
    gradient.on_event(busy(9), NOW_S)

    gradient.on_event(FirstToken(work("w"), "e0", 9.0), NOW_S)

    assert limit(gradient) == 20


# -- rules, row by row


@pytest.mark.parametrize(
    ("seen", "vote"),
    [
        (Readings(queued=1, gpu_busy_fraction=0.69), Vote.GROW),
        (Readings(queued=0, gpu_busy_fraction=0.69), None),
        (Readings(gpu_busy_fraction=0.99, arrivals=100, completions=91), Vote.HOLD),
        (Readings(gpu_busy_fraction=0.99, arrivals=100, completions=80), None),
        (Readings(gpu_busy_fraction=0.99, arrivals=None, completions=9), None),
        (Readings(queued=1, gpu_busy_fraction=None), None),
    ],
)
def test_the_row_of_gpu_and_backlog(seen: Readings, vote: Vote | None) -> None:
    assert gpu_row(seen, FIELDS) is vote


@pytest.mark.parametrize(
    ("seen", "vote"),
    [
        (Readings(kv_used_fraction=0.2), Vote.GROW),
        (Readings(kv_used_fraction=0.65), Vote.GROW),
        (Readings(kv_used_fraction=0.4), Vote.HOLD),
        (Readings(kv_used_fraction=0.6), Vote.HOLD),
        (Readings(kv_used_fraction=0.8), None),
        (Readings(kv_used_fraction=0.5, kv_soon_fraction=1.0), Vote.SHRINK),
        (Readings(kv_used_fraction=None), None),
    ],
)
def test_the_row_of_memory(seen: Readings, vote: Vote | None) -> None:
    assert memory_row(seen, FIELDS) is vote


@pytest.mark.parametrize(
    ("seen", "vote"),
    [
        (Readings(ttft_missed=False), Vote.GROW),
        (Readings(ttft_missed=False, queue_grows=True), None),
        (Readings(ttft_missed=True), None),
        (Readings(ttft_missed=True, queue_grows=True), Vote.SHRINK),
        (Readings(ttft_missed=None, queue_grows=True), None),
    ],
)
def test_the_row_of_latency(seen: Readings, vote: Vote | None) -> None:
    assert latency_row(seen, FIELDS) is vote


@pytest.mark.parametrize(
    ("seen", "vote"),
    [
        (Readings(heat_margin_c=3.0), Vote.SHRINK),
        (Readings(heat_margin_c=3.1, power_fraction=0.94), None),
        (Readings(power_fraction=0.95), Vote.SHRINK),
        (Readings(heat_margin_c=20.0, slowed=1.0), Vote.SHRINK),
        (Readings(slowed=0.0), None),
        (Readings(), None),
    ],
)
def test_the_row_of_heat_and_power(seen: Readings, vote: Vote | None) -> None:
    assert heat_row(seen, FIELDS) is vote


@pytest.mark.parametrize(
    ("seen", "vote"),
    [
        (Readings(queued=4, kv_used_fraction=0.5), Vote.GROW),
        (Readings(queued=4, kv_used_fraction=0.75), None),
        (Readings(queued=20, kv_used_fraction=0.75, kv_soon_fraction=0.8), Vote.GROW),
        (Readings(queued=20, kv_used_fraction=0.75, kv_soon_fraction=0.95), Vote.HOLD),
        (Readings(queued=65, kv_used_fraction=0.95), Vote.SHRINK),
        (Readings(queued=0, kv_used_fraction=0.1), None),
    ],
)
def test_the_row_of_queue_and_memory(seen: Readings, vote: Vote | None) -> None:
    assert queue_row(seen, FIELDS) is vote


def test_shrink_wins_over_hold_and_hold_over_grow() -> None:
    growing = Readings(queued=1, gpu_busy_fraction=0.1, kv_used_fraction=0.2, ttft_missed=False)

    votes = [
        decide(growing, FIELDS),
        decide(replace(growing, kv_used_fraction=0.5), FIELDS),
        decide(replace(growing, kv_used_fraction=0.5, heat_margin_c=0.0), FIELDS),
        decide(Readings(), FIELDS),
    ]

    assert votes == [Vote.GROW, Vote.HOLD, Vote.SHRINK, Vote.HOLD]


# -- rules, fed with events


def tick(rules: Rules, at_s: float, kv: float, queued: int = 0, in_flight: int = 2) -> None:
    view = replace(engine(in_flight={"chat": in_flight}), kv_used_fraction=fresh(kv), gpu_busy_fraction=fresh(0.9))
    rules.on_event(Sampled(view, {"chat": queued}), NOW_S + at_s)


def test_rules_grow_and_shrink_by_their_factors() -> None:
    rules = Rules(POLICY)

    tick(rules, 0.0, kv=0.1)
    grown = limit(rules)
    tick(rules, 1.0, kv=0.7)

    assert (grown, limit(rules)) == (11, 5)  # at this pace memory is full in half a second


def test_rules_judge_no_more_often_than_they_are_told() -> None:
    rules = Rules(POLICY)

    for number in range(4):
        tick(rules, number * 0.25, kv=0.1)

    assert limit(rules) == 11


def test_rules_shrink_when_the_queue_grows_and_first_tokens_are_late() -> None:
    rules = Rules(POLICY)
    tick(rules, 0.0, kv=0.5, queued=1)
    rules.on_event(FirstToken(work("w", deadline_s=NOW_S), "e0", 2.0), NOW_S + 0.5)

    tick(rules, 1.0, kv=0.5, queued=9)

    assert limit(rules) == 5


def test_rules_hold_when_arrivals_and_completions_agree() -> None:
    rules = Rules(POLICY)
    done = Outcome("w", "chat", "t", "m", "e0", Result.COMPLETED, "", 200, 1, 10, 11, 2.0, ttft_s=1.0)
    for number in range(31):
        tick(rules, number * 1.0, kv=0.8)
        rules.on_event(Finished(work("w"), "e0", done), NOW_S + number)
    before = limit(rules)

    tick(rules, 31.0, kv=0.8)

    assert before == limit(rules)


def test_a_slow_engine_lengthens_the_horizon_of_the_memory_row() -> None:
    slow, quick = Rules(POLICY), Rules(POLICY)
    for rules, total_s in ((slow, 20.0), (quick, 1.1)):
        done = Outcome("w", "chat", "t", "m", "e0", Result.COMPLETED, "", 200, 1, 10, 11, total_s, ttft_s=1.0)
        rules.on_event(Finished(work("w"), "e0", done), NOW_S)
        tick(rules, 0.0, kv=0.72)

        tick(rules, 1.0, kv=0.77)

    assert (limit(slow), limit(quick)) == (5, 10)


@pytest.mark.parametrize("make", [Aimd, Gradient, Rules])
def test_a_limit_stays_within_its_bounds_and_survives_a_restart(make: type[Aimd | Gradient | Rules]) -> None:
    sizing = make(POLICY)
    sizing.restore({"limits": {"e0": 1e9, "e1": -5, "bad": "x"}})

    windows = [sizing.window(engine(name), "chat").requests for name in ("e0", "e1")]

    assert windows == [40, 4]
    assert json.loads(json.dumps(sizing.snapshot()))["limits"] == {"e0": 40, "e1": 4}
