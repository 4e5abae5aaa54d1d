"""The memory that patient works leave free: enough that urgent ones to come are seldom late for it, and no more."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.limits.token_ledger.reserve import BELIEVED_RATE, Reserve, Shocks

PROMPTS = [
    200,
    400,
    700,
    800,
    900,
    900,
    1000,
    1000,
    1000,
    1100,
    1100,
    1200,
    1200,
    1300,
    1400,
    1500,
    1700,
    2000,
    2600,
    4080,
]
MEAN = sum(PROMPTS) / len(PROMPTS)
LENGTHS = st.lists(st.integers(1, 200_000), min_size=1, max_size=60)


def kept(
    prompts: list[int] | None = None,
    *,
    arrivals: int = 60,
    ending_per_s: float = 8000.0,
    patience_s: float = 1.0,
    spare_tokens: float = 0.0,
    risk: float = 0.01,
) -> float:
    reserve = Reserve()
    shocks = Shocks(prompts or PROMPTS)
    told = {"ending_per_s": ending_per_s, "patience_s": patience_s, "spare_tokens": spare_tokens, "risk": risk}
    reserve.look(shocks, now_s=0.0, **told)
    for number in range(arrivals):
        reserve.granted(60.0 * (number + 1) / (arrivals + 1))
    reserve.look(shocks, now_s=60.0, **told)
    return reserve.tokens


@pytest.mark.parametrize("room", [0, 1000, 3000, 4085, 6000, 9000])
def test_the_chance_is_that_of_each_pair_of_prompts_one_behind_the_other(room: int) -> None:
    arrivals_per_s, rate = 0.5, 2000.0
    behind = [max(0, one + other - room) / rate for one, other in product(PROMPTS, PROMPTS)]
    by_hand = sum(one > room for one in PROMPTS) / len(PROMPTS) + arrivals_per_s * sum(behind) / len(behind)

    assert Shocks(PROMPTS).late(room, arrivals_per_s / rate) == pytest.approx(by_hand)


def test_with_the_reserve_few_come_too_late_for_memory_in_a_played_queue() -> None:
    rng, rate, arrivals_per_s, patience_s = random.Random(1), 1500.0, 1.0, 0.5
    ending_per_s = rate / BELIEVED_RATE + arrivals_per_s * MEAN
    tokens = kept(ending_per_s=ending_per_s, patience_s=patience_s)
    late, free, now_s = 0, tokens, 0.0
    for _ in range(20_000):
        gap_s = rng.expovariate(arrivals_per_s)
        now_s, free = now_s + gap_s, min(tokens, free + ending_per_s * gap_s)
        prompt = rng.choice(PROMPTS)
        late += prompt > free + ending_per_s * patience_s
        free -= prompt

    assert 0 < late / 20_000 < 0.01


def test_more_is_kept_where_more_come_less_ends_or_less_time_is_left() -> None:
    usual = kept()

    assert 0 < usual < 4080
    assert kept(arrivals=120) > usual
    assert kept(ending_per_s=5000.0) > usual
    assert kept(patience_s=0.2) > usual
    assert kept(risk=0.001) > usual
    assert kept(spare_tokens=500.0) == pytest.approx(usual - 500, abs=8)


def test_nothing_is_kept_where_memory_comes_free_faster_than_it_is_taken() -> None:
    assert kept(ending_per_s=100_000.0) == 0


def test_where_nothing_ends_and_nobody_can_wait_the_longest_prompt_has_room() -> None:
    assert kept(ending_per_s=0.0, patience_s=0.0) == pytest.approx(4080)


def test_a_prompt_of_which_there_is_one_in_a_thousand_is_not_kept_room_for() -> None:
    rare = [1000] * 999 + [100_000]

    assert kept(rare, arrivals=1, ending_per_s=5000.0, patience_s=0.0) < 5000


def test_an_arrival_counts_for_a_minute() -> None:
    reserve, shocks = Reserve(), Shocks(PROMPTS)
    told = {"ending_per_s": 4000.0, "patience_s": 1.0, "spare_tokens": 0.0, "risk": 0.01}
    reserve.look(shocks, now_s=0.0, **told)
    for number in range(120):
        reserve.granted(number / 2)
    reserve.look(shocks, now_s=60.0, **told)
    busy = reserve.tokens
    reserve.look(shocks, now_s=200.0, **told)

    assert reserve.tokens < busy


def test_no_more_arrivals_are_kept_than_count_though_nobody_looks() -> None:
    reserve = Reserve()
    for second in range(3600):
        reserve.granted(float(second))

    assert len(reserve._arrivals) == 61


@given(LENGTHS, st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1.0))
def test_more_room_never_makes_more_late(prompts: list[int], one: float, other: float, per_token: float) -> None:
    shocks = Shocks(prompts)
    less, more = sorted((one, other))

    assert 0 <= shocks.late(more, per_token) <= shocks.late(less, per_token) + 1e-9


@given(LENGTHS, st.floats(-1e5, 1e6), st.floats(0, 100), st.floats(0, 1e6), st.integers(0, 500))
def test_what_is_kept_lies_between_nothing_and_the_longest_prompt(
    prompts: list[int], ending_per_s: float, patience_s: float, spare_tokens: float, arrivals: int
) -> None:
    tokens = kept(
        prompts, arrivals=arrivals, ending_per_s=ending_per_s, patience_s=patience_s, spare_tokens=spare_tokens
    )

    assert 0 <= tokens <= max(prompts)
