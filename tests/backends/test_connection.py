"""One call over a real socket: what is written, what comes back, and every way in which it can break."""

from __future__ import annotations

import asyncio
import gzip
import shlex
import socket
import ssl
import subprocess
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from backends.base import BackendError, EngineAddress, EngineRequest, FailureKind
from backends.connection import EnginePool
from backends.dialing import dial
from backends.request_head import RequestHeads
from tests.backends.connection_peer import (
    GET,
    HI,
    POST,
    WAIT_S,
    Asked,
    Peer,
    Recorder,
    Script,
    Wire,
    echoing,
    playing,
    server_tls,
    turns,
    until,
)


@asynccontextmanager
async def engine(
    script: Script, *, path: str = "", api_key: str | None = None
) -> AsyncIterator[tuple[EnginePool, Peer]]:
    """A pool in front of a scripted engine."""
    async with playing(script) as peer:
        pool = EnginePool(EngineAddress("e", peer.url + path, api_key=api_key, connect_s=2.0))
        try:
            yield pool, peer
        finally:
            await pool.close()


def says(reply: bytes, *, then: Callable[[Wire], None] = lambda _: None) -> Script:
    """Answer the first request with `reply`, do `then`, and wait for the client to go."""

    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.say(reply)
        await wire.writer.drain()
        then(wire)
        await wire.gone()

    return script


# what is written


async def test_a_request_carries_our_host_framing_and_credentials_and_nothing_of_the_hop() -> None:
    asked: list[Asked] = []

    async def script(wire: Wire) -> None:
        asked.append(await wire.asked())
        wire.say(HI)

    request = EngineRequest(
        b"POST",
        b"/v1/chat/completions?x=1",
        (
            (b"host", b"evil"),
            (b"x-request-id", b"r1"),
            (b"accept-encoding", b"gzip, br"),
            (b"authorization", b"Bearer client"),
            (b"expect", b"100-continue"),
            (b"connection", b"close"),
            (b"transfer-encoding", b"chunked"),
            (b"content-length", b"999"),
            (b"cookie", b"a=1"),
            (b"cookie", b"b=2"),
        ),
        b'{"model":"m"}',
    )
    async with engine(script, path="/llm/", api_key="sk-engine") as (pool, peer):
        recorder = Recorder()

        pool.call(request, recorder)
        await recorder.whole()

        assert asked[0].body == b'{"model":"m"}'
        assert asked[0].lines == [
            b"POST /llm/v1/chat/completions?x=1 HTTP/1.1",
            b"host: 127.0.0.1:%d" % peer.port,
            b"accept-encoding: identity",
            b"authorization: Bearer sk-engine",
            b"x-request-id: r1",
            b"cookie: a=1",
            b"cookie: b=2",
            b"content-length: 13",
        ]


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 64 * 1024 + 1, 15 * 1024 * 1024])
async def test_a_body_of_any_size_arrives_byte_for_byte(size: int) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    async with engine(echoing) as (pool, _):
        recorder = Recorder()

        pool.call(EngineRequest(b"POST", b"/x", (), body), recorder)

        assert await recorder.whole() == body


@pytest.mark.parametrize(
    "request_",
    [
        EngineRequest(b"GET", b"/x", ((b"x-a", b"1\r\nx-b: 2"),), b""),
        EngineRequest(b"GET", b"/x", ((b"x-a", b"1\nx-b: 2"),), b""),
        EngineRequest(b"GET", b"/x", ((b"x-a", b"1\rx-b: 2"),), b""),
        EngineRequest(b"GET", b"/x", ((b"x-a", b"1\0"),), b""),
        EngineRequest(b"GET", b"/x", ((b"x-a\r\nx-b", b"1"),), b""),
        EngineRequest(b"GET", b"/x HTTP/1.1\r\nx: y", (), b""),
        EngineRequest(b"GET", b"/a b", (), b""),
        EngineRequest(b"GET", b"http://elsewhere/x", (), b""),
        EngineRequest(b"GET /", b"/x", (), b""),
        EngineRequest(b"get", b"/x", (), b""),
    ],
)
async def test_a_request_that_would_break_its_lines_is_refused_before_anything_is_sent(request_: EngineRequest) -> None:
    async with engine(echoing) as (pool, peer):
        recorder = Recorder()

        with pytest.raises(ValueError, match="request"):
            pool.call(request_, recorder)
        await turns()

        assert recorder.silent
        assert not peer.wires
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h",
        "h:8000",
        "http://",
        "http://h:99999",
        "http://h/#top",
        "http://h/a b",
        "http://u:sk-hidden@/x",
        "http://[::1",
    ],
)
async def test_an_address_that_is_none_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError, match="address of engine e") as refused:
        EnginePool(EngineAddress("e", url))

    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("api_key", ["sk\r\nx-evil: 1", "sk\n", "sk\0"])
async def test_an_api_key_with_a_line_break_is_refused(api_key: str) -> None:
    with pytest.raises(ValueError, match="address of engine e") as refused:
        EnginePool(EngineAddress("e", "http://h", api_key=api_key))

    assert "sk" not in str(refused.value)


async def test_credentials_and_query_of_the_base_url_go_to_the_engine_and_nowhere_else() -> None:
    asked: list[Asked] = []

    async def script(wire: Wire) -> None:
        asked.append(await wire.asked())
        wire.say(HI)

    async with playing(script) as peer:
        pool = EnginePool(EngineAddress("e", f"http://user:p%40ss@127.0.0.1:{peer.port}/llm?key=sk-hidden"))

        await pool.fetch(b"GET", b"/v1/models?limit=2")
        await pool.close()

    assert asked[0].lines[0] == b"GET /llm/v1/models?limit=2&key=sk-hidden HTTP/1.1"
    assert b"authorization: Basic dXNlcjpwQHNz" in asked[0].lines
    assert "hidden" not in repr(pool)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://engine", b"engine"),
        ("http://engine:80/", b"engine"),
        ("https://engine:443", b"engine"),
        ("http://engine:8000", b"engine:8000"),
        ("https://engine:80", b"engine:80"),
        ("http://[::1]:18001", b"[::1]:18001"),
        ("http://[::1]", b"[::1]"),
        ("http://user:pass@engine:8000/llm", b"engine:8000"),
        ("http://m\u00fcller.example", b"xn--mller-kva.example"),
    ],
)
async def test_host_is_the_authority_of_the_engine(url: str, host: bytes) -> None:
    head = RequestHeads(EngineAddress("e", url)).render(GET)

    assert head.split(b"\r\n")[1] == b"host: " + host


# what comes back


@pytest.mark.parametrize(
    "reply",
    [
        HI,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + HI,
    ],
    ids=["length", "chunked", "1xx before"],
)
async def test_a_framed_reply_ends_while_the_connection_stays(reply: bytes) -> None:
    async with engine(says(reply)) as (pool, peer):
        recorder = Recorder()

        pool.call(POST, recorder)

        assert await recorder.whole() == b"hi"
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 1 idle>"
        assert len(peer.wires) == 1


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_reply_without_framing_ends_with_its_connection(version: bytes) -> None:
    async with engine(says(b"HTTP/%b 200 OK\r\n\r\nhi" % version, then=Wire.fin)) as (pool, _):
        recorder = Recorder()

        pool.call(POST, recorder)

        assert await recorder.whole() == b"hi"
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"


async def test_a_reply_to_head_has_no_body() -> None:
    async with engine(says(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")) as (pool, _):
        recorder = Recorder()

        pool.call(EngineRequest(b"HEAD", b"/v1/models", (), b""), recorder)

        assert await recorder.whole() == b""
        assert recorder.head == (200, [(b"content-length", b"5")])


async def test_nothing_is_told_before_call_has_returned_even_on_a_warm_connection() -> None:
    async with engine(echoing) as (pool, _):
        for _ in range(2):
            recorder = Recorder()

            pool.call(POST, recorder)
            told_inside = not recorder.silent
            await recorder.whole()

            assert not told_inside


async def test_an_answer_before_the_body_was_read_is_told_and_the_connection_given_up() -> None:
    async def script(wire: Wire) -> None:
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await asyncio.Event().wait()  # never reads the body

    async with engine(script) as (pool, _):
        recorder = Recorder()

        pool.call(EngineRequest(b"POST", b"/x", (), bytes(32 * 1024 * 1024)), recorder)

        assert await recorder.whole() == b"big"
        assert recorder.head == (413, [(b"content-length", b"3")])
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"


async def test_bytes_after_the_end_of_a_reply_cost_the_connection() -> None:
    async with engine(says(HI + b"HTTP/1.1 200 OK\r\n")) as (pool, _):
        recorder = Recorder()

        pool.call(POST, recorder)

        assert await recorder.whole() == b"hi"
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"


async def test_a_gzipped_stream_is_told_plain_event_by_event() -> None:
    go_on = asyncio.Event()
    zipper = zlib.compressobj(wbits=31)

    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.say(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n")
        wire.say(zipper.compress(b"data: 1\n\n") + zipper.flush(zlib.Z_SYNC_FLUSH))
        await go_on.wait()
        wire.say(zipper.compress(b"data: 2\n\n") + zipper.flush())
        wire.fin()

    async with engine(script) as (pool, _):
        recorder = Recorder()

        pool.call(POST, recorder)
        await recorder.began.wait()
        first = bytes(recorder.body)
        go_on.set()

        assert first == b"data: 1\n\n"
        assert await recorder.whole() == b"data: 1\n\ndata: 2\n\n"
        assert recorder.head == (200, [])


async def test_a_bomb_is_held_back_while_its_reader_pauses() -> None:
    plain = 64 * 1024 * 1024
    zipped = gzip.compress(bytes(plain), compresslevel=9)
    reply = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(zipped), zipped)
    async with engine(says(reply)) as (pool, _):
        recorder = Recorder()
        call = pool.call(POST, recorder)
        recorder.on_data = call.pause

        await recorder.began.wait()
        await turns()
        held = len(recorder.body)
        call.abort()

        assert held <= 64 * 1024
        assert not recorder.over.is_set()


async def test_a_paused_compressed_reply_goes_on_where_it_stopped_and_reuses_its_connection() -> None:
    plain = bytes(range(256)) * 4096 * 4
    zipped = gzip.compress(plain)
    reply = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(zipped), zipped)
    async with engine(says(reply)) as (pool, _):
        loop = asyncio.get_running_loop()
        recorder = Recorder()
        call = pool.call(POST, recorder)

        def breathe() -> None:
            call.pause()
            loop.call_soon(call.resume)

        recorder.on_data = breathe

        assert await recorder.whole() == plain
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 1 idle>"


# how it breaks

BROKEN: dict[str, tuple[Script, FailureKind, bool]] = {
    "fin before a byte": (says(b"", then=Wire.fin), FailureKind.CLOSED, False),
    "rst before a byte": (says(b"", then=Wire.rst), FailureKind.RESET, False),
    "fin in the head": (says(b"HTTP/1.1 200 OK\r\nX-", then=Wire.fin), FailureKind.TRUNCATED, True),
    "fin in the body": (says(HI[:-1], then=Wire.fin), FailureKind.TRUNCATED, True),
    "rst in the body": (says(HI[:-1], then=Wire.rst), FailureKind.RESET, True),
    "fin without the last chunk": (
        says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n", then=Wire.fin),
        FailureKind.TRUNCATED,
        True,
    ),
    "rst of a reply without framing": (says(b"HTTP/1.0 200 OK\r\n\r\nhi", then=Wire.rst), FailureKind.RESET, True),
    "gzip cut in a reply without framing": (
        says(b"HTTP/1.0 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"hi")[:-4], then=Wire.fin),
        FailureKind.TRUNCATED,
        True,
    ),
    "garbage": (says(b"SSH-2.0-OpenSSH_9.2\r\n"), FailureKind.BAD_RESPONSE, True),
    "a huge head": (says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000), FailureKind.BAD_RESPONSE, True),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_reply_is_told_as_what_it_is_and_its_connection_closed(name: str) -> None:
    script, kind, started = BROKEN[name]
    async with engine(script) as (pool, peer):
        recorder = Recorder()

        pool.call(POST, recorder)
        failure = await recorder.failed()
        async with asyncio.timeout(WAIT_S):
            await peer.wires[0].left.wait()

        assert (failure.kind, failure.sent, failure.response_started) == (kind, True, started)
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"
        assert len(peer.wires) == 1


async def test_a_request_broken_off_half_written_says_that_it_was_sent() -> None:
    async def script(wire: Wire) -> None:
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.rst()

    async with engine(script) as (pool, _):
        recorder = Recorder()

        pool.call(EngineRequest(b"POST", b"/x", (), bytes(32 * 1024 * 1024)), recorder)
        failure = await recorder.failed()

        assert (failure.kind, failure.sent, failure.response_started) == (FailureKind.RESET, True, False)


async def test_a_receiver_that_raises_costs_its_own_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    async with engine(echoing) as (pool, _):
        bad, good = Recorder(), Recorder()

        def trip() -> None:
            raise KeyError("bug")

        bad.on_data = trip
        pool.call(POST, bad)
        await bad.failed()
        pool.call(POST, good)

        assert await good.whole() == POST.body
        assert [type(context["exception"]) for context in reported] == [KeyError]
        assert not caplog.records


async def test_a_receiver_that_raises_at_the_end_leaves_the_connection_in_the_pool() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with engine(echoing) as (pool, peer):
        bad, good = Recorder(), Recorder()

        def trip() -> None:
            raise KeyError("bug")

        bad.then = trip
        pool.call(POST, bad)
        await bad.whole()
        pool.call(POST, good)
        await good.whole()

        assert len(reported) == 1
        assert len(peer.wires) == 1


# abort


async def test_an_abort_is_seen_by_the_engine_at_once_and_nothing_is_told_after() -> None:
    closed = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.say(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nfirst")
        await wire.gone()
        closed.set()

    async with engine(script) as (pool, _):
        recorder = Recorder()
        call = pool.call(POST, recorder)
        await recorder.began.wait()

        call.abort()
        call.abort()
        async with asyncio.timeout(WAIT_S):
            await closed.wait()
        call.resume()
        call.pause()

        assert not recorder.over.is_set()
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"


async def test_an_abort_from_inside_a_callback_silences_the_rest_of_the_read() -> None:
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 50 + b"0\r\n\r\n"
    async with engine(says(chunks)) as (pool, peer):
        recorder = Recorder()
        call = pool.call(POST, recorder)
        recorder.on_data = call.abort

        await recorder.began.wait()
        async with asyncio.timeout(WAIT_S):
            await peer.wires[0].left.wait()

        assert bytes(recorder.body) == b"x"
        assert not recorder.over.is_set()


async def test_an_abort_before_the_connection_stands_sends_nothing() -> None:
    async with engine(echoing) as (pool, peer):
        recorder = Recorder()

        pool.call(POST, recorder).abort()
        await turns()

        assert recorder.silent
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"
        assert all(wire.left.is_set() for wire in peer.wires)


@pytest.mark.parametrize("after", range(12))
async def test_an_abort_at_any_moment_of_connecting_leaves_no_connection_behind(after: int) -> None:
    async with engine(says(b"")) as (pool, peer):
        recorder = Recorder()
        call = pool.call(POST, recorder)

        await turns(after)
        call.abort()
        await until(lambda: not pool._open and not pool._connecting)
        async with asyncio.timeout(WAIT_S):
            for wire in peer.wires:
                await wire.left.wait()

        assert recorder.silent


# pause


async def _flood(wire: Wire) -> None:
    """Answer with an endless body, written until neither the kernel nor the client takes more."""
    await wire.asked()
    wire.say(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        wire.say(bytes(65536))
        await wire.writer.drain()


async def test_a_paused_call_stops_reading_so_that_the_engine_is_slowed_down() -> None:
    async with engine(_flood) as (pool, peer):
        recorder = Recorder()
        call = pool.call(POST, recorder)
        await recorder.began.wait()

        call.pause()
        await _until_blocked(peer.wires[0])
        held = len(recorder.body)
        await turns(100)
        still_held = len(recorder.body)
        call.resume()
        await until(lambda: len(recorder.body) >= held + 32 * 1024 * 1024)
        call.abort()

        assert still_held == held


@pytest.mark.parametrize("warm", [False, True])
async def test_a_call_paused_from_its_start_hears_nothing_until_resumed(warm: bool) -> None:
    async with engine(_flood if not warm else _echo_then_flood) as (pool, peer):
        if warm:
            await pool.fetch(b"GET", b"/health")
        recorder = Recorder()

        call = pool.call(POST, recorder)
        call.pause()
        await until(lambda: peer.wires)
        await _until_blocked(peer.wires[0])
        silent = recorder.silent
        call.resume()
        await asyncio.wait_for(recorder.began.wait(), WAIT_S)
        call.abort()

        assert silent


async def _echo_then_flood(wire: Wire) -> None:
    await wire.asked()
    wire.say(HI)
    await _flood(wire)


async def _until_blocked(wire: Wire) -> None:
    """The engine's transport holds bytes that the kernel does not take, and goes on holding them."""
    async with asyncio.timeout(WAIT_S):
        still = 0
        while still < 50:
            await asyncio.sleep(0)
            still = still + 1 if wire.writer.transport.get_write_buffer_size() >= 65536 else 0


async def test_a_reply_that_ends_while_paused_leaves_a_connection_that_reads() -> None:
    async with engine(echoing) as (pool, peer):
        first, second = Recorder(), Recorder()
        call = pool.call(POST, first)
        first.on_data = call.pause

        await first.whole()
        pool.call(POST, second)

        assert await second.whole() == POST.body
        assert len(peer.wires) == 1


# connecting


async def test_a_refused_connection_is_told_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pool = EnginePool(EngineAddress("e", f"http://127.0.0.1:{port}"))
    recorder = Recorder()

    pool.call(POST, recorder)
    silent_at_first = recorder.silent
    failure = await recorder.failed()
    await pool.close()

    assert silent_at_first
    assert (failure.kind, failure.sent, failure.response_started) == (FailureKind.CONNECT_REFUSED, False, False)
    assert str(port) not in failure.detail


@asynccontextmanager
async def black_hole(host: str, family: socket.AddressFamily, port: int = 0) -> AsyncIterator[int]:
    """A port that never answers a SYN: its accept queue is full."""
    listener = socket.socket(family)
    fillers: list[socket.socket] = []
    try:
        listener.bind((host, port))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):
            filler = socket.socket(family)
            filler.setblocking(False)
            filler.connect_ex((host, port))
            fillers.append(filler)
        yield port
    finally:
        for sock in (*fillers, listener):
            sock.close()


async def test_a_connection_that_nobody_answers_times_out_as_such() -> None:
    async with black_hole("127.0.0.1", socket.AF_INET) as port:
        pool = EnginePool(EngineAddress("e", f"http://127.0.0.1:{port}", connect_s=0.02))
        recorder = Recorder()

        pool.call(POST, recorder)
        failure = await recorder.failed()
        await pool.close()

    assert (failure.kind, failure.sent) == (FailureKind.CONNECT_TIMEOUT, False)


async def test_a_name_that_does_not_resolve_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    pool = EnginePool(EngineAddress("e", "http://nowhere.invalid:8000"))
    recorder = Recorder()

    pool.call(POST, recorder)
    failure = await recorder.failed()
    await pool.close()

    assert (failure.kind, failure.sent) == (FailureKind.NAME_UNRESOLVED, False)
    assert "nowhere" not in failure.detail


def _resolving(monkeypatch: pytest.MonkeyPatch, addresses: list[tuple[socket.AddressFamily, str]]) -> list[str]:
    """Let every name resolve to `addresses` (read anew each time); returns the names that were asked for."""
    names: list[str] = []

    async def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        names.append(host)
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for family, address in addresses]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    return names


async def test_a_dead_ipv6_address_does_not_keep_a_name_from_being_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.dialing.STAGGER_S", 0.01)
    async with playing(echoing) as peer, black_hole("::1", socket.AF_INET6, peer.port):
        _resolving(monkeypatch, [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")])
        pool = EnginePool(EngineAddress("e", f"http://engine:{peer.port}", connect_s=2.0))

        fetched = await pool.fetch(b"POST", b"/x", body=b"hello")
        await pool.close()

    assert fetched.body == b"hello"


async def test_a_refused_address_moves_on_to_the_next_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with playing(echoing) as peer:
        _resolving(monkeypatch, [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")])
        pool = EnginePool(EngineAddress("e", f"http://engine:{peer.port}"))

        fetched = await pool.fetch(b"POST", b"/x", body=b"hello")
        await pool.close()

    assert fetched.body == b"hello"


async def test_of_two_addresses_that_answer_at_once_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.dialing.STAGGER_S", 0.0)
    async with playing(echoing) as one, playing(echoing, host="127.0.0.2", port=one.port) as two:
        _resolving(monkeypatch, [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.2")])
        pool = EnginePool(EngineAddress("e", f"http://engine:{one.port}"))

        fetched = await pool.fetch(b"POST", b"/x", body=b"hello")
        wires = one.wires + two.wires
        await until(lambda: sum(not wire.left.is_set() for wire in wires) == 1)
        kept = repr(pool)
        await pool.close()

    assert fetched.body == b"hello"
    assert kept == "<EnginePool e: 0 calls, 0 connecting, 1 idle>"


async def test_a_loser_that_connected_in_the_same_turn_as_the_winner_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.dialing.STAGGER_S", 0.0)
    _resolving(monkeypatch, [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.2")])
    loop = asyncio.get_running_loop()
    both = asyncio.Barrier(2)
    aborted: list[str] = []

    class Opened(asyncio.Transport):
        def __init__(self, address: str) -> None:
            super().__init__()
            self.address = address

        def abort(self) -> None:
            aborted.append(self.address)

    async def open_together(
        factory: Callable[[], asyncio.Protocol], address: str, _: int
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        await both.wait()
        protocol = factory()
        transport = Opened(address)
        protocol.connection_made(transport)
        return transport, protocol

    class Holder(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

    monkeypatch.setattr(loop, "create_connection", open_together)

    kept = await dial(loop, Holder, "engine", 8000, literal=False, tls=None)

    assert isinstance(kept.transport, Opened)
    assert sorted([*aborted, kept.transport.address]) == ["127.0.0.1", "127.0.0.2"]


async def test_all_addresses_refusing_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _resolving(monkeypatch, [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")])
    pool = EnginePool(EngineAddress("e", f"http://engine:{port}"))
    recorder = Recorder()

    pool.call(POST, recorder)
    failure = await recorder.failed()
    await pool.close()

    assert failure.kind is FailureKind.CONNECT_REFUSED


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_an_ipv6_literal_is_reached() -> None:
    asked: list[Asked] = []

    async def script(wire: Wire) -> None:
        asked.append(await wire.asked())
        wire.say(HI)

    async with playing(script, host="::1") as peer:
        pool = EnginePool(EngineAddress("e", f"http://[::1]:{peer.port}"))

        await pool.fetch(b"GET", b"/health")
        await pool.close()

    assert asked[0].lines[1] == b"host: [::1]:%d" % peer.port


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost and 127.0.0.1, made for this run."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
            " -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out cert.pem"
        ),
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder


async def test_an_https_engine_is_spoken_to_over_a_kept_connection(certificate: Path) -> None:
    trust = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    async with playing(echoing, tls=server_tls(str(certificate))) as peer:
        pool = EnginePool(EngineAddress("e", f"https://127.0.0.1:{peer.port}"), tls=trust)

        bodies = [(await pool.fetch(b"POST", b"/x", body=body)).body for body in (b"one", b"two")]
        connections = len(peer.wires)
        await pool.close()

    assert bodies == [b"one", b"two"]
    assert connections == 1


async def test_an_untrusted_certificate_is_a_tls_failure(certificate: Path) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # the server side reports the alert
    async with playing(echoing, tls=server_tls(str(certificate))) as peer:
        pool = EnginePool(EngineAddress("e", f"https://127.0.0.1:{peer.port}"))
        recorder = Recorder()

        pool.call(POST, recorder)
        failure = await recorder.failed()
        await pool.close()

    assert (failure.kind, failure.sent) == (FailureKind.TLS, False)


async def test_a_plain_engine_behind_an_https_address_is_a_tls_failure() -> None:
    async def script(wire: Wire) -> None:
        await wire.reader.read(100)
        wire.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await wire.writer.drain()

    async with playing(script) as peer:
        pool = EnginePool(EngineAddress("e", f"https://127.0.0.1:{peer.port}"))
        recorder = Recorder()

        pool.call(POST, recorder)
        failure = await recorder.failed()
        await pool.close()

    assert failure.kind is FailureKind.TLS


# fetch


async def test_a_fetch_over_its_bound_is_cut_and_says_so() -> None:
    async with engine(_flood) as (pool, peer):
        with pytest.raises(BackendError, match="over 100000 bytes"):
            await pool.fetch(b"GET", b"/metrics?key=sk-hidden", max_bytes=100_000)

        async with asyncio.timeout(WAIT_S):
            await peer.wires[0].left.wait()


async def test_a_fetch_that_takes_too_long_is_aborted_and_says_so_without_the_query() -> None:
    async with engine(says(b"")) as (pool, peer):
        with pytest.raises(BackendError, match=r"engine e: GET /metrics: no whole answer within 0.02 s"):
            await pool.fetch(b"GET", b"/metrics?key=sk-hidden", timeout_s=0.02)

        async with asyncio.timeout(WAIT_S):
            await peer.wires[0].left.wait()


async def test_a_cancelled_fetch_closes_its_connection() -> None:
    async with engine(says(b"HTTP/1.1 200 OK\r\n")) as (pool, peer):
        task = asyncio.ensure_future(pool.fetch(b"GET", b"/metrics"))
        await until(lambda: peer.wires)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        async with asyncio.timeout(WAIT_S):
            await peer.wires[0].left.wait()


def test_all_of_it_works_on_uvloop_too() -> None:
    async def scenario() -> None:
        await test_a_request_carries_our_host_framing_and_credentials_and_nothing_of_the_hop()
        await test_an_answer_before_the_body_was_read_is_told_and_the_connection_given_up()
        await test_a_paused_call_stops_reading_so_that_the_engine_is_slowed_down()
        await test_an_abort_is_seen_by_the_engine_at_once_and_nothing_is_told_after()
        await test_a_refused_connection_is_told_as_such()
        await test_a_connection_that_nobody_answers_times_out_as_such()
        await test_a_paused_compressed_reply_goes_on_where_it_stopped_and_reuses_its_connection()
        for name in BROKEN:
            await test_a_broken_reply_is_told_as_what_it_is_and_its_connection_closed(name)
        for after in range(12):
            await test_an_abort_at_any_moment_of_connecting_leaves_no_connection_behind(after)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
