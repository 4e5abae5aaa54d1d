"""What the demo sends: arrivals and lengths of real traffic, with text made up to those lengths.

Interactive works arrive as in ten minutes of the Azure conversation trace, which repeat; bulk works have the lengths
of arXiv summarisation and are always there. The files in `data/` hold no text, only numbers, each under its source
and licence in the first line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import cycle, islice

WORDS = (
    "the", "water", "that", "we", "use", "to", "turn", "and", "move", "is", "the", "same", "water", "that", "will", "come", "back", "to", "the", "land",
)  # fmt: skip
"""Common words, one token each for the simulated engines and nearly so for real ones."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request's size in tokens."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the trace. at_s counts from the start of the demo."""

    at_s: float
    lengths: Lengths


def conversation(rate: float = 1.0) -> Iterator[Arrival]:
    """Arrivals for ever, `rate` times as dense as recorded: the ten minutes again and again."""
    rows = [(float(at_s), Lengths(int(prompt), int(output))) for at_s, prompt, output in _rows("azure_conv_10min.csv")]
    period_s = 600.0
    start_s = 0.0
    while True:
        for at_s, lengths in rows:
            yield Arrival((start_s + at_s) / rate, lengths)
        start_s += period_s


def summarisation() -> Iterator[Lengths]:
    """Bulk lengths for ever."""
    rows = [Lengths(int(prompt), int(output)) for prompt, output in _rows("arxiv_summarization_lengths.csv")]
    return cycle(rows)


def prompt_text(tokens: int, number: int) -> str:
    """A text of about `tokens` tokens that no other request begins with: `number` turns the words, so that a prefix
    cache finds nothing that real traffic would not offer."""
    return f"{number} " + " ".join(islice(cycle(WORDS), number % len(WORDS), number % len(WORDS) + max(1, tokens - 2)))


def _rows(name: str) -> list[list[str]]:
    text = (resources.files("gateway.demo") / "data" / name).read_text(encoding="utf-8")
    return list(csv.reader(line for line in text.splitlines()[2:] if line))
