"""The real gateway in seeded runs: faults as drawn, invariants after every event, everything served and tidied at the end.

`HEADRACE_SEEDS` says how many seeds of each kind (0, 1, 2 ...; of a scene OF_A_SCENE_MOST at most), `HEADRACE_SEED` repeats one, `HEADRACE_KIND` picks a
kind or a scene: what `make simulate` sets.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.simulation.faults import FaultKind, Kind, Plan, draw_plan
from tests.simulation.scenes import SCENES
from tests.simulation.world import simulate

ROOT = Path(__file__).parents[2]
ONE_SEED = os.environ.get("HEADRACE_SEED")
ONE_KIND = os.environ.get("HEADRACE_KIND")
ASKED = os.environ.get("HEADRACE_SEEDS")
KINDS: list[str] = [ONE_KIND] if ONE_KIND else [*Kind, *SCENES]
IN_THE_SUITE: Mapping[str, int] = {Kind.SINGLE: 40, Kind.MANY: 30, Kind.STORM: 30}
OF_A_SCENE = 1
OF_A_SCENE_MOST = 20
"""A scene is written out, and a seed changes little of it."""
SHOWED: Mapping[str, tuple[str, int]] = {
    "a claim in doubt was taken back while its work ran": (Kind.STORM, 12),
    "a stopped gateway reads its policy late, and went by the old window": (Kind.SINGLE, 13),
    "a late call made the leadership record anew after a flush": (Kind.STORM, 1),
    "two late calls of one candidate made a record whose mark was over when it heard of it": ("own_late_leads", 0),
    "credit that one process could still use was given to another": ("in_step", 1),
    "a floor took the only place of an engine": ("one_place", 0),
    "a work was written again while a full queue refused it, and stayed": (Kind.MANY, 12),
    "a work of a stopped gateway that its engine had ended counted as running there": (Kind.STORM, 29),
    "a successor was to keep places for a process that a flush had taken before its time": (Kind.MANY, 166),
    "the token that a gateway asks of a stuck engine was taken for a work that it had forgotten": (Kind.SINGLE, 49),
    "a leader gave the place of a work of its own away, and kept it as its share": (Kind.MANY, 382),
    "a claim of another's work counted in the share of the one that had claimed it": (Kind.MANY, 471),
    "a leader had a floor under a work of its own that it had told of and that had ended": (Kind.STORM, 167),
    "a process that was back counted as the lost one that it had been in an earlier reign": (Kind.STORM, 134),
    "shares outlived the windows that they were given under": (Kind.MANY, 411),
    "a claim of another's work was told as an attempt of the one that had claimed it": ("claims_without_leading", 0),
    "a claim that had been made and was refused then took its running work out of the ledger": (Kind.STORM, 175),
    "a work that a late call wrote for an earlier session of its process was forgotten with that": (Kind.STORM, 833),
    "a policy that was edited while a gateway started was read only once it decided": (Kind.MANY, 652),
    "floors that moved filled an engine with places that nobody used": (Kind.MANY, 707),
}
"""Seeds that showed a fault once: they stay in the suite, whatever else it runs."""


def seeds(kind: str) -> list[int]:
    if ONE_SEED:
        return [int(ONE_SEED)]
    if ASKED:
        most = int(ASKED)
        return list(range(min(most, OF_A_SCENE_MOST) if kind in SCENES and not ONE_KIND else most))
    return sorted({*range(IN_THE_SUITE.get(kind, OF_A_SCENE)), *(seed for one, seed in SHOWED.values() if one == kind)})


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in KINDS for seed in seeds(kind)])
def test_the_invariants_hold_under_the_faults_of_a_seed(kind: str, seed: int, tmp_path: Path) -> None:
    report = simulate(seed, tmp_path, kind)

    assert report.looks > 0
    assert sum(report.results.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", Kind)
def test_a_run_is_the_same_in_every_process(kind: Kind, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from tests.simulation.world import simulate\n"
        "print(simulate(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]).digest)\n"
    )
    seed = seeds(kind)[0]

    digests = {
        subprocess.run(
            [sys.executable, "-c", script, str(seed), str(tmp_path), kind],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("0", "31337")
    }

    assert digests == {simulate(seed, tmp_path, kind).digest}


def plans(count: int) -> list[Plan]:
    return [draw_plan(random.Random(seed), kind) for kind in Kind for seed in range(count)]


def test_every_kind_of_fault_is_drawn_by_some_seeds_and_left_out_by_others() -> None:
    drawn = [{fault.kind for fault in plan.faults} for plan in plans(100)]

    for kind in FaultKind:
        assert 0 < sum(kind in kinds for kinds in drawn) < len(drawn), kind


def test_many_gateways_are_asked_in_turn_by_affinity_and_by_one_side() -> None:
    asked = [
        Counter(client.gateway for client in draw_plan(random.Random(seed), Kind.MANY).clients) for seed in range(50)
    ]
    shares = [max(by_gateway.values()) / by_gateway.total() for by_gateway in asked]

    assert min(shares) < 0.3
    assert max(shares) > 0.8


def test_all_faults_end_before_the_safety_phase_does() -> None:
    for plan in plans(100):
        assert all(fault.at_s >= 0 and fault.at_s + fault.for_s < plan.duration_s for fault in plan.faults)


def test_no_two_faults_act_on_one_target_at_once() -> None:
    for plan in plans(100):
        for number, fault in enumerate(plan.faults):
            assert not any(fault.overlaps(other) for other in plan.faults[number + 1 :])
