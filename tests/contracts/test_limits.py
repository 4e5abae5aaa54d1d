"""One suite for every sizing policy in the registry: what the dispatcher may rely on whichever is in force."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from policies.limits import LIMITS, FollowingSizing
from policies.schema import Policy
from policies.sizing import Finished, FirstToken, Sampled, SizingPolicy
from policies.vocabulary import EngineView, Guard, Quality, Reading, Work
from tests.policies.worlds import CLASSES, NOW_S, engine, engines, fresh, policy, work, works

POLICY = policy()
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@pytest.fixture(params=sorted(LIMITS))
def sizing(request: pytest.FixtureRequest) -> SizingPolicy:
    return LIMITS[request.param](POLICY)


@QUICK
@given(works, engines)
def test_a_verdict_admits_exactly_when_every_guard_passed(
    sizing: SizingPolicy, some: list[Work], views: list[EngineView]
) -> None:
    verdicts = [sizing.admit(one, view, NOW_S) for one in some for view in views]

    for verdict in verdicts:
        assert verdict.guards
        assert verdict.admitted == all(guard.passed for guard in verdict.guards)
        assert verdict.admitted == (verdict.binding is Guard.NONE)
        assert all(guard.passed == (guard.value <= guard.threshold) for guard in verdict.guards)
        assert len({guard.guard for guard in verdict.guards}) == len(verdict.guards)


@QUICK
@given(works, engines)
def test_asking_twice_changes_nothing(sizing: SizingPolicy, some: list[Work], views: list[EngineView]) -> None:
    once = [sizing.admit(one, view, NOW_S) for one in some for view in views]

    again = [sizing.admit(one, view, NOW_S) for one in some for view in views]

    assert once == again


@QUICK
@given(works, engines)
def test_an_admitted_work_stays_inside_the_window(
    sizing: SizingPolicy, some: list[Work], views: list[EngineView]
) -> None:
    for one in some:
        for view in views:
            bound = sizing.window(view, one.class_name).requests
            if bound is not None and sizing.admit(one, view, NOW_S).admitted:
                assert view.in_flight.get(one.class_name, 0) + 1 <= bound


@QUICK
@given(works, engines, st.integers(0, 5000), st.integers(0, 3))
def test_a_larger_work_is_never_admitted_where_a_smaller_is_not(
    sizing: SizingPolicy, some: list[Work], views: list[EngineView], tokens: int, sequences: int
) -> None:
    for one in some:
        larger = work(
            one.id,
            one.class_name,
            prompt_tokens=one.prompt_tokens + tokens,
            sequences=one.sequences + sequences,
            max_tokens=None if one.max_tokens is None else one.max_tokens + tokens,
            accepted_s=one.accepted_s,
            deadline_s=one.deadline_s,
        )
        for view in views:
            assert sizing.admit(one, view, NOW_S).admitted or not sizing.admit(larger, view, NOW_S).admitted


@QUICK
@given(st.sampled_from(CLASSES), works)
def test_an_idle_engine_takes_any_one_work(sizing: SizingPolicy, class_name: str, some: list[Work]) -> None:
    assume(some)

    verdicts = [sizing.admit(work("w", class_name, sequences=one.sequences), engine(), NOW_S) for one in some]

    assert all(verdict.admitted for verdict in verdicts)


def test_patient_classes_alone_never_take_the_room_of_the_urgent(sizing: SizingPolicy) -> None:
    in_flight: dict[str, int] = {}
    for class_name in ("night", "scrap"):
        while sizing.admit(work("w", class_name), engine(in_flight=in_flight), NOW_S).admitted:
            in_flight[class_name] = in_flight.get(class_name, 0) + 1

    verdict = sizing.admit(work("w", "chat"), engine(in_flight=in_flight), NOW_S)

    assert sum(in_flight.values()) > 0
    assert verdict.admitted


@pytest.mark.parametrize(("held", "sequences", "admitted"), [(0, 50, True), (2, 50, True), (2, 1, True), (3, 1, False)])
def test_fixed_counts_the_sequences_of_a_work_and_starves_none(held: int, sequences: int, admitted: bool) -> None:
    beside = engine(in_flight={"night": 1} if held else {}, extra_sequences={"night": max(0, held - 1)})

    verdict = LIMITS["fixed"](POLICY).admit(work("w", "night", sequences=sequences), beside, NOW_S)

    assert verdict.admitted is admitted


@pytest.mark.parametrize("name", ["aimd", "gradient"])
def test_a_learned_limit_counts_the_sequences_of_what_runs(name: str) -> None:
    sizing = LIMITS[name](POLICY)
    room = sizing.window(engine(), "chat").requests
    assert room is not None
    full = engine(in_flight={"chat": 1}, extra_sequences={"chat": room - 1})
    nearly = engine(in_flight={"chat": 1}, extra_sequences={"chat": room - 2})

    assert not sizing.admit(work("w", "chat"), full, NOW_S).admitted
    assert sizing.admit(work("w", "chat"), nearly, NOW_S).admitted


def test_a_steady_urgent_load_does_not_shut_patient_work_out(sizing: SizingPolicy) -> None:
    verdict = sizing.admit(work("w", "night"), engine(in_flight={"chat": 3}, seats=fresh(4)), NOW_S)

    assert verdict.admitted


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_what_was_learned_survives_as_json_and_unknown_fields_are_ignored(name: str) -> None:
    sizing, successor = LIMITS[name](POLICY), LIMITS[name](POLICY)
    for event in (FirstToken(work("w"), "e0", 0.2), Finished(work("w"), "e0", None), Sampled(engine())):
        sizing.on_event(event, NOW_S)

    successor.restore({**json.loads(json.dumps(sizing.snapshot())), "of a later version": 1})

    assert successor.window(engine(), "chat") == sizing.window(engine(), "chat")


def test_fixed_records_of_each_guard_the_reading_with_the_least_room() -> None:
    fixed = LIMITS["fixed"](POLICY)

    verdict = fixed.admit(work("w", "night"), engine(in_flight={"chat": 3, "night": 3}, seats=fresh(16)), NOW_S)

    readings = [(guard.guard, guard.value, guard.threshold, guard.passed) for guard in verdict.guards]
    assert readings == [
        (Guard.WINDOW, 4, 3, False),
        (Guard.SEATS, 7, 16, True),
    ]
    assert verdict.binding is Guard.WINDOW


def test_fixed_gives_an_engine_the_windows_written_for_it() -> None:
    fixed = LIMITS["fixed"](POLICY)

    bounds = [fixed.window(engine(name), "night").requests for name in ("e0", "e1")]

    assert bounds == [3, 1]


@pytest.mark.parametrize(("seats", "chat", "night"), [(1, 1, 1), (2, 2, 1), (4, 4, 3), (100, 8, 3)])
def test_fixed_keeps_a_seat_free_of_patient_work(seats: int, chat: int, night: int) -> None:
    fixed = LIMITS["fixed"](POLICY)

    bounds = [fixed.window(engine(seats=fresh(seats)), name).requests for name in ("chat", "night")]

    assert bounds == [chat, night]


@pytest.mark.parametrize(
    ("reading", "bound"),
    [
        (Reading(None, 1.0, Quality.MISSING), 8),
        (Reading(2.0, 60.0, Quality.STALE), 2),
        (Reading(2.0, 1.0, Quality.ABSURD), 8),
        (Reading(0.0, 1.0, Quality.FRESH), 8),
    ],
)
def test_fixed_reads_unknown_seats_as_unknown_and_old_ones_as_they_were(reading: Reading, bound: int) -> None:
    assert LIMITS["fixed"](POLICY).window(engine(seats=reading), "chat").requests == bound


def test_the_sizing_in_force_follows_the_document() -> None:
    following = FollowingSizing(POLICY)

    following.adopt(policy("version: 1\nclasses: {chat: {ttft_sla_s: 1}}\nsizing: {fixed: {total: 2}}\n"))

    assert following.window(engine(), "chat").requests == 2


class Learner:
    """A sizing policy that learns one number, for the test of what `adopt` hands on."""

    def __init__(self, policy: Policy) -> None:
        self.inner = LIMITS["fixed"](policy)
        self.seen = 0
        self.admit, self.window, self.learned_step = self.inner.admit, self.inner.window, self.inner.learned_step

    def on_event(self, event: FirstToken | Finished | Sampled, now_s: float) -> None:
        self.seen += 1

    def snapshot(self) -> dict[str, object]:
        return {"seen": self.seen}

    def restore(self, state: object) -> None:
        assert isinstance(state, dict)
        self.seen = state["seen"]


def test_what_was_learned_goes_along_when_the_document_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.limits.LIMITS", {"fixed": Learner})
    following = FollowingSizing(POLICY)
    following.on_event(Sampled(engine()), NOW_S)

    following.adopt(POLICY)

    assert following.snapshot() == {"fixed": {"seen": 1}}
