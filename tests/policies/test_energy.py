"""Energy mode: the curve of joules per token, and when an engine is open for works that can wait."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.limits.token_ledger import TokenLedger
from policies.limits.token_ledger.energy import Bursts, EnergyCurve
from policies.sizing import Sampled
from policies.vocabulary import EngineView, Guard
from tests.policies.worlds import NOW_S, engine, fresh, policy, work

SAVING = policy(
    "version: 1\nclasses: {chat: {ttft_sla_s: 0.5}, night: {}}\n"
    "sizing: {policy: token_ledger, token_ledger: {burst_wait_s: 20}}\n"
)


def curve(joules_by_sequences: dict[int, float]) -> EnergyCurve:
    """That has seen 1,000 tokens at each."""
    found, joules, tokens, now_s = EnergyCurve(), 0.0, 0.0, 0.0
    for sequences, each in joules_by_sequences.items():
        found.saw(joules, tokens, 0, now_s := now_s + 1)  # a window that begins idle says nothing
        found.saw(joules, tokens, sequences, now_s := now_s + 1)
        joules, tokens = joules + 1000 * each, tokens + 1000
        found.saw(joules, tokens, sequences, now_s := now_s + 1)
    return found


@pytest.mark.parametrize(
    ("joules", "efficient"),
    [
        ({}, None),
        ({8: 0.45}, 12),
        ({8: 0.45, 64: 0.12}, 91),
        ({8: 0.45, 64: 0.075, 512: 0.070, 724: 0.071}, 64),
        ({8: 0.45, 64: 0.12, 512: 0.070, 724: 0.1}, 512),
    ],
)
def test_an_efficient_batch_is_the_smallest_as_good_as_the_best_or_beyond_what_was_seen(
    joules: dict[int, float], efficient: int | None
) -> None:
    assert curve(joules).efficient() == efficient


def test_only_past_the_best_batch_tokens_are_dear() -> None:
    found = curve({8: 0.45, 64: 0.12, 512: 0.1, 724: 0.2})

    assert found.past_best(8) is None
    assert found.past_best(512) is None
    assert found.past_best(724) == pytest.approx((0.2, 0.11))


def test_counters_that_fell_teach_nothing() -> None:
    found = EnergyCurve()
    found.saw(1000.0, 1000.0, 8, 0.0)

    found.saw(10.0, 2000.0, 8, 1.0)

    assert found.efficient() is None


def test_an_engine_opens_for_an_efficient_batch_and_closes_when_none_waits() -> None:
    bursts = Bursts(20.0)
    seen: list[bool] = []
    for queued, held in ((0, 0), (2, 0), (8, 0), (0, 8), (1, 6), (2, 6)):
        bursts.tick(queued=queued, held=held, efficient=8, now_s=float(len(seen)))
        seen.append(bursts.open)

    assert seen == [False, False, True, False, False, True]


def test_nobody_waits_for_a_batch_for_longer_than_is_allowed() -> None:
    bursts = Bursts(20.0)
    opened = []
    for now_s in range(-1, 30):
        bursts.tick(queued=now_s >= 0, held=0, efficient=8, now_s=float(now_s))
        opened.append(bursts.open)

    assert opened.index(True) == 21


def test_while_nothing_is_known_of_energy_nobody_waits() -> None:
    bursts = Bursts(20.0)

    bursts.tick(queued=1, held=0, efficient=None, now_s=0.0)

    assert bursts.open


def view(*, joules: float, tokens: float, running: int = 0) -> EngineView:
    told = engine("e0", {"night": running} if running else {})
    return replace(told, gpu_energy_j_total=fresh(joules), generation_tokens_total=fresh(tokens))


def test_bulk_is_kept_for_a_dense_batch_and_people_are_not() -> None:
    ledger = TokenLedger(SAVING)
    for second in range(3):
        ledger.on_event(Sampled(view(joules=500.0 * second, tokens=1000.0 * second, running=8)), NOW_S + second)
    idle = view(joules=1500.0, tokens=3000.0)
    ledger.on_event(Sampled(idle, {"night": 2}), NOW_S + 4)

    kept = ledger.admit(work("n", "night"), idle, NOW_S + 4)
    person = ledger.admit(work("c", "chat"), idle, NOW_S + 4)
    ledger.on_event(Sampled(idle, {"night": 12}), NOW_S + 5)
    let_in = ledger.admit(work("n", "night"), idle, NOW_S + 5)

    assert kept.binding is Guard.ENERGY
    assert [one.value for one in kept.guards if one.guard is Guard.ENERGY] == [10]
    assert person.admitted
    assert let_in.admitted


def test_an_idle_engine_that_is_kept_for_a_dense_batch_says_of_no_prompt_that_it_is_too_long() -> None:
    ledger = TokenLedger(SAVING)
    for second in range(3):
        ledger.on_event(Sampled(view(joules=500.0 * second, tokens=1000.0 * second, running=8)), NOW_S + second)
    allowed = replace(view(joules=1500.0, tokens=3000.0, running=1), on_credit=1, prefill_tokens=2000)
    ledger.on_event(Sampled(allowed, {"night": 2}), NOW_S + 4)

    kept = ledger.admit(work("n", "night", prompt_tokens=9000), allowed, NOW_S + 4)

    assert [one.guard for one in kept.guards if not one.passed] == [Guard.ENERGY]
    assert kept.longest_tokens == math.inf


def test_an_engine_whose_energy_cannot_be_read_keeps_nobody() -> None:
    ledger = TokenLedger(SAVING)
    ledger.on_event(Sampled(engine("e0"), {"night": 1}), NOW_S)

    assert ledger.admit(work("n", "night"), engine("e0"), NOW_S).admitted
