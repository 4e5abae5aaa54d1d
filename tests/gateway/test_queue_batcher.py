"""Single calls gathered into plural ones: nothing lost, nothing mixed up, nobody kept waiting by another's leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest

from gateway.queue.base import Enqueued, QueueUnavailable, Session, SessionReport, Settled, Waiting
from gateway.queue.batcher import BATCH_MAX, Batcher
from gateway.queue.memory_queue import MemoryQueue
from policies.vocabulary import Work

NOW = 1_800_000_000_000
ME = Session("gateway-1", 1)
BOUNDS = {"interactive": 1_000}


class Gate(MemoryQueue):
    """A memory queue whose enqueues can be held and made to fail, and that counts its plural calls."""

    def __init__(self) -> None:
        super().__init__(lambda: NOW)
        self.open = asyncio.Event()
        self.open.set()
        self.entered = asyncio.Event()
        self.fault: Exception | None = None
        self.sizes: list[int] = []

    async def enqueue_many(
        self, works: Sequence[Work], *, session: Session, max_queue: Mapping[str, int], now_ms: int
    ) -> list[Enqueued]:
        self.sizes.append(len(works))
        self.entered.set()
        await self.open.wait()
        if self.fault is not None:
            raise self.fault
        return await super().enqueue_many(works, session=session, max_queue=max_queue, now_ms=now_ms)


@pytest.fixture
async def gate() -> Gate:
    gate = Gate()
    await gate.renew_session(ME, now_ms=NOW, valid_for_ms=5_000, report=SessionReport())
    return gate


@pytest.fixture
async def batcher(gate: Gate) -> AsyncIterator[Batcher]:
    async with Batcher(gate, session=lambda: ME, now_ms=lambda: NOW) as batcher:
        yield batcher


def work(work_id: str) -> Work:
    return Work(work_id, "interactive", "acme", "m", "/v1/completions", 1.0, 2.0)


async def seen(queue: MemoryQueue) -> Waiting:
    return await queue.peek(bounds={}, default_bound=1_000, now_ms=NOW)


async def test_calls_of_one_turn_travel_together(gate: Gate, batcher: Batcher) -> None:
    answers = await asyncio.gather(*(batcher.enqueue(work(f"w{i}"), max_queue=BOUNDS) for i in range(50)))

    assert answers == [Enqueued.QUEUED] * 50
    assert gate.sizes == [50]


async def test_each_caller_hears_of_its_own_work(gate: Gate, batcher: Batcher) -> None:
    bounds = {"interactive": 2}

    answers = await asyncio.gather(*(batcher.enqueue(work(one), max_queue=bounds) for one in ("a", "b", "c", "a")))

    assert answers == [Enqueued.QUEUED, Enqueued.QUEUED, Enqueued.FULL, Enqueued.QUEUED]


async def test_what_comes_while_a_call_is_under_way_goes_with_the_next(gate: Gate, batcher: Batcher) -> None:
    gate.open.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(batcher.enqueue(work("first"), max_queue=BOUNDS))
        await gate.entered.wait()
        for i in range(BATCH_MAX + 10):
            group.create_task(batcher.enqueue(work(f"w{i}"), max_queue=BOUNDS))
        await asyncio.sleep(0)
        gate.open.set()

    assert gate.sizes == [1, BATCH_MAX, 10]


async def test_a_cancelled_caller_takes_nothing_from_the_others(gate: Gate, batcher: Batcher) -> None:
    gate.open.clear()
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(batcher.enqueue(work("leaves"), max_queue=BOUNDS))
        staying = group.create_task(batcher.enqueue(work("stays"), max_queue=BOUNDS))
        await gate.entered.wait()
        leaving.cancel()
        gate.open.set()

    assert leaving.cancelled()
    assert staying.result() is Enqueued.QUEUED


async def test_a_caller_that_left_before_sending_sends_nothing(gate: Gate, batcher: Batcher) -> None:
    gate.open.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(batcher.enqueue(work("first"), max_queue=BOUNDS))
        await gate.entered.wait()
        leaving = group.create_task(batcher.enqueue(work("leaves"), max_queue=BOUNDS))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.sleep(0)
        gate.open.set()

    assert [one.id for one in (await seen(gate)).works] == ["first"]


async def test_who_cancels_an_enqueue_and_settles_leaves_no_trace_in_either_order(gate: Gate, batcher: Batcher) -> None:
    gate.open.clear()
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(batcher.enqueue(work("leaves"), max_queue=BOUNDS))
        await gate.entered.wait()
        leaving.cancel()
        (overtaking,) = await gate.settle_many([("leaves", 0)], session=ME, now_ms=NOW)
        gate.open.set()

    assert overtaking is Settled.GONE
    assert await batcher.enqueue(work("next"), max_queue=BOUNDS) is Enqueued.QUEUED
    assert [one.id for one in (await seen(gate)).works] == ["next"]


async def test_a_failure_reaches_every_caller_as_its_own_instance(gate: Gate, batcher: Batcher) -> None:
    gate.fault = QueueUnavailable("away")

    errors = await asyncio.gather(
        *(batcher.enqueue(work(f"w{i}"), max_queue=BOUNDS) for i in range(2)), return_exceptions=True
    )
    gate.fault = None
    later = await batcher.enqueue(work("later"), max_queue=BOUNDS)

    assert [repr(error) for error in errors] == ["QueueUnavailable('away')"] * 2
    assert errors[0] is not errors[1]
    assert later is Enqueued.QUEUED


async def test_works_of_two_sessions_are_not_mixed(gate: Gate) -> None:
    sessions = iter([ME, Session("gateway-1", 2), ME])
    await gate.renew_session(Session("gateway-1", 2), now_ms=NOW, valid_for_ms=5_000, report=SessionReport())

    async with Batcher(gate, session=lambda: next(sessions), now_ms=lambda: NOW) as batcher:
        await asyncio.gather(*(batcher.enqueue(work(one), max_queue=BOUNDS) for one in "abc"))

    assert gate.sizes == [1, 1, 1]
    assert (await gate.end_session(Session("gateway-1", 2))).owner_gone == ("b",)


async def test_ending_sends_what_is_left_and_refuses_what_comes_later(gate: Gate) -> None:
    async with Batcher(gate, session=lambda: ME, now_ms=lambda: NOW) as batcher:
        last = asyncio.ensure_future(batcher.enqueue(work("last"), max_queue=BOUNDS))
        await asyncio.sleep(0)

    assert await last is Enqueued.QUEUED
    with pytest.raises(QueueUnavailable, match="closed"):
        await batcher.enqueue(work("later"), max_queue=BOUNDS)


async def test_a_batcher_that_is_cancelled_leaves_no_caller_waiting(gate: Gate) -> None:
    gate.open.clear()
    batcher = Batcher(gate, session=lambda: ME, now_ms=lambda: NOW)

    async def serve() -> None:
        async with batcher:
            await asyncio.Event().wait()

    serving = asyncio.ensure_future(serve())
    await asyncio.sleep(0)
    caller = asyncio.ensure_future(batcher.enqueue(work("a"), max_queue=BOUNDS))
    await gate.entered.wait()
    serving.cancel()

    with pytest.raises(QueueUnavailable, match="closed"):
        await caller
    with pytest.raises(asyncio.CancelledError):
        await serving
