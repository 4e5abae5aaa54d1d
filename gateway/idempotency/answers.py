"""What is remembered of requests with an Idempotency-Key: that one runs, or how it was answered.

A record is one string under a digest of tenant and key, with a lifetime. While a request runs the record is a lease that
its process renews, so that a process that dies leaves a key free again after LEASE_S; then it is the answer, for as long
as the setting says. Every write names what it expects to find, so that a process that lost its lease cannot overwrite
what another has begun.

    running   r <token> <fingerprint>
    answered  d <fingerprint> <head as JSON> newline <body>

Digests are of a fixed length: no key of a client, which may be a secret, is part of a Redis key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.queue.keys import answer_key

LEASE_S = 15.0
COMMAND_TIMEOUT_S = 1.0
ASKED_AT_ONCE = 32
"""Commands under way in one process, each on a connection; more wait for these within their time-out."""

_REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
return 1
"""
"""KEYS: the record. ARGV: what it must be, what it becomes ('' for nothing), its lifetime in ms. 1 if done; O(size)."""


class AnswersUnavailable(Exception):
    """The store did not answer. The message says why."""


class Answers(Protocol):
    """See the module header. Two implementations, one suite: tests/contracts/test_answers.py."""

    async def begin(self, digest: str, record: bytes) -> bytes | None:
        """Write a record where there is none, for LEASE_S; else what is there. Repeatable: its own record counts as none.

        Raises AnswersUnavailable, as all of these do.
        """
        ...

    async def replace(self, digest: str, expected: bytes, record: bytes, lifetime_s: float) -> bool:
        """Put a record in the place of another; b"" removes it. False: what is there is not `expected`."""
        ...


class RedisAnswers:
    """In Redis or Valkey, beside the pool's queue and in its slot of a cluster."""

    __slots__ = ("_client", "_pool", "_room")

    def __init__(self, client: Redis, pool: str) -> None:
        """client: for this alone, since a burst of keys may use all of its connections."""
        self._client = client
        self._pool = pool
        self._room = asyncio.Semaphore(ASKED_AT_ONCE)

    async def begin(self, digest: str, record: bytes) -> bytes | None:
        lease_ms = int(LEASE_S * 1000)
        found: bytes | None = await self._run("SET", self._key(digest), record, "NX", "GET", "PX", lease_ms, get=True)
        return None if found == record else found

    async def replace(self, digest: str, expected: bytes, record: bytes, lifetime_s: float) -> bool:
        done = await self._run("EVAL", _REPLACE, 1, self._key(digest), expected, record, int(lifetime_s * 1000))
        return bool(done)

    def _key(self, digest: str) -> str:
        return answer_key(self._pool, digest)

    async def _run(self, *words: Any, **how: bool) -> Any:
        """One command; `how` is the client library's way of reading the answer."""
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S), self._room:
                return await self._client.execute_command(*words, **how)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            await self._client.connection_pool.disconnect(inuse_connections=False)
            raise AnswersUnavailable(str(error) or type(error).__name__) from error


class MemoryAnswers:
    """In this process, for a gateway whose queue is in memory."""

    __slots__ = ("_now_s", "_records")

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._records: dict[str, tuple[bytes, float]] = {}

    async def begin(self, digest: str, record: bytes) -> bytes | None:
        found = self._at(digest)
        if found is None:
            self._records[digest] = record, self._now_s() + LEASE_S
        return None if found == record else found

    async def replace(self, digest: str, expected: bytes, record: bytes, lifetime_s: float) -> bool:
        if self._at(digest) != expected:
            return False
        if record:
            self._records[digest] = record, self._now_s() + lifetime_s
        else:
            del self._records[digest]
        return True

    def _at(self, digest: str) -> bytes | None:
        now_s = self._now_s()
        for old in [digest for digest, (_, until_s) in self._records.items() if until_s <= now_s]:
            del self._records[old]
        found = self._records.get(digest)
        return None if found is None else found[0]
