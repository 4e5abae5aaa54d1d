"""What one decision of `token_ledger` costs with full queues: `python -m tests.benchmarks.bench_decisions`.

512 works in flight on eight engines and 10,000 queued, of which a round reads its look-ahead (512 with a deadline, 64 without,
eight tenants). The bars: a round at most 1 ms at the 99th percentile, an admission at most 100 µs. Times are CPU time of this
thread: others may use the machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from policies import presets
from policies.dispatching import look_for_room, plan_batches
from policies.estimators.pace import Pace
from policies.limits.token_ledger import TokenLedger
from policies.ordering import TenantCounters, urgent
from policies.ordering.feasibility import Outlook
from policies.schema import Policy
from policies.sizing import FirstToken, Granted, Progressed, Running, Sampled
from policies.vocabulary import EngineView, Work
from tests.policies.worlds import NOW_S, engine, fresh

ENGINES = 8
IN_FLIGHT = 64
QUEUED = 10_000
LOOK_AHEAD, LOOK_AHEAD_BULK = 512, 64
CAPACITY_TOKENS = 500_000
ROUNDS = 400


def main() -> None:
    """A line for each state of the pool."""
    for free in (0, 1, 8, 64):
        pool = Pool(random.Random(1), free)
        round_s, admit_s = timed(pool.round, ROUNDS), timed(pool.admit, 5000)
        print(
            f"{free:2} seats free: round p50 {1e3 * round_s[len(round_s) // 2]:6.2f} p99 {1e3 * _p99(round_s):6.2f} ms   "
            f"admit p50 {1e6 * admit_s[len(admit_s) // 2]:4.0f} p99 {1e6 * _p99(admit_s):4.0f} µs   "
            f"placed {pool.placed / ROUNDS:.1f}"
        )


class Pool:
    """Engines with what runs on them, and works that wait."""

    def __init__(self, rng: random.Random, free: int) -> None:
        self.rng, self.policy = rng, presets.load()
        self.sizing, self.pace, self.tenants = TokenLedger(self.policy), Pace(), TenantCounters()
        self.placed = 0
        self.views = [self._engine(f"e{n}", IN_FLIGHT + -(-(free - n) // ENGINES)) for n in range(ENGINES)]
        waiting = [self._work(f"q{n}", "bulk" if n % 10 == 0 else "interactive") for n in range(QUEUED)]
        waiting.sort(key=lambda one: one.rank)
        due = [one for one in waiting if one.deadline_s is not None][:LOOK_AHEAD]
        bulk = [one for one in waiting if one.deadline_s is None][:LOOK_AHEAD_BULK]
        by_queue = sorted((*due, *bulk), key=lambda one: (one.class_name, one.tenant))
        self.looks = [tuple(replace(one) for one in by_queue) for _ in range(4)]

    def round(self) -> None:
        """As the dispatcher plans one."""
        waiting = self.rng.choice(self.looks)
        self.placed += len(
            plan(waiting, self.views, self.sizing, self.policy, self.pace, self.tenants, self.rng.random())
        )

    def admit(self) -> None:
        work, view = self.rng.choice(self.looks[0]), self.rng.choice(self.views)
        self.sizing.admit(work, view, NOW_S)

    def _work(self, id: str, class_name: str) -> Work:
        rng = self.rng
        at_s = NOW_S - rng.random() * (0.4 if class_name == "interactive" else 60)
        deadline_s = at_s + rng.uniform(0.5, 9.0) if class_name == "interactive" else None
        return Work(
            id,
            class_name,
            f"t{rng.randrange(8)}",
            "m",
            "/v1/chat/completions",
            at_s,
            at_s if deadline_s is None else deadline_s,
            prompt_tokens=int(rng.lognormvariate(6.5, 1.0)),
            deadline_s=deadline_s,
        )

    def _engine(self, name: str, seats: int) -> EngineView:
        some = [self._work(f"{name}.{n}", ("interactive", "bulk")[n % 2]) for n in range(IN_FLIGHT)]
        for one in some:
            self.sizing.on_event(Granted(one, name, 1), NOW_S - 30)
            self.pace.granted(name, one, 1, NOW_S - 30)
        for number, one in enumerate(some):
            took_s = 0.05 * (1 + number)
            self.sizing.on_event(FirstToken(one, name, took_s), NOW_S - 30 + took_s)
            self.pace.first_token(one.id, 1, NOW_S - 30 + took_s)
        held = sum(one.prompt_tokens + 200 for one in some)
        view = replace(
            engine(name, in_flight={"interactive": IN_FLIGHT // 2, "bulk": IN_FLIGHT // 2}),
            kv_tokens=held,
            kv_used_fraction=fresh(held / CAPACITY_TOKENS),
            kv_capacity_tokens=fresh(CAPACITY_TOKENS),
            seats=fresh(seats),
        )
        self.sizing.on_event(Progressed(name, [Running(one, 1, 200, True) for one in some]), NOW_S)
        self.sizing.on_event(Sampled(view, {"interactive": 9 * QUEUED // 10, "bulk": QUEUED // 10}), NOW_S)
        return view


def plan(  # noqa: PLR0917 - what a round reads
    waiting: Sequence[Work],
    views: Sequence[EngineView],
    sizing: TokenLedger,
    policy: Policy,
    pace: Pace,
    tenants: TenantCounters,
    draw: float,
) -> list[object]:
    full = look_for_room(sorted({one.class_name for one in waiting}), views, sizing, NOW_S)
    due = (
        Outlook(urgent(waiting, policy, tenants), views, pace, NOW_S).order(policy)
        if "interactive" not in full.shut
        else []
    )
    return [*plan_batches(waiting, views, sizing, policy, NOW_S, draw, tenants=tenants, due=due, full=full)[0]]


def timed(once: Callable[[], None], times: int) -> list[float]:
    """CPU seconds of each, in order of size."""
    found = []
    for _ in range(times):
        begun_s = time.thread_time()
        once()
        found.append(time.thread_time() - begun_s)
    return sorted(found)


def _p99(ordered: list[float]) -> float:
    return ordered[int(0.99 * (len(ordered) - 1))]


if __name__ == "__main__":
    main()
