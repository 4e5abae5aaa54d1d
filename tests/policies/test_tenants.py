"""Fair shares: equal weights get equal service, double weight gets double, idleness saves nothing up."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from policies.ordering import TenantCounters
from policies.ordering.tenants import GRANTS_KEPT, MEMORY_COST, TENANTS_KEPT
from policies.vocabulary import Outcome, Result
from tests.policies.worlds import work


def outcome(output_tokens: int) -> Outcome:
    return Outcome(
        "w",
        "night",
        "t",
        "m",
        "e0",
        Result.COMPLETED,
        "",
        200,
        1,
        prompt_tokens=10,
        output_tokens=output_tokens,
        total_s=1,
    )


def serve(counters: TenantCounters, weights: dict[str, float], rounds: int, tokens: dict[str, int]) -> Counter[str]:
    """Serve whoever is next by tag and count the prompt tokens each got."""
    served: Counter[str] = Counter()
    for _ in range(rounds):
        tenant = min(weights, key=lambda name: (counters.tag("night", name), name))
        counters.granted(work("w", "night", tenant=tenant, prompt_tokens=tokens[tenant]), weights[tenant])
        served[tenant] += tokens[tenant]
    return served


def test_tenants_of_equal_weight_get_equal_tokens_whatever_their_prompts() -> None:
    served = serve(TenantCounters(), {"a": 1, "b": 1}, 1100, {"a": 100, "b": 1000})

    assert abs(served["a"] - served["b"]) <= 2000


def test_a_tenant_of_double_weight_gets_double_the_tokens() -> None:
    served = serve(TenantCounters(), {"a": 1, "b": 2}, 900, {"a": 100, "b": 100})

    assert served["b"] / served["a"] == 2


def test_of_two_equal_answers_the_one_that_held_memory_for_longer_costs_more() -> None:
    counters = TenantCounters()
    for tenant, total_s in (("quick", 11.0), ("slow", 31.0)):
        one = work("w", "night", tenant=tenant, prompt_tokens=1000)
        counters.granted(one)
        ended = dataclasses.replace(outcome(100), prompt_tokens=1000, queued_s=1.0, total_s=total_s)
        counters.on_event(one, ended)

    more = counters.tag("night", "slow") - counters.tag("night", "quick")

    assert more == pytest.approx(MEMORY_COST * 1050 * 20)


def test_a_tenant_that_was_idle_starts_level_with_the_others() -> None:
    counters = TenantCounters()
    serve(counters, {"a": 1}, 1000, {"a": 100})

    served = serve(counters, {"a": 1, "b": 1}, 20, {"a": 100, "b": 100})

    assert abs(served["a"] - served["b"]) <= 200


def test_output_counts_double_when_the_work_ends() -> None:
    counters = TenantCounters()
    one = work("w", "night", prompt_tokens=10)
    counters.granted(one)
    before = counters.tag("night", "t")

    counters.on_event(one, outcome(50))

    assert counters.tag("night", "t") - before == 100


@pytest.mark.parametrize(("told", "charged"), [(None, 400), (600, 400), (0, 1000), (900, 100), (5000, 0)])
def test_a_prompt_costs_what_was_not_cached_of_it_by_the_answers_own_word_if_it_says(
    told: int | None, charged: int
) -> None:
    counters = TenantCounters()
    one = dataclasses.replace(work("w", "night", prompt_tokens=1000), cached_tokens=600)
    before = counters.tag("night", "t")
    counters.granted(one)

    assert counters._finish["night", "t"] - before == 1 + 400
    counters.on_event(one, dataclasses.replace(outcome(50), cached_tokens=told))

    assert counters._finish["night", "t"] - before == 1 + charged + 2 * 50


def test_a_work_that_goes_on_elsewhere_is_charged_no_output_yet() -> None:
    counters = TenantCounters()
    one = work("w", "night")
    counters.granted(one)
    before = counters.tag("night", "t")

    counters.on_event(one, None)

    assert counters.tag("night", "t") == before


def test_classes_are_counted_apart() -> None:
    counters = TenantCounters()

    counters.granted(work("w", "night", prompt_tokens=1000))

    assert counters.tag("chat", "t") == 0


def test_works_in_flight_are_counted_by_tenant_and_never_below_zero() -> None:
    counters = TenantCounters()
    one, two = work("1", "night"), work("2", "chat")
    counters.granted(one)
    counters.granted(two)
    both = counters.in_flight("t")

    for _ in range(3):
        counters.on_event(one, outcome(1))

    assert (both, counters.in_flight("t")) == (2, 0)


def test_a_successor_restores_who_was_served_how_much() -> None:
    counters = TenantCounters()
    serve(counters, {"a": 1, "b": 3}, 50, {"a": 100, "b": 70})
    successor = TenantCounters()

    successor.restore(json.loads(json.dumps(counters.snapshot())))

    assert [successor.tag("night", name) for name in "abc"] == [counters.tag("night", name) for name in "abc"]


def test_a_snapshot_that_cannot_be_read_is_left_out() -> None:
    counters = TenantCounters()

    counters.restore({"virtual": {"night": "x"}, "finish": [["night"], 3, ["night", "a", None]], "later": 1})

    assert counters.tag("night", "a") == 0


def test_what_is_remembered_is_bounded() -> None:
    counters = TenantCounters()

    for number in range(3 * TENANTS_KEPT):
        one = work("w", "night", tenant=f"t{number}")
        counters.granted(one)
        counters.on_event(one, outcome(10))

    kept = counters.snapshot()["finish"]
    assert isinstance(kept, list)
    assert len(kept) <= TENANTS_KEPT


def test_grants_of_late_forget_what_is_long_past() -> None:
    counters = TenantCounters()
    for _ in range(10_000):
        counters.granted(work("w", "chat"))

    for _ in range(2 * int(GRANTS_KEPT)):
        counters.granted(work("w", "night"))

    grants = counters.grants()
    assert sum(grants.values()) < GRANTS_KEPT
    assert grants["night"] > 4 * grants.get("chat", 0)


def test_a_counter_says_what_it_holds() -> None:
    counters = TenantCounters()
    counters.granted(dataclasses.replace(work("w", "night"), tenant="a"))

    assert repr(counters) == "<TenantCounters ahead=1 in_flight=1>"
