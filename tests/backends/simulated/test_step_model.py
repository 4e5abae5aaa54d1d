"""The closed form of a run of steps, and the profiles that fill it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.simulated.profiles import load_profile, profile_names
from backends.simulated.step_model import PowerModel, StepModel

MODEL = load_profile("rtx4090_llama31_8b_tp1").step_model


@given(st.integers(1, 1000), st.integers(0, 10**6), st.integers(0, 3000))
def test_a_run_of_decode_steps_takes_the_sum_of_its_steps(decoding: int, context: int, steps: int) -> None:
    run_s = MODEL.decode_run_s(decoding, context, steps)

    one_by_one_s = sum(MODEL.step_s(decoding, context + step * decoding) for step in range(steps))
    assert run_s == pytest.approx(one_by_one_s, rel=1e-9)


@given(st.integers(1, 1000), st.integers(0, 10**6), st.floats(0, 200), st.integers(0, 5000))
def test_the_steps_within_a_time_are_the_most_that_fit(
    decoding: int, context: int, available_s: float, most: int
) -> None:
    steps = MODEL.decode_steps_within(decoding, context, available_s, at_most=most)

    assert MODEL.decode_run_s(decoding, context, steps) <= available_s or steps == 0
    assert steps == most or MODEL.decode_run_s(decoding, context, steps + 1) > available_s


def test_a_prefill_of_one_prompt_costs_what_the_formula_says() -> None:
    model = StepModel(a=6.9, b=0.016, d=2.5, e=0.0293, c=4.9e-5, f=1.5e-6, h0=0.4, h1=0.033)

    step_ms = 1000 * model.step_s(0, 0, [(2048, 0)])

    assert step_ms == pytest.approx(2.5 + 0.0293 * 2048 + 1.5e-6 * 2048 * 1024 + 0.4)


MIXTURE = StepModel(a=6, b=0.03, d=5, e=0.04, c=6e-5, f=4e-6, h0=1, h1=0.02, g=20, k=1 / 16, ranks=2)


@given(st.integers(1, 600), st.integers(0, 10**6), st.integers(0, 300), st.floats(0, 50))
def test_a_run_of_a_mixture_on_two_ranks_takes_the_sum_of_its_steps(
    decoding: int, context: int, steps: int, available_s: float
) -> None:
    run_s = MIXTURE.decode_run_s(decoding, context, steps)
    within = MIXTURE.decode_steps_within(decoding, context, available_s, at_most=steps)

    assert run_s == pytest.approx(sum(MIXTURE.step_s(decoding, context + n * decoding) for n in range(steps)), rel=1e-9)
    assert MIXTURE.decode_run_s(decoding, context, within) <= available_s or within == 0
    assert within == steps or MIXTURE.decode_run_s(decoding, context, within + 1) > available_s


def test_a_small_batch_reads_few_experts_and_a_large_one_all() -> None:
    dense = replace(MIXTURE, g=0.0)

    read_ms = [1000 * (MIXTURE.step_s(batch, 0) - dense.step_s(batch, 0)) for batch in (1, 16, 256)]

    assert read_ms == pytest.approx([20 / 16, 20 * (1 - (15 / 16) ** 16), 20], rel=1e-6)


def test_ranks_share_the_decoding_and_wait_for_the_longest_piece_of_prefill() -> None:
    one, two = replace(MIXTURE, ranks=1), MIXTURE

    assert two.step_s(64, 10_000) < one.step_s(64, 10_000)
    assert two.step_s(64, 10_000) == pytest.approx(one.step_s(32, 5_000), rel=0.15)
    assert two.step_s(0, 0, [(2000, 0)]) == pytest.approx(one.step_s(0, 0, [(2000, 0)]))
    assert two.step_s(0, 0, [(1000, 0), (1000, 0)]) < 0.7 * one.step_s(0, 0, [(1000, 0), (1000, 0)])


def test_a_scaled_model_takes_the_factor_of_every_time() -> None:
    chunks = [(300, 100)]

    assert MIXTURE.scaled(1.6).step_s(64, 10_000, chunks) == pytest.approx(1.6 * MIXTURE.step_s(64, 10_000, chunks))


def test_power_rises_from_its_floor_towards_its_ceiling_with_the_batch() -> None:
    power = PowerModel(p0=452, dp=236, b0=53.8)

    watts = [power.power_w(batch) for batch in (0, 1, 54, 512)]

    assert watts[0] == 452
    assert watts == sorted(watts)
    assert watts[-1] == pytest.approx(688, abs=0.1)


def test_a_step_model_without_time_is_refused() -> None:
    with pytest.raises(ValueError, match="coefficients must be >= 0"):
        StepModel(a=0, b=0, d=0, e=0, c=0, f=0, h0=0, h1=0)


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_loads_and_names_its_source(name: str) -> None:
    profile = load_profile(name)

    assert profile.kv_tokens > 16_000
    assert "@" in profile.source
    assert 0.001 < profile.step_model.step_s(1, 1000) < 0.2


def test_an_unknown_profile_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'h100_llama31_8b_tp1'"):
        load_profile("h100_llama_8b")
