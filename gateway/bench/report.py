"""The scheduling benchmark for readers: a page in Markdown and a picture a cell, made from the JSON document alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.bench.bars import bars_of, perturbed_held
from gateway.bench.baselines import OURS
from gateway.bench.bounds import bar
from gateway.replay.chart import Bars, svg

PAGE = "scheduling.md"
PERTURBED_PAGE = "perturbations.md"
COLUMNS = (
    ("attainment", "attainment", "{:.4f}"),
    ("worst_attainment", "worst seed", "{:.4f}"),
    ("goodput_rps", "goodput /s", "{:.2f}"),
    ("ttft_p50_s", "TTFT p50 s", "{:.3f}"),
    ("ttft_p99_s", "p99 s", "{:.3f}"),
    ("tpot_p99_s", "TPOT p99 s", "{:.3f}"),
    ("bulk_tokens_per_s", "bulk tok/s", "{:,.0f}"),
    ("preemptions", "preempted", "{:,.0f}"),
    ("recomputed_tokens", "recomputed", "{:,.0f}"),
    ("aborted_tokens", "aborted", "{:,.0f}"),
    ("shed", "shed", "{:,.0f}"),
    ("joules_per_token", "J/token", "{:.4f}"),
    ("jain", "Jain", "{:.3f}"),
)
INTRODUCTION = """# How good the scheduler is

Replayed traffic against simulated engines: the same dispatcher, queue and policies as `headrace serve`, in virtual time.
Commit `{commit}`, {made_in} by `{made_by}`; every figure follows from the rows that the same run writes.

A contender first has to keep interactive requests inside their objective (the bar), and is then measured by the bulk that
it serves. Attainment counts who has its first token in time and no longer gaps than the cell allows. `static_*` are
windows that an operator would have to guess; the best in hindsight is the one to beat. The clairvoyant knows lengths,
arrivals and engines. The fluid bound knows no queues, and can be passed by whoever leaves long items lying or lets
interactive work wait. Requests that never had a first token have an infinite one in the percentiles; recomputed are prompt
tokens that the engine computed again after it had preempted, aborted those that an attempt had made that was given up.
"""
PERTURBED = """# What the scheduler makes of a world that is not as it was told

Each cell with one thing wrong that nobody tells the policy (docs/replay.md says what), beside the clairvoyant, which knows.
Commit `{commit}`, {made_in} by `{made_by}`. The bar: at most one point of attainment below the clairvoyant.
"""
Row = Mapping[str, Any]


def write_report(folder: Path, document: Mapping[str, Any], *, made_by: str) -> Path:
    """Write the page and its pictures; the page's path. made_by: the command line."""
    folder.mkdir(parents=True, exist_ok=True)
    for cell in document["cells"]:
        (folder / f"scheduling-{cell}.svg").write_text(_picture(cell, document), encoding="utf-8")
    page = folder / PAGE
    page.write_text(_page(document, made_by), encoding="utf-8")
    return page


def write_perturbed(folder: Path, document: Mapping[str, Any], *, made_by: str) -> Path:
    """The page of perturbed cells; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PERTURBED_PAGE
    head = PERTURBED.format(commit=document["commit"], made_in=made_in(document), made_by=made_by)
    lines = perturbed_of(document)
    held = sum(line[-1] == "held" for line in lines)
    page.write_text(f"{head}\n{held} of {len(lines) - 1} held.\n\n{_markdown(lines)}", encoding="utf-8")
    return page


def made_in(document: Mapping[str, Any]) -> str:
    """How long it took, and of how many runs: those that an earlier command left are taken as they are."""
    made, runs = document["runs_made"], document["runs"]
    of = f"all {runs} runs" if made == runs else f"{made} of {runs} runs, the others lay there from before"
    return f"made in {document['seconds']:,.0f} s ({of})"


def perturbed_of(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Ours beside the clairvoyant, a line for each perturbed cell."""
    lines: list[tuple[str, ...]] = [
        ("cell", "perturbation", "attainment", "clairvoyant", "points", "bulk tok/s", "÷ clairvoyant", "")
    ]
    for title, table in document["cells"].items():
        cell, _, perturb = title.partition("+")
        ours, knowing = table.get(OURS), document["bounds"][title]["clairvoyant"]
        if ours is None or knowing is None:
            lines.append((cell, perturb, *["-"] * 5, "MISSED"))
            continue
        met, bulk = ours["attainment"], ours["bulk_tokens_per_s"]
        lines.append(
            (
                cell,
                perturb,
                f"{met:.4f}",
                f"{knowing['attainment']:.4f}",
                f"{100 * (met - knowing['attainment']):+.1f}",
                f"{bulk:,.0f}",
                f"{bulk / knowing['bulk_tokens_per_s']:.2f}" if knowing["bulk_tokens_per_s"] else "-",
                "held" if perturbed_held(met, knowing["attainment"]) else "MISSED",
            )
        )
    return lines


def bars_table(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Every bar of every cell, held or missed."""
    lines: list[tuple[str, ...]] = [("cell", "figure", "measured", "needed", "")]
    for one in bars_of(document):
        measured = "-" if one.value is None else f"{one.value:,.3f}"
        needed = f"{'≤' if one.at_most else '≥'} {one.needed:,.3f}"
        lines.append((one.cell, one.name, measured, needed, "held" if one.held else "MISSED"))
    return lines


def table_of(cell: str, document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A cell's table: a header, then contenders by bulk served within the bar, then the rest by attainment."""
    bounds = document["bounds"][cell]
    header = ("policy", *(title for _, title, _ in COLUMNS), "÷ best static", "÷ clairvoyant", "÷ fluid")
    return [header, *(_line(name, row, bounds) for name, row in _ranked(document["cells"][cell], bounds))]


def bounds_of(cell: str, document: Mapping[str, Any]) -> list[str]:
    """What the cell is measured against, a line each."""
    bounds = document["bounds"][cell]
    best, clairvoyant = bounds["best_static"], bounds["clairvoyant"]
    reachable = bounds["attainment_ceiling"]
    lines = [
        f"ceiling of attainment {reachable:.4f}, bar {bar(reachable):.4f}",
        f"fluid bound {bounds['fluid_bulk_tokens_per_s']:,.0f} bulk tokens/s",
        "best static in hindsight "
        + (
            "none reaches the bar"
            if best is None
            else f"{best['policy']}, {best['bulk_tokens_per_s']:,.0f} bulk tokens/s"
        ),
    ]
    if bounds["alone"] is not None:
        lines.insert(
            1, f"interactive alone, the hopeless refused: attainment {bounds['alone']['attainment']:.4f} measured"
        )
    if (first_come := bounds["first_come"]) is not None:
        lines.insert(
            1,
            f"interactive alone, served as they come: attainment {first_come['attainment']:.4f}, "
            f"TTFT p95 {first_come['ttft_p95_s']:.3f} s",
        )
    if clairvoyant is not None:
        lines.append(
            f"clairvoyant {clairvoyant['bulk_tokens_per_s']:,.0f} bulk tokens/s at attainment "
            f"{clairvoyant['attainment']:.4f}" + (" (BEHIND: no bound here)" if bounds["clairvoyant_behind"] else "")
        )
    return lines


def _ranked(rows: Mapping[str, Row], bounds: Row) -> list[tuple[str, Row]]:
    """Ours first, then those at the bar by bulk, then the others by attainment."""
    needed = bar(bounds["attainment_ceiling"])

    def rank(item: tuple[str, Row]) -> tuple[int, float]:
        name, row = item
        if name == OURS:
            return 0, 0.0
        if row["attainment"] >= needed:
            return 1, -row["bulk_tokens_per_s"]
        return 2, -row["attainment"]

    return sorted(rows.items(), key=rank)


def _line(name: str, row: Row, bounds: Row) -> tuple[str, ...]:
    bulk = row["bulk_tokens_per_s"]
    cells = ["-" if row[key] is None else form.format(row[key]) for key, _, form in COLUMNS]
    against = (
        bounds["best_static"] or {},
        bounds["clairvoyant"] or {},
        {"bulk_tokens_per_s": bounds["fluid_bulk_tokens_per_s"]},
    )
    ratios = [f"{bulk / one['bulk_tokens_per_s']:.2f}" if one.get("bulk_tokens_per_s") else "-" for one in against]
    return (name, *cells, *ratios)


def _picture(cell: str, document: Mapping[str, Any]) -> str:
    rows, bounds = document["cells"][cell], document["bounds"][cell]
    ranked = _ranked(rows, bounds)
    levels = [("fluid", bounds["fluid_bulk_tokens_per_s"])]
    if bounds["clairvoyant"] is not None:
        levels.append(("clairvoyant", bounds["clairvoyant"]["bulk_tokens_per_s"]))
    needed = bar(bounds["attainment_ceiling"])
    attained = [(name, row["attainment"] or 0.0) for name, row in ranked]
    inside = [(name, row["bulk_tokens_per_s"]) for name, row in ranked if (row["attainment"] or 0.0) >= needed]
    return svg(
        f"{cell}: interactive inside its objective, and what is left for bulk",
        [
            Bars("attainment of the TTFT objective", attained, levels=[("bar", needed)]),
            Bars("bulk tokens/s of those that reach the bar", inside, levels=levels),
        ],
    )


def _page(document: Mapping[str, Any], made_by: str) -> str:
    parts = [INTRODUCTION.format(commit=document["commit"], made_in=made_in(document), made_by=made_by)]
    bars = bars_table(document)
    held = sum(line[-1] == "held" for line in bars)
    parts.append(f"## Bars\n\n{held} of {len(bars) - 1} held.\n\n{_markdown(bars)}")
    for cell in document["cells"]:
        parts.append(f"## {cell}\n")
        parts.extend(f"- {line}" for line in bounds_of(cell, document))
        parts.append(f"\n![{cell}](scheduling-{cell}.svg)\n")
        parts.append(_markdown(table_of(cell, document)))
    return "\n".join(parts) + "\n"


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---|" + "---:|" * (len(rows[0]) - 1))
    return "\n".join(lines) + "\n"
