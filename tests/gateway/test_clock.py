"""The pool clock believes the reply that can be least wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.clock import DRIFT_PER_S, SAMPLES_KEPT, PoolClock


def reply(clock: PoolClock, *, at_s: float, there_s: float, back_s: float, offset_s: float = 1000.0) -> None:
    """One TIME exchange whose request and reply took so long, with a server that is offset_s ahead."""
    clock.correct(redis_s=at_s + there_s + offset_s, sent_s=at_s, received_s=at_s + there_s + back_s)


def clock_at(now_s: float = 0.0) -> PoolClock:
    return PoolClock(lambda: now_s, offset_s=0.0)


def test_an_even_round_trip_gives_the_exact_offset() -> None:
    clock = clock_at()

    reply(clock, at_s=5, there_s=0.01, back_s=0.01)

    assert clock.offset_s == pytest.approx(1000)
    assert clock.error_s == pytest.approx(0.01)


def test_a_slow_reply_does_not_spoil_a_good_offset() -> None:
    clock = clock_at()
    reply(clock, at_s=0, there_s=0.001, back_s=0.001)

    reply(clock, at_s=5, there_s=0.4, back_s=0.001)

    assert clock.offset_s == pytest.approx(1000)
    assert clock.error_s < 0.002


def test_a_good_old_offset_is_given_up_for_a_fair_new_one_in_time() -> None:
    clock = clock_at()
    reply(clock, at_s=0, there_s=0.001, back_s=0.001)

    for i in range(SAMPLES_KEPT):
        reply(clock, at_s=5 * (i + 1), there_s=0.004, back_s=0.002)

    assert clock.offset_s == pytest.approx(1000.001)


def test_a_server_whose_clock_was_set_is_followed_at_once() -> None:
    clock = clock_at()
    reply(clock, at_s=0, there_s=0.001, back_s=0.001)

    reply(clock, at_s=5, there_s=0.02, back_s=0.02, offset_s=990.0)

    assert clock.offset_s == pytest.approx(990)


def test_before_any_reply_the_error_is_unknown() -> None:
    clock = PoolClock(lambda: 0.0)

    assert clock.error_s == float("inf")


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(-1, 1)), min_size=1, max_size=40))
def test_the_true_offset_is_within_the_error_told(trips: list[tuple[float, float, float]]) -> None:
    clock = clock_at()
    at_s, true_s = 0.0, 1000.0

    for there_s, back_s, drift in trips:
        reply(clock, at_s=at_s, there_s=there_s, back_s=back_s, offset_s=true_s)
        elapsed_s = 5 + there_s + back_s
        assert abs(clock.offset_s - true_s) <= clock.error_s + 1e-9
        true_s += drift * DRIFT_PER_S * elapsed_s / 2
        at_s += elapsed_s
