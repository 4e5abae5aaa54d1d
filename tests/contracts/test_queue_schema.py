"""A rolling upgrade: what a newer release adds is ignored where it is not known, and is still there afterwards.

That both releases mean the same by what both know is the contract suite's: it runs with the frozen release beside today's.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import orjson
import pytest
import structlog

from gateway.queue.base import (
    Credit,
    Enqueued,
    InFlight,
    Queue,
    Renewed,
    Session,
    SessionReport,
    Settled,
    Snapshot,
)
from gateway.queue.keys import SCHEMA, keys
from gateway.queue.redis_client import connect
from gateway.queue.redis_queue import RedisQueue
from policies.vocabulary import BodyAt, Grant, Work
from tests.contracts.releases import Schema1
from tests.redis_servers import Server

NOW = 1_800_000_000_000
ME, OTHER = Session("gateway-1", 1), Session("gateway-2", 1)
POOL = "upgraded"
PLACE = ("gpu 0", "interactive")
SUMS = InFlight(1, 2, 3)


@pytest.fixture(params=["schema 1", "current"])
async def older(request: pytest.FixtureRequest, valkey: Server) -> AsyncIterator[RedisQueue]:
    """A process that is older than what stands in the store."""
    kind = RedisQueue if request.param == "current" else cast("type[RedisQueue]", Schema1)
    queue = kind(connect(valkey.url), log=structlog.get_logger(), rng=random.Random(1), pool=POOL)
    yield queue
    await queue._client.delete(*keys(POOL))
    await queue.close()


async def register(queue: Queue, session: Session = ME) -> Renewed | None:
    return await queue.renew_session(session, now_ms=NOW, valid_for_ms=5_000, report=SessionReport({PLACE: SUMS}))


async def add_to(queue: RedisQueue, key: str, field: str, line: bytes = b"", **members: object) -> None:
    """Do to a stored value what a newer release would: a further field of its line, further members of its JSON."""
    name = queue._key[key]
    value = cast("bytes | None", await queue._client.hget(name, field))
    assert value is not None
    head, _, text = value.partition(b"\n")
    await queue._client.hset(name, field, head + line + b"\n" + orjson.dumps({**orjson.loads(text), **members}))


async def raw_work(queue: RedisQueue, work_id: str) -> tuple[bytes, dict[str, object]]:
    record = cast("bytes | None", await queue._client.hget(queue._key["works"], work_id))
    assert record is not None
    line, _, text = record.partition(b"\n")
    return line, orjson.loads(text)


async def test_a_work_keeps_what_a_newer_release_wrote_of_it_through_its_whole_life(older: RedisQueue) -> None:
    work = Work("b", "bulk", "acme", "m", "/v1/completions", 1.5, 2.0, deadline_s=0.1 + 0.2, body=BodyAt.BLOB)
    await register(older)
    await register(older, OTHER)
    await older.enqueue_many([work], session=ME, max_queue={"bulk": 9}, now_ms=NOW)
    await add_to(older, "works", "b", b"\tlora\tx", adapter="lora", nested={"a": [0.1 + 0.2]})

    async def kept() -> bool:
        line, members = await raw_work(older, "b")
        return line.endswith(b"\tlora\tx") and (members["adapter"], members["nested"]) == ("lora", {"a": [0.1 + 0.2]})

    assert (await older.peek(bounds={}, default_bound=9, now_ms=NOW)).works == (work,)
    assert await older.claim_many([Grant("b", "gpu 0", 5, 1, 9.0)], now_ms=NOW) != [None]
    assert await kept()
    (stands,) = (await older.standing(now_ms=NOW)).outstanding
    assert (stands.work.deadline_s, stands.grant) == (0.1 + 0.2, Grant("b", "gpu 0", 5, 1, 9.0))
    assert await older.requeue_many([stands.work], session=ME, now_ms=NOW) == [True]
    assert await kept()
    assert (await older.end_session(ME)).requeued == ("b",)
    assert await kept()
    assert await older.enqueue_many([work], session=OTHER, max_queue={"bulk": 9}, now_ms=NOW) == [Enqueued.QUEUED]
    assert await kept()
    assert await older.settle_many([("b", 1)], session=OTHER, now_ms=NOW) == [Settled.DONE]


async def test_further_fields_of_a_session_and_its_report_are_ignored(older: RedisQueue) -> None:
    await register(older, OTHER)
    rows = [["gpu 0", "interactive", 1, 2, 3, "further column"]]
    await add_to(older, "sessions", "gateway-2/1", b"\tspeaks 2", in_flight=rows, further={"a": 1})

    assert (await older.hear(now_ms=NOW)).reports == {OTHER: SessionReport({PLACE: SUMS}, renewed_ms=NOW)}
    assert await older.give_credit({OTHER: {PLACE: Credit(SUMS, 1, NOW + 9)}}, epoch=5, now_ms=NOW)
    assert (await older.expire_sessions(now_ms=NOW + 5_000, after_seq=0)).sessions == ("gateway-2",)


async def test_further_columns_of_credit_and_fields_of_a_snapshot_are_ignored(older: RedisQueue) -> None:
    await register(older)
    await older.give_credit({ME: {PLACE: Credit(SUMS, 1, NOW + 9)}}, epoch=5, now_ms=NOW)
    await older.publish(Snapshot(7, b"{}"), epoch=5, now_ms=NOW)
    value = cast("bytes", await older._client.hget(older._key["credits"], "gateway-1/1"))
    await older._client.hset(
        older._key["credits"], "gateway-1/1", value.replace(b"\n", b"\tfurther\n").replace(b"]]", b',{"a":[]}]]')
    )
    await older._client.hset(older._key["snapshot"], "further", "field")

    assert await register(older) == Renewed({PLACE: Credit(SUMS, 1, NOW + 9)}, 5, 7)
    assert (await older.standing(now_ms=NOW)).credits == {ME: {PLACE: Credit(SUMS, 1, NOW + 9)}}
    assert await older.snapshot() == Snapshot(7, b"{}")
    assert await older.give_credit({ME: {}}, epoch=5, now_ms=NOW)
    assert await register(older) == Renewed({}, 5, 7)


async def test_a_kind_of_sweep_that_is_not_known_hides_none_of_those_that_are(older: RedisQueue) -> None:
    await older._client.zadd(older._key["swept"], {"x/gateway-9/1/w": NOW * 1024})
    await register(older)

    swept = await older.expire_sessions(now_ms=NOW + 5_000, after_seq=0)

    assert (swept.sessions, swept.requeued, swept.owner_gone) == (("gateway-1",), (), ())


def test_the_schema_in_force_has_a_frozen_copy() -> None:
    frozen = Path(__file__).parent.parent / "data" / f"queue_schema_{SCHEMA}"

    assert (frozen / "scripts" / "record.lua").is_file(), (
        f"schema {SCHEMA} has no frozen copy at {frozen}: freeze its scripts and wire there, and keep the older one until"
        " no release reads it; see docs/decisions/0009-one-schema-per-pool-at-a-time.md"
    )
