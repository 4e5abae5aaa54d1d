"""From a model to what is written: limits, advice, files that the other commands read, and what was learned in service."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from backends.simulated.profiles import load_profile
from backends.simulated.step_model import PowerModel
from gateway.cli import main
from gateway.errors import StartError
from gateway.profiling.advice import HEADROOM, advise, command_line, compose, helm, plan
from gateway.profiling.document import Profiled, power_model, write
from gateway.profiling.fit import Fitted, fit
from gateway.profiling.limits import Workload, limits
from gateway.profiling.live import decode_s, drift, of_learned, profile_of, prompt_s
from gateway.profiling.observations import Seen, Together
from gateway.profiling.sweep import Facts
from policies.sizing import LearnedStep
from tests.gateway.profiling.test_fit import seen_of

TRUE = load_profile("h100_llama31_8b_tp1")
FACTS = Facts(kv_tokens=420_000, seats=256, max_model_len=131_072, lookahead=False, took_s=60.0)
KINDS = ("vllm", "tgi", "sglang", "llamacpp")
LEARNED = LearnedStep(0.0075, 4.9e-5, 5e-8, 3e-5, error=0.05, seen=500)


@cache
def measured() -> tuple[Seen, Fitted]:
    """A sweep of one engine, and its fit."""
    seen, power = seen_of(TRUE.step_model, budget=4096), PowerModel(450, 240, 54)
    seen = replace(seen, together=tuple(replace(one, power_w=power.power_w(one.batch)) for one in seen.together))
    return seen, fit(seen)


def profiled(kind: str = "vllm", facts: Facts = FACTS) -> Profiled:
    (seen, fitted), workload = measured(), Workload()
    found = limits(fitted.model, facts.kv_tokens, facts.seats, workload)
    return Profiled(
        model="meta/llama",
        kind=kind,
        engine=f"{kind} 1",
        where="http://h:1",
        gpu="H100",
        day="2026-11-30",
        seen=seen,
        facts=facts,
        fitted=fitted,
        workload=workload,
        limits=found,
        advice=advise(kind, plan(fitted, found, facts, workload)),
    )


def test_the_knee_is_where_the_share_of_the_batch_in_a_step_is_its_base() -> None:
    model = replace(TRUE.step_model, c=0.0, d=0.0, e=0.0)

    found = limits(model, None, None, Workload())

    assert found.knee_batch == round((model.a + model.h0) / (model.b + model.h1))
    assert found.kv_batch is None
    assert set(found.peaks.values()) == {None}


def test_what_fits_at_once_is_bound_by_memory_in_whole_blocks_and_by_seats() -> None:
    found = limits(TRUE.step_model, 420_000, 256, Workload())

    assert found.peaks == {1024: 256, 4096: 99, 16_384: 24}
    assert found.kv_batch == int(0.97 * 420_000) // 768


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("free", [None, 0.02, 0.3])
def test_no_advice_takes_the_last_tenth_of_a_gpus_memory(kind: str, free: float | None) -> None:
    of = profiled(kind, replace(FACTS, vram_free_fraction=free))

    shares = [float(one.value) for one in of.advice if "memory" in one.flag or "mem-fraction" in one.flag]

    assert all(share <= 1 - HEADROOM for share in shares)
    assert len(shares) == (kind != "llamacpp")
    assert all(one.reason for one in of.advice)


def test_an_engine_short_of_memory_is_given_no_more_seats_than_fit() -> None:
    of = profiled(facts=replace(FACTS, kv_tokens=8_000))

    seats = next(one for one in of.advice if one.flag == "--max-num-seqs")
    assert seats.value == str(int(0.97 * 8_000) // 768)
    assert "more would be preempted" in seats.reason


def test_the_budget_of_a_step_stalls_nobody_for_long() -> None:
    of = profiled()
    seats, budget = (
        int(next(one.value for one in of.advice if one.flag == flag))
        for flag in ("--max-num-seqs", "--max-num-batched-tokens")
    )

    context = round(seats * of.workload.context_tokens)
    assert of.fitted.model.step_s(seats, context, [(budget, 0)]) <= 0.15
    assert of.fitted.model.step_s(seats, context, [(2 * budget, 0)]) > 0.15


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_and_the_fragments_hold_every_flag(kind: str) -> None:
    of = profiled(kind)
    words = shlex.split(command_line(kind, "a model", of.advice))
    service = YAML(typ="safe").load(compose(kind, "a model", of.advice))["services"]["engine"]
    values = YAML(typ="safe").load(helm(kind, "a model", of.advice))["engine"]

    for one in of.advice:
        for told in (words, service["command"], values["args"]):
            assert not one.flag or one.flag in told
            assert not (one.flag and one.value) or told[told.index(one.flag) + 1] == one.value
    assert "a model" in words
    assert values["args"] == service["command"]


def test_an_engine_of_no_known_kind_gets_the_numbers_without_a_command() -> None:
    of = profiled("openai")

    assert [one.flag for one in of.advice] == ["", "", ""]
    assert command_line("openai", "m", of.advice) == compose("openai", "m", of.advice) == ""


@pytest.mark.slow
def test_what_is_written_is_a_profile_for_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, profiled())
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,100,20\n0.5,200,30\n")

    found = load_profile(str(tmp_path / "profile.json"))
    code = main(["replay", str(trace), "--engine", str(tmp_path / "profile.json"), "--json"])

    assert code == 0
    assert json.loads(capsys.readouterr().out)["outcomes"] == {"completed": 2}
    assert found.step_model.e == pytest.approx(TRUE.step_model.e, rel=0.02)
    assert (found.kv_tokens, found.max_num_seqs, found.max_num_batched_tokens) == (420_000, 256, 4096)
    assert found.power_model is not None
    assert found.power_model.power_w(64) == pytest.approx(PowerModel(450, 240, 54).power_w(64), rel=0.02)
    page = (tmp_path / "profile.md").read_text()
    assert "vllm serve meta/llama --max-num-seqs" in page
    assert "| at once with 16k tokens | 24 |" in page
    assert (tmp_path / "profile.svg").read_text().count("<g transform") == 4


def test_what_was_not_found_out_is_said_and_the_most_that_was_tried_taken(tmp_path: Path) -> None:
    of = profiled(facts=Facts())
    write(tmp_path, replace(of, fitted=replace(of.fitted, budget_tokens=None)))

    found = load_profile(str(tmp_path / "profile.json"))

    assert found.derivation.count("not found out: ") == 1
    assert found.kv_tokens == 128 * 2080
    assert "| KV memory | unknown tokens |" in (tmp_path / "profile.md").read_text()


def test_power_of_fewer_than_three_batches_is_no_curve() -> None:
    assert power_model([Together(1, 10, 0.01, 300.0), Together(2, 10, 0.01, 310.0), Together(4, 10, 0.01)]) is None


# What was learned in service.


def test_a_learned_model_becomes_a_profile_that_predicts_the_same() -> None:
    model = of_learned(LEARNED)

    for batch, context in ((1, 500), (8, 8_000), (32, 40_000)):
        assert model.step_s(batch, context) == pytest.approx(decode_s(LEARNED, batch, context), rel=0.05)
    assert model.step_s(0, 0, [(1024, 0)]) == pytest.approx(prompt_s(LEARNED, 1024), rel=0.1)


def test_drift_is_the_largest_difference_of_usual_work_and_unknown_while_little_was_learned() -> None:
    same = of_learned(LEARNED)

    assert drift(same, LEARNED) == pytest.approx(0.0, abs=0.08)
    assert drift(same.scaled(2.0), LEARNED) == pytest.approx(0.5, abs=0.05)
    assert drift(same, replace(LEARNED, seen=10)) is None
    assert drift(same, replace(LEARNED, error=0.6)) is None


def test_a_profile_of_a_status_page_says_what_it_does_not_know() -> None:
    learned = {name: getattr(LEARNED, name) for name in LEARNED.__slots__}
    engine = {"name": "e", "models": ["m"], "learned_step": learned, "kv_capacity_tokens": 9000.0, "seats": None}

    found = profile_of({"engines": [engine]}, "e")

    assert found["engine"] == {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "kv_tokens": 9000,
        "lookahead": False,
    }
    assert "max_num_seqs is not told: 256 assumed" in str(found["derivation"])


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"engines": [{"name": "other"}]}, "the gateway has other; name one of them"),
        ({"engines": [{"name": "e", "learned_step": None}]}, "nothing was learned of it yet"),
    ],
)
def test_an_engine_that_nothing_was_learned_of_has_no_profile(status: dict[str, object], said: str) -> None:
    with pytest.raises(StartError, match=said):
        profile_of(status, "e")
