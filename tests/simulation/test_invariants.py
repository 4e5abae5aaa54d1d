"""Each invariant is broken once, so that none of them is a check that cannot fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.vocabulary import Action, Decision, Outcome, Result
from tests.simulation.invariants import EngineLook, InvariantBroken, Invariants, Look, Seen

ENGINE = EngineLook("e", serving=True, in_flight={"bulk": 1}, window={"bulk": 2})
LOOK = Look(1.0, (ENGINE,))
OUTCOME = Outcome("w", "bulk", "t", "m", "e", Result.COMPLETED, "", 200, 1, 10, 5, 1.0)
DECISION = Decision(Action.DISPATCH, 1.0, "v1", engine="e", work_id="w")


def accepted() -> Invariants:
    invariants = Invariants()
    invariants.accepted.add("r")
    return invariants


def test_a_world_in_order_passes() -> None:
    invariants = accepted()

    invariants.look(LOOK)
    invariants.decided(DECISION, policy_version="v1", serving=True)
    invariants.settled("r", OUTCOME)
    invariants.answered("r", Seen(200, complete=True, tokens=5), max_tokens=5)
    invariants.over({"works": 0})


def test_in_flight_may_stay_above_a_window_that_shrank_but_not_grow_there() -> None:
    invariants = Invariants()
    invariants.look(replace(LOOK, engines=(replace(ENGINE, in_flight={"bulk": 2}),)))
    shrunk = replace(ENGINE, window={"bulk": 1})
    invariants.look(replace(LOOK, engines=(replace(shrunk, in_flight={"bulk": 2}),)))

    with pytest.raises(InvariantBroken, match="its window is 1"):
        invariants.look(replace(LOOK, engines=(replace(shrunk, in_flight={"bulk": 3}),)))


def test_an_engine_that_is_not_up_gets_nothing_new() -> None:
    invariants = Invariants()
    down = replace(ENGINE, serving=False)
    invariants.look(replace(LOOK, engines=(replace(down, in_flight={}),)))

    with pytest.raises(InvariantBroken, match="not up"):
        invariants.look(replace(LOOK, engines=(down,)))


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (replace(LOOK, engines=(replace(ENGINE, in_flight={"bulk": -1}),)), "-1 bulk works"),
    ],
)
def test_a_look_that_must_not_be(broken: Look, told: str) -> None:
    with pytest.raises(InvariantBroken, match=told):
        Invariants().look(broken)


def test_a_decision_under_another_policy_is_told() -> None:
    with pytest.raises(InvariantBroken, match="in force is v2"):
        Invariants().decided(DECISION, policy_version="v2", serving=True)


def test_a_decision_under_an_epoch_that_is_over_is_told() -> None:
    invariants = Invariants()
    invariants.decided_under(7, "a places a work", 1.0)

    with pytest.raises(InvariantBroken, match="7 has decided already"):
        invariants.decided_under(6, "b places a work", 1.0)


def test_a_second_outcome_is_told() -> None:
    invariants = accepted()
    invariants.settled("r", OUTCOME)

    with pytest.raises(InvariantBroken, match="two outcomes"):
        invariants.settled("r", replace(OUTCOME, result=Result.CANCELLED))


def test_an_outcome_that_nobody_asked_for_is_told() -> None:
    with pytest.raises(InvariantBroken, match="never accepted"):
        Invariants().settled("r", OUTCOME)


@pytest.mark.parametrize(
    ("outcome", "seen", "told"),
    [
        (OUTCOME, Seen(), "no answer at all"),
        (OUTCOME, Seen(200, complete=False), "saw Seen"),
        (replace(OUTCOME, result=Result.ENGINE_FAILED), Seen(200, complete=True), "saw Seen"),
        (OUTCOME, Seen(200, complete=True, failed=True), "saw Seen"),
        (OUTCOME, Seen(200, complete=True, tokens=4), "are billed"),
    ],
)
def test_an_answer_that_does_not_fit_its_outcome_is_told(outcome: Outcome, seen: Seen, told: str) -> None:
    invariants = accepted()
    invariants.settled("r", outcome)

    with pytest.raises(InvariantBroken, match=told):
        invariants.answered("r", seen, max_tokens=5)


def test_an_engine_that_goes_on_for_nobody_is_told() -> None:
    invariants = Invariants()
    invariants.engine_is_left_alone("e", running=1, in_flight=0, reachable=True, now_s=0.0)
    invariants.engine_is_left_alone("e", running=1, in_flight=0, reachable=True, now_s=1.9)

    with pytest.raises(InvariantBroken, match="0 are in flight"):
        invariants.engine_is_left_alone("e", running=1, in_flight=0, reachable=True, now_s=2.1)


def test_an_accepted_request_without_an_outcome_is_told() -> None:
    with pytest.raises(InvariantBroken, match="have no outcome: r"):
        accepted().over({})


def test_what_is_left_over_is_told() -> None:
    with pytest.raises(InvariantBroken, match="works in the store"):
        Invariants().over({"works in the store": 1})
