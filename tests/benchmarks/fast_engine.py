"""An engine that costs next to nothing: prepared bytes on a bare protocol, to measure what stands before it.

    python -m tests.benchmarks.fast_engine [PORT]

A stream's first token comes at once, the others at one tick for all streams; `max_tokens` is their number, and
`GET /tick/SECONDS` changes the tick. Prints `listening on http://HOST:PORT`.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from typing import Final, cast

import uvloop

TICK_S: Final = 0.01
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens":(\d+)')
_CHUNK = b'data: {"id":"c-1","object":"chat.completion.chunk","model":"fast","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
_LAST = b'data: {"id":"c-1","object":"chat.completion.chunk","model":"fast","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
_DONE = b"data: [DONE]\n\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
    return head + body


HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK: Final = _framed(_CHUNK)
END: Final = _framed(_LAST) + _framed(_DONE) + b"0\r\n\r\n"
ANSWER: Final = _whole(
    b'{"id":"c-1","object":"chat.completion","model":"fast","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"word"},"finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
)
PAGES: Final = {
    b"/v1/models": _whole(
        b'{"object":"list","data":[{"id":"fast","object":"model","owned_by":"vllm","max_model_len":65536}]}'
    ),
    b"/health": _whole(b""),
    b"/version": _whole(b'{"version":"0.30.0"}'),
    b"/metrics": _whole(b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n", b"text/plain"),
}


class Streams:
    """All that stream, and their common tick."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left: dict[asyncio.Transport, int] = {}
        self.tick_s = TICK_S
        self._running = False

    def begin(self, transport: asyncio.Transport, tokens: int) -> None:
        """Its first token now, the others at the ticks to come."""
        transport.write(HEAD + CHUNK)
        if tokens <= 1:
            transport.write(END)
            return
        self._left[transport] = tokens - 1
        if not self._running:
            self._running = True
            self._loop.call_later(self.tick_s, self._tick)

    def gone(self, transport: asyncio.Transport) -> None:
        """The client left."""
        self._left.pop(transport, None)

    def _tick(self) -> None:
        over = []
        for transport, left in self._left.items():
            if left > 1:
                transport.write(CHUNK)
                self._left[transport] = left - 1
            else:
                transport.write(CHUNK + END)
                over.append(transport)
        for transport in over:
            del self._left[transport]
        self._running = bool(self._left)
        if self._running:
            self._loop.call_later(self.tick_s, self._tick)


class Engine(asyncio.Protocol):
    """One connection; a request is whole once its length is there."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._held = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.gone(self._transport)

    def data_received(self, data: bytes) -> None:
        held = self._held + data if self._held else data
        end = held.find(b"\r\n\r\n")
        length = _LENGTH.search(held, 0, end) if end >= 0 else None
        if end < 0 or len(held) < end + 4 + (int(length[1]) if length else 0):
            self._held = held
            return
        self._held = b""
        self._answer(held)

    def _answer(self, request: bytes) -> None:
        method, target, _ = request.split(b" ", 2)
        if method == b"GET":
            tick = target.partition(b"/tick/")[2]
            if tick:
                self._streams.tick_s = float(tick)
            self._transport.write(PAGES.get(target) or _whole(b"{}"))
        elif b'"stream":true' in request:
            found = _TOKENS.search(request)
            self._streams.begin(self._transport, int(found[1]) if found else 1)
        else:
            self._transport.write(ANSWER)


async def main(port: int) -> None:
    """Serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    streams = Streams(loop)
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    server = await loop.create_server(lambda: Engine(streams), "127.0.0.1", port, backlog=4096)
    host, port = server.sockets[0].getsockname()[:2]
    sys.stdout.write(f"listening on http://{host}:{port}\n")
    sys.stdout.flush()
    await over.wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
