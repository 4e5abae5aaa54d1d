"""Programs and people are told apart by how their requests come and go, and nothing is told without evidence."""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.behaviour import KEYS_MAX, Behaviours, Pattern

SEEDS = range(5)


def played(
    arrivals: Iterator[tuple[float, bool]],
    *,
    requests: int,
    service_s: Callable[[], float],
    after_end: Callable[[], float] | None = None,
    left: float = 0.0,
    rng: random.Random,
    processes: int = 1,
) -> list[Pattern | None]:
    """What was told at each arrival. after_end: each end leads to an arrival so much later (a closed loop)."""
    behaviours = Behaviours(processes=processes)
    told: list[Pattern | None] = []
    events: list[tuple[float, int, str, bool]] = []
    for number, (at_s, streamed) in zip(range(requests), arrivals, strict=False):
        heapq.heappush(events, (at_s, number, "arrival", streamed))
    number = requests
    while events and len(told) < requests:
        at_s, _, what, streamed = heapq.heappop(events)
        number += 1
        if what == "arrival":
            told.append(behaviours.arrived("k", streamed=streamed, now_s=at_s))
            heapq.heappush(events, (at_s + service_s(), number, "end", streamed))
        else:
            behaviours.ended("k", left=rng.random() < left, now_s=at_s)
            if after_end is not None:
                heapq.heappush(events, (at_s + after_end(), number, "arrival", streamed))
    return told


def at_once(count: int, *, streamed: bool = False) -> Iterator[tuple[float, bool]]:
    return iter([(0.001 * number, streamed) for number in range(count)])


def poisson(rate: float, rng: random.Random, *, streamed: float = 0.0) -> Iterator[tuple[float, bool]]:
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s, rng.random() < streamed


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("in_flight", [4, 8, 64, 400])
def test_a_program_that_keeps_a_fixed_number_in_flight_is_told(seed: int, in_flight: int) -> None:
    rng = random.Random(seed)

    told = played(
        at_once(in_flight),
        requests=600 + 10 * in_flight,
        service_s=lambda: rng.lognormvariate(1, 0.8),
        after_end=lambda: rng.uniform(0.001, 0.05),
        rng=rng,
    )

    assert set(told[-200:]) == {Pattern.LOOP}
    assert not [one for one in told[:60] if one]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_that_sends_rounds_and_waits_for_each_is_told(seed: int) -> None:
    rng, behaviours, now_s = random.Random(seed), Behaviours(), 0.0
    told: list[Pattern | None] = []

    for _ in range(60):
        told += [behaviours.arrived("k", streamed=False, now_s=now_s + 0.001 * number) for number in range(32)]
        ends = sorted(now_s + rng.uniform(1, 9) for _ in range(32))
        for at_s in ends:
            behaviours.ended("k", left=False, now_s=at_s)
        now_s = ends[-1] + 0.05

    assert set(told[-200:]) == {Pattern.LOOP}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("in_flight", [1, 4, 16, 100, 400])
def test_the_requests_of_many_people_behind_one_key_are_never_taken_for_a_program(seed: int, in_flight: int) -> None:
    rng = random.Random(seed)

    told = played(poisson(in_flight / 3, rng), requests=4000, service_s=lambda: rng.lognormvariate(0.8, 0.7), rng=rng)

    assert Pattern.LOOP not in told


@pytest.mark.parametrize("seed", SEEDS)
def test_a_few_people_who_think_between_their_requests_are_no_program(seed: int) -> None:
    rng = random.Random(seed)

    told = played(
        at_once(6),
        requests=1500,
        service_s=lambda: rng.uniform(1, 6),
        after_end=lambda: rng.expovariate(1 / 4),
        rng=rng,
    )

    assert Pattern.LOOP not in told


@pytest.mark.parametrize("why", ["alone", "streamed", "left"])
def test_what_may_be_somebodys_stays_so(why: str) -> None:
    rng = random.Random(1)

    told = played(
        at_once(1 if why == "alone" else 16, streamed=why == "streamed"),
        requests=600,
        service_s=lambda: rng.uniform(0.5, 2),
        after_end=lambda: 0.01,
        left=0.1 if why == "left" else 0.0,
        rng=rng,
    )

    assert Pattern.LOOP not in told[100:]


def test_a_part_of_a_programs_requests_is_enough_where_there_are_several_processes() -> None:
    rng = random.Random(2)
    ask = {"requests": 300, "service_s": lambda: rng.uniform(1, 2), "after_end": lambda: 0.01, "rng": rng}

    assert played(at_once(2), processes=4, **ask)[-1] is Pattern.LOOP  # type: ignore[arg-type]
    assert played(at_once(2), processes=1, **ask)[-1] is None  # type: ignore[arg-type]


def test_somebody_who_reads_what_is_streamed_and_thinks_is_told() -> None:
    rng = random.Random(3)

    told = played(
        at_once(1, streamed=True),
        requests=40,
        service_s=lambda: rng.uniform(2, 9),
        after_end=lambda: rng.uniform(3, 30),
        rng=rng,
    )

    assert set(told[-20:]) == {Pattern.PERSON}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans(), st.floats(0, 10)), max_size=80))
def test_any_order_of_events_is_borne_and_survives_as_json(events: list[tuple[str, bool, bool, float]]) -> None:
    behaviours, now_s = Behaviours(), 0.0
    for name, arrives, flag, later_s in events:
        now_s += later_s
        if arrives:
            behaviours.arrived(name, streamed=flag, now_s=now_s)
        else:
            behaviours.ended(name, left=flag, now_s=now_s)
    state = json.loads(json.dumps(behaviours.snapshot()))

    successor = Behaviours()
    successor.restore({**state, "of a later version": 1})

    assert successor.snapshot() == behaviours.snapshot()
    assert all(successor.in_flight(name) == 0 for name in "abc")


@pytest.mark.parametrize(
    "state", [{}, {"keys": 7}, {"keys": {"a": 7, "b": [1], "c": [float("nan")] * 8, "d": ["x"] * 8}}]
)
def test_a_snapshot_that_cannot_be_read_is_left(state: dict[str, object]) -> None:
    behaviours = Behaviours()

    behaviours.restore(state)

    assert len(behaviours) == 0


def test_keys_are_bounded_and_the_least_recent_one_is_forgotten() -> None:
    behaviours = Behaviours()
    for number in range(KEYS_MAX):
        behaviours.arrived(str(number), streamed=False, now_s=0.0)
    behaviours.arrived("0", streamed=False, now_s=1.0)
    behaviours.arrived("new", streamed=False, now_s=1.0)

    assert len(behaviours) == KEYS_MAX
    assert behaviours.in_flight("0") == 2
    assert behaviours.in_flight("1") == 0
