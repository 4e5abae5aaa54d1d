"""`headrace bench curve`: what is measured is what the step formula says, and the rules are judged as they are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backends.simulated.profiles import load_profile
from gateway.bench.curve import CONTINUOUS, RULES, STATIC, Point, curve, judge, knee
from gateway.cli import main
from gateway.load.lengths import Workload

H100 = load_profile("h100_llama31_8b_tp1")
EVEN = Workload(prompt_tokens=16, output_tokens=200, cv=0.0)


def by_batch(points: list[Point], mode: str) -> dict[int, Point]:
    return {point.batch: point for point in points if point.mode == mode}


def test_a_continuous_batch_gives_one_token_a_step_to_each_of_its_sequences() -> None:
    at = by_batch(curve(H100, EVEN, (1, 32)), CONTINUOUS)

    step_s = H100.step_model.step_s(32, 32 * 116)
    assert at[32].itl_p50_s == pytest.approx(step_s, rel=0.02)
    assert at[32].tokens_per_s == pytest.approx(32 / step_s, rel=0.05)
    assert at[32].running == pytest.approx(32, rel=0.02)
    assert at[1].ttft_p50_s == pytest.approx(H100.step_model.step_s(0, 0, [(16, 0)]), rel=0.02)


def test_joules_are_the_power_of_the_batch_over_its_useful_tokens() -> None:
    assert H100.power_model is not None
    point = by_batch(curve(H100, EVEN, (16,)), CONTINUOUS)[16]

    assert point.joules_per_token == pytest.approx(H100.power_model.power_w(16) / point.tokens_per_s, rel=0.02)


def test_answers_of_one_length_leave_no_padding_and_uneven_ones_much() -> None:
    even = by_batch(curve(H100, EVEN, (8,)), STATIC)[8]
    uneven = by_batch(curve(H100, replace(EVEN, cv=0.8), (8,)), STATIC)[8]

    assert even.padded_share == 0
    assert uneven.padded_share > 0.4
    assert uneven.tokens_per_s < 0.7 * even.tokens_per_s


def test_a_static_batch_keeps_newcomers_waiting_until_it_is_done() -> None:
    at = curve(H100, replace(EVEN, cv=0.8), (32,))

    continuous, static = by_batch(at, CONTINUOUS)[32], by_batch(at, STATIC)[32]
    assert static.ttft_p50_s > 50 * continuous.ttft_p50_s
    assert static.tokens_per_s < 0.6 * continuous.tokens_per_s


def test_memory_keeps_a_batch_smaller_than_its_clients() -> None:
    tight = replace(H100, kv_tokens=16 * 301)

    point = by_batch(curve(tight, replace(EVEN, prompt_tokens=200), (64,)), CONTINUOUS)[64]

    assert 8 < point.running < 25
    assert point.preemptions > 0


def test_the_knee_is_where_the_fixed_part_of_a_step_equals_the_part_of_the_batch() -> None:
    flat = replace(H100, step_model=replace(H100.step_model, a=6.0, b=0.06, d=0.0, e=0.0, c=0.0, f=0.0, h0=0.0, h1=0.0))

    assert knee(curve(flat, EVEN, (16, 32, 64, 96, 128, 192)), CONTINUOUS) == 96


def point(batch: int, tokens_per_s: float, joules: float | None) -> Point:
    return Point(CONTINUOUS, batch, batch, tokens_per_s, 0.1, 0.1, 0.01, 0.01, joules, 0.0, 0)


@pytest.mark.parametrize(
    ("joules", "tokens_per_s", "holds"),
    [
        ((3.0, 2.0, 2.5, 4.0, 4.0), (1, 2, 3, 100, 104), (True, True, True)),
        ((3.0, 2.0, 1.0, 0.5, 0.4), (1, 2, 3, 100, 106), (False, False, False)),
        ((None, None, None, None, None), (1, 2, 3, 100, 90), (None, None, True)),
    ],
)
def test_a_rule_holds_where_its_figures_do(
    joules: tuple[float | None, ...], tokens_per_s: tuple[float, ...], holds: tuple[bool | None, ...]
) -> None:
    batches = (2, 4, 16, 64, 128)

    at = {batch: point(batch, rate, energy) for batch, rate, energy in zip(batches, tokens_per_s, joules, strict=True)}
    judged = list(judge(at))

    assert tuple(rule for rule, _, _ in judged) == RULES
    assert tuple(held for _, held, _ in judged) == holds


def test_it_tells_points_knee_and_rules_as_json_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "curve.svg"

    code = main(["bench", "curve", "--batch", "1", "--batch", "8", "--json", "--picture", str(picture)])

    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [(one["mode"], one["batch"]) for one in told["points"]] == [
        (mode, batch) for mode in (CONTINUOUS, STATIC) for batch in (1, 8)
    ]
    assert set(told["knee"]) == {CONTINUOUS, STATIC}
    held = [(one["workload"], one["mode"]) for one in told["rules"] if one["rule"] == RULES[0] and one["holds"]]
    assert held == [("long, uneven prompts", STATIC)]
    assert picture.read_text().count("<path") == 8


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cv", "-1"], "--cv >= 0"),
        (["--batch", "0"], "--batch 0: must be >= 1"),
        (["--profile", "h100"], "did you mean"),
        (["--prompt-tokens", "500000"], "must be <"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "curve", *flags]) == 2

    told = capsys.readouterr()
    assert words in told.err
    assert told.err.count("\n") == 1
