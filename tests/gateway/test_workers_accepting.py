"""One listening socket, many that accept: who goes first, and that nobody waits for one that cannot."""

from __future__ import annotations

import asyncio
import errno
import io
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from gateway.logs import Logs
from gateway.workers.accepting import Acceptor, Board, listening_sockets, new_board
from tests.gateway.ingress.raw_client import until


class Counted(asyncio.Protocol):
    """A connection that its side counts."""

    def __init__(self, side: Side) -> None:
        self._side = side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._side.open.append(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._side.lost += 1


class Side:
    """One of those who accept. `extra` are connections that it has besides."""

    def __init__(self, sock: socket.socket, fd: int, place: int, logs: Logs) -> None:
        self.open: list[asyncio.BaseTransport] = []
        self.lost = self.extra = 0
        self.acceptor = Acceptor(
            [sock],
            lambda: Counted(self),
            board=Board(fd),
            place=place,
            open_connections=lambda: len(self.open) - self.lost + self.extra,
            log=logs.log,
        )


class Stand:
    """Two sides on one socket (each by a descriptor of its own, as in two processes)."""

    def __init__(self, sock: socket.socket, board: Board, logs: Logs) -> None:
        self.board = board
        self.port: int = sock.getsockname()[1]
        self.sides = [Side(sock.dup(), board.fd, place, logs) for place in (0, 1)]

    async def connect(self) -> socket.socket:
        client = socket.socket()
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        return client

    @property
    def accepted(self) -> list[int]:
        return [len(side.open) for side in self.sides]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    (sock,) = listening_sockets("127.0.0.1", 0, backlog=256)
    with sock:
        yield sock


@pytest.fixture
async def stand(listener: socket.socket) -> AsyncIterator[Stand]:
    logs = Logs(io.BytesIO())
    stand = Stand(listener, new_board(3), logs)
    yield stand
    for side in stand.sides:
        for transport in side.open:
            transport.close()
        for sock in side.acceptor._sockets:
            sock.close()
    logs.close()


async def connected(stand: Stand, count: int, *, at_once: bool) -> None:
    """Connect so many clients, and wait until all are accepted."""
    with ExitStack() as stack:
        before = sum(stand.accepted)
        for number in range(count):
            stack.enter_context(await stand.connect())
            if not at_once:
                await until(lambda number=number: sum(stand.accepted) == before + number + 1)  # type: ignore[misc]
        await until(lambda: sum(stand.accepted) >= before + count)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
async def test_connections_are_shared_evenly(stand: Stand, at_once: bool) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(side.acceptor.run()) for side in stand.sides]

        await connected(stand, 60, at_once=at_once)

        for task in tasks:
            task.cancel()
    assert min(stand.accepted) >= 24, stand.accepted


async def test_one_that_holds_many_lets_the_other_go_first(stand: Stand) -> None:
    stand.sides[0].extra = 100
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(side.acceptor.run()) for side in stand.sides]

        await connected(stand, 30, at_once=False)

        for task in tasks:
            task.cancel()
    assert stand.accepted[1] >= 27, "a connection that comes just after its wait it may take"


async def test_nobody_waits_for_a_lightest_one_that_does_not_accept(stand: Stand) -> None:
    stand.board.put(2, 0)
    stand.sides[0].extra = 100
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stand.sides[0].acceptor.run())

        async with asyncio.timeout(1):
            await connected(stand, 20, at_once=True)

        task.cancel()
    assert stand.accepted == [20, 0]


async def test_one_that_stops_leaves_the_socket_to_the_others_and_its_place_to_nobody(stand: Stand) -> None:
    async with asyncio.TaskGroup() as group:
        stopping, going = (group.create_task(side.acceptor.run()) for side in stand.sides)
        await connected(stand, 4, at_once=True)
        stopping.cancel()
        await asyncio.wait([stopping])
        stand.sides[0].acceptor._sockets[0].close()
        stand.sides[1].extra = 50
        went = stand.accepted[0]

        await connected(stand, 10, at_once=True)

        assert stand.accepted[0] == went
        assert repr(stand.board).startswith("<Board - ")
        going.cancel()


async def test_a_connection_that_is_gone_before_it_is_accepted_harms_nothing(stand: Stand) -> None:
    client = await stand.connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(stand.sides[0].acceptor.run())

        await connected(stand, 2, at_once=True)

        task.cancel()


class Exhausted(socket.socket):
    """A listening socket whose first `failures` accepts find no descriptor left."""

    failures = 1

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_without_descriptors_accepting_pauses_and_goes_on(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.workers.accepting.EXHAUSTED_PAUSE_S", 0.05)
    stream = io.BytesIO()
    logs = Logs(stream)
    exhausted = Exhausted(fileno=socket.dup(listener.fileno()))
    board = new_board(1)
    side = Side(exhausted, board.fd, 0, logs)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(side.acceptor.run())
        with socket.create_connection(listener.getsockname()):
            await until(lambda: side.open)
        task.cancel()
    side.open[0].close()
    exhausted.close()
    logs.close()

    assert b"Too many open files" in stream.getvalue()


def test_every_address_of_a_host_is_listened_on() -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(sock) for sock in listening_sockets("localhost", 0, backlog=1)]

        assert {sock.family for sock in sockets} == {
            family for family, *_ in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)
        }
        assert not any(sock.getblocking() or sock.get_inheritable() for sock in sockets)


def test_a_taken_address_is_refused(listener: socket.socket) -> None:
    with pytest.raises(OSError, match="in use"):
        list(listening_sockets("127.0.0.1", listener.getsockname()[1], backlog=1))
