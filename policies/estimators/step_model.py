"""How long an engine's steps take: step = base + per_sequence·B + per_context_token·ctx, and prefill per prompt token.

Learned online, since a profile of another machine is wrong by half: recursive least squares over what a gateway sees, the
gaps between tokens and the times to first tokens. Observations are weighed by their size (a relative error counts), old
ones fade (FORGETTING), wild ones are left out (beyond REJECT_MAD median absolute deviations), and nothing may become
negative. The start is a prior for an engine of unknown speed, believed like PRIOR_WEIGHT observations (a ridge), so that
a column that was never excited stays where the prior put it.

It does not know the engine's batch budget: prompts are taken to be prefilled in chunks of CHUNK_TOKENS.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

PRIOR = (0.012, 3e-5, 8e-8, 6e-5)
"""Seconds: per step, per sequence, per context token, per prompt token. Between a small and a large GPU with an 8B model."""
PRIOR_DEVIATION = 0.7
"""How far the prior may be off, as a part of itself."""
PRIOR_WEIGHT = 4.0
FORGETTING = 0.998
NOISE = 0.1
"""Relative error of one observation."""
REJECT_MAD = 6.0
ERRORS_KEPT = 64
LEAST_ERRORS = 12
LEAST_MAD = 0.05
MOST_REJECTED = 8
"""So many wild ones in a row are not wild: the engine has changed."""
CHUNK_TOKENS = 2048
UNCERTAIN = 1.0
"""Variance of a coefficient, over the prior's, past which nothing is forgotten: what is not excited is frozen."""

Row = tuple[float, float, float, float]


class StepModel:
    """See the module header. One per engine."""

    __slots__ = ("_covariance", "_errors", "_rejected", "observations", "theta")

    def __init__(self) -> None:
        self.theta = list(PRIOR)
        self._covariance = _prior_covariance()
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)
        self._rejected = 0
        self.observations = 0

    # -- predictions ---------------------------------------------------------------------------------------------------

    @property
    def base_s(self) -> float:
        return self.theta[0]

    @property
    def prefill_s_per_token(self) -> float:
        return self.theta[3]

    @property
    def error(self) -> float:
        """Typical relative error of late predictions: their median; the prior's while there are few."""
        return median(self._errors) if len(self._errors) >= LEAST_ERRORS else PRIOR_DEVIATION

    def step_s(self, sequences: float, context_tokens: float) -> float:
        """A decode step without prompts: the predicted gap between tokens."""
        base, per_sequence, per_token, _ = self.theta
        return base + per_sequence * sequences + per_token * context_tokens

    def ttft_s(self, pending_tokens: float, sequences: float, context_tokens: float) -> float:
        """From now to the first token of a prompt that is the last of `pending_tokens` to be prefilled."""
        row = ttft_row(pending_tokens, sequences, context_tokens)
        return sum(weight * value for weight, value in zip(self.theta, row, strict=True))

    # -- learning ------------------------------------------------------------------------------------------------------

    def saw_gap(self, gap_s: float, sequences: float, context_tokens: float, prompt_tokens_per_step: float) -> None:
        """The mean gap between tokens over a while; prompt tokens are those prefilled meanwhile, per step."""
        self._learn((1.0, sequences, context_tokens, prompt_tokens_per_step), gap_s)

    def saw_first_token(self, ttft_s: float, pending_tokens: float, sequences: float, context_tokens: float) -> None:
        """A first token came `ttft_s` after its work was sent behind `pending_tokens`, its own included."""
        self._learn(ttft_row(pending_tokens, sequences, context_tokens), ttft_s)

    def _learn(self, row: Row, seen_s: float) -> None:
        """One step of recursive least squares on the relative error."""
        if not (math.isfinite(seen_s) and seen_s > 0):
            return
        predicted = sum(weight * value for weight, value in zip(self.theta, row, strict=True))
        error = abs(seen_s - predicted) / max(seen_s, predicted)
        if self._wild(error):
            return
        self._errors.append(error)
        self.observations += 1
        scaled = [value / seen_s for value in row]
        covariance = self._covariance
        projected = [sum(line[k] * scaled[k] for k in range(4)) for line in covariance]
        denominator = NOISE * NOISE + sum(scaled[k] * projected[k] for k in range(4))
        innovation = 1.0 - predicted / seen_s
        forgetting = FORGETTING if self._excited() else 1.0
        self.theta = [
            max(0.0, weight + gain / denominator * innovation)
            for weight, gain in zip(self.theta, projected, strict=True)
        ]
        self.theta[0] = max(self.theta[0], 1e-5)
        self._covariance = [
            [(covariance[i][j] - projected[i] * projected[j] / denominator) / forgetting for j in range(4)]
            for i in range(4)
        ]

    def _wild(self, error: float) -> bool:
        if len(self._errors) < LEAST_ERRORS or self._rejected >= MOST_REJECTED:
            self._rejected = 0
            return False
        if error > REJECT_MAD * max(LEAST_MAD, median(self._errors)):
            self._rejected += 1
            return True
        self._rejected = 0
        return False

    def _excited(self) -> bool:
        return all(self._covariance[k][k] < UNCERTAIN * (PRIOR_DEVIATION * PRIOR[k]) ** 2 for k in range(4))

    # -- keeping -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Mapping[str, object]:
        return {"theta": list(self.theta)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Begin where a predecessor was, with a prior's doubt."""
        theta = state.get("theta")
        if isinstance(theta, list) and len(theta) == 4 and all(_plausible(one) for one in theta):
            self.theta = [float(one) for one in theta]

    def __repr__(self) -> str:
        base, per_sequence, per_token, prefill = (1000 * one for one in self.theta)
        return f"<StepModel {base:.2f} ms + {per_sequence:.4f}·B + {per_token:.6f}·ctx, prefill {prefill:.4f} ms/token>"


def ttft_row(pending_tokens: float, sequences: float, context_tokens: float) -> Row:
    """Steps until a first token, times what each costs: half a step under way, then one for each chunk of prompts."""
    steps = 0.5 + math.ceil(max(1.0, pending_tokens) / CHUNK_TOKENS)
    return steps, steps * sequences, steps * context_tokens, pending_tokens


def _prior_covariance() -> list[list[float]]:
    scale = NOISE * NOISE * PRIOR_WEIGHT  # a ridge of that many observations' worth, against NOISE
    return [
        [(PRIOR_DEVIATION * PRIOR[i]) ** 2 / max(1.0, scale) if i == j else 0.0 for j in range(4)] for i in range(4)
    ]


def _plausible(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
