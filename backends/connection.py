"""The HTTP/1.1 client for one engine: pooled connections, calls in callbacks, small fetches to await.

Our own, since the relay needs bytes as they come, with backpressure and no task per call; a general client costs
several times as much and hides what failed. How it divides: `request_head` writes, `dialing` connects, `call` carries
one exchange, `reply` reads, `coding` decompresses, and here is what they share: which connections are idle, which
calls are under way, and who ends them.

Invariants
- Idle connections are taken newest first and dropped after `idle_s`, by one timer for the whole pool; one that the
  engine closes, or says anything on, leaves at once.
- There is no cap on connections: the gateway's windows bound the calls, and a hidden cap of 100 would only queue
  what was already granted. Only the idle ones are bounded (`max_idle`).
- Every connecting task belongs to a call and is cancelled with it; `close()` awaits them all.

Does not retry, except the one case in `call`; does not time replies (the gateway's watchdog does); does not follow
redirects, keep cookies or read proxy variables.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from contextlib import suppress
from typing import Final, NamedTuple

from backends.base import (
    BackendError,
    Call,
    CallFailure,
    EngineAddress,
    EngineRequest,
    FailureKind,
    Headers,
    Receiver,
    Unready,
)
from backends.call import Connection, EngineCall
from backends.dialing import dial, failure_of
from backends.request_head import RequestHeads

MAX_IDLE: Final = 512
MAX_AGE_S: Final = 30.0
FETCH_MAX_BYTES: Final = 8 * 1024 * 1024
CLOSE_S: Final = 1.0
"""Bound on waiting for the loop to report aborted connections as lost, which takes a turn or two."""


class Fetched(NamedTuple):
    """A whole small reply."""

    status: int
    headers: Headers
    body: bytes


class EnginePool:
    """Connections to one engine. See the module header.

    loop        the loop everything runs on and takes its time from; the running one if not given
    tls         context for https; by default the system's trust store
    max_idle    idle connections kept; beyond it the oldest is closed
    max_age_s   a connection made through a name is not reused once so old, so that an engine that moved is noticed
                under steady traffic too
    """

    __slots__ = (
        "_address",
        "_calls",
        "_closed",
        "_connecting",
        "_emptied",
        "_heads",
        "_idle",
        "_max_age_s",
        "_max_idle",
        "_open",
        "_sweep",
        "_tls",
        "loop",
    )

    def __init__(
        self,
        address: EngineAddress,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        tls: ssl.SSLContext | None = None,
        max_idle: int = MAX_IDLE,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        """Raises ValueError for a base_url that is not one."""
        self.loop = asyncio.get_running_loop() if loop is None else loop
        self._address = address
        self._heads = RequestHeads(address)
        self._tls = (tls or ssl.create_default_context()) if self._heads.secure else None
        self._max_idle = max_idle
        self._max_age_s = float("inf") if self._heads.literal else max_age_s
        self._idle: OrderedDict[Connection, float] = OrderedDict()  # to the loop time it expires, soonest first
        # Dicts for sets: walked in order of insertion, so that a simulated run repeats itself.
        self._open: dict[Connection, None] = {}
        self._calls: dict[EngineCall, None] = {}
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self._emptied = asyncio.Event()

    def __repr__(self) -> str:
        return (
            f"<EnginePool {self._address.name}: {len(self._calls)} calls, "
            f"{len(self._connecting)} connecting, {len(self._idle)} idle>"
        )

    def call(self, request: EngineRequest, receiver: Receiver) -> Call:
        """Start a call; see `backends.base.Backend.call`.

        Raises ValueError for a request that cannot be written (a line break in a field); nothing was sent then.
        """
        head = self._heads.render(request)
        call = EngineCall(self, receiver, head, request.body, bodiless=request.method == b"HEAD")
        self._calls[call] = None
        connection = self._take_idle()
        if self._closed:
            self.loop.call_soon(call.fail, FailureKind.CLOSED, "the gateway has closed this engine's connections")
        elif connection is not None:
            call.carry_on(connection, reused=True)
        else:
            self.dial(call)
        return call

    async def fetch(
        self,
        method: bytes,
        target: bytes,
        headers: Headers = (),
        body: bytes = b"",
        *,
        timeout_s: float | None = None,
        max_bytes: int = FETCH_MAX_BYTES,
    ) -> Fetched:
        """One whole reply, for probes and samples. Any status is an answer.

        timeout_s   for all of it; the address's sample_s by default
        max_bytes   bound on the body, decoded
        Raises BackendError when there was no whole answer.
        """
        bound_s = self._address.sample_s if timeout_s is None else timeout_s
        what = f"engine {self._address.name}: {method.decode('latin-1')} {target.split(b'?')[0].decode('latin-1')}"
        whole: asyncio.Future[Fetched] = self.loop.create_future()
        collector = _Collector(whole, max_bytes)
        call = self.call(EngineRequest(method, target, headers, body), collector)
        try:
            async with asyncio.timeout(bound_s):
                return await whole
        except TimeoutError:
            late = f"{what}: no whole answer within {bound_s:g} s; is the engine overloaded?"
            raise BackendError(late, Unready.SILENT) from None
        except _FetchError as failed:
            raise BackendError(f"{what}: {failed}", _UNREADY.get(failed.kind, Unready.SAYS_SO)) from None
        finally:
            call.abort()

    async def close(self) -> None:
        """Close every connection; calls under way fail as CLOSED. Idempotent."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        connecting = set(self._connecting)
        for call in list(self._calls):
            call.fail(FailureKind.CLOSED, "the gateway closed this engine's connections")
        if connecting:
            await asyncio.wait(connecting)
        for connection in list(self._open):
            connection.transport.abort()
        if self._open:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._emptied.wait()

    # for calls

    def dial(self, call: EngineCall) -> None:
        """Connect for this call; the task ends before the call does, or is cancelled with it."""
        task = self.loop.create_task(self._connect(call))
        call.dialling = task
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def give_back(self, connection: Connection, *, reusable: bool) -> None:
        """Take back a connection whose reply is whole: keep it if it can carry another."""
        transport = connection.transport
        if transport.is_closing():
            return
        now_s = self.loop.time()
        too_old = now_s - connection.born_s > self._max_age_s
        if not reusable or too_old or self._closed or transport.get_write_buffer_size():
            transport.abort()
            return
        transport.resume_reading()
        self._idle[connection] = now_s + self._address.idle_s
        if len(self._idle) > self._max_idle:
            oldest, _ = self._idle.popitem(last=False)
            oldest.transport.abort()
        if self._sweep is None:
            self._sweep = self.loop.call_at(now_s + self._address.idle_s, self._drop_expired)

    def call_over(self, call: EngineCall) -> None:
        self._calls.pop(call, None)

    # for connections

    def connection_taken(self, connection: Connection) -> None:
        """From here on the connection is ours to close; before, it is its dial's (uvloop tells no connection_lost for
        a dial that is cancelled)."""
        self._open[connection] = None

    def connection_ending(self, connection: Connection) -> None:
        """The engine closes it: nobody may take it any more."""
        self._idle.pop(connection, None)

    def connection_lost(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._open.pop(connection, None)
        if self._closed and not self._open:
            self._emptied.set()

    # helpers

    def _take_idle(self) -> Connection | None:
        now_s = self.loop.time()
        while self._idle:
            connection, expires_s = self._idle.popitem()
            if now_s < expires_s and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    def _drop_expired(self) -> None:
        self._sweep = None
        now_s = self.loop.time()
        while self._idle:
            connection, expires_s = next(iter(self._idle.items()))
            if now_s < expires_s:
                self._sweep = self.loop.call_at(expires_s, self._drop_expired)
                return
            del self._idle[connection]
            connection.transport.abort()

    async def _connect(self, call: EngineCall) -> None:
        heads, connect_s = self._heads, self._address.connect_s
        try:
            async with asyncio.timeout(connect_s) as bound:
                connection = await dial(
                    self.loop,
                    lambda: Connection(self),
                    heads.host,
                    heads.port,
                    literal=heads.literal,
                    tls=self._tls,
                )
        except Exception as error:
            if bound.expired():
                kind, detail = FailureKind.CONNECT_TIMEOUT, f"not connected within connect_s = {connect_s:g} s"
            else:
                kind, detail = failure_of(error, secure=heads.secure)
            call.dialling = None
            call.fail(kind, detail)
        else:
            call.dialling = None
            call.carry_on(connection, reused=False)


_UNREADY: Final = {
    FailureKind.CONNECT_REFUSED: Unready.REFUSED,
    FailureKind.NAME_UNRESOLVED: Unready.REFUSED,
    FailureKind.CONNECT_TIMEOUT: Unready.SILENT,
}


class _FetchError(Exception):
    """Why a fetch has no answer."""

    def __init__(self, message: str, kind: FailureKind = FailureKind.BAD_RESPONSE) -> None:
        super().__init__(message)
        self.kind = kind


class _Collector:
    """Gathers one bounded reply into a future."""

    __slots__ = ("_headers", "_max_bytes", "_parts", "_size", "_status", "_whole")

    def __init__(self, whole: asyncio.Future[Fetched], max_bytes: int) -> None:
        self._whole = whole
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._status = 0
        self._headers: Headers = ()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= self._max_bytes:
            self._parts.append(data)
        elif not self._whole.done():
            self._parts.clear()
            self._whole.set_exception(_FetchError(f"answer over {self._max_bytes} bytes; expected a small one"))

    def on_end(self) -> None:
        if not self._whole.done():
            self._whole.set_result(Fetched(self._status, self._headers, b"".join(self._parts)))

    def on_failure(self, failure: CallFailure) -> None:
        if not self._whole.done():
            self._whole.set_exception(_FetchError(f"{failure.kind}: {failure.detail}", failure.kind))
