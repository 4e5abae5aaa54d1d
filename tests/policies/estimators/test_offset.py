"""The offset filter corrects the ledger by telemetry, as of the poll and never below nothing."""

from __future__ import annotations

import pytest

from policies.estimators.offset import OffsetFilter


def test_foreign_traffic_is_added_after_a_few_polls() -> None:
    offset = OffsetFilter()
    for poll in range(20):
        offset.tick(10_000, poll * 0.5)
        offset.polled(14_000, poll * 0.5)

    assert offset.used_tokens(10_000, 40_000) == pytest.approx(14_000, rel=0.01)


def test_shared_prefixes_are_taken_off_and_what_is_used_is_never_negative() -> None:
    offset = OffsetFilter()
    for poll in range(20):
        offset.tick(10_000, poll * 0.5)
        offset.polled(6_000, poll * 0.5)

    assert offset.used_tokens(10_000, 40_000) == pytest.approx(6_000, rel=0.01)
    assert offset.used_tokens(1_000, 40_000) == 0


def test_a_poll_is_compared_with_the_ledger_of_its_time_and_counts_once() -> None:
    offset = OffsetFilter()
    offset.tick(10_000, 1.0)
    offset.tick(30_000, 1.5)

    seen = [offset.polled(10_000, 1.05), offset.polled(10_000, 1.05)]

    assert seen == [True, False]
    assert offset.offset_tokens == 0


def test_a_prompt_without_a_first_token_is_neither_foreign_nor_shared_wherever_it_is() -> None:
    offset = OffsetFilter()
    for poll, used in enumerate((10_000, 13_000, 18_000, 18_000)):
        offset.tick(18_000, float(poll), pending=8_000)
        offset.polled(used, float(poll))

    assert offset.offset_tokens == 0


def test_what_came_or_went_around_the_poll_is_no_offset() -> None:
    offset = OffsetFilter()
    for poll in range(20):
        offset.tick(12_000, poll * 0.5 - 0.1)
        offset.tick(9_000, poll * 0.5 + 0.15)  # a work of 3,000 ended meanwhile: perhaps before the poll
        offset.polled(9_000 if poll % 2 else 12_000, poll * 0.5)

    assert offset.offset_tokens == 0


def test_a_tick_that_is_further_off_than_the_engine_is_behind_says_nothing_of_the_poll() -> None:
    offset = OffsetFilter()
    offset.tick(4_000, 0.0)
    offset.tick(10_000, 5.0)

    offset.polled(4_000, 5.0)

    assert offset.offset_tokens < 0


def test_the_polling_period_is_found_out() -> None:
    offset = OffsetFilter()
    for poll in range(40):
        offset.polled(0, poll * 2.0)

    assert offset.period_s == pytest.approx(2.0, rel=0.05)


def test_foreign_traffic_behind_pending_prompts_is_seen_as_far_as_they_do_not_explain_it() -> None:
    offset = OffsetFilter()
    for poll in range(60):
        offset.tick(18_000, float(poll), pending=8_000)
        offset.polled(20_000, float(poll))

    assert offset.offset_tokens == pytest.approx(2_000)
    for poll in range(60, 120):  # nothing is pending any more: all of it shows
        offset.tick(10_000, float(poll))
        offset.polled(20_000, float(poll))
    assert offset.offset_tokens == pytest.approx(10_000)
