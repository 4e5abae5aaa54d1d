"""What a work and a session cost in the queue: enqueue, claim, settle, renew and read on a Valkey of its own.

    python -m tests.benchmarks.bench_queue [WORKS]

CPU is this process's own (user + system), which a busy machine disturbs least.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable

import structlog

from gateway.queue.base import Answered, Began, Credit, Ended, InFlight, Queue, Session, SessionReport, Told
from gateway.queue.batcher import Batcher
from gateway.queue.memory_queue import MemoryQueue
from gateway.queue.redis_client import connect
from gateway.queue.redis_queue import RedisQueue
from policies.vocabulary import Grant, Outcome, Result, Work
from tests.redis_servers import serving

ME = Session("bench", 1)
BOUNDS = {"interactive": 1 << 20}


def now_ms() -> int:
    return int(time.time() * 1000)


def work(number: int) -> Work:
    now_s = time.time()
    return Work(
        f"w{number}", "interactive", "acme", "llama", "/v1/chat/completions", now_s, now_s, 300, 200, 1, now_s + 1
    )


async def lives(queue: Queue, batcher: Batcher, numbers: range, epoch: int) -> None:
    """Works one after the other, as one client among many sees it."""
    for number in numbers:
        one = work(number)
        await batcher.enqueue(one, max_queue=BOUNDS)
        await queue.claim_many([Grant(one.id, "gpu", epoch, 1, 0.0)], now_ms=now_ms())
        await queue.settle_many([(one.id, 1)], session=ME, now_ms=now_ms())


async def rounds(queue: Queue, batcher: Batcher, numbers: range, epoch: int, together: int) -> None:
    """Works that come together, as a loaded gateway sees them: one dispatch round claims them in one script."""
    for start in range(numbers.start, numbers.stop, together):
        some = [work(number) for number in range(start, start + together)]
        await asyncio.gather(*(batcher.enqueue(one, max_queue=BOUNDS) for one in some))
        waiting = await queue.peek(bounds={}, default_bound=together, now_ms=now_ms())
        await queue.claim_many([Grant(one.id, "gpu", epoch, 1, 0.0) for one in waiting.works], now_ms=now_ms())
        await queue.settle_many([(one.id, 1) for one in waiting.works], session=ME, now_ms=now_ms())


async def measure(title: str, works: int, run: Callable[[], Awaitable[None]]) -> None:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await run()
    cpu_us, wall_us = ((time.process_time() - cpu_s) / works * 1e6, (time.perf_counter() - wall_s) / works * 1e6)
    sys.stdout.write(f"{title:<58}{cpu_us:8.1f} us CPU{wall_us:9.1f} us wall\n")


async def bench(name: str, queue: Queue, works: int) -> None:
    await queue.renew_session(ME, now_ms=now_ms(), valid_for_ms=600_000, report=SessionReport())
    epoch = (await queue.lead("bench", now_ms=now_ms(), valid_for_ms=600_000)).epoch
    async with Batcher(queue, session=lambda: ME, now_ms=now_ms) as batcher:
        numbers = iter(range(0, works * 10, works))

        def fresh() -> range:
            start = next(numbers)
            return range(start, start + works)

        one, many, pieces = fresh(), fresh(), fresh()
        await measure(f"{name}, 1 client, enqueue + claim + settle", works, lambda: lives(queue, batcher, one, epoch))

        async def at_once() -> None:
            parts = [range(many.start + i, many.stop, 64) for i in range(64)]
            await asyncio.gather(*(lives(queue, batcher, part, epoch) for part in parts))

        await measure(f"{name}, 64 clients, a claim each", works, at_once)
        await measure(
            f"{name}, 64 together, peek and claim in one", works, lambda: rounds(queue, batcher, pieces, epoch, 64)
        )
    deep = [work(i) for i in range(100_000, 110_000)]
    await queue.enqueue_many(deep, session=ME, max_queue=BOUNDS, now_ms=now_ms())

    async def look() -> None:
        for _ in range(200):
            await queue.peek(bounds={}, default_bound=64, now_ms=now_ms())

    await measure(f"{name}, peek of 64 from 10,000 waiting (per peek)", 200, look)
    await bench_sessions(name, queue, epoch)


def lives_of(works: int, renewal: int) -> tuple[Told, ...]:
    """Beginnings, first tokens and ends, as one renewal of a loaded process tells them."""
    first, at_ms = 1 + 3 * works * renewal, now_ms()
    outcome = Outcome("", "", "", "", "", Result.COMPLETED, "", 200, 1, 300, 200, 4.0, 0.01, 0.2, 0.15)
    began = [Began(work(number), "engine-1:8000", 1) for number in range(works)]
    answered = [Answered(first + number, 0.15) for number in range(works)]
    ended = [Ended(first + number, outcome) for number in range(works)]
    events: list[Began | Answered | Ended] = [*began, *answered, *ended]
    return tuple(Told(number, at_ms, event) for number, event in enumerate(events, first))


async def bench_sessions(name: str, queue: Queue, epoch: int) -> None:
    """What beats twice a second: each process renews with what it runs on 100 places, the leader reads 16 of them."""
    sums = {(f"engine-{number}:8000", "interactive"): InFlight(9, 12_345, 678) for number in range(100)}
    report = SessionReport(sums, sums, now_ms() * 1024)
    given = {place: Credit(one, 4, now_ms() + 600_000) for place, one in sums.items()}
    crowd = [Session(f"process-{number}", 1) for number in range(16)]
    for session in crowd:
        await queue.renew_session(session, now_ms=now_ms(), valid_for_ms=600_000, report=report)
    await queue.give_credit(dict.fromkeys(crowd, given), epoch=epoch, now_ms=now_ms())

    async def renew() -> None:
        for _ in range(400):
            await queue.renew_session(crowd[0], now_ms=now_ms(), valid_for_ms=600_000, report=report)

    async def read() -> None:
        for _ in range(50):
            await queue.hear(now_ms=now_ms())

    async def give() -> None:
        for _ in range(50):
            await queue.give_credit(dict.fromkeys(crowd, given), epoch=epoch, now_ms=now_ms())

    async def tell() -> None:
        for number in range(400):
            await queue.renew_session(
                crowd[0],
                now_ms=now_ms(),
                valid_for_ms=600_000,
                report=SessionReport(sums, sums, events=lives_of(20, number)),
            )

    async def hear() -> None:
        seq = 0
        for number in range(100):
            await queue.renew_session(
                crowd[0], now_ms=now_ms(), valid_for_ms=600_000, report=SessionReport(events=lives_of(20, number))
            )
            seq = (await queue.hear(now_ms=now_ms(), after_seq=seq)).seq

    await measure(f"{name}, renewal: 100 places, 100 credits (per renewal)", 400, renew)
    await measure(f"{name}, the same with the whole lives of 20 works (per renewal)", 400, tell)
    await queue.hear(now_ms=now_ms(), after_seq=(await queue.hear(now_ms=now_ms())).seq)
    await measure(f"{name}, lives of 20 works told and heard beside 16 sessions", 100, hear)
    await measure(f"{name}, reports of 16 sessions, 100 places each (per read)", 50, read)
    await measure(f"{name}, 100 credits to each of 16 sessions (per call)", 50, give)


async def main(works: int) -> None:
    await bench("memory", MemoryQueue(now_ms), works)
    with serving("valkey-9") as server:
        queue = RedisQueue(connect(server.url), log=structlog.get_logger(), rng=random.Random(1))
        await bench("valkey", queue, works)
        await queue.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 6_400))
