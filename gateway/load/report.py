"""What a load came to, to keep: Markdown with a picture, the figures as JSON, and the rows, which are a trace again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.load.figures import Figures, Spread, Step
from gateway.replay.chart import Line, Panel, svg
from gateway.replay.figures import quantile
from gateway.replay.rows import Row, write_rows

BINS = 60
ALL = "all"
UNITS = {"_s": " s", "_rps": " per second"}
Fact = str | float | Sequence[float]
"""Units last in the name, as everywhere; `facts_of` says it to people."""


@dataclass(frozen=True, slots=True)
class Told:
    """One load: what it was, its figures by class (ALL stands for all of them together), and a staircase's steps."""

    title: str
    facts: Mapping[str, Fact]
    by_class: Mapping[str, Figures]
    rows: Sequence[Row]
    steps: Sequence[Step] = ()

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        classes = {name: one.plain() for name, one in self.by_class.items()}
        stairs = {"steps": [asdict(one) for one in self.steps]} if self.steps else {}
        return {"title": self.title, **dict(self.facts), "classes": classes, **stairs}


def write_report(folder: Path, told: Told) -> None:
    """report.md, report.svg, figures.json and rows.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(markdown(told), encoding="utf-8")
    (folder / "report.svg").write_text(picture(told), encoding="utf-8")
    (folder / "figures.json").write_text(json.dumps(told.plain(), indent=1) + "\n", encoding="utf-8")
    write_rows(folder / "rows.csv", told.rows)


def facts_of(told: Told) -> Iterator[tuple[str, str]]:
    """(name, value) of each fact, in words: the unit stands with the value."""
    for name, fact in told.facts.items():
        suffix = next((suffix for suffix in UNITS if name.endswith(suffix)), "")
        numbers = [] if isinstance(fact, str) else fact if isinstance(fact, Sequence) else [fact]
        value = (
            fact
            if isinstance(fact, str)
            else ",".join(f"{number}" if isinstance(number, int) else f"{number:.4g}" for number in numbers)
        )
        yield name.removesuffix(suffix).replace("_", " "), value + UNITS.get(suffix, "")


def table(told: Told) -> tuple[list[str], list[list[str]]]:
    """Column heads and lines: one figure a line, one class a column."""
    names = list(told.by_class)
    lines: list[list[str]] = []

    def line(head: str, cells: Sequence[str]) -> None:
        if any(cell != "-" for cell in cells):
            lines.append([head, *cells])

    of = list(told.by_class.values())
    line("sent", [f"{one.sent:,}" for one in of])
    line("completed", [f"{one.completed:,}" for one in of])
    for kind in sorted({kind for one in of for kind in one.errors}):
        line(kind, [f"{one.errors.get(kind, 0):,}" for one in of])
    line("completed per second", [f"{one.requests_per_s:,.3g}" for one in of])
    line("inside the objectives", ["-" if one.attainment is None else f"{one.attainment:.2%}" for one in of])
    line("goodput per second", ["-" if one.goodput_rps is None else f"{one.goodput_rps:,.3g}" for one in of])
    line("prompt tokens per second", [f"{one.prompt_tokens_per_s:,.0f}" for one in of])
    line("output tokens per second", [f"{one.output_tokens_per_s:,.0f}" for one in of])
    for head, spreads in (
        ("TTFT", [one.ttft for one in of]),
        ("ITL", [one.itl for one in of]),
        ("TPOT", [one.tpot for one in of]),
        ("whole answer", [one.total for one in of]),
    ):
        for what, value in _QUANTILES:
            line(f"{head} {what}", [shown(value(one)) for one in spreads])
    line("sent late, p99", [shown(one.late_p99_s) for one in of])
    return ["", *names], lines


def step_table(told: Told) -> tuple[list[str], list[list[str]]]:
    """Column heads and lines: one rate of a staircase a line."""
    heads = ["requests per second", "sent", "completed", "inside", "TTFT p50", "TTFT p99", "whole answer p99"]
    lines = [
        [
            f"{one.rate_rps:g}",
            f"{one.sent:,}",
            f"{one.completed:,}",
            "-" if one.attainment is None else f"{one.attainment:.2%}",
            *map(shown, (one.ttft_p50_s, one.ttft_p99_s, one.total_p99_s)),
        ]
        for one in told.steps
    ]
    return heads, lines


def markdown(told: Told) -> str:
    """The report as a page."""
    parts = [f"# {told.title}", "", *(f"- {name}: {value}" for name, value in facts_of(told))]
    for heads, lines in (step_table(told), table(told)):
        if lines:
            parts += ["", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
            parts += ["| " + " | ".join(line) + " |" for line in lines]
    examples = told.by_class[ALL].examples if ALL in told.by_class else {}
    said = [f"- {kind}: {text}" for kind, text in examples.items() if text]
    if said:
        parts += ["", "What the errors said, one of each:", "", *said]
    parts += ["", "![Over time](report.svg)", ""]
    return "\n".join(parts)


def picture(told: Told) -> str:
    """First tokens, whole answers and rates over time, as SVG."""
    rows = sorted(told.rows, key=lambda row: row.arrival_s)
    names = sorted({row.class_name for row in rows})
    ends_s = max((row.end_s for row in rows), default=1.0)
    bin_s = max(ends_s / BINS, 0.1)
    first_tokens: list[Line] = []
    for name in names:
        mine = [row for row in rows if row.class_name == name and row.ttft_s is not None]
        label = name or "requests"
        first_tokens.append(Line(label, [(row.arrival_s, row.ttft_s or 0.0) for row in mine], dots=True))
        first_tokens.append(Line(f"{label}, p95", _p95(mine, bin_s)))
    under_way = [Line(name or "requests", _under_way([r for r in rows if r.class_name == name])) for name in names]
    tokens = [Line(name or "requests", _per_bin(rows, name, bin_s)) for name in names]
    return svg(
        told.title,
        [
            Panel("time to first token", first_tokens, "s", log_y=True),
            Panel("requests under way", under_way),
            Panel("output tokens per second, of answers that ended", tokens),
        ],
    )


def shown(seconds: float | None) -> str:
    """A time as people read it."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


_QUANTILES: tuple[tuple[str, Callable[[Spread], float | None]], ...] = (
    ("mean", lambda one: one.mean_s),
    ("p50", lambda one: one.p50_s),
    ("p90", lambda one: one.p90_s),
    ("p95", lambda one: one.p95_s),
    ("p99", lambda one: one.p99_s),
    ("max", lambda one: one.max_s),
)


def _p95(rows: Sequence[Row], bin_s: float) -> list[tuple[float, float]]:
    bins: dict[int, list[float]] = {}
    for row in rows:
        if row.ttft_s is not None:
            bins.setdefault(int(row.arrival_s // bin_s), []).append(row.ttft_s)
    return [((number + 0.5) * bin_s, quantile(sorted(ttft_s), 0.95) or 0.0) for number, ttft_s in sorted(bins.items())]


def _under_way(rows: Sequence[Row]) -> list[tuple[float, float]]:
    steps = sorted([(row.arrival_s, 1) for row in rows] + [(row.end_s, -1) for row in rows])
    found: list[tuple[float, float]] = []
    level = 0
    for at_s, step in steps:
        level += step
        found.append((at_s, float(level)))
    return found


def _per_bin(rows: Sequence[Row], name: str, bin_s: float) -> list[tuple[float, float]]:
    bins: dict[int, int] = {}
    for row in rows:
        if row.class_name == name:
            number = int(row.end_s // bin_s)
            bins[number] = bins.get(number, 0) + row.output_tokens
    return [((number + 0.5) * bin_s, count / bin_s) for number, count in sorted(bins.items())]
