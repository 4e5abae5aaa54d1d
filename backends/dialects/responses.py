"""The Responses stream: typed events with sequence numbers.

It ends with response.completed or response.incomplete, never with [DONE]; response.failed is an error. Every `.delta`
is a token-bearing event; a `.done` shows content too, for engines that send a tool call in one piece. The opening
events repeat the request's instructions and tools and may be long, yet bear no token.
"""

from __future__ import annotations

import re

from backends.dialects.errors import EngineError, aborted, error_of
from backends.dialects.payload import JsonObject, child, count, text
from backends.dialects.reading import EventReader, Verdict

_ENDS = frozenset({"response.completed", "response.incomplete"})
_FAILURES = frozenset({"response.failed", "response.cancelled"})
_TYPE = re.compile(rb'"type"\s*:\s*"(response\.[a-z_.]+)"|^event: ?(response\.[a-z_.]+)', re.MULTILINE)
_OPENING = frozenset({b"response.created", b"response.in_progress", b"response.queued"})


class ResponsesReader(EventReader):
    """See the module header."""

    __slots__ = ()

    def _on_payload(self, name: bytes, payload: JsonObject) -> Verdict | EngineError:
        kind = text(payload.get("type")) or name.decode("latin-1")
        if kind in _FAILURES:
            error = child(child(payload, "response"), "error")
            return error_of(error, payload) if error else aborted("error")
        number = count(payload.get("sequence_number"))
        if number is not None:
            self.next_sequence_number = number + 1
        if kind.endswith(".delta"):
            self._count(1)
        elif kind in _ENDS:
            self._take_usage(child(child(payload, "response"), "usage"))
            self.finished = self.terminated = True
        elif kind.endswith(".done"):
            self.started = True
        return Verdict.KEEP

    def _opens(self, head: bytes) -> bool:
        return _type_of(head) in _OPENING

    def _on_cut_event(self, head: bytes) -> None:
        if _type_of(head).decode() in _ENDS:
            self.finished = self.terminated = True
        elif _type_of(head) not in _OPENING:
            self._count(1)


def _type_of(head: bytes) -> bytes:
    found = _TYPE.search(head)
    return b"" if found is None else found.group(1) or found.group(2)
