"""Which class a request gets and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from policies import presets
from policies.behaviour import Pattern
from policies.classify import By, Caller, Classified, UnknownClass, classify
from policies.document import parse
from policies.schema import Policy

BALANCED = presets.load()


@dataclass(frozen=True)
class Facts:
    model: str = "llama"
    stream: bool = False
    prompt_tokens: int = 10
    max_tokens: int | None = None
    sequences: int = 1
    service_tier: str = ""


def classified(
    facts: Facts | None = None,
    *,
    policy: Policy = BALANCED,
    headers: dict[str, str] | None = None,
    caller: Caller | None = None,
) -> Classified:
    return classify(
        facts or Facts(), headers=headers or {}, caller=caller or Caller(), policy=policy, accepted_s=1000.0
    )


def ruled(rule: str) -> Policy:
    return parse(
        f"version: 1\nclasses: {{chat: {{ttft_sla_s: 1}}, night: {{}}}}\nclassify: {{rules: [{rule}]}}\n", "p.yaml"
    )


@pytest.mark.parametrize(
    ("facts", "class_name", "reason"),
    [
        (Facts(stream=True, prompt_tokens=100_000, max_tokens=9000), "interactive", "shape: streamed"),
        (Facts(), "interactive", "shape: small"),
        (Facts(prompt_tokens=8192, max_tokens=4096, sequences=8), "interactive", "shape: small"),
        (Facts(prompt_tokens=8193), "bulk", "shape: estimated at more than 8192 prompt tokens"),
        (Facts(max_tokens=4097), "bulk", "shape: more than 4096 output tokens asked for"),
        (Facts(sequences=9), "bulk", "shape: more than 8 sequences"),
        (Facts(stream=True, service_tier="flex"), "bulk", "rule 2: service_tier"),
        (Facts(sequences=99, service_tier="priority"), "interactive", "rule 3: service_tier"),
        (Facts(service_tier="auto"), "interactive", "shape: small"),
    ],
)
def test_the_balanced_rules_and_the_shape_decide_with_a_reason(facts: Facts, class_name: str, reason: str) -> None:
    found = classified(facts)

    assert (found.class_name, found.reason) == (class_name, reason)


def test_the_client_may_name_the_class_itself() -> None:
    found = classified(Facts(service_tier="flex"), headers={"x-headrace-class": " Interactive "})

    assert (found.class_name, found.reason) == ("interactive", "rule 1: X-Headrace-Class")


def test_an_empty_class_header_says_nothing() -> None:
    assert classified(headers={"x-headrace-class": "  "}).reason == "shape: small"


def test_a_class_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UnknownClass, match=r"X-Headrace-Class 'fast': must be one of interactive, bulk") as caught:
        classified(headers={"x-headrace-class": "fast"})

    assert caught.value.header == "X-Headrace-Class"


def test_a_refused_class_name_is_shown_short_and_printable() -> None:
    with pytest.raises(UnknownClass) as caught:
        classified(headers={"x-headrace-class": "a\r\n\x1b[31m" + "b" * 10_000})

    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("rule", "matching", "other"),
    [
        ("{tenant: acme, class: night}", Caller(tenant="acme"), Caller(tenant="acme2")),
        ("{key_id: k1, class: night}", Caller(key_id="k1"), Caller(key_id="")),
        ("{path: /v1/embed*, class: night}", Caller(path="/v1/embeddings"), Caller(path="/v1/chat/completions")),
    ],
)
def test_a_rule_can_look_at_who_asks_and_where(rule: str, matching: Caller, other: Caller) -> None:
    policy = ruled(rule)

    assert classified(policy=policy, caller=matching).class_name == "night"
    assert classified(policy=policy, caller=other).class_name == "chat"


@pytest.mark.parametrize(
    ("rule", "matching", "other"),
    [
        ("{model: 'llama-*', class: night}", Facts(model="llama-3"), Facts(model="qwen")),
        ("{stream: false, class: night}", Facts(), Facts(stream=True)),
        ("{prompt_tokens_at_least: 100, class: night}", Facts(prompt_tokens=100), Facts(prompt_tokens=99)),
        ("{prompt_tokens_at_most: 100, class: night}", Facts(prompt_tokens=100), Facts(prompt_tokens=101)),
        ("{max_tokens_at_most: 5, class: night}", Facts(max_tokens=5), Facts(max_tokens=6)),
        ("{max_tokens_at_most: 5, class: night}", Facts(max_tokens=0), Facts(max_tokens=None)),
        ("{max_tokens_at_least: 5, class: night}", Facts(max_tokens=5), Facts(max_tokens=None)),
        ("{stream: true, model: m, class: night}", Facts(stream=True, model="m"), Facts(stream=True)),
    ],
)
def test_a_rule_can_look_at_the_request_and_all_its_conditions_must_hold(
    rule: str, matching: Facts, other: Facts
) -> None:
    policy = ruled(rule)

    assert classified(matching, policy=policy).class_name == "night"
    assert classified(other, policy=policy).class_name == "chat"


def test_a_rule_can_look_at_any_header_whatever_its_case() -> None:
    policy = ruled("{header: {X-Job: Nightly}, class: night}")

    assert classified(policy=policy, headers={"x-job": "nightly"}).class_name == "night"
    assert classified(policy=policy, headers={"x-job": "daily"}).class_name == "chat"
    assert classified(policy=policy).class_name == "chat"


def test_the_first_rule_that_matches_wins() -> None:
    policy = ruled("{model: llama, class: night}, {stream: false, class: chat}")

    assert classified(policy=policy).reason == "rule 1: model"


def test_a_header_value_is_never_part_of_the_reason() -> None:
    policy = ruled("{header: {X-Job: hush}, class: night}")

    assert "hush" not in classified(policy=policy, headers={"x-job": "hush"}).reason


@pytest.mark.parametrize(
    ("max_class", "class_name", "reason"),
    [
        ("bulk", "bulk", "shape: small; capped by key"),
        ("interactive", "interactive", "shape: small"),
        ("", "interactive", "shape: small"),
        ("gone", "bulk", "shape: small; capped by key"),
    ],
)
def test_a_key_gets_no_class_above_its_highest(max_class: str, class_name: str, reason: str) -> None:
    found = classified(caller=Caller(max_class=max_class))

    assert (found.class_name, found.reason) == (class_name, reason)


def test_a_cap_never_lifts_a_class() -> None:
    assert classified(Facts(service_tier="flex"), caller=Caller(max_class="interactive")).class_name == "bulk"


def test_a_tenant_gets_no_class_above_its_highest() -> None:
    policy = parse(
        "version: 1\nclasses: {chat: {ttft_sla_s: 1}, night: {}}\ntenants: {acme: {highest_class: night}}\n", "p.yaml"
    )

    assert classified(policy=policy, caller=Caller(tenant="acme")).reason == "shape: small; capped by tenant"
    assert classified(policy=policy, caller=Caller(tenant="other")).class_name == "chat"


def test_the_deadline_counts_from_acceptance_and_is_the_rank() -> None:
    found = classified(Facts(stream=True))

    assert (found.deadline_s, found.rank) == (1000.5, 1000.5)


def test_a_class_without_objective_has_no_deadline_and_ranks_by_acceptance() -> None:
    found = classified(Facts(service_tier="flex"))

    assert (found.deadline_s, found.rank) == (None, 1000.0)


@pytest.mark.parametrize(
    ("pattern", "more", "class_name", "by"),
    [
        (None, {}, "interactive", By.SMALL),
        (Pattern.LOOP, {}, "bulk", By.LEARNED_LOOP),
        (Pattern.LOOP, {"stream": True}, "interactive", By.STREAMED),
        (Pattern.LOOP, {"service_tier": "priority"}, "interactive", By.RULE),
        (Pattern.LOOP, {"prompt_tokens": 9000}, "bulk", By.LONG_PROMPT),
        (Pattern.PERSON, {}, "interactive", By.SMALL),
        (Pattern.PERSON, {"prompt_tokens": 9000}, "interactive", By.LEARNED_PERSON),
        (Pattern.PERSON, {"prompt_tokens": 40_000}, "bulk", By.LONG_PROMPT),
        (Pattern.PERSON, {"max_tokens": 5000}, "interactive", By.LEARNED_PERSON),
        (Pattern.PERSON, {"sequences": 9}, "bulk", By.MANY_SEQUENCES),
    ],
)
def test_a_learned_pattern_corrects_the_shape_and_nothing_else(
    pattern: Pattern | None, more: dict[str, Any], class_name: str, by: By
) -> None:
    found = classify(
        Facts("m", **more), headers={}, caller=Caller(), policy=presets.load(), accepted_s=5.0, pattern=pattern
    )

    assert (found.class_name, found.by) == (class_name, by)


def test_what_was_learned_can_be_left_unused() -> None:
    policy = parse("version: 1\nclasses: {a: {ttft_sla_s: 1}, b: {}}\nclassify: {learn: false}\n", "p.yaml")

    found = classify(Facts("m"), headers={}, caller=Caller(), policy=policy, accepted_s=5.0, pattern=Pattern.LOOP)

    assert (found.class_name, found.by) == ("a", By.SMALL)
