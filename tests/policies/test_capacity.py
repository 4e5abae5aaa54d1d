"""What is said to fit now is what would be placed, one input after another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.capacity import MOST, Fit, fit, largest_batch
from policies.limits import LIMITS
from policies.placement import Candidate, suited
from policies.schema import ClassPolicy
from policies.vocabulary import EngineState, EngineView, Guard
from tests.policies.worlds import NOW_S, engine, engines, fresh, policy, work

POLICY = policy()


@pytest.mark.parametrize("name", sorted(LIMITS))
@given(engines, st.sampled_from(["chat", "night"]), st.integers(1, 5000))
def test_so_many_fit_as_find_room_one_after_another(
    name: str, views: list[EngineView], class_name: str, prompt_tokens: int
) -> None:
    sizing = LIMITS[name](POLICY)
    one = work("", class_name, prompt_tokens=prompt_tokens)

    found = fit(one, views, sizing, NOW_S)

    placed = 0
    for view in suited(one, views):
        candidate, here = Candidate(view), 0
        while here < MOST and sizing.admit(one, candidate.view, NOW_S).admitted:
            candidate.take(one)
            here += 1
        placed += here
    assert found.inputs == (0 if found.too_long else placed)


def test_the_guard_that_holds_the_next_one_back_is_told() -> None:
    sizing = LIMITS["fixed"](POLICY)

    assert fit(work("", "chat"), [engine(in_flight={"chat": 3}, seats=fresh(5))], sizing, NOW_S) == Fit(2, Guard.SEATS)


def test_nothing_fits_where_no_engine_may_take_it() -> None:
    sizing = LIMITS["fixed"](POLICY)

    assert fit(work("", "chat"), [engine(state=EngineState.DOWN)], sizing, NOW_S) == Fit(0)


@pytest.mark.parametrize(("prompt_tokens", "fits"), [(4095, True), (4096, False), (1_000_000, False)])
def test_what_no_engines_context_can_hold_does_not_fit(prompt_tokens: int, *, fits: bool) -> None:
    sizing = LIMITS["fixed"](POLICY)
    views = [engine("short", max_model_len=fresh(2048)), engine("long", max_model_len=fresh(4096))]

    found = fit(work("", "chat", prompt_tokens=prompt_tokens), views, sizing, NOW_S)

    assert (found.inputs > 0) is fits
    assert found.too_long is not fits


def test_an_engine_that_does_not_tell_its_context_may_hold_any_prompt() -> None:
    sizing = LIMITS["fixed"](POLICY)

    assert fit(work("", "chat", prompt_tokens=10**6), [engine()], sizing, NOW_S).inputs > 0


@pytest.mark.parametrize(
    ("waiting", "accepted"), [(0, 65_536), (1, 65_536), (68, 65_536), (69, 31 * 8), (99, 8), (100, 0), (120, 0)]
)
def test_the_largest_batch_is_what_the_places_left_can_hold(waiting: int, accepted: int) -> None:
    one = ClassPolicy(ttft_sla_s=1.0, max_queue=100)

    assert largest_batch(one, waiting=waiting, parts_at_once=32, inputs_max=65_536) == accepted
