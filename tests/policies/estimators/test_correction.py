"""First tokens that come late make the next predictions longer for a while, and within bounds."""

from __future__ import annotations

import math

import pytest

from policies.estimators.correction import BOUNDS, FADES_S, Correction


def test_nothing_seen_corrects_nothing() -> None:
    assert Correction().factor(100.0) == 1.0


@pytest.mark.parametrize(("ratio", "factor"), [(1.2, 1.2), (0.8, 0.8), (5.0, BOUNDS[1]), (0.01, BOUNDS[0])])
def test_what_comes_so_much_later_each_time_is_learned_within_bounds(ratio: float, factor: float) -> None:
    correction = Correction()

    for number in range(40):
        correction.saw(0.1 * ratio, 0.1, 100.0 + number / 10)

    assert correction.factor(104.0) == pytest.approx(factor, abs=0.02)


def test_one_wild_first_token_moves_little() -> None:
    correction = Correction()

    correction.saw(60.0, 0.1, 100.0)

    assert 1.0 < correction.factor(100.0) < 1.1


def test_what_was_seen_long_ago_is_forgotten() -> None:
    correction = Correction()
    for _ in range(40):
        correction.saw(0.14, 0.1, 100.0)

    assert correction.factor(100.0 + FADES_S) == pytest.approx(1 + 0.4 / math.e, abs=0.01)
    assert correction.factor(1000.0) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("seen_s", [math.nan, math.inf, -1.0, 0.0])
def test_nonsense_teaches_nothing(seen_s: float) -> None:
    correction = Correction()

    correction.saw(seen_s, 0.1, 100.0)

    assert correction.factor(100.0) == 1.0
