"""The reader that all stream dialects share: whole events, long events, and the event that differs only in its text.

Three speeds, all with the same result:

1. **The same event but for its text.** From the first plain token event the reader keeps the bytes before and after
   its text. A later event made of exactly these bytes around a run without a quote is one more token, proved by three
   byte comparisons, without any assumption about spacing, field order or dialect.
2. **Any other event** is parsed and handed to the dialect.
3. **An event let through in pieces** (longer than the splitter holds) is collected up to LONG_MAX_BYTES and read when
   its end is seen; it cannot be taken back any more, so it counts as content at once unless its head says otherwise.
   Beyond LONG_MAX_BYTES only its head is kept, and it counts as one token.

Blocks must come in order and be cut as `backends.sse.EventSplitter` cuts them; the reader needs no other word of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import orjson

from backends.dialects.errors import EngineError, error_in, error_named
from backends.dialects.payload import JsonObject, load_object, usage_tokens
from backends.sse import Event, events, first_end, is_idle

LONG_MAX_BYTES = 1024 * 1024
LONG_HEAD_BYTES = 4096
SHAPE_MAX_BYTES = 2048
SHAPE_TRIES = 4

_PROBE = b"~headrace~"


@dataclass(frozen=True, slots=True)
class Remark:
    """What is not as usual in a block.

    forward  what may go to the client of it: without a usage event that we asked for, or only what precedes an error
    error    the engine's error; the stream is over, and every later block is answered with the same one
    """

    forward: bytes
    error: EngineError | None = None


class StreamReader(Protocol):
    """Reads one stream as it passes. Never raises.

    started               a token-bearing event was seen; roles, comments, usage and opening events do not count
    tokens                token-bearing events seen, or the lengths of token_ids where the engine sends them
    prompt_tokens         from usage; None until the engine said so. output_tokens and cached_tokens (of the prompt, found in
                          a prefix cache) likewise
    finished              every expected sequence has a finish reason, and none of them is abort or error
    terminated            the dialect's terminator was seen
    next_sequence_number  of a Responses stream; else 0
    """

    started: bool
    tokens: int
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    finished: bool
    terminated: bool
    next_sequence_number: int

    def inspect(self, block: bytes) -> Remark | None:
        """Look at the next block of the stream; None: pass it on untouched."""
        ...


class Verdict(Enum):
    """What becomes of an event that is no error."""

    KEEP = auto()
    DROP = auto()


class EventReader(ABC):
    """See the module header. A dialect says what a payload means (`_on_payload`) and what plain text is."""

    __slots__ = (
        "_error",
        "_long",
        "_long_cut",
        "_long_judged",
        "_prefix",
        "_prefix_len",
        "_sequences",
        "_strip_usage",
        "_suffix",
        "_suffix_len",
        "_tries",
        "cached_tokens",
        "finished",
        "next_sequence_number",
        "output_tokens",
        "prompt_tokens",
        "started",
        "terminated",
        "tokens",
    )

    def __init__(self, *, sequences: int, strip_usage: bool) -> None:
        self.started = False
        self.tokens = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finished = False
        self.terminated = False
        self.next_sequence_number = 0
        self._sequences = sequences
        self._strip_usage = strip_usage
        self._error: EngineError | None = None
        self._long = bytearray()
        self._long_judged = False
        self._long_cut = False
        self._prefix = b""
        self._prefix_len = 0
        self._suffix = b""
        self._suffix_len = 0
        self._tries = 0

    def inspect(self, block: bytes) -> Remark | None:
        prefix = self._prefix
        if prefix:
            at = seen = 0
            suffix = self._suffix
            while block.startswith(prefix, at):
                text_at = at + self._prefix_len
                text_end = block.find(b'"', text_at)
                if text_end <= text_at or not block.startswith(suffix, text_end):
                    break
                at = text_end + self._suffix_len
                seen += 1
                if at == len(block):
                    self.tokens += seen
                    self._tries = 0
                    return None
        return self._read(block)

    # -- what a dialect says ---------------------------------------------------------------------------------------

    @abstractmethod
    def _on_payload(self, name: bytes, payload: JsonObject) -> Verdict | EngineError:
        """Take one event's JSON object; errors in the common shapes were found before."""

    def _on_done(self) -> None:  # noqa: B027, in the other dialects it means nothing
        """`data: [DONE]` was seen; only the OpenAI dialect ends with it."""

    def _plain_text(self, payload: JsonObject) -> str:  # noqa: ARG002
        """The text of an event that is one token's text and nothing else that this reader counts; "" otherwise."""
        return ""

    def _opens(self, head: bytes) -> bool:  # noqa: ARG002
        """True when the head of a long event says that it bears no token."""
        return False

    def _on_cut_event(self, head: bytes) -> None:  # noqa: ARG002
        """An event too long to be read has ended; `head` is its first bytes."""
        self._count(1)

    # -- for dialects ----------------------------------------------------------------------------------------------

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        self.started = True

    def _take_usage(self, usage: JsonObject) -> None:
        """Usage only grows; with several sequences an engine's running counts are per sequence, its last one is not."""
        prompt, output, cached = usage_tokens(usage)
        if cached is not None:
            self.cached_tokens = max(cached, self.cached_tokens or 0)
        if prompt is not None:
            self.prompt_tokens = max(prompt, self.prompt_tokens or 0)
        if output is not None:
            self.output_tokens = max(output, self.output_tokens or 0)

    # -- events ----------------------------------------------------------------------------------------------------

    def _read(self, block: bytes) -> Remark | None:
        if self._error is not None:
            return Remark(b"", self._error)
        start = self._end_long(block) if self._long else 0
        if self._error is not None:
            return Remark(block[:start], self._error)
        kept: list[bytes] = []
        kept_from = 0
        end = start
        for event in events(block, start):
            end = event.end
            verdict = self._judge(block, event)
            if verdict is Verdict.KEEP:
                continue
            kept.append(block[kept_from : event.start])
            kept_from = end
            if isinstance(verdict, EngineError):
                return self._fail(b"".join(kept), verdict)
        if end < len(block) and not is_idle(block[end:]):
            verdict = self._begin_long(block[end:])
            if verdict is not Verdict.KEEP:
                kept.append(block[kept_from:end])
                kept_from = len(block)
            if isinstance(verdict, EngineError):
                return self._fail(b"".join(kept), verdict)
        if not kept:
            return None
        kept.append(block[kept_from:])
        return Remark(b"".join(kept))

    def _judge(self, block: bytes, event: Event) -> Verdict | EngineError:
        data = event.data
        if not data:
            return Verdict.KEEP
        if data.strip() == b"[DONE]":
            self._on_done()
            return Verdict.KEEP
        payload = load_object(data)
        error = error_in(payload or {}) or (error_named(data, payload) if event.name == b"error" else None)
        if error is not None:
            return error
        if payload is None:
            return Verdict.KEEP
        before = self.tokens
        verdict = self._on_payload(event.name, payload)
        if self.tokens == before + 1 and self._tries < SHAPE_TRIES and event.end - event.start <= SHAPE_MAX_BYTES:
            self._learn(block[event.start : event.end], self._plain_text(payload))
        return verdict

    def _fail(self, forward: bytes, error: EngineError) -> Remark:
        self._error = error
        self._prefix = b""
        return Remark(forward, error)

    def _learn(self, raw: bytes, text: str) -> None:
        """Keep the bytes around the event's text, if putting another text there gives the event that it should."""
        self._tries += 1
        try:
            quoted = orjson.dumps(text)
        except TypeError:  # a lone surrogate
            return
        if not text or raw.count(quoted) != 1:
            return
        text_at = raw.index(quoted) + 1
        prefix, suffix = raw[:text_at], raw[text_at + len(quoted) - 2 :]
        for event in events(prefix + _PROBE + suffix):
            payload = load_object(event.data)
            if payload is None or self._plain_text(payload) != _PROBE.decode():
                return
        self._prefix, self._prefix_len = prefix, len(prefix)
        self._suffix, self._suffix_len = suffix, len(suffix)

    # -- events let through in pieces ------------------------------------------------------------------------------

    def _begin_long(self, piece: bytes) -> Verdict | EngineError:
        """The block ends inside an event. Read it now if nothing but its empty line is missing, else collect it."""
        self._prefix = b""
        self._tries = 0
        self._long_cut = False
        whole = next(events(piece + b"\n\n"))
        self._long_judged = whole.data.strip() == b"[DONE]" or load_object(whole.data) is not None
        if self._long_judged:
            self._long = bytearray(piece[-2:])
            return self._judge(piece, whole)
        self._long = bytearray(piece)
        if whole.data and not self._opens(piece[:LONG_HEAD_BYTES]):
            self.started = True
        return Verdict.KEEP

    def _end_long(self, block: bytes) -> int:
        """Collect more of a long event; the offset in `block` after its end, or the block's length if it goes on."""
        collected = self._long
        known = len(collected)
        collected += block
        end = first_end(collected, max(0, known - 2))
        if end < 0:
            if len(collected) > LONG_MAX_BYTES:
                self._long_cut = True
                del collected[LONG_HEAD_BYTES:-2]
            return len(block)
        raw = bytes(collected[:end])
        self._long = bytearray()
        if self._long_cut:
            self._on_cut_event(raw[:LONG_HEAD_BYTES])
        elif not self._long_judged:
            for event in events(raw):
                verdict = self._judge(raw, event)
                if isinstance(verdict, EngineError):
                    self._error = verdict
        return end - known

    def __repr__(self) -> str:
        state = "terminated" if self.terminated else "finished" if self.finished else "open"
        return f"<{type(self).__name__} {state} tokens={self.tokens} usage={self.prompt_tokens}/{self.output_tokens}>"
