"""How long one engine step takes, and what power it draws.

    step_ms = max(a + b*n, d + e*n) + g*(1 - (1-k)**all) + c*ctx + f*sum(chunk*(before + chunk/2)) + h0 + h1*n_dec

n is decoding sequences plus prefill tokens of the step, ctx the KV tokens of the decoding sequences at its start,
chunk and before the prefill pieces and the KV each already had. a, b: the floor set by reading weights and launching;
d, e: the line bound by arithmetic; c: reading KV; f: prefill attention; h0, h1: host work per step and per sequence.

g, k: the experts of a mixture. A token needs the share k of them, so `all` tokens are expected to need
1 - (1-k)**all, and reading every one takes g: a small batch reads few, a batch of 50 nearly all.

ranks: data-parallel ranks that step in lockstep, as engines with expert parallelism do, each with its share of the
sequences. Decoding and ctx are spread evenly over them; the step lasts as long as the rank with most prefill tokens
needs, which has the longest piece at least; the experts see the tokens of all ranks.

Successive pure decode steps differ only in ctx, which grows by n_dec per step, so that the time of m of them is an
arithmetic series: `decode_run_s` and its inverse `decode_steps_within` are exact, not approximations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients in milliseconds (per token, per token x token, per sequence), but for k and ranks.

    See the module header.
    """

    a: float
    b: float
    d: float
    e: float
    c: float
    f: float
    h0: float
    h1: float
    g: float = 0.0
    k: float = 0.0
    ranks: int = 1

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.d, self.e, self.c, self.f, self.g, self.h0, self.h1) < 0 or self.a + self.h0 <= 0:
            raise ValueError(f"step model {self}: coefficients must be >= 0 and a + h0 > 0; fix the profile")
        if not 0 <= self.k < 1 or self.ranks < 1:
            raise ValueError(f"step model {self}: k must be >= 0 and < 1, ranks >= 1; fix the profile")

    def scaled(self, factor: float) -> StepModel:
        """The same engine, every time `factor` as long."""
        times = ("a", "b", "d", "e", "c", "f", "h0", "h1", "g")
        return replace(self, **{name: getattr(self, name) * factor for name in times})

    def step_s(self, decoding: int, context_tokens: int, chunks: Iterable[tuple[int, int]] = ()) -> float:
        """Seconds of one step. chunks: (tokens computed now, KV tokens held before) per prefill piece."""
        prefill_tokens = longest_tokens = 0
        attention = 0.0
        for chunk, before in chunks:
            prefill_tokens += chunk
            longest_tokens = max(longest_tokens, chunk)
            attention += chunk * (before + chunk / 2)
        if not prefill_tokens:
            return self.decode_run_s(decoding, context_tokens, 1)
        busiest_tokens = max(longest_tokens, prefill_tokens / self.ranks)
        even_ms = self._even_ms(decoding, busiest_tokens, decoding + prefill_tokens)
        attention_ms = self.f * attention * busiest_tokens / prefill_tokens
        return (even_ms + self.c * context_tokens / self.ranks + attention_ms) / 1000

    def decode_run_s(self, decoding: int, context_tokens: int, steps: int) -> float:
        """Seconds of `steps` successive pure decode steps of the same sequences, ctx given at the first."""
        grown_tokens = steps * context_tokens + decoding * (steps * (steps - 1) // 2)
        return (steps * self._even_ms(decoding, 0, decoding) + self.c * grown_tokens / self.ranks) / 1000

    def decode_steps_within(self, decoding: int, context_tokens: int, available_s: float, *, at_most: int) -> int:
        """Most steps in 0..at_most whose run takes no longer than available_s."""
        if self.decode_run_s(decoding, context_tokens, at_most) <= available_s:
            return at_most
        quadratic = self.c * decoding / self.ranks / 2
        linear = self._even_ms(decoding, 0, decoding) + self.c * context_tokens / self.ranks - quadratic
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

    def _even_ms(self, decoding: int, prefill_tokens: float, all_tokens: int) -> float:
        """What does not depend on the KV; prefill_tokens of the busiest rank, all_tokens of every rank."""
        mine = decoding / self.ranks
        tokens = mine + prefill_tokens
        floor_ms = max(self.a + self.b * tokens, self.d + self.e * tokens) + self.h0 + self.h1 * mine
        return floor_ms if self.g == 0 else floor_ms + self.g * (1 - (1 - self.k) ** all_tokens)


@dataclass(frozen=True, slots=True)
class PowerModel:
    """P(B) = p0 + dp*(1 - exp(-B/b0)) watts of the whole GPU group while it steps with B sequences."""

    p0: float
    dp: float
    b0: float

    def power_w(self, batch_size: int) -> float:
        """Watts at a batch of `batch_size` sequences."""
        return self.p0 + self.dp * (1 - math.exp(-batch_size / self.b0))
