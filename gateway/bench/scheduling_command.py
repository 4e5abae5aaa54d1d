"""`headrace bench scheduling`: cells by policies by seeds, over all cores, against the bounds.

It can be stopped (Ctrl-C, SIGTERM) and started again: what has been run by the same code is not run again. Progress goes to
standard error, as a bar on a terminal and else as a line a run. `--json` prints the whole document, `--report DIR` writes the page and its pictures. A run that fails is told, and
what then is missing makes the command fail.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gateway.bench.cells import Cell, shipped_data
from gateway.bench.perturbations import PERTURBATIONS
from gateway.bench.report import bars_table, bounds_of, made_in, perturbed_of, table_of, write_perturbed, write_report
from gateway.bench.runs import Task
from gateway.bench.scheduling import chosen, missing, run_all, searched, summarise, tasks_of, timed
from gateway.settings_file import SettingsError
from gateway.stop_signals import interrupted_by_sigterm

OUT = Path("bench-scheduling")
ALL = "all"
UNCUT_WIDTH = 10_000
"""In columns: wider than any table, so that it takes what it needs."""
LEFT_OUT_FIRST = (
    *("Jain", "J/token", "aborted", "recomputed", "shed", "preempted", "TTFT p50 s", "worst seed", "÷ fluid"),
    *("goodput /s", "TPOT p99 s", "p99 s", "÷ clairvoyant", "÷ best static"),
)
"""Columns of a cell's table, the least important first."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the benchmark."""
    parser = subparsers.add_parser("scheduling", help="bulk beside interactive, against baselines and bounds")
    parser.add_argument("--cell", action="append", default=[], metavar="NAME", help="only this cell; repeatable")
    parser.add_argument("--quick", action="store_true", help="one seed, and the cells marked quick")
    parser.add_argument(
        "--perturb", default="", choices=[ALL, *sorted(PERTURBATIONS)], help="with something wrong in the world"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"rows and figures of each run ({OUT})")
    parser.add_argument("--data", type=Path, default=None, metavar="DIR", help="cells.json and traces (those shipped)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (one a core)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write the page and its pictures there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Run what is missing, then tell."""
    data: Path = args.data or shipped_data()
    try:
        cells = chosen(data, args.cell, quick=args.quick)
    except OSError as error:
        raise SettingsError(f"bench: --data {data}: {error.strerror}; it must hold cells.json and traces/") from None
    except KeyError as error:
        raise SettingsError(f"bench: --cell {error.args[0]}: no such cell; cells.json names them") from None
    try:
        with interrupted_by_sigterm():
            document, failed = _measured(args, cells, data)
    except KeyboardInterrupt:
        sys.stderr.write(f"bench: stopped; the same command goes on from the runs that lie in {args.out}\n")
        raise
    made_by = " ".join(["headrace bench scheduling", *_flags(args)])
    if args.report is not None:
        write = write_perturbed if args.perturb else write_report
        write(args.report, document, made_by=made_by)
    if args.json:
        sys.stdout.write(json.dumps(_finite(document), indent=1) + "\n")
    elif args.perturb:
        _table("perturbations", perturbed_of(document), [])
    else:
        for cell in document["cells"]:
            _table(cell, table_of(cell, document), bounds_of(cell, document))
        _table("bars", bars_table(document), [])
        sys.stdout.write(f"{made_in(document)}; rows of every request in {document['rows']}\n")
    lacking = missing(cells, document, perturbs=_perturbs(args))
    if lacking:
        sys.stderr.write(f"bench: missing: {', '.join(lacking)}\n")
    return 1 if lacking or failed else 0


def _measured(args: argparse.Namespace, cells: list[Cell], data: Path) -> tuple[dict[str, Any], int]:
    """Make the runs; the document of their figures, and how many failed: a mean without them, or a search, is not whole."""
    tasks = [
        task
        for perturb in _perturbs(args) or [""]
        for task in tasks_of(cells, data=data, out=args.out, quick=args.quick, perturb=perturb)
    ]
    seconds = timed()
    found: dict[Task, Mapping[str, float | None]] = {}
    failed: dict[Task, str] = {}
    lay = 0
    with _progress() as progress:
        while tasks:
            lay += sum(task.done is not None for task in tasks)
            made, lost = run_all(tasks, workers=args.workers, on_done=_Meter(progress, len(tasks)))
            found.update(made)
            failed.update(lost)
            tasks = [] if args.perturb or lost else searched(cells, found)
    for task, why in failed.items():
        sys.stderr.write(f"bench: {task.stem} failed: {why}\n")
    return summarise(cells, found, out=args.out, seconds=seconds(), made=len(found) - lay), len(failed)


def _finite(value: Any) -> Any:
    """As JSON can have it: an infinite figure is null."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return None if value == math.inf else value


def _perturbs(args: argparse.Namespace) -> list[str]:
    return list(PERTURBATIONS) if args.perturb == ALL else [args.perturb] if args.perturb else []


def _flags(args: argparse.Namespace) -> list[str]:
    flags = ["--quick"] if args.quick else []
    flags += [f"--cell {name}" for name in args.cell]
    return [*flags, *([f"--perturb {args.perturb}"] if args.perturb else [])]


@dataclass(slots=True)
class _Meter:
    """Counts runs on the progress bar, or in lines where there is none."""

    progress: Progress | None
    total: int
    _task: TaskID | None = field(default=None, init=False)
    _done: int = field(default=0, init=False)

    def __call__(self, task: Task) -> None:
        self._done += 1
        if self.progress is None:
            sys.stderr.write(f"bench: {self._done} of {self.total}: {task.stem}\n")
            return
        if self._task is None:
            self._task = self.progress.add_task("", total=self.total)
        self.progress.update(self._task, advance=1, description=task.stem)


def _progress() -> AbstractContextManager[Progress | None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        return nullcontext()
    columns = (MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True)


def _table(title: str, rows: Sequence[tuple[str, ...]], notes: Sequence[str]) -> None:
    """Nothing in it is cut: in a pipe it is as wide as it is, and a terminal too narrow for it is spared columns."""
    console, unbounded = Console(), Console(width=UNCUT_WIDTH, height=UNCUT_WIDTH)
    left_out: list[str] = []
    table = _drawn(title, rows, notes, left_out)
    if console.is_terminal:
        for name in LEFT_OUT_FIRST:
            if unbounded.measure(table).maximum <= console.width:
                break
            if name in rows[0]:
                left_out.append(name)
                table = _drawn(title, rows, notes, left_out)
    unbounded.print(table)


def _drawn(title: str, rows: Sequence[tuple[str, ...]], notes: Sequence[str], left_out: Sequence[str]) -> Table:
    header, *lines = rows
    if left_out:
        notes = [*notes, f"left out, as the terminal is narrow: {', '.join(left_out)} (--json has all)"]
    table = Table(title=title, title_justify="left", caption="\n".join(notes), caption_justify="left")
    shown = [number for number, name in enumerate(header) if name not in left_out]
    for number in shown:
        table.add_column(header[number], justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(line[number] for number in shown))
    return table
