"""What calls share: idle connections, the race with an engine that closes them, and the end of it all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from backends.base import EngineAddress, EngineRequest, FailureKind
from backends.connection import EnginePool
from tests.backends.connection_peer import (
    HI,
    POST,
    WAIT_S,
    Peer,
    Recorder,
    Script,
    Wire,
    echoing,
    playing,
    turns,
)


@asynccontextmanager
async def engine(script: Script, *, max_idle: int = 512, idle_s: float = 4.0) -> AsyncIterator[tuple[EnginePool, Peer]]:
    async with playing(script) as peer:
        pool = EnginePool(EngineAddress("e", peer.url, idle_s=idle_s), max_idle=max_idle)
        try:
            yield pool, peer
        finally:
            await pool.close()


async def _post(pool: EnginePool) -> bytes:
    recorder = Recorder()
    pool.call(POST, recorder)
    return await recorder.whole()


async def _at_once(pool: EnginePool, count: int) -> list[bytes]:
    recorders = [Recorder() for _ in range(count)]
    for recorder in recorders:
        pool.call(POST, recorder)
    return [await recorder.whole() for recorder in recorders]


async def test_calls_one_after_the_other_share_one_connection() -> None:
    async with engine(echoing) as (pool, peer):
        for _ in range(20):
            await _post(pool)

        assert len(peer.wires) == 1


async def test_a_call_started_from_the_end_of_another_takes_its_connection() -> None:
    async with engine(echoing) as (pool, peer):
        first, second = Recorder(), Recorder()

        def go_on() -> None:
            pool.call(POST, second)

        first.then = go_on
        pool.call(POST, first)
        await second.whole()

        assert len(peer.wires) == 1


async def test_nothing_caps_the_number_of_connections() -> None:
    waiting: list[Wire] = []
    all_here = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.asked()
        waiting.append(wire)
        if len(waiting) == 300:
            all_here.set()
        await all_here.wait()
        wire.say(HI)
        await wire.gone()

    async with engine(script) as (pool, peer):
        async with asyncio.timeout(WAIT_S):
            bodies = await _at_once(pool, 300)

        assert bodies == [b"hi"] * 300
        assert len(peer.wires) == 300


async def test_the_newest_idle_connection_is_taken_first() -> None:
    served: list[int] = []

    async def script(wire: Wire) -> None:
        while True:
            await wire.asked()
            served.append(wire.number)
            wire.say(HI)

    async with engine(script) as (pool, _):
        await _at_once(pool, 3)
        newest = served[-1]

        for _ in range(5):
            await _post(pool)

        assert served[3:] == [newest] * 5


async def test_idle_connections_beyond_the_bound_are_closed_oldest_first() -> None:
    async with engine(echoing, max_idle=2) as (pool, peer):
        await _at_once(pool, 5)
        async with asyncio.timeout(WAIT_S):
            await peer.wires[0].left.wait()

        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 2 idle>"


async def test_an_idle_connection_is_closed_when_its_time_is_over() -> None:
    async with engine(echoing, idle_s=0.01) as (pool, peer):
        await _at_once(pool, 3)

        async with asyncio.timeout(WAIT_S):
            for wire in peer.wires:
                await wire.left.wait()

        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"


async def test_an_expired_connection_is_not_used_even_if_the_timer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(echoing) as (pool, peer):
        await _post(pool)
        loop = asyncio.get_running_loop()
        late_s = loop.time() + 4.1

        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: late_s)
            taken = pool._take_idle()
        await turns()

        assert taken is None
        assert peer.wires[0].left.is_set()


async def test_an_idle_connection_that_the_engine_closes_leaves_at_once() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.say(HI)
        await wire.writer.drain()
        wire.fin()

    async with engine(script) as (pool, _):
        await _post(pool)
        await turns()

        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"


async def test_an_idle_connection_that_says_something_is_closed() -> None:
    go_on = asyncio.Event()

    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.say(HI)
        await go_on.wait()
        wire.say(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await wire.gone()

    async with engine(script) as (pool, peer):
        await _post(pool)
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            await peer.wires[0].left.wait()

        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"


# the keep-alive race

CLOSINGS = {"fin": Wire.fin, "rst": Wire.rst}


@pytest.mark.parametrize("closing", CLOSINGS)
async def test_500_calls_on_connections_that_die_as_they_are_reused_all_succeed(closing: str) -> None:
    requests = 0

    async def script(wire: Wire) -> None:
        nonlocal requests
        await wire.asked()
        requests += 1
        wire.say(HI)
        await wire.reader.readexactly(1)  # the next request arrives: too late
        CLOSINGS[closing](wire)

    async with engine(script) as (pool, peer):
        bodies = [await _post(pool) for _ in range(500)]

        assert bodies == [b"hi"] * 500
        assert requests == 500
        assert len(peer.wires) == 500


async def test_500_calls_beside_an_engine_that_closes_after_each_reply_all_succeed() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.say(HI)
        await turns(wire.number % 7)  # sometimes before, sometimes after the next request was written
        wire.fin()

    async with engine(script) as (pool, _):
        assert [await _post(pool) for _ in range(500)] == [b"hi"] * 500


async def test_a_burst_of_200_onto_idle_connections_that_all_die_succeeds() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.say(HI)
        await wire.reader.readexactly(1)
        if wire.number < 200:
            wire.rst()
        else:
            wire.say(HI)
            await wire.gone()

    async with engine(script) as (pool, peer):
        await _at_once(pool, 200)

        bodies = await _at_once(pool, 200)

        assert bodies == [b"hi"] * 200
        assert len(peer.wires) == 400


async def test_a_call_is_sent_again_once_and_no_more() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        if wire.number == 0:
            wire.say(HI)
            await wire.asked()
        wire.fin()

    async with engine(script) as (pool, peer):
        await _post(pool)
        recorder = Recorder()

        pool.call(POST, recorder)
        failure = await recorder.failed()

        assert (failure.kind, failure.sent, failure.response_started) == (FailureKind.CLOSED, True, False)
        assert len(peer.wires) == 2


async def test_a_reused_connection_that_dies_after_a_byte_of_reply_is_not_retried() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.say(HI)
        await wire.asked()
        wire.say(b"H")
        await wire.writer.drain()
        wire.fin()

    async with engine(script) as (pool, peer):
        await _post(pool)
        recorder = Recorder()

        pool.call(POST, recorder)
        failure = await recorder.failed()

        assert (failure.kind, failure.response_started) == (FailureKind.TRUNCATED, True)
        assert len(peer.wires) == 1


async def test_an_aborted_call_is_not_sent_again() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        wire.say(HI)
        await wire.asked()
        wire.fin()

    async with engine(script) as (pool, peer):
        await _post(pool)
        recorder = Recorder()

        call = pool.call(POST, recorder)
        call.abort()
        async with asyncio.timeout(WAIT_S):
            await peer.wires[0].left.wait()
        await turns()

        assert recorder.silent
        assert len(peer.wires) == 1


async def test_a_big_body_is_sent_again_whole() -> None:
    body = bytes(range(256)) * 4096

    async def script(wire: Wire) -> None:
        asked = await wire.asked()
        wire.say(HI if wire.number == 0 else b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + asked.body)
        await wire.reader.readuntil(b"\r\n\r\n")
        wire.rst()

    async with engine(script) as (pool, _):
        await _post(pool)
        recorder = Recorder()

        pool.call(EngineRequest(b"POST", b"/x", (), body), recorder)

        assert await recorder.whole() == body


async def test_an_engine_gone_for_good_is_told_as_refused_though_the_first_try_was_sent() -> None:
    async with playing(echoing) as peer:
        pool = EnginePool(EngineAddress("e", peer.url))
        await _post(pool)
        recorder = Recorder()
        pool.call(POST, recorder)  # written to a connection that the peer drops on leaving
        peer.wires[0].rst()
        await peer.stop_listening()

        failure = await recorder.failed()
        await pool.close()

    assert (failure.kind, failure.sent) == (FailureKind.CONNECT_REFUSED, True)


# names


async def test_a_name_is_resolved_again_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    where = ["127.0.0.1"]

    async def lookup(_: str, port: int, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (where[0], port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    async with playing(echoing) as old:
        pool = EnginePool(EngineAddress("e", f"http://engine:{old.port}"))
        await _post(pool)
        before = len(old.wires)
    async with playing(echoing, host="127.0.0.2", port=old.port) as new:
        where[0] = "127.0.0.2"

        await _post(pool)
        await pool.close()

    assert before == 1
    assert len(new.wires) == 1


async def test_a_connection_to_a_name_is_not_kept_beyond_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lookup(_: str, port: int, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
    async with playing(echoing) as peer:
        pool = EnginePool(EngineAddress("e", f"http://engine:{peer.port}"), max_age_s=-1.0)

        for _ in range(3):
            await _post(pool)
        await pool.close()

    assert len(peer.wires) == 3


# the end


async def test_close_fails_the_calls_under_way_and_leaves_no_connection() -> None:
    async def script(wire: Wire) -> None:
        await wire.asked()
        if wire.number == 0:
            wire.say(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nfirst")
        await wire.gone()

    async with engine(script) as (pool, peer):
        streaming, connecting = Recorder(), Recorder()
        pool.call(POST, streaming)
        await streaming.began.wait()
        pool.call(POST, connecting)

        await pool.close()
        async with asyncio.timeout(WAIT_S):
            await peer.wires[0].left.wait()

        assert (await streaming.failed()).kind is FailureKind.CLOSED
        assert (await connecting.failed()).kind is FailureKind.CLOSED
        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"
        assert not pool._open


async def test_a_call_after_close_fails_later_and_sends_nothing() -> None:
    async with engine(echoing) as (pool, peer):
        await pool.close()
        recorder = Recorder()

        pool.call(POST, recorder)
        silent_at_first = recorder.silent
        failure = await recorder.failed()

        assert silent_at_first
        assert (failure.kind, failure.sent) == (FailureKind.CLOSED, False)
        assert not peer.wires


async def test_closing_twice_is_closing_once() -> None:
    async with engine(echoing) as (pool, _):
        await _post(pool)

        await asyncio.wait_for(pool.close(), WAIT_S)
        await asyncio.wait_for(pool.close(), WAIT_S)

        assert repr(pool) == "<EnginePool e: 0 calls, 0 connecting, 0 idle>"


def test_the_race_with_closing_engines_is_won_on_uvloop_too() -> None:
    async def scenario() -> None:
        for closing in CLOSINGS:
            await test_500_calls_on_connections_that_die_as_they_are_reused_all_succeed(closing)
        await test_500_calls_beside_an_engine_that_closes_after_each_reply_all_succeed()
        await test_a_burst_of_200_onto_idle_connections_that_all_die_succeeds()
        await test_an_engine_gone_for_good_is_told_as_refused_though_the_first_try_was_sent()
        await test_close_fails_the_calls_under_way_and_leaves_no_connection()
        async with playing(echoing) as peer:
            pool = EnginePool(EngineAddress("e", f"http://localhost:{peer.port}"))  # ::1 refuses first, or is unknown
            assert await _post(pool) == POST.body
            await pool.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
