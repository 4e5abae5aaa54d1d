"""Stores for the queue's contract suite: each kind of server once a session, one pool of its own for each test."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest
import structlog
from fakeredis import FakeAsyncRedis, FakeServer
from redis.asyncio import Redis

from gateway.queue.base import Queue
from gateway.queue.keys import keys
from gateway.queue.memory_queue import MemoryQueue
from gateway.queue.redis_client import connect
from gateway.queue.redis_queue import RedisQueue
from tests.contracts.releases import SIDE_BY_SIDE, beside_schema_1
from tests.queue_checks import check_keys
from tests.redis_servers import KINDS, Server, binary, serving
from tests.redis_topologies import Topology, cluster

NOW_MS = 1_800_000_000_000
_POOLS = itertools.count()


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, Server]]:
    """Servers by kind, started when first asked for."""
    with ExitStack() as stack:
        yield _Started(stack)


class _Started(dict[str, Server]):
    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, kind: str) -> Server:
        server = self[kind] = self._stack.enter_context(serving(kind))
        return server


@pytest.fixture
def valkey(servers: dict[str, Server]) -> Server:
    """The server that the embedded default runs."""
    return servers["valkey-9"]


@pytest.fixture(scope="session")
def nodes() -> Iterator[Topology]:
    """A cluster of three nodes, over which the pools of tests are spread."""
    with cluster() as three:
        yield three


@pytest.fixture(
    params=[
        "memory",
        "fakeredis",
        *(kind for kind in KINDS if binary(kind)),
        *SIDE_BY_SIDE,
        pytest.param("cluster", marks=pytest.mark.slow),  # its nodes wait two seconds before they serve
    ]
)
async def queue(request: pytest.FixtureRequest, servers: dict[str, Server]) -> AsyncIterator[Queue]:
    """Every implementation on every server, and releases side by side. On a real store each test's keys are checked."""
    pool = f"pool {next(_POOLS)}"
    if request.param == "memory":
        yield MemoryQueue(lambda: NOW_MS)
        return
    if request.param == "fakeredis":
        client: Redis = FakeAsyncRedis(server=FakeServer(server_type="valkey"), protocol=2)
    elif request.param == "cluster":
        client = connect(request.getfixturevalue("nodes").url, pool=pool)
    elif request.param in SIDE_BY_SIDE:
        client = connect(servers["valkey-9"].url)
    else:
        client = connect(servers[request.param].url)
    async with pool_on(client, pool) as one:
        yield beside_schema_1(one, *SIDE_BY_SIDE[request.param]) if request.param in SIDE_BY_SIDE else one


class pool_on:  # noqa: N801 - reads as a function
    """A queue on a pool that nobody else uses; leaves the store as it was and checks what is left in it."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client = client
        self._pool = pool

    async def __aenter__(self) -> RedisQueue:
        log = structlog.get_logger()
        self.queue = RedisQueue(self._client, log=log, rng=random.Random(1), pool=self._pool)
        return self.queue

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await check_keys(self._client, self._pool)
            await self._client.delete(*keys(self._pool))
        finally:
            await self.queue.close()
