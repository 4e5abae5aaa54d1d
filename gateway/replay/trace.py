"""Traffic to replay: requests with their times and sizes, read from a CSV file. No text, only numbers.

Columns `arrival_s, prompt_tokens, output_tokens` and, where there are any, `tenant`, `class`, `prefix` (leading prompt
tokens that the engine's prefix cache holds already; `ideal_prefix_hit_tokens` of the Mooncake traces is the same). The
rows that a replay or a benchmark writes have these columns too, so that recorded traffic is a trace. Lines that start
with # say where the figures come from and are skipped; columns that are not named here are too.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
PREFIX_COLUMNS = ("prefix", "ideal_prefix_hit_tokens")


class TraceError(ValueError):
    """A file is no trace; the message is one line with file, line and column."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the traffic.

    arrival_s              since the start of the replay
    output_tokens          the true length of the answer, which only the engine knows
    class_name             "": the policy's shape decides, as for a streamed request
    cached_prompt_tokens   leading prompt tokens found in the engine's prefix cache
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    class_name: str = ""
    cached_prompt_tokens: int = 0


def read_trace(path: Path, *, class_name: str = "") -> list[Request]:
    """All requests of a file, by arrival.

    class_name   for rows that name none
    Raises TraceError.
    """
    requests = [_request(path, line, row, class_name) for line, row in _rows(path, NEEDED)]
    if not requests:
        raise TraceError(f"{path}: no requests in it; it must have a header line and one line a request")
    return sorted(requests, key=lambda request: request.arrival_s)


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """(prompt_tokens, output_tokens) of every row; arrivals are not needed. Raises TraceError."""
    return [
        (_tokens(path, line, row, "prompt_tokens"), _tokens(path, line, row, "output_tokens"))
        for line, row in _rows(path, NEEDED[1:])
    ]


def segment(requests: list[Request], *, rate_scale: float, from_s: float, duration_s: float) -> list[Request]:
    """The requests of a stretch of a trace that is replayed `rate_scale` times as dense, counted from its start.

    from_s, duration_s   in replayed time, so from_s = 700 at rate_scale 0.25 begins 175 s into the trace
    """
    moved = (replace(one, arrival_s=one.arrival_s / rate_scale - from_s) for one in requests)
    return [one for one in moved if 0 <= one.arrival_s < duration_s]


def _rows(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({error}); give a CSV file") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line and not line.startswith("#")]
    reader = csv.DictReader(line for _, line in lines)
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(f"{path}: has no column {missing[0]}; its first line must name {', '.join(needed)}")
    for (number, _), row in zip(lines[1:], reader, strict=True):
        yield number, row


def _request(path: Path, line: int, row: Mapping[str, str], class_name: str) -> Request:
    prefix = next((name for name in PREFIX_COLUMNS if row.get(name)), "")
    return Request(
        arrival_s=_seconds(path, line, row),
        prompt_tokens=_tokens(path, line, row, "prompt_tokens"),
        output_tokens=_tokens(path, line, row, "output_tokens"),
        tenant=row.get("tenant") or "default",
        class_name=row.get("class") or class_name,
        cached_prompt_tokens=_whole(path, line, row, prefix) if prefix else 0,
    )


def _seconds(path: Path, line: int, row: Mapping[str, str]) -> float:
    text = row["arrival_s"]
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise TraceError(f"{path}:{line}: arrival_s is {text!r}; must be seconds >= 0")
    return value


def _whole(path: Path, line: int, row: Mapping[str, str], column: str) -> int:
    text = row[column]
    try:
        value = int(text)
    except (TypeError, ValueError):
        value = -1
    if value < 0:
        raise TraceError(f"{path}:{line}: {column} is {text!r}; must be a whole number >= 0")
    return value


def _tokens(path: Path, line: int, row: Mapping[str, str], column: str) -> int:
    """A prompt or answer has at least one token; traces that round down to none mean one."""
    return max(1, _whole(path, line, row, column))
