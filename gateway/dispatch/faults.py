"""From what went wrong at an engine to what the client is told, and whether another engine may try.

One table, so that the same fault reads the same in the status, the metric and the log (ERR-03): 504 for a time-out,
502 for a broken answer, 503 where no engine is there to answer, the engine's own status where it gave one.

Whether to try elsewhere: never for a 4xx (it would fail there too), except 429, which is this one engine's load; never
after a time-out (the prompt may be prefilled by now: FAI-03), never once a byte has reached the client.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from backends.base import CallFailure, FailureKind
from backends.dialects import EngineError
from gateway.control.pulse import Blame
from gateway.errors import Dialect, Refusal
from policies.vocabulary import Result

RETRY_AFTER_DEFAULT_S = 2.0
_OVERLOADED = frozenset({429, 503, 529})
_NO_ROUTE = re.compile(r"(?:404:? *)?(?:(?:file|page|path|route) )?not found\.?", re.IGNORECASE)
"""What servers say (vLLM, SGLang, llama.cpp, Go's) of a path that they do not have; TGI's says nothing at all. Of a model they
say its name."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed attempt.

    refusal     what the client is told if nobody else takes over
    result      how the work ends in that case
    elsewhere   another engine may try, provided that no byte was sent to the client
    requeue     the gateway itself gave the attempt up: the work goes back to the queue, and no engine is to blame
    body        the engine's own error body, to be relayed instead of a rendering of `refusal`; None: render
    content_type of `body`
    """

    refusal: Refusal
    result: Result
    elsewhere: bool
    requeue: bool = False
    body: bytes | None = None
    content_type: str = "application/json"


_FAILURES: dict[FailureKind, tuple[int, str]] = {
    FailureKind.CONNECT_REFUSED: (503, "refused the connection"),
    FailureKind.NAME_UNRESOLVED: (503, "has an address that does not resolve"),
    FailureKind.CONNECT_TIMEOUT: (504, "did not accept the connection in time (connect_s)"),
    FailureKind.TLS: (502, "failed the TLS handshake"),
    FailureKind.RESET: (502, "reset the connection"),
    FailureKind.CLOSED: (502, "closed the connection without an answer"),
    FailureKind.TRUNCATED: (502, "broke off in the middle of its answer"),
    FailureKind.BAD_RESPONSE: (502, "gave an answer that cannot be read"),
}


def call_failed(failure: CallFailure, engine: str) -> Fault:
    """A call that broke on the wire."""
    status, what = _FAILURES[failure.kind]
    if failure.kind is FailureKind.BAD_RESPONSE:  # of many sorts, and whoever runs the engine has to know which
        what = f"{what}: {failure.detail}"
    result = Result.TIMED_OUT if failure.kind is FailureKind.CONNECT_TIMEOUT else Result.ENGINE_FAILED
    refusal = Refusal(
        status=status,
        message=f"engine {engine} {what}; try again",
        type="timeout_error" if status == 504 else "server_error",
        reason=failure.kind.value,
        retry_after_s=RETRY_AFTER_DEFAULT_S if status == 503 else None,
    )
    return Fault(refusal, result, elsewhere=True)


def preempted(engine: str) -> Fault:
    """We gave the attempt up for a work with an objective."""
    refusal = Refusal(
        503,
        f"engine {engine} was needed for urgent requests; try again",
        "server_error",
        "preempted",
        retry_after_s=RETRY_AFTER_DEFAULT_S,
    )
    return Fault(refusal, Result.UNAVAILABLE, elsewhere=True, requeue=True)


def timed_out(timer: str, bound_s: float, engine: str) -> Fault:
    """One of our own bounds passed; `timer` is its name in the settings."""
    what = "had not answered in full after" if timer == "total_s" else "kept silent past"
    refusal = Refusal(
        status=504,
        message=f"engine {engine} {what} {timer} = {bound_s:g} s; shorten the request or raise the bound",
        type="timeout_error",
        reason=timer.removesuffix("_s"),
    )
    return Fault(refusal, Result.TIMED_OUT, elsewhere=False)


def engine_said(error: EngineError, engine: str) -> Fault:
    """An error the engine reported inside a 200 (an error event, an aborted finish)."""
    client_error = 400 <= error.status < 500 and error.reason != "overloaded"
    refusal = Refusal(
        status=error.status,
        message=error.message or f"engine {engine} reported an error without a message",
        type=error.type or ("invalid_request_error" if client_error else "server_error"),
        reason=error.reason,
        code=error.code,
        param=error.param,
        retry_after_s=RETRY_AFTER_DEFAULT_S if error.status in {429, 503} else None,
    )
    result = Result.CLIENT_ERROR if client_error else Result.ENGINE_FAILED
    return Fault(refusal, result, elsewhere=not client_error)


def truncated(engine: str) -> Fault:
    """A stream whose framing ended properly but whose dialect's terminator never came."""
    refusal = Refusal(
        status=502,
        message=f"engine {engine} ended its stream without finishing the answer; what was received is incomplete",
        type="server_error",
        reason="truncated",
    )
    return Fault(refusal, Result.ENGINE_FAILED, elsewhere=True)


def no_json(engine: str) -> Fault:
    """A whole answer that is labelled as JSON and is none."""
    refusal = Refusal(
        status=502,
        message=f"engine {engine} answered with an empty, cut or unreadable body where JSON was announced; try again",
        type="server_error",
        reason="bad_response",
    )
    return Fault(refusal, Result.ENGINE_FAILED, elsewhere=True)


def no_stream(content_type: str, engine: str) -> Fault:
    """An answer in one piece to a client whose event stream was opened while it waited. No other engine's kind differs."""
    refusal = Refusal(
        status=400,
        message=f"engine {engine} answers this request with {content_type[:60]!r} and no stream; leave out `stream`",
        reason="no_stream",
        param="stream",
    )
    return Fault(refusal, Result.CLIENT_ERROR, elsewhere=False)


def engine_answered(
    error: EngineError,
    engine: str,
    *,
    status: int,
    body: bytes,
    content_type: str,
    retry_after_s: float | None,
    headers: Sequence[tuple[str, str]],
    dialect: Dialect,
    path: str,
) -> Fault:
    """An answer with a status of 300 and more; `error` is `body` understood.

    The body is kept as the engine wrote it where the client's dialect can read it; a 401, 403 or 407 concerns *our*
    credentials on the way to the engine and a 3xx our address of it, so neither is the client's business.

    retry_after_s   the engine's own hint, None for none
    headers         the engine's other fields, kept with its error (rate limits, an id of its own)
    path            that was asked for: a 404 that only says "not found" is about it
    """
    if status < 400 or status in {401, 403, 407}:
        what = "redirected us" if status < 400 else "refused the gateway's credentials"
        refusal = Refusal(
            status=502,
            message=f"engine {engine} {what} (status {status}); its address or api_key in the settings is wrong",
            type="server_error",
            reason="engine_redirect" if status < 400 else "engine_auth",
        )
        return Fault(refusal, Result.ENGINE_FAILED, elsewhere=True)
    if status == 404 and (not body.strip() or _NO_ROUTE.fullmatch(error.message.strip())):
        refusal = Refusal(
            status=404,
            message=f"engine {engine} has no route {path[:100]}: use another route, or a model of an engine that has it",
            reason="route_not_served",
            headers=tuple(headers),
        )
        return Fault(refusal, Result.CLIENT_ERROR, elsewhere=False)
    overloaded = status in _OVERLOADED
    client_error = status < 500 and not overloaded
    if overloaded and not retry_after_s:
        retry_after_s = RETRY_AFTER_DEFAULT_S
    refusal = Refusal(
        status=status,
        message=error.message or f"engine {engine} answered {status}",
        type=error.type or ("invalid_request_error" if client_error else "server_error"),
        reason="engine_overloaded" if overloaded else f"engine_{status}",
        code=error.code,
        param=error.param,
        retry_after_s=retry_after_s,
        headers=tuple(headers),
    )
    verbatim = body if _speaks(body, content_type, dialect) else None
    result = Result.CLIENT_ERROR if client_error else Result.ENGINE_FAILED
    return Fault(refusal, result, elsewhere=not client_error, body=verbatim, content_type=content_type)


def blame(fault: Fault | None) -> Blame:
    """What the end of an attempt says of its engine.

    A proper refusal of a bad request is as good as an answer (FAI-04). A full engine works. Past total_s it is our bound,
    or the request's length, that ended it.
    """
    if fault is None or fault.result is Result.CLIENT_ERROR:
        return Blame.SERVED
    reason = fault.refusal.reason
    if _SHUTTING_DOWN in fault.refusal.message:
        return Blame.DRAINING
    if fault.requeue or "overloaded" in reason or reason == "total":
        return Blame.NEITHER
    return Blame.FAILED


_SHUTTING_DOWN = "after shutdown"
"""How vLLM refuses new work while it drains, with a 500 and under a health page that says 200."""


def unasked_coding(coding: str, engine: str) -> Fault:
    """A content coding that neither we nor the client asked for and that we cannot undo."""
    refusal = Refusal(
        status=502,
        message=f"engine {engine} answered with content-encoding {coding[:40]!r}, which was not asked for",
        type="server_error",
        reason="bad_response",
    )
    return Fault(refusal, Result.ENGINE_FAILED, elsewhere=True)


def _speaks(body: bytes, content_type: str, dialect: Dialect) -> bool:
    """True when a client of this dialect finds the error where it looks for it."""
    if not content_type.lower().startswith("application/json"):
        return False
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(parsed, dict):
        return False
    if dialect is Dialect.TGI:
        return isinstance(parsed.get("error"), str)
    if dialect is Dialect.MESSAGES and parsed.get("type") != "error":
        return False
    return isinstance(parsed.get("error"), dict)
