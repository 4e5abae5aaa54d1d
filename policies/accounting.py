"""What work takes of an engine: energy by size of batch and by phase, and cost by who had it served.

Joules are measured for the engine as a whole. They are told by the batch that ran meanwhile, and taken apart into what
time costs, what a prompt token and what a generated token costs, by least squares over stretches with different shares
of them. Money is the engine's too; it is laid on its users in proportion to the tokens they were served, a generated
token counting OUTPUT_WEIGHT prompt tokens, so that what is laid on all of them is what was spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from policies.estimators.least_squares import nonnegative

OUTPUT_WEIGHT: Final = 6.0
"""Time or energy of a generated token over that of a prompt token, at usual batches: 0.18 over 0.029 ms for an 8B model on
one H100 at a batch of 64, 0.56 over 0.093 ms on an RTX 4090 at 32 (profiles of the simulated engines)."""
BIN_MAX: Final = 512
STRETCH_S: Final = 5.0
"""Counters and energy are read at different moments; over so long the difference does not matter."""
LEAST_STRETCHES: Final = 12
FORGETTING: Final = 0.995
RIDGE: Final = 1e-6
LEAST_SHARE: Final = 0.02
"""A phase whose tokens explain less than this of the energy was not seen well enough to be told."""
JOULES_PER_KWH: Final = 3.6e6


def batch_bin(batch: float) -> str:
    """The bin of a batch: the power of two at or above it, "512" for all larger ones."""
    size = 1
    while size < min(batch, BIN_MAX):
        size *= 2
    return str(size)


@dataclass(frozen=True, slots=True)
class PhaseCosts:
    """Joules. base_w: what a second costs while there is work, whatever it is. None: not seen well enough."""

    base_w: float | None
    prompt_token_j: float | None
    generated_token_j: float | None


class PhaseEnergy:
    """Takes energy apart: joules = base·seconds + p·prompt tokens + g·generated tokens. One owner."""

    __slots__ = ("_moments", "_open", "_products", "_stretches")

    def __init__(self) -> None:
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._open = [0.0, 0.0, 0.0, 0.0]
        self._stretches = 0

    def add(self, joules: float, seconds: float, prompt_tokens: float, generated_tokens: float) -> None:
        """Fold in an interval in which the engine had work."""
        for at, value in enumerate((joules, seconds, prompt_tokens, generated_tokens)):
            self._open[at] += value
        if self._open[1] < STRETCH_S:
            return
        total, *columns = self._open
        self._open = [0.0, 0.0, 0.0, 0.0]
        self._stretches += 1
        for i in range(3):
            self._products[i] = FORGETTING * self._products[i] + columns[i] * total
            self._moments[i] = [FORGETTING * self._moments[i][j] + columns[i] * columns[j] for j in range(3)]

    def costs(self) -> PhaseCosts:
        """As of now."""
        if self._stretches < LEAST_STRETCHES:
            return PhaseCosts(None, None, None)
        scales = [self._moments[i][i] ** 0.5 or 1.0 for i in range(3)]
        matrix = [
            [self._moments[i][j] / (scales[i] * scales[j]) + (RIDGE if i == j else 0.0) for j in range(3)]
            for i in range(3)
        ]
        weights = nonnegative(matrix, [self._products[i] / scales[i] for i in range(3)])
        found = [weight / scale for weight, scale in zip(weights, scales, strict=True)]
        whole = sum(weights)
        told = [one if weight >= LEAST_SHARE * whole > 0 else None for one, weight in zip(found, weights, strict=True)]
        return PhaseCosts(*told)


@dataclass(frozen=True, slots=True)
class Prices:
    """In one currency. gpu_hour: of one GPU; None: not known, not told apart."""

    gpu_hour: float | None = None
    kwh: float | None = None


def rent(prices: Prices, gpus: int, seconds: float) -> float:
    """Of so many GPUs for so long; 0 without a price."""
    return (prices.gpu_hour or 0.0) * gpus * seconds / 3600


def energy_cost(prices: Prices, joules: float) -> float:
    """Of so much energy; 0 without a price."""
    return (prices.kwh or 0.0) * joules / JOULES_PER_KWH


Served = Mapping[tuple[str, str, str], tuple[float, float]]
"""(engine, class, tenant) -> (prompt tokens, generated tokens)."""


def per_million(spent: Mapping[str, float], served: Served) -> dict[tuple[str, str, str], float]:
    """Cost of a million tokens, prompt and answer together, by engine, class and tenant.

    spent   by engine, in the time in which `served` was served; idle time is on everybody's account
    """
    weights: dict[str, float] = {}
    for (engine, _, _), tokens in served.items():
        weights[engine] = weights.get(engine, 0.0) + weight(*tokens)
    return {
        key: 1e6 * spent[key[0]] * weight(*tokens) / weights[key[0]] / sum(tokens)
        for key, tokens in served.items()
        if key[0] in spent and sum(tokens) > 0
    }


def weight(prompt_tokens: float, generated_tokens: float) -> float:
    """In prompt tokens."""
    return prompt_tokens + OUTPUT_WEIGHT * generated_tokens
