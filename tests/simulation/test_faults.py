"""The store behind a faulty network: what was asked may have happened, and the caller cannot tell."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any, cast

import pytest

from gateway.queue.base import QueueUnavailable, Session, SessionReport
from gateway.queue.memory_queue import MemoryQueue
from policies.vocabulary import Work
from tests.simulation.faults import QueueFaults
from tests.simulation.faulty_queue import FaultyQueue
from tests.simulation.loop import SimLoop, run

SESSION = Session("owner", 1)
WORK = Work("w", "bulk", "tenant", "model", "/v1/completions", accepted_s=0.0, rank=1.0)


async def with_session(faults: QueueFaults) -> tuple[MemoryQueue, FaultyQueue]:
    store = MemoryQueue(lambda: 0)
    await store.renew_session(SESSION, now_ms=0, valid_for_ms=60_000, report=SessionReport())
    return store, FaultyQueue(store, faults, random.Random(1))


async def enqueue(queue: FaultyQueue) -> object:
    return await queue.enqueue_many([WORK], session=SESSION, max_queue={"bulk": 10}, now_ms=0)


async def waiting(store: MemoryQueue) -> int:
    return len((await store.peek(bounds={}, default_bound=10, now_ms=0)).works)


def test_a_lost_request_has_not_happened() -> None:
    async def main(_loop: SimLoop) -> int:
        store, queue = await with_session(QueueFaults(request_lost_p=1.0))
        with pytest.raises(QueueUnavailable):
            await enqueue(queue)
        return await waiting(store)

    assert run(main, seed=1) == 0


def test_a_lost_reply_has_happened() -> None:
    async def main(_loop: SimLoop) -> int:
        store, queue = await with_session(QueueFaults(reply_lost_p=1.0))
        with pytest.raises(QueueUnavailable):
            await enqueue(queue)
        return await waiting(store)

    assert run(main, seed=1) == 1


def test_an_unanswered_call_fails_after_the_time_out_and_not_before() -> None:
    async def main(loop: SimLoop) -> float:
        _, queue = await with_session(QueueFaults(delay_max_s=0.0))
        queue.away = True
        with pytest.raises(QueueUnavailable):
            await queue.time_ms()
        return loop.time()

    assert run(main, seed=1) == 0.5


def test_answers_are_late_by_what_is_drawn() -> None:
    async def main(loop: SimLoop) -> float:
        _, queue = await with_session(QueueFaults(late_p=1.0, late_max_s=0.2))
        for _ in range(20):
            await queue.time_ms()
        return loop.time() / 20

    assert 0.1 < run(main, seed=1) < 0.3


def test_what_was_sent_arrives_though_its_caller_has_given_up() -> None:
    async def main(_loop: SimLoop) -> list[int]:
        store, queue = await with_session(QueueFaults(late_p=1.0, late_max_s=60.0))
        with pytest.raises(QueueUnavailable):
            await enqueue(queue)
        seen = [await waiting(store)]
        await asyncio.sleep(60)
        return [*seen, await waiting(store)]

    assert run(main, seed=1) == [0, 1]


def test_a_process_that_was_killed_sends_nothing_more() -> None:
    async def main(_loop: SimLoop) -> int:
        store, queue = await with_session(QueueFaults())
        queue.dead = True
        with pytest.raises(QueueUnavailable):
            await enqueue(queue)
        await asyncio.sleep(1)
        return await waiting(store)

    assert run(main, seed=1) == 0


def test_once_faults_have_ended_every_call_is_answered() -> None:
    async def main(_loop: SimLoop) -> int:
        store, queue = await with_session(QueueFaults(request_lost_p=1.0, reply_lost_p=1.0))
        queue.away = True
        queue.end_faults()
        await enqueue(queue)
        return await waiting(store)

    assert run(main, seed=1) == 1


@pytest.mark.parametrize(("lost_p", "heard"), [(0.0, True), (1.0, False)])
def test_a_bell_is_heard_unless_it_is_lost(lost_p: float, heard: bool) -> None:
    async def main(_loop: SimLoop) -> bool:
        _, queue = await with_session(QueueFaults(bell_lost_p=lost_p))
        async with aclosing(cast("Any", queue.bell(None))) as rings:
            try:
                async with asyncio.timeout(5):
                    await anext(rings)
            except TimeoutError:
                return False
            return True

    assert run(main, seed=1) is heard
