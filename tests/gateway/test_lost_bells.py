"""Two processes whose bells are all lost: a work of the one is granted by the other, idle until then, within two timers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from backends.base import ModelCard, Probe
from gateway.clock import PoolClock
from gateway.control.policy_store import PolicyStore
from gateway.control.roster import Engine, Roster
from gateway.dispatch.dispatcher import TICK_S
from gateway.dispatch.ledger import Ledger
from gateway.dispatch.member import Member
from gateway.dispatch.owner import TAKE_S
from gateway.queue.base import Session
from gateway.queue.memory_queue import MemoryQueue
from gateway.replay.loop import run
from gateway.settings import EngineSettings
from policies.limits import FollowingSizing
from policies.vocabulary import Work
from tests.gateway.replay.quiet import QUIET
from tests.policies.worlds import policy

POLICY = policy("version: 1\nclasses: {night: {}}\nsizing: {fixed: {total: 4, windows: {night: 4}}}\n")
START_S = 1000.0
LEADS_AFTER_S = 10.0


class NoBells(MemoryQueue):
    """A store whose bells nobody hears."""

    async def bell(self, session: Session | None) -> AsyncGenerator[None, None]:
        await asyncio.Event().wait()
        yield


def member(queue: MemoryQueue, name: str, *, candidate: bool) -> Member:
    clock = PoolClock(asyncio.get_running_loop().time, offset_s=START_S)
    ledger = Ledger()
    speaks: Any = SimpleNamespace(speaks=lambda _path: True, kind="vllm")
    engine = Engine(EngineSettings("e", "http://e"), ledger["e"], 0.5, backend=speaks)
    engine.heard(Probe(ready=True, models=(ModelCard("m", {}, None),)), 0.0)

    async def never(_engine: Engine, _kind: str) -> Any:
        raise AssertionError("the engine is open")

    return Member(
        queue,
        session_id=name,
        sole=False,
        candidate=candidate,
        store=PolicyStore(None, log=QUIET, clock=clock, policy=POLICY),
        sizing=FollowingSizing(POLICY),
        roster=Roster([engine]),
        ledger=ledger,
        clock=clock,
        rng=random.Random(1),
        log=QUIET,
        open_kind=never,
        sink=lambda _decision: None,
        on_heard=lambda _engine: None,
    )


async def granted_after_s() -> float:
    loop = asyncio.get_running_loop()
    queue = NoBells(lambda: int((START_S + loop.time()) * 1000))
    leader, other = member(queue, "leader", candidate=True), member(queue, "other", candidate=False)
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
