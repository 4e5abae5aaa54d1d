"""Arrivals: as many as the rate says, as uneven as the spread says, and the same ones for a seed."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from gateway.load.arrivals import Stretch, arrivals, bursts, staircase, steady
from gateway.load.text import prompt_of_beginnings


@pytest.mark.parametrize("cv", [0.0, 1.0, 3.0])
def test_a_steady_rate_brings_so_many_requests_with_so_uneven_gaps(cv: float) -> None:
    times = list(arrivals(steady(20.0, 1000.0), cv=cv, seed=3))

    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) == pytest.approx(20_000, rel=0.06)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.08, abs=1e-6)
    assert times == sorted(times)


def test_a_ramp_brings_half_as_many_and_most_of_them_late() -> None:
    times = list(arrivals(steady(100.0, 10.0, ramp_s=10.0), cv=0.0, seed=1))

    assert len(times) == 500
    assert sum(time_s < 5 for time_s in times) == 125


def test_a_staircase_has_each_rate_for_as_long() -> None:
    times = list(arrivals(staircase([1, 10, 100], 10.0), cv=0.0, seed=1))

    counts = [sum(step * 10 <= time_s < step * 10 + 10 for time_s in times) for step in range(3)]
    assert counts == pytest.approx([10, 100, 1000], abs=1)


def test_bursts_come_and_go_and_end_in_time() -> None:
    found = bursts(1.0, 50.0, 25.0, low_s=8.0, high_s=2.0)

    assert found == [
        Stretch(2.0, 50.0, 50.0),
        Stretch(8.0, 1.0, 1.0),
        Stretch(2.0, 50.0, 50.0),
        Stretch(8.0, 1.0, 1.0),
        Stretch(2.0, 50.0, 50.0),
        Stretch(3.0, 1.0, 1.0),
    ]


def test_the_same_seed_draws_the_same_arrivals_and_another_does_not() -> None:
    first, again, other = (list(arrivals(steady(5.0, 60.0), cv=1.0, seed=seed)) for seed in (7, 7, 8))

    assert first == again
    assert first != other


def test_prompts_of_a_trace_begin_alike_where_it_says_so() -> None:
    first = prompt_of_beginnings(600, 1, (11, 12), 256)
    second = prompt_of_beginnings(900, 2, (11, 13), 256)

    shared = 255  # words of a beginning of 256 tokens, whose number takes two
    assert first.split()[:shared] == second.split()[:shared]
    assert first.split()[shared : shared + 3] != second.split()[shared : shared + 3]
    assert abs(len(first.split()) - 600) <= 6
