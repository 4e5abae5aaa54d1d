"""The Messages stream: message_start, content blocks with deltas, message_delta, message_stop; pings in between.

Prompt tokens come with message_start, output tokens and the stop reason with message_delta. A content block that
starts as a tool call already says something; one that starts as text says nothing yet.
"""

from __future__ import annotations

from backends.dialects.errors import EngineError, aborted
from backends.dialects.payload import ABORTED_FINISHES, JsonObject, child, text
from backends.dialects.reading import EventReader, Verdict

_SILENT_BLOCKS = frozenset({"", "text", "thinking"})


class MessagesReader(EventReader):
    """See the module header."""

    __slots__ = ()

    def _on_payload(self, name: bytes, payload: JsonObject) -> Verdict | EngineError:
        kind = text(payload.get("type")) or name.decode("latin-1")
        if kind == "content_block_delta":
            self._count(1)
        elif kind == "content_block_start":
            self.started = self.started or text(child(payload, "content_block").get("type")) not in _SILENT_BLOCKS
        elif kind == "message_start":
            self._take_usage(child(child(payload, "message"), "usage"))
        elif kind == "message_delta":
            stop = text(child(payload, "delta").get("stop_reason"))
            if stop in ABORTED_FINISHES:
                return aborted(stop)
            self._take_usage(child(payload, "usage"))
            self.finished = self.finished or stop != ""
        elif kind == "message_stop":
            self.finished = self.terminated = True
        return Verdict.KEEP

    def _plain_text(self, payload: JsonObject) -> str:
        if payload.get("type") != "content_block_delta":
            return ""
        texts = [value for key, value in child(payload, "delta").items() if key != "type" and value]
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else ""
