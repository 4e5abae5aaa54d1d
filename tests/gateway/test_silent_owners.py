"""What a dead process had waiting takes no place: a grant to it would hold one for the rest of its session, and as long again."""

from __future__ import annotations

import asyncio

from gateway.dispatch.dispatcher import TICK_S
from gateway.dispatch.others import SILENT_S
from gateway.dispatch.queued import LOOK_AHEAD_OTHER
from gateway.queue.memory_queue import MemoryQueue
from gateway.replay.loop import run
from policies.vocabulary import Grant, Work
from tests.gateway.members import START_S, member
from tests.policies.worlds import policy

PLACES = 4
POLICY = policy(
    f"version: 1\nclasses: {{night: {{}}}}\nsizing: {{fixed: {{total: {PLACES}, windows: {{night: {PLACES}}}}}}}\n"
)
LEADS_AFTER_S = 10.0
BOUNDS = {"night": 999}


def work(name: str, rank: float) -> Work:
    accepted_s = START_S + asyncio.get_running_loop().time()
    return Work(name, "night", "t", "m", "/v1/completions", accepted_s, rank, prompt_tokens=10)


async def granted_after_s(silent_for_s: float, left_works: int) -> float:
    """How long after places came free a work of the leader starts, behind so many works of a process that died."""
    loop = asyncio.get_running_loop()
    queue = MemoryQueue(lambda: int((START_S + loop.time()) * 1000))
    leader, dead = member(queue, "leader", POLICY, candidate=True), member(queue, "dead", POLICY, candidate=False)
    async with leader.batcher, dead.batcher, asyncio.TaskGroup() as group:

        async def granted(name: str, rank: float) -> tuple[Work, Grant]:
            one = work(name, rank)
            return one, await leader.owner.wait(one, BOUNDS)

        await dead.presence.beat()
        await leader.presence.beat()
        parts = (leader.presence, leader.dispatcher, leader.owner)
        tasks = [group.create_task(part.run()) for part in parts]
        dies = group.create_task(dead.presence.run())
        await asyncio.sleep(LEADS_AFTER_S)
        full = [await granted(f"runs {number}", 0.0) for number in range(PLACES)]
        left = [group.create_task(dead.owner.wait(work(f"left {number}", 1.0), BOUNDS)) for number in range(left_works)]
        last = group.create_task(granted("last", 2.0))
        await asyncio.sleep(1.0)

        dies.cancel()
        await asyncio.sleep(silent_for_s)
        free_s = loop.time()
        for one, grant in full:
            leader.owner.finished(one, grant, None)
        async with asyncio.timeout(60.0):
            await last
        took_s = loop.time() - free_s
        for task in (*tasks, *left):
            task.cancel()
    return took_s


def test_a_place_that_is_free_once_a_process_is_silent_goes_to_one_that_reads_its_grants() -> None:
    assert run(granted_after_s(SILENT_S + 2 * TICK_S, 2 * PLACES)) <= TICK_S


def test_more_works_of_a_silent_process_than_a_round_looks_at_hide_nobody_behind_them() -> None:
    assert run(granted_after_s(SILENT_S + 2 * TICK_S, 3 * LOOK_AHEAD_OTHER)) <= TICK_S
