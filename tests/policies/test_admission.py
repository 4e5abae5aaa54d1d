"""The bound on waiting works, and a Retry-After that can be believed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import presets
from policies.admission import RETRY_AFTER_MAX_S, Shed, admit, retry_after_s

BALANCED = presets.load()
RATES = st.none() | st.floats(0, 1e9) | st.just(math.nan)
DRAWS = st.floats(0, 1, exclude_max=True)


def at(depth: int) -> Shed | None:
    return admit("interactive", depth=depth, policy=BALANCED, served_per_s=50.0, draw=0.5)


def test_a_work_may_wait_while_the_class_is_below_its_bound() -> None:
    assert at(999) is None


@pytest.mark.parametrize(
    ("depth", "works", "fits"), [(968, 32, True), (969, 32, False), (0, 2000, True), (1, 1000, False)]
)
def test_the_works_of_one_request_find_room_together_or_none_does(depth: int, works: int, fits: bool) -> None:
    refused = admit("interactive", depth=depth, policy=BALANCED, served_per_s=50.0, draw=0.5, works=works)

    assert (refused is None) is fits


def test_a_work_past_the_bound_is_shed_with_the_bound_and_the_hint_told() -> None:
    refused = at(1000)

    assert refused == Shed(
        "queue_full", 20, "class interactive has 1000 requests waiting: at most 1000 may; retry in 20 s"
    )


def test_the_hint_is_the_time_in_which_the_works_ahead_are_served() -> None:
    assert retry_after_s(100, bound=1000, served_per_s=10.0, draw=0.5) == 10


def test_nothing_served_at_all_gives_the_longest_hint() -> None:
    assert retry_after_s(5, bound=1000, served_per_s=0.0, draw=0.999) == RETRY_AFTER_MAX_S


def test_an_unknown_rate_still_gives_a_hint_that_grows_with_the_queue() -> None:
    hints = [retry_after_s(depth, bound=1000, served_per_s=None, draw=0.5) for depth in (10, 500, 1000)]

    assert hints == [1, 15, 30]


def test_a_short_queue_of_an_unknown_rate_is_not_taken_for_a_long_wait() -> None:
    assert [retry_after_s(bound, bound=bound, served_per_s=None, draw=0.5) for bound in (1, 3, 15, 1000)] == [
        2,
        6,
        30,
        30,
    ]


@given(st.integers(0, 10**9), st.integers(1, 10**7), RATES, DRAWS)
def test_a_hint_is_whole_seconds_from_1_to_60(depth: int, bound: int, rate: float | None, draw: float) -> None:
    hint = retry_after_s(depth, bound=bound, served_per_s=rate, draw=draw)

    assert isinstance(hint, int)
    assert 1 <= hint <= 60


@given(st.integers(0, 10**6), st.integers(0, 10**6), RATES, DRAWS)
def test_a_longer_queue_never_gives_a_shorter_hint(one: int, other: int, rate: float | None, draw: float) -> None:
    short, long = sorted((one, other))

    hints = [retry_after_s(depth, bound=1000, served_per_s=rate, draw=draw) for depth in (short, long)]

    assert hints == sorted(hints)


def test_the_draw_spreads_those_who_were_shed_together() -> None:
    hints = {retry_after_s(300, bound=1000, served_per_s=10.0, draw=draw / 10) for draw in range(10)}

    assert min(hints) == 24
    assert max(hints) == 35
    assert len(hints) > 5


@pytest.mark.parametrize("class_name", ["bulk", "gone"])
def test_every_class_has_a_bound_even_one_that_the_policy_no_longer_names(class_name: str) -> None:
    refused = admit(class_name, depth=10_000, policy=BALANCED, served_per_s=None, draw=0.0)

    assert refused is not None
