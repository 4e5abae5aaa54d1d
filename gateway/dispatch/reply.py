"""The answer to one client: opened once, ended once, in the client's dialect, whatever happens on the way.

Everything that reaches the client goes through here, so this is where these promises are kept:

* Nothing is committed before it must be: a refusal is an HTTP status while no byte was sent, else an error event.
* A stream that waits is kept alive: `queue_headers_after_s` after acceptance a 200 with a comment goes out, then a
  comment every `keepalive_comment_s` until the first content. Non-stream requests get nothing before their answer.
* A broken answer never looks finished: after content was sent, an error event is followed by an aborted transfer.
* A client that takes no byte for `stalled_client_s` is cut, and what it held is freed. One that reads slowly is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.clock import Clock
from gateway.errors import Refusal, render_body, render_event
from gateway.exchange import Exchange
from gateway.ingress.wire import refusal_headers
from gateway.settings import Timeouts

STREAM_HEADERS = (("cache-control", "no-cache"), ("x-accel-buffering", "no"))
_EARLY_STREAM_HEADERS = (("content-type", "text/event-stream; charset=utf-8"), *STREAM_HEADERS)
_COMMENT = b": waiting for an engine\n\n"


class Outlet(Protocol):
    """Where the answer to one work goes: a client's `Reply`, or its part of one (`gateway.dispatch.assembly`)."""

    status: int
    first_content_s: float | None
    cut_reason: str

    @property
    def opened(self) -> bool: ...
    @property
    def paused(self) -> bool: ...
    def follow(self, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> None: ...
    def unfollow(self) -> None: ...
    def open(self, status: int, headers: Sequence[tuple[str, str]], content_length: int | None = None) -> None: ...
    def write(self, data: bytes) -> None: ...
    def finish(self) -> None: ...
    def fail(self, refusal: Refusal, *, sequence_number: int = 0, mid_event: bool = False) -> None: ...
    def relay_error(self, refusal: Refusal, body: bytes | None, content_type: str) -> None: ...


class Reply:
    """See the module header. Owned by the exchange's handler; `check` is called by the watchdog.

    status           what the client saw: the status line's, or 499 when it left before any
    first_content_s  monotonic time of the first content byte; None before
    ended            True once finished, failed or aborted
    """

    __slots__ = (
        "_clock",
        "_comment_due_s",
        "_exchange",
        "_on_pause",
        "_on_resume",
        "_paused",
        "_taking_until_s",
        "_timeouts",
        "_unsent_bytes",
        "cut_reason",
        "ended",
        "first_content_s",
        "status",
    )

    def __init__(self, exchange: Exchange, clock: Clock, timeouts: Timeouts) -> None:
        self._exchange = exchange
        self._clock = clock
        self._timeouts = timeouts
        self._paused = False
        self._taking_until_s = 0.0
        self._unsent_bytes = 0
        self._comment_due_s = exchange.accepted_s + timeouts.queue_headers_after_s
        self._on_pause: Callable[[], None] | None = None
        self._on_resume: Callable[[], None] | None = None
        self.status = 499
        self.first_content_s: float | None = None
        self.ended = False
        self.cut_reason = ""
        exchange.downstream.watch(on_pause=self._pause, on_resume=self._resume, on_gone=_ignore)

    @property
    def opened(self) -> bool:
        """True once the status line is on its way."""
        return self._exchange.downstream.started

    @property
    def paused(self) -> bool:
        """True while the client's buffer is full."""
        return self._paused

    def follow(self, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> None:
        """Whom to slow down while the client's buffer is full; told at once when it is full already."""
        self._on_pause, self._on_resume = on_pause, on_resume
        if self.paused:
            on_pause()

    def unfollow(self) -> None:
        self._on_pause = self._on_resume = None

    def open(self, status: int, headers: Sequence[tuple[str, str]], content_length: int | None = None) -> None:
        """Send the head of an engine's answer; a no-op when a waiting stream was opened before."""
        if not self.opened and not self.ended:
            self.status = status
            self._exchange.downstream.start(
                status, [*headers, *self._exchange.response_headers], content_length=content_length
            )

    def write(self, data: bytes) -> None:
        """Send content bytes."""
        if self.first_content_s is None:
            self.first_content_s = self._clock.now_s()
        self._exchange.downstream.write(data)

    def finish(self) -> None:
        """End properly."""
        if not self.ended:
            self.ended = True
            self._exchange.downstream.finish()

    def fail(self, refusal: Refusal, *, sequence_number: int = 0, mid_event: bool = False) -> None:
        """End with an error, in the way that is still open.

        mid_event   part of an event was sent, or of an answer that is no stream: an error event would be read as the rest of it
        """
        if self.ended:
            return
        self.ended = True
        self._exchange.failed = True
        exchange, downstream = self._exchange, self._exchange.downstream
        if not self.opened:
            self._answer(refusal.status, render_body(refusal, exchange.dialect), refusal, "application/json")
        elif mid_event or not exchange.facts.stream:
            downstream.abort()
        else:
            downstream.write(render_event(refusal, exchange.dialect, sequence_number=sequence_number))
            if self.first_content_s is None:
                downstream.finish()
            else:
                downstream.abort()

    def relay_error(self, refusal: Refusal, body: bytes | None, content_type: str) -> None:
        """End with the engine's own error body where there is one and a status can still be sent, else as `fail`."""
        if body is None or self.ended or self.opened:
            self.fail(refusal)
            return
        self.ended = self._exchange.failed = True
        self._answer(refusal.status, body, refusal, content_type)

    def check(self, now_s: float) -> None:
        """Keep a waiting stream alive; cut a stalled client."""
        if self.ended:
            return
        if self._paused:
            unsent_bytes = self._exchange.downstream.unsent_bytes
            if unsent_bytes != self._unsent_bytes:
                self._unsent_bytes, self._taking_until_s = unsent_bytes, now_s
            elif now_s - self._taking_until_s > self._timeouts.stalled_client_s:
                self.cut("stalled_client")
            return
        if self.first_content_s is None and self._exchange.facts.stream and now_s >= self._comment_due_s:
            self.open(200, _EARLY_STREAM_HEADERS)
            self._exchange.downstream.write(_COMMENT)
            self._comment_due_s = now_s + self._timeouts.keepalive_comment_s

    def cut(self, reason: str) -> None:
        """Drop the client's connection; the handler sees the client gone."""
        self.ended = True
        self.cut_reason = reason
        self._exchange.downstream.abort()

    def _answer(self, status: int, body: bytes, refusal: Refusal, content_type: str) -> None:
        self.status = status
        headers = [*refusal_headers(refusal, content_type), *self._exchange.response_headers]
        downstream = self._exchange.downstream
        downstream.start(status, headers, content_length=len(body))
        if body:
            downstream.write(body)
        downstream.finish()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._taking_until_s = self._clock.now_s()
            self._unsent_bytes = self._exchange.downstream.unsent_bytes
        if self._on_pause is not None:
            self._on_pause()

    def _resume(self) -> None:
        self._paused = False
        if self._on_resume is not None:
            self._on_resume()


def _ignore() -> None:
    """A client that is gone cancels the handler; nothing to do here."""
