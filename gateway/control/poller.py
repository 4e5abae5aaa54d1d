"""Asks every engine how it is: one task an engine, so that a slow one delays nobody.

A poll is a probe (does it serve, which models) and a sample (its metrics). Each is bounded by the adapter; a sample that
fails leaves the last one to age, since unknown is not zero and a late scrape is not a dead engine (MET-04). While an
engine's kind is unknown each poll tries to find it out.

An engine that was down, or is out of rotation, is tried out when its time has come (`gateway.control.standing`): it has to
make a token, since pages say 200 before a model is loaded, while it is paused, and after its engine died.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from backends.base import UNSEEN, Backend, BackendError
from gateway.clock import Clock
from gateway.control.roster import Engine, Roster
from policies.vocabulary import EngineState

TRIAL_S = 10.0
"""Bound on the one token of a trial. Nothing else is polled of that engine meanwhile; it gets no work from us."""

Opener = Callable[[Engine], Awaitable[Backend | None]]
"""Makes the engine's backend, detecting its kind if need be; None while nobody answers."""


class Poller:
    """See the module header. `on_heard` is called after each poll, so that a returned engine gets work at once."""

    __slots__ = ("_active", "_clock", "_on_heard", "_open", "_poll_s", "_rng", "_roster", "_woken")

    def __init__(
        self,
        roster: Roster,
        open_backend: Opener,
        *,
        clock: Clock,
        poll_s: float,
        rng: random.Random,
        active: Callable[[], bool],
        on_heard: Callable[[Engine], None],
    ) -> None:
        """active: whether to poll now; only a pool's leader does, the others read what it publishes."""
        self._roster = roster
        self._open = open_backend
        self._clock = clock
        self._poll_s = poll_s
        self._rng = rng
        self._active = active
        self._on_heard = on_heard
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Poll all engines until cancelled."""
        async with asyncio.TaskGroup() as group:
            for engine in self._roster:
                group.create_task(self._poll_forever(engine), name=f"poll {engine.name}")

    async def once(self, within_s: float) -> None:
        """Poll each engine once, concurrently; engines that take longer are left to `run`."""
        try:
            async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
                for engine in self._roster:
                    group.create_task(self._poll(engine))
        except TimeoutError:
            return

    def wake(self) -> None:
        """Poll every engine as soon as the loop turns: this process has begun to lead, and what it knows is old."""
        woken, self._woken = self._woken, asyncio.Event()
        woken.set()

    async def _poll_forever(self, engine: Engine) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s * self._rng.uniform(0.9, 1.1)):
                    await self._woken.wait()
            if self._active():
                await self._poll(engine)

    async def _poll(self, engine: Engine) -> None:
        if engine.backend is None:
            engine.backend = await self._open(engine)
            if engine.backend is None:
                return
        was_down = engine.state is EngineState.DOWN
        probe = await engine.backend.probe()
        if probe.ready and was_down and engine.settings.kind == "auto":
            await self._recognise(engine)
        if probe.ready and engine.standing.trial_due_s <= self._clock.now_s():
            problem = await engine.backend.try_generation(TRIAL_S)
            engine.standing.tried(problem, pool_s=self._clock.pool_s(), now_s=self._clock.now_s())
        unsampled = ""
        if probe.ready:  # sampled before it is up, so that nobody judges its room by what it said before an outage
            asked_s = self._clock.now_s()
            try:
                engine.sampled(await engine.backend.sample(), self._clock.now_s(), asked_s=asked_s)
            except BackendError as error:
                unsampled = str(error)
        engine.heard(probe, self._clock.now_s())
        if unsampled:
            engine.detail = unsampled
        self._on_heard(engine)

    async def _recognise(self, engine: Engine) -> None:
        """What answers at an address after an outage may be another kind of engine: find out before it gets work."""
        found = await self._open(engine)
        before = engine.backend
        if found is None or before is None:
            return
        if found.kind == before.kind:
            await found.close()
            return
        engine.backend = found
        engine.sample = UNSEEN
        await before.close()
