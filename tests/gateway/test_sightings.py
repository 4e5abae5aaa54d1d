"""What an engine shows beyond the works of processes in contact: it bounds what silent ones run, and is never too little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import Measured, Sample, Signal
from gateway.dispatch.sightings import KEPT_S, LOOKS, Sightings

T = 100.0


def sample(running: float | None, waiting: float | None = 0.0) -> Sample:
    values = {Signal.RUNNING: running, Signal.WAITING: waiting}
    return Sample(T, {signal: Measured(value, "test") for signal, value in values.items() if value is not None})


def look(
    seen: Sightings,
    running: float | None,
    *began_s: float,
    at_s: float = T,
    waiting: float | None = 0.0,
    read_s: float | None = None,
) -> None:
    read_s = at_s if read_s is None else read_s
    seen.look(
        "e",
        sample(running, waiting),
        asked_s=at_s,
        taken_s=read_s,
        running=lambda by_s: sum(one <= by_s for one in began_s),
    )


def test_what_nobody_in_contact_accounts_for_is_left_for_the_silent() -> None:
    seen = Sightings()

    look(seen, 5, 90.0, 95.0)

    assert seen.at_most("e", 0.0) == 3


def test_works_that_wait_in_the_engine_count_too() -> None:
    seen = Sightings()

    look(seen, 2, 90.0, waiting=3.0)

    assert seen.at_most("e", 0.0) == 4


def test_a_work_that_may_not_have_reached_the_engine_yet_explains_nothing() -> None:
    seen = Sightings()

    look(seen, 1, T - 0.1)

    assert seen.at_most("e", 0.0) == 1


def test_a_work_that_ended_after_the_poll_explains_one_and_one_that_ended_before_it_none() -> None:
    seen = Sightings()
    seen.ended("e", 90.0, T + 0.2)
    seen.ended("e", 90.0, T - 0.2)
    seen.ended("other", 90.0, T + 0.2)

    look(seen, 3)

    assert seen.at_most("e", 0.0) == 2


def test_a_poll_is_looked_at_again_when_more_has_been_heard() -> None:
    seen = Sightings()
    look(seen, 3)
    look(seen, 3, 90.0, 91.0)

    assert seen.at_most("e", 0.0) == 1


@pytest.mark.parametrize(("running", "waiting"), [(None, 0.0), (3.0, None), (None, None)])
def test_an_engine_that_does_not_tell_bounds_nothing(running: float | None, waiting: float | None) -> None:
    seen = Sightings()

    look(seen, running, waiting=waiting)

    assert seen.at_most("e", 0.0) is None


def test_an_engine_that_shows_less_than_what_surely_runs_there_is_not_believed() -> None:
    seen = Sightings()

    look(seen, 1, 90.0, 91.0)

    assert seen.at_most("e", 0.0) is None


def test_polls_from_before_a_process_fell_silent_say_nothing_of_it() -> None:
    seen = Sightings()
    look(seen, 0, at_s=T)
    look(seen, 2, at_s=T + 0.5)

    assert seen.at_most("e", T + 0.3) == 2
    assert seen.at_most("e", T + 1.0) is None


def test_an_answer_that_lay_unread_is_compared_with_what_ran_all_the_while() -> None:
    seen = Sightings()
    seen.ended("e", 90.0, T + 1.0)

    look(seen, 2, T + 0.5, read_s=T + 2.0)

    assert seen.at_most("e", 0.0) == 2


def test_old_polls_are_forgotten() -> None:
    seen = Sightings()
    look(seen, 0, at_s=T)
    for number in range(1, LOOKS + 1):
        look(seen, 2, at_s=T + number)

    assert seen.at_most("e", 0.0) == 2


def test_a_process_that_never_looks_keeps_what_ended_last_only() -> None:
    seen = Sightings()
    for number in range(1_000):
        seen.ended("e", T + number - 10, T + number)

    assert len(seen._past) == KEPT_S + 1


LIVES = st.lists(st.tuples(st.floats(90, 101), st.floats(0.01, 8)), max_size=12)


@given(ours=LIVES, silent=LIVES, heard_s=st.floats(100.2, 103))
def test_it_is_never_less_than_what_the_silent_run(
    ours: list[tuple[float, float]], silent: list[tuple[float, float]], heard_s: float
) -> None:
    """Whatever of ours the engine has, and however far we have been heard of by now."""
    seen = Sightings()
    at_poll = [begin_s <= T < begin_s + lasts_s for begin_s, lasts_s in (*ours, *silent)]
    running = []
    for begin_s, lasts_s in ours:
        if begin_s + lasts_s <= heard_s:
            seen.ended("e", begin_s, begin_s + lasts_s)
        elif begin_s <= heard_s:
            running.append(begin_s)

    look(seen, sum(at_poll), *running)

    found = seen.at_most("e", 0.0)
    assert found is not None
    assert found >= sum(at_poll[len(ours) :])
