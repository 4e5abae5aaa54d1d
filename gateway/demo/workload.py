"""What the demo sends: arrivals and lengths of real traffic, with text made up to those lengths.

Interactive works arrive as in ten minutes of the Azure conversation trace, which repeat; bulk works have the lengths
of arXiv summarisation and are always there. The files in `data/` hold no text, only numbers, each under its source
and licence in the first line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import resources
from itertools import cycle

from gateway.replay.trace import Request


def conversation(rate: float = 1.0) -> Iterator[Request]:
    """Interactive requests for ever, `rate` times as dense as recorded: the ten minutes again and again."""
    rows = [(float(at_s), int(prompt), int(output)) for at_s, prompt, output in _rows("azure_conv_10min.csv")]
    period_s = 600.0
    start_s = 0.0
    while True:
        for at_s, prompt, output in rows:
            yield Request((start_s + at_s) / rate, prompt, output, class_name="interactive")
        start_s += period_s


def summarisation() -> Iterator[Request]:
    """Bulk requests for ever, each due when somebody is ready to send it."""
    rows = [(int(prompt), int(output)) for prompt, output in _rows("arxiv_summarization_lengths.csv")]
    return (Request(0.0, prompt, output, class_name="bulk") for prompt, output in cycle(rows))


def _rows(name: str) -> list[list[str]]:
    text = (resources.files("gateway.demo") / "data" / name).read_text(encoding="utf-8")
    return list(csv.reader(line for line in text.splitlines()[2:] if line))
