"""The way back to one client through aiohttp's StreamResponse: the plain form of `gateway.exchange.Downstream`.

It exists to keep the contract honest: whatever `TransportDownstream` does straight on the transport must look the same
to a client as what aiohttp does by the book. `tests/contracts/test_downstream.py` runs one suite over both. The gateway
itself uses the transport form; this one costs a task switch per chunk.

StreamResponse's methods are coroutines, so what is written waits in a short list for `run`, which the handler awaits.
`on_pause` is called when that list holds more than HIGH_WATER_BYTES.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from aiohttp import web

from gateway.ingress.connection import unsent_bytes
from gateway.ingress.wire import SERVER

HIGH_WATER_BYTES = 64 * 1024
LOW_WATER_BYTES = 16 * 1024


class StreamDownstream:
    """See the module header. The handler makes it, awaits `run`, and returns what `run` returns."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._left: int | None = None
        self._paused = False
        self._wake = asyncio.Event()
        self._on_pause = self._on_resume = self._on_gone = _nothing
        self._aborted = False
        self.ended = False
        self.gone = False

    @property
    def started(self) -> bool:
        return self._response is not None

    @property
    def unsent_bytes(self) -> int:
        transport = self._request.transport
        return self._waiting_bytes + (0 if transport is None else unsent_bytes(transport))

    def start(self, status: int, headers: Sequence[tuple[str, str]], *, content_length: int | None = None) -> None:
        if self._response is not None:
            return
        self._response = response = web.StreamResponse(status=status)
        for name, value in headers:
            response.headers.add(name, value)
        response.headers["server"] = SERVER
        if content_length is not None:
            response.content_length = self._left = content_length
        elif self._request.version < (1, 1):
            response.force_close()
        elif self._request.method != "HEAD":
            response.enable_chunked_encoding()
        if not self._request.content.is_eof():
            response.force_close()
        self._wake.set()

    def write(self, data: bytes) -> None:
        if self.gone or self.ended or self._request.method == "HEAD":
            return
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        if data:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            self._wake.set()
            if self._waiting_bytes > HIGH_WATER_BYTES and not self._paused:
                self._paused = True
                self._on_pause()

    def finish(self) -> None:
        if self._left and self._request.method != "HEAD":
            self.abort()
        self.ended = True
        self._wake.set()

    def abort(self) -> None:
        if not self.ended:
            self.ended = self._aborted = True
            self._wake.set()

    def watch(
        self, *, on_pause: Callable[[], None], on_resume: Callable[[], None], on_gone: Callable[[], None]
    ) -> None:
        self._on_pause, self._on_resume, self._on_gone = on_pause, on_resume, on_gone
        if self.gone:
            on_gone()
        elif self._paused:
            on_pause()

    async def run(self) -> web.StreamResponse:
        """Write until the end. Returns aiohttp's response; raises ConnectionResetError after an abort."""
        try:
            return await self._run()
        except (ConnectionError, asyncio.CancelledError):
            self._lost()
            raise

    async def _run(self) -> web.StreamResponse:
        while True:
            await self._wake.wait()
            self._wake.clear()
            response = self._response
            if response is not None:
                await response.prepare(self._request)
                await self._write_waiting(response)
            if self.ended and not self._waiting:
                break
        transport = self._request.transport
        if response is None or self._aborted:
            if transport is not None:
                transport.close()
            raise ConnectionResetError("answer aborted")
        await response.write_eof()
        return response

    async def _write_waiting(self, response: web.StreamResponse) -> None:
        while self._waiting:
            data = self._waiting.popleft()
            await response.write(data)
            self._waiting_bytes -= len(data)
            if self._paused and self._waiting_bytes < LOW_WATER_BYTES:
                self._paused = False
                self._on_resume()

    def _lost(self) -> None:
        self.gone = True
        self._waiting.clear()
        self._on_gone()


def _nothing() -> None:
    """Stands until `watch` was called."""
