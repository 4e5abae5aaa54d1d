"""A scripted engine on a real socket, in the test's own loop: it answers probes like vLLM and generation as told.

`engine.play = script` sets what the next requests get; a script is a coroutine that is given the request and the
connection and writes raw bytes, so that it can cut, freeze, reset or lie at any byte. What arrived is in
`engine.requests`, and what the gateway asked by itself to try the engine out in `engine.trials`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import orjson

from backends.openai_compatible import TRIAL_ID

MODEL = "m-fake"
SSE = "text/event-stream; charset=utf-8"
_METRICS = (
    'vllm:num_requests_running{engine="0",model_name="MODEL"} 0.0\n'
    'vllm:num_requests_waiting{engine="0",model_name="MODEL"} 0.0\n'
    'vllm:kv_cache_usage_perc{engine="0",model_name="MODEL"} 0.05\n'
    'vllm:generation_tokens_total{engine="0",model_name="MODEL"} 100.0\n'
)
_PROBES = frozenset(
    {
        *("/health", "/health/ready", "/ping", "/version", "/v1/models", "/metrics", "/info", "/props", "/slots"),
        *("/is_paused", "/load", "/server_info", "/get_server_info"),
    }
)


@dataclass(slots=True)
class Asked:
    """One request as it came off the wire; header names lower-case, order and repeats kept."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def one(self, name: str) -> str:
        values = self.all(name)
        assert len(values) <= 1, f"{name} is repeated: {values}"
        return values[0] if values else ""

    def json(self) -> dict[str, Any]:
        return cast("dict[str, Any]", orjson.loads(self.body))


class Wire:
    """One accepted connection. `gone` is set once the gateway has closed it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._chunked = False
        self.keep = True
        self.gone = asyncio.Event()

    async def head(
        self,
        status: int = 200,
        *headers: str,
        content_type: str = SSE,
        length: int | None = None,
        version: str = "HTTP/1.1",
    ) -> None:
        """Status line and fields. Without a length the body is chunked, or ends with the connection on HTTP/1.0."""
        lines = [f"{version} {status} X", *headers]
        if content_type:
            lines.append(f"Content-Type: {content_type}")
        self._chunked = length is None and version == "HTTP/1.1"
        if self._chunked:
            lines.append("Transfer-Encoding: chunked")
        elif length is not None:
            lines.append(f"Content-Length: {length}")
        else:
            self.keep = False
        await self.raw(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    async def part(self, data: bytes) -> None:
        """One piece of body, on the wire by itself."""
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        await self.raw(data)

    async def end(self) -> None:
        if self._chunked:
            await self.raw(b"0\r\n\r\n")

    async def reply(self, status: int, body: object, *headers: str, content_type: str = "application/json") -> None:
        """A whole answer with its length."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        await self.head(status, *headers, content_type=content_type, length=len(data))
        await self.raw(data)

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ConnectionError:
            self.gone.set()

    def fin(self) -> None:
        self.keep = False
        self._writer.close()

    def rst(self) -> None:
        self.keep = False
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Asked, Wire], Awaitable[None]]


def delta(text: str | None = None, *, finish: str | None = None, index: int = 0, **more: object) -> dict[str, object]:
    """One chat chunk as vLLM writes it."""
    inner = {} if text is None else {"content": text}
    choice = {"index": index, "delta": inner, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        **more,
    }


def event(payload: object, eol: bytes = b"\n") -> bytes:
    return b"data: " + orjson.dumps(payload) + eol + eol


DONE = b"data: [DONE]\n\n"


def stream(
    *pieces: bytes, end: str = "clean", status: int = 200, headers: Sequence[str] = (), pause_s: float = 0.0
) -> Script:
    """Send pieces one by one as an event stream. end: clean, fin, rst, or hang (until the gateway closes)."""

    async def script(_asked: Asked, wire: Wire) -> None:
        await wire.head(status, *headers)
        for piece in pieces:
            await wire.part(piece)
            await asyncio.sleep(pause_s)
        if end == "clean":
            await wire.end()
        elif end == "fin":
            wire.fin()
        elif end == "rst":
            await asyncio.sleep(0.05)  # let what was written arrive: a reset throws unread bytes away
            wire.rst()
        elif end == "hang":
            await wire.gone.wait()

    return script


def answer(status: int, body: object, *headers: str, content_type: str = "application/json") -> Script:
    """One whole answer."""

    async def script(_asked: Asked, wire: Wire) -> None:
        await wire.reply(status, body, *headers, content_type=content_type)

    return script


async def hello(asked: Asked, wire: Wire) -> None:
    """A small good answer, streamed or whole."""
    if asked.json().get("stream"):
        await stream(event(delta("Hel")), event(delta("lo")), event(delta(finish="stop")), DONE)(asked, wire)
        return
    message = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    await wire.reply(200, {"id": "chatcmpl-1", "object": "chat.completion", "choices": [message], "usage": usage})


@dataclass
class ScriptedEngine:
    """See the module header. An async context manager; `port` is set once entered (0: any free one)."""

    play: Script = hello
    models: list[str] = field(default_factory=lambda: [MODEL])
    metrics: str = _METRICS.replace("MODEL", MODEL)
    health: int = 200
    page_delay_s: float = 0.0
    port: int = 0
    host: str = "127.0.0.1"
    prefix: str = ""
    requests: list[Asked] = field(default_factory=list)
    trials: list[Asked] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    active: int = 0
    most_active: int = 0
    aborted: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _generating: set[asyncio.StreamWriter] = field(default_factory=set)
    _stopped: bool = False
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self.host, self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopped:
            writer.transport.abort()
            return
        self._open.add(writer)
        wire = Wire(reader, writer)
        try:
            while wire.keep:
                asked = await _read_request(reader)
                assert asked.path.startswith(f"{self.prefix}/"), f"{asked.path} is not below {self.prefix}"
                asked.path = asked.path.removeprefix(self.prefix)
                if asked.method in {"GET", "HEAD"} and asked.path.partition("?")[0] in _PROBES:
                    await self._probe(asked.path, wire)
                else:
                    await self._generate(asked, wire, reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            wire.gone.set()
            self._open.discard(writer)
            writer.close()

    async def stop_listening(self) -> None:
        """Refuse new connections, and close those that carry no generation, as a server does that was told to stop."""
        self._stopped = True
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener)
        await asyncio.sleep(
            0
        )  # CPython leaks a connection that is accepted in the very turn in which its server closes
        self._server.close()
        for writer in self._open - self._generating:
            writer.transport.abort()

    async def _probe(self, path: str, wire: Wire) -> None:
        if self.page_delay_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.page_delay_s):
                    await self._closing.wait()
        if path == "/metrics":
            await wire.reply(200, self.metrics.encode(), content_type="text/plain; version=0.0.4")
        elif path == "/v1/models":
            data = [{"id": name, "object": "model", "owned_by": "vllm", "max_model_len": 4096} for name in self.models]
            await wire.reply(200, {"object": "list", "data": data})
        elif path == "/version":
            await wire.reply(200, {"version": "0.32.0"})
        elif path == "/health":
            await wire.reply(self.health, b"", content_type="")
        else:
            await wire.reply(404, {"detail": "Not Found"})

    async def _generate(self, asked: Asked, wire: Wire, reader: asyncio.StreamReader) -> None:
        trial = asked.one("x-request-id") == TRIAL_ID
        (self.trials if trial else self.requests).append(asked)
        self.wires.append(wire)
        self._generating.add(wire._writer)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        playing = asyncio.ensure_future(self.play(asked, wire))
        watching = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({playing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                wire.gone.set()
                self.aborted += not trial
                playing.cancel()
                raise ConnectionResetError
            await playing
            if watching.done():
                raise ConnectionResetError
        finally:
            self.active -= 1
            self._generating.discard(wire._writer)
            await _end(watching)


async def _end(reading: asyncio.Future[bytes]) -> None:
    reading.cancel()
    try:
        await reading
    except (asyncio.CancelledError, ConnectionError):
        return


async def _read_request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = int(dict(headers).get("content-length", "0"))
    return Asked(method, path, headers, await reader.readexactly(length) if length else b"")
