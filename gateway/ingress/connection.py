"""One client connection: aiohttp's HTTP/1 protocol, plus the bounds that a public listener needs.

aiohttp parses and drives one handler at a time per connection; that stays. Added here, because aiohttp has no hook
for it:

* the head of a request must be whole `request_head_s` after its first byte, else 408 (slow senders hold nothing);
* heads are bounded as a whole, not only field by field;
* what cannot be parsed is answered by a JSON error object, and never by the bytes that were wrong (they may hold a key);
* the write buffer's marks and the loss of the connection reach the `Downstream` at once;
* a transport that is closing but cannot flush (its client takes nothing) is aborted after `stalled_client_s`: closing
  alone would wait for ever. A client that reads slowly takes something, and gets the rest.

Verified against web_protocol.py of aiohttp 3.14; the private names used are `_request_count`, `_waiter`, `_messages`,
`_ErrInfo`, `_current_request`, `_task_handler`, `_force_close` and `_drain_helper`.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from dataclasses import dataclass
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo

from gateway.errors import Refusal
from gateway.ingress.wire import DateLine, closing_answer

KEEPALIVE_S = 75.0
"""Idle time after which a kept-alive connection is closed; above the 60 s of common proxies, so that they close first."""

HEAD_FIELDS_MAX = 4
"""A whole head may be as long as this many of the longest header fields."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """See `gateway.settings`: Timeouts and Limits."""

    head_s: float
    stalled_s: float
    header_max_bytes: int
    connections_max: int


class TransportWatcher(Protocol):
    """Whoever writes into the connection's transport now."""

    @property
    def started(self) -> bool:
        """True once a status line was written."""
        ...

    def pause_writing(self) -> None:
        """The transport's buffer is over its high-water mark."""
        ...

    def resume_writing(self) -> None:
        """The buffer is below its low-water mark again."""
        ...

    def connection_lost(self) -> None:
        """No byte will reach the client any more."""
        ...


class Written(web.StreamResponse):
    """Tells aiohttp that the answer is on the wire already. Stateless, so one serves all requests."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:  # noqa: ARG002 - aiohttp's signature
        return None

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002 - aiohttp's signature
        return None


class Connection(RequestHandler):
    """See the module header. `watcher` is set by the handler for as long as it writes."""

    __slots__ = ("_bounds", "_close_timer", "_head_bytes", "_head_timer", "_server", "watcher")

    def __init__(self, server: HttpServer, bounds: ConnectionBounds, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=KEEPALIVE_S,
            access_log=cast("Any", None),
            max_line_size=bounds.header_max_bytes,
            max_field_size=bounds.header_max_bytes,
            auto_decompress=False,
        )
        self._server = server
        self._bounds = bounds
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._close_timer: asyncio.TimerHandle | None = None
        self.watcher: TransportWatcher | None = None

    @property
    def idle(self) -> bool:
        """True while no request is being handled: the connection waits for a head.

        Before the first request aiohttp's task may not have run yet (uvloop delivers bytes that early).
        """
        if self._waiter is None:
            return self._request_count == 0
        return not self._waiter.done() and not self._messages

    @property
    def draining(self) -> bool:
        """True once the listener is closing: answers say `Connection: close`."""
        return self._server.draining or self._force_close

    async def flushed(self) -> None:
        """Wait until earlier answers left the write buffer. Raises TimeoutError when the client takes nothing."""
        async with asyncio.timeout(self._bounds.stalled_s):
            await self._drain_helper()

    def close_soon(self, transport: asyncio.Transport) -> None:
        """Close after flushing, or abort after `stalled_s` if the client does not take the rest."""
        transport.close()
        if self._close_timer is None and transport.get_write_buffer_size() > 0:
            self._abort_when_stalled(transport, -1)

    def _abort_when_stalled(self, transport: asyncio.Transport, unsent_before_bytes: int) -> None:
        unsent = unsent_bytes(transport)
        if unsent == unsent_before_bytes:
            transport.abort()
        else:
            self._close_timer = self._loop.call_later(
                self._bounds.stalled_s, self._abort_when_stalled, transport, unsent
            )

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._server.open_connections >= self._bounds.connections_max:
            self._force_close = True
            real = cast("asyncio.Transport", transport)
            real.write(closing_answer(_TOO_MANY_CONNECTIONS, self._server.date_line))
            self.close_soon(real)
            return
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        seen = self._request_count
        super().data_received(data)
        if self._request_count != seen:
            self._head_whole()
            self._tell_broken_body()
        elif data and self.idle:
            self._head_growing(len(data))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.watcher is not None:
            self.watcher.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.watcher is not None:
            self.watcher.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_whole()
        if self._close_timer is not None:
            self._close_timer.cancel()
        if self.watcher is not None:
            self.watcher.connection_lost()
        super().connection_lost(exc)

    # -- RequestHandler ------------------------------------------------------------------------------------------

    def force_close(self) -> None:
        transport = self.transport
        super().force_close()
        if transport is not None:
            self.close_soon(transport)

    async def start(self) -> None:
        try:
            await super().start()
        finally:
            transport = self.transport
            if transport is not None and transport.is_closing():
                self.close_soon(transport)

    def handle_error(
        self,
        request: web.BaseRequest,  # noqa: ARG002 - aiohttp's signature
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - holds the client's bytes
    ) -> web.StreamResponse:
        """Answer what could not be parsed, and close. aiohttp's message is not used: it quotes the client's bytes."""
        if self.watcher is not None and self.watcher.started:
            raise ConnectionError("the answer had begun")
        if self.transport is not None:
            self.transport.write(closing_answer(_parse_refusal(status, exc), self._server.date_line))
        return self._server.close_after

    def _tell_broken_body(self) -> None:
        """Wake a handler that waits for a body whose framing broke: aiohttp queues the error behind that handler."""
        request = self._current_request
        if request is not None and isinstance(self._messages[-1][0], _ErrInfo) and not request.content.is_eof():
            request.content.set_exception(RequestPayloadError("broken framing"))

    # -- heads ---------------------------------------------------------------------------------------------------

    def _head_growing(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_FIELDS_MAX * self._bounds.header_max_bytes:
            self._refuse_head(_HEAD_TOO_LONG)
        elif self._head_timer is None:
            self._head_timer = self._loop.call_later(self._bounds.head_s, self._refuse_head, _HEAD_TOO_SLOW)

    def _head_whole(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self, refusal: Refusal) -> None:
        self._head_whole()
        if self.idle and self.transport is not None:
            self.transport.write(closing_answer(refusal, self._server.date_line))
            self.force_close()


def unsent_bytes(transport: asyncio.Transport) -> int:
    """Bytes written that the peer has not acknowledged; where the system does not tell, those it has not taken from us.

    The transport alone shows no progress of a slow client for minutes: the kernel holds megabytes for it, and takes more
    only when a third of them is gone.
    """
    waiting = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is None:
        return waiting
    try:
        (in_kernel,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # not to be asked of this socket; it is closed
        return waiting
    return waiting + int(in_kernel)


class HttpServer(web.Server):
    """Makes one `Connection` per accepted socket and counts them. Cancels a handler whose client is gone."""

    def __init__(
        self, handler: Any, bounds: ConnectionBounds, date_line: DateLine, *, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(handler, handler_cancellation=True, loop=loop)
        self._bounds = bounds
        self.date_line = date_line
        self.open_connections = 0
        self.draining = False
        self.keep_after = Written(keep_alive=True)
        self.close_after = Written(keep_alive=False)

    def __call__(self) -> Connection:
        return Connection(self, self._bounds, self._loop)

    def __repr__(self) -> str:
        return f"<HttpServer {self.open_connections} connections{', draining' if self.draining else ''}>"

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        self.open_connections += 1
        super().connection_made(handler, transport)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        if handler in self._connections:
            self.open_connections -= 1
        super().connection_lost(handler, exc)

    def drain(self) -> None:
        """Close idle connections now and the others after their answer."""
        self.draining = True
        for connection in self.connections:
            if cast("Connection", connection).idle:
                connection.force_close()

    def abandon(self) -> list[asyncio.Task[None]]:
        """Cancel what is being handled and close every connection; the tasks returned are to be awaited."""
        tasks = []
        for connection in self.connections:
            if connection._task_handler is not None:
                connection._task_handler.cancel()
                tasks.append(connection._task_handler)
            connection.force_close()
        return tasks


def _parse_refusal(status: int, exc: BaseException | None) -> Refusal:
    if isinstance(exc, LineTooLong) or (isinstance(exc, BadHttpMessage) and "Too many headers" in exc.message):
        return _HEAD_TOO_LONG
    if status >= 500:
        return Refusal(500, "the gateway failed; retry, and report the request id", "server_error", "internal_error")
    return _UNREADABLE


_UNREADABLE = Refusal(
    400, "request could not be parsed: expected HTTP/1.1 with valid headers and framing", reason="bad_request"
)
_HEAD_TOO_LONG = Refusal(
    431, "request head is too long: shorten the URL, the header fields or their number", reason="head_too_long"
)
_HEAD_TOO_SLOW = Refusal(
    408, "request head did not arrive in time: send it without pauses", "timeout_error", "request_head_timeout"
)
_TOO_MANY_CONNECTIONS = Refusal(
    503, "too many open connections: retry later", "overloaded_error", "connections_full", retry_after_s=1
)
