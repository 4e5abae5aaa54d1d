"""The composition root: the only file that names concrete classes, and the one that starts and stops them in order.

    start   queue → presence → engines heard once → owner, dispatcher, service → listeners
    stop    listeners → what runs → queue entries → presence → engines → queue

Everything that runs in the background is a task of one TaskGroup, so that a bug in one of them ends the process with a
traceback instead of leaving it half alive. Time, randomness and the queue can be handed in: the same gateway runs on a
virtual loop against a queue in memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from enum import StrEnum
from importlib.metadata import version
from types import TracebackType
from typing import Self

from backends.base import Backend, EngineAddress
from backends.connection import EnginePool
from backends.detect import detect, make_backend
from backends.gpu.base import GpuSource
from backends.gpu.dcgm import DcgmSource
from backends.gpu.nvml import NvmlSource, NvmlThread
from backends.simulated.profiles import load_profile
from gateway.addresses import parse_listen
from gateway.admin.listener import bound, listen_admin, url_of
from gateway.admin.overview import Overview
from gateway.background import Background
from gateway.clock import PoolClock
from gateway.control.catalogue import Catalogue
from gateway.control.energy import EnergyBook, tell_costs
from gateway.control.engine_log import EngineLog
from gateway.control.gpu_watch import GpuWatch, gpu_source_kind
from gateway.control.health import HealthWatch
from gateway.control.policy_store import PolicyStore
from gateway.control.poller import Poller
from gateway.control.roster import Engine, Roster
from gateway.control.self_check import SelfCheck
from gateway.control.standing import Why
from gateway.dispatch.ledger import Ledger
from gateway.dispatch.member import Member
from gateway.dispatch.service import Service
from gateway.dispatch.watchdog import Watchdog
from gateway.errors import StartError
from gateway.idempotency.answers import Answers, MemoryAnswers, RedisAnswers
from gateway.idempotency.gate import Idempotent
from gateway.ingress.auth import KeyRing
from gateway.ingress.keys_file import KeysFile
from gateway.ingress.server import Ingress
from gateway.instruments import (
    ENGINE_FALLS,
    EVENTS_DROPPED,
    LOOP_LAG,
)
from gateway.logs import Log
from gateway.observe.tracing import Tracer
from gateway.queue.base import Queue, QueueUnavailable
from gateway.queue.embedded import EmbeddedValkey
from gateway.queue.redis_client import connect
from gateway.queue.redis_queue import OnCall, RedisQueue
from gateway.queue.store_url import shown
from gateway.recorder import Recorder, installation_key
from gateway.settings import Settings
from gateway.telemetry import Telemetry
from policies.behaviour import Behaviours
from policies.limits import FollowingSizing
from policies.schema import Policy
from policies.vocabulary import Decision, EngineState, Outcome

FIRST_POLL_S = 3.0
HEARD_WAIT_S = 5.0
"""For somebody to lead (after a validity of 2 s when the store is new) and to hear an engine; after that, without."""
HEARD_LOOK_S = 0.1
LAG_EVERY_S = 0.5
DECISIONS_KEPT = 64
JUDGE_S = 0.25


class Role(StrEnum):
    """What a process of a gateway does.

    SOLO      everything: accepts requests, and leads the pool when nobody else does; has both listeners
    DECIDER   polls engines and leads (or waits to); accepts no requests
    WORKER    serves the connections that `gateway.workers.worker` hands to its ingress; never leads
    """

    SOLO = "solo"
    DECIDER = "decider"
    WORKER = "worker"


class Gateway:
    """One gateway process, running while its context lasts.

    public_url, admin_url   where it listens; set once entered
    """

    def __init__(
        self,
        settings: Settings,
        *,
        log: Log,
        queue: Queue | None = None,
        clock: PoolClock | None = None,
        rng: random.Random | None = None,
        sole: bool | None = None,
        store_outlives_us: bool = True,
        role: Role = Role.SOLO,
        on_outcome: Callable[[Outcome], None] | None = None,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> None:
        """Prepare; nothing runs before the context is entered.

        queue                     use this one; its owner closes it
        sole                      nobody else shares the queue; by default when it is the embedded one
        store_outlives_us         the embedded store waits for the next gateway when this process is killed
        role                      what this process does of all that; see Role
        on_outcome, on_decision   told of each, synchronously
        """
        self.settings = settings
        self.public_url = self.admin_url = ""
        self._log = log
        self._given_queue = queue
        self._clock = clock or PoolClock()
        self._rng = rng or random.Random()
        self._sole = sole if sole is not None else queue is None and settings.redis_url is None
        self._store_outlives_us = store_outlives_us
        self._role = role
        self._on_outcome = on_outcome
        self._on_decision = on_decision
        self._stack = AsyncExitStack()
        self._valkey: EmbeddedValkey | None = None
        self._answers: Answers
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._build(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def drain(self) -> bool:
        """Accept nothing new and wait for what is under way, at most drain_s. False: something still ran."""
        return await self.ingress.drain(self.settings.timeouts.drain_s)

    async def _build(self, stack: AsyncExitStack) -> None:
        settings = self.settings
        self.telemetry = Telemetry(version=version("headrace"), longest_s=settings.timeouts.total_s)
        self.store = PolicyStore(
            settings.policy_file,
            engines=[engine.name for engine in settings.engines],
            log=self._log,
            clock=self._clock,
        )
        # From the moment that it is read on: a start can take seconds, and who decides then must not go by what it once was.
        watched = await stack.enter_async_context(Background())
        watched.start("policy", self.store.run())
        keys = None if settings.keys_file is None else KeysFile(settings.keys_file, self._log)
        no_keys = KeyRing()
        queue = await self._open_queue(stack)

        recorder = self._open_recorder(stack, session_id := f"{self._rng.getrandbits(64):016x}")

        profiles = {
            engine.name: load_profile(engine.profile).step_model
            for engine in settings.engines
            if engine.profile is not None
        }
        self.ledger = Ledger()
        self.roster = Roster(Engine(engine, self.ledger[engine.name], settings.poll_s) for engine in settings.engines)
        self.sizing = FollowingSizing(self.store.current)
        self.store.subscribe(self._policy_changed)
        self.behaviours = Behaviours(processes=settings.workers or os.cpu_count() or 1)
        self.member = Member(
            queue,
            session_id=session_id,
            sole=self._sole,
            candidate=self._role is not Role.WORKER,
            serves=self._role is not Role.DECIDER,
            store=self.store,
            sizing=self.sizing,
            roster=self.roster,
            ledger=self.ledger,
            clock=self._clock,
            rng=self._rng,
            log=self._log,
            open_kind=self._open_kind,
            sink=self._decided,
            meter=self.telemetry,
            on_heard=self._heard,
            on_led=self._led,
            behaviours=self.behaviours,
        )
        self.presence, self.owner, self.dispatcher = self.member.presence, self.member.owner, self.member.dispatcher
        self.watchdog = Watchdog(self._clock)
        self.service = Service(
            settings=settings,
            store=self.store,
            owner=self.owner,
            dispatcher=self.dispatcher,
            roster=self.roster,
            capacity=self.member.capacity,
            behaviours=self.behaviours,
            sink=self._decided,
            watchdog=self.watchdog,
            telemetry=self.telemetry,
            clock=self._clock,
            rng=self._rng,
            log=self._log,
            work_ids=session_id,
            on_outcome=self._on_outcome,
            record=None if recorder is None else recorder.record,
            tracer=self._open_tracer(stack, session_id),
        )
        self.poller = Poller(
            self.roster,
            self._open_backend,
            clock=self._clock,
            poll_s=settings.poll_s,
            rng=self._rng,
            active=lambda: self.presence.leads,
            on_heard=self._polled,
        )
        self.energy = EnergyBook(self.telemetry, clock=self._clock.now_s, kwh_price=settings.kwh_price)
        self.health = HealthWatch(
            self.roster,
            failures=settings.health.failures,
            silence_s=settings.health.silence_s,
            vitals=self.dispatcher.vitals,
            on_change=self._engine_changed,
        )
        self.engine_log = EngineLog(self.roster, self._log)
        self.self_check = SelfCheck(self.roster, alive_s=self.health.alive_s, log=self._log)
        self.nvml = NvmlThread(self._clock.now_s)
        stack.callback(self.nvml.close)
        self.gpu_watch = GpuWatch(
            [
                (engine, source)
                for engine in self.roster
                if self._role is not Role.WORKER and (source := self._open_gpu(engine)) is not None
            ],
            clock=self._clock,
            rng=self._rng,
            active=lambda: self.presence.leads,
            on_energy=lambda name, busy_j, idle_j: self.energy.used(self.roster[name], busy_j, idle_j),
            log=self._log,
        )
        stack.push_async_callback(self.gpu_watch.close)
        self.idempotent = Idempotent(
            self.service,
            self._answers,
            keep_s=settings.idempotency_s,
            name=session_id,
            clock=self._clock,
            telemetry=self.telemetry,
            log=self._log,
        )
        self.ingress = Ingress(
            settings,
            self.idempotent,
            Catalogue(self.roster, dict(settings.aliases)),
            capacity=self.member.capacity.answer,
            keys=lambda: no_keys if keys is None else keys.current,
            clock=self._clock,
            rng=self._rng,
            log=self._log,
            on_refusal=self.telemetry.refused,
        )
        self.overview = Overview(
            pool=settings.pool,
            store=self.store,
            roster=self.roster,
            sizing=self.sizing,
            presence=self.presence,
            dispatcher=self.dispatcher,
            gpu_watch=self.gpu_watch,
            ingress=self.ingress,
            clock=self._clock,
            profiles=profiles,
            decisions=self._decisions,
            public_url=lambda: self.public_url,
        )
        self.telemetry.on_refresh(self.overview.refresh)
        self.telemetry.on_refresh(self.energy.tell)
        if self._role is Role.SOLO:  # of several processes the one that merges their pages knows what was served
            self.telemetry.on_refresh(tell_costs)

        stack.push_async_callback(self._close_backends)
        stack.push_async_callback(self.presence.leave)
        await self._hear_of_engines()
        await stack.enter_async_context(self.member.batcher)
        stack.push_async_callback(self._flush_owner)
        tasks = await stack.enter_async_context(Background())
        runs = dict(self.member.background())
        runs["loop lag"] = self._watch_lag
        if self._role is not Role.WORKER:
            runs["poller"] = self.poller.run
            runs["health"] = self._watch_health
            runs["gpu watch"] = self.gpu_watch.run
        if self._role is not Role.DECIDER:
            runs["idempotency"] = self.idempotent.run
            runs["watchdog"] = self.watchdog.run
        if recorder is not None:
            runs["recorder"] = recorder.run
        if keys is not None:
            runs["keys"] = keys.run
        if self._valkey is not None:
            runs["valkey"] = self._valkey.keep_running
        for name, run in runs.items():
            tasks.start(name, run())
        await self._listen(stack)

    async def _open_queue(self, stack: AsyncExitStack) -> Queue:
        if self._given_queue is not None:
            self._answers = MemoryAnswers(self._clock.now_s)
            return self._given_queue
        url = self.settings.redis_url
        if url is None:
            self._valkey = await stack.enter_async_context(
                EmbeddedValkey(self.settings.state_dir, log=self._log, outlives_us=self._store_outlives_us)
            )
            url = self._valkey.url
        queue = open_queue(
            url, pool=self.settings.pool, log=self._log, rng=self._rng, on_call=self.telemetry.redis_call
        )
        stack.push_async_callback(queue.close)
        # On connections of its own: however many requests have keys, the session is renewed.
        client = connect(url, pool=self.settings.pool)
        stack.push_async_callback(client.aclose)
        self._answers = RedisAnswers(client, self.settings.pool)
        try:
            warning = await queue.eviction_warning()
        except QueueUnavailable as error:
            raise StartError(f"redis_url {shown(url)}: {error}; correct it, or start the server") from error
        if warning:
            self._log.warning("queue store may lose entries", reason=warning)
        return queue

    def _open_recorder(self, stack: AsyncExitStack, name: str) -> Recorder | None:
        """The log of traffic, where one is wanted and requests come in."""
        settings = self.settings.recorder
        if settings.folder is None or self._role is Role.DECIDER:
            return None
        state_dir = self.settings.state_dir
        try:
            key = installation_key(state_dir)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StartError(f"state directory {state_dir}: cannot be used ({reason}); give another") from error
        recorder = Recorder(settings, settings.folder, key=key, name=name, wall_s=self._clock.pool_s, log=self._log)
        stack.push_async_callback(recorder.close)
        return recorder

    def _open_tracer(self, stack: AsyncExitStack, name: str) -> Tracer | None:
        """What spans are sent with, where that is wanted and requests come in."""
        settings = self.settings.traces
        if settings.url is None or self._role is Role.DECIDER:
            return None
        try:
            from gateway.observe.otlp import OtlpSpans
        except ModuleNotFoundError as error:
            raise StartError(
                f"traces.url {settings.url}: needs {error.name}, which is not installed; pip install 'headrace[otel]',"
                " or leave traces out"
            ) from None
        clock = self._clock
        spans = OtlpSpans(
            settings.url,
            version=version("headrace"),
            instance=name,
            wall_offset_s=lambda: clock.pool_s() - clock.now_s(),
        )
        stack.push_async_callback(spans.close)
        return Tracer(spans.take, sample_ratio=settings.sample_ratio, rng=self._rng)

    async def _listen(self, stack: AsyncExitStack) -> None:
        """Admin first, so that probes can see the start; the public listener only when all else runs."""
        solo = self._role is Role.SOLO
        if solo:
            self.admin_url = await listen_admin(
                stack,
                self.overview,
                self.telemetry,
                self.settings.admin_listen,
                metrics_listen=self.settings.metrics_listen,
            )
        stack.push_async_callback(self.ingress.close)
        if solo:
            public = parse_listen(self.settings.listen)
            listener = await bound(self.ingress.listen(host=public.host, port=public.port), "listen", public)
            self.public_url = url_of(listener.sockets[0], public) + self.settings.mount_path

    async def _hear_of_engines(self) -> None:
        """Know the engines before anybody asks for one: poll them as the leader, or hear what the leader has published.

        In a store that has no leader yet this takes the leader's validity; without a word of anybody it ends after
        HEARD_WAIT_S, and engines are found while requests are refused.
        """
        until_s = self._clock.now_s() + HEARD_WAIT_S
        while True:
            await self.presence.beat()
            if self.presence.leads:
                await self.poller.once(FIRST_POLL_S)
            await self.member.herald.once()
            heard = not self.roster or any(engine.state is not EngineState.STARTING for engine in self.roster)
            if heard or self.presence.leads or self._clock.now_s() > until_s:
                return
            await asyncio.sleep(HEARD_LOOK_S)

    # -- what parts tell each other --------------------------------------------------------------------------------

    def _decided(self, decision: Decision) -> None:
        self._decisions.append(decision)
        self.telemetry.decision(decision)
        if self._on_decision is not None:
            self._on_decision(decision)

    def _policy_changed(self, old: Policy, new: Policy) -> None:
        self.sizing.adopt(new)
        self.dispatcher.policy_changed(old, new)

    def _polled(self, engine: Engine) -> None:
        self.energy.heard(engine)
        self._heard(engine)

    def _led(self) -> None:
        """This process decides from now on."""
        self.poller.wake()

    def _heard(self, _engine: Engine) -> None:
        """A poll ended: the models known to metrics, and work for an engine that came up."""
        self.telemetry.models_known(frozenset().union(*(one.models for one in self.roster)))
        self.dispatcher.wake_if_waiting()

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(JUDGE_S)
            if self.presence.leads:
                pool_s, now_s = self._clock.pool_s(), self._clock.now_s()
                self.health.judge(pool_s=pool_s, now_s=now_s)
                self.engine_log.look(now_s)
                self.self_check.look(pool_s=pool_s, now_s=now_s)

    def _engine_changed(self, engine: Engine, why: Why | None, detail: str, kept: bool) -> None:
        """An engine left the rotation, returned, or had to stay for want of a better one."""
        if why is None:
            self._log.info("engine is back in rotation", engine=engine.name)
            self.dispatcher.wake()
        elif kept:
            self._log.warning(
                "engine stays in rotation: no other is better", engine=engine.name, why=why, detail=detail
            )
        else:
            self._log.warning("engine is out of rotation", engine=engine.name, why=why, detail=detail)
            self.telemetry.add(ENGINE_FALLS, 1, engine.name, why)

    async def _open_backend(self, engine: Engine) -> Backend | None:
        settings = engine.settings
        pool, metrics = self._pools(engine)
        kind = await detect(pool, metrics_pool=metrics) if settings.kind == "auto" else settings.kind
        if kind is None:
            engine.detail = "does not answer yet"
            for one in filter(None, (pool, metrics)):
                await one.close()
            return None
        if engine.backend is None or engine.backend.kind != kind:  # it is looked at again after each outage
            self._log.info("engine found", engine=settings.name, kind=kind)
        return self._backend(engine, kind, pool, metrics)

    async def _open_kind(self, engine: Engine, kind: str) -> Backend:
        """The adapter of a kind that the leader has found out."""
        if engine.backend is not None:
            await engine.backend.close()
        return self._backend(engine, kind, *self._pools(engine))

    def _backend(self, engine: Engine, kind: str, pool: EnginePool, metrics: EnginePool | None) -> Backend:
        honoured = engine.settings.priority
        address = self._address(engine)
        return make_backend(
            kind, address, pool, monotonic=self._clock.now_s, priority_honoured=honoured, metrics_pool=metrics
        )

    def _pools(self, engine: Engine) -> tuple[EnginePool, EnginePool | None]:
        """Connections to the engine, and to its metrics where those are elsewhere."""
        address, url = self._address(engine), engine.settings.metrics_url
        metrics = None if url is None else EnginePool(dataclasses.replace(address, base_url=url, api_key=None))
        return EnginePool(address), metrics

    def _address(self, engine: Engine) -> EngineAddress:
        settings = engine.settings
        return EngineAddress(settings.name, settings.url, settings.api_key, connect_s=self.settings.timeouts.connect_s)

    def _open_gpu(self, engine: Engine) -> GpuSource | None:
        """Where the engine's GPUs are read; None for nowhere."""
        gpu = engine.settings.gpu
        kind = gpu_source_kind(engine.settings)
        if kind == "nvml":
            return NvmlSource(self.nvml, gpu.devices)
        if kind == "dcgm" and gpu.url is not None:
            pool = EnginePool(EngineAddress(f"{engine.name} gpu", gpu.url, connect_s=self.settings.timeouts.connect_s))
            return DcgmSource(pool, gpu.devices, where=gpu.url, monotonic=self._clock.now_s)
        return None

    async def _close_backends(self) -> None:
        for engine in self.roster:
            if engine.backend is not None:
                await engine.backend.close()

    async def _flush_owner(self) -> None:
        """Take what ended out of a shared queue; an embedded one goes with us."""
        if not self._sole:
            await self.owner.close()

    async def _watch_lag(self) -> None:
        lag = self.telemetry.keep(LOOP_LAG)
        dropped = 0
        while True:
            due_s = self._clock.now_s() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            lag.observe(max(0.0, self._clock.now_s() - due_s))
            before, dropped = dropped, self.dispatcher.events_dropped
            self.telemetry.add(EVENTS_DROPPED, dropped - before)

    def __repr__(self) -> str:
        return f"<Gateway {self.public_url} engines={len(self.roster)} {self.presence!r}>"


def open_queue(url: str, *, pool: str, log: Log, rng: random.Random, on_call: OnCall | None = None) -> RedisQueue:
    """The pool's queue in a store; its owner closes it."""
    return RedisQueue(connect(url, pool=pool), pool=pool, log=log, rng=rng, on_call=on_call)
