"""One suite over both memories of answered requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.app import Gateway
from gateway.idempotency.answers import LEASE_S, Answers, AnswersUnavailable, MemoryAnswers, RedisAnswers
from gateway.queue.keys import answer_key
from gateway.queue.redis_client import connect
from gateway.queue.redis_queue import RedisQueue
from gateway.settings import Settings
from tests.gateway.replay.quiet import QUIET
from tests.redis_servers import Server

_POOLS = itertools.count()


@pytest_asyncio.fixture(params=["memory", "valkey"])
async def answers(request: pytest.FixtureRequest) -> AsyncIterator[Answers]:
    if request.param == "memory":
        yield MemoryAnswers()
    else:
        valkey: Server = request.getfixturevalue("valkey")
        async with connect(valkey.url) as client:
            yield RedisAnswers(client, f"answers-{next(_POOLS)}")


async def test_the_first_one_begins_and_the_next_sees_its_record(answers: Answers) -> None:
    assert await answers.begin("a", b"one") is None
    assert await answers.begin("a", b"two") == b"one"
    assert await answers.begin("b", b"two") is None


async def test_a_repeated_begin_whose_reply_was_lost_is_still_the_first(answers: Answers) -> None:
    await answers.begin("a", b"one")

    assert await answers.begin("a", b"one") is None


async def test_only_who_knows_the_record_replaces_it(answers: Answers) -> None:
    await answers.begin("a", b"one")

    assert not await answers.replace("a", b"other", b"answer", 60)
    assert await answers.replace("a", b"one", b"answer\n\x00\xff", 60)
    assert await answers.begin("a", b"two") == b"answer\n\x00\xff"


async def test_a_record_that_is_taken_away_leaves_room_for_another(answers: Answers) -> None:
    await answers.begin("a", b"one")

    assert await answers.replace("a", b"one", b"", 60)
    assert not await answers.replace("a", b"one", b"late", 60)
    assert await answers.begin("a", b"two") is None


async def test_a_burst_of_keys_waits_for_its_turn(answers: Answers) -> None:
    found = await asyncio.gather(*(answers.begin(f"burst-{number}", b"one") for number in range(300)))

    assert found == [None] * 300


async def test_requests_with_keys_take_no_connection_from_the_queue(valkey: Server) -> None:
    settings = Settings(
        engines=(), redis_url=valkey.url, pool=f"keys-{next(_POOLS)}", listen="127.0.0.1:0", admin_listen="127.0.0.1:0"
    )
    async with Gateway(settings, log=QUIET) as gateway:
        assert isinstance(gateway._answers, RedisAnswers)
        assert isinstance(gateway.owner._queue, RedisQueue)
        clients = gateway._answers._client, gateway.owner._queue._client

    assert clients[0].connection_pool is not clients[1].connection_pool


async def test_in_memory_a_record_ends_with_its_lifetime() -> None:
    now_s = 0.0
    answers = MemoryAnswers(lambda: now_s)
    await answers.begin("a", b"one")

    now_s = LEASE_S - 0.1
    assert await answers.begin("a", b"two") == b"one"
    now_s = LEASE_S
    assert await answers.begin("a", b"two") is None


async def test_in_the_store_every_record_has_a_lifetime_and_shares_the_pools_slot(valkey: Server) -> None:
    async with connect(valkey.url) as client:
        answers = RedisAnswers(client, "mine")
        await answers.begin("a", b"one")
        leased_ms = await client.pttl(answer_key("mine", "a"))
        await answers.replace("a", b"one", b"two", 3.0)
        kept_ms = await client.pttl(answer_key("mine", "a"))

    assert 0 < leased_ms <= LEASE_S * 1000
    assert 0 < kept_ms <= 3000
    assert answer_key("mine", "a").startswith("hr:{mine}:")


async def test_a_store_that_is_not_there_is_told() -> None:
    async with connect("redis://127.0.0.1:1") as client:
        answers = RedisAnswers(client, "mine")

        with pytest.raises(AnswersUnavailable):
            await answers.begin("a", b"one")
