"""Server-sent events on bytes: cut a stream where whole events end, and read the events of a block.

Engines break their events across reads wherever the network likes, end lines with LF, CRLF or CR, and send comments,
events without a space after the colon, and single events of megabytes. Everything here works on bytes by the framing
rules of the HTML standard and decodes nothing, so what is relayed is what came.

    splitter.feed(data)  -> the bytes that may be relayed now, cut where an event ends
    events(block)        -> the events of such a block, with offsets

Invariants: the outputs of `feed` and the final `take_rest` joined are the inputs joined, for every cut of the input;
never more than `hold_max_bytes` (plus the read at hand) is held; work is linear in the bytes fed. What events mean is
not looked at here: that is `backends.dialects`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

HOLD_MAX_BYTES = 16 * 1024

# An empty line: a line end (a CR is one only where no LF follows it) and at least one more.
_EMPTY_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)+")
# Lines that belong to no event where an event would start: comments and further empty lines.
_IDLE_LINES = re.compile(rb"(?:\xef\xbb\xbf)?(?::[^\r\n]*(?:\r\n|\n|\r)|\r\n|\n|\r)+")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"
_MAY_BE_IDLE = frozenset(b":\r\n\xef")
_IDLE_STARTS = frozenset(bytes((one,)) for one in _MAY_BE_IDLE)


@dataclass(slots=True)
class Event:
    """One complete event of a block.

    name             the last `event:` field, b"" if none; b"error" for an `error:` field
    data             the `data:` fields joined by LF, b"" if none (then clients see no event); an `error:` field likewise
    start, end       block[start:end] is the event with its comments and the empty line that ends it
    is_comment_only  it holds no field at all
    """

    name: bytes
    data: bytes
    start: int
    end: int
    is_comment_only: bool


class EventSplitter:
    """Lets through what ends with a whole event and holds the tail that does not; see the module header.

    oversize   the event under way grew past hold_max_bytes, so it is being let through in pieces
    """

    __slots__ = ("_held", "_hold_max_bytes", "_seam", "oversize")

    def __init__(self, hold_max_bytes: int = HOLD_MAX_BYTES) -> None:
        self._hold_max_bytes = hold_max_bytes
        self._held = bytearray()
        self._seam = b""
        self.oversize = False

    def feed(self, data: bytes) -> bytes:
        """The bytes that may be relayed now; b"" while an event is incomplete.

        That is everything up to the last empty line, and comment lines standing after it. The common read (whole
        events, nothing held) is returned as it is, without a copy.
        """
        held = self._held
        if not held and not self.oversize and data.endswith(b"\n\n"):
            return data
        if self.oversize:
            return self._let_through(data)
        known = len(held)
        held += data
        cut = _last_end(held, max(0, known - 2))
        if cut < len(held) and held[cut] in _MAY_BE_IDLE:
            idle = _IDLE_LINES.match(held, cut)
            cut = cut if idle is None else idle.end()
        if len(held) - cut > self._hold_max_bytes:
            cut = len(held)
            self.oversize = True
            self._seam = bytes(held[-2:])
        ready = bytes(held[:cut])
        del held[:cut]
        return ready

    def take_rest(self) -> bytes:
        """The held tail, at the end of the stream; the splitter is empty afterwards."""
        rest = bytes(self._held)
        self._held.clear()
        return rest

    def _let_through(self, data: bytes) -> bytes:
        """Pass an oversize event on; its end may straddle two reads, hence the seam of two bytes."""
        window = self._seam + data
        end = first_end(window, 0)
        if end < 0:
            self._seam = window[-2:]
            return data
        cut = end - len(self._seam)
        self.oversize = False
        self._seam = b""
        return data[:cut] + self.feed(data[cut:])

    def __repr__(self) -> str:
        return f"<EventSplitter held={len(self._held)} oversize={self.oversize}>"


def events(block: bytes, start: int = 0) -> Iterator[Event]:
    """The complete events of block[start:], in order. A tail without its empty line yields nothing."""
    has_cr = b"\r" in block
    while (end := _first_end(block, start, has_cr)) > 0:
        yield _read_event(block, start, end) if has_cr else _read_plain_event(block, start, end)
        start = end


def first_end(buffer: bytes | bytearray, start: int) -> int:
    """Offset after the first empty line at or after `start`, -1 when there is none."""
    return _first_end(buffer, start, buffer.find(b"\r", start) >= 0)


def is_idle(piece: bytes) -> bool:
    """True when the piece is nothing but complete comment lines and empty lines."""
    return piece[:1] in _IDLE_STARTS and _IDLE_LINES.fullmatch(piece) is not None


def _first_end(buffer: bytes | bytearray, start: int, has_cr: bool) -> int:
    if has_cr:
        found = _EMPTY_LINE.search(buffer, start)
        return -1 if found is None else found.end()
    at = buffer.find(b"\n\n", start)
    return -1 if at < 0 else at + 2


def _last_end(buffer: bytearray, start: int) -> int:
    """Offset after the last empty line at or after `start`, 0 when there is none."""
    if buffer.find(b"\r", start) >= 0:
        end = 0
        for found in _EMPTY_LINE.finditer(buffer, start):
            end = found.end()
        return end
    at = buffer.rfind(b"\n\n", start)
    return 0 if at < 0 else at + 2


def _read_plain_event(block: bytes, start: int, end: int) -> Event:
    """The one-line form that nearly every event of an engine has, in a block without CR; else the general rules."""
    if block.startswith(b"data:", start) and block.find(b"\n", start, end) == end - 2:
        data_at = start + 6 if block.startswith(b" ", start + 5) else start + 5
        return Event(b"", block[data_at : end - 2], start, end, is_comment_only=False)
    return _read_event(block, start, end)


def _read_event(block: bytes, start: int, end: int) -> Event:
    name = b""
    data: list[bytes] = []
    bare = True
    raw = block[start:end]
    for line in _LINE_END.split(raw.removeprefix(_BOM)):
        if not line or line.startswith(b":"):
            continue
        bare = False
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
        elif field == b"error":  # llama.cpp until 2025: its errors are fields that the standard tells clients to ignore
            name = field
            data.append(value)
    return Event(name, b"\n".join(data), start, end, is_comment_only=bare)
