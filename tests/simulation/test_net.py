"""The virtual network does what loopback does: the same scenarios on both, and the callbacks of a protocol compared.

Each scenario is one coroutine that runs unchanged on asyncio's own loop over real loopback sockets and on the virtual
loop; what must be equal is what each side's protocol was told, in order. Below that, what only the virtual network has:
latency, bandwidth, partitions, freezes, crashes.
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from gateway.replay.loop import Deadlock
from tests.simulation.loop import SimLoop, run
from tests.simulation.net import Link

SERVER, CLIENT = "server", "client"


class Recorder(asyncio.Protocol):
    """Writes down what it is told; consecutive bytes count as one entry, since their cuts are nobody's promise."""

    def __init__(self, *, stay_open_after_eof: bool = False, pause_at_once: bool = False) -> None:
        self.told: list[Any] = []
        self.transport: asyncio.Transport = asyncio.Transport()
        self._stay_open = stay_open_after_eof
        self._pause = pause_at_once
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if self._pause:
            transport.pause_reading()
        self._note("made")

    def data_received(self, data: bytes) -> None:
        if self.told and isinstance(self.told[-1], bytes):
            data = self.told.pop() + data
        self._note(data)

    def eof_received(self) -> bool:
        self._note("eof")
        return self._stay_open

    def pause_writing(self) -> None:
        self._note("pause")

    def resume_writing(self) -> None:
        self._note("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self._note("lost" if exc is None else f"lost: {type(exc).__name__}")

    async def until(self, seen: Callable[[list[Any]], bool]) -> None:
        async with asyncio.timeout(10):
            while not seen(self.told):
                self._changed.clear()
                await self._changed.wait()

    @property
    def lost(self) -> bool:
        return isinstance(self.told[-1], str) and self.told[-1].startswith("lost")

    async def until_lost(self) -> None:
        await self.until(lambda _told: self.lost)

    async def until_over(self) -> None:
        """The peer will send no more: at its end of file for a side that stays open then, else at the loss."""
        await self.until(lambda told: self.lost or (self._stay_open and told[-1] == "eof"))

    async def end(self) -> None:
        if not self.lost:
            self.transport.abort()
            await self.until_lost()

    async def until_told(self, entry: object) -> None:
        await self.until(lambda told: entry in told)

    def _note(self, entry: Any) -> None:
        self.told.append(entry)
        self._changed.set()


async def connected(client: Recorder, server: Recorder) -> asyncio.Server:
    """One connection between two recorders. Awaits the server's side too."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    await loop.create_connection(lambda: client, "127.0.0.1", port)
    await server.until_told("made")
    return listener


def reset(transport: asyncio.Transport) -> None:
    """End with RST, by the means that work on a real socket."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


async def turns(count: int = 20) -> None:
    """Let the loop turn: what is on loopback already gets noticed, if anybody looks."""
    for _ in range(count):
        await asyncio.sleep(0.001)


async def an_answer_and_a_close(client: Recorder, server: Recorder) -> None:
    client.transport.write(b"ask")
    await server.until_told(b"ask")
    server.transport.write(b"answer")
    server.transport.close()
    await client.until_over()


async def a_half_close_answered(client: Recorder, server: Recorder) -> None:
    client.transport.write(b"all of it")
    client.transport.write_eof()
    await server.until_told("eof")
    server.transport.write(b"answer")
    server.transport.close()
    await client.until_over()


async def a_close_with_much_unsent(client: Recorder, server: Recorder) -> None:
    client.transport.write(bytes(9_000_000))
    client.transport.close()
    await server.until_over()
    await client.until_over()


async def an_abort(client: Recorder, server: Recorder) -> None:
    client.transport.abort()
    await server.until_over()
    await client.until_over()


async def an_abort_with_much_unsent(client: Recorder, server: Recorder) -> None:
    server.transport.pause_reading()
    client.transport.write(bytes(20_000_000))
    client.transport.abort()
    await client.until_over()
    server.transport.resume_reading()
    await server.until_over()
    server.told = [entry if isinstance(entry, str) else "some bytes" for entry in server.told]


async def a_reset(client: Recorder, server: Recorder) -> None:
    reset(client.transport)
    await server.until_over()


async def a_reset_behind_bytes_nobody_reads(client: Recorder, server: Recorder) -> None:
    server.transport.pause_reading()
    client.transport.write(b"last words")
    await turns()
    reset(client.transport)
    await turns()
    server.told.append("reads on")
    server.transport.resume_reading()
    await server.until_over()


async def a_reset_found_by_writing(client: Recorder, server: Recorder) -> None:
    server.transport.pause_reading()
    reset(client.transport)
    await turns()
    server.told.append("writes")
    server.transport.write(b"too late")
    await server.until_over()


async def a_close_with_bytes_unread(client: Recorder, server: Recorder) -> None:
    server.transport.pause_reading()
    client.transport.write(b"never read")
    await turns()
    server.transport.close()
    await client.until_over()
    await server.until_over()


async def writing_to_a_peer_that_closed(client: Recorder, server: Recorder) -> None:
    server.transport.close()
    await client.until_told("eof")
    client.transport.write(b"one")
    await turns()
    client.transport.write(b"two")
    await client.until_over()


async def a_stalled_reader(client: Recorder, server: Recorder) -> None:
    server.transport.pause_reading()
    client.transport.write(bytes(9_000_000))
    await client.until_told("pause")
    server.told.append("reads on")
    server.transport.resume_reading()
    await client.until_told("resume")
    client.transport.close()
    await server.until_over()


async def an_eof_that_waits_for_the_reader(client: Recorder, server: Recorder) -> None:
    server.transport.pause_reading()
    client.transport.write(b"bytes")
    client.transport.close()
    await turns()
    server.told.append("reads on")
    server.transport.resume_reading()
    await server.until_over()


Scenario = Callable[[Recorder, Recorder], Coroutine[Any, Any, None]]
SCENARIOS: list[Scenario] = [
    an_answer_and_a_close,
    a_half_close_answered,
    a_close_with_much_unsent,
    an_abort,
    an_abort_with_much_unsent,
    a_reset,
    a_reset_behind_bytes_nobody_reads,
    a_reset_found_by_writing,
    a_close_with_bytes_unread,
    writing_to_a_peer_that_closed,
    a_stalled_reader,
    an_eof_that_waits_for_the_reader,
]


async def play(scenario: Scenario, *, stay_open: bool) -> dict[str, list[Any]]:
    client, server = (Recorder(stay_open_after_eof=stay_open) for _ in range(2))
    listener = await connected(client, server)
    try:
        await scenario(client, server)
    finally:
        await client.end()
        await server.end()
        listener.close()
    return {CLIENT: client.told, SERVER: server.told}


@pytest.mark.parametrize("stay_open", [False, True], ids=["closes-after-eof", "stays-open"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_protocols_are_told_what_they_are_told_on_loopback(scenario: Scenario, stay_open: bool) -> None:
    with asyncio.Runner() as runner:
        real = runner.run(play(scenario, stay_open=stay_open))

    virtual = run(lambda _loop: play(scenario, stay_open=stay_open), seed=1)

    assert virtual == real


def on_two_hosts(
    scenario: Callable[[SimLoop, Recorder, Recorder], Awaitable[None]],
    *,
    link: Link | None = None,
    seed: int = 1,
    server: Callable[[], Recorder] = Recorder,
) -> None:
    """Run a scenario with the client on host a and the server on host b."""

    async def main(loop: SimLoop) -> None:
        loop.network.add_host("a", "10.0.0.2")
        loop.network.add_host("b", "10.0.0.3")
        loop.network.set_link("a", "b", link or Link())
        callee = server()
        with loop.network.on("b"):
            listener = await loop.create_server(lambda: callee, "0.0.0.0", 80)
        with loop.network.on("a"):
            _, caller = await loop.create_connection(Recorder, "b", 80)
            await callee.until_told("made")
        try:
            with loop.network.on("a"):
                await scenario(loop, caller, callee)
        finally:
            for side in (caller, callee):
                if not side.lost:
                    side.transport.abort()
            listener.close()
            await asyncio.sleep(1)

    run(main, seed=seed)


def test_bytes_take_the_latency_of_their_link() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        sent_s = loop.time()

        caller.transport.write(b"x")
        await callee.until_told(b"x")

        assert loop.time() - sent_s == pytest.approx(0.25)

    on_two_hosts(scenario, link=Link(latency_s=0.25))


def test_bytes_take_the_time_that_the_bandwidth_gives_them() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        sent_s = loop.time()

        caller.transport.write(bytes(1_000_000))
        await callee.until(lambda told: told[-1] == bytes(1_000_000))

        assert loop.time() - sent_s == pytest.approx(1.0, abs=0.1)

    on_two_hosts(scenario, link=Link(latency_s=0.001, bytes_per_s=1_000_000))


def test_a_reader_that_stops_holds_the_writer_at_bounded_bytes() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        callee.transport.pause_reading()
        written = 0

        while "pause" not in caller.told:
            caller.transport.write(bytes(4096))
            written += 4096

        assert written <= Link().window_bytes + 64 * 1024 + 2 * 4096
        await asyncio.sleep(3600)
        assert caller.told[-1] == "pause"

    on_two_hosts(scenario)


def test_a_slow_reader_sets_the_pace_of_the_writer() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        callee.transport.pause_reading()
        caller.transport.write(bytes(1_000_000))
        begun_s = loop.time()

        while len(callee.told) < 2 or len(callee.told[1]) < 1_000_000:
            await asyncio.sleep(1)
            callee.transport.resume_reading()
            await asyncio.sleep(0.000_1)
            callee.transport.pause_reading()

        assert loop.time() - begun_s > 10
        assert caller.told == ["made", "pause", "resume"]

    on_two_hosts(scenario)


def test_short_reads_lose_and_reorder_nothing() -> None:
    sent = bytes(range(256)) * 200

    async def scenario(_loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        caller.transport.write(sent)

        await callee.until(lambda told: told[-1] == sent)

    for seed in range(5):
        on_two_hosts(scenario, link=Link(jitter_s=0.01, segment_bytes=1460, short_read_p=0.8), seed=seed)


def test_a_partition_delays_bytes_until_it_heals() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        loop.network.partition("a", "b")
        caller.transport.write(b"held")
        await asyncio.sleep(60)
        assert callee.told == ["made"]

        loop.network.heal("a", "b")
        await callee.until_told(b"held")

        assert loop.time() < 61

    on_two_hosts(scenario)


def test_a_partition_that_does_not_heal_ends_the_connection_as_tcp_does() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        loop.network.partition("a", "b")
        caller.transport.write(b"lost")

        await asyncio.sleep(1000)

        assert caller.told[-1] == "lost: TimeoutError"
        assert callee.told == ["made"]

    on_two_hosts(scenario)


def test_a_middle_box_that_forgets_resets_both_ends() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        loop.network.reset_between("a", "b")

        await caller.until_lost()
        await callee.until_lost()

        assert caller.told == callee.told == ["made", "lost: ConnectionResetError"]

    on_two_hosts(scenario)


def test_a_frozen_process_reads_nothing_until_it_thaws() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        loop.network.freeze("b")
        caller.transport.write(b"unread")
        callee.transport.write(b"unsent")
        await asyncio.sleep(60)
        assert (caller.told, callee.told) == (["made"], ["made"])

        loop.network.thaw("b")
        await caller.until_told(b"unsent")
        await callee.until_told(b"unread")

    on_two_hosts(scenario)


def test_a_frozen_process_is_still_connected_to_by_its_kernel() -> None:
    async def scenario(loop: SimLoop, _caller: Recorder, _callee: Recorder) -> None:
        loop.network.freeze("b")

        async with asyncio.timeout(1):
            transport, _ = await loop.create_connection(Recorder, "b", 80)

        transport.abort()

    on_two_hosts(scenario)


def test_a_crash_closes_connections_and_refuses_new_ones() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, _callee: Recorder) -> None:
        loop.network.crash("b")
        await caller.until_lost()

        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Recorder, "b", 80)

        assert caller.told == ["made", "eof", "lost"]

    on_two_hosts(scenario)


def test_a_crash_with_bytes_unread_resets() -> None:
    async def scenario(loop: SimLoop, caller: Recorder, _callee: Recorder) -> None:
        caller.transport.write(b"unread")
        await asyncio.sleep(1)

        loop.network.crash("b")
        await caller.until_lost()

        assert caller.told == ["made", "lost: ConnectionResetError"]

    on_two_hosts(scenario, server=lambda: Recorder(pause_at_once=True))


def test_an_address_that_nobody_has_times_out_as_tcp_does() -> None:
    async def main(loop: SimLoop) -> float:
        with pytest.raises(TimeoutError) as caught:
            await loop.create_connection(Recorder, "10.9.9.9", 80)

        assert caught.value.errno == errno.ETIMEDOUT
        return loop.time()

    assert run(main, seed=1) == pytest.approx(127)


def test_a_black_holed_address_costs_no_more_than_the_happy_eyeballs_delay() -> None:
    async def main(loop: SimLoop) -> float:
        loop.network.add_host("engine", "10.0.0.2")
        loop.network.set_name("both.example", "fd00::9", "10.0.0.2")
        with loop.network.on("engine"):
            listener = await loop.create_server(Recorder, "0.0.0.0", 80)

        transport, _ = await loop.create_connection(Recorder, "both.example", 80, happy_eyeballs_delay=0.25)

        took_s = loop.time()
        transport.abort()
        listener.close()
        await asyncio.sleep(1)
        return took_s

    assert run(main, seed=1) == pytest.approx(0.25, abs=0.01)


def test_a_name_that_does_not_resolve_raises_as_getaddrinfo_does() -> None:
    async def main(loop: SimLoop) -> None:
        with pytest.raises(socket.gaierror):
            await loop.create_connection(Recorder, "nowhere.example", 80)

    run(main, seed=1)


def test_a_port_in_use_is_refused_to_a_second_server() -> None:
    async def main(loop: SimLoop) -> None:
        listener = await loop.create_server(Recorder, "127.0.0.1", 80)

        with pytest.raises(OSError, match="in use") as caught:
            await loop.create_server(Recorder, "127.0.0.1", 80)

        assert caught.value.errno == errno.EADDRINUSE
        listener.close()

    run(main, seed=1)


def test_a_listener_on_loopback_is_not_reached_from_another_host() -> None:
    async def main(loop: SimLoop) -> None:
        loop.network.add_host("other", "10.0.0.2")
        with loop.network.on("other"):
            listener = await loop.create_server(Recorder, "127.0.0.1", 80)

        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Recorder, "other", 80)

        listener.close()

    run(main, seed=1)


def test_waiting_for_bytes_that_nobody_will_send_is_a_deadlock() -> None:
    async def scenario(_loop: SimLoop, caller: Recorder, _callee: Recorder) -> None:
        await caller._changed.wait()
        caller._changed.clear()
        await caller._changed.wait()

    with pytest.raises(Deadlock, match=r"Event\.wait"):
        on_two_hosts(scenario)


def test_jitter_never_reorders_one_connection() -> None:
    sent = random.Random(1).randbytes(50_000)

    async def scenario(loop: SimLoop, caller: Recorder, callee: Recorder) -> None:
        for begin in range(0, len(sent), 100):
            caller.transport.write(sent[begin : begin + 100])
            await asyncio.sleep(0.001)

        await callee.until(lambda told: told[-1] == sent)

    on_two_hosts(scenario, link=Link(latency_s=0.001, jitter_s=0.05))
