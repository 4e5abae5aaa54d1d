"""Works that cannot all be in time: as many as can be go first, the others after them, and none is lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.dispatching import plan_round
from policies.estimators.pace import ATTENTION_TOKENS, TAKEN_IN_FACTOR, Pace, prefill_tokens
from policies.limits import LIMITS
from policies.ordering.crowd import Crowd
from policies.ordering.feasibility import SPARE, STRETCH, Outlook, triage
from policies.ordering.shedding import SHARE_BY_SIZE, Infeasible, Shedding
from policies.vocabulary import Action, Guard, Work
from tests.policies.worlds import NOW_S, engine, policy, work

SECONDS_PER_TOKEN = 1e-3


def heard(_: Infeasible) -> bool:
    return True


def due(number: int, *, prompt_tokens: int, within_s: float) -> Work:
    return work(f"w{number}", prompt_tokens=prompt_tokens, accepted_s=NOW_S, deadline_s=NOW_S + within_s)


def ordered(works: list[Work], ahead_s: float = 0.0) -> list[Work]:
    works = sorted(works, key=lambda one: (one.deadline_s or 0.0, one.id))
    found = triage(works, {"m": SECONDS_PER_TOKEN}, {"m": ahead_s}, NOW_S)
    return [*found.hopeful, *found.given_up]


def in_time(works: list[Work]) -> int:
    """How many are in time when they are served in this order."""
    at_s, count = NOW_S, 0
    for one in works:
        at_s += STRETCH * prefill_tokens(one.prompt_tokens) * SECONDS_PER_TOKEN
        assert one.deadline_s is not None
        count += at_s <= one.deadline_s - SPARE * (one.deadline_s - one.accepted_s) + 1e-9
    return count


lots = st.lists(
    st.tuples(st.integers(1, 900), st.floats(0.05, 3.0)).map(lambda pair: pair), min_size=1, max_size=8
).map(lambda pairs: [due(n, prompt_tokens=tokens, within_s=s) for n, (tokens, s) in enumerate(pairs)])


@settings(max_examples=60, deadline=None)
@given(lots)
def test_no_order_has_more_works_in_time(works: list[Work]) -> None:
    best = max(
        in_time(sorted(some, key=lambda one: one.deadline_s or 0.0))
        for size in range(len(works) + 1)
        for some in combinations(works, size)
    )

    assert in_time(ordered(works)) == best


@settings(max_examples=60, deadline=None)
@given(lots, st.floats(0, 2))
def test_every_work_is_in_the_order_once(works: list[Work], ahead_s: float) -> None:
    found = ordered(works, ahead_s)

    assert sorted(one.id for one in found) == sorted(one.id for one in works)


def test_works_that_can_all_be_in_time_keep_the_order_of_deadlines() -> None:
    works = [due(number, prompt_tokens=10, within_s=1.0 + number) for number in range(10)]

    assert ordered(works) == works


def test_the_longest_of_those_that_are_too_many_is_given_up() -> None:
    works = [due(0, prompt_tokens=700, within_s=1.0), *(due(n, prompt_tokens=200, within_s=1.1) for n in range(1, 4))]

    assert [one.id for one in ordered(works)] == ["w1", "w2", "w3", "w0"]


def prompt(name: str, prompt_tokens: int, *, streams: bool = True) -> Work:
    return Work(name, "chat", "t", "m", "/v1/completions", NOW_S, NOW_S, prompt_tokens=prompt_tokens, streams=streams)


def test_what_the_engines_were_given_already_counts() -> None:
    works = [due(0, prompt_tokens=400, within_s=1.0), due(1, prompt_tokens=100, within_s=1.1)]

    assert [one.id for one in ordered(works, ahead_s=0.5)] == ["w1", "w0"]


def test_a_round_places_those_that_can_be_in_time_first_by_the_pace_it_learned() -> None:
    pace = Pace()
    pace.granted("e0", prompt("seen", 1000), 1, NOW_S - 2)
    pace.first_token("seen", 1, NOW_S - 1)
    works = [due(0, prompt_tokens=700, within_s=1.0), due(1, prompt_tokens=200, within_s=1.1)]
    sizing = LIMITS["fixed"](policy("version: 1\nclasses: {chat: {ttft_sla_s: 1}}\nsizing: {fixed: {total: 1}}\n"))

    blind = plan_round(works, [engine()], sizing, policy(), NOW_S, 0.5)
    order = Outlook(works, [engine()], pace, NOW_S).order(policy())
    seeing = plan_round(works, [engine()], sizing, policy(), NOW_S, 0.5, due=order)

    assert [one.work.id for one in blind] == ["w0"]
    assert [one.work.id for one in seeing] == ["w1"]


def test_a_pace_is_the_tokens_taken_in_while_some_were_pending() -> None:
    pace = Pace()
    for number in range(4):
        pace.granted("e0", prompt(f"w{number}", 1000), 1, NOW_S)
    for number in range(4):
        pace.first_token(f"w{number}", 1, NOW_S + 0.25 * (number + 1))
    pace.granted("e0", prompt("much later", 1000), 1, NOW_S + 60)
    pace.first_token("much later", 1, NOW_S + 60.25)

    assert pace.seconds_per_token("e0") == pytest.approx(0.25 / prefill_tokens(1000))
    assert pace.seconds_per_token("e1") is None


def test_a_long_prompt_takes_more_than_its_share_of_prefill() -> None:
    assert prefill_tokens(100) == pytest.approx(100, rel=0.01)
    assert prefill_tokens(ATTENTION_TOKENS) == 1.5 * ATTENTION_TOKENS


@pytest.mark.parametrize("cached", [0, 100, 9000, 20_000])
def test_what_is_cached_of_a_prompt_takes_no_time_but_is_attended_to(cached: int) -> None:
    assert prefill_tokens(20_000, cached) == pytest.approx(prefill_tokens(20_000) - prefill_tokens(cached))
    assert prefill_tokens(20_000, cached) >= prefill_tokens(20_000 - cached)


def test_a_prompt_that_was_there_already_does_not_teach_that_prompts_are_cheap() -> None:
    pace = Pace()
    for number in range(50):
        at_s = NOW_S + number
        pace.granted("e0", replace(prompt(f"w{number}", 10_000), cached_tokens=9000), 1, at_s)
        pace.first_token(f"w{number}", 1, at_s + 1e-3 * prefill_tokens(10_000, 9000) / 2)

    assert pace.seconds_per_token("e0") == pytest.approx(5e-4)


def test_of_those_that_are_too_many_one_that_is_mostly_cached_is_not_the_longest() -> None:
    works = [due(0, prompt_tokens=700, within_s=1.0), *(due(n, prompt_tokens=200, within_s=1.1) for n in range(1, 4))]
    works[0] = replace(works[0], cached_tokens=600)

    assert ordered(works) == works


def test_what_is_ahead_counts_what_has_to_be_computed_of_it() -> None:
    pace = paced()
    pace.granted("e0", replace(prompt("w", 8000), cached_tokens=6000), 1, NOW_S)

    assert pace.ahead_tokens("e0", 8000, NOW_S) == pytest.approx(prefill_tokens(8000, 6000))
    assert pace.ahead_tokens("e0", 8500, NOW_S) == pytest.approx(prefill_tokens(8000, 6000) + 500)


def test_a_short_prompt_or_one_that_came_to_nothing_teaches_no_pace() -> None:
    pace = Pace()
    pace.granted("e0", prompt("short", 20), 1, NOW_S)
    pace.first_token("short", 1, NOW_S + 0.5)
    for name in ("lost", "kept"):
        pace.granted("e0", prompt(name, 5000), 1, NOW_S + 1)
    pace.ended("lost", 1)
    pace.first_token("kept", 1, NOW_S + 9)

    assert pace.seconds_per_token("e0") is None


def test_a_prompt_whose_answer_shows_nothing_is_pending_until_its_predicted_time_is_over() -> None:
    pace = paced()
    each_s = pace.seconds_per_token("e0")
    assert each_s is not None
    for number in range(2):
        pace.granted("e0", prompt(f"whole{number}", 1000, streams=False), 1, NOW_S)
    tokens = prefill_tokens(1000)

    ahead = [
        pace.ahead_tokens("e0", 2500, NOW_S + TAKEN_IN_FACTOR * factor * tokens * each_s) for factor in (0.9, 1.1, 2.1)
    ]

    assert ahead == pytest.approx([2 * tokens + 500, tokens + 500, 500])  # 500 tokens are known by their sum only


def test_a_prompt_whose_answer_is_streamed_is_pending_until_its_first_token_is_seen() -> None:
    pace = paced()
    each_s = pace.seconds_per_token("e0")
    assert each_s is not None
    pace.granted("e0", prompt("s", 1000), 1, NOW_S)
    tokens = prefill_tokens(1000)
    late_s = NOW_S + 3 * TAKEN_IN_FACTOR * tokens * each_s

    assert pace.ahead_tokens("e0", 1000, late_s) == pytest.approx(tokens)
    pace.first_token("s", 1, late_s)
    assert pace.ahead_tokens("e0", 0, late_s) == 0


def test_whole_answers_make_no_engine_slower_than_it_is() -> None:
    pace = paced()
    before = pace.seconds_per_token("e0")
    assert before is not None
    pace.granted("e0", prompt("whole", 1000, streams=False), 1, NOW_S)
    for number in range(20):
        at_s = NOW_S + 10 * (1 + number)
        pace.granted("e0", prompt(f"s{number}", 1000), 1, at_s)
        pace.first_token(f"s{number}", 1, at_s + before * prefill_tokens(1000))
    pace.ended("whole", 1)

    assert pace.seconds_per_token("e0") == pytest.approx(before)
    assert pace.ahead_tokens("e0", 0, NOW_S + 300) == 0


def test_an_engine_that_became_slower_than_every_prediction_is_believed() -> None:
    pace = paced()
    before = pace.seconds_per_token("e0")
    assert before is not None
    for number in range(60):
        at_s = NOW_S + 100 * number
        for part in range(2):
            pace.granted("e0", prompt(f"s{number}.{part}", 4000), 1, at_s + 10 * part)
        for part in range(2):
            pace.first_token(f"s{number}.{part}", 1, at_s + 10 * part + 8 * before * prefill_tokens(4000))

    found = pace.seconds_per_token("e0")
    assert found is not None
    assert found > 4 * before


@pytest.mark.parametrize(("since_s", "refused_"), [(10.0, 1), (600.0, 0)])
def test_bulk_that_runs_whole_makes_a_class_refuse_works_only_while_it_is_taken_in(
    since_s: float, refused_: int
) -> None:
    pace, asked = paced(), due(0, prompt_tokens=300, within_s=1.0)
    for number in range(30):
        pace.granted("e0", prompt(f"whole{number}", 3000, streams=False), 1, NOW_S - since_s)

    outlook = Outlook([asked], [engine(prefill_tokens=30 * 3000)], pace, NOW_S)

    assert len(Shedding().refuse(outlook, Crowd(), SHEDS, NOW_S, heard)) == refused_


def test_who_has_been_late_for_long_goes_before_others_that_are_given_up() -> None:
    lost = due(0, prompt_tokens=5000, within_s=0.5)
    barely = replace(due(1, prompt_tokens=5000, within_s=1.0), accepted_s=NOW_S - 1, deadline_s=NOW_S - 0.9)
    for_long = replace(due(2, prompt_tokens=9, within_s=1.0), accepted_s=NOW_S - 60, deadline_s=NOW_S - 0.1)
    in_time = due(3, prompt_tokens=100, within_s=1.0)

    order = Outlook([barely, for_long, lost, in_time], [engine()], paced(), NOW_S).order(policy())

    assert order == [in_time, for_long, barely, lost]


# -- refusals ----------------------------------------------------------------------------------------------------------

SHEDS = policy("version: 1\nclasses: {chat: {ttft_sla_s: 1, on_infeasible: shed}}\n")


BEHIND_S = STRETCH * (3000 + prefill_tokens(300)) * 2000 * SECONDS_PER_TOKEN / prefill_tokens(2000)
"""To the first token of 300 prompt tokens behind 3,000 pending ones, by the pace of `paced`."""


def test_a_pace_that_is_only_supposed_yields_to_the_first_that_is_seen() -> None:
    pace = Pace()
    pace.suppose("e0", 5e-4)
    assert pace.seconds_per_token("e0") is None  # no work was ever sent there

    pace.granted("e0", prompt("whole", 2000), 1, NOW_S - 20)
    pace.ended("whole", 1)
    pace.suppose("e0", 5e-4)
    assert pace.seconds_per_token("e0") == 5e-4

    pace.granted("e0", prompt("seen", 2000), 1, NOW_S - 9)
    pace.first_token("seen", 1, NOW_S - 8)
    seen = pace.seconds_per_token("e0")
    pace.suppose("e0", 5e-4)
    assert seen is not None
    assert pace.seconds_per_token("e0") == seen == pytest.approx(1 / prefill_tokens(2000))


def paced(seconds_per_token: float = SECONDS_PER_TOKEN) -> Pace:
    """An engine that takes prompts in at this pace."""
    pace = Pace()
    pace.granted("e0", prompt("seen", 2000), 1, NOW_S - 9)
    pace.first_token("seen", 1, NOW_S - 9 + 2000 * seconds_per_token)
    return pace


def refused(
    works: list[Work], shedding: Shedding | None = None, *, prefill_tokens: int = 0, now_s: float = NOW_S
) -> list[Infeasible]:
    works = sorted(works, key=lambda one: (one.deadline_s or 0.0, one.id))
    outlook = Outlook(works, [engine(prefill_tokens=prefill_tokens)], paced(), now_s)
    return (Shedding() if shedding is None else shedding).refuse(outlook, Crowd(), SHEDS, now_s, heard)


def test_what_comes_last_behind_too_many_is_refused_with_the_time_that_it_would_take() -> None:
    (one,) = refused([due(0, prompt_tokens=300, within_s=1.0)], prefill_tokens=3000)

    assert one.first_token_in_s == pytest.approx(BEHIND_S)
    assert one.feasible_in_s == pytest.approx(BEHIND_S - 0.9)


def test_what_is_late_by_little_waits_behind_the_others_instead_of_being_refused() -> None:
    assert not refused([due(0, prompt_tokens=300, within_s=1.0)], prefill_tokens=900)


def test_what_has_waited_too_long_is_refused_however_free_the_engine_is() -> None:
    works = [due(0, prompt_tokens=300, within_s=1.0)]

    assert not refused(works, now_s=NOW_S + 0.5)
    assert [one.work.id for one in refused(works, now_s=NOW_S + 0.8)] == ["w0"]


def test_a_prompt_that_is_too_long_even_for_an_idle_engine_is_not_refused_since_no_retry_would_help() -> None:
    assert not refused([due(0, prompt_tokens=5000, within_s=1.0)], prefill_tokens=9000)


def test_a_work_that_an_engine_had_already_is_not_refused() -> None:
    assert not refused([replace(due(0, prompt_tokens=300, within_s=1.0), attempt=1)], prefill_tokens=9000)


def test_nobody_of_a_class_that_promises_a_slowdown_is_given_up_or_late() -> None:
    """Such a promise has no moment after which an answer is late for good: decision 0025 made them wait for half a minute."""
    promised = policy("version: 1\nclasses: {chat: {ttft_slowdown: 1.3}}\n")
    works = [due(number, prompt_tokens=900, within_s=0.1) for number in range(4)]

    outlook = Outlook(works, [engine()], paced(), NOW_S, never=promised.relative)

    assert promised.relative == {"chat"}
    assert outlook.triage.given_up == []
    assert outlook.order(promised) == works
    assert not any(promised.late(one, NOW_S + 5) for one in works)
    assert all(policy().late(one, NOW_S + 5) for one in works)


def test_a_class_that_would_rather_be_late_is_never_refused() -> None:
    works = [due(0, prompt_tokens=300, within_s=1.0)]
    outlook = Outlook(works, [engine(prefill_tokens=9000)], paced(), NOW_S)

    assert not Shedding().refuse(outlook, Crowd(), policy(), NOW_S, heard)


def test_without_a_pace_nobody_is_refused() -> None:
    outlook = Outlook([due(0, prompt_tokens=300, within_s=1.0)], [engine(prefill_tokens=9000)], Pace(), NOW_S)

    assert not Shedding().refuse(outlook, Crowd(), SHEDS, NOW_S, heard)


def test_long_prompts_are_refused_for_their_length_in_a_twentieth_of_their_tenants_requests_at_most() -> None:
    shedding = Shedding()
    for _ in range(100):
        shedding.granted("t", NOW_S)
    long = [due(number, prompt_tokens=740 - number, within_s=2.0) for number in range(20)]
    short = [due(20 + number, prompt_tokens=60, within_s=7.0) for number in range(80)]

    found = [one for one in refused([*long, *short], shedding) if one.by_size]
    again = [one for one in refused([*long, *short], shedding) if one.by_size]

    assert 0 < len(found) <= SHARE_BY_SIZE * (100 + len(long))
    assert all(one.work.prompt_tokens > 60 for one in found)
    assert len(again) <= 1


def test_a_refusal_is_recorded_with_the_prediction_against_the_objective() -> None:
    (one,) = refused([due(0, prompt_tokens=300, within_s=1.0)], prefill_tokens=3000)

    decision = one.decision(SHEDS, NOW_S)

    assert (decision.action, decision.binding, decision.work_id) == (Action.SHED, Guard.TTFT, "w0")
    (reading,) = decision.guards
    assert (reading.value, reading.threshold) == pytest.approx((BEHIND_S, 0.9))


def test_a_first_token_says_that_whole_answers_sent_before_have_been_taken_in_too() -> None:
    pace = Pace()
    pace.granted("e0", prompt("whole", 3000, streams=False), 1, NOW_S)
    pace.granted("e0", prompt("shown", 1000), 1, NOW_S)
    pace.granted("e0", prompt("later", 3000, streams=False), 1, NOW_S + 1)
    pace.first_token("shown", 1, NOW_S + 2)

    assert pace.ahead_tokens("e0", 6000, NOW_S + 2) == pytest.approx(prefill_tokens(3000))
    pace.granted("e0", prompt("shown too", 1000), 1, NOW_S + 3)
    pace.first_token("shown too", 1, NOW_S + 4)
    assert pace.seconds_per_token("e0") == pytest.approx(4 / (2 * (prefill_tokens(3000) + prefill_tokens(1000))))


def test_whole_answers_of_which_nothing_is_seen_make_no_engine_slow() -> None:
    pace = paced()
    first_s = pace.seconds_per_token("e0")
    for number in range(100):
        at_s = NOW_S + 10 * number
        pace.granted("e0", prompt(f"whole{number}", 2000, streams=False), 1, at_s)
        pace.granted("e0", prompt(f"shown{number}", 10), 1, at_s + 9.5)
        pace.first_token(f"shown{number}", 1, at_s + 9.501)
        pace.ended(f"whole{number}", 1)

    assert pace.seconds_per_token("e0") == first_s
    assert not pace._prompts
    assert not any(one.untold for one in pace._engines.values())


def test_whole_answers_taken_in_before_a_stretch_begins_are_no_part_of_it() -> None:
    pace = Pace()
    for name, streams in (("lost", True), ("whole", False), ("first", True), ("second", True)):
        pace.granted("e0", prompt(name, 3000, streams=streams), 1, NOW_S)
    pace.ended("lost", 1)
    pace.first_token("first", 1, NOW_S + 1)  # a stretch begins

    pace.first_token("second", 1, NOW_S + 2)

    assert pace.seconds_per_token("e0") == pytest.approx(1 / prefill_tokens(3000))
