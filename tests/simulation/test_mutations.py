"""Each check of the protocol is taken out once, and the simulation notices: see `mutants`, `mutation`.

A run changes with every change of the gateway's timing, so a mutant may slip through the storm that caught it before.
Then others are tried, up to FURTHER; `find_seeds` finds a new one to write down, so that the suite stays quick.
"""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, SOUGHT
from tests.simulation.mutation import Mutant, breaks, caught

FURTHER = range(40)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_gateway_without_one_of_its_checks_is_caught(mutant: Mutant) -> None:
    assert any(breaks(caught(mutant, seed)) is mutant.breaks for seed in (mutant.seed, *FURTHER))


def test_each_mutant_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in (*MUTANTS, *SOUGHT)]

    assert len(set(names)) == len(names)
