"""What follows from a step model and a memory: the knee, the batch that keeps its gaps, what fits at once.

The knee is where throughput over latency is greatest (as in `gateway.bench.curve`): past it a larger batch costs more
latency than it gains tokens, in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from backends.simulated.step_model import StepModel

BLOCK_TOKENS: Final = 16
KV_SHARE: Final = 0.97
"""Of the KV memory that is planned with; the rest is for what nobody foresaw."""
CONTEXTS: Final = (1024, 4096, 16_384)
MOST: Final = 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """What the engine is tuned for: usual tokens of a prompt and of an answer, and the gap that is bearable."""

    prompt_tokens: int = 512
    output_tokens: int = 256
    tpot_s: float = 0.05

    @property
    def context_tokens(self) -> float:
        """Mean KV of a decoding sequence: its prompt and half its answer."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def whole_tokens(self) -> int:
        """KV of a sequence at its end."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """See the module header. Batches of the workload's sequences; None: unknown for want of the memory's size.

    tpot_batch   the largest whose step is bearable, at least 1
    kv_batch     that fit with their whole length
    peaks        that fit at once, by context length
    """

    knee_batch: int
    tpot_batch: int
    kv_batch: int | None
    peaks: Mapping[int, int | None]


def limits(model: StepModel, kv_tokens: int | None, seats: int | None, workload: Workload) -> Limits:
    """Of one engine. seats bound what fits at once, where they are known."""
    steps_s = {batch: model.step_s(batch, round(batch * workload.context_tokens)) for batch in range(1, MOST + 1)}
    knee = max(steps_s, key=lambda batch: batch / steps_s[batch] ** 2)
    bearable = [batch for batch, step_s in steps_s.items() if step_s <= workload.tpot_s]
    return Limits(
        knee,
        max(bearable, default=1),
        fitting(kv_tokens, workload.whole_tokens),
        {context: _seated(fitting(kv_tokens, context), seats) for context in CONTEXTS},
    )


def fitting(kv_tokens: int | None, context_tokens: int) -> int | None:
    """Sequences of so many tokens, in whole blocks."""
    if kv_tokens is None:
        return None
    return int(KV_SHARE * kv_tokens) // (-(-context_tokens // BLOCK_TOKENS) * BLOCK_TOKENS)


def _seated(fit: int | None, seats: int | None) -> int | None:
    return fit if fit is None or seats is None else min(fit, seats)
