"""The streams of a request batch's parts as one stream: events of all parts as they come, each under its own index.

What a client may rely on in one stream it finds here: one id, created and model (those of the first event that came),
indices of the whole array, one usage event at the end with the sums, one [DONE]. Every other byte of an event is the
engine's. Events of one part keep their order; parts mix as their engines please, as the choices of one array do.

An event that repeats an earlier one of its part up to its text, and has nothing behind it to be rewritten, costs a few
comparisons, as in `backends.dialects.reading`; any other is scanned.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from backends.dialects.batches import JoinError, moved_index, summed
from backends.dialects.payload import JsonObject, child, load_object
from backends.dialects.scan import items, members
from backends.sse import Event, EventSplitter, events

EVENT_MAX_BYTES = 4 * 1024 * 1024
"""An event is held until it is whole; a longer one ends the batch."""
SHAPES_MAX = 256
_SAME = ("id", "created", "model")
_TEXT_MARKS = (b'"text":"', b'"text": "')
_REWRITTEN = (b'"index"', b'"id"', b'"created"', b'"model"')
"""What stands in no text: quotes in one are escaped. An event without them behind its text is rewritten before it only."""
_DONE = b"data: [DONE]\n\n"


class StreamJoin:
    """See the module header. `feed` what parts send, `ended` when each is over; `tail` ends the joined stream."""

    __slots__ = ("_common", "_done", "_firsts", "_last_usage", "_shapes", "_splitters", "_usages")

    def __init__(self, firsts: Sequence[int]) -> None:
        """firsts: index of each part's first input."""
        self._firsts = firsts
        self._splitters: dict[int, EventSplitter] = {}
        self._shapes: dict[tuple[int, bytes], tuple[bytes, bytes, bytes]] = {}
        self._common: dict[str, bytes] = {}
        self._usages: dict[int, JsonObject] = {}
        self._last_usage = b""
        self._done = False

    def feed(self, part: int, data: bytes) -> bytes:
        """Take bytes of a part's stream; what of it goes to the client now, in whole events. Raises JoinError."""
        splitter = self._splitters.get(part)
        if splitter is None:
            splitter = self._splitters[part] = EventSplitter(EVENT_MAX_BYTES)
        ready = splitter.feed(data)
        if splitter.oversize:
            raise JoinError(f"it has an event of more than {EVENT_MAX_BYTES} bytes")
        return b"".join(self._event(part, ready, event) for event in events(ready)) if ready else b""

    def ended(self, part: int) -> bytes:
        """A part's stream is over; what of it is left for the client. Raises JoinError."""
        splitter = self._splitters.pop(part, None)
        rest = b"" if splitter is None else splitter.take_rest()
        if not rest.strip():
            return b""
        rest += b"\n\n"
        return b"".join(self._event(part, rest, event) for event in events(rest))

    def tail(self) -> bytes:
        """The end of the joined stream: usage where the client gets it, and the terminator where parts had one."""
        return self._last_usage + (_DONE if self._done else b"")

    def _event(self, part: int, block: bytes, event: Event) -> bytes:
        raw = block[event.start : event.end]
        if not event.data:
            return raw
        mark = next((mark for mark in _TEXT_MARKS if mark in raw), b"")
        head, text_at = b"", 0
        if mark:
            text_at = raw.index(mark) + len(mark)
            head = raw[:text_at]
            shape = self._shapes.get((part, head))
            if shape is not None:
                new_head, tail, new_tail = shape
                rest = raw[text_at:]
                if tail == new_tail and not any(key in rest for key in _REWRITTEN):
                    return new_head + rest
                text_end = raw.find(b'"', text_at)
                if raw[text_end:] == tail:
                    return new_head + raw[text_at:text_end] + new_tail
        return self._read(part, raw, event, head)

    def _read(self, part: int, raw: bytes, event: Event, head: bytes) -> bytes:
        data = event.data
        if data.strip() == b"[DONE]":
            self._done = True
            return b""
        payload = load_object(data)
        if payload is None:  # llama.cpp begins the stream of an array with a null, on which clients stumble
            return b"" if data.strip() == b"null" else raw
        if not payload.get("choices") and isinstance(payload.get("usage"), dict):
            self._usages[part] = child(payload, "usage")
            self._last_usage = self._usage_event(data)
            return b""
        try:
            new = self._rewritten(data, self._firsts[part])
        except (ValueError, IndexError) as error:
            raise JoinError("it has an event whose choices are no objects") from error
        if raw.count(data) != 1:  # data over several lines
            return b"data: %b\n\n" % new.replace(b"\n", b"\ndata: ")
        if head and len(self._shapes) < SHAPES_MAX * len(self._firsts):
            self._learn(part, raw, raw.replace(data, new), head)
        return raw.replace(data, new)

    def _learn(self, part: int, raw: bytes, new: bytes, head: bytes) -> None:
        """Keep what stands around the text, before and after; the text itself is the same in both."""
        text_at = len(head)
        tail = raw[raw.find(b'"', text_at) :]
        mark = next(mark for mark in _TEXT_MARKS if head.endswith(mark))
        new_at = new.index(mark) + len(mark)
        text = raw[text_at : len(raw) - len(tail)]
        new_tail_at = new_at + len(text)
        if new[new_at:new_tail_at] != text or raw[:text_at].count(mark) != 1 or b"\\" in text:
            return
        self._shapes[part, head] = (new[:new_at], tail, new[new_tail_at:])

    def _rewritten(self, data: bytes, first: int) -> bytes:
        """The event's JSON under the common id, created and model, with its indices moved on."""
        pieces: list[bytes] = []
        at = 0
        for key, start, end in members(data):
            if key in _SAME:
                value = self._common.setdefault(key, data[start:end])
            elif key == "choices" and first:
                value = _moved_choices(data[start:end], first)
            else:
                continue
            pieces += (data[at:start], value)
            at = end
        pieces.append(data[at:])
        return b"".join(pieces)

    def _usage_event(self, data: bytes) -> bytes:
        """The usage event so far: the latest one's bytes with the sums of all."""
        total = orjson.dumps(summed([self._usages[part] for part in sorted(self._usages)]))
        new = self._rewritten(data, 0)
        for key, start, end in members(new):
            if key == "usage":
                return b"data: %b%b%b\n\n" % (new[:start], total, new[end:])
        return b""

    def __repr__(self) -> str:
        return f"<StreamJoin parts={len(self._firsts)} open={len(self._splitters)} usage={len(self._usages)}>"


def _moved_choices(array: bytes, first: int) -> bytes:
    if not array.startswith(b"["):
        return array
    pieces: list[bytes] = []
    at = 0
    for start, end in items(array):
        pieces += (array[at:start], moved_index(array[start:end], first))
        at = end
    pieces.append(array[at:])
    return b"".join(pieces)
