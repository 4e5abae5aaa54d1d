"""Two releases of the queue on one pool: processes of the frozen schema 1 beside processes of today.

Each process speaks one release. A call that names a session is its process's; any other call is the leader's. So what
one release writes the other reads, changes and ends, in both directions, under every test of the contract.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, cast

import structlog

from gateway.queue.base import Heard, Queue, Session
from gateway.queue.redis_queue import RedisQueue
from tests.data.queue_schema_1.redis_queue import RedisQueue as Schema1Queue

OLD, NEW = 0, 1


class Schema1(Schema1Queue):
    """The frozen release behind today's contract. Leaders of it hear reports only: it knows no events."""

    async def hear(self, *, now_ms: int, after_seq: int = 0) -> Heard:
        return Heard(await self.sessions(now_ms=now_ms), seq=after_seq)


SIDE_BY_SIDE = {
    "schema-1-owners": ((OLD,), (NEW,)),
    "schema-1-leader": ((NEW,), (OLD,)),
    "schema-1-and-current": ((OLD, NEW), (NEW, OLD, OLD)),
}
"""Releases of the owners, one process after the other, and of the leaders, one call after the other."""


def beside_schema_1(queue: RedisQueue, owners: tuple[int, ...], leaders: tuple[int, ...]) -> Queue:
    """The queue for tests, with `queue` as its current half."""
    old = Schema1(queue._client, log=structlog.get_logger(), rng=random.Random(1), pool=queue._pool)
    return cast("Queue", _TwoReleases((cast("Queue", old), queue), owners, leaders))


class _TwoReleases:
    """Passes each call to the release of the process that makes it; all else is the current queue's."""

    def __init__(self, releases: tuple[Queue, Queue], owners: tuple[int, ...], leaders: tuple[int, ...]) -> None:
        self._releases = releases
        self._next_owner = itertools.cycle(owners)
        self._next_leader = itertools.cycle(leaders)
        self._processes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(Queue, name, None)):
            return getattr(self._releases[NEW], name)

        def call(*args: Any, **named: Any) -> Any:
            session = named.get("session", next(iter(args), None))
            release = self._release(session.id) if isinstance(session, Session) else next(self._next_leader)
            method: Callable[..., Any] = getattr(self._releases[release], name)
            return method(*args, **named)

        return call

    def _release(self, process: str) -> int:
        if process not in self._processes:
            self._processes[process] = next(self._next_owner)
        return self._processes[process]

    def __repr__(self) -> str:
        return f"<two releases, by process {self._processes}>"
