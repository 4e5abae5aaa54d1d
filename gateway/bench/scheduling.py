"""The scheduling benchmark: all cells by contenders by seeds, each against the bounds and the best static window.

Figures of a cell and contender are means over its seeds; `worst_attainment` is the lowest. The best static window is
chosen in hindsight: the most bulk among the static windows whose attainment reaches the bar, or ours where that is
lower; where none does there is none. Windows of bulk are searched for it to within one part in COARSE. The clairvoyant must not fall behind it, nor behind ours where that reaches the bar;
where it does, the result says so (`clairvoyant_behind`), since then the bound is wrong and not the policy good.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gateway.bench.baselines import CLIENTS_IN_FLIGHT, OURS, SWEPT, contenders
from gateway.bench.bounds import bar, ceiling, fluid_tokens_per_s
from gateway.bench.cells import BULK, Cell, Workload, load_cells
from gateway.bench.perturbations import POOL_ONLY
from gateway.bench.runs import ALONE, BOUNDS, CLAIRVOYANT, FIRST_COME, Task, copy, perform

STATIC = ("static_shared_", SWEPT)
COARSE = 16
BOUNDS_NEEDED = (CLAIRVOYANT, "fluid_bulk_tokens_per_s", "attainment_ceiling")

Averages = Mapping[str, float | None]


def tasks_of(cells: Iterable[Cell], *, data: Path, out: Path, quick: bool, perturb: str = "") -> list[Task]:
    """Everything that is to be run, but for windows that `searched` adds. Bounds first: they do not depend on ours.

    quick   one seed
    """
    names = [name for name in (*BOUNDS, *contenders()) if not perturb or name in {CLAIRVOYANT, OURS}]
    return [
        Task(cell.name, name, seed, data, out, perturb)
        for name in names
        for cell in cells
        for seed in cell.seeds[: 1 if quick else None]
        if _applies(perturb, cell)
    ]


def searched(cells: Iterable[Cell], found: Mapping[Task, Averages]) -> list[Task]:
    """The next windows of the search for the largest that reaches the bar, for every seed; none when all are found.

    Attainment falls as the window of bulk grows, and bulk grows with it: the best in hindsight is the last that reaches the
    bar, with one just above it that does not.
    """
    more: list[Task] = []
    for cell in cells:
        of_cell = {task: one for task, one in found.items() if task.cell == cell.name}
        if not of_cell:
            continue
        means = _means(of_cell)
        any_task = next(iter(of_cell))
        needed = _needed(means, _ceiling(cell, cell.workload(any_task.seed)))
        reached = {
            int(name.removeprefix(SWEPT)): _number(one, "attainment") >= needed
            for name, one in means.items()
            if name.startswith(SWEPT)
        }
        low = max((window for window, good in reached.items() if good), default=0)
        high = min(
            (window for window, good in reached.items() if not good and window > low), default=CLIENTS_IN_FLIGHT + 1
        )
        if high - low > max(1, low // COARSE):
            between = round(math.sqrt(low * high)) if low else high // 2
            name = f"{SWEPT}{min(max(between, low + 1), high - 1)}"
            more += [replace(any_task, contender=name, seed=seed) for seed in sorted({task.seed for task in of_cell})]
    return more


def run_all(
    tasks: Sequence[Task], *, workers: int | None, on_done: Callable[[Task], None]
) -> tuple[dict[Task, Averages], dict[Task, str]]:
    """Make every run that is not there yet, over all cores: figures by task, and why those failed that did."""
    found: dict[Task, Averages] = {}
    failed: dict[Task, str] = {}
    left: list[Task] = []
    twins: list[tuple[Task, Task]] = []
    for task in tasks:
        done, twin = task.done, task.twin
        if done is not None:
            found[task] = done
            on_done(task)
        elif twin is not None:
            twins.append((task, twin))
        else:
            left.append(task)
    left += [twin for _, twin in twins if twin not in left and twin not in found]
    if left:
        with _pool(workers or os.cpu_count() or 1) as pool:
            with _ctrl_c_later():
                pending = {pool.submit(perform, task): task for task in left}
            for future in as_completed(pending):
                task, error = pending[future], future.exception()
                if error is None:
                    found[task] = future.result()
                else:
                    failed[task] = f"{type(error).__name__}: {error}".partition("\n")[0]
                on_done(task)
    for task, twin in twins:
        if twin in found:
            found[task] = copy(task, twin)
        on_done(task)
    return {task: found[task] for task in tasks if task in found}, failed


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose workers end with us: at once when we are interrupted, and when we are killed.

    Each of them reads a pipe of which only we hold the other end. The pool by itself would finish the runs under way.
    """
    theirs, ours = Pipe(duplex=False)
    with (
        theirs,
        ours,
        ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_end_with_parent, initargs=(theirs,)
        ) as pool,
    ):
        try:
            yield pool
        except BaseException:
            ours.close()
            raise


def _end_with_parent(parent: Connection) -> None:
    """In a worker: from now on it ends, whatever it does, when the other end of the pipe is closed."""

    def watch() -> None:
        with suppress(EOFError, OSError):
            parent.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Hold Ctrl-C back while workers are started: they inherit that, and leave a terminal's Ctrl-C to us for good."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def missing(cells: Iterable[Cell], document: Mapping[str, Any], *, perturbs: Collection[str] = ()) -> list[str]:
    """What a whole result has and this one has not, as CELL.POLICY or CELL.BOUND."""
    names = [OURS] if perturbs else [name for name in contenders() if not name.startswith(SWEPT)]
    needed = (CLAIRVOYANT,) if perturbs else BOUNDS_NEEDED
    lacking = []
    for cell in cells:
        for title in [_title(cell, one) for one in perturbs if _applies(one, cell)] if perturbs else [cell.name]:
            table, bounds = document["cells"].get(title, {}), document["bounds"].get(title, {})
            lacking += [f"{title}.{name}" for name in names if name not in table]
            lacking += [f"{title}.{name}" for name in needed if bounds.get(name) is None]
    return lacking


def _title(cell: Cell, perturb: str) -> str:
    """As in the names of rows."""
    return f"{cell.name}+{perturb}" if perturb else cell.name


def _applies(perturb: str, cell: Cell) -> bool:
    return perturb not in POOL_ONLY or len(cell.profiles) > 1


def summarise(
    cells: Sequence[Cell], found: Mapping[Task, Averages], *, out: Path, seconds: float, made: int
) -> dict[str, Any]:
    """The document that `--json` prints. A perturbed cell stands there as CELL+PERTURBATION.

    made   how many of these runs were made in those seconds; the others lay there
    """
    table: dict[str, dict[str, Averages]] = {}
    bounds: dict[str, dict[str, Any]] = {}
    perturbs = sorted({task.perturb for task in found}) or [""]
    for cell, perturb in ((cell, perturb) for cell in cells for perturb in perturbs if _applies(perturb, cell)):
        mine = {task: one for task, one in found.items() if (task.cell, task.perturb) == (cell.name, perturb)}
        means, seeds = _means(mine), {task.seed for task in mine}
        title = _title(cell, perturb)
        table[title] = {name: one for name, one in means.items() if name not in BOUNDS}
        bounds[title] = _bounds(cell, means, sorted(seeds), perturbed=bool(perturb))
    return {
        "cells": table,
        "bounds": bounds,
        "rows": str(out),
        "commit": commit(),
        "seconds": seconds,
        "runs": len(found),
        "runs_made": made,
    }


def _bounds(cell: Cell, means: Mapping[str, Averages], seeds: Sequence[int], *, perturbed: bool) -> dict[str, Any]:
    """perturbed: ceiling and fluid bound are of the world as it is defined, and are left out."""
    if perturbed:
        return {
            "clairvoyant": means.get(CLAIRVOYANT),
            "clairvoyant_behind": False,
            "fluid_bulk_tokens_per_s": None,
            "best_static": None,
            "attainment_ceiling": None,
            "alone": None,
            "first_come": None,
        }
    works = [cell.workload(seed) for seed in seeds or cell.seeds[:1]]
    reachable = sum(_ceiling(cell, work) for work in works) / len(works)
    fluid = [fluid_bound(cell, work) for work in works]
    best = best_static(means, reachable)
    clairvoyant = means.get(CLAIRVOYANT)
    ours = means.get(OURS)
    rivals = [best, ours if ours is not None and _number(ours, "attainment") >= bar(reachable) else None]
    behind = clairvoyant is not None and any(
        _number(one, "bulk_tokens_per_s") > _number(clairvoyant, "bulk_tokens_per_s")
        for one in rivals
        if one is not None
    )
    return {
        "clairvoyant": clairvoyant,
        "clairvoyant_behind": behind,
        "fluid_bulk_tokens_per_s": sum(fluid) / len(fluid),
        "best_static": best,
        "attainment_ceiling": reachable,
        "alone": means.get(ALONE),
        "first_come": means.get(FIRST_COME),
    }


def fluid_bound(cell: Cell, work: Workload) -> float:
    """Of a whole run, in bulk tokens per second: each stretch of it with the engines that are there."""
    specs = cell.engines_of_pool()
    interrupted_s = {spec.interrupted_at_s for spec in specs if spec.interrupted_at_s is not None}
    gone_s = sorted(at_s for at_s in interrupted_s if 0 < at_s < work.duration_s)
    lengths = (
        [(one.prompt_tokens, one.output_tokens) for one in work.requests if one.class_name == BULK]
        if work.backlog is None
        else work.backlog.lengths
    )
    tokens = 0.0
    for from_s, until_s in pairwise([0.0, *gone_s, work.duration_s]):
        per_s = fluid_tokens_per_s(
            [spec.profile for spec in specs if spec.interrupted_at_s is None or spec.interrupted_at_s > from_s],
            [one for one in work.requests if one.class_name != BULK and from_s <= one.arrival_s < until_s],
            lengths,
            duration_s=until_s - from_s,
            tpot_sla_s=cell.tpot_sla_s,
        )
        tokens += per_s * (until_s - from_s)
    return tokens / work.duration_s


def _ceiling(cell: Cell, work: Workload) -> float:
    interactive = [one for one in work.requests if one.class_name != BULK]
    return ceiling(interactive, cell.profiles, cell.objective_s)


def best_static(means: Mapping[str, Averages], attainment_ceiling: float) -> dict[str, Any] | None:
    """See the module header."""
    needed = _needed(means, attainment_ceiling)
    good = [
        (_number(one, "bulk_tokens_per_s"), name)
        for name, one in means.items()
        if name.startswith(STATIC) and _number(one, "attainment") >= needed
    ]
    if not good:
        return None
    name = max(good)[1]
    return {"policy": name, **means[name]}


def _needed(means: Mapping[str, Averages], attainment_ceiling: float) -> float:
    """Attainment that a static window has to reach to be compared with: the bar, or ours where that is lower."""
    needed = bar(attainment_ceiling)
    return min(needed, _number(means[OURS], "attainment")) if OURS in means else needed


def _means(found: Mapping[Task, Averages]) -> dict[str, dict[str, float | None]]:
    """By contender, over the seeds."""
    by_name: dict[str, list[Averages]] = {}
    for task, one in found.items():
        by_name.setdefault(task.contender, []).append(one)
    return {name: _mean(runs) for name, runs in by_name.items()}


def _mean(runs: Sequence[Averages]) -> dict[str, float | None]:
    names = runs[0].keys()
    means: dict[str, float | None] = {}
    for name in names:
        values = [value for one in runs if (value := one[name]) is not None]
        means[name] = sum(values) / len(values) if values else None
    attained = [value for one in runs if (value := one["attainment"]) is not None]
    return {**means, "worst_attainment": min(attained, default=None)}


def _number(one: Mapping[str, Any], name: str) -> float:
    value = one.get(name)
    return -math.inf if value is None else float(value)


def commit() -> str:
    """Of the code that ran, with + for changes on top; "" outside a repository."""
    root = Path(__file__).parents[2]
    try:
        head = subprocess.run(  # noqa: S603 - no part of it comes from outside
            ["git", "-C", str(root), "describe", "--always", "--dirty=+"],  # noqa: S607 - the user's own git
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return head.stdout.strip()


def timed() -> Callable[[], float]:
    """Seconds since this was called."""
    begun_s = time.perf_counter()
    return lambda: time.perf_counter() - begun_s


def chosen(data: Path, names: Sequence[str], *, quick: bool) -> list[Cell]:
    """The cells to run: those named, else all, or those marked quick. Raises KeyError naming one that is not there."""
    cells = load_cells(data)
    known = {cell.name for cell in cells}
    for name in names:
        if name not in known:
            raise KeyError(name)
    return [cell for cell in cells if (cell.name in names if names else cell.quick or not quick)]
