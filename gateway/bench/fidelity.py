"""How near the simulated engine is to real ones: logs of real engines replayed, and the figures side by side.

A log has one line a request: when the real engine took it up, showed its first token and its last, and its tokens. The
simulated engine gets the same requests at the same times and is told nothing else. `error` is simulated over real, less
one; nothing here judges it.

A real engine's log says when its core *took a request up*, which it does between steps, so that time is no arrival but
the end of the step that was under way. Times to first token are counted from the same moment in the simulation
(`Sequence.taken_s`).

Of the shipped logs the first `fitted_requests` had a part in making their profile, the others had none, and `parts`
tells the two apart: what is fitted says only that the model can take that form.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.simulated import sequence as simulated
from backends.simulated.profiles import EngineOptions, Profile, build_engine, load_profile
from gateway.replay.chart import Line, Panel, svg
from gateway.replay.figures import quantile
from gateway.replay.trace import TraceError, why

LOGS_DIR = Path(__file__).parent / "data" / "logs"
COLUMNS = ("queued_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens")
BAR = 0.10
"""How far a figure may be off before the report marks it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request of a log, in seconds of the log; output_tokens is what the answer had in the end."""

    queued_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def ttft_s(self) -> float:
        """Taken up to first token."""
        return self.first_token_s - self.queued_s


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, measured and simulated."""

    real: float
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over real, less one."""
        return self.simulated / self.real - 1

    def plain(self) -> dict[str, float]:
        """As JSON has it."""
        return {"real": self.real, "simulated": self.simulated, "error": self.error}


Residuals = Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class Log:
    """A log and the profile it is compared with.

    fitted_requests   so many of its first requests had a part in making the profile
    """

    name: str
    path: Path
    profile: str
    fitted_requests: int = 0


SHIPPED = (
    Log("RTX4090_Llama-3.1-8B", LOGS_DIR / "vllm_log_rtx4090_llama31_8b.csv", "rtx4090_llama31_8b_tp1"),
    Log(
        "RTXPRO6000_Qwen3-32B",
        LOGS_DIR / "vllm_log_rtxpro6000_qwen3_32b.csv",
        "rtxpro6000x2_qwen3_32b_tp2",
        fitted_requests=150,
    ),
    Log(
        "RTXPRO6000_Qwen3-30B-A3B-Instruct-2507",
        LOGS_DIR / "vllm_log_rtxpro6000_qwen3_30b_a3b.csv",
        "rtxpro6000_qwen3_30b_a3b",
    ),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One log beside its replay. parts: "fitted" and "validation", where the profile owes something to the log."""

    log: Log
    entries: list[Entry]
    played: list[simulated.Sequence]
    preemptions: int
    residuals: Residuals
    parts: Mapping[str, Residuals]


def read_log(path: Path) -> list[Entry]:
    """The requests of a log, by the time they were taken up. Raises TraceError."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{path}: has no column {missing[0]}; its first line must name {', '.join(COLUMNS)}")
            entries = [_entry(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read ({why(error)}); give a CSV file") from None
    if not entries:
        raise TraceError(f"{path}: no requests in it; it must have a header line and one line a request")
    return sorted(entries, key=lambda entry: entry.queued_s)


def play(
    profile: Profile, entries: Sequence[Entry], options: EngineOptions | None = None
) -> tuple[list[simulated.Sequence], int]:
    """The same requests on the simulated engine, and how often it preempted. Raises ValueError for one too long."""
    engine = build_engine(profile, options)
    played = []
    for number, entry in enumerate(entries):
        one = simulated.Sequence(str(number), prompt_tokens=entry.prompt_tokens, output_tokens=entry.output_tokens)
        engine.submit(one, entry.queued_s - entries[0].queued_s)
        played.append(one)
    while engine.busy:
        engine.advance(engine.next_event_s())
    return played, engine.totals.preemptions


def residuals(played: Sequence[simulated.Sequence], entries: Sequence[Entry]) -> Residuals:
    """The four figures, of requests that belong together by position."""
    first_s = entries[0].queued_s
    found = {
        "ttft_p50_s": _both([one.ttft_s for one in entries], [_ttft_s(one) for one in played], 0.5),
        "ttft_p90_s": _both([one.ttft_s for one in entries], [_ttft_s(one) for one in played], 0.9),
        "makespan_s": Figure(
            max(one.last_token_s for one in entries) - first_s,
            max(one.finished_s for one in played) - min(one.arrival_s for one in played),
        ),
    }
    long = [(entry, one) for entry, one in zip(entries, played, strict=True) if entry.output_tokens > 1]
    if long:
        found["tpot_p50_s"] = _both(
            [(entry.last_token_s - entry.first_token_s) / (entry.output_tokens - 1) for entry, _ in long],
            [(one.finished_s - one.first_token_s) / (one.output_tokens - 1) for _, one in long],
            0.5,
        )
    return found


def compare(log: Log, options: EngineOptions | None = None) -> Compared:
    """Replay a log. Raises TraceError for the log, ValueError for the profile or a request that it cannot hold."""
    entries = read_log(log.path)
    played, preemptions = play(load_profile(log.profile), entries, options)
    cut = log.fitted_requests
    parts: dict[str, Residuals] = {}
    if 0 < cut < len(entries):
        parts["fitted"] = residuals(played[:cut], entries[:cut])
        parts["validation"] = residuals(played[cut:], entries[cut:])
    return Compared(log, entries, played, preemptions, residuals(played, entries), parts)


def picture(compared: Sequence[Compared]) -> str:
    """First tokens and ends of every request, real and simulated, as SVG."""
    panels = []
    for one in compared:
        start_s = one.entries[0].queued_s
        real = [(entry.queued_s - start_s, entry.ttft_s) for entry in one.entries]
        virtual = [(entry.queued_s - start_s, _ttft_s(it)) for entry, it in zip(one.entries, one.played, strict=True)]
        panels.append(
            Panel(
                f"{one.log.name}: time to first token, by time of arrival",
                [Line("real", real, dots=True), Line("simulated", virtual)],
                unit="s",
            )
        )
        real_ends = sorted(entry.last_token_s - start_s for entry in one.entries)
        virtual_ends = sorted(it.finished_s for it in one.played)
        panels.append(
            Panel(
                f"{one.log.name}: answers finished",
                [
                    Line("real", [(at_s, number) for number, at_s in enumerate(real_ends, 1)], dots=True),
                    Line("simulated", [(at_s, number) for number, at_s in enumerate(virtual_ends, 1)]),
                ],
            )
        )
    return svg("The simulated engine beside real ones", panels)


def _ttft_s(one: simulated.Sequence) -> float:
    return one.first_token_s - one.taken_s


def _both(real: list[float], virtual: list[float], share: float) -> Figure:
    return Figure(*(quantile(sorted(values), share) or math.nan for values in (real, virtual)))


def _entry(path: Path, line: int, row: Mapping[str, str]) -> Entry:
    try:
        values = {name: float(row[name]) for name in COLUMNS}
    except (TypeError, ValueError):
        raise TraceError(f"{path}:{line}: {dict(row)}: every one of {', '.join(COLUMNS)} must be a number") from None
    entry = Entry(
        values["queued_s"], values["first_token_s"], values["last_token_s"],
        int(values["prompt_tokens"]), int(values["output_tokens"]),
    )  # fmt: skip
    in_order = -math.inf < entry.queued_s < entry.first_token_s <= entry.last_token_s < math.inf
    if not in_order or entry.prompt_tokens < 1 or entry.output_tokens < 1:
        raise TraceError(
            f"{path}:{line}: queued_s {entry.queued_s}, first_token_s {entry.first_token_s}, last_token_s "
            f"{entry.last_token_s}: must come in this order, with tokens >= 1; leave out requests that never ended"
        )
    return entry
