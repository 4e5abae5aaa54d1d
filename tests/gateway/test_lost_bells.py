"""Two processes whose bells are all lost: a work of the one is granted by the other, idle until then, within two timers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gateway.dispatch.dispatcher import TICK_S
from gateway.dispatch.owner import TAKE_S
from gateway.queue.base import Session
from gateway.queue.memory_queue import MemoryQueue
from gateway.replay.loop import run
from policies.vocabulary import Work
from tests.gateway.members import START_S, member
from tests.policies.worlds import policy

POLICY = policy("version: 1\nclasses: {night: {}}\nsizing: {fixed: {total: 4, windows: {night: 4}}}\n")
LEADS_AFTER_S = 10.0


class NoBells(MemoryQueue):
    """A store whose bells nobody hears."""

    async def bell(self, session: Session | None) -> AsyncGenerator[None, None]:
        await asyncio.Event().wait()
        yield


async def granted_after_s() -> float:
    loop = asyncio.get_running_loop()
    queue = NoBells(lambda: int((START_S + loop.time()) * 1000))
    leader, other = member(queue, "leader", POLICY, candidate=True), member(queue, "other", POLICY, candidate=False)
    async with leader.batcher, other.batcher, asyncio.TaskGroup() as group:
        tasks = []
        for one in (leader, other):
            await one.presence.beat()
            parts = (one.presence, one.dispatcher, one.owner)
            tasks += [group.create_task(part.run()) for part in parts]
        await asyncio.sleep(LEADS_AFTER_S)
        assert leader.presence.leads
        now_s = loop.time()
        work = Work("w", "night", "t", "m", "/v1/completions", START_S + now_s, 0.0, prompt_tokens=10)
        async with asyncio.timeout(30.0):
            grant = await other.owner.wait(work, {"night": 9})
        took_s = loop.time() - now_s
        other.owner.finished(work, grant, None)
        for task in tasks:
            task.cancel()
    return took_s


def test_a_work_whose_bells_are_all_lost_is_granted_within_a_tick_of_the_leader_and_one_of_its_owner() -> None:
    assert run(granted_after_s()) <= TICK_S + TAKE_S + 0.01
