"""How workers share one listening socket: each accepts one connection at a time, and who has least goes first.

The kernel wakes every worker for a connection and gives it to whoever asks first, which on an idle machine is nearly
always the same one: of 200 connections that came one by one to four workers the least busy got 2 and the busiest 91.
Connections live long here (clients keep them, streams take minutes), so that would last. SO_REUSEPORT spreads blindly
and resets what waits in a dead worker's own backlog.

So each worker writes how many connections it has on a board in shared memory, and one that has clearly more than the
lightest waits YIELD_S before it accepts. The lightest one takes the connection meanwhile; if it cannot (it is busy, or
frozen), nobody waits for it longer than that. The same 200 connections are then shared 50 ± 2, one by one or at once.
A number read while it is written is at worst an old one, and costs one connection's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence

from gateway.logs import Log

YIELD_S = 0.001
EXHAUSTED_PAUSE_S = 0.5
"""After an accept failed for lack of descriptors or memory: the connection waits in the backlog, asking at once spins."""

_CELL_BYTES = 8
_CLOSED = 1 << 62


class Board:
    """One number for each place, shared by all processes that map the same descriptor."""

    __slots__ = ("_cells", "fd")

    def __init__(self, fd: int) -> None:
        """fd of a board made by `new_board`; the mapping stays valid when it is closed."""
        self.fd = fd
        self._cells = memoryview(mmap.mmap(fd, 0)).cast("q")

    @property
    def places(self) -> int:
        """How many there are."""
        return len(self._cells)

    def put(self, place: int, connections: int) -> None:
        """This many connections are open at a place that accepts."""
        self._cells[place] = connections

    def close(self, place: int) -> None:
        """Nobody accepts at this place (any more)."""
        self._cells[place] = _CLOSED

    def lightest(self) -> int:
        """The least number of connections at any place that accepts."""
        return min(self._cells)

    def __repr__(self) -> str:
        return f"<Board {' '.join('-' if cell == _CLOSED else str(cell) for cell in self._cells)}>"


def new_board(places: int) -> Board:
    """A board on which nobody accepts yet; its descriptor is the caller's to pass on and to close."""
    fd = os.memfd_create("headrace-board")
    os.ftruncate(fd, places * _CELL_BYTES)
    board = Board(fd)
    for place in range(places):
        board.close(place)
    return board


class Acceptor:
    """Takes connections off shared listening sockets while `run` runs. The sockets are non-blocking and stay open."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        factory: Callable[[], asyncio.Protocol],
        *,
        board: Board,
        place: int,
        open_connections: Callable[[], int],
        log: Log,
    ) -> None:
        """factory makes a connection's protocol; open_connections counts those that it made and are open."""
        self._sockets = sockets
        self._factory = factory
        self._board = board
        self._place = place
        self._open_connections = open_connections
        self._log = log

    async def run(self) -> None:
        """Accept until cancelled; the place is closed after that."""
        self.refresh()
        try:
            async with asyncio.TaskGroup() as group:
                for sock in self._sockets:
                    group.create_task(self._accept_forever(sock))
        finally:
            self._board.close(self._place)

    def refresh(self) -> int:
        """Write how many connections are open, and return it. Closed ones show only after this."""
        connections = self._open_connections()
        self._board.put(self._place, connections)
        return connections

    async def _accept_forever(self, sock: socket.socket) -> None:
        while True:
            await _readable(sock)
            if self._heavy():
                await asyncio.sleep(YIELD_S)
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                continue
            except OSError as error:
                self._log.error("connections cannot be accepted", reason=error.strerror, repeat_key="accept")
                await asyncio.sleep(EXHAUSTED_PAUSE_S)
                continue
            await self._connected(connection)

    def _heavy(self) -> bool:
        lightest = self._board.lightest()
        return self.refresh() > lightest + 1 + lightest // 16

    async def _connected(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # it is gone already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(self._factory, connection)
            return
        connection.close()


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _set, readable)
    try:
        await readable
    finally:
        loop.remove_reader(sock)


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def listening_sockets(host: str, port: int, *, backlog: int) -> Iterator[socket.socket]:
    """Sockets that listen on every address of a host, as one process would; see `asyncio.loop.create_server`.

    Raises OSError.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in dict.fromkeys(found):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setblocking(False)
            sock.bind(address)
            sock.listen(backlog)
        except BaseException:
            sock.close()
            raise
        yield sock
