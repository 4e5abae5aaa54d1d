"""How fast a queue moves, as Retry-After hints need it: while somebody waits, and not while nobody is there."""

from __future__ import annotations

import pytest

from gateway.dispatch.flow import WATCHED_S, Flow
from policies.admission import retry_after_s

NAME = "chat"


def served(flow: Flow, per_s: float, from_s: float, until_s: float) -> float:
    """Works that leave evenly; when the last one did."""
    now_s = from_s
    while now_s <= until_s:
        flow.left(NAME, now_s)
        now_s += 1 / per_s
    return now_s - 1 / per_s


@pytest.mark.parametrize("per_s", [2.0, 50.0])
def test_the_rate_is_what_left_a_second(per_s: float) -> None:
    flow = Flow()

    last_s = served(flow, per_s, 0.0, 30.0)

    assert flow.per_s(NAME, last_s) == pytest.approx(per_s, rel=0.1)


def test_nothing_is_known_of_a_class_that_was_not_watched() -> None:
    flow = Flow()
    flow.left(NAME, 0.0)

    assert flow.per_s("other", 5.0) is None
    assert flow.per_s(NAME, WATCHED_S / 2) is None


def test_time_in_which_nobody_waited_does_not_slow_the_queue_down() -> None:
    flow = Flow()
    last_s = served(flow, 10.0, 0.0, 30.0)

    flow.waits(NAME, last_s + 600)

    assert flow.per_s(NAME, last_s + 600) == pytest.approx(10.0, rel=0.1)


def test_a_trickle_says_nothing_of_how_fast_a_full_queue_moves() -> None:
    flow = Flow()
    last_s = served(flow, 1 / 60, 0.0, 600.0)

    flow.waits(NAME, last_s + 60)

    assert flow.per_s(NAME, last_s + 60) is None
    assert retry_after_s(3, bound=3, served_per_s=None, draw=0.5) == 6


def test_a_queue_that_does_not_move_is_seen_to_stand() -> None:
    flow = Flow()
    last_s = served(flow, 10.0, 0.0, 30.0)
    flow.waits(NAME, last_s)

    stuck = flow.per_s(NAME, last_s + 60)

    assert stuck is not None
    assert stuck < 0.2
