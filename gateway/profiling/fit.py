"""The step model that explains a sweep: least squares on relative errors, nothing negative, wild points weighed down.

    step = max(a + b·n, d + e·n) + g·(1 - (1-k)ⁿ) + c·ctx + f·Σ chunk·(before + chunk/2) + h1·n_dec

The maximum makes it no linear problem, but the second line is the steeper one, so that there is one n at which the steps
change over: for every n between two observed ones the problem is linear, and the best of them is the answer.

From outside, time that every step takes cannot be told from time that reading weights takes: h0 is in a and d. What a
request takes beside its steps (`overhead_s`) is a constant of its own. `b` shows in prompts of some dozens of tokens,
b + h1 in batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from backends.simulated.step_model import StepModel
from gateway.profiling.observations import Seen, Stall, Step, chunks
from policies.estimators.least_squares import nonnegative

COLUMNS: Final = ("a", "b", "d", "e", "c", "f", "h1", "g", "overhead")
RIDGE: Final = 1e-9
WILD: Final = 4.0
"""So many median absolute errors off, a point counts less, the less the farther it is off."""
LEAST_ERROR: Final = 0.003
ROUNDS: Final = 4
LEAST_SHARE: Final = 0.3
"""Of the usual time of its kind: a point that is shorter counts at first as if it were so long."""
EXPERT_SHARES: Final = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
PLAIN_ENOUGH: Final = 0.01
"""Where a plain model is typically this near, no mixture is looked for."""
MIXTURE_GAIN: Final = 0.25
"""A mixture has to bring the squared error down to this share of a plain model's."""
USUAL_BUDGETS: Final = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 32_768)
NEAR: Final = 0.06
STALLED: Final = 0.9


@dataclass(frozen=True, slots=True)
class Fitted:
    """What explains a sweep.

    overhead_s      of a request, beside its steps
    budget_tokens   of a step; None: more than any prompt that was sent
    error           median over the points, relative to the larger of seen and predicted; worst: the largest
    points          how many there were
    """

    model: StepModel
    overhead_s: float
    budget_tokens: int | None
    error: float
    worst: float
    points: int


@dataclass(frozen=True, slots=True)
class _Point:
    steps: tuple[Step, ...]
    seconds: float
    request: bool


class NotEnough(ValueError):
    """Too little was measured to say anything."""


def fit(seen: Seen) -> Fitted:
    """Raises NotEnough without both prompts and batches."""
    if len({one.prompt_tokens for one in seen.alone}) < 3 or len({one.batch for one in seen.together}) < 2:
        raise NotEnough(
            f"{len(seen.alone)} prompts and {len(seen.together)} batches measured: need three lengths of prompts and two"
            " sizes of batches; give more time, or a longer --max-prompt-tokens"
        )
    first = _fit(_points(seen, None))
    budget_tokens = _budget(seen.stalls, first.model)
    if budget_tokens is None:
        return first
    again = _fit(_points(seen, budget_tokens))
    return Fitted(again.model, again.overhead_s, budget_tokens, again.error, again.worst, again.points)


def _points(seen: Seen, budget_tokens: int | None) -> list[_Point]:
    alone = [_Point(tuple(chunks(one.prompt_tokens, budget_tokens)), one.seconds, True) for one in seen.alone]
    together = [_Point((Step(one.batch, one.context_tokens),), one.seconds, False) for one in seen.together]
    return alone + together


def _fit(points: Sequence[_Point]) -> Fitted:
    sizes = sorted({_tokens(step) for point in points for step in point.steps})
    changes = [0.0, *(math.sqrt(low * high) for low, high in pairwise(sizes)), math.inf]
    weights, cost = min((_solved(points, change, 0.0) for change in changes), key=lambda one: one[1])
    share = 0.0
    plain = [_error(point.seconds, _predicted(point, weights, 0.0)) for point in points]
    for k in EXPERT_SHARES if median(plain) > PLAIN_ENOUGH else ():
        mixed, mixed_cost = min((_solved(points, change, k) for change in changes), key=lambda one: one[1])
        if mixed_cost < (cost if share else MIXTURE_GAIN * cost):
            weights, cost, share = mixed, mixed_cost, k
    errors = [_error(point.seconds, _predicted(point, weights, share)) for point in points]
    a, b, d, e, c, f, h1, g, overhead = weights
    model = StepModel(a=max(a or d, 1e-6), b=b, d=d, e=e, c=c, f=f, h0=0.0, h1=h1, g=g, k=share)
    return Fitted(model, overhead / 1000, None, median(errors), max(errors), len(points))


def _solved(points: Sequence[_Point], change: float, share: float) -> tuple[list[float], float]:
    """The weights if steps of more than `change` tokens are bound by arithmetic, and how badly they explain it all.

    share   of the experts that a token needs; 0: no mixture
    """
    rows = [_row(point, change, share) for point in points]
    scales_s = [max(point.seconds, LEAST_SHARE * _usual_s(points, point)) for point in points]
    trust = [1.0] * len(points)
    weights: list[float] = []
    errors: list[float] = []
    for _ in range(ROUNDS):
        weights = _weighted(rows, points, scales_s, trust)
        predicted = [_predicted(point, weights, share) for point in points]
        errors = [_error(point.seconds, value) for point, value in zip(points, predicted, strict=True)]
        bound = WILD * max(LEAST_ERROR, median(errors))
        trust = [min(1.0, bound / error) if error else 1.0 for error in errors]
        scales_s = [max(point.seconds, value) for point, value in zip(points, predicted, strict=True)]
    cost = sum(weight * error * error for weight, error in zip(trust, errors, strict=True))
    return weights, cost


def _error(seen_s: float, predicted_s: float) -> float:
    """Relative to the larger of the two: a step seen far too short by chance must not count for a hundred others."""
    return abs(predicted_s - seen_s) / max(predicted_s, seen_s)


def _usual_s(points: Sequence[_Point], like: _Point) -> float:
    return median(point.seconds for point in points if point.request is like.request)


def _weighted(
    rows: Sequence[Sequence[float]], points: Sequence[_Point], scales_s: Sequence[float], trust: Sequence[float]
) -> list[float]:
    """Milliseconds. Errors count relative to scales_s; columns are scaled to their largest share, so that one ridge
    suits them all."""
    relative = [[value / (1000 * scale_s) for value in row] for row, scale_s in zip(rows, scales_s, strict=True)]
    wanted = [point.seconds / scale_s for point, scale_s in zip(points, scales_s, strict=True)]
    scales = [max(map(abs, column)) or 1.0 for column in zip(*relative, strict=True)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in relative]
    size = len(scales)
    matrix = [
        [
            sum(weight * row[i] * row[j] for row, weight in zip(scaled, trust, strict=True))
            + (RIDGE if i == j else 0.0)
            for j in range(size)
        ]
        for i in range(size)
    ]
    right = [
        sum(weight * row[i] * value for row, value, weight in zip(scaled, wanted, trust, strict=True))
        for i in range(size)
    ]
    return [weight / scale for weight, scale in zip(nonnegative(matrix, right), scales, strict=True)]


def _row(point: _Point, change: float, share: float) -> list[float]:
    row = [0.0] * len(COLUMNS)
    for step in point.steps:
        tokens = _tokens(step)
        line = 2 if tokens > change else 0
        row[line] += 1.0
        row[line + 1] += tokens
        row[4] += step.context_tokens
        row[5] += step.chunk * (step.before + step.chunk / 2)
        row[6] += step.decoding
        row[7] += 1 - (1 - share) ** tokens
    row[8] = 1.0 if point.request else 0.0
    return row


def _predicted(point: _Point, weights: Sequence[float], share: float) -> float:
    """Seconds, by the maximum and not by the line that was assumed."""
    a, b, d, e, c, f, h1, g, overhead = weights
    total = overhead if point.request else 0.0
    for step in point.steps:
        tokens = _tokens(step)
        total += max(a + b * tokens, d + e * tokens) + h1 * step.decoding + c * step.context_tokens
        total += f * step.chunk * (step.before + step.chunk / 2) + g * (1 - (1 - share) ** tokens)
    return total / 1000


def _tokens(step: Step) -> int:
    return step.decoding + step.chunk


def _budget(stalls: Sequence[Stall], model: StepModel) -> int | None:
    """Tokens of a step, from how long a decoding stream stalled: the budget whose largest chunk takes so long.

    A usual number is taken where it is near. A stall as long as the whole prompt says that the budget is larger.
    """
    found: list[float] = []
    for stall in stalls:
        if stall.longest_s >= STALLED * _longest_s(stall, stall.prompt_tokens + 1, model):
            continue
        low, high = 2, stall.prompt_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if _longest_s(stall, middle, model) <= stall.longest_s:
                low = middle
            else:
                high = middle - 1
        found.append(low)
    if not found:
        return None
    tokens = median(found)
    usual = min(USUAL_BUDGETS, key=lambda one: abs(math.log(one / tokens)))
    return usual if abs(usual / tokens - 1) <= NEAR else round(tokens)


def _longest_s(stall: Stall, budget_tokens: int, model: StepModel) -> float:
    """The longest step of the prompt beside the stream, whose own token is of the budget."""
    context = round(stall.context_tokens)
    cut = chunks(stall.prompt_tokens, budget_tokens - 1)
    return max(model.step_s(1, context, [(step.chunk, step.before)]) for step in cut)
