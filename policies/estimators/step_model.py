"""How long an engine's steps take: step = base + per_sequence·B + per_context_token·ctx, and prefill per prompt token.

Learned online, since a profile of another machine is wrong by half: recursive least squares over what a gateway sees, the
gaps between tokens and the times to first tokens. Observations are weighed by their size (a relative error counts), old
ones fade (FORGETTING), wild ones are left out (beyond REJECT_MAD median absolute deviations), and nothing may become
negative. The start is a prior for an engine of unknown speed; a ridge holds every coefficient to it for ever, so that
what was never excited stays there and works of one kind, in which two columns move together, share by the prior's ratio.

The recursion is kept as its normal equations, in units of the prior, and solved anew for each observation: the usual one,
on the inverse, loses its definiteness once a coefficient is held at 0.

It does not know the engine's batch budget: prompts are taken to be prefilled in chunks of CHUNK_TOKENS.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from policies.estimators.least_squares import nonnegative

PRIOR = (0.012, 3e-5, 8e-8, 6e-5)
"""Seconds: per step, per sequence, per context token, per prompt token. Between a small and a large GPU with an 8B model."""
RIDGE = 0.05
"""How many observations' worth the prior is believed."""
UNKNOWN_ERROR = 0.7
"""Relative error of predictions from the prior alone."""
FORGETTING = 0.998
REJECT_MAD = 6.0
ERRORS_KEPT = 64
LEAST_ERRORS = 12
LEAST_MAD = 0.05
MOST_REJECTED = 8
"""So many wild ones in a row are not wild: the engine has changed."""
LEAST_BASE = 0.02
"""Of the prior's: every step takes some time."""
CHUNK_TOKENS = 2048
Row = tuple[float, float, float, float]


class StepModel:
    """See the module header. One per engine."""

    __slots__ = ("_errors", "_moments", "_products", "_rejected", "error", "observations", "theta")

    def __init__(self) -> None:
        """error: typical relative error of late predictions, their median; the prior's while there are few."""
        self.error = UNKNOWN_ERROR
        self.theta = list(PRIOR)
        self._moments = [[0.0] * 4 for _ in range(4)]
        self._products = [0.0] * 4
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

    def step_s(self, sequences: float, context_tokens: float) -> float:
        """A decode step without prompts: the predicted gap between tokens."""
        base, per_sequence, per_token, _ = self.theta
        return base + per_sequence * sequences + per_token * context_tokens

    def ttft_s(self, pending_tokens: float, sequences: float, context_tokens: float) -> float:
        """From now to the first token of a prompt that is the last of `pending_tokens` to be prefilled."""
        base, per_sequence, per_token, prefill = self.theta
        steps = ttft_steps(pending_tokens)
        return steps * (base + per_sequence * sequences + per_token * context_tokens) + prefill * pending_tokens

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
        if len(self._errors) >= LEAST_ERRORS:
            self.error = median(self._errors)
        self.observations += 1
        scaled = [value * prior / seen_s for value, prior in zip(row, PRIOR, strict=True)]
        for i in range(4):
            self._products[i] = FORGETTING * self._products[i] + scaled[i]
            self._moments[i] = [FORGETTING * self._moments[i][j] + scaled[i] * scaled[j] for j in range(4)]
        self.theta = [factor * prior for factor, prior in zip(self._solved(), PRIOR, strict=True)]

    def _solved(self) -> list[float]:
        """Coefficients over their priors: least squares with the ridge, those that would be negative held at 0."""
        matrix = [[self._moments[i][j] + (RIDGE if i == j else 0.0) for j in range(4)] for i in range(4)]
        factors = nonnegative(matrix, [one + RIDGE for one in self._products])
        factors[0] = max(LEAST_BASE, factors[0])
        return factors

    def _wild(self, error: float) -> bool:
        if len(self._errors) < LEAST_ERRORS or self._rejected >= MOST_REJECTED:
            self._rejected = 0
            return False
        if error > REJECT_MAD * max(LEAST_MAD, self.error):
            self._rejected += 1
            return True
        self._rejected = 0
        return False

    # -- keeping -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Mapping[str, object]:
        return {"theta": list(self.theta)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Predict as a predecessor did, until there is something to learn from."""
        theta = state.get("theta")
        if isinstance(theta, list) and len(theta) == 4 and all(_plausible(one) for one in theta):
            self.theta = [float(one) for one in theta]

    def __repr__(self) -> str:
        base, per_sequence, per_token, prefill = (1000 * one for one in self.theta)
        return f"<StepModel {base:.2f} ms + {per_sequence:.4f}·B + {per_token:.6f}·ctx, prefill {prefill:.4f} ms/token>"


def ttft_row(pending_tokens: float, sequences: float, context_tokens: float) -> Row:
    """Steps until a first token, times what each costs."""
    steps = ttft_steps(pending_tokens)
    return steps, steps * sequences, steps * context_tokens, pending_tokens


def ttft_steps(pending_tokens: float) -> float:
    """Half a step under way, then one for each chunk of prompts."""
    return 0.5 + math.ceil(max(1.0, pending_tokens) / CHUNK_TOKENS)


def _plausible(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
