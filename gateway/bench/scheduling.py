"""The scheduling benchmark: all cells by contenders by seeds, each against the bounds and the best static window.

Figures of a cell and contender are means over its seeds; `worst_attainment` is the lowest. The best static window is
chosen in hindsight: the most bulk among the static windows whose attainment reaches the bar, or ours where that is
lower; where none does there is none. The clairvoyant must not fall behind it; where it does, the result says so
(`clairvoyant_behind`), since then the bound is wrong and not the policy good.
"""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gateway.bench.baselines import BULK_WINDOWS, OURS, contenders
from gateway.bench.bounds import fluid_tokens_per_s
from gateway.bench.cells import BULK, Cell, load_cells
from gateway.bench.perturbations import POOL_ONLY
from gateway.bench.runs import ALONE, BOUNDS, CLAIRVOYANT, Task, ceiling, perform

ATTAINMENT_BAR = 0.99
CEILING_SHARE = 0.97
"""Where bursts exceed capacity, the bar is this part of what can be attained at all."""
STATIC = ("static_shared_", "static_bulk_")

Averages = Mapping[str, float | None]


def tasks_of(cells: Iterable[Cell], *, data: Path, out: Path, quick: bool, perturb: str = "") -> list[Task]:
    """Everything that is to be run, the longest first so that no core idles at the end.

    quick   one seed, and every second static window (see `refined`)
    """
    names = [*BOUNDS, *contenders()]
    if perturb:
        names = [name for name in names if name in {CLAIRVOYANT, OURS}]
    elif quick:
        left_out = {f"static_bulk_{window}" for window in BULK_WINDOWS[::2]}
        names = [name for name in names if name not in left_out]
    return [
        Task(cell.name, name, seed, data, out, perturb)
        for name in names
        for cell in cells
        for seed in cell.seeds[: 1 if quick else None]
        if perturb not in POOL_ONLY or len(cell.profiles) > 1
    ]


def refined(cells: Iterable[Cell], found: Mapping[Task, Averages]) -> list[Task]:
    """Static windows that a quick run has left out and that the best of a cell may be among: the best one's neighbours.

    Without them the best static window in hindsight would be a coarse one, and everybody would look good beside it.
    """
    more: list[Task] = []
    for cell in cells:
        means = {task.contender: one for task, one in found.items() if task.cell == cell.name}
        any_task = next(task for task in found if task.cell == cell.name)
        best = best_static(means, ceiling(cell, cell.workload(any_task.seed)), kinds=("static_bulk_",))
        at = 0 if best is None else BULK_WINDOWS.index(int(best["policy"].removeprefix("static_bulk_")))
        near = [BULK_WINDOWS[index] for index in (at - 1, at, at + 1) if 0 <= index < len(BULK_WINDOWS)]
        names = (f"static_bulk_{window}" for window in near)
        more += [replace(any_task, contender=name) for name in names if name not in means]
    return more


def run_all(tasks: Sequence[Task], *, workers: int | None, on_done: Callable[[Task], None]) -> dict[Task, Averages]:
    """Make every run that is not there yet, over all cores; figures by task. The first that fails ends it."""
    found: dict[Task, Averages] = {}
    left: list[Task] = []
    for task in tasks:
        done = task.done
        if done is None:
            left.append(task)
        else:
            found[task] = done
            on_done(task)
    if not left:
        return found
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        pending = {pool.submit(perform, task): task for task in left}
        try:
            for future in as_completed(pending):
                found[pending[future]] = future.result()
                on_done(pending[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found


def summarise(cells: Sequence[Cell], found: Mapping[Task, Averages], *, out: Path, seconds: float) -> dict[str, Any]:
    """The document that `--json` prints."""
    table: dict[str, dict[str, Averages]] = {}
    bounds: dict[str, dict[str, Any]] = {}
    for cell in cells:
        by_name: dict[str, list[Averages]] = {}
        seeds = set()
        for task, one in found.items():
            if task.cell == cell.name:
                by_name.setdefault(task.contender, []).append(one)
                seeds.add(task.seed)
        means = {name: _mean(runs) for name, runs in by_name.items()}
        table[cell.name] = {name: one for name, one in means.items() if name not in BOUNDS}
        bounds[cell.name] = _bounds(cell, means, sorted(seeds))
    return {
        "cells": table,
        "bounds": bounds,
        "rows": str(out),
        "commit": commit(),
        "seconds": seconds,
    }


def bar(attainment_ceiling: float) -> float:
    """Attainment that a scheduler has to reach."""
    return ATTAINMENT_BAR if attainment_ceiling >= ATTAINMENT_BAR else CEILING_SHARE * attainment_ceiling


def _bounds(cell: Cell, means: Mapping[str, Averages], seeds: Sequence[int]) -> dict[str, Any]:
    works = [cell.workload(seed) for seed in seeds or cell.seeds[:1]]
    reachable = sum(ceiling(cell, work) for work in works) / len(works)
    fluid = [
        fluid_tokens_per_s(
            cell.profiles,
            [one for one in work.requests if one.class_name != BULK],
            work.backlog.lengths
            if work.backlog is not None
            else [(one.prompt_tokens, one.output_tokens) for one in work.requests if one.class_name == BULK],
            duration_s=work.duration_s,
            tpot_sla_s=cell.tpot_sla_s,
        )
        for work in works
    ]
    best = best_static(means, reachable)
    clairvoyant = means.get(CLAIRVOYANT)
    behind = (
        best is not None
        and clairvoyant is not None
        and _number(clairvoyant, "bulk_tokens_per_s") < _number(best, "bulk_tokens_per_s")
    )
    return {
        "clairvoyant": clairvoyant,
        "clairvoyant_behind": behind,
        "fluid_bulk_tokens_per_s": sum(fluid) / len(fluid),
        "best_static": best,
        "attainment_ceiling": reachable,
        "alone": means.get(ALONE),
    }


def best_static(
    means: Mapping[str, Averages], attainment_ceiling: float, *, kinds: tuple[str, ...] = STATIC
) -> dict[str, Any] | None:
    """See the module header."""
    needed = bar(attainment_ceiling)
    if OURS in means:
        needed = min(needed, _number(means[OURS], "attainment"))
    good = [
        (_number(one, "bulk_tokens_per_s"), name)
        for name, one in means.items()
        if name.startswith(kinds) and _number(one, "attainment") >= needed
    ]
    if not good:
        return None
    name = max(good)[1]
    return {"policy": name, **means[name]}


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
