"""What a prompt takes alone: from the quick first tokens of late."""

from __future__ import annotations

import pytest

from policies.estimators.alone import KEPT, SIZES_KEPT, Alone
from policies.schema import usual_alone_s


def test_nothing_is_known_of_a_model_without_first_tokens() -> None:
    assert Alone().seconds("m", 1000) is None


def test_waiting_behind_others_does_not_count() -> None:
    alone = Alone()

    for number in range(KEPT):
        alone.first_token("m", 1000, 0.1 if number % 8 == 0 else 0.9)

    assert alone.seconds("m", 1000) == pytest.approx(0.1)


def test_a_size_that_was_not_seen_is_as_far_from_usual_as_the_nearest() -> None:
    alone = Alone()
    alone.first_token("m", 100, 2 * usual_alone_s(100))
    alone.first_token("m", 10_000, 3 * usual_alone_s(10_000))

    assert alone.seconds("m", 200) == pytest.approx(2 * usual_alone_s(200))
    assert alone.seconds("m", 5000) == pytest.approx(3 * usual_alone_s(5000))
    assert alone.seconds("other", 200) is None


def test_a_faster_engine_is_believed_as_soon_as_it_shows() -> None:
    alone = Alone()
    for _ in range(4):
        alone.first_token("m", 1000, 0.5)

    for _ in range(KEPT // 8):
        alone.first_token("m", 1000, 0.1)

    assert alone.seconds("m", 1000) == pytest.approx(0.1)


def test_no_more_sizes_are_kept_than_its_bound() -> None:
    alone = Alone()

    for number in range(2 * SIZES_KEPT):
        alone.first_token(f"m{number}", 1000, 0.1)

    assert alone.seconds("m0", 1000) is None
    assert alone.seconds(f"m{2 * SIZES_KEPT - 1}", 1000) == pytest.approx(0.1)


def test_an_absurd_time_is_not_learned() -> None:
    alone = Alone()

    alone.first_token("m", 1000, 0.0)

    assert alone.seconds("m", 1000) is None
