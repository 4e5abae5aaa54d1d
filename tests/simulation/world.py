"""One seeded run of real gateways: listeners, queue clients, dispatchers and relays, on one virtual loop.

Real are `gateway.app.Gateway` with everything in it, the engine client, the virtual engines' HTTP face on aiohttp, and
asyncio's transports. Virtual are time, the network under them, and the store, which is the verified queue in memory
behind one `FaultyQueue` for each gateway. Clients are scripted on the wire.

    safety phase     load and faults as planned; the invariants are checked after every callback of the loop
    liveness phase   every fault has ended: somebody leads soon, and new clients are served in full and in time
    the end          clients gone, gateways drained and stopped: nothing may be left in store, ledgers or engines
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.control.presence import SESSION_VALID_S
from gateway.replay.loop import Unhandled
from policies.vocabulary import EngineState
from tests.simulation.client import ScriptedClient, seen_of
from tests.simulation.faults import Behaviour, CallFault, ClientPlan, Fault, FaultKind, Kind, Plan, draw_plan
from tests.simulation.hosts import PUBLIC_PORT, TIMEOUTS, WALL_OFFSET_S, EngineHost, GatewayHost
from tests.simulation.invariants import EngineLook, Invariant, InvariantBroken, Invariants, Look, Seen
from tests.simulation.loop import SimLoop, run
from tests.simulation.net import LOCAL
from tests.simulation.reach import Reach
from tests.simulation.scenes import SCENES
from tests.simulation.store import WatchedStore

CLIENTS = "clients"
WATCH_EVERY_S = 0.25
READY_WITHIN_S = 30.0
LEADER_WITHIN_S = 3.0
READY_AGAIN_WITHIN_S = 5.0
"""Once somebody leads: two polls of the engines, each with what finds out their kind and tries them out."""
RECOVERY_S = 20.0
NORMAL_WAIT_S = 1.0
"""What a first token may take beside the engine's own time."""
SETTLE_S = 30.0
CLOSED_WITHIN_S = 5.0
CLOCKS_APART_S = 0.3
GRANTED_BEFORE_S = 5.5
"""A grant of an engine that went down meanwhile may be taken up for so long."""
FORGOTTEN_AFTER_S = 12.0
"""Two sessions' time: calls may be lost and repeated."""
WINDOWS_KEPT_S = 4.0
"""A window that was edited binds everybody once each has read the file and the credit given before has run out."""
JUDGE_AFTER_S = 10.0
"""A client is judged a little later, so that a gateway that is dying is found dead of what killed it."""

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


def simulate(seed: int, folder: Path, kind: str = Kind.SINGLE) -> Report:
    """Run one seed. A failure says in one line how to repeat it; with HEADRACE_PLAN set, the plan too.

    folder   for its policy file
    kind     a `Kind`, whose plan the seed draws, or the name of a scene
    """
    plans: list[Plan] = []

    async def main(loop: SimLoop) -> Report:
        plan = SCENES[kind] if kind in SCENES else draw_plan(loop.rng, Kind(kind))
        plans.append(plan)
        return await World(loop, plan, folder).run()

    begun_s = time.perf_counter()
    try:
        return run(main, seed=seed)
    except BaseException as error:
        took_s = time.perf_counter() - begun_s
        print(f"\nto repeat it ({took_s:.1f} s; PLAN=1 shows its faults): make simulate KIND={kind} SEED={seed}")
        if os.environ.get("HEADRACE_PLAN"):
            print(plans[0] if plans else "no plan")
        raise innermost(error) from None


def innermost(error: BaseException) -> BaseException:
    """What a group of groups was raised for, also where a gateway died of it: its first cause."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, Unhandled) and error.__cause__ is not None:
            error = error.__cause__
        else:
            return error


class World:
    """See the module header."""

    def __init__(self, loop: SimLoop, plan: Plan, folder: Path) -> None:
        self.loop = loop
        self.plan = plan
        self.network = loop.network
        self.invariants = Invariants()
        self.errors: list[str] = []
        self.store = WatchedStore(loop.time, WALL_OFFSET_S, self.invariants)
        self.policy_file = folder / f"policy-{loop.seed}.yaml"
        self.network.add_host(CLIENTS, "10.0.0.20")
        self.engines = {
            name: EngineHost(self, name, f"10.0.1.{number}", number)
            for number, name in enumerate((f"engine-{number}" for number in range(1, plan.engines + 1)), 1)
        }
        self.gateways = {
            f"gateway-{number}": GatewayHost(self, f"gateway-{number}", f"10.0.2.{number}")
            for number in range(1, plan.gateways + 1)
        }
        for name in self.gateways:
            self.network.set_link(name, CLIENTS, plan.client_link)
            for engine in self.engines:
                self.network.set_link(name, engine, plan.engine_link)
        for call in plan.calls:
            if call.at_s < 0:
                self.gateways[f"gateway-{call.gateway}"].spoil(call)
        self._reach = Reach(self.store, self.engines)
        self._one_fault_at: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._windows: list[tuple[float, int, int]] = []
        self._apart_s: defaultdict[str, float] = defaultdict(float)
        self._last_up_s: defaultdict[str, float] = defaultdict(float)
        self._seen: dict[str, tuple[object, ...]] = {}

    async def run(self) -> Report:
        """The whole run. Raises InvariantBroken, Deadlock, Livelock or Unhandled."""
        self._write_policy(self.plan.interactive_window, self.plan.bulk_window)
        with _errors_logged(self.errors):
            for engine in self.engines.values():
                await engine.start()
            self.loop.after_event = self._look
            for host in self.gateways.values():
                await host.start()
            await self._until_ready(READY_WITHIN_S)
            async with self._watching():
                await self._safety()
                await self._liveness()
            await self._until_settled()
            for host in self.gateways.values():
                await self._leave(host)
            self.loop.after_event = None
            for engine in self.engines.values():
                await engine.stop()
        await asyncio.sleep(CLOSED_WITHIN_S)
        self.invariants.over({"errors logged": self.errors, "open sockets": list(self.network.open.values())})
        return self._report()

    # -- phases -------------------------------------------------------------------------------------------------------

    async def _until_ready(self, within_s: float) -> None:
        """Clients come once every gateway says that it is ready, as a load balancer has it."""
        try:
            async with asyncio.timeout(within_s):
                while any(host.gateway.overview.unready() for host in self.gateways.values()):
                    await asyncio.sleep(WATCH_EVERY_S)
        except TimeoutError:
            raise InvariantBroken(
                Invariant.RECOVERS,
                f"not all gateways are ready after {within_s} s: {list(self.gateways.values())}",
            ) from None

    async def _safety(self) -> None:
        async with asyncio.TaskGroup() as group:
            for client in self.plan.clients:
                group.create_task(self._play_client(client), name=f"client {client.number}")
            for fault in self.plan.faults:
                group.create_task(self._play_fault(fault), name=f"{fault.kind} at {fault.at_s:.3f}")
            for call in self.plan.calls:
                group.create_task(self._play_call_fault(call), name=f"{call.call} at {call.at_s:.3f}")
            group.create_task(asyncio.sleep(self.plan.duration_s))

    async def _liveness(self) -> None:
        """Everything works again: somebody leads, and whoever comes now is served in full and in time."""
        for host in self.gateways.values():
            host.end_faults()
        await asyncio.sleep(LEADER_WITHIN_S)
        if not any(host.presence.leads for host in self.gateways.values()):
            raise InvariantBroken(
                Invariant.RECOVERS,
                f"nobody leads {LEADER_WITHIN_S} s after the last fault: {list(self.gateways.values())}",
            )
        # One that was started while the store was away has heard of no engine before it or another leads.
        await self._until_ready(READY_AGAIN_WITHIN_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(RECOVERY_S):
                while self.store._works:
                    await asyncio.sleep(WATCH_EVERY_S)
        calm = not self.store._works and not self._kept_for_the_lost()
        number = 10_000
        for gateway in range(1, self.plan.gateways + 1):
            for name, stream in (("interactive", True), ("bulk", True), ("interactive", False)):
                number += 1
                client = ClientPlan(number, 0.0, Behaviour.PATIENT, name, stream, 20, 2, 0, gateway)
                await self._play_client(client, must_succeed=True)
        if calm:
            self._in_time(f"client-{late}" for late in range(10_001, number + 1))

    def _kept_for_the_lost(self) -> bool:
        """The leader still holds places free for processes that may live on where it cannot hear them."""
        known = {host.presence.session for host in self.gateways.values()}
        return any(
            not known.issuperset(ledger.sessions_elsewhere())
            for host in self.gateways.values()
            for _, ledger in host.gateway.ledger
        )

    def _in_time(self, requests: Iterator[str]) -> None:
        """Without a backlog, interactive requests are answered as if nothing had happened."""
        for request in requests:
            outcome = self.invariants.outcomes[request]
            waited_s = (outcome.ttft_s or 0.0) - (outcome.engine_ttft_s or 0.0)
            if outcome.class_name == "interactive" and waited_s > NORMAL_WAIT_S + self._slow_links_s:
                raise InvariantBroken(
                    Invariant.RECOVERS, f"{request} waited {waited_s} s after all faults had ended: {outcome}"
                )

    @property
    def _slow_links_s(self) -> float:
        link = self.plan.engine_link
        return 10 * (link.latency_s + link.jitter_s)

    async def _until_settled(self) -> None:
        """Give what is being tidied up a bounded time, then insist."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(self._leftovers().values()):
                    await asyncio.sleep(0.5)
        self.invariants.over(self._leftovers())

    def _leftovers(self) -> dict[str, object]:
        left: dict[str, object] = {f"running on {name}": engine.running for name, engine in self.engines.items()}
        left["works in the store"] = len(self.store._works)
        left["sessions of nobody"] = self.store.session_ids() - {host.session_id for host in self.gateways.values()}
        for name, host in self.gateways.items():
            gateway = host.gateway
            left |= {f"{name}: in flight on {engine}": list(one.entries) for engine, one in gateway.ledger}
            left |= {
                f"{name}: works waiting": gateway.owner.waiting,
                f"{name}: requests in the listener": gateway.ingress.in_flight,
                f"{name}: client connections": gateway.ingress.open_connections,
                f"{name}: bodies held": gateway.ingress.bodies_held_bytes,
                f"{name}: works in flight by tenant": gateway.dispatcher.planner.tenants.in_flight("default"),
            }
        return left

    async def _leave(self, gateway: GatewayHost) -> None:
        if not await gateway.drain():
            raise InvariantBroken(Invariant.RECOVERS, f"a gateway that nobody uses did not drain: {gateway}")

    # -- clients ------------------------------------------------------------------------------------------------------

    async def _play_client(self, plan: ClientPlan, *, must_succeed: bool = False) -> None:
        await asyncio.sleep(plan.at_s)
        request_id = f"client-{plan.number}"
        host = self.gateways[f"gateway-{plan.gateway}"]
        generation, served = host.generation, host.up
        with self.network.on(CLIENTS):
            client = ScriptedClient(plan, request_id)
            try:
                answer = await client.run(host.name, PUBLIC_PORT, longest_s=TIMEOUTS.total_s + 10)
            except TimeoutError:
                raise InvariantBroken(
                    Invariant.TOLD_TRUE, f"{request_id} ({plan.behaviour}) was kept waiting: {host}"
                ) from None
            except OSError:
                answer = None
        seen = seen_of(answer)
        self.loop.trace.note(self.network.now_ns, request_id, seen.status, seen.complete, seen.failed, seen.tokens)
        if generation != host.generation or not host.up:
            return
        if answer is None and (host.leaving or not served) and request_id not in self.invariants.accepted:
            return
        if must_succeed:
            self._judge(plan, request_id, seen)
            if seen.failed:
                body = b"" if answer is None else answer.body[-300:]
                raise InvariantBroken(
                    Invariant.RECOVERS, f"{request_id} came after all faults had ended and was refused: {seen} {body!r}"
                )
        else:
            self._background.create_task(self._judge_later(plan, request_id, seen), name=f"judge {request_id}")

    async def _judge_later(self, plan: ClientPlan, request_id: str, seen: Seen) -> None:
        await asyncio.sleep(JUDGE_AFTER_S)
        self._judge(plan, request_id, seen)

    def _judge(self, plan: ClientPlan, request_id: str, seen: Seen) -> None:
        refused = seen.status >= 400 and request_id not in self.invariants.accepted
        if plan.behaviour.stays and not refused:
            self.invariants.answered(request_id, seen, max_tokens=plan.max_tokens)

    # -- faults -------------------------------------------------------------------------------------------------------

    async def _play_fault(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        async with self._one_fault_at[fault.target], self._in_force(fault):
            await asyncio.sleep(fault.for_s)

    async def _play_call_fault(self, fault: CallFault) -> None:
        host = self.gateways[f"gateway-{fault.gateway}"]
        if fault.at_s >= 0:
            await asyncio.sleep(fault.at_s)
            host.spoil(fault)
        await asyncio.sleep(fault.for_s)
        host.mend(fault)

    @asynccontextmanager
    async def _in_force(self, fault: Fault) -> AsyncIterator[None]:
        if fault.kind.value.startswith("engine"):
            async with self._engine_fault(fault):
                yield
        elif fault.kind.value.startswith("gateway"):
            async with self._gateway_fault(fault.kind, self.gateways[fault.target]):
                yield
        elif fault.kind is FaultKind.POLICY_EDIT:
            self._edit_policy()
            yield
        elif fault.kind is FaultKind.QUEUE_FLUSH:
            self.store.flush()
            yield
        else:
            cut = [gateway for name, gateway in self.gateways.items() if fault.target in {"queue", f"queue of {name}"}]
            for gateway in cut:
                gateway.cut_off(1)
            yield
            for gateway in cut:
                gateway.cut_off(-1)

    @asynccontextmanager
    async def _engine_fault(self, fault: Fault) -> AsyncIterator[None]:
        network, engine = self.network, self.engines[fault.target]
        if fault.kind is FaultKind.ENGINE_CRASH:
            await engine.crash()
            yield
            await engine.start()
        elif fault.kind is FaultKind.ENGINE_FREEZE:
            network.freeze(engine.name)
            engine.freeze()
            yield
            network.thaw(engine.name)
            engine.thaw()
        elif fault.kind is FaultKind.ENGINE_STUCK:
            engine.freeze()
            yield
            engine.thaw()
        elif fault.kind is FaultKind.ENGINE_DRAIN:
            self._drain_engine(engine.name, draining=True)
            yield
            self._drain_engine(engine.name, draining=False)
        else:
            ends = [f"gateway-{fault.gateway}"] if fault.gateway else list(self.gateways)
            for end in ends:
                if fault.kind is FaultKind.ENGINE_RESET:
                    network.reset_between(end, engine.name)
                else:
                    network.partition(end, engine.name)
            yield
            for end in ends:
                network.heal(end, engine.name)

    def _drain_engine(self, name: str, *, draining: bool) -> None:
        """Every gateway is told, those that are started later too."""
        self.engines[name].draining = draining
        for host in self.gateways.values():
            if host.up:
                host.gateway.roster[name].draining = draining

    @asynccontextmanager
    async def _gateway_fault(self, kind: FaultKind, gateway: GatewayHost) -> AsyncIterator[None]:
        if kind is FaultKind.GATEWAY_CRASH:
            await gateway.crash()
            yield
            await gateway.start()
        elif kind is FaultKind.GATEWAY_FREEZE:
            gateway.freeze()
            yield
            gateway.thaw()
        else:
            await gateway.drain()
            yield
            await gateway.start()

    def _edit_policy(self) -> None:
        bulk = self.loop.rng.randint(1, 4)
        self._write_policy(bulk + self.loop.rng.randint(1, 6), bulk)

    def _write_policy(self, interactive_window: int, bulk_window: int) -> None:
        self._windows.append((self.loop.time(), interactive_window, bulk_window))
        self.policy_file.write_text(
            POLICY.format(max_queue=self.plan.max_queue, interactive_window=interactive_window, bulk_window=bulk_window)
        )

    # -- what is looked at --------------------------------------------------------------------------------------------

    def _look(self, on: str) -> None:
        """After each callback; costs a few comparisons while nothing of interest has changed where it ran."""
        if self.invariants.broken is not None:
            raise self.invariants.broken
        host = self.gateways.get(on)
        if host is not None:
            seen: tuple[object, ...] = host.versions()
            if host.up and host.presence.epoch:
                self._only_one_decides()
        elif on == LOCAL:
            seen = (self.store.flushed_s, *[one.up for one in self.gateways.values()])
        else:
            return
        if seen != self._seen.get(on):
            self._seen[on] = seen
            self._look_closely([one for one in self.gateways.values() if one.up])

    def _only_one_decides(self) -> None:
        leaders = [one for one in self.gateways.values() if one.up and one.presence.epoch]
        if len(leaders) > 1 and sum(one.presence.leads for one in leaders) > 1:
            raise InvariantBroken(
                Invariant.ONE_DECIDER, f"at {self.loop.time():.6f} s several processes decide for one pool: {leaders}"
            )

    def _look_closely(self, hosts: list[GatewayHost]) -> None:
        now_s = self.loop.time()
        windows = self._windows_in_force(now_s)
        counted = self._reach.count(hosts, windows, now_s)
        looks = []
        for name in self.engines:
            works = {class_name: count for (engine, class_name), count in counted.items() if engine == name}
            works["all"] = sum(works.values())
            if any(host.gateway.roster[name].state is EngineState.UP for host in hosts):
                self._last_up_s[name] = now_s
            serving = now_s - self._last_up_s[name] < GRANTED_BEFORE_S
            looks.append(EngineLook(name, serving, works, windows))
        self.invariants.look(Look(now_s=now_s, engines=tuple(looks)))

    def _windows_in_force(self, now_s: float) -> dict[str, int]:
        """The widest of those that somebody may still go by: one who was stopped reads the file when it goes on."""
        read_s = min(one.reads_since_s(now_s) for one in self.gateways.values())
        while len(self._windows) > 1 and self._windows[1][0] < read_s - WINDOWS_KEPT_S:
            del self._windows[0]
        interactive = max(window for _, window, _ in self._windows)
        return {"interactive": interactive, "bulk": max(window for _, _, window in self._windows), "all": interactive}

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as self._background:
            watch = self._background.create_task(self._watch(), name="watch")
            yield
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            self.store.check()
            self._watch_sessions()
            self._watch_works()
            for name, engine in self.engines.items():
                hosts = [host for host in self.gateways.values() if host.up]
                self.invariants.engine_is_left_alone(
                    name,
                    running=engine.running,
                    in_flight=sum(len(host.gateway.ledger[name].entries) for host in hosts),
                    reachable=not engine.host.frozen
                    and not any(self.network.path(host, name).down for host in self.gateways),
                    now_s=self.loop.time(),
                )

    def _watch_sessions(self) -> None:
        """No session outlives its process by more than its validity."""
        for host in self.gateways.values():
            for session_id, died_s in host.killed.items():
                until_s = self.store.latest_end_s(session_id) - WALL_OFFSET_S
                if until_s > died_s + SESSION_VALID_S + CLOCKS_APART_S:
                    raise InvariantBroken(
                        Invariant.SESSION_ENDS,
                        f"{host.name} died at {died_s:.3f} s: its session is valid until {until_s:.3f} s",
                    )

    def _watch_works(self) -> None:
        """Nothing is forgotten between a process and a store that hear each other: waiting works wait there too, and what
        was granted is started or given back."""
        now_s = self.loop.time()
        for name, host in self.gateways.items():
            presence = host.presence
            if not (host.up and presence.connected) or host.host.frozen:
                self._apart_s[name] = now_s
            since_s = max(self._apart_s[name], self.store.flushed_s, host.started_s)
            if now_s - since_s < FORGOTTEN_AFTER_S:
                continue
            before_s = WALL_OFFSET_S + now_s - FORGOTTEN_AFTER_S
            owner = host.gateway.owner
            for one in owner._waiting.values():
                if one.work.accepted_s < before_s and not one.granted.done() and not self.store.holds(one.work.id):
                    raise InvariantBroken(
                        Invariant.NOT_FORGOTTEN,
                        f"at {now_s:.3f} s work {one.work.id} waits on {name}: the store has forgotten it",
                    )
            for work_id, attempt in self.store.left_granted(presence.session, before_s):
                if host.gateway.ledger.engine_of(work_id, attempt) is None and work_id not in owner._settle:
                    raise InvariantBroken(
                        Invariant.NOT_FORGOTTEN,
                        f"at {now_s:.3f} s work {work_id} is granted on {name}: nobody starts it",
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
