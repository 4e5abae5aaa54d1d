"""Traffic to replay: requests with their times and sizes, read from a CSV file. No text, only numbers.

Columns `arrival_s, prompt_tokens, output_tokens` and, where there are any, `tenant`, `class`, `prefix` (leading prompt
tokens that the engine's prefix cache holds already; `ideal_prefix_hit_tokens` of the Mooncake traces is the same). The
rows that a replay or a benchmark writes have these columns too. Lines that start with # say where the figures come from
and are skipped; columns that are not named here are too.

What `gateway.recorder` wrote is a trace: one of its files, or its folder with all of them. Its times count from 1970, and
are moved so that the first request comes at 0. Its answers are those that were given; a request that got none (refused,
or failed) is given the length of the median answer, since it would have had one. Requests that were in error are left
out. Column `prefix_hashes` names the prompt's beginnings, for engines with a prefix cache.

Files ending in .jsonl or .jsonl.gz are read as Mooncake writes traces: one object a line, `timestamp` in milliseconds,
`input_length`, `output_length` and `hash_ids`, which name the beginnings of the prompt likewise. Where such a file lies
beside a CSV file under its name with `_hashids.jsonl.gz`, its rows are the same requests: the CSV says what happens to them
(`prefix` too, on an engine without a cache of its own), and `hash_ids` what a gateway sees of their bytes.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.recorder import MARK, PREFIX_BYTES
from policies.estimators.prefix_caches import LEVEL_ENDS_BYTES, level_tokens
from policies.vocabulary import Result

NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
PREFIX_COLUMNS = ("prefix", "ideal_prefix_hit_tokens")
RECORDED_ID_TOKENS = PREFIX_BYTES // 4
"""Of one prefix hash of recorded traffic: bodies have about four bytes a token."""
MOONCAKE_ID_TOKENS = 512
IDS_BESIDE = "_hashids.jsonl.gz"
SAME_ARRIVAL_S = 0.001

_ANSWERED = frozenset({Result.COMPLETED, Result.CANCELLED})
_POSITIVE = 0x7FFF_FFFF_FFFF_FFFF


class TraceError(ValueError):
    """A file is no trace; the message is one line with file, line and column."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the traffic.

    arrival_s              since the start of the replay
    output_tokens          the true length of the answer, which only the engine knows
    class_name             "": the policy's shape decides, as for a streamed request
    cached_prompt_tokens   leading prompt tokens found in the engine's prefix cache
    prefix_ids             names of its beginnings, each id_tokens longer than the one before; () where none are known
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "default"
    class_name: str = ""
    cached_prompt_tokens: int = 0
    prefix_ids: tuple[int, ...] = ()
    id_tokens: int = RECORDED_ID_TOKENS

    def block_ids(self, block_tokens: int) -> tuple[int, ...]:
        """Names of the prompt's full blocks of block_tokens, as far as its beginnings are known; equal where they are."""
        each = self.id_tokens // block_tokens
        known = min(len(self.prefix_ids) * each, self.prompt_tokens // block_tokens)
        return tuple((self.prefix_ids[n // each] * each + n % each) & _POSITIVE for n in range(known))

    @property
    def prefix(self) -> str:
        """As the gateway would make it of the request's bytes (`policies.vocabulary.Work`)."""
        if not self.prefix_ids:
            return ""
        names = (math.ceil(level_tokens(level) / self.id_tokens) - 1 for level in range(len(LEVEL_ENDS_BYTES)))
        return ".".join(f"{self.prefix_ids[at] & 0xFFFFFFFF:08x}" for at in names if at < len(self.prefix_ids))


def read_trace(path: Path, *, class_name: str = "") -> list[Request]:
    """All requests of a file, or of a recorder's folder, by arrival.

    class_name   for rows that name none
    Raises TraceError.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        requests = [_of_mooncake(path, line, text, class_name) for line, text in _json_lines(path)]
    elif path.is_dir() or _is_recorded(path):
        requests = _recorded(path, class_name)
    else:
        requests = _with_ids(path, [_request(path, line, row, class_name) for line, row in _rows(path, NEEDED)])
    if not requests:
        raise TraceError(f"{path}: no requests in it; it must have a header line and one line a request")
    return sorted(requests, key=lambda request: request.arrival_s)


def ids_beside(path: Path) -> Path:
    """Where the names of a CSV trace's beginnings lie, if anywhere."""
    return path.with_name(path.stem + IDS_BESIDE)


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


def _is_recorded(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:
        return False


def _recorded(path: Path, class_name: str) -> list[Request]:
    """What a recorder wrote to a file, or to the files of a folder."""
    files = [one for one in sorted(path.glob("*.csv")) if _is_recorded(one)] if path.is_dir() else [path]
    rows = [(file, *line) for file in files for line in _rows(file, (*NEEDED, "result"))]
    kept = [
        (_request(file, line, row, class_name), row["result"] in _ANSWERED)
        for file, line, row in rows
        if row["result"] != Result.CLIENT_ERROR
    ]
    start_s = min((request.arrival_s for request, _ in kept), default=0.0)
    median_tokens = round(statistics.median([request.output_tokens for request, answered in kept if answered] or [1]))
    return [
        replace(
            request,
            arrival_s=request.arrival_s - start_s,
            output_tokens=request.output_tokens if answered else max(request.output_tokens, median_tokens),
        )
        for request, answered in kept
    ]


def why(error: Exception) -> str:
    """Of a file that cannot be read, without what is said of it anyway."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _rows(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({why(error)}); give a CSV file") from None
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
        prefix_ids=_ids(path, line, row),
    )


def _with_ids(path: Path, requests: list[Request]) -> list[Request]:
    """The requests with the names of their beginnings, where these lie beside the trace. Raises TraceError where the two are
    not of the same requests."""
    beside = ids_beside(path)
    if not beside.is_file():
        return requests
    named = [_of_mooncake(beside, line, text, "") for line, text in _json_lines(beside)]
    if len(named) != len(requests):
        raise TraceError(
            f"{beside}: has {len(named)} requests, {path.name} has {len(requests)}; remove one, or make them agree"
        )
    for number, (request, one) in enumerate(zip(requests, named, strict=True), 1):
        sizes = (request.prompt_tokens, request.output_tokens)
        if abs(request.arrival_s - one.arrival_s) > SAME_ARRIVAL_S or sizes != (one.prompt_tokens, one.output_tokens):
            raise TraceError(f"{beside}: request {number} is not that of {path.name}; remove one, or make them agree")
    return [
        replace(request, prefix_ids=one.prefix_ids, id_tokens=one.id_tokens)
        for request, one in zip(requests, named, strict=True)
    ]


def _json_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    yield line, text
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({why(error)}); give a JSON Lines file") from None


def _of_mooncake(path: Path, line: int, text: str, class_name: str) -> Request:
    try:
        found = json.loads(text)
        request = Request(
            arrival_s=float(found["timestamp"]) / 1000,
            prompt_tokens=max(1, int(found["input_length"])),
            output_tokens=max(1, int(found["output_length"])),
            class_name=class_name,
            prefix_ids=tuple(int(one) for one in found.get("hash_ids", ())),
            id_tokens=MOONCAKE_ID_TOKENS,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{path}:{line}: {error!r}: every line must have the numbers timestamp, input_length and output_length"
        ) from None
    if not 0 <= request.arrival_s < math.inf:
        raise TraceError(f"{path}:{line}: timestamp is {found['timestamp']!r}; must be milliseconds >= 0")
    return request


def _ids(path: Path, line: int, row: Mapping[str, str]) -> tuple[int, ...]:
    text = row.get("prefix_hashes") or ""
    try:
        return tuple(int(one, 16) & _POSITIVE for one in text.split())
    except ValueError:
        raise TraceError(f"{path}:{line}: prefix_hashes is {text[:60]!r}; must be hexadecimal numbers") from None


def _seconds(path: Path, line: int, row: Mapping[str, str]) -> float:
    text = row["arrival_s"]
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise TraceError(f"{path}:{line}: arrival_s is {_found(text)}; must be seconds >= 0")
    return value


def _whole(path: Path, line: int, row: Mapping[str, str], column: str) -> int:
    text = row[column]
    try:
        value = int(text)
    except (TypeError, ValueError):
        value = -1
    if value < 0:
        raise TraceError(f"{path}:{line}: {column} is {_found(text)}; must be a whole number >= 0")
    return value


def _found(text: str | None) -> str:
    """A cell in an error's words; a row that is too short has None there."""
    return repr(text) if text else "missing"


def _tokens(path: Path, line: int, row: Mapping[str, str], column: str) -> int:
    """A prompt or answer has at least one token; traces that round down to none mean one."""
    return max(1, _whole(path, line, row, column))
