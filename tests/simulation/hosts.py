"""The machines of a simulated world: virtual engines and real gateways that can be killed, stopped and started again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from backends.openai_compatible import TRIAL_ID
from backends.simulated.config import SimulatedConfig
from backends.simulated.profiles import EngineOptions
from backends.simulated.server import Face, SimulatedServer
from backends.simulated.service import Service as FacedService
from gateway.app import Gateway
from gateway.clock import PoolClock
from gateway.exchange import Exchange
from gateway.ingress.server import Service
from gateway.queue.base import InFlight, Place
from gateway.settings import EngineSettings, Settings, Timeouts
from policies.vocabulary import Decision, EngineState, Outcome
from tests.simulation.faults import CallFault
from tests.simulation.faulty_queue import FaultyQueue, Spoiled
from tests.simulation.invariants import Invariant

if TYPE_CHECKING:
    from tests.simulation.world import World

PROFILE = "h100_llama31_8b_tp1"
READ_WITHIN_S = 2.0
"""A gateway that goes on after a stop has read its policy file by then."""
PUBLIC_PORT, ENGINE_PORT = 8080, 8000
WALL_OFFSET_S = 1_700_000_000.0
CLOCK_OFF_MAX_S = 3.0
CLOCK_DRIFT_MAX = 5e-5
TIMEOUTS = Timeouts(
    connect_s=2.0,
    first_byte_s=20.0,
    inter_token_s=10.0,
    total_s=120.0,
    stalled_client_s=10.0,
    queue_headers_after_s=5.0,
    keepalive_comment_s=5.0,
    nonstream_wait_s=30.0,
    drain_s=60.0,
)


class WatchedFace:
    """An engine's HTTP face, with a note of which requests it works on, by their ids. begun: where to note whose turn came."""

    def __init__(self, face: Face, begun: set[str]) -> None:
        self._face = face
        self._begun = begun
        self.under_way: Counter[str] = Counter()

    def routes(self) -> list[web.RouteDef]:
        return self._face.routes()

    def middlewares(self) -> list[Middleware]:
        return [self._count, *self._face.middlewares()]

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request.headers.get("X-Request-Id", "")
        self._begun.add(request_id)
        self.under_way[request_id] += 1
        try:
            return await handler(request)
        finally:
            self.under_way[request_id] -= 1


class EngineHost:
    """A virtual engine on a host of its own; it can be killed and started again.

    draining   an operator has asked every gateway to give it nothing new
    """

    def __init__(self, world: World, name: str, address: str, number: int) -> None:
        self.name = name
        self.host = world.network.add_host(name, address)
        self.draining = False
        self._world = world
        self._config = SimulatedConfig(
            model="sim",
            profile=PROFILE,
            options=EngineOptions(max_num_seqs=world.plan.seats),
            speed=world.plan.engine_speed,
            seed=number,
        )
        self._server: SimulatedServer | None = None
        self._face: WatchedFace | None = None
        self._begun: set[str] = set()

    @property
    def running(self) -> int:
        """Requests that the engine works on, trials apart: a gateway asks for a token of its own where works are stuck."""
        if self._server is None or self._face is None:
            return 0
        return max(0, self._server.in_flight - self._face.under_way[TRIAL_ID])

    def has_ended(self, request_id: str) -> bool:
        """It has worked on this request, and does so no more."""
        here = self._server is not None and self._face is not None and self._face.under_way[request_id]
        return request_id in self._begun and not here

    async def start(self) -> None:
        loop = self._world.loop
        server = SimulatedServer(
            self._config, host="0.0.0.0", port=ENGINE_PORT, wall_s=lambda: WALL_OFFSET_S + loop.time()
        )
        build = server._build_face

        def watched(service: FacedService) -> Face:
            self._face = WatchedFace(build(service), self._begun)
            return self._face

        server._build_face = watched
        with self._world.network.on(self.name):
            self._server = await server.__aenter__()

    def freeze(self) -> None:
        if self._server is not None:
            self._server.freeze()

    def thaw(self) -> None:
        if self._server is not None:
            self._server.thaw()

    async def crash(self) -> None:
        """Kill -9: the kernel closes the sockets; then what played the process is tidied away."""
        self._world.network.crash(self.name)
        await self.stop()

    async def stop(self) -> None:
        server, self._server = self._server, None
        assert server is not None
        await server.close()


class GatewayHost:
    """A machine on which a gateway runs, as a process that can be killed, stopped, drained and started again.

    generation   counts starts and crashes
    up           the process serves
    leaving      it was asked to leave: it refuses connections and finishes what it has
    thawed_s     when it last went on after a stop
    on_credit    works that were started without asking, on credit or on a share
    killed       when each process that was killed here died, by the id of its sessions
    """

    def __init__(self, world: World, name: str, address: str) -> None:
        self.name = name
        self.host = world.network.add_host(name, address)
        self.generation = 0
        self.up = False
        self.leaving = False
        self.cut = 0
        self.thawed_s = self._frozen_s = float("-inf")
        self.on_credit: set[str] = set()
        self.killed: dict[str, float] = {}
        self._world = world
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._spoiled: list[Spoiled] = []
        self.queue = self._new_queue()
        self._accepted: set[str] = set()

    @property
    def session_id(self) -> str:
        return self.presence.session.id

    async def start(self) -> None:
        world = self._world
        self.generation += 1
        self.started_s = world.loop.time()
        self.leaving = False
        self.queue = self._new_queue()
        self._stop = asyncio.Event()
        self._accepted = set()
        started = asyncio.Event()
        with world.network.on(self.name):
            self._task = world.loop.create_task(self._serve(started), name=f"{self.name} {self.generation}")
        self._task.add_done_callback(self._ended)
        waiting = world.loop.create_task(started.wait())
        await asyncio.wait([self._task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            self._task.result()

    async def crash(self) -> None:
        """Kill -9: nothing it would say on its way out reaches anybody."""
        world = self._world
        self.killed[self.session_id] = world.loop.time()
        self.generation += 1
        self.up = False
        self.queue.dead = True
        world.network.crash(self.name)
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        for request_id in self._accepted - world.invariants.outcomes.keys():
            world.invariants.accepted.discard(request_id)

    async def drain(self) -> bool:
        """Ask it to leave, as a rolling upgrade does. False: something still ran when its patience ended."""
        self.leaving = True
        self._stop.set()
        assert self._task is not None
        await self._task
        return self._drained

    def versions(self) -> tuple[int, int, int]:
        """Something else whenever what runs here may have changed."""
        if not self.up:
            return self.generation, 0, 0
        changes = 0
        for ledger in self._ledgers:
            changes += ledger.version
        return self.generation, changes, len(self.gateway.watchdog)

    def freeze(self) -> None:
        self._world.network.freeze(self.name)
        self._frozen_s = self._world.loop.time()

    def reads_since_s(self, now_s: float) -> float:
        """What was in its files before then it has read, or will never: now, but for one that is stopped, or was lately."""
        if self.host.frozen:
            return self._frozen_s
        return self._frozen_s if now_s - self.thawed_s < READ_WITHIN_S else now_s

    def thaw(self) -> None:
        self._world.network.thaw(self.name)
        self.thawed_s = self._world.loop.time()

    def cut_off(self, by: int) -> None:
        """One cut more (1) or less (-1) between this gateway and the store."""
        self.cut += by
        self.queue.away = self.cut > 0

    def spoil(self, fault: CallFault) -> None:
        """From now on these calls go wrong, also those of a process that is started meanwhile."""
        self._spoiled.append(Spoiled(fault))

    def mend(self, fault: CallFault) -> None:
        self._spoiled[:] = [one for one in self._spoiled if one.fault is not fault]

    def end_faults(self) -> None:
        self.queue.end_faults()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A gateway that ends by itself fails the run at once, with what it died of."""
        self.up = False
        if not task.cancelled():
            task.result()

    def _new_queue(self) -> FaultyQueue:
        world = self._world
        rng = random.Random(world.loop.rng.random())
        queue = FaultyQueue(world.store, world.plan.queue, rng, spoiled=self._spoiled)
        queue.away = self.cut > 0
        return queue

    async def _serve(self, started: asyncio.Event) -> None:
        world = self._world
        generation = self.generation
        settings = Settings(
            listen=f"0.0.0.0:{PUBLIC_PORT}",
            admin_listen="127.0.0.1:8081",
            engines=tuple(EngineSettings(name, f"http://{name}:{ENGINE_PORT}") for name in world.engines),
            policy_file=world.policy_file,
            allow_no_keys=True,
            timeouts=TIMEOUTS,
        )
        rng = random.Random(world.loop.rng.random())
        clock = self._clock(rng)
        log = _log(world.errors)
        async with Gateway(settings, log=log, queue=self.queue, clock=clock, rng=rng, sole=world.plan.sole) as gateway:
            self._observe(gateway, generation)
            self.gateway = gateway
            self.presence = gateway.presence
            self._ledgers = [engine.ledger for engine in gateway.roster]
            for engine in gateway.roster:
                engine.draining = world.engines[engine.name].draining
            self.clock = clock
            self.up = True
            started.set()
            await self._stop.wait()
            self._drained = await gateway.drain()
            self.up = False

    def _clock(self, rng: random.Random) -> PoolClock:
        """A monotonic clock that began anywhere and runs a little wrong, beside a wall clock that is off."""
        loop = self._world.loop
        rate = 1 + rng.uniform(-CLOCK_DRIFT_MAX, CLOCK_DRIFT_MAX)
        begun_s = rng.uniform(0, 1e5)
        off_s = rng.uniform(-CLOCK_OFF_MAX_S, CLOCK_OFF_MAX_S)
        clock = PoolClock(lambda: begun_s + loop.time() * rate, offset_s=WALL_OFFSET_S - begun_s + off_s)
        clock.error_s = float("inf")
        return clock

    def _observe(self, gateway: Gateway, generation: int) -> None:
        """Have the invariants told of each request accepted, each outcome and each decision."""
        world, invariants = self._world, self._world.invariants
        service = ObservedService(gateway.service, self._accept)
        sink = gateway.dispatcher._sink

        def on_outcome(outcome: Outcome) -> None:
            request_id = service.request_of_task()
            if self.generation == generation:
                invariants.settled(request_id, outcome)
            world.loop.trace.note(world.network.now_ns, request_id, str(outcome.result), outcome.output_tokens)

        def on_decision(decision: Decision) -> None:
            serving = not decision.engine or gateway.roster[decision.engine].state is EngineState.UP
            invariants.decided(decision, policy_version=gateway.store.current.version, serving=serving)
            if decision.reason == "credit":
                self.on_credit.add(decision.work_id)
                if not self.presence.failing:
                    self._within_credit((decision.engine, decision.class_name))
            else:
                invariants.decided_under(
                    gateway.presence.epoch,
                    f"{self.name} places a work",
                    world.loop.time(),
                    by=gateway.presence.session.id,
                )
            sink(decision)

        gateway.service._on_outcome = on_outcome
        gateway.dispatcher._sink = gateway.dispatcher.planner._sink = on_decision
        gateway.ingress._service = service

    def _within_credit(self, place: Place) -> None:
        """What the process says that it ever started is no more than it was told that it may."""
        # Not by its report: to make one is to tell it.
        started = self.gateway.member.credit.started.get(place, InFlight())
        credit = self.queue.credits.get(place)
        allowed = InFlight() if credit is None else credit.allowed
        if (
            started.works > allowed.works
            or started.kv_tokens > allowed.kv_tokens
            or started.prefill_tokens > allowed.prefill_tokens
        ):
            self._world.invariants.fail(
                Invariant.INSIDE_CREDIT, f"{self.name} has started {started} on {place}: it may start {allowed}"
            )

    def _accept(self, request_id: str) -> None:
        self._accepted.add(request_id)
        self._world.invariants.accepted.add(request_id)

    def __repr__(self) -> str:
        return f"<{self.name} {'up' if self.up else 'down'} {self.gateway!r} {self.gateway.member.owner!r}>"


@dataclass(slots=True)
class ObservedService:
    """The gateway's service, with a note of which request each handler task carries."""

    service: Service
    accept: Callable[[str], None]
    _by_task: dict[asyncio.Task[Any], str] = field(default_factory=dict)

    async def serve(self, exchange: Exchange) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._by_task[task] = exchange.request_id
        self.accept(exchange.request_id)
        try:
            await self.service.serve(exchange)
        finally:
            del self._by_task[task]

    def request_of_task(self) -> str:
        task = asyncio.current_task()
        assert task is not None
        return self._by_task[task]


def _log(errors: list[str]) -> Any:
    """A log that keeps errors, which no fault of the outside may cause, and drops the rest."""

    def keep(_logger: object, level: str, event: Any) -> Any:
        if level in {"error", "critical", "exception"}:
            errors.append(repr(event))
        raise structlog.DropEvent

    return structlog.wrap_logger(
        None,
        processors=[structlog.processors.format_exc_info, keep],
        wrapper_class=structlog.make_filtering_bound_logger(20),
    )
