"""Credit never exceeds what the guards allow, and goes where it is used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.credit import HANDED_OUT, allot, creditable, room, split
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
        unspent=0,
        now_s=NOW_S,
    )

    assert [allowance.works for allowance in found] == [0, 0]


def test_an_allotment_stays_inside_the_guards() -> None:
    one = policy()
    sizing = build(one)
    view = engine("a")
    typical = work("w", class_name=one.precedence[0])

    found = allot(one.precedence[0], view, sizing, [1000.0] * 3, prompt_tokens=10, unspent=0, now_s=NOW_S)

    assert sum(allowance.works for allowance in found) <= room(typical, view, sizing, NOW_S) * HANDED_OUT


def test_a_class_gets_no_credit_while_one_before_it_waits() -> None:
    one = policy()
    first = one.precedence[0]

    assert creditable(one, {}) == [name for name in one.precedence if one.class_policy(name).has_ttft_objective]
    assert creditable(one, {first: 1}) == []
