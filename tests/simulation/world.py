"""One seeded run of the real gateway: its listener, queue client, dispatcher and relay, on the virtual loop.

Real are `gateway.app.Gateway` with everything in it, the engine client, the virtual engines' HTTP face on aiohttp, and
asyncio's transports. Virtual are time, the network under them, and the store, which is the verified queue in memory
behind `FaultyQueue`. Clients are scripted on the wire.

    safety phase     load and faults as planned; the invariants are checked after every callback of the loop
    liveness phase   every fault has ended: new clients must be served in full, nobody may wait longer than promised
    the end          clients gone, gateway drained and stopped: nothing may be left in store, ledger or engine
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from backends.simulated.config import SimulatedConfig
from backends.simulated.profiles import EngineOptions
from backends.simulated.server import SimulatedServer
from gateway.app import Gateway
from gateway.clock import PoolClock
from gateway.exchange import Exchange
from gateway.ingress.server import Service
from gateway.queue.memory_queue import MemoryQueue
from gateway.settings import EngineSettings, Settings, Timeouts
from policies.vocabulary import Decision, EngineState, Outcome
from tests.simulation.client import ScriptedClient, seen_of
from tests.simulation.faults import Behaviour, ClientPlan, Fault, FaultKind, FaultyQueue, Plan, draw_plan
from tests.simulation.invariants import EngineLook, InvariantBroken, Invariants, Look
from tests.simulation.loop import SimLoop, run

PROFILE = "h100_llama31_8b_tp1"
PUBLIC_PORT, ENGINE_PORT = 8080, 8000
WALL_OFFSET_S = 1_700_000_000.0
WATCH_EVERY_S = 0.25
RECOVERY_S = 20.0
SETTLE_S = 30.0
CLOSED_WITHIN_S = 5.0
JUDGE_AFTER_S = 10.0
"""A client is judged a little later, so that a gateway that is dying is found dead of what killed it."""
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

POLICY = """\
version: 1
classes:
  interactive: {{ttft_sla_s: 0.5, max_queue: {max_queue}, max_wait_s: 60}}
  bulk: {{max_queue: {max_queue}, max_wait_s: 60, max_age_s: 20, min_share: 0.05}}
classify:
  rules:
    - class_from: X-Headrace-Class
sizing:
  policy: fixed
  fixed:
    total: {interactive_window}
    windows: {{interactive: {interactive_window}, bulk: {bulk_window}}}
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What one run came to. digest: equal for equal runs."""

    seed: int
    digest: str
    virtual_s: float
    callbacks: int
    looks: int
    results: Mapping[str, int]


def simulate(seed: int, folder: Path) -> Report:
    """Run one seed. On a failure the plan and the line that repeats it are printed. `folder` is for its policy file."""
    plans: list[Plan] = []

    async def main(loop: SimLoop) -> Report:
        plan = draw_plan(loop.rng)
        plans.append(plan)
        return await World(loop, plan, folder).run()

    begun_s = time.perf_counter()
    try:
        return run(main, seed=seed)
    except BaseException:
        print(f"\n{plans[0] if plans else 'no plan'}")
        print(f"after {time.perf_counter() - begun_s:.1f} s of real time; to repeat it: make simulate SEED={seed}")
        raise


class World:
    """See the module header."""

    def __init__(self, loop: SimLoop, plan: Plan, folder: Path) -> None:
        self.loop = loop
        self.plan = plan
        self.network = loop.network
        self.invariants = Invariants()
        self.errors: list[str] = []
        self.store = MemoryQueue(lambda: int((WALL_OFFSET_S + loop.time()) * 1000))
        self.policy_file = folder / f"policy-{loop.seed}.yaml"
        self.network.add_host("gateway", "10.0.0.10")
        self.network.add_host("clients", "10.0.0.20")
        self.network.set_link("gateway", "clients", plan.client_link)
        self.engines = {
            name: EngineHost(self, name, f"10.0.1.{number}", number)
            for number, name in enumerate((f"engine-{number}" for number in range(1, plan.engines + 1)), 1)
        }
        self.process = GatewayProcess(self)
        self._one_fault_at: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._queue_flushes = 0
        self._seen_versions: tuple[object, ...] = ()

    async def run(self) -> Report:
        """The whole run. Raises InvariantBroken, Deadlock, Livelock or Unhandled."""
        self._write_policy()
        with _errors_logged(self.errors):
            for engine in self.engines.values():
                await engine.start()
            await self.process.start()
            self.loop.after_event = self._look
            async with self._watching():
                await self._safety()
                await self._liveness()
            await self._until_settled()
            self.loop.after_event = None
            await self.process.stop()
            for engine in self.engines.values():
                await engine.stop()
        await asyncio.sleep(CLOSED_WITHIN_S)
        self.invariants.over({"errors logged": self.errors, "open sockets": list(self.network.open.values())})
        return self._report()

    # -- phases -------------------------------------------------------------------------------------------------------

    async def _safety(self) -> None:
        async with asyncio.TaskGroup() as group:
            for client in self.plan.clients:
                group.create_task(self._play_client(client), name=f"client {client.number}")
            for fault in self.plan.faults:
                group.create_task(self._play_fault(fault), name=f"{fault.kind} at {fault.at_s:.3f}")
            group.create_task(asyncio.sleep(self.plan.duration_s))

    async def _liveness(self) -> None:
        """Everything works again: whoever comes now is served in full."""
        self.process.queue.end_faults()
        await asyncio.sleep(RECOVERY_S)
        late = [
            ClientPlan(
                10_000 + number, 0.0, Behaviour.PATIENT, name, stream=stream, words=20, max_tokens=5, patience_s=0
            )
            for number, (name, stream) in enumerate((("interactive", True), ("bulk", True), ("interactive", False)))
        ]
        async with asyncio.TaskGroup() as group:
            for client in late:
                group.create_task(self._play_client(client, must_succeed=True), name=f"late client {client.number}")

    async def _until_settled(self) -> None:
        """Give what is being tidied up a bounded time, then insist."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(self._leftovers().values()):
                    await asyncio.sleep(0.5)
        self.invariants.over(self._leftovers())

    def _leftovers(self) -> dict[str, object]:
        gateway = self.process.gateway
        left: dict[str, object] = {f"in flight on {name}": list(ledger.entries) for name, ledger in gateway.ledger}
        left |= {f"running on {name}": engine.running for name, engine in self.engines.items()}
        return left | {
            "works in the store": len(self.store._works),
            "works waiting": gateway.owner.waiting,
            "requests in the listener": gateway.ingress.in_flight,
            "client connections": gateway.ingress.open_connections,
            "bodies held": gateway.ingress.bodies_held_bytes,
        }

    # -- clients ------------------------------------------------------------------------------------------------------

    async def _play_client(self, plan: ClientPlan, *, must_succeed: bool = False) -> None:
        await asyncio.sleep(plan.at_s)
        request_id = f"client-{plan.number}"
        generation = self.process.generation
        with self.network.on("clients"):
            client = ScriptedClient(plan, request_id)
            try:
                answer = await client.run("gateway", PUBLIC_PORT, longest_s=TIMEOUTS.total_s + 10)
            except TimeoutError:
                raise InvariantBroken(
                    f"{request_id} ({plan.behaviour}) was kept waiting: {self.process.gateway}"
                ) from None
            except OSError:
                answer = None
        seen = seen_of(answer)
        self.loop.trace.note(self.network.now_ns, request_id, seen.status, seen.complete, seen.failed, seen.tokens)
        if generation != self.process.generation or not self.process.up:
            return
        await asyncio.sleep(JUDGE_AFTER_S)
        if plan.behaviour.stays:
            if seen.status >= 400 and request_id not in self.invariants.accepted:
                return
            self.invariants.answered(request_id, seen, max_tokens=plan.max_tokens)
            if must_succeed and seen.failed:
                body = b"" if answer is None else answer.body[-300:]
                raise InvariantBroken(f"{request_id} came after all faults had ended and was refused: {seen} {body!r}")

    # -- faults -------------------------------------------------------------------------------------------------------

    async def _play_fault(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        async with self._one_fault_at[fault.target], self._in_force(fault):
            await asyncio.sleep(fault.for_s)

    @asynccontextmanager
    async def _in_force(self, fault: Fault) -> AsyncIterator[None]:
        network, target = self.network, fault.target
        if fault.kind is FaultKind.ENGINE_CRASH:
            await self.engines[target].crash()
            yield
            await self.engines[target].start()
        elif fault.kind is FaultKind.ENGINE_FREEZE:
            network.freeze(target)
            self.engines[target].freeze()
            yield
            network.thaw(target)
            self.engines[target].thaw()
        elif fault.kind is FaultKind.ENGINE_STUCK:
            self.engines[target].freeze()
            yield
            self.engines[target].thaw()
        elif fault.kind is FaultKind.ENGINE_UNREACHABLE:
            network.partition("gateway", target)
            yield
            network.heal("gateway", target)
        elif fault.kind is FaultKind.ENGINE_RESET:
            network.reset_between("gateway", target)
            yield
        elif fault.kind is FaultKind.QUEUE_AWAY:
            self.process.queue.away = True
            yield
            self.process.queue.away = False
        elif fault.kind is FaultKind.QUEUE_FLUSH:
            self._queue_flushes += 1
            self.store.forget()
            yield
        else:
            await self.process.crash()
            yield
            await self.process.start()

    # -- what is looked at --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """After each callback; costs a few comparisons while nothing of interest has changed."""
        if not self.process.up:
            return
        gateway = self.process.gateway
        versions = (
            *(ledger.version for _, ledger in gateway.ledger),
            *(engine.state for engine in gateway.roster),
            *self.store._depths.values(),
            gateway.presence.leads,
        )
        if versions == self._seen_versions:
            return
        self._seen_versions = versions
        now_s = self.loop.time()
        looks = []
        for engine in gateway.roster:
            view = engine.view(now_s)
            windows = {name: gateway.sizing.window(view, name).requests for name in gateway.store.current.classes}
            looks.append(
                EngineLook(engine.name, engine.state is EngineState.UP, dict(engine.ledger.in_flight), windows)
            )
        self.invariants.look(
            Look(
                now_s=now_s,
                engines=tuple(looks),
                queued=dict(self.store._depths),
                queue_bounds=self._queue_bounds(gateway),
                leaders=int(gateway.presence.leads),
                policy_version=gateway.store.current.version,
            )
        )

    def _queue_bounds(self, gateway: Gateway) -> dict[str, int]:
        """The policy's bound, and room for what comes back to the queue unasked: granted works that were not started,
        and those written again after the store forgot them."""
        back = self.plan.interactive_window * self.plan.engines
        return {
            name: one.max_queue * (1 + self._queue_flushes) + back
            for name, one in gateway.store.current.classes.items()
        }

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch_engines(), name="watch engines")
            yield
            watch.cancel()

    async def _watch_engines(self) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            for name, engine in self.engines.items():
                counted = self.process.gateway.ledger[name].in_flight if self.process.up else {}
                self.invariants.engine_is_left_alone(
                    name,
                    running=engine.running,
                    in_flight=sum(counted.values()),
                    reachable=not engine.host.frozen and not self.network.path("gateway", name).down,
                    now_s=self.loop.time(),
                )

    def _write_policy(self) -> None:
        self.policy_file.write_text(
            POLICY.format(
                max_queue=self.plan.max_queue,
                interactive_window=self.plan.interactive_window,
                bulk_window=self.plan.bulk_window,
            )
        )

    def _report(self) -> Report:
        results: dict[str, int] = {}
        for outcome in self.invariants.outcomes.values():
            results[outcome.result] = results.get(outcome.result, 0) + 1
        for request_id, outcome in sorted(self.invariants.outcomes.items()):
            told = (request_id, outcome.result, outcome.engine, outcome.output_tokens, outcome.total_s)
            self.loop.trace.note(self.network.now_ns, *map(str, told))
        return Report(
            self.loop.seed, self.loop.trace.digest, self.loop.time(), self.loop.callbacks, self.invariants.told, results
        )


class EngineHost:
    """A virtual engine on a host of its own; it can be killed and started again."""

    def __init__(self, world: World, name: str, address: str, number: int) -> None:
        self.name = name
        self.host = world.network.add_host(name, address)
        world.network.set_link("gateway", name, world.plan.engine_link)
        self._world = world
        self._config = SimulatedConfig(
            model="sim", profile=PROFILE, options=EngineOptions(max_num_seqs=world.plan.seats), seed=number
        )
        self._server: SimulatedServer | None = None

    @property
    def running(self) -> int:
        """Requests that the engine works on."""
        return 0 if self._server is None else self._server.in_flight

    async def start(self) -> None:
        loop = self._world.loop
        server = SimulatedServer(
            self._config, host="0.0.0.0", port=ENGINE_PORT, wall_s=lambda: WALL_OFFSET_S + loop.time()
        )
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


class GatewayProcess:
    """The gateway as a process that can be killed and started again. generation counts its starts and crashes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.generation = 0
        self.up = False
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.queue = self._new_queue()

    async def start(self) -> None:
        world = self._world
        self.generation += 1
        self.queue = self._new_queue()
        self._stop = asyncio.Event()
        started = asyncio.Event()
        with world.network.on("gateway"):
            self._task = world.loop.create_task(self._serve(started), name=f"gateway {self.generation}")
        self._task.add_done_callback(self._ended)
        waiting = world.loop.create_task(started.wait())
        await asyncio.wait([self._task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task.done():
            self._task.result()

    async def crash(self) -> None:
        """Kill -9: nothing it would say on its way out reaches anybody."""
        self.generation += 1
        self.up = False
        self.queue.away = True
        self._world.network.crash("gateway")
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        world = self._world
        for request_id in world.invariants.accepted - world.invariants.outcomes.keys():
            world.invariants.accepted.discard(request_id)

    async def stop(self) -> None:
        self._stop.set()
        assert self._task is not None
        await self._task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A gateway that ends by itself fails the run at once, with what it died of."""
        self.up = False
        if not task.cancelled():
            task.result()

    def _new_queue(self) -> FaultyQueue:
        world = self._world
        return FaultyQueue(world.store, world.plan.queue, random.Random(world.loop.rng.random()))

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
        clock = PoolClock(world.loop.time, offset_s=WALL_OFFSET_S + rng.uniform(-0.05, 0.05))
        log = _log(world.errors)
        async with Gateway(settings, log=log, queue=self.queue, clock=clock, rng=rng, sole=world.plan.sole) as gateway:
            self._observe(gateway, generation)
            self.gateway = gateway
            self.up = True
            started.set()
            await self._stop.wait()
            if not await gateway.drain():
                raise InvariantBroken(f"the gateway did not drain: {gateway.ingress}")
            self.up = False

    def _observe(self, gateway: Gateway, generation: int) -> None:
        """Have the invariants told of each request accepted, each outcome and each decision."""
        world, invariants = self._world, self._world.invariants
        service = ObservedService(gateway.service, invariants)
        sink = gateway.dispatcher._sink

        def on_outcome(outcome: Outcome) -> None:
            request_id = service.request_of_task()
            if self.generation == generation:
                invariants.settled(request_id, outcome)
            world.loop.trace.note(world.network.now_ns, request_id, str(outcome.result), outcome.output_tokens)

        def on_decision(decision: Decision) -> None:
            serving = not decision.engine or gateway.roster[decision.engine].state is EngineState.UP
            invariants.decided(decision, policy_version=gateway.store.current.version, serving=serving)
            sink(decision)

        gateway.service._on_outcome = on_outcome
        gateway.dispatcher._sink = on_decision
        gateway.ingress._service = service


@dataclass(slots=True)
class ObservedService:
    """The gateway's service, with a note of which request each handler task carries."""

    service: Service
    invariants: Invariants
    _by_task: dict[asyncio.Task[Any], str] = field(default_factory=dict)

    async def serve(self, exchange: Exchange) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._by_task[task] = exchange.request_id
        self.invariants.accepted.add(exchange.request_id)
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


@contextmanager
def _errors_logged(errors: list[str]) -> Iterator[None]:
    """Keep what libraries log as errors."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info is not None and isinstance(record.exc_info[1], ConnectionError):
                return  # aiohttp, under the virtual engines, logs a caller that left as an error
            errors.append(f"{record.name}: {self.format(record)}")

    handler = Keep(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
