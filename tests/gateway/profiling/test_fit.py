"""The fit: the parameters of a simulated engine come back from what a sweep of it saw, over HTTP in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from backends.simulated.profiles import EngineOptions, load_profile
from backends.simulated.step_model import StepModel
from gateway.profiling.fit import NotEnough, fit
from gateway.profiling.observations import Alone, Seen, Stall, Together, chunks
from gateway.profiling.sweep import Bounds
from tests.gateway.profiling.virtual_engine import swept

PROMPTS = (16, 48, 96, 160, 256, 384, 640, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def seen_of(model: StepModel, *, budget: int, overhead_s: float = 0.001, noise: float = 0.0) -> Seen:
    """What a sweep without any network would see of an engine."""
    dice = random.Random(5)

    def about(seconds: float) -> float:
        return seconds * (1 + dice.uniform(-noise, noise))

    alone = [
        Alone(
            tokens,
            about(overhead_s + sum(model.step_s(0, 0, [(one.chunk, one.before)]) for one in chunks(tokens, budget))),
        )
        for tokens in PROMPTS
    ]
    together = [
        Together(batch, batch * each, about(model.step_s(batch, batch * each)))
        for batch in BATCHES
        for each in (60, 70, 80, 2080)
    ]
    longest_s = max(model.step_s(1, 80, [(one.chunk, one.before)]) for one in chunks(8192, budget - 1))
    return Seen(tuple(alone), tuple(together), (Stall(8192, 80, longest_s, model.step_s(1, 80)),))


@pytest.mark.slow
def test_a_sweep_over_http_recovers_the_parameters_within_a_tenth() -> None:
    """An engine whose steps plan one ahead and whose host work is nil, so that every parameter can be seen."""
    true = load_profile("rtx4090_llama31_8b_tp1")

    seen, facts = swept(Bounds(batch_max=48, prompt_tokens_max=6000), profile=true.name)
    found = fit(seen)

    for name in "abdecf":
        assert getattr(found.model, name) == pytest.approx(getattr(true.step_model, name), rel=0.1), name
    assert found.budget_tokens == true.max_num_batched_tokens
    assert found.error < 0.01
    assert (facts.kv_tokens, facts.lookahead, facts.stopped) == (true.kv_tokens, True, "")


@pytest.mark.parametrize("name", ["h100_llama31_8b_tp1", "h100x4_llama31_70b_tp4", "a100_llama3_8b_tp1"])
def test_host_work_of_a_step_is_part_of_its_base_and_that_of_a_sequence_is_told_apart(name: str) -> None:
    profile = load_profile(name)
    true = profile.step_model

    found = fit(seen_of(true, budget=2048))

    assert found.model.a == pytest.approx(true.a + true.h0, rel=0.02)
    assert found.model.d == pytest.approx(true.d + true.h0, rel=0.1, abs=0.1)
    assert found.model.b + found.model.h1 == pytest.approx(true.b + true.h1, rel=0.02)
    assert found.model.h1 == pytest.approx(true.h1, rel=0.1, abs=0.002)
    assert found.model.e == pytest.approx(true.e, rel=0.02)
    assert found.overhead_s == pytest.approx(0.001, abs=0.0005)
    assert found.budget_tokens == 2048


def test_the_experts_of_a_mixture_are_found_and_their_share() -> None:
    true = replace(load_profile("rtxpro6000_qwen3_30b_a3b").step_model, ranks=1)

    found = fit(seen_of(true, budget=4096))

    assert found.model.k == true.k
    assert found.model.g == pytest.approx(true.g, rel=0.05)


def test_a_plain_model_is_not_taken_for_a_mixture() -> None:
    assert fit(seen_of(load_profile("h100_llama31_8b_tp1").step_model, budget=8192, noise=0.05)).model.g == 0


def test_noise_and_a_wild_point_do_not_spoil_the_prediction() -> None:
    true = load_profile("h100_llama31_8b_tp1").step_model
    seen = seen_of(true, budget=8192, noise=0.03)
    wild = replace(seen.together[5], seconds=4 * seen.together[5].seconds)
    seen = replace(seen, together=(*seen.together[:5], wild, *seen.together[6:]))

    found = fit(seen)

    for batch, context in ((4, 4_000), (32, 40_000), (100, 100_000)):
        assert found.model.step_s(batch, context) == pytest.approx(true.step_s(batch, context), rel=0.06)
    assert found.worst > 0.5


def test_without_a_stall_the_budget_is_unknown() -> None:
    seen = seen_of(load_profile("h100_llama31_8b_tp1").step_model, budget=100_000)
    whole_s = load_profile("h100_llama31_8b_tp1").step_model.step_s(1, 80, [(8192, 0)])

    assert fit(replace(seen, stalls=(Stall(8192, 80, whole_s, 0.008),))).budget_tokens is None


def test_too_little_is_no_model() -> None:
    seen = seen_of(load_profile("h100_llama31_8b_tp1").step_model, budget=8192)

    with pytest.raises(NotEnough, match="need three lengths of prompts and two sizes of batches"):
        fit(replace(seen, alone=seen.alone[:2]))


@pytest.mark.slow
def test_a_sweep_finds_the_seats_that_an_engine_does_not_tell_and_stays_within_its_memory() -> None:
    options = EngineOptions(max_num_seqs=6, kv_tokens=8192)

    seen, facts = swept(Bounds(batch_max=32, prompt_tokens_max=600), options=options)

    assert facts.seats == 6
    assert max(one.batch for one in seen.together) <= 6
    assert facts.stopped == ""
