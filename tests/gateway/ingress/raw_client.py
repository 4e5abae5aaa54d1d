"""A tiny HTTP/1.x client over a bare socket: it sends exactly the bytes it is given and reads answers one at a time."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self, cast

import orjson

WAIT_S = 5.0


@dataclass(slots=True)
class Answer:
    """One answer. whole: its framing ended properly."""

    status: int
    version: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    whole: bool = False
    interim: list[int] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def one(self, name: str) -> str:
        """The field's only value, "" when absent. Fails when it is repeated."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} is repeated: {values}"
        return values[0] if values else ""

    def json(self) -> dict[str, object]:
        return cast("dict[str, object]", orjson.loads(self.body))

    def error(self) -> dict[str, object]:
        return cast("dict[str, object]", self.json()["error"])


class RawClient:
    """One connection. Use as an async context manager."""

    def __init__(self, port: int, *, receive_buffer_bytes: int | None = None, wait_s: float = WAIT_S) -> None:
        self._port = port
        self._wait_s = wait_s
        self._buffer = b""
        self._socket = socket.socket()
        if receive_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._socket.setblocking(False)

    async def __aenter__(self) -> Self:
        await asyncio.get_running_loop().sock_connect(self._socket, ("127.0.0.1", self._port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def local_port(self) -> int:
        """Our end's port, which tells this connection from all others to the same server."""
        return int(self._socket.getsockname()[1])

    def reset(self) -> None:
        """Close with RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def read_some(self, size: int = 262_144) -> bytes:
        """At most so many bytes as they come; b"" at the end of the connection. Fails after wait_s."""
        if self._buffer:
            data, self._buffer = self._buffer[:size], self._buffer[size:]
            return data
        async with asyncio.timeout(self._wait_s):
            return await asyncio.get_running_loop().sock_recv(self._socket, size)

    async def read_to_end(self) -> bytes:
        """Everything until the server closes."""
        got = []
        try:
            while data := await self.read_some():
                got.append(data)
        except ConnectionResetError:
            pass
        return b"".join(got)

    async def answer(self, method: str = "POST") -> Answer:
        """Read one answer, interim ones noted in it."""
        answer = await self.read_head()
        await self._read_body(answer, method)
        return answer

    async def read_head(self) -> Answer:
        """Read status line and fields of the next final answer."""
        interim: list[int] = []
        while True:
            raw = await self._until(b"\r\n\r\n")
            first, *lines = raw.decode("latin-1").split("\r\n")
            version, status, _ = (first + "  ").split(" ", 2)
            if not 100 <= int(status) < 200:
                break
            interim.append(int(status))
        fields = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return Answer(int(status), version, fields, interim=interim)

    async def read_chunk(self) -> bytes:
        """The next chunk of a chunked body; b"" at its proper end. Raises EOFError when the connection ends before."""
        size = int(await self._until(b"\r\n"), 16)
        chunk = await self._exactly(size)
        assert await self._exactly(2) == b"\r\n"
        return chunk

    async def ask(self, data: bytes, method: str = "POST") -> Answer:
        await self.send(data)
        return await self.answer(method)

    async def _read_body(self, answer: Answer, method: str) -> None:
        try:
            if method == "HEAD" or answer.status in {204, 304}:
                pass
            elif answer.one("transfer-encoding") == "chunked":
                while chunk := await self.read_chunk():
                    answer.body += chunk
            elif answer.one("content-length"):
                answer.body = await self._exactly(int(answer.one("content-length")))
            else:
                while data := await self.read_some():
                    answer.body += data
            answer.whole = True
        except (EOFError, ConnectionResetError):
            pass

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            await self._more()
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    async def _more(self) -> None:
        held, self._buffer = self._buffer, b""
        data = await self.read_some()
        self._buffer = held + data
        if not data:
            raise EOFError


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until the condition holds. Fails after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def request(
    method: str,
    path: str,
    body: bytes | None = None,
    *headers: str,
    version: str = "HTTP/1.1",
) -> bytes:
    """The bytes of a request; a body gets a Content-Length unless a header frames it."""
    names = {header.partition(":")[0].lower() for header in headers}
    lines = [f"{method} {path} {version}", "Host: gateway.test", *headers]
    if body is not None and not names & {"content-length", "transfer-encoding"}:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")


def chat(**more: object) -> bytes:
    """A small chat body."""
    return orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **more})
