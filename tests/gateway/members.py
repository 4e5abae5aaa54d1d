"""Processes of a pool without their HTTP: a member with one engine `e`, on a queue that the test holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from backends.base import ModelCard, Probe
from gateway.clock import PoolClock
from gateway.control.policy_store import PolicyStore
from gateway.control.roster import Engine, Roster
from gateway.dispatch.ledger import Ledger
from gateway.dispatch.member import Member
from gateway.queue.base import Queue
from gateway.settings import EngineSettings
from policies.limits import FollowingSizing
from policies.schema import Policy
from tests.gateway.replay.quiet import QUIET

START_S = 1000.0


def member(
    queue: Queue, name: str, policy: Policy, *, candidate: bool, now_s: Callable[[], float] | None = None
) -> Member:
    """now_s: of the pool, in place of START_S and the loop's time since."""
    clock = PoolClock(now_s or asyncio.get_running_loop().time, offset_s=0.0 if now_s else START_S)
    ledger = Ledger()
    speaks: Any = SimpleNamespace(speaks=lambda _path: True, kind="vllm")
    engine = Engine(EngineSettings("e", "http://e"), ledger["e"], 0.5, backend=speaks)
    engine.heard(Probe(ready=True, models=(ModelCard("m", {}, None),)), clock.now_s())

    async def never(_engine: Engine, _kind: str) -> Any:
        raise AssertionError("the engine is open")

    return Member(
        queue,
        session_id=name,
        sole=False,
        candidate=candidate,
        store=PolicyStore(None, log=QUIET, clock=clock, policy=policy),
        sizing=FollowingSizing(policy),
        roster=Roster([engine]),
        ledger=ledger,
        clock=clock,
        rng=random.Random(1),
        log=QUIET,
        open_kind=never,
        sink=lambda _decision: None,
        on_heard=lambda _engine: None,
    )
