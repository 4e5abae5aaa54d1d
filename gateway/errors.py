"""Every refusal and failure the gateway can answer with, and how each dialect spells it; and why it may not start.

A `Refusal` is decided once and rendered late: as an HTTP status and JSON body while nothing was sent, else as an
error event inside the stream that is already open. Four dialects are spoken:

    openai      {"error": {"message", "type", "param", "code"}}          event: data: {...}
    responses   the same body; in a stream an event of type `error` with sequence_number, code, message
    messages    {"type": "error", "error": {"type", "message"}}          event: error
    tgi         {"error": message, "error_type": type}

Messages say what was wrong, what was expected and what to do. They never hold a key, a prompt or an engine's URL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import orjson


class Dialect(StrEnum):
    """How a route spells answers, streams and errors."""

    OPENAI = "openai"
    RESPONSES = "responses"
    MESSAGES = "messages"
    TGI = "tgi"


@dataclass(slots=True, eq=False)
class Refusal(Exception):
    """An answer that is not the engine's result. Never changed once made; not frozen, since raising one sets fields.

    status         HTTP status, 400 to 599
    type           OpenAI error type, e.g. "invalid_request_error"
    reason         short stable word for metrics and logs, e.g. "queue_full", "first_byte_timeout"
    retry_after_s  hint for the client, 1 to 60; None: no hint
    predicted_ttft_s  time to first token that was predicted for the request, told in the body; None: not known
    headers        further response headers, e.g. WWW-Authenticate
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    reason: str = ""
    code: str | int | None = None
    param: str | None = None
    retry_after_s: float | None = None
    predicted_ttft_s: float | None = None
    headers: tuple[tuple[str, str], ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.status} {self.reason or self.type}: {self.message}"


def model_not_found(name: str) -> Refusal:
    """404 in the words of OpenAI, whose SDKs look for the code."""
    return Refusal(
        404,
        f"The model `{name[:100]}` does not exist: GET /v1/models lists those served.",
        reason="model_not_found",
        code="model_not_found",
        param="model",
    )


class StartError(Exception):
    """The gateway cannot start, for a reason that an operator can put right: the message says which, and how."""


def error_object(refusal: Refusal) -> dict[str, object]:
    """The OpenAI error object, with status and retry_after_s added where the client cannot read headers."""
    return {
        "message": refusal.message,
        "type": refusal.type,
        "param": refusal.param,
        "code": _code(refusal),
        **({} if refusal.predicted_ttft_s is None else {"predicted_ttft_s": round(refusal.predicted_ttft_s, 3)}),
    }


def render_body(refusal: Refusal, dialect: Dialect) -> bytes:
    """The JSON body for an answer whose status carries the refusal."""
    if dialect is Dialect.MESSAGES:
        return orjson.dumps({"type": "error", "error": {"type": refusal.type, "message": refusal.message}})
    if dialect is Dialect.TGI:
        return orjson.dumps({"error": refusal.message, "error_type": _tgi_type(refusal)})
    return orjson.dumps({"error": error_object(refusal)})


def render_event(refusal: Refusal, dialect: Dialect, *, sequence_number: int = 0) -> bytes:
    """One whole SSE event for a stream that is already open.

    sequence_number   the next one of a Responses stream; ignored by the other dialects
    """
    hint = {} if refusal.retry_after_s is None else {"retry_after_s": refusal.retry_after_s}
    if dialect is Dialect.RESPONSES:
        event: dict[str, object] = {
            "type": "error",
            "sequence_number": sequence_number,
            "code": _code(refusal),
            "message": refusal.message,
            "param": refusal.param,
            "status": refusal.status,
            **hint,
        }
        return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"
    if dialect is Dialect.MESSAGES:
        inner = {"type": refusal.type, "message": refusal.message, "status": refusal.status, **hint}
        return b"event: error\ndata: " + orjson.dumps({"type": "error", "error": inner}) + b"\n\n"
    if dialect is Dialect.TGI:
        flat = {"error": refusal.message, "error_type": _tgi_type(refusal), "status": refusal.status}
        return b"data: " + orjson.dumps({**flat, **hint}) + b"\n\n"
    inner = {**error_object(refusal), "status": refusal.status, **hint}
    return b"data: " + orjson.dumps({"error": inner}) + b"\n\n"


def _code(refusal: Refusal) -> str:
    """A string in any case, as OpenAI has it: engines' own codes may be numbers, and what reads ours need not expect that."""
    return str(refusal.code or refusal.reason or refusal.type)


_TGI_TYPES = frozenset(
    {"generation", "incomplete_generation", "overloaded", "validation", "template_error", "tool_error"}
)
_TGI_TYPE_OF_STATUS = {400: "validation", 413: "validation", 422: "validation", 429: "overloaded", 503: "overloaded"}


def _tgi_type(refusal: Refusal) -> str:
    """The error_type by which TGI's clients choose their exception: the engine's own word, else that of the status.

    Where TGI has no word (a key, a path, a model), ours says more than a wrong one of theirs.
    """
    if refusal.type in _TGI_TYPES:
        return refusal.type
    if refusal.status >= 500 and refusal.status != 503:
        return "generation"
    return _TGI_TYPE_OF_STATUS.get(refusal.status) or refusal.reason or refusal.type
