"""What sessions tell of their attempts: kept for a leader until it has read them, each in its order, none twice unknown."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.queue import memory_queue, redis_queue
from gateway.queue.base import Answered, Began, Ended, Grew, Queue, Session, SessionReport, Told
from gateway.queue.memory_queue import MemoryQueue
from gateway.queue.redis_client import connect
from policies.vocabulary import Outcome, Result, Work
from tests.contracts.conftest import pool_on
from tests.redis_servers import Server

NOW = 1_800_000_000_000
ME, OTHER = Session("gateway/1", 7), Session("gateway-2", 1)
WORK = Work("id/1", "chat", "acme", "m", "/v1/completions", 1.5, 0.0, 12, 99, 2, 0.1 + 0.2)
OUTCOME = Outcome("", "", "", "", "", Result.COMPLETED, "", 200, 1, 12, 34, 1.5, None, 0.1 + 0.2, 0.25, 8)
LIFE = (
    Began(WORK, "gpu 0", 1),
    Answered(1, 0.25),
    Grew(3, ((1, 17),)),
    Ended(1, OUTCOME),
    Began(WORK, "gpu/1", 1, 5, prefilled=True),
    Ended(5, None),
)


@pytest.fixture(params=["memory", "valkey"])
async def queue(request: pytest.FixtureRequest, valkey: Server) -> AsyncIterator[Queue]:
    if request.param == "memory":
        yield MemoryQueue(lambda: NOW)
        return
    async with pool_on(connect(valkey.url), "events") as one:
        yield one


def told(first: int, *events: Began | Answered | Grew | Ended) -> tuple[Told, ...]:
    return tuple(Told(number, NOW + number, event) for number, event in enumerate(events, first))


async def renew(queue: Queue, *events: Told, session: Session = ME, now_ms: int = NOW) -> None:
    await queue.renew_session(session, now_ms=now_ms, valid_for_ms=5_000, report=SessionReport(events=events))


async def numbers(queue: Queue, session: Session = ME, *, after_seq: int = 0) -> list[int]:
    heard = await queue.hear(now_ms=NOW, after_seq=after_seq)
    return [one.number for one in heard.events.get(session, ())]


async def test_events_are_heard_as_they_were_told_and_stand_in_no_report(queue: Queue) -> None:
    await renew(queue, *told(1, *LIFE))

    heard = await queue.hear(now_ms=NOW)

    assert heard.events == {ME: told(1, *LIFE)}
    assert heard.reports == {ME: SessionReport(renewed_ms=NOW)}


async def test_a_renewal_that_brings_a_new_report_leaves_what_was_told_before(queue: Queue) -> None:
    await renew(queue, *told(1, LIFE[0]))
    await renew(queue)
    await renew(queue, *told(2, LIFE[1]), now_ms=NOW + 500)

    assert await numbers(queue) == [1, 2]


async def test_what_the_leader_has_read_is_forgotten_and_the_rest_stays(queue: Queue) -> None:
    await renew(queue, *told(1, LIFE[0]))
    read = await queue.hear(now_ms=NOW)
    await renew(queue, *told(1, LIFE[0]), session=OTHER)

    assert await numbers(queue, after_seq=read.seq) == []
    assert await numbers(queue, OTHER) == [1]
    assert (await queue.hear(now_ms=NOW, after_seq=read.seq)).seq > read.seq


async def test_a_call_whose_reply_was_lost_hears_the_same_again(queue: Queue) -> None:
    await renew(queue, *told(1, *LIFE))

    assert await queue.hear(now_ms=NOW) == await queue.hear(now_ms=NOW)


async def test_a_repeated_renewal_tells_the_same_numbers_again(queue: Queue) -> None:
    await renew(queue, *told(1, *LIFE[:1]))
    await renew(queue, *told(1, *LIFE[:2]))

    assert await numbers(queue) == [1, 1, 2]


async def test_what_an_ended_session_told_is_heard_all_the_same(queue: Queue) -> None:
    await renew(queue, *told(1, *LIFE[:2]))
    await queue.end_session(ME)

    assert await numbers(queue) == [1, 2]


async def test_unread_renewals_are_bounded_and_the_oldest_go_first(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_queue, "TOLD_KEPT", 3)
    monkeypatch.setattr(redis_queue, "TOLD_KEPT", 3)
    if isinstance(queue, MemoryQueue):
        queue.forget()

    for number in range(1, 6):
        await renew(queue, *told(number, LIFE[0]))

    assert await numbers(queue) == [3, 4, 5]


async def test_a_kind_of_event_that_is_not_known_keeps_its_number(valkey: Server) -> None:
    async with pool_on(connect(valkey.url), "newer events") as queue:
        await renew(queue)
        rows = f'[4,[["x",{NOW},"further"],["a",{NOW + 5},1,0.25,"further"]]]'
        await queue._client.zadd(queue._key["told"], {f"gateway%2F1/7/9\n{rows}": 9})
        await queue._client.pexpire(queue._key["told"], 60_000)

        assert (await queue.hear(now_ms=NOW)).events == {ME: told(5, Answered(1, 0.25))}
