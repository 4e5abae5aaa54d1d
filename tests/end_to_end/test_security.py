"""What a client controls has no power here, and no secret leaves the process: keys, targets, parsers, slow senders, doors."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import orjson
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from gateway.commands.key import entry
from tests.end_to_end.conftest import SHORT_TIMEOUTS
from tests.end_to_end.gateway_process import GatewayProcess
from tests.end_to_end.routes import CHAT, TRANSCRIPTIONS, WORK, ask, chat_body, form, post
from tests.end_to_end.scripted_engine import (
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
from tests.gateway.ingress.raw_client import WAIT_S, RawClient, request
from tests.redis_servers import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "sk-long-Q2hpbGxvdXQtS2V5LTEyMzQ1"
SHORT_KEY = "q7Zk0vXp"
WRONG_KEY = "wr0ng-K3y-that-nobody-has"
ENGINE_KEY = "engine-S3cret-Pa55"
PROMPT = "a-prompt-that-is-nobodys-business"
SECRETS = (KEY, SHORT_KEY, WRONG_KEY, ENGINE_KEY, PROMPT)
BEARER = f"Authorization: Bearer {KEY}"
HEAD_S = 1.0


@dataclass
class Guarded:
    """A gateway with keys, at debug level, whose every Redis command is written down."""

    gateway: GatewayProcess
    engine: ScriptedEngine
    redis: Redis
    commands: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.gateway.port


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.yaml").write_text(entry("search", KEY) + entry("short", SHORT_KEY))
    async with AsyncExitStack() as stack:
        server = stack.enter_context(serving("valkey-9"))
        engine = await stack.enter_async_context(ScriptedEngine())
        redis = await stack.enter_async_context(Redis.from_url(server.url, decode_responses=True))
        monitor = await stack.enter_async_context(redis.monitor())
        config = (
            f"engines: [{{name: e0, url: '{engine.url}', api_key: {ENGINE_KEY}}}]\n"
            f"redis_url: {server.url}\nkeys_file: keys.yaml\nlog_level: debug\n"
            f"{SHORT_TIMEOUTS.replace('request_head_s: 3', f'request_head_s: {HEAD_S}').replace('request_body_s: 3', f'request_body_s: {HEAD_S}')}"
        )
        gateway = await stack.enter_async_context(GatewayProcess(folder, config))
        await gateway.until_ready()
        guarded = Guarded(gateway, engine, redis)

        async def watch() -> None:
            async for command in monitor.listen():
                guarded.commands.append(command["command"])

        watching = asyncio.ensure_future(watch())
        yield guarded
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


@pytest.fixture
def guarded(shared_guarded: Guarded) -> Guarded:
    shared_guarded.engine.play = hello
    shared_guarded.engine.requests.clear()
    return shared_guarded


async def admin_pages(guarded: Guarded) -> str:
    """Everything that the admin listener shows."""
    async with httpx.AsyncClient(base_url=guarded.gateway.admin_url) as client:
        paths = ("/metrics", "/healthz", "/readyz", "/admin/v1/status", "/admin/v1/policy")
        return "\n".join([(await client.get(path)).text for path in paths])


# -- secrets (SEC-01) --------------------------------------------------------------------------------------------------


async def rst(_asked: Asked, wire: Wire) -> None:
    wire.rst()


async def garbage(_asked: Asked, wire: Wire) -> None:
    await wire.raw(b"not http\r\n\r\n")
    wire.fin()


async def quote(asked: Asked, wire: Wire) -> None:
    """An engine that quotes what it was sent, as some do."""
    said = {"error": {"message": f"{asked.one('authorization')} {asked.body.decode()}", "type": "x", "code": 401}}
    await wire.reply(401, said)


async def test_no_secret_is_in_logs_metrics_pages_or_redis(guarded: Guarded) -> None:
    body = chat_body(messages=[{"role": "user", "content": PROMPT}], api_key=KEY, user=SHORT_KEY)
    streamed = body[:-1] + b',"stream":true}'
    basic = base64.b64encode(f"user:{KEY}".encode()).decode()
    credentials = [
        BEARER,
        f"Authorization: bearer   {SHORT_KEY}",
        f"X-Api-Key: {KEY}",
        f"Authorization: Bearer {WRONG_KEY}",
        f"Authorization: {WRONG_KEY}",
        f"Authorization: Basic {basic}",
        f"Cookie: token={KEY}",
    ]
    scripts = [
        hello,
        rst,
        garbage,
        quote,
        answer(500, {"error": PROMPT}),
        answer(400, PROMPT.encode()),
        stream(end="rst"),
    ]

    answers = []
    for script in scripts:
        guarded.engine.play = script
        for credential in credentials:
            answers += [await post(guarded.port, CHAT, credential, body=one) for one in (body, streamed)]
    guarded.engine.play = hello
    for path in (f"{CHAT.path}?api_key={WRONG_KEY}", f"/nowhere/{WRONG_KEY}?key={KEY}", f"/v1/models?token={KEY}"):
        answers.append(await ask(guarded.port, request("POST", path, body, BEARER)))
        answers.append(await ask(guarded.port, request("POST", path, body)))
    answers.append(await post(guarded.port, CHAT, BEARER, f"X-Headrace-Class: {KEY}"))
    answers.append(await post(guarded.port, CHAT, BEARER, body=chat_body(model=KEY)))
    answers.append(await post(guarded.port, CHAT, BEARER, body=b'{"api_key": ' + KEY.encode()))
    answers.append(
        await ask(guarded.port, b"GET / HTTP/1.1\r\nHost: x\r\n" + BEARER.encode() + b"\r\nbro ken: 1\r\n\r\n")
    )

    statuses = {one.status for one in answers}
    assert {200, 400, 401, 404, 405, 502} <= statuses
    assert '"request failed"' in guarded.gateway.log
    assert guarded.commands
    kept = [f"{name!s} {await dump(guarded.redis, str(name))}" for name in await guarded.redis.keys("*")]
    assert kept
    for name, text in {
        "log": guarded.gateway.log,
        "admin": await admin_pages(guarded),
        "redis commands": "\n".join(guarded.commands),
        "redis": "\n".join(kept),
    }.items():
        for secret in (*SECRETS, basic):
            assert secret not in text, f"{secret} is in the {name}"
    own = "".join(one.body.decode() for one in answers if one.status in {401, 405, 502})
    assert not any(secret in own for secret in SECRETS)


async def dump(redis: Redis, name: str) -> str:
    """The value under a key, of whatever type."""
    kind = await redis.type(name)
    reads = {"hash": redis.hgetall, "string": redis.get, "set": redis.smembers}
    if kind in reads:
        return str(await reads[kind](name))
    if kind == "zset":
        return str(await redis.zrange(name, 0, -1, withscores=True))
    return str(await redis.lrange(name, 0, -1) if kind == "list" else await redis.xrange(name))


async def test_an_engine_that_quotes_its_key_to_a_probe_is_not_repeated(guarded: Guarded, tmp_path: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        said = orjson.dumps({"error": {"message": head.decode()}})
        writer.write(b"HTTP/1.1 401 X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    config = f"engines: [{{name: e0, kind: vllm, url: '{url}', api_key: {ENGINE_KEY}}}]\n{SHORT_TIMEOUTS}"
    async with server, GatewayProcess(tmp_path, config) as gateway:
        shown = await admin_pages(Guarded(gateway, guarded.engine, guarded.redis))
        answered = await post(gateway.port, CHAT)

    assert "check the engine's api_key" in shown
    assert answered.status == 503
    for text in (shown, gateway.log, answered.body.decode()):
        assert ENGINE_KEY not in text


REFUSED_SETTINGS = {
    "credentials in an engine's URL": f"engines: [{{url: 'http://user:{ENGINE_KEY}@127.0.0.1:9'}}]\n",
    "a key in an engine's query": f"engines: [{{url: 'http://127.0.0.1:9/v1?key={ENGINE_KEY}'}}]\n",
    "a key of two lines": f'engines: [{{url: "http://127.0.0.1:9", api_key: "{ENGINE_KEY}\\r\\nX: y"}}]\n',
    "a misspelt field": f"engines: [{{url: 'http://127.0.0.1:9', apikey: {ENGINE_KEY}}}]\n",
    "a Redis that is not there": f"engines: [{{url: 'http://127.0.0.1:9'}}]\nredis_url: redis://u:{ENGINE_KEY}@127.0.0.1:1/0\n",
    "a Redis of another kind": f"engines: [{{url: 'http://127.0.0.1:9'}}]\nredis_url: mysql://u:{ENGINE_KEY}@h/0\n",
}


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
async def test_a_start_that_fails_shows_no_secret(tmp_path: Path, name: str) -> None:
    config = tmp_path / "headrace.yaml"
    config.write_text(f"listen: 127.0.0.1:0\nadmin_listen: 127.0.0.1:0\nlog_level: debug\n{REFUSED_SETTINGS[name]}")

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", "serve", "--config", str(config)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "HEADRACE_ENGINE_API_KEY": ENGINE_KEY},
    )
    try:
        async with asyncio.timeout(20):
            printed, _ = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()

    assert process.returncode not in {0, None}
    assert printed
    assert ENGINE_KEY not in printed.decode()


# -- targets (SEC-02) --------------------------------------------------------------------------------------------------


async def test_nothing_that_a_client_names_is_called(guarded: Guarded) -> None:
    callers = []
    listener = await asyncio.start_server(lambda _, writer: callers.append(writer), "127.0.0.1", 0)
    lure = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    steering: dict[str, object] = {
        "api_base": f"http://{lure}",
        "base_url": f"http://{lure}/v1",
        "custom_llm_provider": "openai",
        "api_key": "x",
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://{lure}/a.png"}}]}
        ],
    }
    headers = (BEARER, f"X-Backend: {lure}", f"X-Forwarded-Host: {lure}", f"X-Original-URL: http://{lure}/")
    whole = f"Host: {lure}\r\n{BEARER}\r\nContent-Length: {len(CHAT.body)}\r\n\r\n".encode() + CHAT.body

    async with listener:
        passed = await post(guarded.port, CHAT, *headers, body=chat_body(**steering))
        named = await post(guarded.port, CHAT, *headers, body=chat_body(model=f"http://{lure}/x"))
        absolute = await ask(guarded.port, f"POST http://{lure}{CHAT.path} HTTP/1.1\r\n".encode() + whole)
        doubled = await ask(guarded.port, f"POST //{lure}{CHAT.path} HTTP/1.1\r\n".encode() + whole)
        connect = await ask(guarded.port, f"CONNECT {lure} HTTP/1.1\r\n".encode() + whole)

    assert [one.status for one in (passed, named, absolute, doubled)] == [200, 404, 200, 404]
    assert 400 <= connect.status < 500
    assert callers == []
    assert [orjson.loads(asked.body) for asked in guarded.engine.requests] == [
        orjson.loads(chat_body(**steering)),
        orjson.loads(CHAT.body),
    ]
    assert all(asked.one("host") == guarded.engine.url.removeprefix("http://") for asked in guarded.engine.requests)


# -- keys (SEC-04) -----------------------------------------------------------------------------------------------------

GOOD = KEY.encode()
CREDENTIALS: dict[str, tuple[bytes, int]] = {
    "bearer in lower case": (b"Authorization: bearer " + GOOD, 200),
    "spaces around it": (b"Authorization:   BEARER   " + GOOD + b"  ", 200),
    "x-api-key": (b"X-API-Key: " + GOOD, 200),
    "an 8-character key": (b"Authorization: Bearer " + SHORT_KEY.encode(), 200),
    "none": (b"X-A: b", 401),
    "an empty one": (b"Authorization: ", 401),
    "an empty key": (b"Authorization: Bearer ", 401),
    "e with an acute": (b"Authorization: Bearer " + GOOD + "é".encode(), 401),
    "latin-1": (b"Authorization: Bearer \xe9", 401),
    "an emoji": (b"Authorization: Bearer " + "🔑".encode(), 401),
    "0xFF": (b"Authorization: Bearer \xff\xfe", 401),
    "a prefix": (b"Authorization: Bearer " + GOOD[:-1], 401),
    "one character more": (b"Authorization: Bearer " + GOOD + b"x", 401),
    "its digest": (b"Authorization: Bearer 0" + b"a" * 63, 401),
    "another scheme": (b"Authorization: Basic " + GOOD, 401),
    "no scheme": (b"Authorization: " + GOOD, 401),
    "two fields": (b"Authorization: Bearer " + GOOD + b"\r\nAuthorization: Bearer " + GOOD, 401),
    "a good and a bad field": (b"Authorization: Bearer nope\r\nX-Api-Key: " + GOOD, 401),
    "60 KB": (b"Authorization: Bearer " + b"k" * 60_000, 401),
}


@pytest.mark.parametrize("name", CREDENTIALS)
async def test_any_bytes_for_a_key_are_a_plain_yes_or_no_on_every_route(guarded: Guarded, name: str) -> None:
    field_, status = CREDENTIALS[name]
    for method, path, body in (
        ("POST", CHAT.path, CHAT.body),
        ("GET", "/v1/models", b""),
        ("POST", WORK[3].path, WORK[3].body),
    ):
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()

        answered = await ask(guarded.port, head + field_ + b"\r\n\r\n" + body, method)

        assert answered.status == status
        if status == 401:
            assert answered.error()["type"] == "authentication_error"
            assert answered.one("www-authenticate").startswith("Bearer")


async def test_without_a_key_a_waiting_body_is_not_asked_for(guarded: Guarded) -> None:
    head = request("POST", CHAT.path, None, "Content-Length: 2000000", "Expect: 100-continue")

    answered = await ask(guarded.port, head)

    assert (answered.status, answered.interim) == (401, [])


async def test_a_preflight_needs_no_key_and_a_401_carries_cors(guarded: Guarded) -> None:
    origin = "Origin: https://app.example"

    preflight = await ask(
        guarded.port,
        request("OPTIONS", CHAT.path, None, origin, "Access-Control-Request-Headers: authorization"),
        "OPTIONS",
    )
    refused = await post(guarded.port, CHAT, origin, "Authorization: Bearer nope")

    assert (preflight.status, refused.status) == (204, 401)
    assert preflight.one("access-control-allow-origin") == refused.one("access-control-allow-origin") == "*"
    assert preflight.one("access-control-allow-credentials") == refused.one("access-control-allow-credentials") == ""


# -- parsers (SEC-06) --------------------------------------------------------------------------------------------------


async def test_hostile_bodies_are_refused_and_the_process_lives(guarded: Guarded) -> None:
    hostile = [
        opening * levels + closing * levels
        for levels in (1_000, 20_000, 200_000)
        for opening, closing in ((b"[", b"]"), (b'{"a":', b""))
    ]
    bodies = [chat_body()[:-1] + b',"' + name + b'":' + value + b"}" for value in hostile for name in (b"x", b"tools")]
    forms = [
        form(*[(f"f{number}", b"x") for number in range(1_500)]),
        b"--form-3f1c" * 100_000,
        b"--form-3f1c\r\nContent-Disposition: form-data; " + b"name=" * 3_000 + b"\r\n\r\n",
    ]

    began_s = time.perf_counter()
    answers = await asyncio.gather(
        *(post(guarded.port, CHAT, BEARER, body=body) for body in (*hostile, *bodies)),
        *(post(guarded.port, TRANSCRIPTIONS, BEARER, body=body) for body in forms),
    )
    took_s = time.perf_counter() - began_s
    alive = await post(guarded.port, CHAT, BEARER)

    assert {one.status for one in answers} == {400}
    assert took_s < 0.1 * len(answers)
    assert alive.status == 200


# -- slow senders (SEC-08) ---------------------------------------------------------------------------------------------


async def test_slow_senders_are_closed_while_others_are_served(guarded: Guarded) -> None:
    pieces = [event(delta(f"{number}")) for number in range(12)]
    guarded.engine.play = stream(*pieces, event(delta(finish="stop")), b"data: [DONE]\n\n", pause_s=HEAD_S / 6)
    slow_head = b"POST /v1/chat/completions HTTP/1.1\r\nX-Slow: "
    slow_body = request("POST", CHAT.path, None, BEARER, "Content-Length: 1000")

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient(guarded.port)) for _ in range(250)]
        for number, client in enumerate(clients):
            await client.send(slow_body if number % 5 == 0 else slow_head)
        reading = asyncio.ensure_future(post(guarded.port, CHAT, BEARER, body=chat_body(stream=True)))
        async with asyncio.timeout(WAIT_S):
            while not guarded.engine.requests:
                await asyncio.sleep(0.01)
        answers = [asyncio.ensure_future(client.answer()) for client in clients]
        trickling = asyncio.ensure_future(trickle(clients))
        guarded.engine.play = hello
        served_s = []
        while not all(one.done() for one in answers):
            began_s = time.perf_counter()
            assert (await post(guarded.port, CHAT, BEARER)).status == 200
            served_s.append(time.perf_counter() - began_s)
        trickling.cancel()
        with suppress(asyncio.CancelledError):
            await trickling
        answered_first = reading.done()
        long_answer = await reading

    assert {one.result().status for one in answers} == {408}
    assert max(served_s) < HEAD_S
    assert not answered_first
    assert (long_answer.status, long_answer.whole) == (200, True)


async def trickle(clients: list[RawClient]) -> None:
    """One byte from each, again and again."""
    while True:
        for client in clients:
            with suppress(OSError):
                await client.send(b"x")
        await asyncio.sleep(HEAD_S / 5)


# -- doors (SEC-11) ----------------------------------------------------------------------------------------------------


DOORS = """
    /metrics /admin /admin/v1/status /admin/v1/policy /config /docs /openapi.json /debug /policies /v1/metrics
    /v1/admin/keys /stats /.env /healthz /readyz /v1/../admin/v1/status
"""


@pytest.mark.parametrize("path", DOORS.split())
@pytest.mark.parametrize("key", ["", BEARER])
async def test_the_public_port_tells_nothing_of_the_gateway(guarded: Guarded, path: str, key: str) -> None:
    answered = await ask(guarded.port, request("GET", path, None, *([key] if key else [])), "GET")

    assert answered.status in {404, 405}
    assert answered.error()["message"]
    assert "engine" not in answered.body.decode()


async def test_health_on_the_public_port_names_no_engine(guarded: Guarded) -> None:
    answered = await ask(guarded.port, request("GET", "/health"), "GET")

    assert (answered.status, answered.json()) == (200, {"status": "ok"})


async def test_models_and_info_need_a_key(guarded: Guarded) -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/info"):
        assert (await ask(guarded.port, request("GET", path), "GET")).status == 401
        assert (await ask(guarded.port, request("GET", path, None, BEARER), "GET")).status == 200


async def test_admin_pages_show_no_key_no_digest_and_no_engine_address_and_take_no_writes(guarded: Guarded) -> None:
    shown = await admin_pages(guarded)
    async with httpx.AsyncClient(base_url=guarded.gateway.admin_url) as client:
        writes = [
            (await client.request(method, path)).status_code
            for method in ("POST", "PUT", "DELETE", "PATCH")
            for path in ("/admin/v1/policy", "/admin/v1/status", "/metrics")
        ]
        rebound = await client.get("/admin/v1/status", headers={"host": "evil.example"})

    digests = [
        line.split('"')[1] for line in (entry("a", KEY) + entry("b", SHORT_KEY)).splitlines() if "sha256" in line
    ]
    assert len(digests) == 2
    for secret in (*SECRETS, *digests, guarded.engine.url, "redis://"):
        assert secret not in shown
    assert set(writes) == {405}
    assert rebound.status_code == 421
