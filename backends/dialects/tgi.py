"""The stream of TGI's /generate_stream: a token an event, no [DONE]; the last one holds the whole text.

`details` stands in the last event only if the client asked for it, so without it the tokens are counted.
"""

from __future__ import annotations

from backends.dialects.errors import EngineError, aborted
from backends.dialects.payload import ABORTED_FINISHES, JsonObject, child, count, text
from backends.dialects.reading import EventReader, Verdict


class TgiReader(EventReader):
    """See the module header."""

    __slots__ = ()

    def _on_payload(self, name: bytes, payload: JsonObject) -> Verdict | EngineError:  # noqa: ARG002
        details = child(payload, "details")
        finish = text(details.get("finish_reason"))
        if finish in ABORTED_FINISHES:
            return aborted(finish)
        if payload.get("token"):
            self._count(1)
        self._take_usage(
            {"prompt_tokens": details.get("input_length"), "completion_tokens": count(details.get("generated_tokens"))}
        )
        if isinstance(payload.get("generated_text"), str):
            self.finished = self.terminated = True
        return Verdict.KEEP
