"""Each check of the protocol, as what the gateway does without it: what the simulation must notice.

What counts as one: that a word is refused for whose it is or how old it is (epochs, sessions, owners, attempts, numbers of
grants), that time is judged (leadership, sessions, grants, credit and shares end, clocks are known to be wrong), that what
was told or asked twice acts once, that what has ended is remembered, and that whatever may run is counted, whether or not
it was heard of. Not here is what only costs time or room when it is missing, and how one process's own calls take turns.

`MUTANTS` are caught, each by the run that stands with it: a seed of a storm, or a scene that aims at it (`scenes`). Where two
checks stand behind each other, neither alone is missed: `PAIRS` are caught when both are taken out. For `COVERED` a
sentence says what stands behind each.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.invariants import Invariant
from tests.simulation.mutants_covered import COVERED
from tests.simulation.mutants_leader import LEADER_MUTANTS
from tests.simulation.mutants_process import PROCESS_MUTANTS
from tests.simulation.mutants_store import STORE_MUTANTS
from tests.simulation.mutation import Mutant

MUTANTS = (*STORE_MUTANTS, *PROCESS_MUTANTS, *LEADER_MUTANTS)
ALL = (*MUTANTS, *(one.mutant for one in COVERED))
_NAMED = {mutant.name: mutant for mutant in ALL}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two mutants, each of them among COVERED, and the run that shows what they do together."""

    mutants: tuple[Mutant, Mutant]
    breaks: Invariant
    seed: int
    scene: str

    def __str__(self) -> str:
        return " and ".join(mutant.name for mutant in self.mutants)


PAIRS = (
    Pair(
        (
            _NAMED["an owner takes grants of leaders that were replaced"],
            _NAMED["a leader takes its own grants that it does not count"],
        ),
        Invariant.INSIDE_WINDOW,
        0,
        "untaken_grants",
    ),
)
