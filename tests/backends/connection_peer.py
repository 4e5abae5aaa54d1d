"""A raw scripted engine on loopback, and a receiver that writes down what it is told.

The peer speaks bytes, not HTTP: each accepted connection runs a script, so that it can cut, freeze, reset or lie at
any byte. An error inside a script fails the test when the peer is left.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from backends.base import CallFailure, EngineRequest, Headers

WAIT_S = 5.0
_LENGTH = re.compile(rb"content-length: (\d+)\r\n")

POST = EngineRequest(b"POST", b"/v1/chat/completions", ((b"content-type", b"application/json"),), b'{"model":"m"}')
GET = EngineRequest(b"GET", b"/health", (), b"")
HI = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@dataclass
class Asked:
    """One request as it came off the wire."""

    head: bytes
    body: bytes

    @property
    def lines(self) -> list[bytes]:
        return self.head.rstrip(b"\r\n").split(b"\r\n")


class Wire:
    """One accepted connection; `number` counts them from 0."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer
        self.left = asyncio.Event()  # the script is over: the client closed, or the script did

    async def asked(self) -> Asked:
        """The next whole request. Raises IncompleteReadError when the client closed instead."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        assert length is not None
        return Asked(head, await self.reader.readexactly(int(length[1])))

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    def fin(self) -> None:
        self.writer.close()

    def rst(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Returns when the client has closed or reset the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            return


Script = Callable[[Wire], Awaitable[None]]


class Peer:
    """The listening side; `wires` holds every connection ever accepted."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.wires: list[Wire] = []
        self.errors: list[BaseException] = []
        self.server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def stop_listening(self) -> None:
        """Refuse connections from now on."""
        assert self.server is not None
        self.server.close()


@asynccontextmanager
async def playing(
    script: Script, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Peer]:
    """Run `script` for each connection, until the block is left."""
    peer = Peer(port)
    tasks: set[asyncio.Task[None]] = set()

    async def run(wire: Wire) -> None:
        try:
            await script(wire)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left, which is its right
        except Exception as error:
            peer.errors.append(error)
        finally:
            wire.left.set()
            wire.writer.transport.abort()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(len(peer.wires), reader, writer)
        peer.wires.append(wire)
        tasks.add(asyncio.get_running_loop().create_task(run(wire)))

    async with await asyncio.start_server(accept, host, port, ssl=tls, backlog=1024) as server:
        peer.server = server
        peer.port = server.sockets[0].getsockname()[1]
        try:
            yield peer
        finally:
            await turns(10)  # a connection being accepted gets its task; the server cannot close around it
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            for wire in peer.wires:  # a task cancelled before its first step has closed nothing
                wire.writer.transport.abort()
            await turns(10)
    if peer.errors:
        raise peer.errors[0]


class Recorder:
    """A receiver that writes down what it is told and refuses to be told more after the end."""

    def __init__(self) -> None:
        self.head: tuple[int, Headers] | None = None
        self.body = bytearray()
        self.failure: CallFailure | None = None
        self.ended = False
        self.began = asyncio.Event()
        self.over = asyncio.Event()
        self.on_data: Callable[[], None] = lambda: None
        self.then: Callable[[], None] = lambda: None

    def on_head(self, status: int, headers: Headers) -> None:
        assert self.head is None
        self.head = (status, headers)

    def on_body(self, data: bytes) -> None:
        assert self.head is not None
        assert not self.over.is_set()
        assert data
        self.body += data
        self.began.set()
        self.on_data()

    def on_end(self) -> None:
        assert not self.over.is_set()
        self.ended = True
        self.over.set()
        self.then()

    def on_failure(self, failure: CallFailure) -> None:
        assert not self.over.is_set()
        self.failure = failure
        self.over.set()
        self.then()

    @property
    def silent(self) -> bool:
        """Nothing at all was told."""
        return self.head is None and not self.body and not self.over.is_set()

    async def whole(self) -> bytes:
        """The body, once on_end was told."""
        async with asyncio.timeout(WAIT_S):
            await self.over.wait()
        assert self.failure is None, self.failure
        assert self.head is not None
        return bytes(self.body)

    async def failed(self) -> CallFailure:
        """The failure, once told."""
        async with asyncio.timeout(WAIT_S):
            await self.over.wait()
        assert self.failure is not None, "the call ended well"
        return self.failure


async def until(reached: Callable[[], object]) -> None:
    """Let the loop go round until `reached()` is true; fails after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not reached():
            await asyncio.sleep(0)


async def turns(count: int = 20) -> None:
    """Let the loop go round, so that what could be told or sent by now has been."""
    for _ in range(count):
        await asyncio.sleep(0)


async def echoing(wire: Wire) -> None:
    """Answer every request with its own body, on a connection kept open."""
    while True:
        asked = await wire.asked()
        wire.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(asked.body), asked.body))


def server_tls(folder: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{folder}/cert.pem", f"{folder}/key.pem")
    return context
