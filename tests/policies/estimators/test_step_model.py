"""The step model finds an engine's speed from gaps and first tokens, and keeps it against noise."""

from __future__ import annotations

import json
import math
import random

import pytest

from policies.estimators.step_model import PRIOR, StepModel, ttft_row

TRUE = (0.0073, 5e-5, 4.9e-8, 2.93e-5)


def true_s(row: tuple[float, float, float, float], factor: float = 1.0) -> float:
    return factor * sum(weight * value for weight, value in zip(TRUE, row, strict=True))


def taught(
    model: StepModel, count: int, *, noise: float = 0.1, factor: float = 1.0, seed: int = 1, budget: int = 2048
) -> StepModel:
    rng = random.Random(seed)
    for _ in range(count):
        sequences = rng.randint(1, 100)
        context = sequences * rng.randint(100, 3000)
        spread = rng.uniform(1 - noise, 1 + noise)
        if rng.random() < 0.5:
            prompts = rng.choice([0, 0, 20, 100, 400])
            model.saw_gap(true_s((1, sequences, context, prompts), factor) * spread, sequences, context, prompts)
        else:
            pending = rng.randint(50, 8000)
            seen_s = true_s(ttft_row(pending, sequences, context, budget), factor) * spread
            model.saw_first_token(seen_s, pending, sequences, context)
    return model


def test_steps_and_first_tokens_are_predicted_within_a_tenth_after_a_few_hundred() -> None:
    model = taught(StepModel(), 300)

    assert model.step_s(50, 60_000) == pytest.approx(true_s((1, 50, 60_000, 0)), rel=0.1)
    assert model.ttft_s(4000, 50, 60_000) == pytest.approx(true_s(ttft_row(4000, 50, 60_000, 2048)), rel=0.1)
    assert model.error < 0.1


@pytest.mark.parametrize("budget", [1024, 2048, 8192])
def test_the_batch_budget_is_found_from_first_tokens(budget: int) -> None:
    model = taught(StepModel(), 1500, budget=budget)

    assert model.budget_tokens == budget
    assert model.ttft_s(7000, 50, 60_000) == pytest.approx(true_s(ttft_row(7000, 50, 60_000, budget)), rel=0.1)


def test_what_was_learned_is_predicted_again_by_a_successor() -> None:
    model, successor = taught(StepModel(), 1500, budget=8192), StepModel()

    successor.restore(json.loads(json.dumps(model.snapshot())))

    assert successor.ttft_s(7000, 50, 60_000) == model.ttft_s(7000, 50, 60_000)


def test_a_successor_goes_on_learning_from_what_was_learned() -> None:
    model, successor = taught(StepModel(), 1500, budget=8192), StepModel()
    successor.restore(json.loads(json.dumps(model.snapshot())))

    for one in (model, successor):
        one.saw_gap(true_s((1, 50, 60_000, 0)), 50, 60_000, 0)

    assert successor.theta == pytest.approx(model.theta)


@pytest.mark.parametrize(
    "odd",
    [
        {"moments": [1.0] * 15},
        {"products": [-1.0] * 4},
        {"miss": "0.1"},
        {"moments": None},
        {"moments": [1e308] * 16},
        {"moments": [9.0, 1.0] * 8},
        {"products": [10**400] * 4},
    ],
)
def test_of_a_snapshot_whose_sums_cannot_be_read_the_coefficients_are_taken(odd: dict[str, object]) -> None:
    model, successor = taught(StepModel(), 200), StepModel()

    successor.restore({**json.loads(json.dumps(model.snapshot())), **odd})
    foretold = list(successor.theta)
    successor.saw_gap(0.02, 5, 5000, 0)

    assert foretold == model.theta
    assert all(math.isfinite(one) and one >= 0 for one in successor.theta)


def test_by_no_snapshot_do_steps_take_no_time() -> None:
    """What comes free in so many steps is reckoned by the second."""
    successor = StepModel()

    successor.restore({"budget": 2048, "theta": [0.0] * 4})

    assert successor.step_s(0, 0) > 0


def test_an_engine_of_unknown_speed_is_known_to_be_uncertain() -> None:
    assert StepModel().error > 0.5


def test_a_wild_observation_changes_nothing() -> None:
    model = taught(StepModel(), 200)
    before = list(model.theta)

    model.saw_gap(3.0, 50, 60_000, 0)

    assert model.theta == before


def test_an_observation_is_wild_also_for_a_model_that_errs_by_a_quarter() -> None:
    model = taught(StepModel(), 200, noise=0.6)
    before = list(model.theta)

    model.saw_gap(300.0, 50, 60_000, 0)

    assert model.error > 1 / 6
    assert model.theta == before


def test_an_engine_that_became_slower_is_believed_in_the_end() -> None:
    model = taught(taught(StepModel(), 300), 900, factor=2.0, seed=2)

    assert model.step_s(50, 60_000) == pytest.approx(true_s((1, 50, 60_000, 0), 2.0), rel=0.2)


def test_without_excitation_a_coefficient_stays_where_the_prior_put_it() -> None:
    model = StepModel()
    for _ in range(5000):
        model.saw_gap(true_s((1, 0, 0, 0)), 0, 0, 0)

    assert model.theta[3] == pytest.approx(PRIOR[3])
    assert model.base_s == pytest.approx(TRUE[0], rel=0.02)


@pytest.mark.parametrize("slower", [10, 100])
def test_a_few_first_tokens_tell_the_speed_of_an_engine_that_the_prior_is_far_from(slower: float) -> None:
    model, errors = StepModel(), []
    for number in range(30):
        pending = (300, 1000, 2000)[number % 3]
        seen_s = true_s(ttft_row(pending, 0, 0, 2048), slower)
        errors.append(abs(model.ttft_s(pending, 0, 0) - seen_s) / seen_s)
        model.saw_first_token(seen_s, pending, 0, 0)

    assert errors[0] > 0.7
    assert max(errors[3:]) < 0.5
    assert max(errors[-3:]) < 0.2


@pytest.mark.parametrize("nonsense", [0.0, -1.0, math.nan, math.inf])
def test_nonsense_is_not_learned(nonsense: float) -> None:
    model = StepModel()

    model.saw_gap(nonsense, 1, 100, 0)

    assert model.theta == list(PRIOR)


def test_nothing_becomes_negative() -> None:
    rng = random.Random(3)
    model = StepModel()
    for _ in range(500):
        model.saw_gap(rng.uniform(1e-4, 1), rng.randint(0, 50), rng.randint(0, 90_000), rng.choice([0, 500]))

    assert all(weight >= 0 for weight in model.theta)
    assert model.base_s > 0


def test_prompts_that_a_cache_held_do_not_pull_every_prediction_down() -> None:
    model, rng = StepModel(), random.Random(1)
    for number in range(1500):
        row = (1, 30, 60_000, 0)
        model.saw_gap(true_s(row), *row[1:])
        pending = rng.randint(2000, 8000)
        seen_s = true_s(ttft_row(pending, 30, 60_000, 2048))
        model.saw_first_token(seen_s / 20 if number % 5 == 0 else seen_s, pending, 30, 60_000)

    assert model.step_s(30, 60_000) == pytest.approx(true_s((1, 30, 60_000, 0)), rel=0.15)
    assert model.ttft_s(5000, 30, 60_000) > 0.6 * true_s(ttft_row(5000, 30, 60_000, 2048))
