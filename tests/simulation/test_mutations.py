"""Each check of the protocol is taken out once, and the simulation notices: see `mutants`, `mutation`.

A run changes with every change of the gateway's timing, so a mutant may slip through the seed that caught it before.
Then others are tried, up to FURTHER; `find_seeds` finds a new one to write down, so that the suite stays quick.
"""

from __future__ import annotations

import pytest

from tests.simulation.faults import Kind
from tests.simulation.mutants import ALL, MUTANTS, PAIRS, Pair
from tests.simulation.mutants_covered import COVERED, Covered
from tests.simulation.mutation import Mutant, breaks, caught, mutated
from tests.simulation.scenes import SCENES
from tests.simulation.test_world import SHOWED

FURTHER = range(40)


@pytest.mark.many  # 35 s of CPU
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_gateway_without_one_of_its_checks_is_caught(mutant: Mutant) -> None:
    seeds = (mutant.seed, *FURTHER)

    assert any(breaks(caught([mutant], seed, mutant.scene)) is mutant.breaks for seed in seeds)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_gateway_without_both_of_two_checks_is_caught(pair: Pair) -> None:
    seeds = (pair.seed, *FURTHER)

    assert any(breaks(caught(pair.mutants, seed, pair.scene)) is pair.breaks for seed in seeds)


@pytest.mark.many
@pytest.mark.parametrize("covered", COVERED, ids=str)
def test_a_check_that_another_stands_behind_can_be_missed(covered: Covered) -> None:
    assert caught([covered.mutant], covered.mutant.seed, covered.mutant.scene) is None


@pytest.mark.parametrize("mutant", ALL, ids=str)
def test_the_text_that_a_mutant_takes_out_stands_once_where_it_says(mutant: Mutant) -> None:
    with mutated(mutant):
        pass


def test_a_mutant_whose_text_is_not_there_says_so() -> None:
    gone = Mutant("gone", MUTANTS[0].where, "no such text", "", None, 0)

    with pytest.raises(LookupError, match="'no such text' stands 0 times"), mutated(gone):
        pass


def test_each_scene_is_there_for_a_mutant_or_for_a_fault_that_it_showed() -> None:
    named = {mutant.scene for mutant in ALL} | {pair.scene for pair in PAIRS} | {kind for kind, _ in SHOWED.values()}

    assert named - set(Kind) == set(SCENES)


def test_each_mutant_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in ALL]

    assert len(set(names)) == len(names)
