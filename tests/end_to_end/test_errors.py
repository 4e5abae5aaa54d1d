"""What a client is told when something is wrong: the status, a body of its dialect, a hint when to return, and fast."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from tests.end_to_end.conftest import SHORT_TIMEOUTS, Stage, StartGateway, engines_yaml
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.routes import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    TRANSCRIPTIONS,
    WORK,
    WorkRoute,
    ask,
    chat_body,
    post,
)
from tests.end_to_end.scripted_engine import (
    MODEL,
    Asked,
    Script,
    ScriptedEngine,
    Wire,
    answer,
    delta,
    event,
    hello,
    stream,
)
from tests.gateway.ingress.raw_client import Answer, RawClient, request
from tests.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTLY_S = 0.1
STAGE_S = 8.0
QUICK_TIMEOUTS = """\
poll_s: 0.1
timeouts:
  connect_s: 0.4
  first_byte_s: 0.4
  inter_token_s: 0.5
  total_s: 1.5
  nonstream_wait_s: 0.4
  queue_headers_after_s: 5
  request_head_s: 0.4
  request_body_s: 0.4
"""


@dataclass
class Quick:
    """A gateway with short time-outs before one engine."""

    gateway: GatewayProcess
    engine: ScriptedEngine

    @property
    def port(self) -> int:
        return self.gateway.port


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_quick(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Quick]:
    async with ScriptedEngine() as engine:
        config = engines_yaml(engine) + QUICK_TIMEOUTS
        async with GatewayProcess(tmp_path_factory.mktemp("quick"), config) as gateway:
            yield Quick(gateway, engine)


@pytest.fixture
def quick(shared_quick: Quick) -> Quick:
    shared_quick.engine.play = hello
    shared_quick.engine.requests.clear()
    return shared_quick


def play_on_both(stage: Stage, script: Script) -> None:
    stage.first.play = stage.second.play = script


def has_hint(answered: Answer) -> bool:
    """A Retry-After that SDKs honour."""
    hint = answered.one("retry-after")
    return hint.isdigit() and 1 <= int(hint) <= 60


# -- the engine's own errors (ERR-01, ERR-02) --------------------------------------------------------------------------

SATURATED = {"error": {"message": "queue full", "type": "overloaded_error", "param": None, "code": None}}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("status", [429, 503, 529])
async def test_an_overloaded_engine_is_told_as_such_with_its_hint(stage: Stage, status: int, streamed: bool) -> None:
    play_on_both(stage, answer(status, SATURATED, "Retry-After: 3", "X-RateLimit-Remaining-Requests: 0"))

    answered = await post(stage.port, CHAT, body=chat_body(stream=streamed))

    assert (answered.status, answered.json()) == (status, SATURATED)
    assert answered.one("content-type") == "application/json"
    assert answered.one("retry-after") == "3"
    assert answered.one("x-ratelimit-remaining-requests") == "0"
    assert {len(stage.first.requests), len(stage.second.requests)} == {1}, "the other engine may have room"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["Retry-After: 120"], "60"),
        (["Retry-After: 0"], "2"),
        (["Retry-After: 0.4"], "1"),
        (["Retry-After: 7.2"], "8"),
        (["Retry-After: soon"], "2"),
        (["Retry-After: 9" + "9" * 400], "60"),
        ([], "2"),
        (["Date: Sun, 06 Nov 1994 08:49:37 GMT", "Retry-After: Sun, 06 Nov 1994 08:49:42 GMT"], "5"),
        (["Date: Sun, 06 Nov 1994 08:49:37 GMT", "Retry-After: Sun, 06 Nov 1994 08:40:00 GMT"], "1"),
        (["Retry-After: 3", "Retry-After-Ms: 2500"], "3"),
    ],
    ids=str,
)
async def test_a_hint_is_whole_seconds_that_sdks_honour(stage: Stage, given: list[str], told: str) -> None:
    play_on_both(stage, answer(503, SATURATED, *given))

    answered = await post(stage.port, CHAT)

    assert (answered.status, answered.one("retry-after")) == (503, told)
    assert answered.one("retry-after-ms") == ("2500" if len(given) > 1 and "Ms" in given[1] else "")


@pytest.mark.parametrize("route", [RESPONSES, MESSAGES, EMBEDDINGS], ids=lambda route: route.path)
@pytest.mark.parametrize(
    "said",
    [
        {"detail": "Not Found"},
        {"error": {"message": "Not Found", "type": "NotFoundError", "param": None, "code": 404}},
        {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}},
    ],
    ids=["fastapi", "vllm", "llamacpp"],
)
async def test_an_engine_without_the_route_is_named_with_it_in_the_callers_dialect(
    stage: Stage, route: WorkRoute, said: dict[str, object]
) -> None:
    play_on_both(stage, answer(404, said))

    answered = await post(stage.port, route)

    engine = answered.one("x-headrace-engine")
    assert answered.status == 404
    assert f"engine {engine} has no route {route.path}: " in str(answered.error()["message"])
    assert answered.error().get("code", "route_not_served") == "route_not_served"
    assert (answered.json().get("type") == "error") is (route is MESSAGES)


@pytest.mark.parametrize(
    "said",
    [
        {"error": {"message": "The model `x` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}},
        {"error": {"message": "", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}},
    ],
    ids=["message", "code"],
)
async def test_a_404_that_says_more_than_that_passes_as_the_engine_wrote_it(
    stage: Stage, said: dict[str, object]
) -> None:
    play_on_both(stage, answer(404, said))

    answered = await post(stage.port, CHAT)

    assert (answered.status, answered.json()) == (404, said)


SHAPES: dict[str, tuple[object, str, dict[str, object]]] = {
    "openai": (
        {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "length"}},
        "application/json",
        {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "length"},
    ),
    "openai with charset and a vendor field": (
        {"error": {"message": "too long", "type": "x", "param": None, "code": 400, "n_ctx": 4096}},
        "application/json; charset=utf-8",
        {"message": "too long", "type": "x", "param": None, "code": 400, "n_ctx": 4096},
    ),
    "vllm until 0.10": (
        {"object": "error", "message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400},
        "application/json",
        {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": "400"},
    ),
    "tgi": (
        {"error": "too long", "error_type": "validation"},
        "application/json",
        {"message": "too long", "type": "validation"},
    ),
    "fastapi": ({"detail": "too long"}, "application/json", {"message": "too long", "type": "invalid_request_error"}),
    "fastapi's validation": (
        {"detail": [{"loc": ["body", "messages"], "msg": "too long", "type": "missing"}]},
        "application/json",
        {"message": "too long", "type": "invalid_request_error"},
    ),
    "plain text": (b"too long", "text/plain", {"message": "too long", "type": "invalid_request_error"}),
    "a page of a proxy": (b"<html>nginx</html>", "text/html", {"type": "invalid_request_error"}),
    "nothing": (b"", "", {"type": "invalid_request_error"}),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("status", [400, 404, 409, 413, 422])
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_clients_error_keeps_its_status_and_says_what_the_engine_said(
    stage: Stage, shape: str, status: int, streamed: bool
) -> None:
    body, content_type, said = SHAPES[shape]
    play_on_both(stage, answer(status, body, content_type=content_type))

    answered = await post(stage.port, CHAT, body=chat_body(stream=streamed))

    assert answered.status == status
    assert answered.one("content-type").startswith("application/json")
    error = answered.error()
    assert said.items() <= error.items()
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["message"]
    assert len(stage.first.requests + stage.second.requests) == 1, "another engine would say the same"


@pytest.mark.parametrize("route", [COMPLETIONS, EMBEDDINGS, RESPONSES, TRANSCRIPTIONS], ids=str)
async def test_an_engines_error_is_kept_on_every_route(stage: Stage, route: WorkRoute) -> None:
    body = b'{"error":{"message":"no","type":"t","param":"p","code":"c","x":1.0}}\n'
    play_on_both(stage, answer(400, body))

    answered = await post(stage.port, route)

    assert (answered.status, answered.body) == (400, body)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": 400}},
        {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}},
        {"detail": "too long"},
    ],
)
async def test_an_error_of_a_messages_route_has_the_messages_form(stage: Stage, body: object) -> None:
    play_on_both(stage, answer(400, body))

    answered = await post(stage.port, MESSAGES)

    assert answered.status == 400
    assert answered.json()["type"] == "error"
    assert (answered.error()["type"], answered.error()["message"]) == ("invalid_request_error", "too long")


@pytest.mark.parametrize(
    "body", [{"error": "too long", "error_type": "validation"}, {"detail": "too long"}, b"too long"]
)
async def test_an_error_of_tgis_routes_has_tgis_form(stage: Stage, body: object) -> None:
    stage.tgi.play = answer(422, body)

    answered = await ask(stage.port, request("POST", "/generate", b'{"inputs":"hi"}'))

    assert answered.status == 422
    assert answered.json()["error"] == "too long"
    assert answered.json()["error_type"]


@pytest.mark.parametrize(
    ("status", "header"), [(401, "WWW-Authenticate: Bearer"), (403, "X-A: b"), (307, "Location: /x")]
)
async def test_what_is_between_gateway_and_engine_is_no_business_of_the_client(
    stage: Stage, status: int, header: str
) -> None:
    play_on_both(stage, answer(status, {"error": "Unauthorized"}, header))

    answered = await post(stage.port, CHAT)

    assert answered.status == 502
    assert answered.error()["type"] == "server_error"
    assert answered.one("www-authenticate") == answered.one("location") == ""


async def test_errors_of_clients_do_not_count_against_the_engine(stage: Stage) -> None:
    stage.first.play = stage.second.play = answer(400, SHAPES["openai"][0])
    statuses = [(await post(stage.port, CHAT)).status for _ in range(30)]
    play_on_both(stage, hello)

    answered = await post(stage.port, CHAT)

    assert (statuses, answered.status) == ([400] * 30, 200)
    assert {engine["state"] for engine in (await stage.gateway.status())["engines"]} == {"up"}


# -- engines that break (ERR-03) ---------------------------------------------------------------------------------------


def raw(data: bytes, end: str = "fin") -> Script:
    """Send these bytes instead of an answer, then end the connection (fin, rst) or say nothing more (hang)."""

    async def script(_asked: Asked, wire: Wire) -> None:
        if data:
            await wire.raw(data)
        if end == "hang":
            await wire.gone.wait()
        elif end == "rst":
            wire.rst()
        else:
            wire.fin()

    return script


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BROKEN = {
    "reset": raw(b"", "rst"),
    "closed": raw(b""),
    "not HTTP": raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "HTTP/2": raw(b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"),
    "half a head": raw(HEAD[:20]),
    "a status of 999": raw(b"HTTP/1.1 999 No\r\nContent-Length: 0\r\n\r\n"),
    "an upgrade": raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"),
    "two lengths": raw(HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    "length and chunks": raw(HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"),
    "a bad chunk": raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}\r\n"),
    "a body cut short": raw(HEAD + b'Content-Length: 100\r\n\r\n{"id":'),
    "chunks cut short": raw(HEAD + b'Transfer-Encoding: chunked\r\n\r\n6\r\n{"id":\r\n'),
    "a head without end": raw(HEAD + b"X-Long: " + b"x" * 200_000),
}


async def settled(gateway: GatewayProcess, result: str, status: int) -> float:
    """Requests that the gateway has counted with this result and status."""
    page = await gateway.metrics()
    return sum(
        value
        for series, value in page.items()
        if series.startswith("headrace_requests_total{") and f'result="{result}",status="{status}"' in series
    )


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("route", [CHAT, TRANSCRIPTIONS], ids=str)
async def test_a_broken_answer_is_a_502(quick: Quick, broken: str, route: WorkRoute) -> None:
    before = await settled(quick.gateway, "engine_failed", 502)
    quick.engine.play = BROKEN[broken]

    answered = await post(quick.port, route)

    assert answered.status == 502
    assert answered.error()["type"] == "server_error"
    assert answered.error()["message"]
    assert await settled(quick.gateway, "engine_failed", 502) == before + 1


async def trickle(_asked: Asked, wire: Wire) -> None:
    await wire.head(content_type="application/json")
    while not wire.gone.is_set():
        await wire.part(b" ")
        await asyncio.sleep(0.05)


SILENT = {
    "before its head": (raw(b"", "hang"), "first_byte"),
    "after its head": (raw(HEAD + b"Content-Length: 10\r\n\r\n", "hang"), "first_byte"),
    "in its body": (raw(HEAD + b"Content-Length: 10\r\n\r\n{", "hang"), "inter_token"),
    "without end": (trickle, "total"),
    "a stream before its first event": (stream(end="hang"), "first_byte"),
    "a stream after its opening": (stream(event(delta("")), end="hang"), "inter_token"),
}


@pytest.mark.parametrize("silent", SILENT)
async def test_an_engine_that_keeps_silent_is_a_504_that_names_the_bound(quick: Quick, silent: str) -> None:
    script, bound = SILENT[silent]
    series = f'headrace_requests_total{{class="interactive",model="{MODEL}",result="timed_out",status="504",tenant="default"}}'
    before = (await quick.gateway.metrics()).get(series, 0.0)
    quick.engine.play = script

    answered = await post(quick.port, CHAT, body=chat_body(stream="stream" in silent))

    assert answered.status == 504
    assert (answered.error()["type"], answered.error()["code"]) == ("timeout_error", bound)
    assert f"{bound}_s" in str(answered.error()["message"])
    assert len(quick.engine.requests) == 1, "the prompt may be prefilled by now"
    assert await settled(quick.gateway, "timed_out", 504) == before + 1


@contextmanager
def black_hole(port: int) -> Iterator[None]:
    """A listener whose backlog is full, so that further connection attempts are not answered."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=0))
        assert listener.getsockname()[1] == port
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield


async def test_an_engine_that_is_gone_is_a_503_and_one_that_does_not_accept_a_504(start_gateway: StartGateway) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(ScriptedEngine())
        config = engines_yaml(engine) + QUICK_TIMEOUTS.replace("poll_s: 0.1", "poll_s: 30")
        async with start_gateway(config) as gateway:
            await stack.aclose()
            with black_hole(engine.port):
                unanswered = await post(gateway.port, CHAT)
            refused = await post(gateway.port, CHAT)
            then = await post(gateway.port, CHAT)
            page = await gateway.metrics()

    assert (unanswered.status, unanswered.error()["code"]) == (504, "connect_timeout")
    assert (refused.status, refused.error()["code"]) == (503, "connect_refused")
    assert (then.status, then.error()["code"]) == (503, "no_engine")
    assert has_hint(refused)
    assert has_hint(then)
    told = {
        series.partition('result="')[2].partition('"')[0]: int(value)
        for series, value in page.items()
        if series.startswith("headrace_requests_total")
    }
    assert told == {"timed_out": 1, "engine_failed": 1, "unavailable": 1}


async def test_an_engine_whose_name_does_not_resolve_is_a_503(start_gateway: StartGateway) -> None:
    config = f"engines: [{{name: lost, url: 'http://nowhere.invalid:8000'}}]\n{QUICK_TIMEOUTS}"
    async with start_gateway(config) as gateway:
        began_s = time.monotonic()
        answered = await post(gateway.port, CHAT)

    assert answered.status == 503
    assert has_hint(answered)
    assert answered.error()["type"] == "server_error"
    assert time.monotonic() - began_s < 1


# -- engines on their way up (FAI-12) ----------------------------------------------------------------------------------


@dataclass
class ProbedEngine(ScriptedEngine):
    """Tells when it was asked how it is."""

    probed: asyncio.Event = field(default_factory=asyncio.Event)

    async def _probe(self, path: str, wire: Wire) -> None:
        await super()._probe(path, wire)
        self.probed.set()


@dataclass
class LateEngine:
    """An engine at one port, step by step: refused, silent, unhealthy, saturated, ready."""

    gateway: GatewayProcess
    engine: ProbedEngine
    stack: AsyncExitStack
    silence: tuple[socket.socket, ...] = ()

    async def become(self, step: str) -> None:
        """Returns once the gateway has looked at it; silence lasts until the next step."""
        async with asyncio.timeout(STAGE_S):
            if step == "silent":
                listener = self.stack.enter_context(socket.create_server(("127.0.0.1", self.engine.port)))
                listener.setblocking(False)
                waiting, _ = await asyncio.get_running_loop().sock_accept(listener)
                self.silence = (self.stack.enter_context(waiting), listener)
            elif step == "unhealthy":
                for one in self.silence:
                    one.close()
                self.engine.health = 503
                await self.stack.enter_async_context(self.engine)
                await self.engine.probed.wait()
            elif step == "saturated":
                self.engine.health, self.engine.play = 200, answer(503, SATURATED)
                while await last_state(self.gateway) != "up":
                    await asyncio.sleep(0.02)
            elif step == "ready":
                self.engine.play = hello


STEPS = ("refused", "silent", "unhealthy", "saturated", "ready")


async def last_state(gateway: GatewayProcess) -> str:
    """The state of the last engine in the settings."""
    return str((await gateway.status())["engines"][-1]["state"])


async def test_an_engine_on_its_way_up_costs_no_client_an_error(start_gateway: StartGateway) -> None:
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(ScriptedEngine())
        engine = ProbedEngine(port=free_port())
        async with start_gateway(engines_yaml(good, engine) + SHORT_TIMEOUTS) as gateway:
            late = LateEngine(gateway, engine, stack)
            seen = {}
            for step in STEPS:
                await late.become(step)
                seen[step] = [(await post(gateway.port, CHAT)).status for _ in range(8)]
                assert bool(engine.requests) == (step in {"saturated", "ready"})

    assert seen == dict.fromkeys(STEPS, [200] * 8)


async def test_an_engine_alone_on_its_way_up_is_a_503_with_a_hint_and_then_serves(start_gateway: StartGateway) -> None:
    async with AsyncExitStack() as stack:
        engine = ProbedEngine(port=free_port())
        async with start_gateway(engines_yaml(engine) + SHORT_TIMEOUTS) as gateway:
            late = LateEngine(gateway, engine, stack)
            for step in STEPS[:-1]:
                await late.become(step)
                answered = await post(gateway.port, CHAT)
                assert (step, answered.status, has_hint(answered)) == (step, 503, True)
            await late.become("ready")

            assert (await post(gateway.port, CHAT)).status == 200


async def test_an_engine_that_goes_down_costs_no_client_an_error_while_another_works(
    start_gateway: StartGateway,
) -> None:
    async with AsyncExitStack() as stack:
        good = await stack.enter_async_context(ScriptedEngine())
        down = AsyncExitStack()
        going = await down.enter_async_context(ScriptedEngine())
        async with start_gateway(engines_yaml(good, going) + SHORT_TIMEOUTS) as gateway:
            before = [(await post(gateway.port, CHAT)).status for _ in range(8)]
            while not going.requests and len(before) < 200:  # each goes to one of the two, by chance
                before.append((await post(gateway.port, CHAT)).status)
            await down.aclose()
            after = [(await post(gateway.port, CHAT)).status for _ in range(20)]

    assert going.requests
    assert {*before} == {200}
    assert after == [200] * 20


# -- no room (ERR-04) --------------------------------------------------------------------------------------------------

NARROW = """\
version: 1
classes:
  interactive: {ttft_sla_s: 1.0, max_queue: 2}
  bulk: {max_queue: 2}
sizing:
  policy: fixed
  fixed: {total: 1, windows: {interactive: 1, bulk: 1}}
"""


async def test_a_full_queue_is_a_429_and_a_long_wait_a_503_both_with_hints(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "policy.yaml").write_text(NARROW)
    held = asyncio.Event()

    async def hold(asked: Asked, wire: Wire) -> None:
        await held.wait()
        await hello(asked, wire)

    async with ScriptedEngine(play=hold) as engine, AsyncExitStack() as stack:
        config = (
            engines_yaml(engine)
            + QUICK_TIMEOUTS.replace("first_byte_s: 0.4", "first_byte_s: 5")
            + "policy_file: policy.yaml\n"
        )
        async with start_gateway(config) as gateway:
            clients = [await stack.enter_async_context(RawClient(gateway.port)) for _ in range(3)]
            for client in clients:
                await client.send(request("POST", CHAT.path, CHAT.body))
            async with asyncio.timeout(STAGE_S):
                while (await gateway.status())["queued"]["interactive"] < 2:
                    await asyncio.sleep(0.01)
            shed = await post(gateway.port, CHAT)
            waited = await clients[2].answer()
            held.set()
            served = await clients[0].answer()

    assert (shed.status, shed.error()["type"], shed.error()["code"]) == (429, "rate_limit_error", "queue_full")
    assert (waited.status, waited.error()["code"]) == (503, "wait_too_long")
    assert has_hint(shed)
    assert has_hint(waited)
    assert served.status == 200


# -- bad input ---------------------------------------------------------------------------------------------------------


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def with_field(value: bytes, name: str = "x") -> bytes:
    return chat_body()[:-1] + b',"%b":%b}' % (name.encode(), value)


BAD_INPUT: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 400),
    "half an object": (chat_body()[:-5], 400),
    "two objects": (chat_body() * 2, 400),
    "not JSON": (b"model=m-fake", 400),
    "a list": (b"[]", 400),
    "a string": (b'"model"', 400),
    "null": (b"null", 400),
    "single quotes": (b"{'model':'m-fake'}", 400),
    "a trailing comma": (chat_body()[:-1] + b",}", 400),
    "bad UTF-8": (with_field(b'"\xff\xfe"'), 400),
    "UTF-16": (chat_body().decode().encode("utf-16"), 400),
    "a lone surrogate": (with_field(rb'"\ud800"'), 400),
    "a control character": (with_field(b'"\x00"'), 400),
    "NaN": (with_field(b"NaN"), 400),
    "Infinity": (with_field(b"-Infinity"), 400),
    "a number of 1 MB": (with_field(b"1" * 1_000_000), 400),
    "1,000 levels": (with_field(nested(1_000)), 400),
    "20,000 levels in tools": (with_field(nested(20_000), "tools"), 400),
    "200,000 levels in metadata": (with_field(b'{"a":' * 200_000 + b"1" + b"}" * 200_000, "metadata"), 400),
    "200,000 open brackets": (b"[" * 200_000, 400),
    "no model": (b'{"messages":[]}', 400),
    "a null model": (chat_body(model=None), 400),
    "a number for a model": (chat_body(model=7), 400),
    "a list for a model": (chat_body(model=[MODEL]), 400),
    "an object for a model": (chat_body(model={"id": MODEL}), 400),
    "an empty model": (chat_body(model=""), 400),
    "a model of 5 KB": (chat_body(model="m" * 5_000), 400),
    "an unknown model": (chat_body(model="gpt-5"), 404),
    "a URL for a model": (chat_body(model="http://169.254.169.254/x"), 404),
    "a class that is not there": (chat_body(), 400),
}


@pytest.mark.parametrize("name", BAD_INPUT)
async def test_bad_input_is_a_clients_error_at_once(stage: Stage, name: str) -> None:
    body, status = BAD_INPUT[name]
    headers = ("X-Headrace-Class: no-such-class",) if "class" in name else ()
    answers, times_s = [], []
    for _ in range(3):
        began_s = time.perf_counter()
        answers.append(await post(stage.port, CHAT, *headers, body=body))
        times_s.append(time.perf_counter() - began_s)

    for answered in answers:
        assert answered.status == status
        error = answered.error()
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert answered.one("x-request-id")
    assert statistics.median(times_s) < PROMPTLY_S
    assert not stage.first.requests + stage.second.requests


@pytest.mark.parametrize("route", [one for one in WORK if "audio/tr" not in one.path], ids=str)
async def test_every_route_refuses_an_unknown_model_and_malformed_json(stage: Stage, route: WorkRoute) -> None:
    unknown = await post(stage.port, route, body=route.body.replace(MODEL.encode(), b"gpt-5"))
    malformed = await post(stage.port, route, body=route.body[:-1])

    assert (unknown.status, malformed.status) == (404, 400)
    assert "gpt-5" in str(unknown.error()["message"])
    assert malformed.error()["message"]


async def test_a_hundred_levels_and_a_hundred_thousand_keys_pass(stage: Stage) -> None:
    many = b",".join(b'"k%d":%d' % (number, number) for number in range(100_000))

    deep = await post(stage.port, CHAT, body=with_field(nested(100), "tools"))
    wide = await post(stage.port, CHAT, body=with_field(b"{%b}" % many, "metadata"))

    assert (deep.status, wide.status) == (200, 200)


async def test_a_body_past_the_limit_is_a_413_that_names_it(start_gateway: StartGateway) -> None:
    limit = 200_000
    body = chat_body(pad="x" * limit)
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    config = f"limits: {{body_max_bytes: {limit}}}\n{SHORT_TIMEOUTS}"
    async with ScriptedEngine() as engine, start_gateway(engines_yaml(engine) + config) as gateway:
        announced = await ask(gateway.port, request("POST", CHAT.path, None, f"Content-Length: {len(body)}"))
        chunked = await post(gateway.port, CHAT, "Transfer-Encoding: chunked", body=chunk)
        inside = await post(gateway.port, CHAT, body=chat_body(pad="x" * (limit - len(chat_body(pad="")))))

    for refused in (announced, chunked):
        assert refused.status == 413
        assert str(limit) in str(refused.error()["message"])
    assert inside.status == 200


async def test_a_request_that_does_not_come_to_its_end_is_a_408(quick: Quick) -> None:
    async with RawClient(quick.port) as head, RawClient(quick.port) as body:
        await head.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        await body.send(request("POST", CHAT.path, None, "Content-Length: 100") + b'{"model"')
        head_answer, body_answer = await head.answer(), await body.answer()

    assert (head_answer.status, head_answer.error()["code"]) == (408, "request_head_timeout")
    assert (body_answer.status, body_answer.error()["code"]) == (408, "request_body_timeout")


async def test_engines_judge_the_fields_that_the_gateway_does_not_read(stage: Stage) -> None:
    odd: list[dict[str, object]] = [{"messages": 5}, {"stream": "yes"}, {"temperature": []}, {"n": "two"}]
    bodies = [chat_body(**fields) for fields in odd]
    said = {"error": {"message": "wrong type", "type": "BadRequestError", "param": "x", "code": 400}}
    play_on_both(stage, answer(400, said))

    answers = [await post(stage.port, CHAT, body=body) for body in bodies]

    assert [(one.status, one.json()) for one in answers] == [(400, said)] * 4
    assert sorted(asked.body for asked in stage.first.requests + stage.second.requests) == sorted(bodies)
