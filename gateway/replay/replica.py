"""One gateway process of a replay: the parts that `gateway.app` puts together, without those of the network.

Engines are open from the start, and nothing calls them through an adapter: works go to their hosts by themselves.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import cast

from backends.base import Backend
from gateway.clock import PoolClock
from gateway.control.policy_store import PolicyStore
from gateway.control.poller import Poller
from gateway.control.roster import Engine, Roster
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.flow import Flow
from gateway.dispatch.ledger import Ledger
from gateway.dispatch.member import Member
from gateway.logs import Log
from gateway.queue.base import Queue
from gateway.replay.host import EngineHost
from gateway.replay.loop import VirtualLoop
from gateway.settings import EngineSettings
from policies.schema import Policy
from policies.sizing import SizingPolicy
from policies.vocabulary import Decision, Grant, Work

POLL_S = 0.5


class Replica:
    """See the module header."""

    def __init__(
        self,
        number: int,
        *,
        of: int,
        seed: int,
        policy: Policy,
        sizing: SizingPolicy,
        queue: Queue,
        hosts: Mapping[str, EngineHost],
        loop: VirtualLoop,
        on_decision: Callable[[Decision], None],
        log: Log,
    ) -> None:
        """number, of: which one of how many."""
        rng = random.Random(f"replica {number} of replay {seed}")
        self.sizing = sizing
        self.clock = PoolClock(loop.time, offset_s=0.0)
        self.flow = Flow()
        store = PolicyStore(None, log=log, clock=self.clock, policy=policy)
        ledger = Ledger()
        self.roster = Roster(
            Engine(
                EngineSettings(name, f"http://{name}", spot=host.spec.interrupted_at_s is not None),
                ledger[name],
                POLL_S,
                backend=cast("Backend", host),
            )
            for name, host in hosts.items()
        )
        self._member = Member(
            queue,
            session_id=f"{number:016x}",
            sole=of == 1,
            candidate=True,
            store=store,
            sizing=self.sizing,
            roster=self.roster,
            ledger=ledger,
            clock=self.clock,
            rng=rng,
            log=log,
            open_kind=_never_opened,
            sink=on_decision,
            on_heard=lambda _engine: self.dispatcher.wake_if_waiting(),
            make_dispatcher=TimedDispatcher,
        )
        self.presence, self.owner = self._member.presence, self._member.owner
        self.dispatcher = cast("TimedDispatcher", self._member.dispatcher)
        self._poller = Poller(
            self.roster,
            _already_open,
            clock=self.clock,
            poll_s=POLL_S,
            rng=rng,
            active=lambda: self.presence.leads,
            on_heard=lambda _engine: self.dispatcher.wake_if_waiting(),
        )
        self._running: list[asyncio.Task[None]] = []

    async def start(self, background: asyncio.TaskGroup) -> None:
        await self.presence.beat()
        if self.presence.leads:
            await self._poller.once(POLL_S)
        await self._member.herald.once()
        self._running.append(background.create_task(self._batch(), name="batcher"))
        self._running.append(background.create_task(self._poller.run(), name="poller"))
        for name, one in self._member.background().items():
            self._running.append(background.create_task(one(), name=name))

    def stop(self) -> None:
        for task in self._running:
            task.cancel()

    async def _batch(self) -> None:
        async with self._member.batcher:
            await asyncio.get_running_loop().create_future()


class TimedDispatcher(Dispatcher):
    """A dispatcher that keeps how long its decisions take, in seconds of this thread's CPU time."""

    __slots__ = ("decision_s",)

    def __init__(self, **parts: object) -> None:
        super().__init__(**parts)  # type: ignore[arg-type]  # passed through as they are
        self.decision_s: list[float] = []

    def start_now(self, work: Work) -> Grant | None:
        begun_s = time.thread_time()
        grant = super().start_now(work)
        self.decision_s.append(time.thread_time() - begun_s)
        return grant

    async def round(self) -> bool:
        begun_s = time.thread_time()
        placed = await super().round()
        self.decision_s.append(time.thread_time() - begun_s)
        return placed


async def _never_opened(engine: Engine, kind: str) -> Backend:
    raise AssertionError(f"engine {engine.name}: kind {kind}: engines of a replay are open from the start")


async def _already_open(engine: Engine) -> Backend | None:
    return engine.backend
