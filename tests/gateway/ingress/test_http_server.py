"""The listener's HTTP: framing, bounds and errors, seen through bare sockets."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from gateway.exchange import Exchange
from gateway.ingress.auth import Key, KeyRing, digest
from gateway.settings import Limits, Settings, Timeouts
from tests.gateway.ingress.conftest import ScriptedService, Start, standing
from tests.gateway.ingress.raw_client import RawClient, chat, request, until

CHAT = "/v1/chat/completions"
RING = KeyRing([Key("acme", bytes.fromhex(digest("sk-good")), "k1")])


async def test_a_request_cut_anywhere_is_read_whole(start: Start) -> None:
    stand = await start()
    whole = request("POST", CHAT, chat())

    for cut in range(1, len(whole)):
        async with RawClient(stand.port) as client:
            await client.send(whole[:cut])
            await asyncio.sleep(0)
            answer = await client.ask(whole[cut:])
            assert (answer.status, answer.body) == (200, chat())

    assert len(stand.service.served) == len(whole) - 1


async def test_pipelined_requests_are_answered_in_order(start: Start) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        await client.send(b"".join(request("POST", CHAT, chat(seed=number)) for number in range(50)))
        bodies = [(await client.answer()).body for _ in range(50)]

    assert bodies == [chat(seed=number) for number in range(50)]


async def test_a_connection_serves_requests_one_after_the_other(start: Start) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        for number in range(5):
            answer = await client.ask(request("POST", CHAT, chat(seed=number)))
            assert answer.body == chat(seed=number)

    assert len(stand.service.served) == 5


async def test_a_chunked_request_body_is_joined(start: Start) -> None:
    stand = await start()
    body = chat()
    framed = b"%x\r\n%b\r\n%x;ext=1\r\n%b\r\n0\r\n\r\n" % (5, body[:5], len(body) - 5, body[5:])

    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, None, "Transfer-Encoding: chunked") + framed)

    assert answer.body == body


async def test_a_length_of_thousands_of_digits_is_a_number_too(start: Start) -> None:
    stand = await start()
    body = chat()

    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, body, f"Content-Length: {len(body):06000}"))

    assert (answer.status, answer.body) == (200, body)


async def test_a_chunked_body_that_is_coded_besides_is_refused(start: Start) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        answer = await client.ask(
            request("POST", CHAT, None, "Transfer-Encoding: gzip, chunked") + b"1\r\nx\r\n0\r\n\r\n"
        )

    assert (answer.status, answer.error()["code"]) == (501, "unsupported_encoding")


async def test_broken_chunk_framing_is_a_400_at_once(start: Start) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        await client.send(request("POST", CHAT, None, "Transfer-Encoding: chunked") + b"5\r\nhello\r\n")
        await asyncio.sleep(0)
        answer = await client.ask(b"zz\r\nbroken\r\n")

    assert answer.status == 400
    assert answer.error()["type"] == "invalid_request_error"
    assert stand.ingress.bodies_held_bytes == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nBad Header: sk-secret\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_cannot_be_parsed_gets_a_json_error_and_a_close(start: Start, garbage: bytes) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        answer = await client.ask(garbage)
        rest = await client.read_to_end()

    assert (answer.status, answer.one("content-type"), rest) == (400, "application/json", b"")
    assert "sk-secret" not in str(answer.json())
    assert (answer.one("connection"), answer.one("server"), bool(answer.one("date"))) == ("close", "headrace", True)


async def test_a_long_token_and_a_long_cookie_pass(start: Start) -> None:
    token = "t" * 12_288
    stand = await start(ring=KeyRing([Key("acme", bytes.fromhex(digest(token)), "k1")]))

    async with RawClient(stand.port) as client:
        answer = await client.ask(
            request("POST", CHAT, chat(), f"Authorization: Bearer {token}", "Cookie: " + "c" * 10_240)
        )

    assert answer.status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 70_000 + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n" + b"X-Many: 1\r\n" * 200 + b"\r\n",
        b"POST /v1/" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
        + b"".join(b"X-%d: %b\r\n" % (n, b"x" * 60_000) for n in range(9)),
    ],
)
async def test_a_head_past_the_bounds_is_431(start: Start, head: bytes) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        await client.send(head)
        answer = await client.answer()

    assert answer.status == 431
    assert "shorten" in str(answer.error()["message"])


async def test_a_large_body_passes_byte_for_byte(start: Start) -> None:
    stand = await start()
    body = chat(image="data:image/png;base64," + "A" * 15_000_000)

    async with RawClient(stand.port) as client, asyncio.TaskGroup() as both:
        both.create_task(client.send(request("POST", CHAT, body)))
        answer = both.create_task(client.answer())

    assert answer.result().body == body
    assert stand.ingress.bodies_held_bytes == 0


async def test_a_body_past_the_limit_is_413_naming_it_before_it_is_read(start: Start) -> None:
    stand = await start(Settings(limits=Limits(body_max_bytes=1000)))

    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, None, "Content-Length: 1001"))

    assert answer.status == 413
    assert "1000 bytes" in str(answer.error()["message"])
    assert answer.one("connection") == "close"


async def test_a_chunked_body_past_the_limit_is_413(start: Start) -> None:
    stand = await start(Settings(limits=Limits(body_max_bytes=1000)))

    async with RawClient(stand.port) as client:
        answer = await client.ask(
            request("POST", CHAT, None, "Transfer-Encoding: chunked") + b"7d0\r\n%b\r\n" % (b"x" * 2000)
        )

    assert answer.status == 413
    assert stand.ingress.bodies_held_bytes == 0


async def test_bodies_past_the_global_budget_are_503_and_the_budget_comes_back(start: Start) -> None:
    release = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await release.wait()
        exchange.downstream.start(204, [])
        exchange.downstream.finish()

    body = chat(pad="x" * 800)
    stand = await start(Settings(limits=Limits(bodies_held_bytes=1500)), script=wait)
    async with RawClient(stand.port) as first, RawClient(stand.port) as second:
        await first.send(request("POST", CHAT, body))
        await until(lambda: stand.service.served)

        refused = await second.ask(request("POST", CHAT, body))
        held = stand.ingress.bodies_held_bytes
        release.set()
        accepted = await first.answer()

    assert (refused.status, refused.one("retry-after"), held, accepted.status) == (503, "2", len(body), 204)
    assert stand.ingress.bodies_held_bytes == 0


async def test_expect_is_answered_by_the_gateway_and_not_passed_on(start: Start) -> None:
    stand = await start()
    body = chat(pad="x" * 2_000_000)

    async with RawClient(stand.port) as client:
        await client.send(request("POST", CHAT, None, f"Content-Length: {len(body)}", "Expect: 100-continue"))
        interim = await client.read_some()
        async with asyncio.TaskGroup() as both:
            both.create_task(client.send(body))
            answer = both.create_task(client.answer())

    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.result().body == body
    assert b"expect" not in {name for name, _ in stand.service.served[0].headers}


async def test_without_a_key_expect_is_answered_by_401_before_any_body(start: Start) -> None:
    stand = await start(ring=RING)

    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, None, "Content-Length: 2000000", "Expect: 100-continue"))

    assert (answer.status, answer.interim, answer.one("connection")) == (401, [], "close")


async def test_an_unknown_expectation_is_417(start: Start) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, chat(), "Expect: the-unexpected"))

    assert answer.status == 417


async def test_a_compressed_body_is_415_and_says_what_is_taken(start: Start) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, b"\x1f\x8b\x08", "Content-Encoding: gzip"))

    assert (answer.status, answer.one("accept-encoding")) == (415, "identity")


async def test_a_slow_head_is_408_while_others_are_served(start: Start) -> None:
    stand = await start(Settings(timeouts=Timeouts(request_head_s=0.1)))

    async with RawClient(stand.port) as slow, RawClient(stand.port) as quick:
        await slow.send(b"POST /v1/chat/comple")
        served = await quick.ask(request("POST", CHAT, chat()))
        refused = await slow.answer()
        rest = await slow.read_to_end()

    assert (served.status, refused.status, rest) == (200, 408, b"")


async def test_a_slow_head_on_a_used_connection_is_408(start: Start) -> None:
    stand = await start(Settings(timeouts=Timeouts(request_head_s=0.1)))

    async with RawClient(stand.port) as client:
        first = await client.ask(request("POST", CHAT, chat()))
        await client.send(b"POST /v1/chat/comple")
        second = await client.answer()

    assert (first.status, second.status) == (200, 408)


def test_a_slow_head_is_408_on_uvloop_which_delivers_bytes_before_the_first_turn() -> None:
    async def talk() -> int:
        settings = Settings(timeouts=Timeouts(request_head_s=0.05))
        async with standing(settings, KeyRing(), ScriptedService()) as stand, RawClient(stand.port) as client:
            return (await client.ask(b"POST /v1/chat/comple")).status

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(talk())

    assert status == 408


async def test_a_silent_body_is_408(start: Start) -> None:
    stand = await start(Settings(timeouts=Timeouts(request_body_s=0.1)))

    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, b'{"model"', "Content-Length: 100"))

    assert (answer.status, answer.error()["code"]) == (408, "request_body_timeout")
    assert stand.ingress.bodies_held_bytes == 0


async def test_a_trickling_body_is_408_though_it_never_falls_silent(start: Start) -> None:
    stand = await start(Settings(timeouts=Timeouts(request_body_s=0.15)))

    async with RawClient(stand.port) as client:
        await client.send(request("POST", CHAT, None, "Content-Length: 100"))

        async def trickle() -> None:
            while True:
                await client.send(b" ")
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as both:
            sender = both.create_task(trickle())
            answer = await client.answer()
            sender.cancel()

    assert answer.status == 408


async def test_deadlines_for_requests_do_not_touch_the_answer(start: Start) -> None:
    async def slow(exchange: Exchange) -> None:
        exchange.downstream.start(200, [])
        for _ in range(4):
            await asyncio.sleep(0.05)
            exchange.downstream.write(b"x")
        exchange.downstream.finish()

    stand = await start(Settings(timeouts=Timeouts(request_head_s=0.05, request_body_s=0.05)), script=slow)

    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, chat()))

    assert (answer.body, answer.whole) == (b"xxxx", True)


async def test_connections_past_the_bound_get_a_503(start: Start) -> None:
    stand = await start(Settings(limits=Limits(connections_max=1)))

    async with RawClient(stand.port) as first, RawClient(stand.port) as second:
        served = await first.ask(request("GET", "/health"), "GET")
        refused = await second.answer()

    assert (served.status, refused.status) == (200, 503)
    assert refused.one("retry-after") == "1"


@pytest.mark.parametrize("reset", [False, True])
async def test_a_client_that_leaves_cancels_its_handler(start: Start, reset: bool) -> None:
    gone = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        exchange.downstream.watch(on_pause=lambda: None, on_resume=lambda: None, on_gone=gone.set)
        await asyncio.Event().wait()

    stand = await start(script=wait)
    async with RawClient(stand.port) as client:
        await client.send(request("POST", CHAT, chat(stream=True)))
        await until(lambda: stand.service.served)
        if reset:
            client.reset()
    await until(lambda: gone.is_set() and not stand.ingress.in_flight and not stand.ingress.open_connections)

    assert stand.service.cancelled == 1
    assert (stand.ingress.bodies_held_bytes, stand.service.served[0].downstream.gone) == (0, True)


async def test_a_fault_in_the_service_is_a_500_without_its_text(start: Start) -> None:
    async def fail(exchange: Exchange) -> None:
        raise RuntimeError("the prompt was: hello")

    stand = await start(script=fail)
    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, chat(), "X-Request-Id: r-1"))

    assert (answer.status, answer.one("x-request-id")) == (500, "r-1")
    assert b"hello" not in answer.body


async def test_a_service_that_answers_nothing_still_gives_the_client_an_answer(start: Start) -> None:
    async def nothing(exchange: Exchange) -> None:
        return None

    stand = await start(script=nothing)
    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, chat()))

    assert answer.status == 500


async def test_draining_finishes_what_runs_and_closes_after_it(start: Start) -> None:
    release = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await release.wait()
        exchange.downstream.start(200, [], content_length=2)
        exchange.downstream.write(b"ok")
        exchange.downstream.finish()

    stand = await start(script=wait)
    async with RawClient(stand.port) as busy, RawClient(stand.port) as idle:
        await idle.ask(request("GET", "/health"), "GET")
        await busy.send(request("POST", CHAT, chat()))
        await until(lambda: stand.service.served)

        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(stand.ingress.drain(within_s=5))
            closed = await idle.read_to_end()
            release.set()
            answer = await busy.answer()

    assert (closed, answer.body, answer.one("connection"), drained.result()) == (b"", b"ok", "close", True)


async def test_draining_gives_up_after_its_time(start: Start) -> None:
    async def forever(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    stand = await start(script=forever)
    async with RawClient(stand.port) as client:
        await client.send(request("POST", CHAT, chat()))
        await until(lambda: stand.service.served)

        drained = await stand.ingress.drain(within_s=0.01)

    assert not drained


async def test_a_stalled_client_cannot_hold_a_closing_connection(start: Start) -> None:
    async def flood(exchange: Exchange) -> None:
        exchange.downstream.start(200, [], content_length=50_000_000)
        exchange.downstream.write(b"x" * 50_000_000)
        exchange.downstream.finish()

    stand = await start(Settings(timeouts=Timeouts(stalled_client_s=0.1)), script=flood)
    async with RawClient(stand.port, receive_buffer_bytes=4096) as client:
        await client.send(request("POST", CHAT, chat(), "Connection: close"))
        await until(lambda: stand.service.served and not stand.ingress.open_connections)

    assert stand.ingress.open_connections == 0


async def test_a_stalled_client_that_pipelines_is_cut(start: Start) -> None:
    async def flood(exchange: Exchange) -> None:
        exchange.downstream.start(200, [], content_length=20_000_000)
        exchange.downstream.write(b"x" * 20_000_000)
        exchange.downstream.finish()

    stand = await start(Settings(timeouts=Timeouts(stalled_client_s=0.1)), script=flood)
    async with RawClient(stand.port, receive_buffer_bytes=4096) as client:
        await client.send(request("POST", CHAT, chat()) * 10)
        await until(lambda: stand.service.served and not stand.ingress.open_connections)

    assert len(stand.service.served) == 1


async def test_an_http_1_0_client_gets_a_close_delimited_stream(start: Start) -> None:
    async def stream(exchange: Exchange) -> None:
        exchange.downstream.start(200, [])
        exchange.downstream.write(b"data: 1\n\n")
        exchange.downstream.finish()

    stand = await start(script=stream)
    async with RawClient(stand.port) as client:
        answer = await client.ask(request("POST", CHAT, chat(), "Connection: keep-alive", version="HTTP/1.0"))

    assert (answer.body, answer.one("transfer-encoding"), answer.one("connection")) == (b"data: 1\n\n", "", "close")


async def test_an_http_1_0_client_keeps_its_connection_when_the_length_is_known(start: Start) -> None:
    stand = await start()

    async with RawClient(stand.port) as client:
        first = await client.ask(request("POST", CHAT, chat(), "Connection: keep-alive", version="HTTP/1.0"))
        second = await client.ask(request("POST", CHAT, chat(), version="HTTP/1.0"))
        rest = await client.read_to_end()

    assert (first.one("connection"), second.one("connection"), rest) == ("keep-alive", "close", b"")
