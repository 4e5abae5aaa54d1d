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


def test_prompts_whose_answers_show_nothing_are_neither_foreign_nor_shared_wherever_they_are() -> None:
    offset = OffsetFilter()
    for poll, used in enumerate((10_000, 13_000, 18_000, 18_000)):
        offset.tick(18_000, float(poll), pending=8_000, unseen=8_000)
        offset.polled(used, float(poll))

    assert offset.offset_tokens == 0


def test_the_polling_period_is_found_out() -> None:
    offset = OffsetFilter()
    for poll in range(40):
        offset.polled(0, poll * 2.0)

    assert offset.period_s == pytest.approx(2.0, rel=0.05)


def test_prompts_that_will_show_a_first_token_are_left_out_until_then() -> None:
    offset = OffsetFilter()
    for poll in range(60):
        offset.tick(18_000, float(poll), pending=8_000)
        offset.polled(10_000, float(poll))

    assert offset.offset_tokens == pytest.approx(0)
    for poll in range(60, 120):
        offset.tick(18_000, float(poll), pending=8_000)
        offset.polled(12_000, float(poll))
    assert offset.offset_tokens == pytest.approx(2_000)
