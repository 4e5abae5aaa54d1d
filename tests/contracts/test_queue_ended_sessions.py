"""A session that was ended is not one that was lost: nobody behind it can be cut off and alive.

Apart from the suite, since the frozen release that the suite runs beside this one tells both alike.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.queue.base import Queue, Session, SessionReport
from gateway.queue.memory_queue import MemoryQueue
from gateway.queue.redis_client import connect
from policies.vocabulary import Work
from tests.contracts.conftest import NOW_MS, pool_on
from tests.redis_servers import Server

ENDED, SILENT = Session("ended", 1), Session("silent", 1)


@pytest.fixture(params=["memory", "valkey"])
async def queue(request: pytest.FixtureRequest, valkey: Server) -> AsyncIterator[Queue]:
    if request.param == "memory":
        yield MemoryQueue(lambda: NOW_MS)
        return
    async with pool_on(connect(valkey.url), "ended sessions") as one:
        yield one


async def test_a_leader_hears_of_the_works_of_an_ended_session_and_only_of_others_that_they_were_lost(
    queue: Queue,
) -> None:
    for session in (ENDED, SILENT):
        await queue.renew_session(session, now_ms=NOW_MS, valid_for_ms=1_000, report=SessionReport())
        work = Work(f"of {session.id}", "bulk", "t", "m", "/v1/completions", accepted_s=0, rank=0)
        await queue.enqueue_many([work], session=session, max_queue={"bulk": 9}, now_ms=NOW_MS)
    ended = await queue.end_session(ENDED)

    heard = await queue.expire_sessions(now_ms=NOW_MS + 1_000, after_seq=0)

    assert ended.sessions == ("ended",)
    assert heard.owner_gone == ("of ended", "of silent")
    assert heard.sessions == ("silent",)
