"""From the bytes of one HTTP/1.1 reply to a `Receiver`'s callbacks, with no I/O at all.

httptools (llhttp) does the parsing; this file adds what llhttp leaves open: interim replies are skipped, hop-by-hop
fields are dropped, framing is judged, content coding is undone, heads are bounded, and what follows the end of the
message is noticed. llhttp's strict mode is kept: a head with both Content-Length and Transfer-Encoding, two lengths,
bare LF or folded lines is an error, not a guess.

Invariants
- Nothing is called on the receiver after `detach()`, nor after the message's end.
- Body bytes go from llhttp's callback to the receiver without a copy or an object of ours in between.
- At most 2 x HEAD_MAX_BYTES that are not body are taken in a row, so that an endless head, trailer or chunk
  extension cannot grow memory.
- `reusable` is True only if the peer allows it and nothing came after the message's end.

What the receiver sees of `content-length`: it is kept only where it is exact, that is, where the body is not decoded
here and has a body to describe (for HEAD and 304 it tells what a GET would bring), without leading zeros. Trailers are
dropped.

While `paused`, a plain body still delivers what was read already (one read of the transport); a coded body stops at
the next piece and keeps the rest compressed.
"""

from __future__ import annotations

from typing import Final

import httptools

from backends.base import FailureKind, Headers, Receiver
from backends.coding import CodingError, Decoder, decoder_for

HEAD_MAX_BYTES: Final = 64 * 1024
"""Bound on all header fields of a reply together, interim replies and trailers included."""

PIECES_A_TURN: Final = 16
"""Decoded pieces handed out before the loop gets its turn again (1 MiB)."""

_HOP_BY_HOP: Final = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
)


class ReplyError(Exception):
    """The reply is broken: how, and a sentence for people that quotes nothing of it."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class _MessageEndError(Exception):
    """Stops llhttp: what follows does not belong to this reply."""


class ReplyReader:
    """Reads one reply. See the module header.

    paused     the receiver wants no more for now; set by the owner
    started    at least one byte arrived
    complete   the framing's end was seen (decoded bytes may still wait, see `backlog`)
    reusable   the connection may carry another request; meaningful once complete

    `feed`, `pump` and `eof` raise ReplyError, and whatever the receiver raised.
    """

    __slots__ = (
        "_bodiless",
        "_decoder",
        "_fields",
        "_framing_bytes",
        "_head_bytes",
        "_head_done",
        "_parser",
        "_receiver",
        "_until_close",
        "complete",
        "paused",
        "reusable",
        "started",
    )

    def __init__(self, receiver: Receiver, *, bodiless: bool = False) -> None:
        """bodiless: the request was HEAD, so that the reply ends at its head whatever its fields say."""
        self._receiver: Receiver | None = receiver
        self._bodiless = bodiless
        self._decoder: Decoder | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._head_done = False
        self._framing_bytes = 0
        self._until_close = False
        self.paused = False
        self.started = False
        self.complete = False
        self.reusable = False
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    @property
    def backlog(self) -> bool:
        """True while decoded bytes can be had without reading on: read no more, call `pump` instead."""
        return self._decoder is not None and self._decoder.more

    @property
    def ended(self) -> bool:
        """True when everything was handed out and on_end is due."""
        return self.complete and not self.backlog

    def detach(self) -> None:
        """Call nothing on the receiver any more."""
        self._receiver = None
        self._parser = None  # it holds our bound methods: a cycle per call otherwise

    def feed(self, data: bytes) -> bool:
        """Take bytes off the wire. True when the owner has to look: the reply is complete, or is a coded one."""
        parser = self._parser
        if parser is None:
            return False
        self.started = True
        self._framing_bytes += len(data)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise ReplyError(FailureKind.BAD_RESPONSE, "protocol switched without being asked") from None
        except httptools.HttpParserError as error:
            self._stopped(error)
        if self._framing_bytes > 2 * HEAD_MAX_BYTES and not self.complete:
            raise _head_too_large()
        if self._decoder is not None:
            self.pump()
            return True
        return self.complete

    def eof(self) -> bool:
        """The peer will send no more; True as for `feed`."""
        if self.complete:
            return True
        if not self.started:
            raise ReplyError(FailureKind.CLOSED, "closed before any byte of a reply")
        if not self._until_close:
            raise ReplyError(FailureKind.TRUNCATED, "closed in the middle of a reply")
        self.complete = True
        self._check_decoded()
        return True

    def pump(self) -> None:
        """Hand out decoded pieces until there are none, the receiver pauses, or the loop should have its turn."""
        decoder = self._decoder
        if decoder is None:
            return
        try:
            for _ in range(PIECES_A_TURN):
                receiver = self._receiver
                if receiver is None or self.paused:
                    return
                piece = decoder.piece()
                if not piece:
                    break
                receiver.on_body(piece)
        except CodingError as error:
            raise ReplyError(FailureKind.BAD_RESPONSE, f"body does not match its content-encoding: {error}") from None
        self._check_decoded()

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        if self.complete:
            raise _MessageEndError

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEAD_MAX_BYTES:
            raise _head_too_large()
        if not self._head_done:  # else a trailer, which has no place behind the seam
            self._fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        parser, receiver = self._parser, self._receiver
        if parser is None or receiver is None:
            raise _MessageEndError
        status = parser.get_status_code()
        version = parser.get_http_version()
        if not 100 <= status <= 599 or status == 101 or version not in ("1.1", "1.0"):
            raise ReplyError(FailureKind.BAD_RESPONSE, f"status {status} of HTTP/{version}: expected 200 to 599 of 1.x")
        if status < 200:
            self._fields.clear()
            return
        self._framing_bytes = 0
        self._head_done = True
        fields = self._judge(status)
        receiver.on_head(status, fields)
        if self._bodiless:
            # llhttp cannot be told that no body follows, so that it cannot see what does: never reused.
            self.complete = True
            raise _MessageEndError

    def on_body(self, data: bytes) -> None:
        self._framing_bytes = 0
        receiver = self._receiver
        if receiver is None:
            return
        if self._decoder is None:
            receiver.on_body(data)
        else:
            self._decoder.feed(data)

    def on_message_complete(self) -> None:
        parser = self._parser
        if parser is not None and self._head_done:
            self.complete = True
            self.reusable = parser.should_keep_alive()

    # helpers

    def _judge(self, status: int) -> Headers:
        """Read framing and coding off the head; return the fields that go on."""
        named: set[bytes] = set()
        transfer: list[bytes] = []
        codings: list[bytes] = []
        measured = False
        kept: list[tuple[bytes, bytes]] = []
        for field in self._fields:
            name, value = field
            if name in _HOP_BY_HOP or name.startswith(b"proxy-"):
                if name == b"connection":
                    named.update(token.strip() for token in value.lower().split(b","))
                elif name == b"transfer-encoding":
                    transfer.append(value.lower())
                continue
            if name == b"content-length":
                measured = True
                kept.append((name, value.lstrip(b"0") or b"0"))  # thousands of zeros are no number to int()
                continue
            if name == b"content-encoding":
                codings.append(value.lower())
            kept.append(field)
        self._fields.clear()
        if transfer not in ([], [b"chunked"], [b"identity"]):
            raise ReplyError(FailureKind.BAD_RESPONSE, "transfer-encoding other than chunked, which was not asked for")
        self._until_close = not measured and transfer != [b"chunked"]

        dropped = {name for name in named if not name.startswith(b"content-")}
        if status == 204:
            dropped.add(b"content-length")
        if codings == [b"identity"]:
            dropped.add(b"content-encoding")
        elif len(codings) == 1 and status != 206:  # a range of compressed bytes cannot be undone
            self._decoder = decoder_for(codings[0])
            if self._decoder is not None:
                dropped |= {b"content-encoding", b"content-length"}
        return [field for field in kept if field[0] not in dropped]

    def _stopped(self, error: httptools.HttpParserError) -> None:
        """The parser stopped: the message is over (fine), a callback raised, or this is not HTTP."""
        cause = error.__context__
        if self.complete:
            self.reusable = False
            return
        if self._receiver is None:
            return
        if isinstance(error, httptools.HttpParserCallbackError) and cause is not None:
            raise cause
        raise ReplyError(FailureKind.BAD_RESPONSE, f"not HTTP/1.1: {error}") from None

    def _check_decoded(self) -> None:
        decoder = self._decoder
        if self.complete and decoder is not None and not decoder.more and not decoder.whole:
            raise ReplyError(FailureKind.TRUNCATED, "compressed body ends in the middle")


def _head_too_large() -> ReplyError:
    return ReplyError(FailureKind.BAD_RESPONSE, f"head over {HEAD_MAX_BYTES} bytes: engines must stay below")
