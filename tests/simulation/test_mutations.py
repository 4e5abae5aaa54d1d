"""Each check of the protocol is taken out once, and the simulation notices: see `mutants`, `mutation`.

A run changes with every change of the gateway's timing, so a mutant may slip through the storm that caught it before.
Then others are tried, up to FURTHER; `find_seeds` finds a new one to write down, so that the suite stays quick.
"""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, SOUGHT
from tests.simulation.mutation import Mutant, breaks, caught, mutated

FURTHER = range(40)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_gateway_without_one_of_its_checks_is_caught(mutant: Mutant) -> None:
    assert any(breaks(caught(mutant, seed, mutant.scene)) is mutant.breaks for seed in (mutant.seed, *FURTHER))


@pytest.mark.parametrize("mutant", [*MUTANTS, *SOUGHT], ids=str)
def test_the_text_that_a_mutant_takes_out_stands_once_where_it_says(mutant: Mutant) -> None:
    with mutated(mutant):
        pass


def test_a_mutant_whose_text_is_not_there_says_where_it_was_sought() -> None:
    gone = Mutant("gone", MUTANTS[0].where, "no such text", "", None, 0)

    with (
        pytest.raises(LookupError, match="'no such text' stands 0 times"),
        mutated(gone),
    ):
        pass


def test_each_mutant_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in (*MUTANTS, *SOUGHT)]

    assert len(set(names)) == len(names)
