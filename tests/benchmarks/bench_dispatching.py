"""What a dispatch round costs: `python -m tests.benchmarks.bench_dispatching`.

512 works in flight on eight engines, and the look-ahead that the dispatcher reads of a long queue (512 works with a
deadline, 64 without, eight tenants, in random order), under fixed windows of 64 for an engine. Also 10,000 works handed in at
once, which no dispatcher does, to show how the cost grows; and the look-ahead placed as a whole by `token_ledger`, which
asks its forecast for each work and engine. Times are CPU time of the thread, which a busy machine does not change much.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from policies import presets
from policies.dispatching import place_one, plan_round
from policies.document import parse
from policies.limits import FollowingSizing
from policies.ordering import TenantCounters
from policies.vocabulary import EngineState, EngineView, Quality, Reading, Work

NOW_S = 1001.0
LINE_S = 3.0
"""CPU time for one line of the table."""
LEDGER = presets.load()
FIXED = parse(
    """\
version: 1
classes: {interactive: {ttft_sla_s: 0.5}, bulk: {}}
sizing: {policy: fixed, fixed: {total: 64, windows: {interactive: 56, bulk: 8}}}
""",
    "fixed.yaml",
)


def engines(count: int, interactive: int, bulk: int) -> list[EngineView]:
    in_flight = {"interactive": interactive, "bulk": bulk}
    seats = Reading(256.0, 1.0, Quality.FRESH)
    models = frozenset({"m"})
    return [EngineView(f"e{n}", EngineState.UP, models, in_flight, 100_000, 5_000, seats=seats) for n in range(count)]


def works(rng: random.Random, interactive: int, bulk: int) -> list[Work]:
    found = []
    for n in range(interactive + bulk):
        urgent = n < interactive
        at_s = NOW_S - rng.random() if urgent else NOW_S - 100 * rng.random()
        deadline_s = at_s + 0.5 if urgent else None
        found.append(
            Work(
                id=f"w{n}",
                class_name="interactive" if urgent else "bulk",
                tenant=f"t{rng.randrange(8)}",
                model="m",
                path="/v1/chat/completions",
                accepted_s=at_s,
                rank=at_s if deadline_s is None else deadline_s,
                prompt_tokens=rng.randrange(4000),
                deadline_s=deadline_s,
            )
        )
    rng.shuffle(found)
    return found


def timed(label: str, times: int, once: Callable[[], int]) -> None:
    """So many times, or as often as fits into LINE_S."""
    took_s: list[float] = []
    placed = 0
    until_s = time.thread_time() + LINE_S
    while len(took_s) < times and (not took_s or time.thread_time() < until_s):
        started = time.thread_time()
        placed += once()
        took_s.append(time.thread_time() - started)
    took_s.sort()
    done = len(took_s)
    p50, p99 = took_s[done // 2] * 1e3, took_s[int(done * 0.99)] * 1e3
    print(f"{label:48} p50 {p50:8.3f} ms   p99 {p99:8.3f} ms   placed {placed / done:.1f}   of {done}")


def main() -> None:
    rng = random.Random(1)
    look_ahead = works(rng, 512, 64)
    everything = works(rng, 9000, 1000)
    one = look_ahead[0]
    tenants = TenantCounters()

    fixed, ledger = FollowingSizing(FIXED), FollowingSizing(LEDGER)

    def round_over(waiting: list[Work], views: list[EngineView]) -> Callable[[], int]:
        return lambda: len(plan_round(waiting, views, fixed, FIXED, NOW_S, rng.random(), tenants=tenants))

    def round_of_ledger(waiting: list[Work], views: list[EngineView]) -> Callable[[], int]:
        return lambda: len(plan_round(waiting, views, ledger, LEDGER, NOW_S, rng.random(), tenants=tenants))

    one_free = [*engines(7, 56, 8), *engines(8, 55, 8)[7:]]
    timed("round, 8 engines full", 1000, round_over(look_ahead, engines(8, 56, 8)))
    timed("round, one place free of 512", 1000, round_over(look_ahead, one_free))
    timed("round, 8 places free", 1000, round_over(look_ahead, engines(8, 55, 8)))
    timed("round, two empty engines filled", 300, round_over(look_ahead, engines(2, 0, 0)))
    timed("round, 10,000 works handed in", 50, round_over(everything, engines(8, 56, 8)))
    views = engines(8, 40, 8)
    timed("one work alone", 5000, lambda: place_one(one, views, fixed, FIXED, NOW_S, 0.3) is not None)
    timed("round of token_ledger, all 512 placed", 300, round_of_ledger(look_ahead, engines(8, 56, 8)))
    timed("one work alone, token_ledger", 5000, lambda: place_one(one, views, ledger, LEDGER, NOW_S, 0.3) is not None)


if __name__ == "__main__":
    main()
