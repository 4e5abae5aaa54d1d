"""The way back to one client, written straight into its transport: the fast form of `gateway.exchange.Downstream`.

Why not StreamResponse: its `write` is a coroutine, so every chunk of every stream would need a task switch. Here a
chunk is one `transport.write`, made in the callback that brought it. aiohttp is told by a `Written` response.

The head waits for the first body bytes, at most until the end of the loop's turn, so that a whole answer and the first
token go out in one packet. Nothing else is buffered here: beyond the transport's high-water mark `on_pause` is called.

An answer cannot be trusted to be as long as it says: a body that ends short of its content_length is aborted, and
bytes past it are dropped.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from enum import Enum, auto

from gateway.ingress.connection import Connection, unsent_bytes
from gateway.ingress.wire import DateLine, head

_NO_BODY = frozenset({204, 304})
_LAST_CHUNK = b"0\r\n\r\n"


class _Framing(Enum):
    CHUNKED = auto()
    LENGTH = auto()
    UNTIL_CLOSE = auto()
    NONE = auto()


_CHUNKED = _Framing.CHUNKED
"""At hand, since it is asked for with every chunk."""


class TransportDownstream:
    """See the module header.

    ended          `finish` or `abort` was called
    keep_alive     the client may send another request after this answer; final once `finish` or `abort` was called
    body_read      tells whether the request's body was read to its end; a connection with unread body bytes ends
    """

    __slots__ = (
        "_body_read",
        "_connection",
        "_date_line",
        "_flush",
        "_framing",
        "_head_only",
        "_http_1_0",
        "_left",
        "_loop",
        "_on_gone",
        "_on_pause",
        "_on_resume",
        "_pending_head",
        "_transport",
        "ended",
        "gone",
        "keep_alive",
        "started",
    )

    def __init__(
        self,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        date_line: DateLine,
        *,
        method: str,
        http_1_0: bool,
        keep_alive: bool,
        body_read: Callable[[], bool],
    ) -> None:
        """keep_alive: what the client asked for."""
        self._connection = connection
        self._transport = connection.transport
        self._loop = loop
        self._date_line = date_line
        self._head_only = method == "HEAD"
        self._http_1_0 = http_1_0
        self._body_read = body_read
        self._framing = _Framing.NONE
        self._left = 0
        self.ended = False
        self._pending_head = b""
        self._flush: asyncio.Handle | None = None
        self._on_pause = self._on_resume = self._on_gone = _nothing
        self.keep_alive = keep_alive
        self.started = False
        self.gone = self._transport is None or self._transport.is_closing()

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.gone or self._transport is None else unsent_bytes(self._transport)

    def start(self, status: int, headers: Sequence[tuple[str, str]], *, content_length: int | None = None) -> None:
        if self.started:
            return
        self.started = True
        self.keep_alive = self.keep_alive and self._body_read() and not self._connection.draining
        own = self._date_line() + self._frame(status, content_length)
        if not self.keep_alive:
            own += "connection: close\r\n"
        elif self._http_1_0:
            own += "connection: keep-alive\r\n"
        self._pending_head = head(status, own, headers)
        self._flush = self._loop.call_soon(self._flush_head)

    def write(self, data: bytes) -> None:
        framing = self._framing
        if framing is _CHUNKED:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif framing is _Framing.LENGTH:
            if len(data) > self._left:
                data = data[: self._left]
            self._left -= len(data)
        elif framing is _Framing.NONE:
            return
        self._send(data)

    def finish(self) -> None:
        if self.ended:
            return
        if self._framing is _Framing.LENGTH and self._left:
            self.abort()
            return
        if self._framing is _Framing.CHUNKED:
            self._send(_LAST_CHUNK)
        else:
            self._flush_head()
        self.ended = True

    def abort(self) -> None:
        """Close what was written without its end; reset where only the close itself would mark the end.

        A client whose buffer is full does not get the rest: it is cut at once.
        """
        if self.ended:
            return
        self.ended = True
        self.keep_alive = False
        transport = self._transport
        if transport is None or self.gone:
            return
        self._flush_head()
        if self._framing is _Framing.UNTIL_CLOSE:
            _reset_on_close(transport)
        if self._connection.writing_paused or self._framing is _Framing.UNTIL_CLOSE:
            transport.abort()
        else:
            self._connection.close_soon(transport)

    def watch(
        self, *, on_pause: Callable[[], None], on_resume: Callable[[], None], on_gone: Callable[[], None]
    ) -> None:
        self._on_pause, self._on_resume, self._on_gone = on_pause, on_resume, on_gone
        if self.gone:
            on_gone()
        elif self._connection.writing_paused:
            on_pause()

    # -- TransportWatcher ----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._on_pause()

    def resume_writing(self) -> None:
        self._on_resume()

    def connection_lost(self) -> None:
        self.gone = True
        self.keep_alive = False
        self._drop_head()
        self._on_gone()

    # -- helpers -------------------------------------------------------------------------------------------------

    def _frame(self, status: int, content_length: int | None) -> str:
        """Choose the framing and return its header line."""
        if status in _NO_BODY:
            return ""
        if content_length is not None:
            if not self._head_only:
                self._framing = _Framing.LENGTH
                self._left = content_length
            return f"content-length: {content_length}\r\n"
        if self._head_only:
            return ""
        if self._http_1_0:
            self._framing = _Framing.UNTIL_CLOSE
            self.keep_alive = False
            return ""
        self._framing = _Framing.CHUNKED
        return "transfer-encoding: chunked\r\n"

    def _send(self, data: bytes) -> None:
        if self.gone or self.ended:
            return
        if self._pending_head:
            data = self._pending_head + data
            self._drop_head()
        if data and self._transport is not None:
            self._transport.write(data)

    def _flush_head(self) -> None:
        if self._pending_head and self._transport is not None and not self.gone:
            self._transport.write(self._pending_head)
        self._drop_head()

    def _drop_head(self) -> None:
        self._pending_head = b""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None


def _reset_on_close(transport: asyncio.Transport) -> None:
    """Make the close a reset: on HTTP/1.0 a plain close would say that the body was whole."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _nothing() -> None:
    """Stands until `watch` was called."""
