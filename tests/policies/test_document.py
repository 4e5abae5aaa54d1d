"""Policy documents: what is filled in, what is refused, and that a policy written out reads the same."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from policies import presets
from policies.document import effective, parse, render
from policies.schema import EngineWindows, Policy
from policies.vocabulary import Work
from policies.yaml_source import DocumentError

TWO = "version: 1\nclasses:\n  chat: {ttft_sla_s: 0.5}\n  night: {}\n"


def problems(text: str, engines: tuple[str, ...] | None = None) -> list[str]:
    with pytest.raises(DocumentError) as caught:
        parse(text, "p.yaml", engines=engines)
    return [str(problem) for problem in caught.value.problems]


def test_the_version_of_a_policy_is_the_hash_of_its_text() -> None:
    policy = parse(TWO, "p.yaml")

    assert policy.version == hashlib.sha256(TWO.encode()).hexdigest()[:12]


def test_classes_are_most_urgent_first_whatever_their_order_or_names() -> None:
    policy = parse(
        "version: 1\nclasses:\n  later: {}\n  slow: {ttft_sla_s: 9}\n  fast: {ttft_sla_s: 0.2}\n  last: {}\n", "p.yaml"
    )

    assert policy.precedence == ("fast", "slow", "later", "last")


def test_a_class_is_defined_by_its_fields_and_not_by_its_name() -> None:
    policy = parse("version: 1\nclasses:\n  bulk: {ttft_sla_s: 1}\n  interactive: {}\n", "p.yaml")

    assert policy.precedence == ("bulk", "interactive")
    assert (policy.classify.shape.light, policy.classify.shape.heavy) == ("bulk", "interactive")


def test_what_classify_leaves_out_follows_from_the_classes() -> None:
    policy = parse(TWO, "p.yaml")

    rules = policy.classify.rules or ()
    assert [rule.class_name for rule in rules] == [None, "night", "chat"]
    assert rules[0].class_from == "X-Headrace-Class"


def test_windows_left_out_share_a_quarter_among_classes_without_objective() -> None:
    policy = parse(TWO + "  dawn: {}\n", "p.yaml")

    assert policy.sizing.fixed.windows == {"chat": 64, "night": 8, "dawn": 8}


def test_an_engine_with_its_own_total_keeps_the_proportions() -> None:
    text = TWO + "sizing: {fixed: {windows: {night: 32}, engines: {small: {total: 8}, odd: {windows: {night: 5}}}}}\n"

    policy = parse(text, "p.yaml")

    assert policy.sizing.fixed.engines["small"] == EngineWindows(8, {"chat": 8, "night": 4})
    assert policy.sizing.fixed.engines["odd"] == EngineWindows(64, {"chat": 64, "night": 5})


def test_the_objective_grows_with_the_prompt() -> None:
    policy = parse("version: 1\nclasses: {chat: {ttft_sla_s: 0.5, ttft_sla_per_1k_tokens_s: 0.2}}\n", "p.yaml")

    assert policy.classes["chat"].ttft_objective_s(3000) == pytest.approx(1.1)


def test_a_slowdown_is_times_what_the_prompt_takes_alone() -> None:
    one = parse("version: 1\nclasses: {chat: {ttft_slowdown: 1.5}, night: {}}\n", "p.yaml").classes["chat"]

    assert one.has_ttft_objective
    assert one.ttft_objective_s(3000, alone_s=0.2) == pytest.approx(0.3)
    assert one.ttft_objective_s(3000) == pytest.approx(1.5 * (0.02 + 3000 / 15_000))


def test_what_was_promised_by_a_slowdown_stays_when_engines_are_known_better() -> None:
    policy = parse("version: 1\nclasses: {chat: {ttft_slowdown: 1.5}, night: {}}\n", "p.yaml")
    work = Work("w", "chat", "t", "m", "/v1/completions", 10.0, 10.3, prompt_tokens=3000, deadline_s=10.3)

    assert policy.objective_s(work) == pytest.approx(0.3)
    assert policy.objective_s(replace(work, class_name="night")) is None


def test_classes_with_a_slowdown_come_where_a_usual_prompt_puts_them() -> None:
    text = "version: 1\nclasses: {night: {}, slow: {ttft_sla_s: 5}, chat: {ttft_slowdown: 1.5}, fast: {ttft_sla_s: 0.05}}\n"

    assert parse(text, "p.yaml").precedence == ("fast", "chat", "slow", "night")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ("ttft_sla_s: 1, ttft_slowdown: 1.5", "classes.chat.ttft_slowdown is 1.5; stands in place of ttft_sla_s"),
        ("ttft_slowdown: 1", "classes.chat.ttft_slowdown is 1; must be > 1"),
        (
            "ttft_slowdown: 1.5, ttft_sla_per_1k_tokens_s: 0.1",
            "ttft_sla_per_1k_tokens_s is 0.1; needs ttft_sla_s beside it",
        ),
    ],
)
def test_a_slowdown_stands_alone_and_is_more_than_one(fields: str, told: str) -> None:
    (problem,) = problems(f"version: 1\nclasses: {{chat: {{{fields}}}}}\n")

    assert told in problem


def test_a_negative_objective_is_refused_in_the_words_of_the_house() -> None:
    text = "version: 1\nclasses:\n  chat:\n    ttft_sla_s: -3\n"

    assert problems(text) == ["p.yaml:4: classes.chat.ttft_sla_s is -3; must be > 0"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sizing: {fixed: {total: 0}}", "sizing.fixed.total is 0; must be >= 1"),
        ("sizing: {policy: magic}", "sizing.policy is 'magic'; must be one of 'fixed'"),
        ("sizing: {fixed: {windows: {night: 0}}}", "sizing.fixed.windows.night is 0; must be >= 1"),
        ("sizing: {fixed: {windows: {noon: 4}}}", "sizing.fixed.windows.noon is no class; must be one of chat, night"),
        ("sizing: {fixed: {windows: {chat: 65}}}", "sizing.fixed.windows.chat is 65; must be <= total (64)"),
        ("sizing: {fixed: {windows: {night: 64}}}", "sizing.fixed.windows is 64 for night; classes without ttft_sla_s"),
        ("classify: {rules: [{class: noon}]}", "classify.rules[0].class is 'noon'; must name a class: chat, night"),
        (
            "classify: {rules: [{model: x}]}",
            "classify.rules[0] is a rule; must have exactly one of class and class_from",
        ),
        ("classify: {rules: [{class: chat, class_from: X}]}", "must have exactly one of class and class_from"),
        ("classify: {shape: {light: noon}}", "classify.shape.light is 'noon'; must name a class"),
        ("tenants: {acme: {highest_class: noon}}", "tenants.acme.highest_class is 'noon'; must name a class"),
        ("tenants: {acme: {weight: 0}}", "tenants.acme.weight is 0; must be > 0"),
        ("tenants: {acme: {wieght: 1}}", "tenants.acme.wieght is unknown; did you mean weight?"),
        ("tenants: {acme: {white: 1}}", "tenants.acme.white is unknown; known keys are "),
    ],
)
def test_a_document_that_contradicts_itself_is_refused_at_the_key(line: str, expected: str) -> None:
    found = problems(TWO + line + "\n")

    assert len(found) == 1
    assert found[0].startswith("p.yaml:5: ")
    assert expected in found[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 2\nclasses: {chat: {}}\n", "p.yaml:1: version is 2; must be one of 1"),
        ("classes: {chat: {}}\n", "p.yaml:1: version is missing; required; add it"),
        ("version: 1\nclasses: {}\n", "p.yaml:2: classes is a mapping; must have at least 1"),
        ("version: 1\nclasses: {Chat: {}}\n", "p.yaml:2: classes.Chat"),
        ("version: 1\nclasses: {chat: {min_share: 5}}\n", "it is a fraction; write 0.05 for 5 %"),
        ("version: 1\nclasses: {chat: {ttft_sla_per_1k_tokens_s: 1}}\n", "needs ttft_sla_s beside it"),
        ("version: 1\nclasses: {a: {min_share: 0.7}, b: {min_share: 0.7}}\n", "adds up to 1.4; at most 1"),
    ],
)
def test_a_document_without_sense_is_refused(text: str, expected: str) -> None:
    found = problems(text)

    assert any(expected in one for one in found), found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TWO.replace("ttft_sla_s", "ttft_slo_s"), "classes.chat.ttft_slo_s is unknown; did you mean ttft_sla_s?"),
        (TWO + "sizing: {fixed: {engines: {a: {totl: 4}}}}\n", "engines.a.totl is unknown; did you mean total?"),
        (TWO + "classify: {rules: [{clas: chat}]}\n", "classify.rules[0].clas is unknown; did you mean class?"),
        (TWO + "clasify: {}\n", "clasify is unknown; did you mean classify?"),
    ],
)
def test_a_mistyped_key_is_answered_with_the_nearest_one_of_its_place(text: str, expected: str) -> None:
    assert any(expected in one for one in problems(text))


def test_windows_for_an_engine_that_is_not_configured_are_refused() -> None:
    found = problems(TWO + "sizing: {fixed: {engines: {gpu9: {total: 4}}}}\n", engines=("gpu0", "gpu1"))

    assert found == ["p.yaml:5: sizing.fixed.engines.gpu9 is an unknown engine; must be one of gpu0, gpu1"]


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_shipped_preset_reads_and_names_both_kinds_of_class(name: str) -> None:
    policy = presets.load(name)

    assert [policy.classes[one].has_ttft_objective for one in policy.precedence] == [True, False]


def test_the_balanced_preset_promises_half_a_second_and_bulk_nothing() -> None:
    policy = presets.load("balanced")

    assert policy.classes["interactive"].ttft_sla_s == 0.5
    assert policy.classes["bulk"].ttft_sla_s is None


def test_the_balanced_preset_writes_out_what_would_be_filled_in_anyway() -> None:
    written = presets.load("balanced")
    classes = "classes:\n  interactive: {ttft_sla_s: 0.5}\n  bulk: {}\n"
    filled = parse(f"version: 1\n{classes}sizing: {{policy: token_ledger}}\n", "p.yaml")

    assert written.classify == filled.classify
    assert written.sizing == filled.sizing
    assert written.classes["interactive"] == filled.classes["interactive"]


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_policy_written_out_in_full_reads_the_same(name: str) -> None:
    policy = presets.load(name)

    again = parse(render(policy), "again.yaml")

    assert effective(again) == effective(policy)
    assert again.precedence == policy.precedence


def test_a_preset_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(KeyError, match="balanced, interactive, throughput"):
        presets.text("turbo")


NAMES = st.sampled_from(["chat", "night", "bulk", "a-1"])
CLASSES = st.dictionaries(
    NAMES,
    st.fixed_dictionaries(
        {},
        optional={
            "ttft_sla_s": st.floats(-1, 3) | st.none(),
            "min_share": st.floats(-0.5, 1.5),
            "max_queue": st.integers(-1, 10),
        },
    ),
)


@given(CLASSES, st.integers(-1, 70), st.dictionaries(NAMES, st.integers(0, 70)))
def test_a_document_is_taken_whole_with_room_for_the_urgent_or_not_at_all(
    classes: dict[str, dict[str, float | None]], total: int, windows: dict[str, int]
) -> None:
    text = str({"version": 1, "classes": classes, "sizing": {"fixed": {"total": total, "windows": windows}}})

    try:
        policy = parse(text.replace("None", "null"), "p.yaml")
    except DocumentError:
        event("refused")
    else:
        event("taken")
        assert _patient_windows(policy) < policy.sizing.fixed.total or _of_one_kind(policy) or total == 1


def _patient_windows(policy: Policy) -> int:
    windows = policy.sizing.fixed.windows
    return sum(windows[name] for name, one in policy.classes.items() if not one.has_ttft_objective)


def _of_one_kind(policy: Policy) -> bool:
    return len({one.has_ttft_objective for one in policy.classes.values()}) == 1
