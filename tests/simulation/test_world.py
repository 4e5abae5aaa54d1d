"""The real gateway in seeded runs: faults as drawn, invariants after every event, everything served and tidied at the end.

`HEADRACE_SEEDS` says how many seeds (0, 1, 2 ...), `HEADRACE_SEED` repeats one: what `make simulate` sets.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.faults import FaultKind, Plan, draw_plan
from tests.simulation.world import simulate

ROOT = Path(__file__).parents[2]
ONE_SEED = os.environ.get("HEADRACE_SEED")
SEEDS = [int(ONE_SEED)] if ONE_SEED else range(int(os.environ.get("HEADRACE_SEEDS") or 8))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_invariants_hold_under_the_faults_of_a_seed(seed: int, tmp_path: Path) -> None:
    report = simulate(seed, tmp_path)

    assert report.looks > 0
    assert sum(report.results.values()) > 0


@pytest.mark.slow
def test_a_run_of_the_gateway_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.simulation.world import simulate\n"
        "print(simulate(int(sys.argv[1]), Path(sys.argv[2])).digest)\n"
    )
    seed = next(iter(SEEDS))

    digests = {
        subprocess.run(
            [sys.executable, "-c", script, str(seed), str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("0", "31337")
    }

    assert digests == {simulate(seed, tmp_path).digest}


def plans(count: int) -> list[Plan]:
    return [draw_plan(random.Random(seed)) for seed in range(count)]


def test_every_kind_of_fault_is_drawn_by_some_seeds_and_left_out_by_others() -> None:
    drawn = [{fault.kind for fault in plan.faults} for plan in plans(100)]

    for kind in FaultKind:
        assert 0 < sum(kind in kinds for kinds in drawn) < 100, kind


def test_all_faults_end_before_the_safety_phase_does() -> None:
    for plan in plans(100):
        assert all(fault.at_s >= 0 and fault.at_s + fault.for_s < plan.duration_s for fault in plan.faults)


def test_no_two_faults_act_on_one_target_at_once() -> None:
    for plan in plans(100):
        for number, fault in enumerate(plan.faults):
            assert not any(fault.overlaps(other) for other in plan.faults[number + 1 :])
