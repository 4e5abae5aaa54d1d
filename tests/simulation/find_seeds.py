"""Look for runs that catch a mutant: `python -m tests.simulation.find_seeds name ... [--upto 60] [--late] [--with FAULT]`.

Names are beginnings of mutants' names. Prints for each the seeds that catch it with the seconds of processor time they
took and what they saw; the cheapest goes into `mutants`. The runs are of the mutant's own kind, or of `--kind`, a scene's name
for one. Seeds of storms can be narrowed to what a mutant needs: calls that come late, kinds of fault.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable

from tests.simulation.faults import LATE, FaultKind, Kind, draw_plan
from tests.simulation.invariants import Invariant
from tests.simulation.mutants import ALL
from tests.simulation.mutation import Mutant, breaks, caught


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--upto", type=int, default=60)
    parser.add_argument("--want", type=int, default=1)
    parser.add_argument("--kind")
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--with", dest="kinds", type=FaultKind, action="append", default=[])
    arguments = parser.parse_args()
    seeds = [
        seed
        for seed in range(arguments.first, arguments.upto)
        if _fits(seed, late=arguments.late, kinds=arguments.kinds)
    ]
    names = tuple(arguments.names)
    for mutant in ALL:
        if mutant.name.startswith(names):
            _search(mutant, seeds, arguments.want, arguments.kind or mutant.scene)


def _fits(seed: int, *, late: bool, kinds: Iterable[FaultKind]) -> bool:
    plan = draw_plan(random.Random(f"world {seed}"), Kind.STORM)
    return (plan.queue == LATE or not late) and set(kinds) <= {fault.kind for fault in plan.faults}


def _search(mutant: Mutant, seeds: list[int], want: int, kind: str) -> None:
    found = 0
    for seed in seeds:
        begun_s = time.process_time()
        error = caught([mutant], seed, kind)
        if error is not None:
            found += 1
            took_s = time.process_time() - begun_s
            broken = breaks(error)
            name = broken.name if isinstance(broken, Invariant) else type(error).__name__
            print(f"{mutant}: {kind} {seed}, {name} ({took_s:.1f} s): {error!s:.200}", flush=True)
            if found == want:
                return
    print(f"{mutant}: {found} of {len(seeds)} of {kind}", flush=True)


if __name__ == "__main__":
    main()
