"""One call to an engine, and the connection that carries it.

A `Connection` is an asyncio Protocol with at most one call on it; between calls the pool keeps it. An `EngineCall` is
what the gateway holds: it wants a connection, writes the request in one go, lets a `ReplyReader` turn bytes into
callbacks, and settles exactly once.

Invariants
- After `abort()`, or after on_end or on_failure, nothing more is called on the receiver.
- No callback runs inside `EnginePool.call`, `pause` or `resume`.
- A call whose *reused* connection dies before any byte of a reply is sent once more on a fresh one, silently (the
  engine closed an idle connection just as we wrote). Never a second time, never after an abort, never for a fresh
  connection: there the engine may have started the work.
- A connection goes back to the pool only after a whole reply with nothing unread and nothing unsent.
- An exception of a receiver costs its own call (aborted, on_failure) and is reported to the loop's exception
  handler; the pool and other calls go on.

TCP_NODELAY is not set here: both asyncio and uvloop set it on every TCP transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from backends.base import CallFailure, FailureKind, Receiver
from backends.reply import ReplyError, ReplyReader

if TYPE_CHECKING:
    from backends.connection import EnginePool

COPY_MAX_BYTES: Final = 64 * 1024
"""Bodies up to this are joined to the head and sent in one write; larger ones are not copied."""


class Connection(asyncio.Protocol):
    """One TCP or TLS connection to an engine. The pool owns it; a call borrows it.

    call      the call it carries; None while idle
    born_s    loop time at which it was made
    """

    __slots__ = ("_pool", "born_s", "call", "transport")

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.call: EngineCall | None = None
        self.born_s = 0.0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.born_s = self._pool.loop.time()

    def data_received(self, data: bytes) -> None:
        call = self.call
        if call is None:
            self.transport.abort()  # bytes that nobody asked for: whose reply would they be?
        else:
            call.received(data)

    def eof_received(self) -> None:
        """The peer closed its side. Returning None lets the transport close ours."""
        self._pool.connection_ending(self)
        if self.call is not None:
            self.call.peer_closed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.connection_lost(self)
        if self.call is not None:
            if exc is None:
                self.call.peer_closed()
            else:
                self.call.reset(exc)


class EngineCall:
    """See the module header; implements `backends.base.Call`. Made by `EnginePool.call` alone."""

    __slots__ = (
        "_body",
        "_connection",
        "_head",
        "_pool",
        "_pump_due",
        "_reader",
        "_receiver",
        "_reused",
        "_sent",
        "dialling",
    )

    def __init__(self, pool: EnginePool, receiver: Receiver, head: bytes, body: bytes, *, bodiless: bool) -> None:
        self._pool = pool
        self._receiver: Receiver | None = receiver
        self._head = head
        self._body = body
        self._reader = ReplyReader(receiver, bodiless=bodiless)
        self._connection: Connection | None = None
        self._reused = False
        self._sent = False
        self._pump_due = False
        self.dialling: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """True once it was settled or aborted."""
        return self._receiver is None

    def pause(self) -> None:
        self._reader.paused = True
        self._steer()

    def resume(self) -> None:
        self._reader.paused = False
        if self._reader.backlog:
            self._pump_soon()
        else:
            self._steer()

    def abort(self) -> None:
        if not self.over:
            self._let_go()

    # the pool's side

    def carry_on(self, connection: Connection, *, reused: bool) -> None:
        """Send the request on this connection and read the reply from it."""
        transport = connection.transport
        if transport.is_closing():
            self.fail(FailureKind.CLOSED, "closed as soon as it was connected")
            return
        connection.call = self
        self._connection = connection
        self._pool.connection_taken(connection)
        self._reused = reused
        self._sent = True
        if self._reader.paused:
            transport.pause_reading()
        if len(self._body) <= COPY_MAX_BYTES:
            transport.write(self._head + self._body)
        else:
            transport.write(self._head)
            transport.write(self._body)

    def fail(self, kind: FailureKind, detail: str) -> None:
        """Settle as broken and close the connection, if there is one."""
        receiver = self._receiver
        if receiver is not None:
            failure = CallFailure(kind, detail, sent=self._sent, response_started=self._reader.started)
            self._let_go()
            self._tell(lambda: receiver.on_failure(failure))

    # the connection's side

    def received(self, data: bytes) -> None:
        try:
            if self._reader.feed(data):
                self._look()
        except ReplyError as error:
            self.fail(error.kind, error.detail)
        except Exception as error:
            self._receiver_raised(error)

    def peer_closed(self) -> None:
        """The peer sends no more."""
        if self._dead_on_arrival():
            self._again()
        else:
            self._advance(self._reader.eof)

    def reset(self, error: Exception) -> None:
        """The connection broke."""
        if self._reader.complete:  # all of it had come; decoded pieces are still being handed out
            return
        if self._dead_on_arrival():
            self._again()
        else:
            self.fail(FailureKind.RESET, f"connection lost: {type(error).__name__}")

    # helpers

    def _dead_on_arrival(self) -> bool:
        return self._reused and not self._reader.started

    def _again(self) -> None:
        self._leave_connection()
        self._pool.dial(self)

    def _advance(self, step: Callable[[], object]) -> None:
        try:
            step()
            self._look()
        except ReplyError as error:
            self.fail(error.kind, error.detail)
        except Exception as error:
            self._receiver_raised(error)

    def _look(self) -> None:
        """After the reader moved: finish, or hold the engine back while decoded bytes wait."""
        if self.over:
            return
        if self._reader.ended:
            self._finish()
        else:
            self._steer()
            if self._reader.backlog and not self._reader.paused:
                self._pump_soon()

    def _steer(self) -> None:
        """Read from the engine exactly while there is room for what it says."""
        if self._connection is not None:
            if self._reader.paused or self._reader.backlog:
                self._connection.transport.pause_reading()
            else:
                self._connection.transport.resume_reading()

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._pool.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        if not self.over:
            self._advance(self._reader.pump)

    def _finish(self) -> None:
        receiver = self._receiver
        reusable = self._reader.reusable
        connection = self._retire()
        if connection is not None:
            self._pool.give_back(connection, reusable=reusable)
        if receiver is not None:
            self._tell(receiver.on_end)

    def _let_go(self) -> None:
        connection = self._retire()
        if connection is not None:
            connection.transport.abort()

    def _retire(self) -> Connection | None:
        """End this call's life; what was its connection is the caller's to close or keep."""
        self._receiver = None
        self._reader.detach()
        self._head = self._body = b""
        if self.dialling is not None:
            self.dialling.cancel()
        self._pool.call_over(self)
        return self._leave_connection()

    def _leave_connection(self) -> Connection | None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.call = None
        return connection

    def _receiver_raised(self, error: Exception) -> None:
        self._report(error)
        self.fail(FailureKind.BAD_RESPONSE, f"the receiver raised {type(error).__name__}: a bug of the gateway")

    def _tell(self, last_word: Callable[[], None]) -> None:
        try:
            last_word()
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        self._pool.loop.call_exception_handler(
            {"message": f"receiver of a call to {self._pool!r} raised", "exception": error}
        )
