"""A look-ahead tells whose each work is, so that a leader grants nothing to a process that does not read it.

Apart from the suite, since the frozen release that the suite runs beside this one does not tell it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.queue.base import Queue, Session, SessionReport
from gateway.queue.memory_queue import MemoryQueue
from gateway.queue.redis_client import connect
from policies.vocabulary import BodyAt, Work
from tests.contracts.conftest import NOW_MS, pool_on
from tests.redis_servers import Server

HERE, GONE = Session("here/é", 3), Session("gone", 1)


@pytest.fixture(params=["memory", "valkey"])
async def queue(request: pytest.FixtureRequest, valkey: Server) -> AsyncIterator[Queue]:
    if request.param == "memory":
        yield MemoryQueue(lambda: NOW_MS)
        return
    async with pool_on(connect(valkey.url), "owners") as one:
        yield one


async def test_a_look_ahead_tells_whose_each_work_is_and_leaves_out_what_is_nobodys(queue: Queue) -> None:
    for session, body in ((HERE, BodyAt.OWNER), (GONE, BodyAt.BLOB)):
        await queue.renew_session(session, now_ms=NOW_MS, valid_for_ms=1_000, report=SessionReport())
        work = Work(f"of {session.id}", "bulk", "t", "m", "/v1/completions", accepted_s=0, rank=0, body=body)
        await queue.enqueue_many([work], session=session, max_queue={"bulk": 9}, now_ms=NOW_MS)

    both = await queue.peek(bounds={}, default_bound=9, now_ms=NOW_MS)
    await queue.end_session(GONE)
    left = await queue.peek(bounds={}, default_bound=9, now_ms=NOW_MS)
    await queue.settle_many([("of here/é", 0), ("of gone", 0)], session=HERE, now_ms=NOW_MS)

    assert both.owners == {"of here/é": HERE, "of gone": GONE}
    assert {work.id for work in left.works} == {"of here/é", "of gone"}
    assert left.owners == {"of here/é": HERE}
