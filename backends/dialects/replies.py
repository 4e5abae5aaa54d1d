"""Whole JSON answers: what they cost, and whether they are answers at all.

vLLM answers 200 with finish_reason "abort" when it is shut down, and some servers put an error object into a 200; both
are failures. Answers are read, never changed. One longer than PARSE_MAX_BYTES (embeddings) would hold the loop for
milliseconds if parsed, so of it only the aborted finish and the usage at its ends are searched.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from backends.dialects.errors import EngineError, aborted, error_in, error_of, error_without_its_name
from backends.dialects.payload import (
    ABORTED_FINISHES,
    JsonObject,
    Usage,
    child,
    count,
    holds_json,
    load,
    text,
    usage_tokens,
)

PARSE_MAX_BYTES = 1024 * 1024
ENDS_BYTES = 4096

_ABORTED = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"(abort|error)"')
_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
_CHOICES_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_EVENT_FIELDS = (b"data:", b"event:", b":")
"""A stream of events under the label of JSON is odd, and readable all the same."""
_NO_USAGE: Usage = (None, None, None)


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """What one whole answer says of itself.

    prompt_tokens, output_tokens   from usage (or TGI's details); None when the answer does not say
    cached_tokens                  of the prompt, found in a prefix cache; likewise
    aborted                        some sequence ended with finish_reason abort or error; `error` then says so
    broken                         it is no JSON: empty, cut short, or something else under a wrong label
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    aborted: bool = False
    broken: bool = False
    error: EngineError | None = None


def read_reply(body: bytes, path: str) -> ReplyFacts:
    """Read the JSON body of a 200. `path` is the engine path.

    Below /v1/responses/ an object is asked for, not made: that it failed or was cancelled is the answer.
    """
    if path.startswith("/v1/responses/"):
        return ReplyFacts()
    if len(body) > PARSE_MAX_BYTES:
        return _read_ends(body)
    payload = load(body)
    if payload is None and not holds_json(body) and not body.startswith(_EVENT_FIELDS):
        return ReplyFacts(broken=True)
    if isinstance(payload, list):
        return _joined([_read_object(item, path) for item in payload if isinstance(item, dict)])
    return _read_object(payload, path) if isinstance(payload, dict) else ReplyFacts()


def _read_object(payload: JsonObject, path: str) -> ReplyFacts:
    prompt, output, cached = _usage(payload)
    error = error_in(payload)
    if error is None and path in _CHOICES_PATHS and "choices" not in payload:
        error = error_without_its_name(payload)
    finish = _aborted_finish(payload)
    if error is None and finish:
        error = aborted(finish)
    if error is None and path == "/v1/responses" and payload.get("status") in {"failed", "cancelled"}:
        error = error_of(child(payload, "error"), payload)
    return ReplyFacts(prompt, output, cached, aborted=bool(finish), error=error)


def _usage(payload: JsonObject) -> Usage:
    usage = child(payload, "usage")
    if usage:
        return usage_tokens(usage)
    details = child(payload, "details")
    if details:
        prefill = details.get("prefill")
        prompt = len(prefill) if isinstance(prefill, list) and prefill else None
        return prompt, count(details.get("generated_tokens")), None
    return _NO_USAGE


def _aborted_finish(payload: JsonObject) -> str:
    """The finish reason that spoils the answer, "" when none does."""
    choices = payload.get("choices")
    reasons = [child(payload, "details").get("finish_reason"), payload.get("stop_reason")]
    if isinstance(choices, list):
        reasons += [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
    return next((reason for reason in map(text, reasons) if reason in ABORTED_FINISHES), "")


def _joined(replies: list[ReplyFacts]) -> ReplyFacts:
    """One answer to several inputs (TGI): sums, and the first failure."""
    prompts = [reply.prompt_tokens for reply in replies if reply.prompt_tokens is not None]
    outputs = [reply.output_tokens for reply in replies if reply.output_tokens is not None]
    return ReplyFacts(
        sum(prompts) if prompts else None,
        sum(outputs) if outputs else None,
        aborted=any(reply.aborted for reply in replies),
        error=next((reply.error for reply in replies if reply.error is not None), None),
    )


def _read_ends(body: bytes) -> ReplyFacts:
    # A quote inside a JSON string is escaped, so the pattern cannot match inside what a model wrote.
    finish = _ABORTED.search(body)
    error = None if finish is None else aborted(finish.group(1).decode())
    for part in (body[-ENDS_BYTES:], body[:ENDS_BYTES]):
        prompt, output, cached = _find_usage(part.decode("utf-8", "replace"))
        if prompt is not None or output is not None:
            return ReplyFacts(prompt, output, cached, aborted=finish is not None, error=error)
    return ReplyFacts(aborted=finish is not None, error=error)


def _find_usage(part: str) -> Usage:
    for found in _USAGE.finditer(part):
        try:
            usage, _ = json.JSONDecoder().raw_decode(part, found.end())
        except (ValueError, RecursionError):
            continue
        return usage_tokens(usage)
    return _NO_USAGE
