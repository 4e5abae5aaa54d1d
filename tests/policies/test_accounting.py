"""Energy taken apart by batch and phase, and money laid on those who were served."""

from __future__ import annotations

import random

import pytest

from policies.accounting import (
    JOULES_PER_KWH,
    LEAST_STRETCHES,
    OUTPUT_WEIGHT,
    PhaseCosts,
    PhaseEnergy,
    Prices,
    batch_bin,
    energy_cost,
    per_million,
    rent,
)


@pytest.mark.parametrize(
    ("batch", "name"), [(0, "1"), (1, "1"), (1.5, "2"), (2, "2"), (3, "4"), (64, "64"), (65, "128"), (5000, "512")]
)
def test_a_batch_counts_in_the_power_of_two_at_or_above_it(batch: float, name: str) -> None:
    assert batch_bin(batch) == name


def fed(count: int, *, prompts: bool = True, noise: float = 0.0) -> PhaseEnergy:
    """An engine that takes 300 W, 0.02 J a prompt token and 0.12 J a generated one."""
    dice, energy = random.Random(3), PhaseEnergy()
    for _ in range(count):
        seconds = dice.uniform(4, 7)
        prompt = dice.uniform(0, 20_000) if prompts else 0.0
        generated = dice.uniform(1000, 20_000)
        joules = (300 * seconds + 0.02 * prompt + 0.12 * generated) * (1 + dice.uniform(-noise, noise))
        energy.add(joules, seconds, prompt, generated)
    return energy


def test_prompt_tokens_generated_tokens_and_time_are_told_apart() -> None:
    found = fed(200, noise=0.02).costs()

    assert found.base_w == pytest.approx(300, rel=0.1)
    assert found.prompt_token_j == pytest.approx(0.02, rel=0.2)
    assert found.generated_token_j == pytest.approx(0.12, rel=0.1)


def test_what_was_not_there_is_unknown_and_not_zero() -> None:
    found = fed(100, prompts=False).costs()

    assert found.prompt_token_j is None
    assert found.generated_token_j == pytest.approx(0.12, rel=0.02)


def test_too_little_is_nothing() -> None:
    assert fed(LEAST_STRETCHES - 4).costs() == PhaseCosts(None, None, None)
    assert PhaseEnergy().costs() == PhaseCosts(None, None, None)


def test_short_intervals_are_gathered_before_they_count() -> None:
    energy = PhaseEnergy()
    for _ in range(LEAST_STRETCHES * 5):
        energy.add(320.0, 1.0, 1000.0, 0.0)

    assert energy.costs() != PhaseCosts(None, None, None)


def test_rent_and_energy_are_in_the_currency_of_their_prices() -> None:
    prices = Prices(gpu_hour=2.5, kwh=0.3)

    assert rent(prices, 4, 3600) == 10.0
    assert energy_cost(prices, 2 * JOULES_PER_KWH) == pytest.approx(0.6)
    assert rent(Prices(), 4, 3600) == energy_cost(Prices(), 1e9) == 0.0


def test_what_is_laid_on_all_is_what_was_spent() -> None:
    served = {("a", "chat", "red"): (1e6, 2e5), ("a", "bulk", "blue"): (3e6, 1e5), ("b", "chat", "red"): (5.0, 1.0)}

    found = per_million({"a": 7.0, "b": 1.0}, served)

    for engine, spent in (("a", 7.0), ("b", 1.0)):
        laid = sum(found[key] * sum(tokens) / 1e6 for key, tokens in served.items() if key[0] == engine)
        assert laid == pytest.approx(spent)
    heavy, light = found["a", "chat", "red"], found["a", "bulk", "blue"]
    assert heavy / light == pytest.approx((1e6 + OUTPUT_WEIGHT * 2e5) / 1.2e6 / ((3e6 + OUTPUT_WEIGHT * 1e5) / 3.1e6))


def test_an_engine_without_a_price_costs_nothing_that_could_be_told() -> None:
    assert per_million({"a": 1.0}, {("b", "chat", "red"): (10.0, 10.0), ("a", "chat", "red"): (0.0, 0.0)}) == {}
