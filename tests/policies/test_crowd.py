"""A prompt so long that more than one of those to come would be late for it is refused, where its class refuses at all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.estimators.pace import Pace, prefill_tokens
from policies.ordering.crowd import FADES_IN_S, Crowd
from policies.ordering.feasibility import SPARE, STRETCH, Outlook
from policies.ordering.shedding import Infeasible, Shedding
from policies.schema import Policy
from policies.vocabulary import Action, Work
from tests.policies.worlds import NOW_S, engine, policy, work

USUAL_TOKENS = 1000
WITHIN_S = 4.0
PER_TOKEN_S = 1e-4


def a_policy(on_infeasible: str = "shed") -> Policy:
    return policy(
        f"version: 1\nclasses: {{chat: {{ttft_sla_s: 4, on_infeasible: {on_infeasible}, degrade: {{max_tokens: 9}}}}}}\n"
    )


def due(name: str, prompt_tokens: int, within_s: float = WITHIN_S, at_s: float = NOW_S) -> Work:
    return work(name, prompt_tokens=prompt_tokens, accepted_s=at_s, deadline_s=at_s + within_s)


def crowd(per_s: float, until_s: float = NOW_S, within_s: float = WITHIN_S) -> Crowd:
    """Works of the usual length have come at this rate for ten minutes."""
    found = Crowd()
    for number in range(int(600 * per_s)):
        at_s = until_s - 600 + number / per_s
        found.came(due(str(number), USUAL_TOKENS, within_s, at_s), at_s)
    return found


def refused(
    one: Work, seen: Crowd, *, by: Policy | None = None, shedding: Shedding | None = None, told: bool = True
) -> list[Infeasible]:
    pace = Pace()
    pace.granted("e0", due("seen", 2000), 1, NOW_S - 9)
    pace.first_token("seen", 1, NOW_S - 9 + prefill_tokens(2000) * PER_TOKEN_S)
    outlook = Outlook([one], [engine()], pace, NOW_S)
    assert outlook.triage.hopeful == [one]
    return (shedding or Shedding()).refuse(outlook, seen, a_policy() if by is None else by, NOW_S, lambda _: told)


def test_how_long_a_prompt_may_take_is_what_those_to_come_can_wait_and_the_time_until_one_comes() -> None:
    spare_s = (1 - SPARE) * WITHIN_S - STRETCH * PER_TOKEN_S * prefill_tokens(USUAL_TOKENS)

    assert crowd(2.0).most_s("m", PER_TOKEN_S, NOW_S) == pytest.approx(spare_s + 1 / 2, rel=0.02)


def test_a_prompt_that_makes_more_than_one_to_come_late_is_refused() -> None:
    long = due("long", 50_000, within_s=30.0)

    (one,) = refused(long, crowd(2.0))

    decision = one.decision(a_policy(), NOW_S)
    assert one.by_size
    assert (decision.action, decision.reason) == (Action.SHED, "crowding")
    assert decision.guards[0].value == pytest.approx(PER_TOKEN_S * prefill_tokens(50_000))
    assert decision.guards[0].threshold == one.most_s
    assert not decision.guards[0].passed


def test_it_is_told_to_come_back_when_so_few_come_that_one_would_be_late_at_most() -> None:
    seen = crowd(2.0)
    (one,) = refused(due("long", 50_000, within_s=30.0), seen)

    assert 0 < one.feasible_in_s < 5 * FADES_IN_S
    later_s = NOW_S + one.feasible_in_s
    assert seen.most_s("m", PER_TOKEN_S, later_s) == pytest.approx(one.first_token_in_s)


@pytest.mark.parametrize("on_infeasible", ["late", "degrade"])
def test_a_class_that_does_not_shed_takes_long_prompts_in(on_infeasible: str) -> None:
    assert not refused(due("long", 50_000, within_s=30.0), crowd(2.0), by=a_policy(on_infeasible))


def test_where_few_come_a_long_prompt_is_taken_in() -> None:
    assert not refused(due("long", 50_000, within_s=30.0), crowd(0.02))


def test_whom_those_to_come_can_wait_for_is_taken_in() -> None:
    assert not refused(due("long", 30_000, within_s=30.0), crowd(2.0, within_s=60.0))


def test_a_prompt_of_the_usual_length_is_never_too_long_however_many_come() -> None:
    assert not refused(due("usual", USUAL_TOKENS), crowd(200.0, within_s=0.01))


def test_what_a_prefix_cache_has_of_a_prompt_keeps_nobody_waiting() -> None:
    assert not refused(replace(due("talk", 50_000, within_s=30.0), cached_tokens=49_500), crowd(2.0))


def test_a_work_that_an_engine_had_already_is_taken_in() -> None:
    assert not refused(replace(due("long", 50_000, within_s=30.0), attempt=1), crowd(2.0))


def test_beyond_a_twentieth_of_their_tenants_requests_long_prompts_are_taken_in() -> None:
    shedding = Shedding()
    for _ in range(30):
        shedding.granted("t", NOW_S)
    long = due("long", 50_000, within_s=30.0)

    assert refused(long, crowd(2.0), shedding=shedding)
    assert not refused(long, crowd(2.0), shedding=shedding)


def test_who_cannot_be_told_uses_up_nothing_of_its_tenant_s_share() -> None:
    """With several processes the leader finds works that wait elsewhere."""
    shedding, long = Shedding(), due("long", 50_000, within_s=30.0)
    assert not refused(long, crowd(2.0), shedding=shedding, told=False)

    assert refused(long, crowd(2.0), shedding=shedding)


def test_nothing_is_expected_of_a_model_that_nobody_asked_for_of_late() -> None:
    assert Crowd().most_s("m", PER_TOKEN_S, NOW_S) == math.inf
    assert crowd(2.0, until_s=NOW_S - 600).most_s("m", PER_TOKEN_S, NOW_S) == math.inf
    assert crowd(2.0).most_s("other", PER_TOKEN_S, NOW_S) == math.inf


def test_the_time_of_works_that_are_told_late_does_not_run_backwards() -> None:
    seen = crowd(2.0)
    before = seen.most_s("m", PER_TOKEN_S, NOW_S)

    seen.came(due("old", USUAL_TOKENS, at_s=NOW_S - 5), NOW_S - 5)

    assert seen.most_s("m", PER_TOKEN_S, NOW_S) == pytest.approx(before, rel=0.01)


def test_a_class_that_promises_a_slowdown_refuses_nobody() -> None:
    relative = policy("version: 1\nclasses: {chat: {ttft_slowdown: 1.3, on_infeasible: shed}}\n")

    assert not refused(due("long", 50_000, within_s=30.0), crowd(2.0), by=relative)


def test_a_clock_that_steps_back_breaks_no_refusal() -> None:
    shedding = Shedding()
    shedding.granted("t", NOW_S + 50_000)

    assert refused(due("long", 50_000, within_s=30.0), crowd(2.0), shedding=shedding)
