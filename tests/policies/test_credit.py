"""Credit never exceeds what the guards allow, and goes where it is used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.credit import HANDED_OUT, allot, creditable, homes, over_window, room, split, typical
from policies.limits import build
from policies.vocabulary import EngineState
from tests.policies.worlds import NOW_S, engine, policy, work


@given(st.integers(0, 200), st.lists(st.floats(0, 500), max_size=8))
def test_a_split_never_hands_out_more_than_there_is(amount: int, rates: list[float]) -> None:
    shares = split(amount, rates)

    assert len(shares) == len(rates)
    assert sum(shares) <= max(amount, 0) or not rates
    assert all(share >= 0 for share in shares)


def test_a_busy_process_gets_more_than_an_idle_one() -> None:
    busy, idle = split(10, [50.0, 0.0])

    assert busy > idle


def test_every_process_may_start_one_while_the_room_lasts() -> None:
    assert split(4, [0.0, 0.0, 0.0]) == [1, 1, 1]


def test_nothing_is_allotted_on_an_engine_that_is_not_up() -> None:
    one = policy()

    found = allot(
        one.precedence[0],
        engine("a", state=EngineState.DRAINING),
        build(one),
        [1.0, 1.0],
        prompt_tokens=100,
        unspent=[0, 0],
        now_s=NOW_S,
    )

    assert [allowance.works for allowance in found] == [0, 0]


def test_an_allotment_stays_inside_the_guards() -> None:
    one = policy()
    sizing = build(one)
    view = engine("a")
    typical = work("w", class_name=one.precedence[0])

    found = allot(one.precedence[0], view, sizing, [1000.0] * 3, prompt_tokens=10, unspent=[0] * 3, now_s=NOW_S)

    assert sum(allowance.works for allowance in found) <= room(typical, view, sizing, NOW_S) * HANDED_OUT


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 20)), min_size=1, max_size=6), st.integers(0, 6))
def test_no_process_is_given_what_another_may_use_still(holders: list[tuple[int, float]], running: int) -> None:
    one = policy()
    name = one.precedence[0]
    sizing = build(one)
    unspent = [held for held, _ in holders]
    view = engine("a", in_flight={name: running + sum(unspent)})

    found = allot(name, view, sizing, [rate for _, rate in holders], prompt_tokens=10, unspent=unspent, now_s=NOW_S)

    more = sum(max(0, one.works - held) for one, held in zip(found, unspent, strict=True))
    assert more <= room(work("w", class_name=name), view, sizing, NOW_S)


def test_a_class_gets_no_credit_while_one_before_it_waits() -> None:
    one = policy()
    first = one.precedence[0]

    assert creditable(one, {}) == [name for name in one.precedence if one.class_policy(name).has_ttft_objective]
    assert creditable(one, {first: 1}) == []


def test_an_engine_is_above_its_window_from_one_work_more_than_full_on() -> None:
    one = policy("version: 1\nclasses: {chat: {ttft_sla_s: 1}}\nsizing: {fixed: {total: 4, windows: {chat: 4}}}\n")

    above = [
        over_window(typical("chat", 10, NOW_S), engine("a", in_flight={"chat": works}), build(one), NOW_S)
        for works in (0, 3, 4, 5, 9)
    ]

    assert above == [False, False, False, True, True]


def test_whoever_has_a_floor_keeps_it_though_another_one_s_engine_has_none_to_spare_any_more() -> None:
    idle = [[0, 0], [0, 0]]

    assert homes([[1], [0]], idle, [9.0, 0.0], room=[1, 0], most=[1, 0]) == [None, 0]


def test_the_place_of_a_floor_that_is_taken_back_is_nobody_else_s_yet() -> None:
    idle = [[0, 0], [0, 0]]

    assert homes([[0, 1], []], idle, [0.0, 0.0], room=[1, 1], most=[1, 1]) == [0, None]


def test_a_floor_goes_where_the_process_runs_something_also_where_there_is_no_room() -> None:
    assert homes([[], []], [[0, 1], [0, 0]], [0.0, 0.0], room=[1, 0], most=[1, 1]) == [1, 0]


@given(st.data())
def test_no_engine_has_more_floors_than_it_may_and_no_process_more_than_one(data: st.DataObject) -> None:
    processes, engines = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    held = [data.draw(st.lists(st.integers(0, engines - 1), unique=True)) for _ in range(processes)]
    runs = [data.draw(st.lists(st.integers(0, 2), min_size=engines, max_size=engines)) for _ in range(processes)]
    free, most = (data.draw(st.lists(st.integers(0, 4), min_size=engines, max_size=engines)) for _ in range(2))

    found = homes(held, runs, [0.0] * processes, room=free, most=most)

    for one in range(engines):
        new = [at for at in range(processes) if found[at] == one and one not in held[at]]
        in_force = sum(one in places for places in held)
        assert not new or in_force + len(new) <= most[one]
        assert sum(not runs[at][one] for at in new) <= free[one]
        assert found.count(one) <= most[one]
