"""How long one admission of `token_ledger` takes, and one control tick, with many works in flight.

    python -m tests.benchmarks.bench_token_ledger

The bar for an admission is 100 µs at the 99th percentile. Times are CPU time of this thread: others may use the machine.
"""

from __future__ import annotations

import time
from dataclasses import replace

from policies.limits.token_ledger import TokenLedger
from policies.sizing import Granted, Progressed, Running, Sampled
from policies.vocabulary import EngineView
from tests.policies.worlds import NOW_S, engine, fresh, policy, work

ROUNDS = 5000
TICKS = 20
SIZES = (10, 100, 1000)
CAPACITY_TOKENS = 4_000_000


def main() -> None:
    """Print a line for each number of works in flight."""
    print("works in flight   admit p50 / p99, bulk   admit p50 / p99, interactive   control tick")
    for works in SIZES:
        ledger, view, tick_s = crowded(works)
        bulk_s, interactive_s = timed(ledger, view, "night"), timed(ledger, view, "chat")
        print(
            f"{works:>15}   {_at(bulk_s, 0.5):>8.0f} / {_at(bulk_s, 0.99):>3.0f} µs       "
            f"{_at(interactive_s, 0.5):>8.0f} / {_at(interactive_s, 0.99):>3.0f} µs"
            f"          {tick_s * 1e3:>8.1f} ms"
        )


def crowded(works: int) -> tuple[TokenLedger, EngineView, float]:
    """An engine that decodes so many works of fifty tenants, and the mean time of a tick."""
    ledger = TokenLedger(policy())
    some = [
        work(f"w{n}", ("chat", "night")[n % 2], tenant=f"t{n % 50}", prompt_tokens=100 + n % 3000) for n in range(works)
    ]
    for one in some:
        ledger.on_event(Granted(one, "e0", 1), NOW_S)
    held = sum(one.prompt_tokens for one in some)
    view = replace(
        engine(in_flight={"chat": works - works // 2, "night": works // 2}),
        kv_tokens=held,
        kv_used_fraction=fresh(held / CAPACITY_TOKENS),
        kv_capacity_tokens=fresh(CAPACITY_TOKENS),
    )
    begun_s = time.thread_time()
    for tick in range(TICKS):
        now_s = NOW_S + tick / 4
        ledger.on_event(Progressed("e0", [Running(one, 1, 10 * tick, True) for one in some]), now_s)
        ledger.on_event(Sampled(view, {"night": 64}), now_s)
    return ledger, view, (time.thread_time() - begun_s) / TICKS


def timed(ledger: TokenLedger, view: EngineView, class_name: str) -> list[float]:
    """CPU seconds of each of ROUNDS admissions, in order of size."""
    asked = [work(f"x{n}", class_name, tenant=f"t{n % 50}", prompt_tokens=n % 4000) for n in range(ROUNDS)]
    found = []
    for one in asked:
        begun_s = time.thread_time()
        ledger.admit(one, view, NOW_S)
        found.append(time.thread_time() - begun_s)
    return sorted(found)


def _at(ordered: list[float], share: float) -> float:
    return 1e6 * ordered[int(share * (len(ordered) - 1))]


if __name__ == "__main__":
    main()
