"""One attempt's reply on its way from an engine to a client: looked at just enough, changed as little as possible.

An engine's bytes arrive in callbacks (`backends.base.Receiver`) and leave through a `Reply`, in the same callback.
Four modes, chosen by the head:

    STREAM  server-sent events: relayed by whole events; held back until the first token-bearing event, so that an
            error inside a 200, an aborted finish or an empty stream can still become a status or move elsewhere
    HOLD    a JSON answer: held up to HELD_REPLY_BYTES so that an aborted or failed one is seen before it is sent
    PASS    anything else (audio, a JSON answer past the bound): bytes go through as they come
    ERROR   a status of 300 and more: collected (bounded), understood, and told in the client's dialect

The relay decides nothing about other engines: it ends with one `AttemptEnd`, whose `Fault` says what may follow.
Backpressure: while the client's buffer is full the engine's socket is not read, and the inter-token bound is at rest.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum, auto

from backends.base import Call, CallFailure, FailureKind, Headers
from backends.dialects import Remark, StreamReader, open_reader, read_error, read_reply
from backends.sse import EventSplitter, is_idle
from gateway.clock import Clock
from gateway.dispatch.faults import (
    Fault,
    call_failed,
    engine_answered,
    engine_said,
    no_json,
    no_stream,
    preempted,
    timed_out,
    truncated,
    unasked_coding,
)
from gateway.dispatch.reply import STREAM_HEADERS, Outlet
from gateway.exchange import Exchange
from gateway.ingress.headers import accepts_coding
from gateway.settings import Timeouts

HELD_STREAM_BYTES = 64 * 1024
HELD_REPLY_BYTES = 1024 * 1024
HELD_ERROR_BYTES = 256 * 1024
RETRY_AFTER_MAX_S = 86_400.0
GONE_S = 3.0
"""How long an attempt is still waited for when nothing listens at its engine any more. vLLM that is told to stop may leave
its streams open and say nothing for as long as anybody waits; an engine that drains goes on sending."""
FRAMING_END_S = 2.0
"""How long a stream that is complete waits for its framing to end, so that the engine's connection can be kept."""
SEAM_BYTES = 256
"""Of an answer that is passed on as it comes so much is kept of what went before: more than an id and its key take, so that
one is found which two reads share."""

_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"\\]{1,200})"')


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How one attempt ended. fault None: the client has a complete answer.

    output_tokens, prompt_tokens   from usage where the engine sent it; prompt_tokens None when it did not
    engine_ttft_s                  call to first token-bearing byte; None when there was none
    committed                      bytes of this attempt have reached the client: nobody else may try
    response_id                    id of a stored response (/v1/responses), "" otherwise
    cached_tokens                  of the prompt, found in the engine's prefix cache, from usage; None when it does not say
    """

    fault: Fault | None
    output_tokens: int
    prompt_tokens: int | None
    engine_ttft_s: float | None
    committed: bool
    response_id: str = ""
    cached_tokens: int | None = None


class _Mode(Enum):
    HEAD = auto()
    STREAM = auto()
    HOLD = auto()
    PASS = auto()
    ERROR = auto()


_STREAM = _Mode.STREAM
"""At hand, since it is asked for with every chunk."""


def _here() -> bool:
    return False


def _never() -> float:
    return -math.inf


class Relay:
    """See the module header. `done` resolves once; after that no callback has an effect."""

    __slots__ = (
        "_call",
        "_clock",
        "_committed",
        "_counted_s",
        "_engine",
        "_engine_ttft_s",
        "_exchange",
        "_gone",
        "_headers",
        "_heard",
        "_held",
        "_held_bytes",
        "_last_byte_s",
        "_long_json",
        "_mode",
        "_on_first_token",
        "_on_gap",
        "_reader",
        "_reply",
        "_response_id",
        "_seam",
        "_splitter",
        "_status",
        "_strip_usage",
        "_timeouts",
        "done",
        "output_tokens",
        "sent_s",
        "streams",
    )

    def __init__(
        self,
        exchange: Exchange,
        reply: Outlet,
        *,
        engine: str,
        clock: Clock,
        timeouts: Timeouts,
        strip_usage: bool,
        on_first_token: Callable[[float], None],
        on_gap: Callable[[float], None] | None = None,
        gone: Callable[[], bool] = _here,
        counted_s: Callable[[], float] = _never,
    ) -> None:
        """strip_usage: we asked for the usage event, the client did not. on_first_token takes engine_ttft_s.

        on_gap: told each time in seconds between two reads that brought tokens.
        gone: whether nothing listens at the engine's address any more.
        counted_s: when the engine was last seen to have made tokens, for whomever.
        """
        self._exchange = exchange
        self._reply = reply
        self._engine = engine
        self._clock = clock
        self._timeouts = timeouts
        self._strip_usage = strip_usage
        self._on_first_token = on_first_token
        self._on_gap = on_gap or _unheard
        self._gone = gone
        self._counted_s = counted_s
        self.streams = exchange.facts.stream
        self._call: Call | None = None
        self._mode = _Mode.HEAD
        self._status = 0
        self._headers: Headers = ()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._committed = False
        self._heard = False
        self._engine_ttft_s: float | None = None
        self._response_id = ""
        self._seam = b""
        self._long_json = False
        self._splitter = EventSplitter()
        self._reader: StreamReader | None = None
        self.sent_s = self._last_byte_s = clock.now_s()
        self.output_tokens = 0
        self.done: asyncio.Future[AttemptEnd] = asyncio.get_running_loop().create_future()

    @property
    def answered(self) -> bool:
        """True once a stream said all that its dialect has to say: what its framing, or its client, does then costs
        nobody anything."""
        reader = self._reader
        return reader is not None and reader.terminated and reader.finished

    @property
    def recallable(self) -> bool:
        """Nothing of the attempt has reached the client yet: it may be given up and begun anew."""
        return not self._committed and not self.done.done()

    def recall(self) -> None:
        """Give the attempt up for somebody who is in a greater hurry."""
        if self.recallable:
            self._end(preempted(self._engine))

    @property
    def moved_s(self) -> float | None:
        """See `gateway.control.pulse.Heard`."""
        return self._last_byte_s if self._heard else None

    def attach(self, call: Call) -> None:
        """The call under way, to be paused with the client and aborted with the attempt."""
        self._call = call
        self._reply.follow(call.pause, self._resume)

    def close(self) -> None:
        """Let go: abort the call unless it ended by itself."""
        self._reply.unfollow()
        if self._call is not None:
            self._call.abort()
        if not self.done.done():
            self.done.cancel()

    # -- Receiver ------------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers
        content_type = self._header(b"content-type").lower()
        coding = self._header(b"content-encoding").decode("latin-1")
        if status >= 300:
            self._mode = _Mode.ERROR
        elif coding:
            if not accepts_coding(self._exchange.rule_headers.get("accept-encoding", ""), coding):
                self._end(unasked_coding(coding, self._engine))
                return
            self._mode = _Mode.PASS
        elif content_type.startswith(b"text/event-stream"):
            self._mode = _Mode.STREAM
            self._reader = open_reader(
                self._exchange.dialect.value,
                self._exchange.path,
                sequences=self._exchange.facts.sequences,
                strip_usage=self._strip_usage,
            )
        elif content_type.startswith(b"application/json"):
            self._mode = _Mode.HOLD
        else:
            self._mode = _Mode.PASS

    def on_body(self, data: bytes) -> None:
        if self._mode is _STREAM:
            self._stream(data)
            return
        self._heard = True
        self._last_byte_s = self._clock.now_s()
        if self._mode is _Mode.PASS:
            if not self._response_id and self._exchange.path == "/v1/responses":
                self._find_response_id(self._seam + data)
            self._seam = (data if len(data) >= SEAM_BYTES else self._seam + data)[-SEAM_BYTES:]
            if self._commit():
                self._reply.write(data)
        else:
            self._hold(data)

    def on_end(self) -> None:
        if self.done.done():
            return
        if self._mode is _Mode.STREAM:
            self._end_stream()
        elif self._mode is _Mode.ERROR:
            self._end_error()
        else:
            self._end_whole()

    def on_failure(self, failure: CallFailure) -> None:
        if self.done.done():
            return
        if self.answered:
            self._end_stream()
        else:
            self._end(call_failed(failure, self._engine))

    # -- Watched -------------------------------------------------------------------------------------------------

    def check(self, now_s: float) -> None:
        """Fire a bound that has passed. While the client takes nothing, only the total counts."""
        timeouts = self._timeouts
        if now_s - self._exchange.accepted_s > timeouts.total_s:
            self._end(timed_out("total_s", timeouts.total_s, self._engine))
        elif self._reply.paused:
            self._last_byte_s = now_s
        elif now_s - self._last_byte_s > GONE_S and self._gone() and not self.answered:
            detail = "nothing listens at its address any more, and its answer stands still"
            self._end(call_failed(CallFailure(FailureKind.CLOSED, detail, True, self._heard), self._engine))
        elif not self._heard:
            if now_s - self.sent_s > timeouts.first_byte_s and self._engine_still(now_s):
                self._end(timed_out("first_byte_s", timeouts.first_byte_s, self._engine))
        elif self.answered:
            if now_s - self._last_byte_s > FRAMING_END_S:
                self._end_stream()
        elif now_s - self._last_byte_s > timeouts.inter_token_s:
            self._end(timed_out("inter_token_s", timeouts.inter_token_s, self._engine))

    def _engine_still(self, now_s: float) -> bool:
        """Whether the bound on the first byte holds. That of a whole answer comes with its end, however long it is: it has as
        long again from each moment at which its engine made tokens."""
        return self.streams or now_s - self._counted_s() > self._timeouts.first_byte_s

    # -- streams -------------------------------------------------------------------------------------------------

    def _stream(self, data: bytes) -> None:
        """Inspect the events that are whole by now, and pass on what may go."""
        ready = self._splitter.feed(data)
        if not ready:
            return
        gap_s = 0.0
        if not is_idle(ready):  # comments, by themselves, are no sign of progress
            self._heard = True
            now_s = self._clock.now_s()
            gap_s = now_s - self._last_byte_s
            self._last_byte_s = now_s
        reader, shown = self._reader, self.output_tokens
        assert reader is not None
        if not self._committed and not self._response_id and self._exchange.path == "/v1/responses":
            self._find_response_id(ready)
        remark = reader.inspect(ready)
        tokens = self.output_tokens = reader.tokens
        if remark is not None:
            if remark.error is not None:
                self._stream_error(remark)
                return
            ready = remark.forward
        if self._committed:
            if ready:
                self._reply.write(ready)
            if tokens > shown > 0:
                self._on_gap(gap_s)
            return
        if ready:
            self._held.append(ready)
            self._held_bytes += len(ready)
        if reader.started:
            self._first_token()
            self._commit_stream()
        elif reader.finished or self._held_bytes > HELD_STREAM_BYTES:
            self._commit_stream()

    def _stream_error(self, remark: Remark) -> None:
        assert remark.error is not None
        if remark.forward and (self._committed or (self._reader is not None and self._reader.started)):
            if not self._committed:
                self._first_token()
                self._commit_stream()
            self._reply.write(remark.forward)
        self._end(engine_said(remark.error, self._engine))

    def _end_stream(self) -> None:
        reader = self._reader
        assert reader is not None
        rest = self._splitter.take_rest()
        if rest:
            remark = reader.inspect(rest + b"\n\n")
            if remark is not None and remark.error is not None:
                self._stream_error(remark)
                return
            if reader.terminated or reader.finished:
                self._held.append(rest)
        if not (reader.finished or (reader.terminated and (reader.started or self._committed))):
            self._end(truncated(self._engine))
            return
        self._commit_stream()
        self._end(None)

    def _first_token(self) -> None:
        if self._engine_ttft_s is None:
            self._engine_ttft_s = self._clock.now_s() - self.sent_s
            self._on_first_token(self._engine_ttft_s)

    def _commit_stream(self) -> None:
        self._commit(STREAM_HEADERS)
        for held in self._held:
            self._reply.write(held)
        self._held.clear()

    # -- whole answers -------------------------------------------------------------------------------------------

    def _hold(self, data: bytes) -> None:
        self._held_bytes += len(data)
        if self._mode is _Mode.ERROR and self._held_bytes > HELD_ERROR_BYTES:
            # No error is so long: its status is all that will be told of it, so the rest need not be waited for.
            self._held.clear()
            self._end_error()
            return
        self._held.append(data)
        if self._mode is _Mode.HOLD and self._held_bytes > HELD_REPLY_BYTES:
            self._mode = _Mode.PASS
            self._long_json = True
            if self._exchange.path == "/v1/responses":
                self._find_response_id(b"".join(self._held))
            self._seam = data[-SEAM_BYTES:]
            self._first_token()
            self._flush_whole()

    def _end_error(self) -> None:
        # Still coded here is what we could not undo: no words for anybody.
        body = b"" if self._header(b"content-encoding") else b"".join(self._held)
        self._end(
            engine_answered(
                read_error(body, self._status),
                self._engine,
                status=self._status,
                body=body,
                content_type=self._header(b"content-type").decode("latin-1"),
                retry_after_s=self._retry_after_s(),
                headers=self._kept_headers(_ERROR_OWN),
                dialect=self._exchange.dialect,
                path=self._exchange.path,
            )
        )

    def _end_whole(self) -> None:
        if self._mode is _Mode.HOLD:
            body = b"".join(self._held)
            facts = read_reply(body, self._exchange.path)
            self.output_tokens = facts.output_tokens or 0
            if facts.error is not None or (facts.broken and self._status != _NO_CONTENT):
                self._end(engine_said(facts.error, self._engine) if facts.error else no_json(self._engine))
                return
            if self._exchange.path == "/v1/responses":
                self._find_response_id(body)
            # The whole answer is no first token: who decides must not take the time of all tokens for that of one.
            self._engine_ttft_s = self._clock.now_s() - self.sent_s
            self._flush_whole()
            self._end(None, prompt_tokens=facts.prompt_tokens, cached_tokens=facts.cached_tokens)
        elif self._long_json and self._seam.rstrip()[-1:] not in _JSON_ENDS:
            self._end(truncated(self._engine))
        else:
            self._commit()
            self._end(None)

    def _flush_whole(self) -> None:
        if self._commit():
            for held in self._held:
                self._reply.write(held)
        self._held.clear()

    # -- common --------------------------------------------------------------------------------------------------

    def _commit(self, more: tuple[tuple[str, str], ...] = ()) -> bool:
        """Send the head, once; from here on nobody else may try. False when there is no way left to send this answer:
        the client has been promised events (`Reply.check`), and it is none."""
        if self._committed:
            return True
        if self._mode is not _STREAM and self._reply.opened:
            self._end(no_stream(self._header(b"content-type").decode("latin-1"), self._engine))
            return False
        self._committed = True
        length = self._header(b"content-length")
        kept = self._kept_headers(_STREAM_OWN if more else frozenset())
        whole = self._mode is not _Mode.STREAM and length.isdigit()
        self._reply.open(self._status, [*kept, *more], int(length) if whole else None)
        return True

    def _end(self, fault: Fault | None, *, prompt_tokens: int | None = None, cached_tokens: int | None = None) -> None:
        if self.done.done():
            return
        reader = self._reader
        if reader is not None:
            prompt_tokens, cached_tokens = reader.prompt_tokens, reader.cached_tokens
            if reader.output_tokens is not None:
                self.output_tokens = reader.output_tokens
        if fault is not None and self._call is not None:
            self._call.abort()
        # First the end, then the client: an abort loses the connection, and that cancels a handler which has no end yet.
        self.done.set_result(
            AttemptEnd(
                fault,
                self.output_tokens,
                prompt_tokens,
                self._engine_ttft_s,
                self._committed,
                self._response_id,
                cached_tokens,
            )
        )
        if fault is None:
            self._reply.finish()
        elif self._committed:
            next_number = 0 if reader is None else reader.next_sequence_number
            mid_event = reader is None or self._splitter.oversize
            self._reply.fail(fault.refusal, sequence_number=next_number, mid_event=mid_event)

    def _resume(self) -> None:
        self._last_byte_s = self._clock.now_s()
        if self._call is not None:
            self._call.resume()

    def _header(self, name: bytes) -> bytes:
        for key, value in self._headers:
            if key == name:
                return value
        return b""

    def _kept_headers(self, ours: frozenset[bytes]) -> list[tuple[str, str]]:
        """The engine's fields that go on to the client: all but those that we answer for ourselves."""
        own = {name.encode() for name, _ in self._exchange.response_headers}
        return [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in self._headers
            if not (name in _OWN_HEADERS or name in ours or name in own or name.startswith(b"access-control-"))
        ]

    def _retry_after_s(self) -> float | None:
        """The engine's hint; its date form is measured against the Date that came with it."""
        found, date = (self._header(name).decode("latin-1") for name in (b"retry-after", b"date"))
        try:
            if found[:1].isdigit():
                return min(float(found), RETRY_AFTER_MAX_S)
            return (parsedate_to_datetime(found) - parsedate_to_datetime(date)).total_seconds()
        except (ValueError, TypeError):  # none, nonsense, or a date without a zone beside one with
            return None

    def _find_response_id(self, data: bytes) -> None:
        found = _RESPONSE_ID.search(data)
        if found:
            self._response_id = found[1].decode("latin-1")


def _unheard(_gap_s: float) -> None:
    """Nobody counts the gaps."""


_NO_CONTENT = 204
_JSON_ENDS = (b"}", b"]")
_OWN_HEADERS = frozenset({b"date", b"server", b"content-length", b"x-request-id", b"via", b"alt-svc"})
_ERROR_OWN = frozenset({b"content-type", b"content-encoding", b"retry-after"})
_STREAM_OWN = frozenset({b"cache-control", b"x-accel-buffering"})
