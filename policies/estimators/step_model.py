"""How long an engine's steps take: step = base + per_sequence·B + per_context_token·ctx, and prefill per prompt token.

Learned online, since a profile of another machine is wrong by half: recursive least squares over what a gateway sees, the
gaps between tokens and the times to first tokens. Observations are weighed by their size (a relative error counts), old
ones fade (FORGETTING), wild ones are left out (beyond REJECT_MAD median absolute deviations of the ratio's logarithm), and
nothing may become negative. The start is a prior for an engine of unknown speed; a ridge holds every coefficient to it for ever, so that
what was never excited stays there and works of one kind, in which two columns move together, share by the prior's ratio. Since
relative errors count, an observation of an engine ten times slower weighs a hundredth against that ridge, and it would hold the
model for minutes: so a slower engine has a prior of its speed, all coefficients times one factor.

The recursion is kept as its normal equations, in units of the prior, and solved anew for each observation: the usual one,
on the inverse, loses its definiteness once a coefficient is held at 0.

The batch budget, how many prompt tokens an engine takes into one step, is in no metric. So there is a fit for each of
BUDGETS, and the one that foretold first tokens of long prompts best of late is in force; with a wrong budget the base would
be charged for steps that never were, and prompts for too little.
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
PRIOR_SPAN = 2.0
"""Engines up to so many times slower have the prior itself; one that is slower yet has one that is this much faster than it is."""
SPEED_RIDGE = 1e-5
"""As RIDGE, in finding how many times slower an engine is."""
UNKNOWN_ERROR = 0.7
"""Relative error of predictions from the prior alone."""
FORGETTING = 0.995
REJECT_MAD = 10.0
ERRORS_KEPT = 64
LEAST_ERRORS = 12
LEAST_MAD = 0.05
MOST_ERROR = 1 - 1e-9
MOST_REJECTED = 8
"""So many wild ones in a row are not wild: the engine has changed."""
LEAST_BASE = 0.02
"""Of the prior's: every step takes some time."""
BUDGETS = (1024, 2048, 4096, 8192, 16_384)
USUAL_BUDGET = 2048
TTFT_WEIGHT = 0.05
"""Of one first token against one gap: there are many more of them, and they depend on steps that nobody counted."""
JUDGED = 0.02
"""Weight of one first token in the judgement of a budget."""
BETTER = 0.9
"""A budget replaces the one in force when its error is this part of that one's."""
SOLVE_EVERY = 8
"""Observations between two solutions of the fits that are not in force, and between two looks for a better one."""
MOST_PLAUSIBLE = 1e9
"""Seconds, or sums of relative weights: far above what was ever seen, and far below what cannot be reckoned with."""
Row = tuple[float, float, float, float]


class StepModel:
    """See the module header. One per engine. error: typical relative error of late predictions, their median; the prior's
    while there are few."""

    __slots__ = ("_at", "_errors", "_fits", "_rejected", "error", "observations")

    def __init__(self) -> None:
        self._fits = tuple(_Fit(budget) for budget in BUDGETS)
        self._at = BUDGETS.index(USUAL_BUDGET)
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)
        self._rejected = 0
        self.error = UNKNOWN_ERROR
        self.observations = 0

    # -- predictions ---------------------------------------------------------------------------------------------------

    @property
    def theta(self) -> list[float]:
        """The coefficients in force, in the order of PRIOR."""
        return self._fits[self._at].theta

    @property
    def budget_tokens(self) -> int:
        """Prompt tokens that the engine takes into one step, as far as first tokens tell."""
        return self._fits[self._at].budget_tokens

    @property
    def base_s(self) -> float:
        return self.theta[0]

    @property
    def prefill_s_per_token(self) -> float:
        return self.theta[3]

    def step_s(self, sequences: float, context_tokens: float) -> float:
        """A decode step without prompts: the predicted gap between tokens."""
        base, per_sequence, per_token, _ = self._fits[self._at].theta
        return base + per_sequence * sequences + per_token * context_tokens

    def ttft_s(self, pending_tokens: float, sequences: float, context_tokens: float) -> float:
        """From now to the first token of a prompt that is the last of `pending_tokens` to be prefilled."""
        return self._fits[self._at].ttft_s(pending_tokens, sequences, context_tokens)

    def pending_tokens(self, ttft_s: float, sequences: float, context_tokens: float) -> float:
        """No first token behind more than so many is predicted within `ttft_s`; may be below 0. Up to one budget more than there
        are in truth: a part of a step counts as a part."""
        fit = self._fits[self._at]
        each_s = self.step_s(sequences, context_tokens)
        return (ttft_s - 0.5 * each_s) / (each_s / fit.budget_tokens + fit.theta[3])

    @property
    def sure(self) -> bool:
        """Enough was seen to believe predictions."""
        return len(self._errors) >= LEAST_ERRORS

    # -- learning ------------------------------------------------------------------------------------------------------

    def saw_gap(self, gap_s: float, sequences: float, context_tokens: float, prompt_tokens_per_step: float) -> None:
        """The mean gap between tokens over a while; prompt tokens are those prefilled meanwhile, per step."""
        row = (1.0, sequences, context_tokens, prompt_tokens_per_step)
        if self._believed(gap_s, sum(weight * value for weight, value in zip(self.theta, row, strict=True))):
            for fit in self._fits:
                fit.learn(row, gap_s, 1.0, solve=fit is self._fits[self._at])

    def saw_first_token(self, ttft_s: float, pending_tokens: float, sequences: float, context_tokens: float) -> None:
        """A first token came `ttft_s` after its work was sent behind `pending_tokens`, its own included."""
        if not self._believed(ttft_s, self.ttft_s(pending_tokens, sequences, context_tokens)):
            return
        solve_all = self.observations % SOLVE_EVERY == 0
        for fit in self._fits:
            if pending_tokens > BUDGETS[0]:
                fit.judge(ttft_s, fit.ttft_s(pending_tokens, sequences, context_tokens))
            row = ttft_row(pending_tokens, sequences, context_tokens, fit.budget_tokens)
            fit.learn(row, ttft_s, TTFT_WEIGHT, solve=solve_all or fit is self._fits[self._at])
        if solve_all:
            best = min(range(len(self._fits)), key=lambda at: self._fits[at].miss)
            if self._fits[best].miss < BETTER * self._fits[self._at].miss:
                self._at = best

    def _believed(self, seen_s: float, predicted_s: float) -> bool:
        """Take an observation into the errors, unless it is wild or nonsense."""
        if not (math.isfinite(seen_s) and seen_s > 0):
            return False
        error = min(MOST_ERROR, abs(seen_s - predicted_s) / max(seen_s, predicted_s))
        if self._wild(error):
            return False
        self._errors.append(error)
        if self.sure:
            self.error = median(self._errors)
        self.observations += 1
        return True

    def _wild(self, error: float) -> bool:
        if not self.sure or self._rejected >= MOST_REJECTED:
            self._rejected = 0
            return False
        # By the logarithm of the ratio: a relative error is below 1, so that no error would be ten times a median of 1/10.
        if -math.log1p(-error) > REJECT_MAD * max(LEAST_MAD, -math.log1p(-self.error)):
            self._rejected += 1
            return True
        self._rejected = 0
        return False

    # -- keeping -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Mapping[str, object]:
        """Of the fit in force alone: what the others come to is seen soon enough."""
        return {"budget": self.budget_tokens, **self._fits[self._at].snapshot()}

    def restore(self, state: Mapping[str, object]) -> None:
        """Predict as a predecessor did, and go on learning from there."""
        budget = state.get("budget", USUAL_BUDGET)
        if budget in BUDGETS and self._fits[BUDGETS.index(budget)].restore(state):
            self._at = BUDGETS.index(budget)

    def __repr__(self) -> str:
        base, per_sequence, per_token, prefill = (1000 * one for one in self.theta)
        return (
            f"<StepModel {base:.2f} ms + {per_sequence:.4f}·B + {per_token:.6f}·ctx, prefill {prefill:.4f} ms/token "
            f"by {self.budget_tokens}>"
        )


class _Fit:
    """Least squares for one batch budget. miss: its relative error on first tokens of long prompts, of late."""

    __slots__ = ("_moments", "_products", "budget_tokens", "miss", "theta")

    def __init__(self, budget_tokens: int) -> None:
        self.budget_tokens = budget_tokens
        self.theta = list(PRIOR)
        self.miss = UNKNOWN_ERROR
        self._moments = [[0.0] * 4 for _ in range(4)]
        self._products = [0.0] * 4

    def ttft_s(self, pending_tokens: float, sequences: float, context_tokens: float) -> float:
        base, per_sequence, per_token, prefill = self.theta
        steps = ttft_steps(pending_tokens, self.budget_tokens)
        return steps * (base + per_sequence * sequences + per_token * context_tokens) + prefill * pending_tokens

    def judge(self, seen_s: float, predicted_s: float) -> None:
        """Note how far a prediction was off."""
        self.miss += JUDGED * (abs(seen_s - predicted_s) / max(seen_s, predicted_s) - self.miss)

    def learn(self, row: Row, seen_s: float, weight: float, *, solve: bool) -> None:
        """One step of recursive least squares on the relative error; the solution may wait for a later one.

        Relative to the larger of seen and predicted: relative to what was seen alone, a prompt that the engine's cache
        held, and whose first token came at once, would count for hundreds of others and pull every prediction down.
        """
        predicted_s = sum(weight * value for weight, value in zip(self.theta, row, strict=True))
        scale_s = max(seen_s, predicted_s)
        scaled = [value * prior / scale_s for value, prior in zip(row, PRIOR, strict=True)]
        seen = seen_s / scale_s
        kept = FORGETTING**weight
        for i in range(4):
            self._products[i] = kept * self._products[i] + weight * scaled[i] * seen
            self._moments[i] = [kept * self._moments[i][j] + weight * scaled[i] * scaled[j] for j in range(4)]
        if solve:
            self.theta = [factor * prior for factor, prior in zip(self._solved(), PRIOR, strict=True)]

    def snapshot(self) -> dict[str, object]:
        """theta for who reads it, the sums to go on from, and what they foretold."""
        moments = [value for row in self._moments for value in row]
        return {"theta": list(self.theta), "moments": moments, "products": list(self._products), "miss": self.miss}

    def restore(self, state: Mapping[str, object]) -> bool:
        """Take over a snapshot; False, and nothing is taken, where it cannot be read. An older release's has no sums: it foretells
        until the first observation."""
        theta = _numbers(state.get("theta"), 4)
        if theta is None:
            return False
        self.theta = [max(LEAST_BASE * PRIOR[0], theta[0]), *theta[1:]]
        moments, products = _numbers(state.get("moments"), 16), _numbers(state.get("products"), 4)
        miss = _numbers([state.get("miss")], 1)
        if moments is not None and products is not None and miss is not None:
            before = self._moments, self._products
            self._moments, self._products = [moments[at : at + 4] for at in range(0, 16, 4)], products
            if self._solvable():
                self.miss = miss[0]
            else:
                self._moments, self._products = before
        return True

    def _solvable(self) -> bool:
        """The sums are such as observations make: symmetric, and with a solution."""
        if any(self._moments[i][j] != self._moments[j][i] for i in range(4) for j in range(i)):
            return False
        try:
            return all(map(_plausible, self._solved()))
        except ArithmeticError:
            return False

    def _solved(self) -> list[float]:
        """Coefficients over their priors: least squares with the ridge, those that would be negative held at 0."""
        slower = self._slower()
        matrix = [
            [slower * slower * self._moments[i][j] + (RIDGE if i == j else 0.0) for j in range(4)] for i in range(4)
        ]
        factors = nonnegative(matrix, [slower * one + RIDGE for one in self._products])
        factors[0] = max(LEAST_BASE, factors[0])
        return [slower * one for one in factors]

    def _slower(self) -> float:
        """By which factor the prior is too fast for this engine, PRIOR_SPAN apart: least squares with one column; >= 1."""
        slower = (sum(self._products) + SPEED_RIDGE) / (sum(map(sum, self._moments)) + SPEED_RIDGE)
        return max(1.0, slower / PRIOR_SPAN)


def ttft_row(pending_tokens: float, sequences: float, context_tokens: float, budget_tokens: int) -> Row:
    """Steps until a first token, times what each costs."""
    steps = ttft_steps(pending_tokens, budget_tokens)
    return steps, steps * sequences, steps * context_tokens, pending_tokens


def ttft_steps(pending_tokens: float, budget_tokens: int) -> float:
    """Half a step under way, then one for each chunk of prompts."""
    return 0.5 + math.ceil(max(1.0, pending_tokens) / budget_tokens)


def _numbers(value: object, count: int) -> list[float] | None:
    """A list of so many numbers that a model may consist of; None for anything else."""
    if not isinstance(value, list) or len(value) != count or not all(map(_plausible, value)):
        return None
    return [float(one) for one in value]


def _plausible(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= MOST_PLAUSIBLE
