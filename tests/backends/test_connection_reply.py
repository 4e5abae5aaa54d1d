"""Reading one reply, without sockets: every framing, every cut, and everything a peer can get wrong."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import CallFailure, FailureKind, Headers
from backends.reply import HEAD_MAX_BYTES, PIECES_A_TURN, ReplyError, ReplyReader


class Taker:
    """A receiver that writes down what it is told."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, Headers]] = []
        self.body = bytearray()
        self.during: Callable[[], None] = lambda: None

    def on_head(self, status: int, headers: Headers) -> None:
        self.heads.append((status, headers))

    def on_body(self, data: bytes) -> None:
        assert data
        self.body += data
        self.during()

    def on_end(self) -> None:
        raise AssertionError("a reader never ends a call by itself: its owner does")

    def on_failure(self, failure: CallFailure) -> None:
        raise AssertionError("a reader never fails a call by itself: its owner does")


def _read(*parts: bytes, head_only: bool = False) -> tuple[Taker, ReplyReader]:
    taker = Taker()
    reader = ReplyReader(taker, bodiless=head_only)
    for part in parts:
        reader.feed(part)
        while reader.backlog:
            reader.pump()
    return taker, reader


HELLO = b"hello, \xe4\xb8\x96\xe7\x95\x8c!"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6;ext=1\r\n" + HELLO[:6] + b"\r\n1\r\n" + HELLO[6:7] + b"\r\n"
    b"7\r\n" + HELLO[7:] + b"\r\n0\r\nX-Checksum: 1\r\n\r\n"
)
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 14\r\n\r\n" + HELLO
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + LENGTH
OLD = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + HELLO
ZIPPED = gzip.compress(HELLO, mtime=0)
GZIP = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    % len(ZIPPED)
) + ZIPPED


@pytest.mark.parametrize("wire", [CHUNKED, LENGTH, INTERIM, OLD, GZIP], ids=["chunked", "length", "1xx", "1.0", "gzip"])
def test_a_reply_reads_the_same_for_every_cut(wire: bytes) -> None:
    for cut in range(1, len(wire)):
        taker, reader = _read(wire[:cut], wire[cut:])
        reader.eof()

        assert bytes(taker.body) == HELLO
        assert [(status, headers[0]) for status, headers in taker.heads] == [
            (200, (b"content-type", b"text/event-stream"))
        ]
        assert reader.ended


@pytest.mark.parametrize("wire", [CHUNKED, LENGTH, INTERIM, OLD, GZIP], ids=["chunked", "length", "1xx", "1.0", "gzip"])
def test_a_reply_reads_the_same_byte_by_byte(wire: bytes) -> None:
    taker, _ = _read(*(wire[at : at + 1] for at in range(len(wire))))

    assert bytes(taker.body) == HELLO


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=300), max_size=20),
    cuts=st.lists(st.integers(0, 6000), max_size=30),
)
def test_chunked_bodies_survive_any_chunking_on_both_levels(pieces: list[bytes], cuts: list[int]) -> None:
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    edges = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})

    taker, reader = _read(*(wire[start:end] for start, end in itertools.pairwise(edges)))

    assert bytes(taker.body) == b"".join(pieces)
    assert reader.ended
    assert reader.reusable


@pytest.mark.parametrize("wire", [CHUNKED, LENGTH, GZIP], ids=["chunked", "length", "gzip"])
def test_a_reply_cut_short_is_truncated_wherever_it_is_cut(wire: bytes) -> None:
    for cut in range(1, len(wire)):
        _, reader = _read(wire[:cut])

        with pytest.raises(ReplyError) as broken:
            reader.eof()

        assert broken.value.kind is FailureKind.TRUNCATED


def test_a_close_without_a_byte_is_told_apart_from_a_truncation() -> None:
    _, reader = _read()

    with pytest.raises(ReplyError) as broken:
        reader.eof()

    assert broken.value.kind is FailureKind.CLOSED


def test_compressed_bytes_that_end_early_are_truncated_though_the_framing_is_whole() -> None:
    short = ZIPPED[:-9]

    with pytest.raises(ReplyError) as broken:
        _read(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(short) + short)

    assert broken.value.kind is FailureKind.TRUNCATED


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03\x01\x02\x00",
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 700 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nraw",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\nhi\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhiXX0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 7\r\n\r\nnot zip",
    ],
)
def test_a_reply_that_is_not_http_is_a_bad_response(wire: bytes) -> None:
    with pytest.raises(ReplyError) as broken:
        _read(wire)

    assert broken.value.kind is FailureKind.BAD_RESPONSE
    assert "hi" not in broken.value.detail.split()


def test_fields_of_the_hop_stay_behind_and_the_others_keep_order_and_repeats() -> None:
    taker, _ = _read(
        b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nConnection: keep-alive, X-Private\r\nKeep-Alive: timeout=5\r\n"
        b"X-Private: 1\r\nSet-Cookie: a=1\r\nProxy-Authenticate: Basic\r\nProxy-Connection: keep-alive\r\n"
        b"TE: trailers\r\nTrailer: X\r\nUpgrade: h2c\r\nSet-Cookie: b=2\r\nContent-Length:  2 \r\n\r\nhi"
    )

    assert taker.heads == [
        (
            200,
            [
                (b"server", b"uvicorn"),
                (b"set-cookie", b"a=1"),
                (b"set-cookie", b"b=2"),
                (b"content-length", b"2"),
            ],
        )
    ]


def test_a_peer_cannot_hide_the_label_of_a_body_as_a_field_of_the_hop() -> None:
    taker, _ = _read(b"HTTP/1.1 200 OK\r\nConnection: content-type\r\nContent-Type: a/b\r\nContent-Length: 0\r\n\r\n")

    assert (b"content-type", b"a/b") in taker.heads[0][1]


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        (b"gzip", gzip.compress(HELLO, mtime=0)),
        (b"X-GZIP", gzip.compress(HELLO[:5], mtime=0) + gzip.compress(HELLO[5:], mtime=0)),
        (b"deflate", zlib.compress(HELLO)),
    ],
)
def test_a_body_that_we_decode_loses_its_label_and_its_length(coding: bytes, body: bytes) -> None:
    taker, _ = _read(
        b"HTTP/1.1 400 Bad\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (coding, len(body), body)
    )

    assert taker.heads == [(400, [])]
    assert bytes(taker.body) == HELLO


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, br"])
def test_a_coding_that_is_not_ours_passes_with_its_label_and_length(coding: bytes) -> None:
    taker, _ = _read(b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: 2\r\n\r\n\x8b\x00" % coding)

    assert taker.heads == [(200, [(b"content-encoding", coding), (b"content-length", b"2")])]
    assert bytes(taker.body) == b"\x8b\x00"


def test_the_label_identity_is_dropped_and_the_length_kept() -> None:
    taker, _ = _read(b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: 2\r\n\r\nhi")

    assert taker.heads == [(200, [(b"content-length", b"2")])]


@pytest.mark.parametrize(("given", "told"), [(b"2".zfill(6000), b"2"), (b"0" * 6000, b"0")])
def test_a_length_of_thousands_of_zeros_is_told_as_a_number(given: bytes, told: bytes) -> None:
    taker, _ = _read(b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\nhi" % given)

    assert taker.heads == [(200, [(b"content-length", told)])]


@pytest.mark.parametrize("extra", [b"", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("lying_body", [b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n"])
def test_a_reply_to_head_ends_at_its_head_whatever_it_says(extra: bytes, lying_body: bytes) -> None:
    taker, reader = _read(b"HTTP/1.1 200 OK\r\n" + extra + b"\r\n" + lying_body, head_only=True)

    assert reader.ended
    assert not reader.reusable
    assert bytes(taker.body) == b""


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_ends_at_its_head(status: int) -> None:
    _, reader = _read(b"HTTP/1.1 %d X\r\nContent-Encoding: gzip\r\n\r\n" % status)

    assert reader.ended
    assert reader.reusable


@pytest.mark.parametrize(
    ("wire", "reusable"),
    [
        (LENGTH, True),
        (CHUNKED, True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi", True),
        (LENGTH + b"more", False),
        (LENGTH + LENGTH, False),
        (CHUNKED + b"HTTP/1.1 200 OK\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi" + LENGTH, False),
        (b"HTTP/1.1 204 No\r\nContent-Length: 2\r\n\r\nhi", False),
    ],
)
def test_a_connection_is_reusable_only_if_allowed_and_nothing_follows(wire: bytes, reusable: bool) -> None:
    taker, reader = _read(wire)

    assert reader.ended
    assert reader.reusable is reusable
    assert len(taker.heads) == 1


@pytest.mark.parametrize("size", [12_000, HEAD_MAX_BYTES - 100])
def test_a_long_field_within_the_bound_passes(size: int) -> None:
    value = b"v" * size

    taker, _ = _read(b"HTTP/1.1 200 OK\r\nX-Long: " + value + b"\r\nContent-Length: 0\r\n\r\n")

    assert taker.heads[0][1][0] == (b"x-long", value)


ENDLESS = {
    "one field": (b"HTTP/1.1 200 OK\r\nX-Long: ", b"v" * 1000),
    "many fields": (b"HTTP/1.1 200 OK\r\n", b"X-A: " + b"v" * 100 + b"\r\n"),
    "reason": (b"HTTP/1.1 200 ", b"O" * 1000),
    "interim replies": (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "blank lines": (b"", b"\r\n" * 100),
    "trailer": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ", b"v" * 1000),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: v\r\n" * 50),
    "chunk extension": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;", b"e" * 1000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_is_endless_and_not_body_is_cut(name: str) -> None:
    begin, repeated = ENDLESS[name]

    with pytest.raises(ReplyError) as broken:
        _read(begin, *(repeated for _ in range(3 * HEAD_MAX_BYTES // len(repeated))))

    assert broken.value.kind is FailureKind.BAD_RESPONSE


def test_a_head_past_the_bound_is_cut_in_one_read_too() -> None:
    with pytest.raises(ReplyError) as broken:
        _read(b"HTTP/1.1 200 OK\r\nX-Long: " + b"v" * HEAD_MAX_BYTES + b"\r\nContent-Length: 2\r\n\r\nhi")

    assert broken.value.kind is FailureKind.BAD_RESPONSE


def test_an_8_mb_line_passes_without_a_line_limit() -> None:
    line = b"data: " + b"x" * (8 * 1024 * 1024) + b"\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(line)

    taker, _ = _read(head, *(line[at : at + 65536] for at in range(0, len(line), 65536)))

    assert bytes(taker.body) == line


def test_nothing_is_told_after_a_detach_in_the_middle_of_a_read() -> None:
    taker = Taker()
    reader = ReplyReader(taker)
    taker.during = reader.detach

    reader.feed(CHUNKED + LENGTH)

    assert bytes(taker.body) == HELLO[:6]


def test_a_paused_coded_body_stops_at_the_next_piece_and_goes_on_later() -> None:
    plain = bytes(1024 * 1024)
    zipped = gzip.compress(plain)
    taker = Taker()
    reader = ReplyReader(taker)
    taker.during = lambda: setattr(reader, "paused", True)

    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(zipped) + zipped)
    held = len(taker.body)
    ended_while_paused = reader.ended
    taker.during = lambda: None
    reader.paused = False
    while reader.backlog:
        reader.pump()

    assert held <= 64 * 1024
    assert not ended_while_paused
    assert bytes(taker.body) == plain
    assert reader.ended


def test_a_bomb_is_handed_out_a_bounded_amount_a_turn() -> None:
    zipped = gzip.compress(bytes(100 * 1024 * 1024))
    taker = Taker()
    reader = ReplyReader(taker)

    reader.feed(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(zipped) + zipped)

    assert len(taker.body) <= PIECES_A_TURN * 64 * 1024
    assert reader.backlog


def test_what_a_receiver_raises_comes_out_as_it_was() -> None:
    taker = Taker()
    reader = ReplyReader(taker)

    def trip() -> None:
        raise KeyError("receiver")

    taker.during = trip

    with pytest.raises(KeyError):
        reader.feed(CHUNKED)


@given(wire=st.binary(max_size=400))
def test_garbage_never_raises_anything_but_a_reply_error(wire: bytes) -> None:
    reader = ReplyReader(Taker())

    with contextlib.suppress(ReplyError):
        reader.feed(wire)
        reader.feed(b"HTTP/1.1 200 OK\r\n" + wire)
        reader.eof()
