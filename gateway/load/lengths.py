"""Lengths of made-up traffic: prompts and answers drawn lognormal about their means, the same ones for a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Mean lengths in tokens, and how far they vary: standard deviation over mean."""

    prompt_tokens: float = 200.0
    output_tokens: float = 250.0
    cv: float = 0.8
    seed: int = 1

    def lengths(self) -> Iterator[tuple[int, int]]:
        """(prompt_tokens, output_tokens) without end."""
        dice = random.Random(self.seed)
        sigma = math.sqrt(math.log1p(self.cv * self.cv))
        while True:
            prompt, output = (
                max(1, round(dice.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
                for mean in (self.prompt_tokens, self.output_tokens)
            )
            yield prompt, output
