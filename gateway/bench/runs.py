"""One run of the scheduling benchmark: a cell, a contender, a seed. Results lie in a folder, so that a bench can go on.

Each run leaves `CELL.POLICY.SEED.csv` (a row a request) and `CELL.POLICY.SEED.json` (figures, and the fingerprint of the
code and cell that made them). A run whose files are there under the same fingerprint is not made again.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from backends.simulated.continuous import SchedulingPolicy
from backends.simulated.profiles import EngineOptions
from gateway.bench.baselines import Contender, Windows, contenders
from gateway.bench.bounds import given_up
from gateway.bench.cells import BULK, Cell, Workload, load_cells
from gateway.bench.clairvoyant import Clairvoyant
from gateway.bench.perturbations import PERTURBATIONS, Perturbed
from gateway.logs import Logs
from gateway.replay.figures import Figures, figures
from gateway.replay.rows import Row, write_rows
from gateway.replay.world import Plan, Played, replay
from policies.document import parse

CLAIRVOYANT = "clairvoyant"
ALONE = "interactive_alone"
BOUNDS = (CLAIRVOYANT, ALONE)
BESIDE_BULK = 1.2
"""What bulk's decoding does to the speed of prompts, as the clairvoyant allows for when it refuses what will be late."""
PACKAGES = ("gateway", "backends", "policies")


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
    def done(self) -> dict[str, float | None] | None:
        """The figures, if this run has been made by this code already."""
        try:
            document = json.loads((self.out / f"{self.stem}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        found: dict[str, float | None] | None = document.get("figures")
        current = document.get("fingerprint") == fingerprint(self.data) and (self.out / f"{self.stem}.csv").exists()
        return found if current else None


def perform(task: Task) -> dict[str, float | None]:
    """Make a run and leave its files. For a process of a pool: everything is found again by name."""
    cell = next(one for one in load_cells(task.data) if one.name == task.cell)
    played, found = play(cell, task.contender, task.seed, task.perturb)
    task.out.mkdir(parents=True, exist_ok=True)
    write_rows(task.out / f"{task.stem}.csv", played.rows)
    document = {"fingerprint": fingerprint(task.data), "figures": found.plain()}
    (task.out / f"{task.stem}.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return found.plain()


def play(cell: Cell, name: str, seed: int, perturb: str = "") -> tuple[Played, Figures]:
    """One run in this process."""
    plan, lost, duration_s = plan_of(cell, name, seed, perturb)
    logs = Logs(sys.stderr.buffer)
    try:
        played = replay(plan, logs.log)
    finally:
        logs.close()
    played.rows.extend(lost)
    return played, figures(played, plan.policy, duration_s=duration_s)


def plan_of(cell: Cell, name: str, seed: int, perturb: str = "") -> tuple[Plan, list[Row], float]:
    """The replay of a run, the rows of what was refused before it, and its length in seconds."""
    contender = Contender(CLAIRVOYANT) if name in BOUNDS else contenders()[name]
    options = EngineOptions(scheduling_policy=contender.engine_order)
    work = cell.workload(seed)
    plan = Plan(
        engines=cell.engines_of_pool(options),
        policy=parse(cell.policy_text(contender.document), "bench"),
        requests=work.requests,
        backlog=None if name == ALONE else work.backlog,
        duration_s=work.duration_s,
        seed=seed,
        sizing=contender.sizing,
        front=None if contender.front is None else contender.front(),
        engine_priority=contender.engine_order is SchedulingPolicy.PRIORITY,
    )
    if perturb:
        perturbed = PERTURBATIONS[perturb](Perturbed(plan, cell))
        plan = perturbed.plan
    lost: list[Row] = []
    if name == CLAIRVOYANT:
        plan, lost = _foreseen(cell, plan)
    elif name == ALONE:
        requests = tuple(one for one in plan.requests if one.class_name != BULK)
        plan = replace(plan, requests=requests, sizing=lambda _policy: Windows(total=None, bulk=1))
    return plan, lost, work.duration_s


def ceiling(cell: Cell, work: Workload) -> float:
    """Part of the interactive requests that can be on time when they have the engines for themselves."""
    interactive = [one for one in work.requests if one.class_name != BULK]
    lost = given_up(
        interactive,
        cell.profiles,
        ttft_sla_s=cell.ttft_sla_s,
        per_1k_tokens_s=cell.ttft_sla_per_1k_tokens_s,
    )
    return 1 - len(lost) / len(interactive)


def _foreseen(cell: Cell, plan: Plan) -> tuple[Plan, list[Row]]:
    """The clairvoyant's plan: what would be late is refused before the run."""
    profiles = [engine.profile for engine in plan.engines]
    interactive = [one for one in plan.requests if one.class_name != BULK]
    lost = given_up(
        interactive,
        profiles,
        ttft_sla_s=cell.ttft_sla_s,
        per_1k_tokens_s=cell.ttft_sla_per_1k_tokens_s,
        slowdown=BESIDE_BULK,
    )
    hopeless = {id(interactive[index]) for index in lost}
    rows = [
        Row(one.arrival_s, one.class_name, one.tenant, one.prompt_tokens, 0, "", None, None, one.arrival_s, "shed")
        for one in plan.requests
        if id(one) in hopeless
    ]
    kept = tuple(one for one in plan.requests if id(one) not in hopeless)
    stretch = BESIDE_BULK if lost else math.inf
    privileged = partial(Clairvoyant, tpot_sla_s=cell.tpot_sla_s, stretch=stretch)
    return replace(plan, requests=kept, privileged=privileged), rows


@lru_cache(maxsize=4)
def fingerprint(data: Path) -> str:
    """Of everything that a run depends on: our code and profiles, and the cells."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    files: Sequence[Path] = sorted(
        path
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.suffix in {".py", ".json", ".yaml"} and "data" not in path.parts
    )
    for path in (*files, data / "cells.json"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
