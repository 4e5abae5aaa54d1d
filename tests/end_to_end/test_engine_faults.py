"""Engines that die, freeze, come back, move or answer badly, behind the whole process: who tries again, who is told what."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import orjson
import pytest

from tests.end_to_end.conftest import Stage, StartGateway, engines_yaml
from tests.end_to_end.engine_process import EngineProcess, eventually, simulated
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.scripted_engine import (
    DONE,
    MODEL,
    Asked,
    ScriptedEngine,
    Wire,
    answer,
    delta,
    event,
    hello,
    stream,
)
from tests.end_to_end.two_gateways import holders
from tests.gateway.ingress.raw_client import Answer, RawClient, request
from tests.ports import free_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.many]

FAST = "poll_s: 0.2\ntimeouts: {connect_s: 0.5, first_byte_s: 1, inter_token_s: 1}\n"


def chat(model: str = MODEL, *headers: str, **more: object) -> bytes:
    """A request for a stream."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
    return request("POST", "/v1/chat/completions", orjson.dumps(body), "Content-Type: application/json", *headers)


async def ask(gateway: GatewayProcess, data: bytes) -> Answer:
    async with RawClient(gateway.port) as client:
        return await client.ask(data)


async def state(gateway: GatewayProcess, name: str) -> str:
    (engine,) = [engine for engine in (await gateway.status())["engines"] if engine["name"] == name]
    return str(engine["state"])


async def total(gateway: GatewayProcess, name: str, label: str = "") -> float:
    page = await gateway.metrics()
    return sum(value for series, value in page.items() if series.partition("{")[0] == name and label in series)


# -- trying elsewhere (FAI-01, FAI-03, FAI-04, FAI-15) -----------------------------------------------------------------


@pytest.mark.parametrize("end", ["fin", "rst", "clean"])
async def test_an_answer_that_has_begun_is_never_begun_again(stage: Stage, end: str) -> None:
    stage.first.play = stage.second.play = stream(event(delta("Hel")), end=end)

    answered = await stage.ask(chat())

    assert answered.body.count(b"Hel") == 1
    assert b'"error"' in answered.body
    assert DONE not in answered.body
    assert not answered.whole
    assert len(stage.first.requests) + len(stage.second.requests) == 1


BAD_BEFORE_ANY_BYTE = {
    "closed": stream(end="fin"),
    "reset": stream(end="rst"),
    "only a role": stream(event(delta()), end="fin"),
    "500": answer(500, {"error": {"message": "dead", "type": "InternalServerError", "code": 500}}),
    "503": answer(503, {"error": {"message": "busy", "type": "ServiceUnavailable", "code": 503}}),
    "429": answer(429, {"error": {"message": "busy", "type": "rate_limit_error", "code": 429}}),
    "an error event": stream(event({"error": {"message": "dead", "code": 500}}), DONE),
    "nothing but the end": stream(DONE),
}


@pytest.mark.parametrize("bad", BAD_BEFORE_ANY_BYTE, ids=str)
async def test_a_failure_before_any_byte_is_tried_elsewhere_once_and_unseen(stage: Stage, bad: str) -> None:
    played: list[str] = []

    async def once_bad(asked: Asked, wire: Wire) -> None:
        played.append(bad)
        await (BAD_BEFORE_ANY_BYTE[bad] if len(played) == 1 else hello)(asked, wire)

    stage.first.play = stage.second.play = once_bad
    before = await total(stage.gateway, "headrace_retries_total")

    answered = await stage.ask(chat())

    assert (answered.status, answered.whole) == (200, True)
    assert answered.body == event(delta("Hel")) + event(delta("lo")) + event(delta(finish="stop")) + DONE
    assert (len(stage.first.requests), len(stage.second.requests)) == (1, 1)
    assert await total(stage.gateway, "headrace_retries_total") - before == 1


async def test_with_nobody_better_the_last_failure_is_told(stage: Stage) -> None:
    stage.first.play = stage.second.play = BAD_BEFORE_ANY_BYTE["reset"]

    answered = await stage.ask(chat())

    assert answered.status == 502
    assert len(stage.first.requests) + len(stage.second.requests) == 2


async def test_a_prompt_that_was_accepted_in_silence_is_not_prefilled_elsewhere(start_gateway: StartGateway) -> None:
    async def silent(_asked: Asked, wire: Wire) -> None:
        await wire.gone.wait()

    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine(play=silent)) for _ in range(3)]
        gateway = await stack.enter_async_context(start_gateway(engines_yaml(*engines) + FAST))
        started_s = time.monotonic()

        answered = await ask(gateway, chat())

        took_s = time.monotonic() - started_s
        await eventually(lambda: sum(engine.aborted for engine in engines) == 1, within_s=2.0)

    assert answered.status == 504
    assert "first_byte_s" in str(answered.error()["message"])
    assert sum(len(engine.requests) for engine in engines) == 1
    assert took_s < 3.0


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_requests_that_an_engine_refuses_do_not_take_it_away_from_others(stage: Stage, status: int) -> None:
    stage.first.play = answer(status, {"error": {"message": "no", "type": "BadRequestError", "code": status}})
    async with RawClient(stage.port) as client:
        for _ in range(30):
            refused = await client.ask(chat("only-first"))
            assert refused.status == (502 if status == 401 else status)
    stage.first.play = hello

    served = await stage.ask(chat("only-first"))

    assert served.status == 200
    assert await state(stage.gateway, "e0") == "up"


async def test_an_engine_that_resets_everything_costs_no_client_an_answer(stage: Stage) -> None:
    stage.first.play = BAD_BEFORE_ANY_BYTE["reset"]

    answered = await asyncio.gather(*(stage.ask(chat()) for _ in range(40)))

    assert {one.status for one in answered} == {200}
    assert all(one.body.endswith(DONE) for one in answered)


# -- processes that die, freeze and return -----------------------------------------------------------------------------


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[tuple[EngineProcess, EngineProcess]]:
    """Two simulated engines on ports of their own, to which they can come back."""
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(simulated(tmp_path, model=MODEL, listen=f"127.0.0.1:{free_port()}"))
            for _ in range(2)
        ]
        yield first, second


def before(*engines: EngineProcess) -> str:
    lines = [f"{{name: e{number}, url: '{engine.url}'}}" for number, engine in enumerate(engines)]
    return f"engines: [{', '.join(lines)}]\n{FAST}"


async def begun(client: RawClient) -> bytes:
    """Ask for a stream of four seconds on a connection that ends with it, and read until its first text."""
    await client.send(chat(MODEL, "Connection: close", max_tokens=600, ignore_eos=True))
    head = await client.read_head()
    assert head.status == 200
    seen = b""
    while seen.count(b'"content":"') < 2:
        seen += await client.read_some()
    return seen


async def begun_on_both(gateway: GatewayProcess, stack: AsyncExitStack) -> list[RawClient]:
    """Four such streams, two on each engine."""
    clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(4)]
    for client in clients:
        await begun(client)
    for name in ("e0", "e1"):
        assert await total(gateway, "headrace_in_flight", f'engine="{name}"') == 2
    return clients


async def many(gateway: GatewayProcess, count: int = 20) -> list[Answer]:
    return list(await asyncio.gather(*(ask(gateway, chat(max_tokens=4)) for _ in range(count))))


async def _is(gateway: GatewayProcess, name: str, wanted: str) -> bool:
    return await state(gateway, name) == wanted


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="function")
async def test_a_killed_engine_breaks_only_what_ran_there_and_serves_again_when_it_is_back(
    engines: tuple[EngineProcess, EngineProcess], start_gateway: StartGateway
) -> None:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(start_gateway(before(*engines)))
        clients = await begun_on_both(gateway, stack)

        await engines[0].kill()
        during = await many(gateway)
        await eventually(lambda: _is(gateway, "e0", "down"), within_s=2.0)
        ends = await asyncio.gather(*(client.read_to_end() for client in clients))
        in_flight = await total(gateway, "headrace_in_flight")
        await engines[0].start()
        back_s = time.monotonic()
        await eventually(lambda: _is(gateway, "e0", "up"), within_s=2.0)
        back_s = time.monotonic() - back_s
        after = await many(gateway)

    broken = [end for end in ends if DONE not in end]
    assert len(broken) == 2
    assert all(b'"error"' in end for end in broken)
    assert {one.status for one in during} == {one.status for one in after} == {200}
    assert in_flight == 0
    assert back_s < 1.0
    assert {one.one("x-headrace-engine") for one in after} == {"e0", "e1"}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="function")
async def test_streams_of_a_frozen_engine_are_told_in_time_and_it_forgets_them_when_it_thaws(
    engines: tuple[EngineProcess, EngineProcess], start_gateway: StartGateway
) -> None:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(start_gateway(before(*engines)))
        clients = await begun_on_both(gateway, stack)

        engines[0].signal(signal.SIGSTOP)
        ends = await asyncio.gather(*(client.read_to_end() for client in clients))
        in_flight = await total(gateway, "headrace_in_flight")
        engines[0].signal(signal.SIGCONT)
        await eventually(lambda: _idle(engines[0]))
        after = await many(gateway)

    told = [end for end in ends if DONE not in end]
    assert len(told) == 2
    assert all(b"inter_token_s" in end for end in told)
    assert in_flight == 0
    assert {one.status for one in after} == {200}
    assert {one.one("x-headrace-engine") for one in after} == {"e0", "e1"}


async def _idle(engine: EngineProcess) -> bool:
    return await engine.metric("vllm:num_requests_running") == 0


# -- addresses that change hands (FAI-13) ------------------------------------------------------------------------------


async def test_another_model_at_an_engines_address_gets_only_its_own_requests(start_gateway: StartGateway) -> None:
    port = free_port()
    async with AsyncExitStack() as stack:
        stays = await stack.enter_async_context(ScriptedEngine())
        async with ScriptedEngine(port=port) as first:
            gateway = await stack.enter_async_context(start_gateway(engines_yaml(first, stays) + FAST))
            assert (await ask(gateway, chat())).status == 200
        await eventually(lambda: _is(gateway, "e0", "down"))
        other = await stack.enter_async_context(ScriptedEngine(models=["other"], port=port))
        await eventually(lambda: _is(gateway, "e0", "up"))

        old = await many(gateway)
        new = await ask(gateway, chat("other"))

    assert {(one.status, one.one("x-headrace-engine")) for one in old} == {(200, "e1")}
    assert (new.status, new.one("x-headrace-engine")) == (200, "e0")
    assert [asked.json()["model"] for asked in other.requests] == ["other"]


async def test_a_service_that_is_no_engine_gets_no_work(start_gateway: StartGateway) -> None:
    port = free_port()

    async def no_engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                seen.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    seen: list[bytes] = []
    async with AsyncExitStack() as stack:
        stays = await stack.enter_async_context(ScriptedEngine())
        async with ScriptedEngine(port=port) as first:
            gateway = await stack.enter_async_context(start_gateway(engines_yaml(first, stays) + FAST))
        await eventually(lambda: _is(gateway, "e0", "down"))
        taken = await asyncio.start_server(no_engine, "127.0.0.1", port)
        await eventually(lambda: len(seen) > 4)

        answered = await many(gateway)
        taken.close()

    assert {(one.status, one.one("x-headrace-engine")) for one in answered} == {(200, "e1")}
    assert not any(line.startswith(b"POST") for line in seen)


# -- addresses of every form (FAI-16) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "named"), [("::1", "[::1]"), ("127.0.0.1", "localhost")])
async def test_engines_are_found_at_ipv6_literals_and_names_of_both_families(
    start_gateway: StartGateway, bound: str, named: str
) -> None:
    async with ScriptedEngine(host=bound) as engine:
        config = f"engines: [{{name: six, url: 'http://{named}:{engine.port}'}}]\n{FAST}"
        async with start_gateway(config) as gateway:
            started_s = time.monotonic()
            answered = await ask(gateway, chat())
            took_s = time.monotonic() - started_s
            shown = f"six=auto+http://{named}:{engine.port}" in gateway.log

    assert answered.status == 200
    assert engine.requests[0].one("host") == f"{named}:{engine.port}"
    assert took_s < 0.3
    assert shown


async def test_the_gateway_listens_on_ipv6(stage: Stage, tmp_path: Path) -> None:
    engine = f"--engine={stage.first.url}"
    listen = ("--listen", "[::1]:0", "--admin-listen", "[::1]:0", "--state-dir", str(tmp_path / "state"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", "serve", engine, *listen),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        public, admin = re.findall(r"http://\[::1\]:\d+", line)
        async with httpx.AsyncClient(trust_env=False) as client:
            listed = await client.get(f"{public}/v1/models")
            ready = await client.get(f"{admin}/readyz")
    finally:
        process.terminate()
        await process.wait()

    assert (listed.status_code, ready.status_code) == (200, 200)


# -- engines whose pages say 200 while nothing moves (FAI-07, FAI-08, FAI-09, FAI-15) -----------------------------------

IN_SECONDS = "poll_s: 0.2\ntimeouts: {connect_s: 1, first_byte_s: 30, inter_token_s: 30}\nhealth: {silence_s: 1.5}\n"


async def never(_asked: Asked, wire: Wire) -> None:
    """Accepts a prompt and never answers."""
    await wire.gone.wait()


async def out_of_rotation(gateway: GatewayProcess, name: str) -> str | None:
    (engine,) = [engine for engine in (await gateway.status())["engines"] if engine["name"] == name]
    found: str | None = engine["out_of_rotation"]
    return found


async def _is_out(gateway: GatewayProcess, name: str, why: str | None) -> bool:
    return await out_of_rotation(gateway, name) == why


async def test_an_engine_that_accepts_and_never_answers_leaves_in_seconds_and_returns_with_a_token(
    start_gateway: StartGateway,
) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine()) for _ in range(3)]
        gateway = await stack.enter_async_context(start_gateway(engines_yaml(*engines) + IN_SECONDS))
        engines[0].play = never
        stuck = [asyncio.create_task(ask(gateway, chat())) for _ in range(9)]
        await eventually(lambda: _is_out(gateway, "e0", "stalled"), within_s=8.0)
        held = len(engines[0].requests)

        while_out = await many(gateway, 30)
        await eventually(lambda: asyncio.sleep(0, len(engines[0].trials) >= 1), within_s=8.0)
        still = await out_of_rotation(gateway, "e0")
        for task in stuck:
            task.cancel()
        engines[0].play = hello
        await eventually(lambda: _is_out(gateway, "e0", None), within_s=15.0)
        after: list[Answer] = []

        async def reaches_it() -> bool:
            """Answers are instant here, so that two engines may well serve all of a burst."""
            after.extend(await many(gateway, 30))
            return "e0" in {one.one("x-headrace-engine") for one in after}

        await eventually(reaches_it, within_s=5.0)

    assert {(one.status, one.one("x-headrace-engine") == "e0") for one in while_out} == {(200, False)}
    assert (len(engines[0].requests) >= held, still) == (True, "stalled")
    assert {one.status for one in after} == {200}


async def test_an_engine_that_resets_everything_gets_next_to_nothing_within_seconds(
    start_gateway: StartGateway,
) -> None:
    async with AsyncExitStack() as stack:
        bad, good = [await stack.enter_async_context(ScriptedEngine()) for _ in range(2)]
        bad.play = BAD_BEFORE_ANY_BYTE["reset"]
        gateway = await stack.enter_async_context(start_gateway(engines_yaml(bad, good) + IN_SECONDS))
        statuses: list[int] = []

        for _ in range(10):
            statuses += [one.status for one in await many(gateway, 10)]
            await asyncio.sleep(0.1)
        falls = await total(gateway, "headrace_engine_falls_total", 'reason="failing"')
        shown = await total(gateway, "headrace_engine_out_of_rotation", 'engine="e0"')

    assert set(statuses) == {200}
    assert len(bad.requests) <= 30
    assert (falls >= 1, shown) == (True, 1)


async def test_an_engine_that_broke_one_worker_s_answers_is_out_for_the_other_worker_too(
    start_gateway: StartGateway,
) -> None:
    async with AsyncExitStack() as stack:
        bad, good = [await stack.enter_async_context(ScriptedEngine()) for _ in range(2)]
        gateway = await stack.enter_async_context(start_gateway(f"{engines_yaml(bad, good)}{IN_SECONDS}workers: 2\n"))
        await gateway.until_ready()
        pids = [int(worker["pid"]) for worker in (await gateway.status())["workers"]]
        clients: dict[int, list[RawClient]] = {pid: [] for pid in pids}
        while not all(clients.values()):
            client = await stack.enter_async_context(RawClient(gateway.port))
            assert (await client.ask(chat(max_tokens=4))).status == 200
            clients[holders(gateway.port, pids)[client.local_port]].append(client)
        breaking, other = (clients[pid][0] for pid in pids)
        bad.play = BAD_BEFORE_ANY_BYTE["reset"]

        async def broke() -> bool:
            await breaking.ask(chat(max_tokens=4))
            return await _is_out(gateway, "e0", "failing")

        async def heard() -> bool:
            """The other worker follows what the decider published, a moment later."""
            before = len(bad.requests)
            told.extend([await other.ask(chat(max_tokens=4)) for _ in range(10)])
            return len(bad.requests) == before

        told: list[Answer] = []
        await eventually(broke, within_s=20.0)
        broken = len(bad.requests)
        await eventually(heard, within_s=5.0)
        before = len(bad.requests)
        answers = [await other.ask(chat(max_tokens=4)) for _ in range(30)]
        after = len(bad.requests)

    assert broken >= 5
    assert {(one.status, one.one("x-headrace-engine")) for one in told + answers} == {(200, "e1")}
    assert after == before


async def test_when_every_engine_fails_none_leaves_and_none_is_asked_twice_for_everything(
    start_gateway: StartGateway,
) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine()) for _ in range(3)]
        for engine in engines:
            engine.play = BAD_BEFORE_ANY_BYTE["500"]
        gateway = await stack.enter_async_context(start_gateway(engines_yaml(*engines) + IN_SECONDS))

        for _ in range(12):
            assert {one.status for one in await many(gateway, 25)} == {500}
        states = [await state(gateway, name) for name in ("e0", "e1", "e2")]
        withheld = await total(gateway, "headrace_retries_withheld_total")

    asked = sum(len(engine.requests) for engine in engines)
    assert asked <= 300 * 1.2
    assert withheld == 600 - asked
    assert states.count("up") >= 2


@pytest.mark.slow
async def test_engines_whose_health_page_is_late_stay_while_they_answer(start_gateway: StartGateway) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(ScriptedEngine()) for _ in range(2)]
        gateway = await stack.enter_async_context(start_gateway(engines_yaml(*engines) + IN_SECONDS))
        for engine in engines:
            engine.page_delay_s = 60.0

        answered = []
        for _ in range(24):
            answered += await many(gateway, 4)
            await asyncio.sleep(0.5)
        states = [await state(gateway, name) for name in ("e0", "e1")]

    assert {one.status for one in answered} == {200}
    assert states == ["up", "up"]


async def test_an_engine_that_says_it_is_shutting_down_is_drained_at_once(start_gateway: StartGateway) -> None:
    said = {
        "error": {"message": "cannot schedule new futures after shutdown", "type": "InternalServerError", "code": 500}
    }
    async with AsyncExitStack() as stack:
        leaving, stays = [await stack.enter_async_context(ScriptedEngine()) for _ in range(2)]
        gateway = await stack.enter_async_context(start_gateway(engines_yaml(leaving, stays) + IN_SECONDS))
        leaving.play = answer(500, said)

        first = await many(gateway, 8)
        await eventually(lambda: _is(gateway, "e0", "draining"), within_s=5.0)
        asked = len(leaving.requests)
        later = await many(gateway, 20)

    assert {one.status for one in [*first, *later]} == {200}
    assert len(leaving.requests) == asked


async def test_streams_of_an_engine_that_listens_no_more_are_not_waited_for(start_gateway: StartGateway) -> None:
    async def begins_and_stops(_asked: Asked, wire: Wire) -> None:
        await wire.head()
        await wire.part(event(delta("Hel")))
        await wire.gone.wait()

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(ScriptedEngine(play=begins_and_stops))
        gateway = await stack.enter_async_context(start_gateway(engines_yaml(engine) + IN_SECONDS))
        asking = asyncio.create_task(ask(gateway, chat()))
        await eventually(lambda: asyncio.sleep(0, len(engine.requests) == 1))

        await engine.stop_listening()
        started_s = time.monotonic()
        answered = await asking
        took_s = time.monotonic() - started_s

    assert b"Hel" in answered.body
    assert b'"error"' in answered.body
    assert DONE not in answered.body
    assert took_s < 8.0
