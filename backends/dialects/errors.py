"""Errors as engines write them, in any of their shapes, understood as one value.

    {"error": {"message", "type", "param", "code"}}        OpenAI, vLLM, llama.cpp, SGLang
    {"object": "error", "message", "type", "code"}         vLLM until 0.10
    {"error": "text", "error_type": "overloaded"}          TGI
    {"error": {"message", "http_status_code"}}             TGI's OpenAI routes, which say 422 for every error
    {"error": "Unauthorized"}                              vLLM's key check
    {"type": "error", "message", "code"}                   Responses, in a stream
    {"type": "error", "error": {"type", "message"}}        Messages
    {"detail": "Not Found"} or {"detail": [{"msg"}]}       FastAPI

and in a stream as an event named `error`, whose data may be plain text.

`"error": null` is no error. A message is the engine's own and may quote the client's prompt: it may go back to that
client and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from backends.dialects.payload import JsonObject, load, text

MESSAGE_MAX_CHARS = 300
"""Longest plain-text error body taken for a message; longer ones are pages of some proxy."""

_STATUS_OF_WORD = {
    "overloaded": 429,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "overloaded_error": 503,
    "service unavailable": 503,
    "serviceunavailableerror": 503,
    "unavailable_error": 503,
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "bad request": 400,
    "invalid_prompt": 400,
    "exceed_context_size_error": 400,
    "context_length_exceeded": 400,
    "validation": 422,
    "template_error": 422,
    "tool_error": 422,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "notfounderror": 404,
    "request_too_large": 413,
}
_TGI_OVERLOADED = "Model is overloaded"
_TGI_FAULTS = ("Request failed during generation", "Incomplete generation")


@dataclass(frozen=True, slots=True)
class EngineError:
    """What went wrong, in the engine's words.

    status   HTTP status it stands for, 400 to 599
    type     the engine's error type, "" if it gave none
    reason   short stable word: "aborted", "overloaded" (429, 503, 529), "rejected" (other 4xx), "engine_error"
    """

    status: int
    message: str
    type: str = ""
    code: str | int | None = None
    param: str | None = None
    reason: str = "engine_error"


def aborted(finish_reason: str) -> EngineError:
    """The error behind a finish reason that only looks like an end: 503 for "abort", 502 for "error"."""
    return EngineError(
        status=503 if finish_reason == "abort" else 502,
        message=f"the engine ended the answer with finish_reason {finish_reason!r} before it was complete",
        type="server_error",
        code=finish_reason,
        reason="aborted",
    )


def error_in(payload: Mapping[str, object]) -> EngineError | None:
    """The error that a payload of a 200 stands for, None when it is none."""
    error = payload.get("error")
    if error:
        if isinstance(error, dict):
            return error_of(error, payload)
        return error_of({"message": error if isinstance(error, str) else payload.get("message")}, payload)
    if payload.get("object") == "error" or (payload.get("type") == "error" and "choices" not in payload):
        return error_of(payload, payload)
    return None


def error_without_its_name(payload: JsonObject) -> EngineError | None:
    """The error in a payload that says nothing else: a detail, a list of errors, or a message with an HTTP status.

    For streams whose payloads are known by their fields; in any other object these words may be part of an answer.
    """
    errors = payload.get("errors")
    first = errors[0] if isinstance(errors, list) and errors else errors
    if isinstance(first, dict):
        return error_of(first, payload)
    if first and isinstance(first, str):
        return error_of({"message": first}, payload)
    numbers = (payload.get("code"), payload.get("status"), payload.get("status_code"))
    if payload.get("detail") or (payload.get("message") and any(map(_http_status, numbers))):
        return error_of({**payload, "message": _plain_message(payload)}, payload)
    return None


def error_named(data: bytes, payload: JsonObject | None) -> EngineError:
    """The error in an event that is called one: an object of any form, or plain text."""
    if payload is None:
        return EngineError(500, _plain_text(data))
    return error_of({**payload, "message": _plain_message(payload)}, payload)


def error_of(error: Mapping[str, object], payload: Mapping[str, object]) -> EngineError:
    """One error object; `payload` is what it stood in, whose error_type and status fill the gaps."""
    message = text(error.get("message")) or text(error.get("detail")) or text(error.get("error"))
    kind = text(error.get("type")) or text(payload.get("error_type")) or text(error.get("error_type"))
    kind = "" if kind == "error" else kind
    code = error.get("code")
    known_code = code if isinstance(code, (str, int)) and not isinstance(code, bool) else None
    numbers = (code, error.get("status"), error.get("status_code"), payload.get("status"))
    status = next((found for number in numbers if (found := _http_status(number))), 0)
    if not status and (status := _http_status(error.get("http_status_code")) or 0) and message.startswith(_TGI_FAULTS):
        status = 500
    if not status:
        words = (kind, known_code if isinstance(known_code, str) else "")
        status = next((found for word in words if (found := _STATUS_OF_WORD.get(word.lower()))), 500)
    if _TGI_OVERLOADED in message:
        status = 429
    return EngineError(status, message, kind, known_code, text(error.get("param")) or None, _reason(status))


def read_error(body: bytes, status: int) -> EngineError:
    """Understand the body of an answer with a status of 300 and more; the status stays the answer's own.

    A status outside 400 to 599 (a redirect) becomes 502. A body that says nothing readable leaves the message "".
    """
    payload = load(body)
    status = status if 400 <= status <= 599 else 502
    if isinstance(payload, dict):
        found = error_in(payload) or error_of({**payload, "message": _plain_message(payload)}, payload)
    else:
        found = EngineError(status, text(payload) or _plain_text(body))
    return replace(found, status=status, reason=_reason(status))


def _plain_message(payload: Mapping[str, object]) -> str:
    detail = payload.get("detail")
    if isinstance(detail, list):
        said = [text(item.get("msg")) for item in detail if isinstance(item, dict)]
        return "; ".join(filter(None, said))
    return text(payload.get("message")) or text(detail)


def _plain_text(body: bytes) -> str:
    said = body[: MESSAGE_MAX_CHARS + 1].decode("utf-8", "replace").strip()
    return "" if len(body) > MESSAGE_MAX_CHARS or "<" in said else said


def _http_status(value: object) -> int | None:
    if isinstance(value, str) and len(value) == 3 and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599:
        return value
    return None


def _reason(status: int) -> str:
    if status in {429, 503, 529}:
        return "overloaded"
    return "rejected" if status < 500 else "engine_error"
