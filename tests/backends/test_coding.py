"""Content codings: whatever the cuts, the bytes come out plain, whole and in bounded pieces."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.coding import PIECE_MAX_BYTES, CodingError, Decoder, decoder_for

TEXT = b'data: {"choices":[{"delta":{"content":"h\xc3\xa9 \xf0\x9f\x98\x80"}}]}\n\n' * 40


def _raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return deflater.compress(data) + deflater.flush()


CODED = {
    "gzip": (b"gzip", gzip.compress(TEXT)),
    "gzip in two members": (b"x-gzip", gzip.compress(TEXT[:100]) + gzip.compress(TEXT[100:])),
    "gzip with padding": (b"gzip", gzip.compress(TEXT) + bytes(512)),
    "gzip with empty members": (b"gzip", gzip.compress(b"") * 3 + gzip.compress(TEXT) + gzip.compress(b"")),
    "deflate": (b"deflate", zlib.compress(TEXT)),
    "deflate without wrapper": (b"deflate", _raw_deflate(TEXT)),
}


def _decoder(coding: bytes) -> Decoder:
    decoder = decoder_for(coding)
    assert decoder is not None
    return decoder


def _take(decoder: Decoder) -> bytes:
    out = bytearray()
    while piece := decoder.piece():
        assert len(piece) <= PIECE_MAX_BYTES
        out += piece
    return bytes(out)


@pytest.mark.parametrize("name", CODED)
def test_a_coded_body_comes_out_plain_for_every_cut(name: str) -> None:
    coding, coded = CODED[name]

    for cut in range(len(coded) + 1):
        decoder = _decoder(coding)
        out = b""
        for part in (coded[:cut], coded[cut:]):
            decoder.feed(part)
            out += _take(decoder)

        assert out == TEXT
        assert decoder.whole
        assert not decoder.more


@given(data=st.binary(max_size=5000), sizes=st.lists(st.integers(1, 700), min_size=1))
def test_any_bytes_survive_any_chunking(data: bytes, sizes: list[int]) -> None:
    decoder = _decoder(b"gzip")
    coded = gzip.compress(data)
    out = b""
    at = turn = 0

    while at < len(coded):
        size = sizes[turn % len(sizes)]
        decoder.feed(coded[at : at + size])
        out += _take(decoder)
        at, turn = at + size, turn + 1

    assert out == data
    assert decoder.whole


@pytest.mark.parametrize("name", CODED)
def test_a_body_cut_short_is_not_whole(name: str) -> None:
    coding, coded = CODED[name]
    end = len(coded.rstrip(b"\0")) if "padding" in name else len(coded)

    decoder = _decoder(coding)
    decoder.feed(coded[: end - 6])
    _take(decoder)

    assert not decoder.whole


def test_an_empty_body_is_whole() -> None:
    assert _decoder(b"gzip").whole


def test_a_bomb_comes_out_in_bounded_pieces_and_only_when_asked() -> None:
    plain_bytes = 64 * 1024 * 1024
    decoder = _decoder(b"gzip")
    decoder.feed(gzip.compress(bytes(plain_bytes)))
    taken = 0

    while piece := decoder.piece():
        assert len(piece) <= PIECE_MAX_BYTES
        taken += len(piece)

    assert taken == plain_bytes


def test_thousands_of_empty_members_are_walked_without_copying_the_rest_each_time() -> None:
    members = 20_000
    decoder = _decoder(b"gzip")
    decoder.feed(gzip.compress(b"") * members + gzip.compress(b"end"))

    assert _take(decoder) == b"end"


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        (b"gzip", b"plainly not gzip"),
        (b"deflate", b"\xff\xff\xff\xff"),
        (b"gzip", gzip.compress(TEXT, mtime=0) + b"trailing"),
        (b"deflate", zlib.compress(TEXT) + b"trailing"),
        (b"gzip", gzip.compress(TEXT, mtime=0)[:-8] + bytes(8)),
    ],
    ids=["not gzip", "not deflate", "bytes after gzip", "bytes after deflate", "wrong checksum"],
)
def test_bytes_that_belie_their_label_are_refused(coding: bytes, data: bytes) -> None:
    decoder = _decoder(coding)
    decoder.feed(data)

    with pytest.raises(CodingError):
        _take(decoder)


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, br", b"", b"identity"])
def test_codings_that_are_not_ours_are_left_alone(coding: bytes) -> None:
    assert decoder_for(coding) is None
