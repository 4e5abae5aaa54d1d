"""Undoes the content coding of a reply, in bounded pieces.

We ask engines for `identity`, yet proxies in front of them compress all the same. What crosses the seam is plain
bytes, so gzip and deflate are undone here, incrementally: a compressed event stream stays a stream.

Invariants
- One `piece()` holds at most PIECE_MAX_BYTES, whatever the expansion: the caller decides how many it takes, so a
  bomb costs its reader time slices, never memory.
- The input is walked in small slices, so that thousands of empty gzip members cost no quadratic copying.
- A body is whole only when the coding's own end (with its checksum) was seen.

Does not undo br, zstd or stacked codings: `decoder_for` answers None and the caller passes them on, labelled.
"""

from __future__ import annotations

import zlib

PIECE_MAX_BYTES = 64 * 1024
_SLICE_BYTES = 4096

_GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS
_GZIP_MAGIC = 0x1F


class CodingError(Exception):
    """The compressed bytes are not what their label says."""


def decoder_for(coding: bytes) -> Decoder | None:
    """A decoder for one Content-Encoding value (lower-case), or None where it is not ours to undo."""
    if coding in (b"gzip", b"x-gzip"):
        return Decoder(gzip=True)
    if coding == b"deflate":
        return Decoder(gzip=False)
    return None


class Decoder:
    """Feed compressed bytes, take plain pieces. `gzip=False` is deflate, with or without its zlib wrapper.

    more     another `piece()` may give bytes without further input
    """

    __slots__ = ("_at", "_gzip", "_inflater", "_input", "_members", "more")

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._inflater: zlib._Decompress | None = None
        self._input = bytearray()
        self._at = 0
        self._members = 0
        self.more = False

    @property
    def whole(self) -> bool:
        """True when the input taken so far ends where the coding ends; an empty body is whole."""
        return self._inflater is None and self._at == len(self._input)

    def feed(self, data: bytes) -> None:
        """Add compressed bytes. Take all pieces before feeding on, or the input piles up."""
        del self._input[: self._at]
        self._at = 0
        self._input += data
        self.more = True

    def piece(self) -> bytes:
        """The next plain bytes, at most PIECE_MAX_BYTES; b"" when more input is needed. Raises CodingError."""
        while self._inflater is not None or self._begin_member():
            piece = self._inflate()
            if piece:
                return piece
            if self._inflater is not None and self._at == len(self._input):
                break
        self.more = False
        return b""

    def _inflate(self) -> bytes:
        inflater = self._inflater
        assert inflater is not None
        slice_ = self._input[self._at : self._at + _SLICE_BYTES]
        try:
            piece = inflater.decompress(slice_, PIECE_MAX_BYTES)
        except zlib.error as error:
            raise CodingError(str(error)) from None
        left_over = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        self._at += len(slice_) - len(left_over)
        if inflater.eof:
            self._inflater = None
            self._members += 1
        return piece

    def _begin_member(self) -> bool:
        """Open the next gzip member or the deflate stream; False when there is not enough input to tell."""
        if self._members:
            self._skip_padding()
        left = len(self._input) - self._at
        if left == 0:
            return False
        if self._gzip:
            if self._members and self._input[self._at] != _GZIP_MAGIC:
                raise CodingError("bytes after the end of the gzip data")
            self._inflater = zlib.decompressobj(_GZIP_WINDOW_BITS)
            return True
        if self._members:
            raise CodingError("bytes after the end of the deflate data")
        if left < 2:
            return False
        first, second = self._input[self._at], self._input[self._at + 1]
        wrapped = first & 0x0F == zlib.DEFLATED and (first << 8 | second) % 31 == 0  # RFC 1950, section 2.2
        self._inflater = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
        return True

    def _skip_padding(self) -> None:
        """Zero bytes may pad a gzip file after its last member (gzip's own manual)."""
        while self._at < len(self._input) and self._input[self._at] == 0:
            self._at += 1
