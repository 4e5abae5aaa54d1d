"""How long one engine step takes, and what power it draws.

    step_ms = max(a + b*n, d + e*n) + c*ctx + f*sum(chunk*(before + chunk/2)) + h0 + h1*n_dec

n is decoding sequences plus prefill tokens of the step, ctx the KV tokens of the decoding sequences at its start,
chunk and before the prefill pieces and the KV each already had. a, b: the floor set by reading weights and launching;
d, e: the line bound by arithmetic; c: reading KV; f: prefill attention; h0, h1: host work per step and per sequence.

Successive pure decode steps differ only in ctx, which grows by n_dec per step, so that the time of m of them is an
arithmetic series: `decode_run_s` and its inverse `decode_steps_within` are exact, not approximations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients in milliseconds (per token, per token x token, per sequence); see the module header."""

    a: float
    b: float
    d: float
    e: float
    c: float
    f: float
    h0: float
    h1: float

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.d, self.e, self.c, self.f, self.h0, self.h1) < 0 or self.a + self.h0 <= 0:
            raise ValueError(f"step model {self}: coefficients must be >= 0 and a + h0 > 0; fix the profile")

    def step_s(self, decoding: int, context_tokens: int, chunks: Iterable[tuple[int, int]] = ()) -> float:
        """Seconds of one step. chunks: (tokens computed now, KV tokens held before) per prefill piece."""
        tokens = decoding
        attention = 0.0
        for chunk, before in chunks:
            tokens += chunk
            attention += chunk * (before + chunk / 2)
        return (self._even_ms(tokens, decoding) + self.c * context_tokens + self.f * attention) / 1000

    def decode_run_s(self, decoding: int, context_tokens: int, steps: int) -> float:
        """Seconds of `steps` successive pure decode steps of the same sequences, ctx given at the first."""
        grown_tokens = steps * context_tokens + decoding * (steps * (steps - 1) // 2)
        return (steps * self._even_ms(decoding, decoding) + self.c * grown_tokens) / 1000

    def decode_steps_within(self, decoding: int, context_tokens: int, available_s: float, *, at_most: int) -> int:
        """Most steps in 0..at_most whose run takes no longer than available_s."""
        if self.decode_run_s(decoding, context_tokens, at_most) <= available_s:
            return at_most
        quadratic = self.c * decoding / 2
        linear = self._even_ms(decoding, decoding) + self.c * context_tokens - quadratic
        available_ms = available_s * 1000
        if quadratic > 0:
            root = (math.sqrt(linear * linear + 4 * quadratic * available_ms) - linear) / (2 * quadratic)
        else:
            root = available_ms / linear
        steps = min(max(int(root), 0), at_most)
        while steps > 0 and self.decode_run_s(decoding, context_tokens, steps) > available_s:
            steps -= 1
        while steps < at_most and self.decode_run_s(decoding, context_tokens, steps + 1) <= available_s:
            steps += 1
        return steps

    def _even_ms(self, tokens: int, decoding: int) -> float:
        return max(self.a + self.b * tokens, self.d + self.e * tokens) + self.h0 + self.h1 * decoding


@dataclass(frozen=True, slots=True)
class PowerModel:
    """P(B) = p0 + dp*(1 - exp(-B/b0)) watts of the whole GPU group while it steps with B sequences."""

    p0: float
    dp: float
    b0: float

    def power_w(self, batch_size: int) -> float:
        """Watts at a batch of `batch_size` sequences."""
        return self.p0 + self.dp * (1 - math.exp(-batch_size / self.b0))
