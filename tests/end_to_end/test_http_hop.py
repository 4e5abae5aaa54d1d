"""The rules of an HTTP intermediary, through the whole process: framing, codings, per-hop fields, reuse, paths, CORS."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from contextlib import AsyncExitStack

import orjson
import pytest

from tests.end_to_end.conftest import SHORT_TIMEOUTS, Stage, StartGateway, engines_yaml
from tests.end_to_end.routes import CHAT, COMPLETIONS, TRANSCRIPTIONS, WORK, WorkRoute, ask, chat_body, post
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
from tests.gateway.ingress.raw_client import Answer, RawClient, request

pytestmark = pytest.mark.asyncio(loop_scope="module")

GOOD = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
GOOD_BYTES = orjson.dumps(GOOD)
BAD = {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": 400}}
LONG_NAME = "an-alias-whose-engine-name-is-longer"


def play_on_both(stage: Stage, script: object) -> None:
    stage.first.play = stage.second.play = script  # type: ignore[assignment]


def arrived(stage: Stage) -> Asked:
    """The one request that an engine got."""
    (asked,) = stage.first.requests + stage.second.requests
    return asked


def agrees(answered: Answer) -> bool:
    """The body is framed once and ended as framed."""
    framed = len(answered.all("content-length")) + len(answered.all("transfer-encoding"))
    return answered.whole and framed == 1


# -- codings (HOP-01) --------------------------------------------------------------------------------------------------


def deflate_raw(data: bytes) -> bytes:
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return raw.compress(data) + raw.flush()


CODED = {
    "gzip": ("gzip", gzip.compress(GOOD_BYTES)),
    "gzip in two members": ("gzip", gzip.compress(GOOD_BYTES[:50]) + gzip.compress(GOOD_BYTES[50:])),
    "x-gzip": ("X-GZip", gzip.compress(GOOD_BYTES)),
    "deflate": ("deflate", zlib.compress(GOOD_BYTES)),
    "deflate without its wrapper": ("deflate", deflate_raw(GOOD_BYTES)),
    "identity": ("identity", GOOD_BYTES),
}


@pytest.mark.parametrize("accepts", ["gzip", "identity", "br", "", "gzip;q=0"])
@pytest.mark.parametrize("coded", CODED, ids=str)
async def test_a_coded_answer_reaches_the_client_plain_and_unlabelled(stage: Stage, coded: str, accepts: str) -> None:
    coding, data = CODED[coded]
    play_on_both(stage, answer(200, data, f"Content-Encoding: {coding}", "Vary: Accept-Encoding"))

    answered = await post(stage.port, CHAT, *([f"Accept-Encoding: {accepts}"] if accepts else []))

    assert answered.status == 200
    assert answered.one("content-encoding") == ""
    assert answered.body == GOOD_BYTES
    assert agrees(answered)
    assert arrived(stage).one("accept-encoding") == "identity"


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_a_coded_error_is_told_plainly_with_its_status(stage: Stage, status: int) -> None:
    play_on_both(stage, answer(status, gzip.compress(orjson.dumps(BAD)), "Content-Encoding: gzip"))

    answered = await post(stage.port, CHAT, "Accept-Encoding: gzip")

    assert answered.status == status
    assert answered.one("content-encoding") == ""
    assert answered.error() == BAD["error"]
    assert agrees(answered)


async def test_a_coded_stream_is_a_plain_stream_at_once(stage: Stage) -> None:
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    go_on = asyncio.Event()
    first, rest = event(delta("Hel")), event(delta(finish="stop")) + DONE

    async def script(_asked: Asked, wire: Wire) -> None:
        await wire.head(200, "Content-Encoding: gzip")
        await wire.part(packer.compress(first) + packer.flush(zlib.Z_SYNC_FLUSH))
        await go_on.wait()
        await wire.part(packer.compress(rest) + packer.flush())
        await wire.end()

    play_on_both(stage, script)
    async with RawClient(stage.port) as client:
        await client.send(request("POST", CHAT.path, chat_body(stream=True), "Accept-Encoding: gzip"))
        head = await client.read_head()
        seen = await client.read_some()
        go_on.set()
        while DONE not in seen:
            seen += await client.read_some()

    assert head.one("content-encoding") == ""
    assert first in seen


@pytest.mark.parametrize(
    ("accepts", "status"),
    [("br", 200), ("gzip, br;q=0.5", 200), ("gzip", 502), ("br;q=0", 502), ("x-brotli", 502), ("", 502)],
)
async def test_a_coding_that_cannot_be_undone_passes_only_to_whom_asked_for_it(
    stage: Stage, accepts: str, status: int
) -> None:
    data = b"\x0b\x02\x80brotli bytes\x03"
    play_on_both(stage, answer(200, data, "Content-Encoding: br"))

    answered = await post(stage.port, CHAT, *([f"Accept-Encoding: {accepts}"] if accepts else []))

    assert answered.status == status
    assert agrees(answered)
    if status == 200:
        assert (answered.one("content-encoding"), answered.body) == ("br", data)
    else:
        assert answered.one("content-encoding") == ""
        assert answered.error()["type"] == "server_error"


@pytest.mark.parametrize(
    "data", [gzip.compress(GOOD_BYTES)[:-9], b"this is no gzip", gzip.compress(GOOD_BYTES) + b"left over"]
)
async def test_a_coded_body_that_is_broken_is_a_502_and_no_answer(stage: Stage, data: bytes) -> None:
    play_on_both(stage, answer(200, data, "Content-Encoding: gzip"))

    answered = await post(stage.port, CHAT)

    assert answered.status == 502
    assert answered.error()["message"]


# -- lengths (HOP-02) --------------------------------------------------------------------------------------------------


async def test_an_edited_request_has_the_length_of_its_bytes(start_gateway: StartGateway) -> None:
    longer = MODEL + "-" + "x" * 40
    routes = (CHAT, COMPLETIONS, TRANSCRIPTIONS)
    async with ScriptedEngine(models=[longer], play=answer(200, GOOD)) as engine:
        async with start_gateway(
            engines_yaml(engine) + SHORT_TIMEOUTS + f"aliases: {{{MODEL}: {longer}}}\n"
        ) as gateway:
            statuses = [(await post(gateway.port, route)).status for route in routes]

    assert statuses == [200] * 3
    for asked, route in zip(engine.requests, routes, strict=True):
        assert int(asked.one("content-length")) == len(asked.body)
        assert asked.body == route.body.replace(MODEL.encode(), longer.encode())


@pytest.mark.parametrize(
    "body",
    [{"detail": "Not Found"}, {"object": "error", "message": "no", "type": "BadRequestError", "code": 400}, b"<html>"],
)
async def test_a_rewritten_error_has_the_length_of_its_bytes(stage: Stage, body: object) -> None:
    play_on_both(stage, answer(400, body))

    answered = await post(stage.port, CHAT)

    assert answered.status == 400
    assert agrees(answered)
    assert answered.error()["message"]


async def test_an_answer_longer_than_it_says_is_cut_at_its_length(stage: Stage) -> None:
    async def script(_asked: Asked, wire: Wire) -> None:
        await wire.head(content_type="application/json", length=len(GOOD_BYTES))
        await wire.raw(GOOD_BYTES + b"and more")

    play_on_both(stage, script)

    async with RawClient(stage.port) as client:
        answered = await client.ask(request("POST", CHAT.path, CHAT.body))
        again = await client.ask(request("POST", CHAT.path, CHAT.body))

    assert answered.body == again.body == GOOD_BYTES


# -- Host, fields of this hop, our own fields (HOP-03, HOP-05, HOP-12) -------------------------------------------------


@pytest.mark.parametrize("host", ["gateway.example", "gateway.example:8443", "127.0.0.1", ""])
async def test_the_engine_sees_its_own_host(stage: Stage, host: str) -> None:
    head = f"POST {CHAT.path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(CHAT.body)}\r\n\r\n".encode()

    answered = await ask(stage.port, head + CHAT.body)

    assert answered.status == 200
    asked = arrived(stage)
    assert asked.one("host") in {f"127.0.0.1:{stage.first.port}", f"127.0.0.1:{stage.second.port}"}


FORWARDED = {"x-forwarded-for": "10.0.0.9", "x-forwarded-host": "evil", "forwarded": "for=x", "x-real-ip": "10.0.0.9"}


async def test_forwarded_fields_stay_here(stage: Stage) -> None:
    await post(stage.port, CHAT, *(f"{name}: {value}" for name, value in FORWARDED.items()))

    assert not FORWARDED.keys() & {name for name, _ in arrived(stage).headers}


async def test_forwarded_fields_go_on_behind_a_trusted_proxy(start_gateway: StartGateway) -> None:
    async with ScriptedEngine() as engine:
        async with start_gateway(engines_yaml(engine) + SHORT_TIMEOUTS + "trust_forwarded: true\n") as gateway:
            await post(gateway.port, CHAT, *(f"{name}: {value}" for name, value in FORWARDED.items()))

    (asked,) = engine.requests
    assert {name: asked.one(name) for name in FORWARDED} == FORWARDED


async def test_an_engines_own_server_fields_stay_behind(stage: Stage) -> None:
    own = [
        "Server: uvicorn",
        "Date: Thu, 01 Jan 1970 00:00:00 GMT",
        "Connection: keep-alive, X-Hop",
        "Keep-Alive: timeout=5",
        "X-Hop: of this hop",
        "Proxy-Authenticate: Basic",
        'Alt-Svc: h2=":9000"',
        "X-Request-Id: the-engines",
        "X-Headrace-Engine: of-another-gateway",
        "X-Headrace-Class: of-another-gateway",
        "X-Backend: b0",
    ]
    play_on_both(stage, answer(200, GOOD, *own))

    answered = await post(stage.port, CHAT, "X-Request-Id: mine")

    assert answered.one("server") == "headrace"
    assert not answered.one("date").endswith("1970 00:00:00 GMT")
    assert answered.one("x-request-id") == "mine"
    assert answered.one("x-headrace-engine") in {"e0", "e1"}
    assert answered.one("x-headrace-class") == "interactive"
    assert [answered.one(name) for name in ("keep-alive", "x-hop", "proxy-authenticate", "alt-svc")] == [""] * 4
    assert answered.one("x-backend") == "b0"


async def test_an_engines_cors_fields_never_stand_beside_ours(stage: Stage) -> None:
    cors = [
        "Access-Control-Allow-Origin: *",
        "Access-Control-Allow-Credentials: true",
        "Access-Control-Expose-Headers: x-secret",
    ]
    for script in (answer(200, GOOD, *cors), answer(400, BAD, *cors), stream(event(delta("a")), DONE, headers=cors)):
        play_on_both(stage, script)

        answered = await post(stage.port, CHAT, "Origin: https://app.example")

        assert answered.one("access-control-allow-origin") == "*"
        assert answered.one("access-control-allow-credentials") == ""
        assert answered.one("access-control-expose-headers") == "*"


@pytest.mark.parametrize("route", WORK, ids=str)
async def test_fields_are_treated_alike_on_every_route(stage: Stage, route: WorkRoute) -> None:
    play_on_both(stage, answer(200, GOOD, "X-Backend: b0"))

    answered = await post(
        stage.port,
        route,
        "Authorization: Bearer client-secret-1",
        "X-Api-Key: client-secret-2",
        "Cookie: session=client-secret-3",
        "X-Custom: kept",
        "X-Custom: twice",
        "Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "X-Request-Id: id-of-the-client",
        "Connection: keep-alive, X-Only-Here",
        "X-Only-Here: a",
        "TE: trailers",
        "Proxy-Authorization: Basic client-secret-4",
    )

    asked = arrived(stage)
    number = answered.one("x-headrace-engine")[1:]
    assert (answered.status, answered.one("x-backend"), answered.one("x-request-id")) == (200, "b0", "id-of-the-client")
    assert asked.path == route.path
    assert asked.body == route.body
    assert asked.one("authorization") == f"Bearer engine-key-{number}"
    assert asked.one("content-type") == route.content_type
    assert asked.all("x-custom") == ["kept", "twice"]
    assert asked.one("traceparent")
    assert asked.one("x-request-id") == "id-of-the-client"
    assert not {"x-api-key", "cookie", "x-only-here", "te", "proxy-authorization"} & {name for name, _ in asked.headers}
    assert "client-secret" not in repr(asked.headers)


async def test_an_upgrade_that_a_client_offers_is_ignored(stage: Stage) -> None:
    answered = await post(
        stage.port, CHAT, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAA"
    )

    assert answered.status == 200
    assert arrived(stage).body == CHAT.body
    assert arrived(stage).one("upgrade") == arrived(stage).one("http2-settings") == ""


@pytest.mark.parametrize(
    "before", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"]
)
async def test_interim_answers_of_an_engine_are_not_the_answer(stage: Stage, before: bytes) -> None:
    async def script(_asked: Asked, wire: Wire) -> None:
        await wire.raw(before)
        await wire.reply(200, GOOD)

    play_on_both(stage, script)

    answered = await post(stage.port, CHAT)

    assert (answered.status, answered.body, answered.interim) == (200, GOOD_BYTES, [])


async def test_trailers_and_chunk_extensions_of_an_engine_end_here(stage: Stage) -> None:
    async def script(_asked: Asked, wire: Wire) -> None:
        await wire.head(200, "Trailer: X-Sum", content_type="application/json")
        await wire.raw(b'%x;ext="a"\r\n%b\r\n0\r\nX-Sum: 1\r\n\r\n' % (len(GOOD_BYTES), GOOD_BYTES))

    play_on_both(stage, script)

    answered = await post(stage.port, CHAT)

    assert (answered.body, answered.whole) == (GOOD_BYTES, True)
    assert answered.one("trailer") == answered.one("x-sum") == ""


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/1.1"])
async def test_an_answer_that_ends_with_the_connection_is_whole(stage: Stage, version: str) -> None:
    async def script(_asked: Asked, wire: Wire) -> None:
        await wire.raw(f"{version} 200 OK\r\nContent-Type: application/json\r\n\r\n".encode() + GOOD_BYTES)
        wire.fin()

    play_on_both(stage, script)

    answered = await post(stage.port, CHAT)

    assert (answered.status, answered.body, answered.whole) == (200, GOOD_BYTES, True)


# -- connection reuse (HOP-06) -----------------------------------------------------------------------------------------


class ShortKeepAlive:
    """Answers like an engine that closes a connection `keep_s` after its last answer, as uvicorn does."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._timers: dict[Wire, asyncio.TimerHandle] = {}
        self.closed = 0

    async def __call__(self, asked: Asked, wire: Wire) -> None:
        timer = self._timers.pop(wire, None)
        if timer is not None:
            timer.cancel()
        await hello(asked, wire)
        self._timers[wire] = asyncio.get_running_loop().call_later(self._keep_s, self._close, wire)

    def _close(self, wire: Wire) -> None:
        del self._timers[wire]
        self.closed += 1
        wire.fin()


async def test_an_engine_that_closes_just_as_we_write_costs_no_request(start_gateway: StartGateway) -> None:
    keep_s = 0.02
    play = ShortKeepAlive(keep_s)
    async with ScriptedEngine(play=play) as engine, start_gateway(engines_yaml(engine) + SHORT_TIMEOUTS) as gateway:
        statuses = []
        async with RawClient(gateway.port) as client:
            for number in range(80):
                statuses.append((await client.ask(request("POST", CHAT.path, CHAT.body))).status)
                await asyncio.sleep(keep_s * (0.9 + 0.2 * (number % 11) / 10))
        burst = await asyncio.gather(*(post(gateway.port, CHAT) for _ in range(100)))

    assert statuses == [200] * 80
    assert [one.status for one in burst] == [200] * 100
    assert play.closed > 10


# -- Expect (HOP-08) ---------------------------------------------------------------------------------------------------


async def test_expect_is_answered_here_at_once_and_not_passed_on(stage: Stage) -> None:
    body = chat_body(padding="x" * 2_000_000)
    async with RawClient(stage.port) as client:
        await client.send(request("POST", CHAT.path, None, f"Content-Length: {len(body)}", "Expect: 100-continue"))
        interim = await client.read_some()
        answered = await client.ask(body)

    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answered.status == 200
    assert arrived(stage).one("expect") == ""
    assert arrived(stage).body == body


# -- browsers (HOP-09) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", WORK, ids=str)
async def test_a_preflight_needs_no_key_on_any_route(stage: Stage, route: WorkRoute) -> None:
    answered = await ask(
        stage.port,
        request(
            "OPTIONS",
            route.path,
            None,
            "Origin: https://app.example",
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: authorization, x-stainless-os",
        ),
        "OPTIONS",
    )

    assert answered.status == 204
    assert answered.one("access-control-allow-origin") == "*"
    assert "POST" in answered.one("access-control-allow-methods")
    assert answered.one("access-control-allow-headers") == "authorization, x-stainless-os"
    assert answered.one("access-control-allow-credentials") == ""


# -- paths (HOP-10) ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1//chat/completions", "/v1/chat/%63ompletions", "/v1/chat/completions?a=b//c"]
)
async def test_path_variants_reach_the_engine_without_a_redirect(stage: Stage, path: str) -> None:
    answered = await ask(stage.port, request("POST", path, CHAT.body))

    assert answered.status == 200
    assert arrived(stage).path == CHAT.path + ("?a=b//c" if "?" in path else "")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/v1/chat/completions", 404),
        ("POST", "/chat/completions", 404),
        ("POST", "/v1/../admin", 404),
        ("GET", "/v2", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PATCH", "/v1/embeddings", 405),
        ("POST", "/health", 405),
        ("TRACE", "/v1/models", 405),
    ],
)
async def test_what_is_not_served_says_so_with_an_error_object(
    stage: Stage, method: str, path: str, status: int
) -> None:
    answered = await ask(stage.port, request(method, path, CHAT.body), method)

    assert answered.status == status
    assert answered.one("content-type") == "application/json"
    assert answered.error()["message"]
    assert answered.one("x-request-id")
    assert bool(answered.one("allow")) == (status == 405)
    assert not stage.first.requests + stage.second.requests


async def test_head_is_answered_without_a_body(stage: Stage) -> None:
    async with RawClient(stage.port) as client:
        head = await client.ask(request("HEAD", "/v1/models"), "HEAD")
        got = await client.ask(request("GET", "/v1/models"), "GET")
        health = await client.ask(request("GET", "/health?verbose=1"), "GET")

    assert (head.status, head.body) == (200, b"")
    assert head.one("content-length") == str(len(got.body))
    assert health.status == 200


async def test_an_engines_base_url_may_be_written_in_any_form(start_gateway: StartGateway) -> None:
    tails = ("", "/", "/v1", "/v1/", "/llm", "/llm/v1/")
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(
                ScriptedEngine(models=[f"m-{tail}"], prefix="/llm" if "llm" in tail else "")
            )
            for tail in tails
        ]
        lines = [
            f"  - {{name: e{i}, url: '{one.url}{tail}'}}"
            for i, (one, tail) in enumerate(zip(engines, tails, strict=True))
        ]
        config = "\n".join(["engines:", *lines, SHORT_TIMEOUTS, "mount_path: /gate", ""])
        gateway = await stack.enter_async_context(start_gateway(config))
        for tail in tails:
            below = await ask(gateway.port, request("POST", f"/gate{CHAT.path}", chat_body(model=f"m-{tail}")))
            assert below.status == 200, tail
        beside = await ask(gateway.port, request("POST", CHAT.path, CHAT.body))

    assert beside.status == 404
    assert [[asked.path for asked in engine.requests] for engine in engines] == [[CHAT.path]] * len(tails)
