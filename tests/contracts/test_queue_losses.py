"""A store that lost some of its keys and kept others (an eviction, a failover in the middle of a write).

What is left over then belongs to nobody or contradicts itself. It must be swept and never acted on. These run on
fakeredis, where keys can be taken away; the queue in memory loses everything or nothing.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import structlog
from fakeredis import FakeAsyncRedis, FakeServer

from gateway.queue.keys import TABLE
from gateway.queue.memory_queue import MemoryQueue
from gateway.queue.redis_queue import RedisQueue
from tests.contracts.test_queue import ME, NOW, OTHER, claim, enqueue, grant, look, register, work


@pytest.fixture
async def queue() -> AsyncIterator[RedisQueue]:
    client = FakeAsyncRedis(server=FakeServer(server_type="valkey"), protocol=2)
    one = RedisQueue(client, log=structlog.get_logger(), rng=random.Random(1), pool="losses")
    try:
        yield one
    finally:
        await one.close()


async def lose(queue: RedisQueue, name: str, *fields: str) -> None:
    """Take one key of the pool's table away, or some fields of it."""
    key = queue._keys[[one.name for one in TABLE].index(name)]
    if fields:
        await queue._client.hdel(key, *fields)
    else:
        await queue._client.delete(key)


async def test_works_of_a_session_whose_record_was_lost_are_swept(queue: RedisQueue) -> None:
    await register(queue)
    await register(queue, OTHER)
    await enqueue(queue, work("a"))
    await enqueue(queue, work("b"), session=OTHER)
    await lose(queue, "sessions", f"{ME.id}/{ME.epoch}")

    expired = await queue.expire_sessions(now_ms=NOW)

    assert (expired.owner_gone, expired.sessions) == (("a",), (ME.id,))


async def test_a_work_that_was_lost_and_is_another_s_by_now_is_not_swept_with_its_old_session(
    queue: RedisQueue,
) -> None:
    await register(queue)
    await register(queue, OTHER)
    await enqueue(queue, work("a"))
    await lose(queue, "works")
    await enqueue(queue, work("a"), session=OTHER)

    expired = await queue.end_session(ME)

    assert expired.owner_gone == ()
    assert await claim(queue, grant("a")) == [True]


async def test_a_grant_whose_work_was_lost_and_waits_again_is_not_read(queue: RedisQueue) -> None:
    await register(queue)
    await enqueue(queue, work("a"))
    await claim(queue, grant("a"))
    await lose(queue, "works")
    await enqueue(queue, work("a"))

    assert await queue.take_grants(ME, after_seq=0) == []


async def test_a_requeue_brings_a_waiting_work_that_the_store_has_rewound_up_to_its_attempts(queue: RedisQueue) -> None:
    """Else its owner waits for an attempt that the leader never grants, and gives every grant back."""
    memory = MemoryQueue(lambda: NOW)
    tried = replace(work("a", 1), attempt=2, avoid=frozenset({"gpu:0/a"}))
    for one in (memory, queue):
        await register(one)
        await enqueue(one, work("a", 1), work("b", 2))

        answers = await one.requeue_many([tried], session=ME, now_ms=NOW)

        assert answers == [True]
        assert (await look(one)).works == (tried, work("b", 2))
        assert (await look(one)).depths == {("interactive", "acme"): 2}


async def test_a_record_that_a_late_call_made_after_a_loss_is_fresh_for_who_takes_over(queue: RedisQueue) -> None:
    """The late call's validity was over when it came; whoever led before the loss may decide still."""
    memory = MemoryQueue(lambda: NOW)
    for one in (memory, queue):
        await one.lead("late", now_ms=NOW - 2_500, valid_for_ms=2_000)

        taken = await one.lead("b", now_ms=NOW, valid_for_ms=2_000)

        assert (taken.leader, taken.fresh_record) == ("b", True)
        assert (await one.lead("b", now_ms=NOW + 1_999, valid_for_ms=2_000)).fresh_record
        assert not (await one.lead("b", now_ms=NOW + 2_000, valid_for_ms=2_000)).fresh_record


async def test_who_resigned_on_a_fresh_record_is_followed_without_another_mark(queue: RedisQueue) -> None:
    memory = MemoryQueue(lambda: NOW)
    for one in (memory, queue):
        record = await one.lead("a", now_ms=NOW, valid_for_ms=2_000)
        await one.resign("a", epoch=record.epoch)

        assert not (await one.lead("b", now_ms=NOW + 2_000, valid_for_ms=2_000)).fresh_record
