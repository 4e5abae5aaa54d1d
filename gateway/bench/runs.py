"""One run of the scheduling benchmark: a cell, a contender, a seed. Results lie in a folder, so that a bench can go on.

Each run leaves `CELL.POLICY.SEED.csv` (a row a request) and `CELL.POLICY.SEED.json` (figures, and the fingerprint of the
code and cell that made them). A run whose files are there under the same fingerprint is not made again.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from backends.simulated.continuous import SchedulingPolicy
from backends.simulated.profiles import EngineOptions
from gateway.bench.baselines import OURS, UNPROTECTED, Contender, contender
from gateway.bench.bounds import bar, ceiling
from gateway.bench.cells import BULK, Cell, load_cells
from gateway.bench.clairvoyant import BURST_PARTS, Clairvoyant
from gateway.bench.fingerprint import fingerprint
from gateway.bench.foresight import foresee
from gateway.bench.perturbations import PERTURBATIONS, Perturbed
from gateway.logs import Logs
from gateway.replay.alone import alone
from gateway.replay.figures import Figures, figures
from gateway.replay.rows import Row, write_rows
from gateway.replay.world import Plan, Played, replay
from policies.document import parse

CLAIRVOYANT = "clairvoyant"
ALONE = "interactive_alone"
"""Without bulk, and those refused that would be late: what of the ceiling can be had."""
FIRST_COME = "interactive_first_come"
"""Without bulk, and everybody served as he comes: what an engine without any gateway does for its users."""
FORESEEN = (CLAIRVOYANT, ALONE)
BOUNDS = (*FORESEEN, FIRST_COME)


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be run. `perturb` is a name of `PERTURBATIONS`, "" for none."""

    cell: str
    contender: str
    seed: int
    data: Path
    out: Path
    perturb: str = ""

    @property
    def stem(self) -> str:
        cell = f"{self.cell}+{self.perturb}" if self.perturb else self.cell
        return f"{cell}.{self.contender}.{self.seed}"

    @property
    def fingerprint(self) -> str:
        """Of everything that its figures depend on."""
        name = self.contender
        return fingerprint(cell_of(self), ours=name == OURS, bound=name in FORESEEN)

    @property
    def done(self) -> dict[str, float | None] | None:
        """The figures, if this run has been made by this code already."""
        try:
            document = json.loads((self.out / f"{self.stem}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        found: dict[str, float | None] | None = document.get("figures")
        current = document.get("fingerprint") == self.fingerprint and (self.out / f"{self.stem}.csv").exists()
        return found if current else None

    @property
    def twin(self) -> Task | None:
        """The run that comes to the same: before one engine all balancers are alike."""
        alike = self.contender == "pass_least_outstanding" and len(cell_of(self).profiles) == 1
        return replace(self, contender=UNPROTECTED) if alike else None


def cell_of(task: Task) -> Cell:
    """Its cell's definition."""
    return next(one for one in _cells(task.data) if one.name == task.cell)


def perform(task: Task) -> dict[str, float | None]:
    """Make a run and leave its files. For a process of a pool: everything is found again by name."""
    with _collecting(task.contender == OURS):
        played, found = play(cell_of(task), task.contender, task.seed, task.perturb)
    task.out.mkdir(parents=True, exist_ok=True)
    write_rows(task.out / f"{task.stem}.csv", played.rows)
    _note(task, found.plain())
    return found.plain()


@contextmanager
def _collecting(during: bool) -> Iterator[None]:
    """Whether Python looks for reference cycles during a run or after it: that is a seventh of its time. Our decisions are
    timed with it, as in `headrace serve`; those of baselines, for which there is no bar, without."""
    if not during:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def copy(task: Task, made: Task) -> dict[str, float | None]:
    """Take over the rows and figures of a run that comes to the same."""
    figures_made = json.loads((made.out / f"{made.stem}.json").read_text(encoding="utf-8"))["figures"]
    shutil.copyfile(made.out / f"{made.stem}.csv", task.out / f"{task.stem}.csv")
    _note(task, figures_made)
    found: dict[str, float | None] = figures_made
    return found


def _note(task: Task, found: Mapping[str, float | None]) -> None:
    """Whole or not at all: a run that was stopped while it wrote has not been made."""
    path = task.out / f"{task.stem}.json"
    document = {"fingerprint": task.fingerprint, "figures": found}
    path.with_suffix(".new").write_text(json.dumps(document, indent=1), encoding="utf-8")
    path.with_suffix(".new").replace(path)


@lru_cache(maxsize=4)
def _cells(data: Path) -> list[Cell]:
    return load_cells(data)


def play(cell: Cell, name: str, seed: int, perturb: str = "") -> tuple[Played, Figures]:
    """One run in this process; of the clairvoyant, the boldest that reaches the bar, else the one that comes nearest."""
    if name != CLAIRVOYANT:
        return _played(cell, name, seed, perturb, BURST_PARTS[0])
    urgent = [one for one in cell.workload(seed).requests if one.class_name != BULK]
    needed = bar(ceiling(urgent, cell.profiles, cell.objective_s))
    found: list[tuple[Played, Figures]] = []
    for part in BURST_PARTS:
        found.append(_played(cell, name, seed, perturb, part))
        if (found[-1][1].attainment or 0.0) >= needed:
            return found[-1]
    return max(found, key=lambda one: one[1].attainment or 0.0)


def _played(cell: Cell, name: str, seed: int, perturb: str, burst_part: float) -> tuple[Played, Figures]:
    plan, lost, duration_s = plan_of(cell, name, seed, perturb, burst_part)
    logs = Logs(sys.stderr.buffer)
    try:
        played = replay(plan, logs.log)
    finally:
        logs.close()
    played.rows.extend(lost)
    return played, figures(played, plan.policy, duration_s=duration_s, alone=alone(cell.profiles))


def plan_of(
    cell: Cell, name: str, seed: int, perturb: str = "", burst_part: float = BURST_PARTS[0]
) -> tuple[Plan, list[Row], float]:
    """The replay of a run, the rows of what was refused before it, and its length in seconds."""
    one = Contender(CLAIRVOYANT) if name in FORESEEN else contender(UNPROTECTED if name == FIRST_COME else name)
    without_bulk = name in {ALONE, FIRST_COME}
    options = EngineOptions(scheduling_policy=one.engine_order)
    work = cell.workload(seed)
    plan = Plan(
        engines=cell.engines_of_pool(options),
        policy=parse(cell.policy_text(one.document), "bench"),
        requests=work.requests,
        backlog=None if without_bulk else work.backlog,
        duration_s=work.duration_s,
        seed=seed,
        sizing=one.sizing,
        front=None if one.front is None else one.front(),
        engine_priority=one.engine_order is SchedulingPolicy.PRIORITY,
    )
    if perturb:
        plan = PERTURBATIONS[perturb](Perturbed(plan, cell).cut()).plan
    lost: list[Row] = []
    if without_bulk:
        requests = tuple(one for one in plan.requests if one.class_name != BULK)
        plan = replace(plan, requests=requests)
    if name in FORESEEN:
        plan = replace(plan, estimate_error=0.0)  # who knows everything need not estimate
        plan, lost = _foreseen(cell, plan, burst_part, for_bulk=name != ALONE and not perturb)
    return plan, lost, plan.duration_s or work.duration_s


def _foreseen(cell: Cell, plan: Plan, burst_part: float, *, for_bulk: bool) -> tuple[Plan, list[Row]]:
    """Planned by one who knows everything: what would be late is refused before the run."""
    urgent = [one for one in plan.requests if one.class_name != BULK]
    foresight = foresee(plan.engines, urgent, plan.foreign, cell.objective_s, for_bulk=for_bulk)
    rows = [
        Row(one.arrival_s, one.class_name, one.tenant, one.prompt_tokens, 0, "", None, None, one.arrival_s, "shed")
        for one in plan.requests
        if id(one) in foresight.hopeless
    ]
    kept = tuple(one for one in plan.requests if id(one) not in foresight.hopeless)
    privileged = partial(Clairvoyant, foresight=foresight, tpot_sla_s=cell.tpot_sla_s, burst_part=burst_part)
    return replace(plan, requests=kept, privileged=privileged), rows
