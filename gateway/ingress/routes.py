"""What the public listener serves: one table from a normalised path to who answers it and in which dialect.

A path is normalised once, before anything looks at it: the mount prefix goes, doubled and trailing slashes go, escapes
of unreserved characters are undone (`%63hat` is `chat`, `%2F` stays). Nothing is ever redirected: a redirected POST
loses its body or its key. Every POST of work takes the same code path, so headers, keys and bounds are treated alike;
a POST to a `/v1/` path that is not listed goes to an engine that speaks it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, unquote

from gateway.errors import Dialect, Refusal


class Answerer(StrEnum):
    """Who answers a route."""

    ENGINE = "engine"
    STORED = "stored"
    MODELS = "models"
    MODEL = "model"
    INFO = "info"
    HEALTH = "health"
    CAPACITY = "capacity"


@dataclass(frozen=True, slots=True)
class Route:
    """One row.

    methods        allowed ones besides OPTIONS
    always_stream  the path itself asks for server-sent events
    model_optional a body without a model goes to the configured default (TGI names none)
    listed         the path is known to exist; else only an engine can tell
    """

    answerer: Answerer
    methods: tuple[str, ...]
    dialect: Dialect = Dialect.OPENAI
    always_stream: bool = False
    model_optional: bool = False
    listed: bool = True

    @property
    def allow(self) -> str:
        """Value of the Allow field."""
        return ", ".join((*self.methods, "OPTIONS"))


@dataclass(frozen=True, slots=True)
class Target:
    """A request target taken apart: normalised path, and the query as the client sent it, less credentials."""

    path: str
    query: str

    @property
    def line(self) -> bytes:
        """What goes on the request line to an engine."""
        return (f"{self.path}?{self.query}" if self.query else self.path).encode("ascii")


def parse_target(raw: str, mount_path: str) -> Target:
    """Take a request line's target apart and normalise its path. Raises a 404 Refusal for what can be no path of ours.

    raw         origin-form or absolute-form, as received
    mount_path  "" or a prefix such as "/llm"
    """
    if not raw.startswith("/"):
        _, _, rest = raw.partition("://")
        raw = rest[rest.find("/") :] if "/" in rest else "/"
    path, _, query = raw.partition("#")[0].partition("?")
    path = _normalise(path)
    if mount_path:
        mount = "/" + mount_path.strip("/")
        if path == mount or path.startswith(mount + "/"):
            path = path[len(mount) :] or "/"
        elif path not in _EVERYWHERE:
            raise _no_such_path(path, f"the gateway is mounted under {mount}")
    if not query.isascii():
        query = quote(query, safe=_QUERY_SAFE, errors="surrogateescape")
    return Target(path, "&".join(part for part in query.split("&") if not _is_credential(part)) if query else "")


def find(path: str) -> Route:
    """The route of a normalised path. Raises a 404 Refusal."""
    route = _EXACT.get(path)
    if route is not None:
        return route
    if path.startswith("/v1/v1/") or path == "/v1/v1":
        raise _no_such_path(path, "the base URL ends with /v1 already; use it once")
    if f"{path}/".startswith(_STATEFUL):
        raise _no_such_path(path, "files and batches are not kept by this gateway")
    for prefix, prefixed in _PREFIXES:
        if path.startswith(prefix):
            return prefixed
    if path in _WITHOUT_V1:
        raise _no_such_path(path, f"did you mean /v1{path}? The base URL ends with /v1")
    raise _no_such_path(path, _SEE)


def wrong_method(method: str, path: str, route: Route) -> Refusal:
    """Why a path is not served by this method: 405 for one that exists, 404 for one that nobody is known to have."""
    if not route.listed:
        return _no_such_path(path, _SEE)
    return Refusal(
        405,
        f"method {method} is not allowed here: use {route.allow}",
        reason="method_not_allowed",
        headers=(("allow", route.allow),),
    )


def last_segments(path: str, prefix: str) -> str:
    """What follows a prefix, escapes undone: a model id may hold slashes, escaped or not."""
    return unquote(path.removeprefix(prefix))


_POST = ("POST",)
_GET = ("GET", "HEAD")
_OPENAI = Route(Answerer.ENGINE, _POST)
_EXACT = {
    "/": Route(Answerer.ENGINE, _POST, Dialect.TGI, model_optional=True),
    "/generate": Route(Answerer.ENGINE, _POST, Dialect.TGI, model_optional=True),
    "/generate_stream": Route(Answerer.ENGINE, _POST, Dialect.TGI, always_stream=True, model_optional=True),
    "/info": Route(Answerer.INFO, _GET, Dialect.TGI),
    "/health": Route(Answerer.HEALTH, _GET),
    "/ping": Route(Answerer.HEALTH, _GET),
    "/v1/headrace/capacity": Route(Answerer.CAPACITY, _GET),
    "/v1/models": Route(Answerer.MODELS, _GET),
    "/v1/responses": Route(Answerer.ENGINE, _POST, Dialect.RESPONSES),
    "/v1/messages": Route(Answerer.ENGINE, _POST, Dialect.MESSAGES),
    "/v1/messages/count_tokens": Route(Answerer.ENGINE, _POST, Dialect.MESSAGES),
    **dict.fromkeys(
        (
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/embeddings",
            "/v1/moderations",
            "/v1/rerank",
            "/v1/score",
            "/v1/pooling",
            "/v1/classify",
            "/v1/audio/speech",
            "/v1/audio/transcriptions",
            "/v1/audio/translations",
            "/v1/images/generations",
            "/v1/images/edits",
            "/v1/images/variations",
        ),
        _OPENAI,
    ),
    "/rerank": _OPENAI,
    "/v2/rerank": _OPENAI,
    "/score": _OPENAI,
    "/pooling": _OPENAI,
    "/classify": _OPENAI,
    "/tokenize": Route(Answerer.ENGINE, _POST, model_optional=True),
    "/detokenize": Route(Answerer.ENGINE, _POST, model_optional=True),
}
_PREFIXES = (
    ("/v1/models/", Route(Answerer.MODEL, _GET)),
    ("/v1/responses/", Route(Answerer.STORED, ("GET", "POST", "DELETE"), Dialect.RESPONSES)),
    ("/v1/", Route(Answerer.ENGINE, _POST, listed=False)),
)
_STATEFUL = ("/v1/files/", "/v1/batches/", "/v1/uploads/", "/v1/fine_tuning/", "/v1/metrics/", "/v1/admin/")
_SEE = "see the documentation for the routes served"
_WITHOUT_V1 = frozenset({"/chat/completions", "/completions", "/embeddings", "/models", "/responses", "/messages"})
_EVERYWHERE = frozenset({"/health", "/ping"})
_SLASHES = re.compile(r"/{2,}")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PATH = re.compile(r"/[A-Za-z0-9\-._~!$&'()*+,;=:@/%]*")
# Also between escaped slashes and before a parameter: a server behind us may undo the one and cut off the other.
_DOT_SEGMENT = re.compile(r"(?:^|/|%2F|%5C)\.\.?(?:$|/|%2F|%5C|;|%3B)")
_QUERY_SAFE = "!$&'()*+,;=:@/?%-._~"
_CREDENTIAL_PARAMETER = re.compile(
    r"(?:.*[-_])?api[-_]?key|key|(?:subscription|access|auth)[-_]key|(?:(?:access|auth|bearer|id)[-_]?)?token"
    r"|authorization|password|secret",
    re.IGNORECASE,
)


def _is_credential(part: str) -> bool:
    """Whether a part of a query is called like a key, however that is spelled: engines write their queries to a log."""
    return _CREDENTIAL_PARAMETER.fullmatch(unquote(part.partition("=")[0]).strip()) is not None


def _normalise(path: str) -> str:
    if "%" in path:
        path = _ESCAPE.sub(_undo_unreserved, path)
    path = _SLASHES.sub("/", path)
    if len(path) > 1:
        path = path.rstrip("/")
    if not _PATH.fullmatch(path) or "%00" in path or _DOT_SEGMENT.search(path):
        raise _no_such_path("", "it must be plain ASCII without dot segments")
    return path


def _undo_unreserved(escape: re.Match[str]) -> str:
    character = chr(int(escape[1], 16))
    return character if character in _UNRESERVED else escape[0].upper()


def _no_such_path(path: str, hint: str) -> Refusal:
    shown = f" {path[:100]}" if path else ""
    return Refusal(404, f"path{shown} is not served here: {hint}", "not_found_error", "unknown_path")
