"""Survival functions of output lengths: what they say, against counting, and who is counted."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.estimators.survival import (
    BINS,
    EDGES,
    KEYS_KEPT,
    LONGEST_TOKENS,
    PRIOR,
    Lengths,
    Survival,
    bin_of,
    levels,
)

KEYS = levels("t", "bulk", "m")


def learned(lengths: Sequence[int], *, censored: bool = False) -> Survival:
    found = Lengths()
    for length in lengths:
        found.ended(KEYS, length, censored=censored)
    found.rebuild(())
    return found.of(KEYS)


def drawn(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [max(1, round(rng.lognormvariate(5.3, 0.6))) for _ in range(count)]


@pytest.mark.parametrize("shown", [0, 50, 200, 400])
@pytest.mark.parametrize("horizon", [64, 256, 1024])
def test_the_growth_of_a_running_work_is_what_counting_says(shown: int, horizon: int) -> None:
    lengths = drawn(3000)
    counted = [min(one - shown, horizon) for one in lengths if one > shown]

    mean, variance, survives = learned(lengths).growth(shown, horizon)

    running = [one for one in lengths if one > shown]
    assert survives == pytest.approx(sum(one > shown + horizon for one in running) / len(running), abs=0.05)
    assert mean == pytest.approx(fmean(counted), rel=0.05)
    spread = fmean((one - fmean(counted)) ** 2 for one in counted)
    assert variance**0.5 == pytest.approx(spread**0.5, rel=0.15, abs=3)


@given(st.integers(0, 2 * LONGEST_TOKENS))
def test_a_length_lies_in_its_bin(tokens: int) -> None:
    at = bin_of(tokens)

    assert 0 <= at < BINS
    assert EDGES[at] <= tokens or at == 0
    assert tokens < EDGES[at + 1] or at == BINS - 1


@given(st.integers(0, 40_000), st.floats(0, 5000), st.floats(0, 5000), st.sampled_from([PRIOR, learned(drawn(200))]))
def test_growth_is_within_the_horizon_and_grows_with_it(
    shown: int, horizon: float, more: float, survival: Survival
) -> None:
    mean, variance, survives = survival.growth(shown, horizon)
    further, _, _ = survival.growth(shown, horizon + more)

    assert 0 <= mean <= horizon
    assert 0 <= survives <= 1
    assert variance >= 0
    assert further >= mean - 1e-6 * (1 + horizon)


def test_works_cut_off_by_their_limit_would_have_run_longer() -> None:
    cut_off = Lengths()
    for _ in range(500):
        cut_off.ended(KEYS, 100, censored=True)
        cut_off.ended(KEYS, 100, censored=False)
    cut_off.rebuild(())

    assert cut_off.of(KEYS).growth(0, 1024)[0] > 1.5 * learned([100] * 1000).growth(0, 1024)[0]


def test_long_works_that_still_run_count_before_the_first_of_them_ends() -> None:
    lengths = Lengths()
    for _ in range(30):
        lengths.ended(KEYS, 20, censored=False)
    lengths.rebuild(())
    blind = lengths.of(KEYS).growth(0, 1024)[0]

    lengths.rebuild([(KEYS, 600)] * 60)

    assert lengths.of(KEYS).growth(0, 1024)[0] > 3 * blind


def test_a_tenant_is_believed_once_it_has_twenty_works_and_its_class_until_then() -> None:
    lengths = Lengths()
    for _ in range(500):
        lengths.ended(levels("usual", "bulk", "m"), 1000, censored=False)
    new = levels("new", "bulk", "m")
    for _ in range(2):
        lengths.ended(new, 10, censored=False)
    lengths.rebuild(())
    few = lengths.of(new).growth(0, 1024)[0]
    for _ in range(200):
        lengths.ended(new, 10, censored=False)
    lengths.rebuild(())

    assert few > 500
    assert lengths.of(new).growth(0, 1024)[0] < 200
    assert lengths.of(levels("usual", "bulk", "m")).growth(0, 1024)[0] > 800


def test_lengths_of_whom_nothing_was_heard_for_the_longest_are_forgotten_first() -> None:
    lengths = Lengths()
    regular = levels("regular", "bulk", "m")
    for number in range(KEYS_KEPT + 500):
        lengths.ended(levels(f"once{number}", "bulk", "m"), 1000, censored=False)
        if number % 5 == 0:
            lengths.ended(regular, 10, censored=False)

    lengths.rebuild(())

    assert lengths.of(regular).growth(0, 1024)[0] < 100
    assert lengths.of(regular) is not lengths.of(levels("once0", "bulk", "m"))
    assert lengths.of(levels("once0", "bulk", "m")) is lengths.of(regular[1:])


def test_tables_made_part_by_part_are_those_made_at_once_with_what_runs_first() -> None:
    lengths, at_once = Lengths(), Lengths()
    for number in range(100):
        for one in (lengths, at_once):
            one.ended(levels(f"t{number}", "bulk", "m"), 10 * number, censored=False)
    runs = levels("t99", "bulk", "m")
    at_once.rebuild([(runs, 5)])

    lengths.begin([(runs, 5)])
    first = lengths.go_on(3)
    early = lengths.of(runs).at_edges, lengths.of(levels("t0", "bulk", "m")).at_edges
    while lengths.go_on(7):
        pass

    assert first
    assert early == (at_once.of(runs).at_edges, at_once.of(runs[1:]).at_edges)
    for number in range(100):
        keys = levels(f"t{number}", "bulk", "m")
        assert lengths.of(keys).at_edges == at_once.of(keys).at_edges


def test_old_lengths_fade() -> None:
    faded = learned([1000] * 500 + [10] * 8000)

    assert faded.growth(0, 1024)[0] < 60


def test_what_was_learned_survives_as_json() -> None:
    before, after = Lengths(), Lengths()
    for one in drawn(300):
        before.ended(KEYS, one, censored=False)
    before.rebuild(())

    after.restore(json.loads(json.dumps(before.snapshot())))

    assert after.of(KEYS[1:]).growth(50, 256)[0] == pytest.approx(before.of(KEYS[1:]).growth(50, 256)[0], rel=0.01)


def test_a_length_that_nobody_has_reached_is_uncertain_and_not_impossible() -> None:
    mean, variance, _ = learned([5] * 5000).growth(30_000, 64)

    assert 0 < mean <= 64
    assert variance >= 0
