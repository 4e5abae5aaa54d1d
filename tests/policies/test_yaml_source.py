"""Every mistake in a document is named at once, with its line; and nothing odd in YAML gets through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from policies.yaml_source import DEPTH_MAX, NODES_MAX, TEXT_MAX, DocumentError, load

Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class Engine:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    url: Annotated[str, Field(strict=True)]
    kv_high: Fraction = 0.8
    seats: Annotated[int, Field(strict=True, ge=1)] = 1
    api_key: Annotated[str, Field(strict=True, min_length=8)] = "not-a-secret"


@dataclass(frozen=True)
class House:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    engines: dict[str, Engine]
    names: tuple[Annotated[str, Field(strict=True)], ...] = ()
    drain: Annotated[bool, Field(strict=True)] = field(default=False)


class Budget(BaseModel):
    max_tokens: Annotated[int, Field(ge=0)]


class Cellar(BaseModel):
    model_config = ConfigDict(extra="forbid")

    depth_m: Annotated[float, Field(gt=0)]


def problems(text: str) -> list[str]:
    with pytest.raises(DocumentError) as caught:
        load(text, House, "house.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_a_good_document_becomes_the_model() -> None:
    house = load("engines:\n  a: {url: http://a, seats: 4}\nnames: [x]\n", House, "house.yaml")

    assert house == House({"a": Engine("http://a", seats=4)}, ("x",))


def test_every_mistake_is_named_at_once_with_its_line() -> None:
    found = problems("engines:\n  a:\n    url: 3\n    seats: 0\n  b: {url: x, seats: 1.5}\ndrain: 1\nnames: x\n")

    assert found == [
        "house.yaml:3: engines.a.url is (hidden); must be text; put it in quotes",
        "house.yaml:4: engines.a.seats is 0; must be >= 1",
        "house.yaml:5: engines.b.seats is 1.5; must be a whole number",
        "house.yaml:6: drain is 1; must be true or false",
        "house.yaml:7: names is 'x'; must be a list",
    ]


def test_an_unknown_key_is_refused_with_the_nearest_known_one() -> None:
    found = problems("engines:\n  a:\n    url: http://a\n    seat: 4\ndrian: true\n")

    assert found == [
        "house.yaml:4: engines.a.seat is unknown; did you mean seats?",
        "house.yaml:5: drian is unknown; did you mean drain?",
    ]


def test_an_unknown_key_like_no_other_is_refused_with_all_known_ones() -> None:
    assert problems("engines: {}\nzzz: 1\n") == ["house.yaml:2: zzz is unknown; known keys are drain, engines, names"]


def test_a_duplicate_key_is_refused_by_name_with_both_lines() -> None:
    found = problems("engines:\n  a: {url: x}\n  b: {url: x}\n  a: {url: y}\n")

    assert found == ["house.yaml:4: engines.a is written twice; first on line 2; keep one of them"]


def test_a_missing_key_is_named_at_the_mapping_that_lacks_it() -> None:
    assert problems("engines:\n  a: {url: x}\n  b: {}\n") == [
        "house.yaml:3: engines.b.url is missing; required; add it"
    ]


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_a_number_that_is_none_is_refused(value: str) -> None:
    (found,) = problems(f"engines: {{a: {{url: x, kv_high: {value}}}}}")

    assert "must be a finite number" in found


def test_a_percentage_written_for_a_fraction_gets_the_right_number_told() -> None:
    (found,) = problems("engines: {a: {url: x, kv_high: 80}}")

    assert found.endswith("engines.a.kv_high is 80; must be <= 1, it is a fraction; write 0.8 for 80 %")


@pytest.mark.parametrize(
    ("value", "expectation"),
    [
        ("'4'", "'4'; must be a whole number; without quotes"),
        ("500ms", "'500ms'; must be a whole number; leave the unit out, it stands in the key's name"),
        ("true", "true; must be a whole number"),
        ("null", "null; must be a whole number"),
        ("2020-01-01", "'2020-01-01'; must be a whole number; without quotes"),
        ("[1]", "a list; must be a whole number"),
        ("{a: 1}", "a mapping; must be a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_shown_with_what_is_expected(value: str, expectation: str) -> None:
    (found,) = problems(f"engines: {{a: {{url: x, seats: {value}}}}}")

    assert found == f"house.yaml:1: engines.a.seats is {expectation}"


@pytest.mark.parametrize("secret", ["sk-123", "3", "[sk-123]"])
def test_a_secret_never_gets_into_a_message(secret: str) -> None:
    (found,) = problems(f"engines: {{a: {{url: x, api_key: {secret}}}}}")

    assert "sk-123" not in found
    assert "engines.a.api_key" in found


@pytest.mark.parametrize("value", ["redis://user:pass@host/", "sk-123456", "Bearer abc"])
def test_a_value_that_looks_like_a_secret_is_hidden_wherever_it_stands(value: str) -> None:
    (found,) = problems(f"engines: {{a: {{url: x, seats: '{value}'}}}}")

    assert "engines.a.seats is (hidden)" in found


def test_a_key_that_counts_tokens_is_no_secret() -> None:
    with pytest.raises(DocumentError, match="max_tokens is -1"):
        load("max_tokens: -1", Budget, "budget.yaml")


def test_a_secret_under_a_mistyped_key_never_gets_into_a_message() -> None:
    (found,) = problems("engines: {a: {url: x, apikey: sk-123}}")

    assert "sk-123" not in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the document is empty"),
        ("# only a comment\n", "the document is empty"),
        ("engines: [", "not YAML"),
        ("engines:\n\t- x", "not YAML"),
        ("engines: *nope", "not YAML"),
        ("engines: \x00", "not YAML"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("[" * 100_000, "nested too deeply"),
        ("a: &a [*a]", "nested too deeply"),
        ("a" * (TEXT_MAX + 1), "must be at most"),
    ],
)
def test_text_that_is_no_single_readable_document_is_refused(text: str, expected: str) -> None:
    (found,) = problems(text)

    assert expected in found


def test_an_alias_bomb_is_refused_before_it_is_expanded() -> None:
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 9))

    (found,) = problems(f"l0: &l0 [x, x, x, x, x, x, x, x, x]\n{levels}\n")

    assert f"more than {NODES_MAX} values" in found


def test_a_deep_but_plain_document_is_refused_at_the_bound() -> None:
    (found,) = problems("a: " + "[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1))

    assert "nested too deeply" in found


@pytest.mark.parametrize(
    "text",
    ["drain: !!python/object/apply:os.system [ls]", "drain: !!binary aGk=", "drain: !mine x", "drain: !!set {a, b}"],
)
def test_a_tag_that_builds_an_object_is_refused(text: str) -> None:
    assert any("must be a plain value" in found for found in problems(f"engines: {{}}\n{text}\n"))


@pytest.mark.parametrize("key", ["1", "true", "null", "1.5", "[a]"])
def test_a_key_that_is_not_text_is_refused(key: str) -> None:
    assert any("a key must be text" in found for found in problems(f"engines: {{}}\n? {key}\n: x\n"))


def test_a_merge_key_is_refused_instead_of_ignored() -> None:
    assert any("merge keys are not read" in found for found in problems("engines: {a: {url: x}}\n<<: {drain: true}\n"))


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    assert load("\ufeffengines: {}\n", House, "house.yaml") == House({})


def test_an_anchor_stands_for_what_it_names() -> None:
    house = load("engines:\n  a: &a {url: x}\n  b: *a\n", House, "house.yaml")

    assert house.engines["a"] == house.engines["b"]


def test_a_number_too_long_to_read_is_a_problem_and_not_a_crash() -> None:
    assert any("cannot be read" in found for found in problems(f"engines: {{a: {{url: x, seats: {'9' * 5000}}}}}"))


def test_a_check_reports_what_types_cannot_say() -> None:
    def check(house: House) -> list[tuple[tuple[str | int, ...], str, str]]:
        return [(("engines", name), "unfit", "take another") for name in house.engines]

    with pytest.raises(DocumentError, match=r"house\.yaml:2: engines\.a is unfit; take another"):
        load("engines:\n  a: {url: x}\n", House, "house.yaml", check=check)


def test_a_pydantic_model_is_read_like_a_dataclass() -> None:
    with pytest.raises(DocumentError, match=r"cellar\.yaml:1: depth_m is -3; must be > 0"):
        load("depth_m: -3\n", Cellar, "cellar.yaml")


def told(text: str) -> DocumentError | House:
    try:
        return load(text, House, "house.yaml")
    except DocumentError as error:
        return error


@given(st.text(max_size=200) | st.text(alphabet="engius:{}[],-&*!?|>'\"% \n#ax0.", max_size=80))
def test_any_text_is_a_document_or_a_list_of_problems_one_a_line(text: str) -> None:
    result = told(text)

    assert isinstance(result, House) or len(str(result).splitlines()) == len(result.problems) > 0
    assert isinstance(result, House) or all(problem.line >= 1 for problem in result.problems)
