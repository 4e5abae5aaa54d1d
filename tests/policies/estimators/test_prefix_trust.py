"""How far an engine is believed to have what it was sent: by what its answers say, else by its counter of hits."""

from __future__ import annotations

import pytest

from policies.estimators.prefix_trust import HALF_TOKENS, START, STRETCH_TOKENS, PrefixTrust


def test_who_has_said_nothing_is_believed_by_default_and_told_apart() -> None:
    trust = PrefixTrust()

    assert trust.part == pytest.approx(START)
    assert not trust.told


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_answers_that_tell_of_their_hits_are_believed(part: float) -> None:
    trust = PrefixTrust()
    for _ in range(200):
        trust.answered(4000, round(4000 * part))

    assert trust.part == pytest.approx(part, abs=0.02)
    assert trust.told


def test_more_found_than_expected_makes_up_for_nothing_that_was_not_found() -> None:
    trust = PrefixTrust()
    for _ in range(200):
        trust.answered(4000, 0)
        trust.answered(4000, 400_000)

    assert trust.part == pytest.approx(0.5, abs=0.02)


def test_an_answer_of_which_nothing_was_expected_says_only_that_they_tell() -> None:
    trust = PrefixTrust()
    trust.answered(0, 0)

    assert trust.part == pytest.approx(START)
    assert trust.told


@pytest.mark.parametrize(("each", "part"), [(0, 0.0), (1000, 0.25), (4000, 1.0), (9000, 1.0)])
def test_a_counter_of_hits_is_compared_with_what_was_expected_meanwhile(each: int, part: float) -> None:
    trust, hits = PrefixTrust(), 7_000_000
    trust.counted(hits)
    for _ in range(300):
        trust.taken_in(4000)
        hits += each
        trust.counted(hits)

    assert trust.part == pytest.approx(part, abs=0.02)


def test_hits_that_are_counted_a_poll_before_their_first_token_is_seen_are_not_lost() -> None:
    trust, hits = PrefixTrust(), 0.0
    trust.counted(hits)
    for _ in range(300):
        hits += 3000
        trust.counted(hits)
        trust.taken_in(3000)
        trust.counted(hits)

    assert trust.part > 0.95


def test_hits_while_nothing_was_expected_prove_little() -> None:
    trust = PrefixTrust()
    for _ in range(50):
        trust.answered(4000, 0)
    doubted = PrefixTrust()
    doubted._expected, doubted._found = trust._expected, trust._found
    doubted.counted(0)
    doubted.counted(50_000_000)
    doubted.taken_in(STRETCH_TOKENS)
    doubted.counted(50_000_000)

    assert doubted.part < 3 * STRETCH_TOKENS / HALF_TOKENS


def test_a_counter_that_falls_begins_anew() -> None:
    trust = PrefixTrust()
    trust.counted(1_000_000)
    trust.taken_in(100_000)
    trust.counted(10)

    assert trust.part == pytest.approx(START)


def test_beside_answers_that_tell_the_counter_says_nothing() -> None:
    trust = PrefixTrust()
    for _ in range(200):
        trust.counted(0)
        trust.taken_in(8000)
        trust.answered(8000, 8000)

    assert trust.part > 0.99
