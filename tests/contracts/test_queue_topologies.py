"""The queue on sets of servers: its calls find the primary, and find the next one when it is lost, moved or frozen."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial

import pytest
import structlog

from gateway.queue.base import Enqueued, QueueUnavailable, Session, SessionReport
from gateway.queue.keys import keys
from gateway.queue.redis_client import connect
from gateway.queue.redis_queue import RedisQueue
from policies.vocabulary import Grant, Work
from tests.redis_topologies import Node, Topology, cluster, sentinels, slot_of

POOL = "default"
BOUNDS = {"interactive": 1_000_000}


def now_ms() -> int:
    return int(time.time() * 1000)


def work(work_id: str) -> Work:
    return Work(work_id, "interactive", "acme", "m", "/v1/completions", 1.0, 2.0)


@asynccontextmanager
async def queue_at(url: str, pool: str = POOL) -> AsyncIterator[RedisQueue]:
    queue = RedisQueue(connect(url, pool=pool), log=structlog.get_logger(), rng=random.Random(1), pool=pool)
    try:
        yield queue
    finally:
        await queue.close()


class Owner:
    """A process with works of its own: after an outage it writes again all that it was told waits."""

    def __init__(self, queue: RedisQueue, name: str) -> None:
        self._queue = queue
        self.session = Session(name, 1)
        self.accepted: dict[str, Work] = {}
        self.outages: list[str] = []
        self.whole_since_s = float("inf")
        self._number = 0

    async def run(self) -> None:
        """Until cancelled: a beat, a new work and the end of an old one, as fast as the store answers, paced."""
        while True:
            try:
                await self._beat()
            except QueueUnavailable as error:
                self.outages.append(str(error))
                self.whole_since_s = float("inf")
            await asyncio.sleep(0.01)

    async def _beat(self) -> None:
        renewed = await self._queue.renew_session(
            self.session, now_ms=now_ms(), valid_for_ms=5_000, report=SessionReport()
        )
        if renewed is None:
            self.session = Session(self.session.id, self.session.epoch + 1)
            self.whole_since_s = float("inf")
            return
        if self.whole_since_s == float("inf"):
            await self._enqueue(*self.accepted.values())
        self._number += 1
        new = work(f"{self.session.id}-{self._number}")
        await self._enqueue(new)
        self.accepted[new.id] = new
        if self._number % 3 == 0:
            oldest = next(iter(self.accepted))
            del self.accepted[oldest]
            await self._queue.settle_many([(oldest, 0)], session=self.session, now_ms=now_ms())
        self.whole_since_s = min(self.whole_since_s, time.monotonic())

    async def _enqueue(self, *works: Work) -> None:
        answers = await self._queue.enqueue_many(works, session=self.session, max_queue=BOUNDS, now_ms=now_ms())
        assert set(answers) <= {Enqueued.QUEUED}


def kill(node: Node) -> None:
    node.kill()


def freeze(node: Node) -> None:
    os.kill(node.process.pid, signal.SIGSTOP)


@pytest.mark.many
@pytest.mark.parametrize(
    ("make", "lose"),
    [
        pytest.param(sentinels, kill, id="sentinel-killed"),
        pytest.param(sentinels, freeze, id="sentinel-frozen"),
        pytest.param(partial(cluster, replicas=1), kill, id="cluster-killed"),
    ],
)
async def test_under_load_a_lost_primary_is_followed_within_ten_seconds_and_nothing_is_missing(
    make: Callable[[], AbstractContextManager[Topology]], lose: Callable[[Node], None]
) -> None:
    with make() as servers:
        async with queue_at(servers.url) as queue, asyncio.TaskGroup() as group:
            owners = [Owner(queue, f"gateway-{number}") for number in range(6)]
            rung = Counter[str]()
            listening = group.create_task(listen(queue, owners[0].session, rung))
            running = [group.create_task(owner.run()) for owner in owners]
            await until(lambda: all(len(owner.accepted) > 10 for owner in owners))

            lose(servers.primary_of(keys(POOL)[0]))
            lost_s = time.monotonic()
            await until(lambda: any(owner.outages for owner in owners))
            await until(lambda: all(owner.whole_since_s < time.monotonic() for owner in owners))
            recovery_s = time.monotonic() - lost_s
            for task in running:
                task.cancel()
            await asyncio.wait(running)

            assert recovery_s < 10, [owner.outages[-1] for owner in owners]
            expected = {work_id for owner in owners for work_id in owner.accepted}
            waiting = await queue.peek(bounds={}, default_bound=1_000_000, now_ms=now_ms())
            assert expected <= {one.id for one in waiting.works}
            await hears_grants(queue, owners[0], rung)
            listening.cancel()


async def listen(queue: RedisQueue, session: Session, rung: Counter[str]) -> None:
    """Count the rings of a session's bell."""
    async for _ in queue.bell(session):
        rung[session.id] += 1


async def hears_grants(queue: RedisQueue, owner: Owner, rung: Counter[str]) -> None:
    """A bell that listened before the loss rings for grants after it: more often than it does by itself."""
    led = await queue.lead("gateway-0", now_ms=now_ms(), valid_for_ms=20_000)
    one = next(iter(owner.accepted.values()))
    enough = rung.total() + 5
    async with asyncio.timeout(10):
        while rung.total() < enough:
            grant = Grant(one.id, "gpu 0", led.epoch, 1, time.time() + 5)
            (claimed,) = await queue.claim_many([grant], now_ms=now_ms())
            assert claimed is not None
            assert await queue.requeue_many([one], session=owner.session, now_ms=now_ms(), seqs=[claimed.seq]) == [True]
            await asyncio.sleep(0.01)


async def until(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(18):
        while not so():
            await asyncio.sleep(0.01)


@pytest.mark.many
async def test_a_slot_that_moves_to_another_node_is_told_meanwhile_and_followed_without_an_error(
    nodes: Topology,
) -> None:
    pool = "that moves"
    names, slot, me = keys(pool), slot_of(keys(pool)[0]), Session("gateway-1", 1)
    source = nodes.primary_of(names[0])
    target = nodes.others(source)[0]
    async with queue_at(nodes.url, pool) as queue:
        await queue.renew_session(me, now_ms=now_ms(), valid_for_ms=5_000, report=SessionReport())
        await queue.enqueue_many([work("a")], session=me, max_queue=BOUNDS, now_ms=now_ms())
        with source.client() as there, target.client() as here:
            there_id, here_id = (one.execute_command("CLUSTER", "MYID").decode() for one in (there, here))
            here.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", there_id)
            there.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", here_id)
            there.migrate("127.0.0.1", target.port, names[:1], 0, 5_000)

            with pytest.raises(QueueUnavailable, match="moving our slot"):
                await queue.peek(bounds={}, default_bound=9, now_ms=now_ms())

            there.migrate("127.0.0.1", target.port, names[1:], 0, 5_000)
            for one in (here, there):
                one.execute_command("CLUSTER", "SETSLOT", slot, "NODE", here_id)

        waiting = await queue.peek(bounds={}, default_bound=9, now_ms=now_ms())
        assert [one.id for one in waiting.works] == ["a"]
        assert nodes.primary_of(names[0]) is target
        await queue.end_session(me)
        await queue._client.delete(*names)


@pytest.mark.many
async def test_nodes_that_are_silent_or_gone_are_passed_over(nodes: Topology) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        dead = ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in (silent, refusing))
        url = nodes.url.replace("redis+cluster://", f"redis+cluster://{dead},")

        async with queue_at(url, "passed over") as queue:
            led = await queue.lead("gateway-1", now_ms=now_ms(), valid_for_ms=2_000)
            await queue._client.delete(*keys("passed over"))

    assert led.leader == "gateway-1"


@pytest.mark.many
async def test_a_primary_that_no_node_knows_is_told_with_what_was_asked() -> None:
    with sentinels() as servers:
        async with queue_at(f"{servers.url}-other") as queue:
            with pytest.raises(QueueUnavailable, match=r"primary is not known: .*Service\(name='headrace-other'\)"):
                await queue.lead("gateway-1", now_ms=now_ms(), valid_for_ms=2_000)


async def test_with_no_node_to_be_reached_the_last_one_s_reason_is_told_without_the_password() -> None:
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        port = refusing.getsockname()[1]

        async with queue_at(f"redis+cluster://user:hunter2@127.0.0.1:{port}") as queue:
            with pytest.raises(QueueUnavailable, match=rf"primary is not known: .*127.0.0.1:{port}") as caught:
                await queue.lead("gateway-1", now_ms=now_ms(), valid_for_ms=2_000)

            assert "hunter2" not in f"{caught.value!r} {queue!r} {caught.value.__cause__!r}"
