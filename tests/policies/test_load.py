"""How much slower works that can wait may make an engine for a class that promises a slowdown."""

from __future__ import annotations

import pytest

from policies.limits.token_ledger.load import EASED, KEPT, MOST_BUSY, WINDOW_S, UrgentLoad

STEP_S, PROMPT_TOKENS = 0.05, 500.0


def busy(part: float, *, seconds: int = 120) -> UrgentLoad:
    """An engine whose urgent prompts take that part of its time."""
    load = UrgentLoad()
    for at_s in range(seconds):
        load.granted(int(part * PROMPT_TOKENS / STEP_S), float(at_s))
        load.look(float(at_s))
    return load


@pytest.mark.parametrize(("part", "allowed"), [(0.2, 1.47), (0.5, 1.25), (0.9, 1.04)])
def test_the_busier_the_engine_the_less_may_be_added(part: float, allowed: float) -> None:
    assert busy(part).may_be_slower(STEP_S, PROMPT_TOKENS, 1.3) == pytest.approx(allowed, abs=0.01)


def test_an_idle_engine_may_be_as_slow_as_the_promise_lets_it() -> None:
    assert UrgentLoad().may_be_slower(STEP_S, PROMPT_TOKENS, 1.3) == pytest.approx(1 + EASED * 0.3)


def test_waiting_is_made_longer_by_no_more_than_the_promise() -> None:
    part = 0.8
    slower = busy(part).may_be_slower(STEP_S, PROMPT_TOKENS, 1.2)

    waits = [one / (1 - one) for one in (part, part * slower)]
    assert waits[1] / waits[0] == pytest.approx(1 + EASED * 0.2, rel=0.02)


def test_beyond_saturation_hardly_anything_may_be_added() -> None:
    most = busy(MOST_BUSY).may_be_slower(STEP_S, PROMPT_TOKENS, 1.3)

    assert busy(3.0).may_be_slower(STEP_S, PROMPT_TOKENS, 1.3) == pytest.approx(most, abs=0.005)
    assert 1 < most < 1.03


def test_the_peak_is_remembered_through_a_quiet_time_and_forgotten_after_it() -> None:
    load = busy(0.8, seconds=60)
    before = load.peak_tokens_per_s
    for at_s in range(60, 60 + int(WINDOW_S) + 60):
        load.look(float(at_s))
    remembered = load.peak_tokens_per_s
    for at_s in range(200, 200 + KEPT):
        load.look(float(at_s))

    assert remembered == pytest.approx(before, rel=0.05)
    assert load.peak_tokens_per_s == 0
