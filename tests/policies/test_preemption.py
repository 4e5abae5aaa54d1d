"""Who gives way to a work that waits for memory alone: the newest that may, no more of them than it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from policies.preemption import PEACE_S, REQUEUES_MAX, Recall, Victim, plan_recalls
from policies.sizing import LearnedStep, SizingEvent, Window
from policies.vocabulary import Action, EngineView, Guard, GuardReading, Verdict, Work
from tests.policies.worlds import NOW_S, engine, fresh, policy, work

POLICY = policy("""
version: 1
classes:
  chat: {ttft_sla_s: 1}
  night: {}
  ledger: {preemptible: false}
""")


class Refusing:
    """A sizing policy whose guards read so: by how much each is passed over."""

    def __init__(self, *over: tuple[Guard, float]) -> None:
        self.over = over

    def admit(self, work: Work, engine: EngineView, now_s: float) -> Verdict:
        return Verdict.of(GuardReading(guard, 100.0 + over, 100.0, over <= 0) for guard, over in self.over)

    def window(self, engine: EngineView, class_name: str) -> Window:
        return Window()

    def on_event(self, event: SizingEvent, now_s: float) -> None: ...

    def learned_step(self, engine: str) -> LearnedStep | None:
        return None

    def snapshot(self) -> Mapping[str, object]:
        return {}

    def restore(self, state: Mapping[str, object]) -> None: ...


FULL = Refusing((Guard.KV, 1500.0), (Guard.SEATS, -1.0))
PRESSING = work("u", "chat", accepted_s=NOW_S - 0.3, deadline_s=NOW_S + 0.7)


def victim(id: str, *, age_s: float, tokens: int = 1000, class_name: str = "night", attempt: int = 1) -> Victim:
    return Victim(work(id, class_name), attempt, NOW_S - age_s, tokens)


def recalls(
    *running: Victim, sizing: Refusing = FULL, waiting: Sequence[Work] = (PRESSING,), views: Sequence[str] = ("e0",)
) -> list[Recall]:
    return plan_recalls(waiting, [engine(name) for name in views], sizing, POLICY, NOW_S, lambda _engine: running)


def test_nobody_gives_way_on_an_engine_whose_context_is_too_short() -> None:
    long = work("u", "chat", accepted_s=NOW_S - 0.3, deadline_s=NOW_S + 0.7, prompt_tokens=9000)
    views = [engine("e0", max_model_len=fresh(4096)), engine("e1", max_model_len=fresh(32_768))]
    bulk = [victim("v", age_s=1)] * 3

    found = plan_recalls([long], views, FULL, POLICY, NOW_S, lambda _engine: bulk)

    assert [one.engine for one in found] == ["e1"]


def given_up(found: Sequence[Recall]) -> list[str]:
    return [one.work.id for recall in found for one in recall.victims]


def test_the_newest_give_way_and_no_more_than_it_takes() -> None:
    found = recalls(victim("old", age_s=90), victim("new", age_s=1), victim("newer", age_s=0.5), victim("mid", age_s=9))

    assert given_up(found) == ["newer", "new"]
    assert (found[0].engine, found[0].decision.action, found[0].decision.work_id) == ("e0", Action.PREEMPT, "u")
    assert [(one.guard, one.value) for one in found[0].decision.guards] == [(Guard.KV, 1600.0)]


@pytest.mark.parametrize(
    "sizing",
    [
        Refusing((Guard.KV, 1500.0), (Guard.SEATS, 1.0)),
        Refusing((Guard.STALL, 5.0)),
        Refusing((Guard.KV, -1.0)),
    ],
)
def test_nobody_gives_way_unless_memory_alone_refuses(sizing: Refusing) -> None:
    assert not recalls(victim("new", age_s=1), victim("newer", age_s=0.5), sizing=sizing)


def test_nobody_gives_way_before_a_quarter_of_the_time_has_passed() -> None:
    fresh = work("u", "chat", accepted_s=NOW_S - 0.2, deadline_s=NOW_S + 0.8)

    assert not recalls(victim("new", age_s=1), victim("newer", age_s=0.5), waiting=[fresh])


def test_nobody_gives_way_in_vain() -> None:
    assert not recalls(victim("new", age_s=1))


@pytest.mark.parametrize(
    "spared",
    [
        victim("spared", age_s=0.1, class_name="ledger"),
        victim("spared", age_s=0.1, class_name="chat"),
        victim("spared", age_s=PEACE_S - 1, attempt=2),
        victim("spared", age_s=0.1, attempt=REQUEUES_MAX + 1),
    ],
)
def test_some_are_left_in_peace(spared: Victim) -> None:
    others = [victim(f"w{number}", age_s=PEACE_S + number) for number in range(4)]

    assert given_up(recalls(spared, *others)) == ["w0", "w1"]


def test_one_that_was_requeued_gives_way_again_after_its_time_of_peace() -> None:
    found = recalls(victim("again", age_s=PEACE_S + 1, attempt=2), victim("old", age_s=PEACE_S + 2))

    assert given_up(found) == ["again", "old"]


def test_of_several_engines_the_one_with_the_least_to_lose_is_chosen_once_a_round() -> None:
    held = {"e0": [victim("a", age_s=1, tokens=5000)], "e1": [victim("b", age_s=1, tokens=1600)]}
    waiting = [PRESSING, work("v", "chat", accepted_s=NOW_S - 0.9, deadline_s=NOW_S + 0.1)]

    found = plan_recalls(waiting, [engine("e0"), engine("e1")], FULL, POLICY, NOW_S, lambda name: held[name])

    assert [(one.engine, one.decision.work_id) for one in found] == [("e1", "u"), ("e0", "v")]


def test_nobody_gives_way_to_a_work_that_is_late_already() -> None:
    late = work("u", "chat", accepted_s=NOW_S - 3, deadline_s=NOW_S - 2)

    assert not recalls(victim("a", age_s=1, tokens=9000), waiting=[late])
    assert recalls(victim("a", age_s=1, tokens=9000), waiting=[late, PRESSING])
