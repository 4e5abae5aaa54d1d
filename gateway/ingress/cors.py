"""What a browser is told. Preflights need no key, and every answer, errors too, carries the same fields.

Origins are allowed by name or all by "*"; credentials (cookies) are never allowed, so a wildcard is safe: a page can use
the gateway only with an API key that it has anyway.
"""

from __future__ import annotations

import re

_EXPOSED = "*"
_FIELD_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+\-.^_`|~]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+\-.^_`|~]+)*")
_REQUEST_HEADERS_MAX = 2048
_MAX_AGE_S = 600


class Cors:
    """See the module header. origins: allowed ones; () sends no CORS fields, ("*",) allows all."""

    __slots__ = ("_all", "_origins")

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._all = "*" in origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    def response_headers(self, origin: str | None) -> list[tuple[str, str]]:
        """Fields for an answer to a request from `origin` (None: not a browser's)."""
        if origin is None or not self._origins:
            return []
        if self._all:
            return [("access-control-allow-origin", "*"), ("access-control-expose-headers", _EXPOSED)]
        if origin.lower() not in self._origins:
            return [("vary", "origin")]
        return [
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", _EXPOSED),
            ("vary", "origin"),
        ]

    def preflight_headers(self, origin: str | None, requested: str | None, allow: str) -> list[tuple[str, str]]:
        """Further fields for OPTIONS. requested: the client's Access-Control-Request-Headers; allow: the methods."""
        if not any(name == "access-control-allow-origin" for name, _ in self.response_headers(origin)):
            return []
        names = "authorization, content-type"
        if requested and len(requested) <= _REQUEST_HEADERS_MAX and _FIELD_NAMES.fullmatch(requested.strip()):
            names = requested.strip()
        return [
            ("access-control-allow-methods", allow),
            ("access-control-allow-headers", names),
            ("access-control-max-age", str(_MAX_AGE_S)),
        ]
