"""What the scheduler has to reach, cell by cell, and whether it did: told passing or not, and never loosened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.bench.baselines import OURS, PRIORITY_WINDOWS, UNPROTECTED
from gateway.bench.bounds import bar

STATIC_RATIO = 1.03
STATIC_RATIO_TIGHT = 1.25
PRIORITY_RATIO_TIGHT = 1.6
CLAIRVOYANT_RATIO = 0.95
FLUID_RATIO = 0.85
PREEMPTION_SHARE = 0.01
BURSTY_GOODPUT_RATIO = 1.5
JAIN = 0.95
ENERGY_RATIO = 1.03
DECISION_US = 1000.0
OSCILLATION = 0.15
JOBS_TTFT_RATIO = 1.3
JOBS_BULK_RATIO = 0.9
PERTURBED_LOSS = 0.01

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure against what it has to be: at least `needed`, or at most where `at_most`. value None: no such figure."""

    cell: str
    name: str
    value: float | None
    needed: float
    at_most: bool = False

    @property
    def held(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.needed if self.at_most else self.value >= self.needed


def bars_of(document: Mapping[str, Any]) -> list[Bar]:
    """All bars of all cells of a result of the scheduling benchmark, in its order; none against a bound of nothing."""
    return [
        one
        for cell in document["cells"]
        for one in _of_cell(cell, document["cells"][cell], document["bounds"][cell])
        if one.at_most or one.value != math.inf
    ]


def perturbed_held(attainment: float, clairvoyant: float) -> bool:
    """Whether a perturbed cell lost no more than PERTURBED_LOSS of attainment against the clairvoyant in the same world."""
    return round(clairvoyant - attainment, 9) <= PERTURBED_LOSS


def _of_cell(cell: str, table: Mapping[str, Row], bounds: Row) -> Iterator[Bar]:
    ours = table.get(OURS)
    if ours is None or bounds["attainment_ceiling"] is None:
        return
    jobs, tight = cell.startswith("llm-d"), cell.startswith("kv-tight")
    needed = bar(bounds["attainment_ceiling"])
    yield Bar(cell, "attainment", ours["attainment"], needed)
    bulk = ours["bulk_tokens_per_s"]
    if jobs:
        yield from _of_jobs(cell, ours, table.get(UNPROTECTED), bounds["first_come"])
    else:
        if bounds["best_static"] is not None:
            ratio = STATIC_RATIO_TIGHT if tight else STATIC_RATIO
            yield Bar(cell, "bulk ÷ best static", _ratio(bulk, bounds["best_static"]["bulk_tokens_per_s"]), ratio)
        knowing = bounds["clairvoyant"] or {}
        behind = " (behind: no bound)" if bounds["clairvoyant_behind"] else ""
        yield Bar(
            cell, f"bulk ÷ clairvoyant{behind}", _ratio(bulk, knowing.get("bulk_tokens_per_s")), CLAIRVOYANT_RATIO
        )
        if bounds["fluid_bulk_tokens_per_s"] != 0:
            yield Bar(cell, "bulk ÷ fluid bound", _ratio(bulk, bounds["fluid_bulk_tokens_per_s"]), FLUID_RATIO)
        if ours["joules_per_token"] is not None:
            against = knowing.get("joules_per_token")
            yield Bar(
                cell, "J/token ÷ clairvoyant", _ratio(ours["joules_per_token"], against), ENERGY_RATIO, at_most=True
            )
    ordered = [table[name] for window in PRIORITY_WINDOWS if (name := f"engine_priority_{window}") in table]
    # As of static windows: who misses the bar is not spared those who miss it by less.
    reached = min(needed, ours["attainment"])
    served = [one["bulk_tokens_per_s"] for one in ordered if one["attainment"] >= reached]
    if tight and served:
        yield Bar(cell, "bulk ÷ engine priority", _ratio(bulk, max(served)), PRIORITY_RATIO_TIGHT)
    if UNPROTECTED in table and table[UNPROTECTED]["preemptions"]:
        share = _ratio(ours["preemptions"], table[UNPROTECTED]["preemptions"])
        yield Bar(cell, "preemptions ÷ pass-through", share, PREEMPTION_SHARE, at_most=True)
    if cell == "bursty":
        # First come first served without bulk: beside 512 works of it hardly anybody is in time, and all are many times better.
        rivals = (bounds["first_come"], table.get("aimd"))
        best = None if None in rivals else max(one["goodput_rps"] for one in rivals if one is not None)
        yield Bar(cell, "goodput ÷ FCFS or AIMD", _ratio(ours["goodput_rps"], best), BURSTY_GOODPUT_RATIO)
    if ours["jain"] is not None:
        yield Bar(cell, "Jain", ours["jain"], JAIN)
    if ours["window_oscillation"] is not None:
        yield Bar(cell, "window oscillation", ours["window_oscillation"], OSCILLATION, at_most=True)
    yield Bar(cell, "decision p99 µs", ours["decision_p99_us"], DECISION_US, at_most=True)


def _of_jobs(cell: str, ours: Row, unprotected: Row | None, first_come: Row | None) -> Iterator[Bar]:
    """Of three finite jobs beside bursts."""
    ratio = None if first_come is None else _ratio(ours["ttft_p95_s"], first_come["ttft_p95_s"])
    yield Bar(cell, "TTFT p95 ÷ alone", ratio, JOBS_TTFT_RATIO, at_most=True)
    done = None if unprotected is None else _ratio(ours["bulk_completed"], unprotected["bulk_completed"])
    yield Bar(cell, "bulk items done ÷ unprotected", done, JOBS_BULK_RATIO)
    yield Bar(cell, "refused or failed", ours["shed"] + ours["failed"], 0.0, at_most=True)


def _ratio(value: float | None, against: float | None) -> float | None:
    if value is None or against is None or against == math.inf:  # nothing is small beside what never came
        return None
    if not against:
        return math.inf if value else None
    return value / against
