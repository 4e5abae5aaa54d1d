"""The OpenAI stream of chat and completions, as vLLM, TGI, SGLang, llama.cpp and others send it.

A choice bears a token when it shows any of what a model can say (text, reasoning, tool calls, refusal, audio) or lists
token_ids. Its first event is often a role and nothing else, which is no token; an empty text later is one (half a
UTF-8 character), unless it comes with a finish reason. TGI sends `finish_reason: ""` until the end, so only a
non-empty one finishes a sequence. Two streams of the same routes' neighbours are read here too: the typed events of
audio transcriptions, and llama.cpp's own /completion, which ends with `"stop": true` and no [DONE]. llama.cpp's
timings stand for usage where there is none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from backends.dialects.errors import EngineError, aborted, error_without_its_name
from backends.dialects.payload import ABORTED_FINISHES, JsonObject, child, count
from backends.dialects.reading import EventReader, Verdict

_SPOKEN = frozenset({"content", "refusal", "tool_calls", "function_call", "audio", "images", "text"})
_SPOKEN_PREFIXES = ("reasoning", "thinking")
_LAST_AUDIO_EVENTS = frozenset({"transcript.text.done", "speech.audio.done"})
_ROLE_ONLY = re.compile(rb'"delta"\s*:\s*\{\s*"role"\s*:\s*"\w+"\s*(?:,\s*"content"\s*:\s*(?:""|null)\s*)?\}')


class OpenAIReader(EventReader):
    """See the module header."""

    __slots__ = ("_ended",)

    def __init__(self, *, sequences: int, strip_usage: bool) -> None:
        super().__init__(sequences=sequences, strip_usage=strip_usage)
        self._ended: set[int] = set()

    def _on_done(self) -> None:
        self.terminated = True

    def _on_payload(self, name: bytes, payload: JsonObject) -> Verdict | EngineError:  # noqa: ARG002
        usage = payload.get("usage")
        if isinstance(usage, dict):
            self._take_usage(usage)
        elif isinstance(timings := payload.get("timings"), dict):
            self._take_usage(_usage_of_timings(timings))
        choices = payload.get("choices")
        if isinstance(choices, list) and choices:
            for choice in choices:
                error = self._on_choice(choice) if isinstance(choice, dict) else None
                if error is not None:
                    return error
            return Verdict.KEEP
        kind = payload.get("type")
        if isinstance(kind, str):
            self._on_audio(kind)
            return Verdict.KEEP
        if isinstance(payload.get("stop"), bool):
            self._on_completion(payload)
            return Verdict.KEEP
        if not isinstance(usage, dict):
            return error_without_its_name(payload) or Verdict.KEEP
        return Verdict.DROP if self._strip_usage else Verdict.KEEP

    def _on_choice(self, choice: JsonObject) -> EngineError | None:
        finish = choice.get("finish_reason")
        ended = isinstance(finish, str) and finish != ""
        if isinstance(finish, str) and finish in ABORTED_FINISHES:
            return aborted(finish)
        said = _said(choice)
        token_ids = choice.get("token_ids")
        if isinstance(token_ids, list) and token_ids:
            self._count(len(token_ids))
        elif any(said.values()) or (self.started and said and not ended and not child(choice, "delta").get("role")):
            self._count(1)
        if ended:
            index = choice.get("index")
            self._ended.add(index if isinstance(index, int) else 0)
            self.finished = len(self._ended) >= self._sequences
        return None

    def _on_audio(self, kind: str) -> None:
        if kind.endswith(".delta"):
            self._count(1)
        elif kind in _LAST_AUDIO_EVENTS:
            self.started = self.finished = self.terminated = True

    def _on_completion(self, payload: JsonObject) -> None:
        tokens = payload.get("tokens")
        if payload.get("content") or tokens:
            self._count(len(tokens) if isinstance(tokens, list) and tokens else 1)
        if payload["stop"]:
            usage = {
                "prompt_tokens": payload.get("tokens_evaluated"),
                "completion_tokens": payload.get("tokens_predicted"),
            }
            self._take_usage(usage)
            self.finished = self.terminated = True

    def _plain_text(self, payload: JsonObject) -> str:
        choices = payload.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or payload.get("usage"):
            return ""
        choice = choices[0]
        if not isinstance(choice, dict) or choice.get("finish_reason") or choice.get("token_ids"):
            return ""
        texts = [value for value in _said(choice).values() if value]
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else ""

    def _opens(self, head: bytes) -> bool:
        return _ROLE_ONLY.search(head) is not None


def _usage_of_timings(timings: Mapping[str, object]) -> JsonObject:
    """What llama.cpp counts in every last event, usage asked for or not; the prompt is told in two parts."""
    evaluated = count(timings.get("prompt_n"))
    prompt = None if evaluated is None else evaluated + (count(timings.get("cache_n")) or 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": timings.get("predicted_n"),
        "prompt_tokens_details": {"cached_tokens": timings.get("cache_n")},
    }


def _said(choice: Mapping[str, object]) -> dict[str, object]:
    """What of a choice a model can have said; empty texts included, nulls not."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        delta = choice.get("message")
        if not isinstance(delta, dict):
            text = choice.get("text")
            return {} if text is None else {"text": text}
    return {
        key: value
        for key, value in delta.items()
        if value is not None and (key in _SPOKEN or key.startswith(_SPOKEN_PREFIXES))
    }
