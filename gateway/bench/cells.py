"""The cells of the scheduling benchmark: which traffic meets which engines, read from `cells.json`.

A cell is a definition, not a result: traces, stretches, rates, objectives and engines stand in the file and are never
bent to a policy. What a seed changes: the order of the backlog, and the draws of synthetic traffic.

In this file's terms an interrupted engine is gone at `interrupted_at_s`, and told so `notice_s` before. A
`ttft_slowdown` objective is that factor times the time to first token that the prompt would take on the idle engine.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from backends.simulated.profiles import EngineOptions, Profile, load_profile
from gateway.replay.alone import alone
from gateway.replay.host import EngineSpec
from gateway.replay.trace import Request, ids_beside, read_lengths, read_trace, segment
from gateway.replay.world import Backlog

INTERACTIVE = "interactive"
BULK = "bulk"


def shipped_data() -> Path:
    """Where cells and traces lie in an installed package."""
    return Path(str(resources.files("gateway.bench"))) / "data"


@dataclass(frozen=True, slots=True)
class Workload:
    """A cell's traffic for one seed. backlog None: the bulk is among the requests, and finite."""

    requests: tuple[Request, ...]
    backlog: Backlog | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """See the module header. `raw` is the definition as it stands in the file."""

    name: str
    raw: Mapping[str, Any]
    data: Path
    profile_override: str | None = None

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.raw["seeds"])

    @property
    def quick(self) -> bool:
        return bool(self.raw.get("quick"))

    @property
    def profiles(self) -> list[Profile]:
        if self.profile_override is not None:
            return [load_profile(self.profile_override)]
        return [load_profile(engine["profile"]) for engine in self.raw["engines"]]

    @property
    def files(self) -> list[Path]:
        """The traces that it is made of, and the names of their beginnings where there are any."""
        names = [self.raw[INTERACTIVE].get("trace"), self.raw[BULK].get("lengths")]
        traces = [self.data / name for name in names if name is not None]
        return [*traces, *(beside for beside in map(ids_beside, traces) if beside.is_file())]

    @property
    def tpot_sla_s(self) -> float:
        """Mean gap between tokens that answers may have; endless where the cell sets none."""
        return float(self.raw["classes"][INTERACTIVE].get("tpot_sla_s", math.inf))

    @property
    def objective_s(self) -> Callable[[Request], float]:
        """Seconds that an interactive request's first token may take."""
        of_class = self.raw["classes"][INTERACTIVE]
        if "ttft_slowdown" in of_class:
            slowdown, alone_s = float(of_class["ttft_slowdown"]), alone(self.profiles)
            return lambda request: slowdown * alone_s(request.prompt_tokens)
        sla_s, per_1k_tokens_s = float(of_class["ttft_sla_s"]), float(self.raw.get("ttft_sla_per_1k_tokens_s", 0.0))
        return lambda request: sla_s + per_1k_tokens_s * request.prompt_tokens / 1000

    def engines_of_pool(self, options: EngineOptions | None = None) -> tuple[EngineSpec, ...]:
        """The pool. Names are e0, e1, ... in the file's order."""
        specs = []
        for number, (engine, profile) in enumerate(zip(self.raw["engines"], self.profiles, strict=True)):
            spec = EngineSpec(f"e{number}", profile, options or EngineOptions())
            if engine.get("spot"):
                spec = replace(
                    spec, interrupted_at_s=float(engine["interrupted_at_s"]), notice_s=float(engine["notice_s"])
                )
            specs.append(spec)
        return tuple(specs)

    def workload(self, seed: int) -> Workload:
        """The traffic. Deterministic for a seed."""
        rng = random.Random(f"{self.name} {seed}")
        interactive, bulk = self.raw[INTERACTIVE], self.raw[BULK]
        if "synthetic" in interactive:
            requests, duration_s = _bursts(interactive["synthetic"], rng)
            items = _jobs(bulk["synthetic"], rng)
            merged = sorted((*requests, *items), key=lambda one: one.arrival_s)
            return Workload(tuple(merged), None, duration_s)
        duration_s = float(interactive["duration_s"])
        requests = segment(
            _trace(self.data / interactive["trace"]),
            rate_scale=float(interactive["rate_scale"]),
            from_s=float(interactive["from_s"]),
            duration_s=duration_s,
        )
        cached = bool(self.raw.get("prefix_cache"))
        requests = [
            replace(one, class_name=INTERACTIVE, cached_prompt_tokens=one.cached_prompt_tokens if cached else 0)
            for one in requests
        ]
        lengths = list(_lengths(self.data / bulk["lengths"]))
        rng.shuffle(lengths)
        tenants = tuple(f"bulk-{number}" for number in range(int(self.raw.get("bulk_tenants", 1))))
        return Workload(tuple(requests), Backlog(lengths, BULK, tenants), duration_s)

    @property
    def _objective(self) -> str:
        of_class = self.raw["classes"][INTERACTIVE]
        if "ttft_slowdown" in of_class:
            fields = {"ttft_slowdown": of_class["ttft_slowdown"]}
        else:
            per_1k_tokens_s = self.raw.get("ttft_sla_per_1k_tokens_s", 0.0)
            fields = {"ttft_sla_s": of_class["ttft_sla_s"], "ttft_sla_per_1k_tokens_s": per_1k_tokens_s}
        if self.tpot_sla_s < math.inf:
            fields["tpot_sla_s"] = self.tpot_sla_s
        return "\n    ".join(f"{name}: {float(value)!r}" for name, value in fields.items())

    def policy_text(self, sizing: str) -> str:
        """The policy document that every contender runs under: the cell's objectives, and bulk whenever there is room.

        Bulk has no maximum age and no minimum share, since a backlog that never ends is always overdue, and no queue is
        ever full. Whoever can tell that a request cannot be in time may refuse it, which is a miss like a late token; those
        that wait as long as a class allows by default are given up.
        """
        return f"""
version: 1
classes:
  {INTERACTIVE}:
    {self._objective}
    max_queue: 1000000
    on_infeasible: shed
  {BULK}: {{max_age_s: null, min_share: 0, max_queue: 1000000, max_wait_s: 100000}}
sizing: {{policy: {sizing}}}
"""


def load_cells(data: Path) -> list[Cell]:
    """All cells, in the file's order; one that runs on further engines too is a cell for each. Raises OSError."""
    document = json.loads((data / "cells.json").read_text(encoding="utf-8"))
    cells: list[Cell] = []
    for raw in document["cells"]:
        cells.append(Cell(raw["cell"], raw, data))
        cells += [Cell(f"{raw['cell']}-{profile}", raw, data, profile) for profile in raw.get("also_on", ())]
    return cells


@lru_cache(maxsize=8)
def _trace(path: Path) -> list[Request]:
    return read_trace(path)


@lru_cache(maxsize=8)
def _lengths(path: Path) -> tuple[tuple[int, int], ...]:
    return tuple(read_lengths(path))


def _bursts(spec: Mapping[str, Any], rng: random.Random) -> tuple[list[Request], float]:
    """Poisson arrivals whose rate changes in turn."""
    requests: list[Request] = []
    begun_s = 0.0
    for _ in range(int(spec["repeat"])):
        for burst in spec["bursts"]:
            at_s = begun_s + rng.expovariate(burst["rps"])
            begun_s += float(burst["duration_s"])
            while at_s < begun_s:
                requests.append(
                    Request(at_s, int(spec["prompt_tokens"]), int(spec["output_tokens"]), class_name=INTERACTIVE)
                )
                at_s += rng.expovariate(burst["rps"])
    return requests, begun_s


def _jobs(spec: Mapping[str, Any], rng: random.Random) -> list[Request]:
    """All items of all jobs at 0 s, one tenant a job, with lognormal answers of the mean and deviation given."""
    shape = spec["output_tokens"]["lognormal"]
    variance = math.log(1 + (shape["sd"] / shape["mean"]) ** 2)
    mu = math.log(shape["mean"]) - variance / 2
    return [
        Request(
            0.0,
            int(spec["prompt_tokens"]),
            max(1, round(rng.lognormvariate(mu, math.sqrt(variance)))),
            f"job-{number % int(spec['jobs'])}",
            BULK,
        )
        for number in range(int(spec["items"]))
    ]
