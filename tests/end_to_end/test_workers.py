"""`headrace serve --workers 4`: real processes on one listener, killed, frozen, drained and replaced by pid."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from tests.end_to_end.conftest import StartGateway, engines_yaml
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import DONE, MODEL, SSE, Asked, ScriptedEngine, Wire, delta, event, hello
from tests.gateway.ingress.raw_client import Answer, RawClient, chat, request

pytestmark = [pytest.mark.many, pytest.mark.asyncio(loop_scope="module")]

WORKERS = 4
PLACES = 8
POLICY = f"""\
version: 1
classes:
  interactive: {{ttft_sla_s: 2, max_queue: 2000, max_wait_s: 30}}
  bulk: {{max_queue: 100, max_wait_s: 60}}
sizing:
  policy: fixed
  fixed: {{total: {PLACES}, windows: {{interactive: {PLACES}, bulk: 2}}}}
"""
WAIT_S = 60.0
ASK = request("POST", "/v1/chat/completions", chat(model=MODEL), "Content-Type: application/json")
ASK_STREAM = request("POST", "/v1/chat/completions", chat(model=MODEL, stream=True), "Content-Type: application/json")


@dataclass
class Held:
    """A script whose streams show a first token and go on when they are let."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, _asked: Asked, wire: Wire) -> None:
        await wire.head(200, content_type=SSE)
        await wire.part(event(delta("Hel")))
        await self.go.wait()
        for piece in (event(delta("lo")), event(delta(finish="stop")), DONE):
            await wire.part(piece)
        await wire.end()


@dataclass
class Stage:
    gateway: GatewayProcess
    engine: ScriptedEngine

    async def workers(self) -> list[dict[str, Any]]:
        """The workers that serve or start, by name."""
        status = await self.gateway.status()
        found: list[dict[str, Any]] = status["workers"]
        return [worker for worker in found if worker["state"] != "leaving"]

    async def all_up(self) -> list[dict[str, Any]]:
        up: list[dict[str, Any]] = await until(
            self.workers, lambda found: [one["state"] for one in found] == ["up"] * WORKERS
        )
        return up

    async def metric(self, series: str) -> float | None:
        return (await self.gateway.metrics()).get(series)

    @asynccontextmanager
    async def streams(self, count: int) -> AsyncIterator[tuple[Held, list[RawClient]]]:
        """So many streams that have shown their first token; let go when the context ends."""
        self.engine.play = held = Held()
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(RawClient(self.gateway.port, wait_s=WAIT_S)) for _ in range(count)
            ]
            for client in clients:
                await client.send(ASK_STREAM)
            for client in clients:
                await client._until(b'"Hel"')
            try:
                yield held, clients
            finally:
                held.go.set()
                self.engine.play = hello


async def until(look: Callable[[], Any], good: Callable[[Any], object]) -> Any:
    """Look again until what other processes do has come true; the last look."""
    async with asyncio.timeout(WAIT_S):
        while not good(found := await look()):
            await asyncio.sleep(0.02)
    return found


async def ended(client: RawClient) -> bool:
    """Read a stream to its end; True when it is whole."""
    rest = b""
    try:
        while data := await client.read_some():
            rest += data
            if rest.endswith(b"0\r\n\r\n"):
                return b"data: [DONE]" in rest
    except ConnectionResetError:
        pass
    return False


def config(engine: ScriptedEngine, folder: Path, workers: int) -> str:
    (folder / "policy.yaml").write_text(POLICY)
    return f"{engines_yaml(engine)}policy_file: {folder / 'policy.yaml'}\nworkers: {workers}\npoll_s: 0.2\ntimeouts: {{drain_s: 10}}\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("workers")
    async with (
        ScriptedEngine() as engine,
        GatewayProcess(folder / "gateway", config(engine, folder, WORKERS)) as gateway,
    ):
        yield Stage(gateway, engine)


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared: Stage) -> Stage:
    """All four workers up, nothing in flight."""
    shared.engine.play = hello
    await shared.all_up()
    return shared


async def asked(port: int, times: int) -> list[Answer]:
    async with RawClient(port, wait_s=WAIT_S) as client:
        return [await client.ask(ASK) for _ in range(times)]


async def load(stage: Stage, connections: int, each: int) -> int:
    """Whole good answers on so many connections at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(asked(stage.gateway.port, each)) for _ in range(connections)]
    return sum(answer.status == 200 and answer.whole for task in tasks for answer in task.result())


def counters(page: dict[str, float]) -> dict[str, float]:
    """What may never fall."""
    return {
        series: value
        for series, value in page.items()
        if re.match(r"headrace_\w+_(total|bucket|sum|count)(\{|$)", series)
    }


def completed(page: dict[str, float]) -> float:
    return sum(
        value
        for series, value in page.items()
        if series.startswith("headrace_requests_total") and 'result="completed"' in series
    )


async def test_counters_stay_complete_and_never_fall_when_a_worker_is_killed(stage: Stage) -> None:
    before = completed(await stage.gateway.metrics())
    assert await load(stage, 20, 25) == 500
    last = await stage.gateway.metrics()
    assert completed(last) == before + 500
    os.kill((await stage.workers())[1]["pid"], signal.SIGKILL)

    slowest_s = 0.0
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(load(stage, 20, 25))
        for _ in range(20):
            started_s = time.monotonic()
            page = await stage.gateway.metrics()
            slowest_s = max(slowest_s, time.monotonic() - started_s)
            fallen = [series for series, value in counters(last).items() if page.get(series, 0.0) < value]
            assert fallen == []
            last = page

    assert loading.result() == 500
    assert {family.name for family in await openmetrics(stage)} >= {"headrace_requests", "headrace_worker_up"}
    assert completed(await stage.gateway.metrics()) == before + 1000
    assert slowest_s < 1.0


async def openmetrics(stage: Stage) -> list[Metric]:
    """The page in its other format, as the reference parser reads it."""
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(
            f"{stage.gateway.admin_url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
        )
    return list(parse_openmetrics(answer.text))  # type: ignore[no-untyped-call]


async def test_a_dead_workers_gauges_are_gone_and_the_others_are_not(stage: Stage) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(40):
            await (await stack.enter_async_context(RawClient(stage.gateway.port))).ask(request("GET", "/health"), "GET")
        before = await stage.metric("headrace_client_connections")
        dead = (await stage.workers())[2]

        os.kill(dead["pid"], signal.SIGKILL)
        await until(stage.workers, lambda found: dead["pid"] not in [one["pid"] for one in found])

        assert before == 40
        assert dead["connections"] > 5
        assert await stage.metric("headrace_client_connections") == 40 - dead["connections"]


async def test_a_killed_worker_takes_only_its_own_requests_and_frees_its_places_at_once(stage: Stage) -> None:
    async with stage.streams(PLACES) as (held, clients), asyncio.TaskGroup() as group:
        streaming = max(await stage.workers(), key=lambda worker: int(worker["in_flight"]))
        waiting = [group.create_task(status_of(stage.gateway.port)) for _ in range(PLACES)]
        await until(lambda: stage.metric('headrace_queued{class="interactive"}'), lambda queued: queued == PLACES)
        victim = next(worker for worker in await stage.workers() if worker["pid"] == streaming["pid"])
        stage.engine.play = hello

        os.kill(victim["pid"], signal.SIGKILL)
        killed_s = time.monotonic()
        statuses = [await one for one in waiting]
        freed_s = time.monotonic() - killed_s
        held.go.set()
        whole = [await ended(client) for client in clients]

    assert freed_s < 1.0
    assert set(statuses) <= {0, 200}
    assert statuses.count(200) >= PLACES / 2
    assert statuses.count(0) + whole.count(False) == victim["in_flight"]
    assert whole.count(True) >= PLACES / 2


async def status_of(port: int) -> int:
    """Of one request; 0 when its connection broke."""
    try:
        (answer,) = await asked(port, 1)
    except (EOFError, ConnectionResetError):
        return 0
    return answer.status


async def test_a_request_that_waited_at_a_worker_is_found_among_the_deciders_decisions(stage: Stage) -> None:
    async def waiting() -> float:
        page = await stage.gateway.metrics()
        return sum(value for series, value in page.items() if series.startswith("headrace_queued{"))

    async with asyncio.TaskGroup() as group:
        async with stage.streams(PLACES):
            late = group.create_task(asked(stage.gateway.port, 1))
            await until(waiting, lambda works: works == 1)

    (answer,) = late.result()
    found = [
        (one["action"], one["engine"])
        for one in (await stage.gateway.status())["decisions"]
        if one["work_id"] == answer.one("x-headrace-work")
    ]
    assert found[-1] == ("dispatch", answer.one("x-headrace-engine"))


async def test_connections_are_shared_evenly(stage: Stage) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(100):
            await stack.enter_async_context(RawClient(stage.gateway.port))
        async with asyncio.TaskGroup() as group:
            for _ in range(100):
                group.create_task(stack.enter_async_context(RawClient(stage.gateway.port)))
        counts = await until(lambda: _connections(stage), lambda counts: sum(counts) >= 200)

    assert min(counts) >= 40, counts


async def _connections(stage: Stage) -> list[int]:
    return [int(worker["connections"]) for worker in await stage.workers()]


async def test_a_frozen_worker_is_told_and_costs_a_scrape_little(stage: Stage) -> None:
    frozen = (await stage.workers())[0]
    os.kill(frozen["pid"], signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        page = await stage.gateway.metrics()
        took_s = time.monotonic() - started_s

        assert [page[f'headrace_worker_up{{worker="{name}"}}'] for name in range(WORKERS)] == [0, 1, 1, 1]
        assert took_s < 0.6
        assert [answer.status for answer in await asked(stage.gateway.port, 3)] == [200] * 3
    finally:
        os.kill(frozen["pid"], signal.SIGCONT)
    assert (await stage.all_up())[0]["pid"] == frozen["pid"]


async def test_a_worker_told_to_stop_finishes_its_streams_while_another_starts(stage: Stage) -> None:
    async with stage.streams(PLACES) as (held, clients):
        old = max(await stage.workers(), key=lambda worker: int(worker["in_flight"]))
        assert old["in_flight"] > 0

        os.kill(old["pid"], signal.SIGTERM)
        workers = await stage.all_up()

        assert old["pid"] not in [worker["pid"] for worker in workers]
        held.go.set()
        assert [await ended(client) for client in clients] == [True] * PLACES
    await until(stage.gateway.status, lambda status: len(status["workers"]) == WORKERS)


async def test_a_hangup_replaces_every_process_and_cuts_nothing(stage: Stage) -> None:
    before = await stage.gateway.status()
    async with stage.streams(PLACES // 2) as (held, clients):
        stage.engine.play = hello
        done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            keeping = [group.create_task(asking_until(done, stage.gateway.port)) for _ in range(4)]
            os.kill(stage.gateway.pid, signal.SIGHUP)
            await until(lambda: _log(stage), lambda log: "every process replaced" in log)
            done.set()

        held.go.set()
        assert [await ended(client) for client in clients] == [True] * len(clients)
    after = await until(stage.gateway.status, lambda status: len(status["workers"]) == WORKERS)
    old = {before["decider"]["pid"], *(worker["pid"] for worker in before["workers"])}
    assert not old & {after["decider"]["pid"], *(worker["pid"] for worker in after["workers"])}
    assert all(set(asking.result()) == {200} for asking in keeping)


async def asking_until(done: asyncio.Event, port: int) -> list[int]:
    """Ask on one connection for as long as its answers let us, then on the next; an answer that is cut fails."""
    statuses = []
    while not done.is_set():
        async with RawClient(port, wait_s=WAIT_S) as client:
            while not done.is_set():
                answer = await client.ask(ASK)
                statuses.append(answer.status)
                if answer.one("connection") == "close":
                    break
                await asyncio.sleep(0.02)  # a client's pace, in which the worker may find the connection idle
    return statuses


async def _log(stage: Stage) -> str:
    return stage.gateway.log


async def test_settings_that_cannot_be_used_change_nothing_on_a_hangup(stage: Stage) -> None:
    before = [worker["pid"] for worker in await stage.workers()]
    file = stage.gateway.log_path.parent / "headrace.yaml"
    good = file.read_text()
    file.write_text(good + "no_such_setting: 1\n")

    os.kill(stage.gateway.pid, signal.SIGHUP)
    await until(lambda: _log(stage), lambda log: "settings refused" in log)
    file.write_text(good)

    assert "no_such_setting" in stage.gateway.log
    assert [worker["pid"] for worker in await stage.workers()] == before


async def test_works_go_on_while_the_decider_is_replaced(stage: Stage) -> None:
    dead = (await stage.gateway.status())["decider"]["pid"]

    os.kill(dead, signal.SIGKILL)
    good = await load(stage, 10, 10)

    assert good == 100
    status = await until(stage.gateway.status, lambda status: status.get("leads") and status["decider"]["pid"] != dead)
    assert status["decider"]["state"] == "up"


async def test_no_secret_stands_in_arguments_or_environment(stage: Stage) -> None:
    status = await stage.gateway.status()
    for process in (status["decider"], *status["workers"]):
        for part in ("cmdline", "environ"):
            assert b"engine-key-0" not in Path(f"/proc/{process['pid']}/{part}").read_bytes()


async def processes(gateway: GatewayProcess) -> list[int]:
    status = await gateway.status()
    return [status["decider"]["pid"], *(worker["pid"] for worker in status["workers"])]


async def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def test_processes_die_with_their_supervisor_and_the_next_one_drains(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with ScriptedEngine() as engine:
        async with start_gateway(config(engine, tmp_path, 2)) as gateway:
            pids = await processes(gateway)
            os.kill(pids[1], signal.SIGSTOP)

            os.kill(gateway.pid, signal.SIGKILL)
            await until(lambda: gone(pids), bool)

        async with start_gateway(config(engine, tmp_path, 2)) as gateway:
            pids = await processes(gateway)
            async with Stage(gateway, engine).streams(3) as (held, clients):
                assert gateway.process is not None
                gateway.process.send_signal(signal.SIGTERM)
                await until(gateway.status, lambda status: all(one["state"] == "leaving" for one in status["workers"]))
                held.go.set()

                assert [await ended(client) for client in clients] == [True] * 3
                assert await asyncio.wait_for(gateway.process.wait(), WAIT_S) == 0
            assert await gone(pids)
            stopped = json.loads(gateway.log.splitlines()[-1])
            assert (stopped["event"], stopped["cut_short"]) == ("stopped", False)


async def test_a_policy_that_cannot_be_read_is_told_and_starts_nothing(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    async with ScriptedEngine() as engine:
        text = config(engine, tmp_path, 2)
        (tmp_path / "policy.yaml").write_text("version: 1\nclasses: {interactive: {max_queue: -1}}\n")
        gateway = start_gateway(text)
        with pytest.raises(AssertionError, match="ended at its start"):
            await gateway.__aenter__()

    assert gateway.process is not None
    assert gateway.process.returncode == 2
    assert "policy.yaml:2: classes.interactive.max_queue is -1" in gateway.log
    assert "Traceback" not in gateway.log


async def test_a_second_stop_signal_ends_all_at_once(stage: Stage) -> None:
    """The last test: it ends the gateway of all the others."""
    pids = await processes(stage.gateway)
    async with stage.streams(3) as (_, clients):
        assert stage.gateway.process is not None
        stage.gateway.process.send_signal(signal.SIGTERM)
        await until(stage.gateway.status, lambda status: all(one["state"] == "leaving" for one in status["workers"]))

        stage.gateway.process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(stage.gateway.process.wait(), 5)

        assert [await ended(client) for client in clients] == [False] * 3
    assert code == 1
    assert await gone(pids)
