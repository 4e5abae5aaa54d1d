"""What every form of `Downstream` promises, seen from the client's socket: one suite, both forms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from aiohttp import web

from gateway.exchange import Downstream
from gateway.ingress.connection import Connection, ConnectionBounds, HttpServer
from gateway.ingress.downstream import TransportDownstream
from gateway.ingress.stream_downstream import StreamDownstream
from gateway.ingress.wire import DateLine
from tests.gateway.ingress.raw_client import RawClient, request, until

Script = Callable[[Downstream], Awaitable[None]]
Serve = Callable[[Script, web.BaseRequest, HttpServer], Awaitable[web.StreamResponse]]


async def by_transport(script: Script, asked: web.BaseRequest, server: HttpServer) -> web.StreamResponse:
    connection = cast("Connection", asked.protocol)
    downstream = connection.watcher = TransportDownstream(
        connection,
        asyncio.get_running_loop(),
        DateLine(lambda: 0.0),
        method=asked.method,
        http_1_0=asked.version < (1, 1),
        keep_alive=asked.keep_alive,
        body_read=asked.content.is_eof,
    )
    try:
        await script(downstream)
    finally:
        connection.watcher = None
    return server.keep_after if downstream.keep_alive else server.close_after


async def by_stream_response(script: Script, asked: web.BaseRequest, server: HttpServer) -> web.StreamResponse:
    downstream = StreamDownstream(asked)
    async with asyncio.TaskGroup() as both:
        pump = both.create_task(_outcome(downstream))
        await script(downstream)
    response = pump.result()
    if response is None:
        raise ConnectionResetError("aborted")
    return response


async def _outcome(downstream: StreamDownstream) -> web.StreamResponse | None:
    try:
        return await downstream.run()
    except ConnectionError:
        return None


@asynccontextmanager
async def served(form: Serve, script: Script, *, stalled_s: float = 5.0) -> AsyncIterator[int]:
    """A server that answers every request by the script; yields its port."""

    async def handle(asked: web.BaseRequest) -> web.StreamResponse:
        return await form(script, asked, server)

    bounds = ConnectionBounds(head_s=5, stalled_s=stalled_s, header_max_bytes=65536, connections_max=100)
    server = HttpServer(handle, bounds, DateLine(lambda: 0.0), loop=asyncio.get_running_loop())
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        tasks = server.abandon()
        if tasks:
            await asyncio.wait(tasks, timeout=5)


forms = pytest.mark.parametrize("form", [by_transport, by_stream_response])

GET = request("GET", "/")


async def stream_two(downstream: Downstream) -> None:
    downstream.start(200, [("content-type", "text/event-stream"), ("x-one", "1"), ("x-one", "2")])
    downstream.write(b"data: 1\n\n")
    await asyncio.sleep(0)
    downstream.write(b"data: 2\n\n")
    downstream.finish()


async def whole(downstream: Downstream) -> None:
    downstream.start(200, [], content_length=5)
    downstream.write(b"hello")
    downstream.finish()


@forms
async def test_a_stream_arrives_chunked_in_order_with_its_fields(form: Serve) -> None:
    async with served(form, stream_two) as port, RawClient(port) as client:
        answer = await client.ask(GET, "GET")

    assert (answer.status, answer.version, answer.body, answer.whole) == (
        200,
        "HTTP/1.1",
        b"data: 1\n\ndata: 2\n\n",
        True,
    )
    assert (answer.all("x-one"), answer.one("content-length")) == (["1", "2"], "")


@forms
async def test_there_is_one_server_and_one_date(form: Serve) -> None:
    async with served(form, whole) as port, RawClient(port) as client:
        answer = await client.ask(GET, "GET")

    assert (answer.one("server"), bool(answer.one("date"))) == ("headrace", True)


@forms
async def test_a_known_length_is_sent_as_content_length(form: Serve) -> None:
    async with served(form, whole) as port, RawClient(port) as client:
        answer = await client.ask(GET, "GET")

    assert (answer.body, answer.one("content-length"), answer.one("transfer-encoding")) == (b"hello", "5", "")


@forms
@pytest.mark.parametrize("script", [stream_two, whole])
async def test_the_connection_serves_the_next_request_after_finish(form: Serve, script: Script) -> None:
    async with served(form, script) as port, RawClient(port) as client:
        await client.send(GET * 3)
        answers = [await client.answer("GET") for _ in range(3)]

    assert [answer.whole for answer in answers] == [True] * 3


@forms
async def test_the_head_is_sent_though_no_body_follows_yet(form: Serve) -> None:
    release = asyncio.Event()

    async def wait(downstream: Downstream) -> None:
        downstream.start(200, [])
        await release.wait()
        downstream.finish()

    async with served(form, wait) as port, RawClient(port) as client:
        await client.send(GET)
        head = await client.read_head()
        release.set()

    assert head.status == 200


@forms
async def test_an_abort_leaves_the_transfer_unfinished(form: Serve) -> None:
    async def abort(downstream: Downstream) -> None:
        downstream.start(200, [])
        downstream.write(b"data: 1\n\n")
        await asyncio.sleep(0.01)
        downstream.abort()

    async with served(form, abort) as port, RawClient(port) as client:
        answer = await client.ask(GET, "GET")

    assert answer.whole is False


@forms
async def test_an_abort_still_delivers_what_was_written(form: Serve) -> None:
    async def abort(downstream: Downstream) -> None:
        downstream.start(200, [])
        downstream.write(b"data: 1\n\n")
        downstream.write(b"data: error\n\n")
        downstream.abort()

    async with served(form, abort) as port, RawClient(port) as client:
        await client.send(GET)
        raw = await client.read_to_end()

    assert b"data: error\n\n" in raw
    assert not raw.endswith(b"0\r\n\r\n")


@forms
async def test_an_abort_before_the_start_closes_without_a_word(form: Serve) -> None:
    async def abort(downstream: Downstream) -> None:
        downstream.abort()

    async with served(form, abort) as port, RawClient(port) as client:
        await client.send(GET)
        raw = await client.read_to_end()

    assert raw == b""


@forms
async def test_a_body_shorter_than_its_length_is_an_unfinished_transfer(form: Serve) -> None:
    async def short(downstream: Downstream) -> None:
        downstream.start(200, [], content_length=10)
        downstream.write(b"hello")
        downstream.finish()

    async with served(form, short) as port, RawClient(port) as client:
        answer = await client.ask(GET, "GET")

    assert answer.whole is False


@forms
async def test_bytes_past_the_length_do_not_reach_the_next_answer(form: Serve) -> None:
    async def long(downstream: Downstream) -> None:
        downstream.start(200, [], content_length=5)
        downstream.write(b"hello and more")
        downstream.finish()

    async with served(form, long) as port, RawClient(port) as client:
        await client.send(GET * 2)
        answers = [await client.answer("GET") for _ in range(2)]

    assert [(answer.status, answer.body) for answer in answers] == [(200, b"hello")] * 2


@forms
@pytest.mark.parametrize("script", [stream_two, whole])
async def test_head_gets_no_body_and_the_connection_goes_on(form: Serve, script: Script) -> None:
    async with served(form, script) as port, RawClient(port) as client:
        first = await client.ask(request("HEAD", "/"), "HEAD")
        second = await client.ask(GET, "GET")

    assert (first.status, second.whole) == (200, True)


@forms
async def test_http_1_0_gets_a_stream_that_ends_with_the_connection(form: Serve) -> None:
    async with served(form, stream_two) as port, RawClient(port) as client:
        answer = await client.ask(request("GET", "/", None, "Connection: keep-alive", version="HTTP/1.0"), "GET")

    assert (answer.one("transfer-encoding"), answer.body) == ("", b"data: 1\n\ndata: 2\n\n")


@forms
async def test_a_slow_client_pauses_the_writer_and_a_reading_one_resumes_it(form: Serve) -> None:
    seen: list[str] = []
    resumed = asyncio.Event()

    async def flood(downstream: Downstream) -> None:
        def resume() -> None:
            seen.append("resume")
            resumed.set()

        downstream.watch(on_pause=lambda: seen.append("pause"), on_resume=resume, on_gone=lambda: None)
        downstream.start(200, [])
        while "pause" not in seen:
            downstream.write(b"x" * 65_536)
            await asyncio.sleep(0)
        await resumed.wait()
        downstream.finish()

    async with served(form, flood) as port, RawClient(port, receive_buffer_bytes=4096) as client:
        await client.send(GET)
        await until(lambda: "pause" in seen)
        answer = await client.answer("GET")

    assert (seen[:2], answer.whole) == (["pause", "resume"], True)


@forms
async def test_what_a_client_has_not_taken_gets_less_as_it_reads(form: Serve) -> None:
    kept: list[Downstream] = []
    release = asyncio.Event()

    async def flood(downstream: Downstream) -> None:
        kept.append(downstream)
        downstream.start(200, [])
        downstream.write(b"x" * 8_000_000)
        await release.wait()
        downstream.abort()

    async with served(form, flood, stalled_s=0.05) as port, RawClient(port, receive_buffer_bytes=65_536) as client:
        await client.send(GET)
        await client.read_head()
        await until(lambda: kept[0].unsent_bytes > 1_000_000)
        before_bytes = kept[0].unsent_bytes
        read_bytes = 0
        while read_bytes < 500_000:
            read_bytes += len(await client.read_some())
        await until(lambda: kept[0].unsent_bytes < before_bytes)
        after_bytes = kept[0].unsent_bytes
        release.set()

    assert 0 < after_bytes < before_bytes


@forms
async def test_a_late_watcher_is_told_that_the_buffer_is_full(form: Serve) -> None:
    told = asyncio.Event()

    async def flood(downstream: Downstream) -> None:
        downstream.start(200, [])
        for _ in range(400):
            downstream.write(b"x" * 65_536)
        await asyncio.sleep(0)
        downstream.watch(on_pause=told.set, on_resume=lambda: None, on_gone=lambda: None)
        downstream.abort()

    async with served(form, flood, stalled_s=0.05) as port, RawClient(port, receive_buffer_bytes=4096) as client:
        await client.send(GET)
        await until(told.is_set)

    assert told.is_set()


@forms
async def test_a_client_that_leaves_is_told_of_and_writing_to_it_is_a_no_op(form: Serve) -> None:
    gone = asyncio.Event()
    kept: list[Downstream] = []

    async def stream(downstream: Downstream) -> None:
        kept.append(downstream)
        downstream.watch(on_pause=lambda: None, on_resume=lambda: None, on_gone=gone.set)
        downstream.start(200, [])
        downstream.write(b"data: 1\n\n")
        await asyncio.Event().wait()

    async with served(form, stream) as port:
        async with RawClient(port) as client:
            await client.send(GET)
            await client.read_head()
        await until(gone.is_set)
        kept[0].write(b"data: 2\n\n")
        kept[0].finish()
        kept[0].abort()
        late = asyncio.Event()
        kept[0].watch(on_pause=lambda: None, on_resume=lambda: None, on_gone=late.set)

    assert (kept[0].gone, late.is_set()) == (True, True)


@forms
async def test_nothing_follows_the_end(form: Serve) -> None:
    async def chatty(downstream: Downstream) -> None:
        await whole(downstream)
        downstream.write(b"more")
        downstream.finish()
        downstream.abort()

    async with served(form, chatty) as port, RawClient(port) as client:
        await client.send(GET * 2)
        answers = [await client.answer("GET") for _ in range(2)]

    assert [answer.body for answer in answers] == [b"hello", b"hello"]


async def test_a_field_with_a_line_break_is_left_out() -> None:
    async def injected(downstream: Downstream) -> None:
        downstream.start(200, [("x-bad", "1\r\nset-cookie: a=b"), ("x-good", "1")], content_length=0)
        downstream.finish()

    async with served(by_transport, injected) as port, RawClient(port) as client:
        answer = await client.ask(GET, "GET")

    assert (answer.one("set-cookie"), answer.one("x-bad"), answer.one("x-good")) == ("", "", "1")


async def test_an_http_1_0_abort_is_a_reset_because_a_close_would_look_whole() -> None:
    async def abort(downstream: Downstream) -> None:
        downstream.start(200, [])
        downstream.write(b"data: 1\n\n")
        await asyncio.sleep(0.01)
        downstream.abort()

    async with served(by_transport, abort) as port, RawClient(port) as client:
        answer = await client.ask(request("GET", "/", version="HTTP/1.0"), "GET")

    assert (answer.status, answer.whole) == (200, False)


async def test_a_client_whose_buffer_is_full_is_cut_at_once_by_an_abort() -> None:
    async def flood(downstream: Downstream) -> None:
        downstream.start(200, [])
        downstream.write(b"x" * 50_000_000)
        downstream.abort()

    async with served(by_transport, flood) as port, RawClient(port, receive_buffer_bytes=4096) as client:
        await client.send(GET)
        raw = await client.read_to_end()

    assert len(raw) < 50_000_000
