"""Which of a client's header fields go on to an engine: one rule for all routes.

Everything passes (custom fields, tracing, content-type byte for byte) but: what belongs to this hop only, the client's
credentials, what we answer for ourselves (Expect, Accept-Encoding), and Host. `X-Forwarded-*` pass only behind a
trusted proxy. `x-request-id` is kept when it is sane, else made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gateway.errors import Refusal

TIMEOUT_HEADER = "x-headrace-timeout-s"

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key", b"cookie", b"cookie2", b"x-goog-api-key"})
_OUR_OWN = frozenset({b"host", b"content-length", b"expect", b"accept-encoding", b"x-request-id"})
_FORWARDED = frozenset({b"forwarded", b"via", b"x-real-ip"})
_DROPPED = HOP_BY_HOP | CREDENTIALS | _OUR_OWN
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@\-]{1,128}")
_REFUSED = re.compile(r"q\s*=\s*0(?:\.0*)?")
_READ_TIMEOUT_MAX_S = 86_400.0


def lowered(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The fields with lower-case names, order and repeats kept."""
    return [(name.lower(), value) for name, value in raw]


def to_engine(
    fields: list[tuple[bytes, bytes]], request_id: str, *, trust_forwarded: bool
) -> list[tuple[bytes, bytes]]:
    """The fields that go on, names lower-case, with our x-request-id."""
    dropped = _DROPPED
    for name, value in fields:
        if name == b"connection":
            dropped = dropped | {token.strip() for token in value.lower().split(b",")}
    kept = [
        (name, value)
        for name, value in fields
        if name not in dropped and (trust_forwarded or not (name.startswith(b"x-forwarded-") or name in _FORWARDED))
    ]
    kept.append((b"x-request-id", request_id.encode("ascii")))
    return kept


def for_rules(fields: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Every field a classify rule may look at, as text; repeats joined by a comma, credentials left out."""
    seen: dict[str, str] = {}
    for name, value in fields:
        if name not in CREDENTIALS and name != b"proxy-authorization":
            key, text = name.decode("latin-1"), value.decode("latin-1")
            seen[key] = f"{seen[key]}, {text}" if key in seen else text
    return seen


def sane_request_id(given: str | None) -> str | None:
    """The client's id when it is short and harmless, else None."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


def accepts_coding(accept_encoding: str, coding: str) -> bool:
    """True when a client asked for every coding in a Content-Encoding value, by name or by `*`, and not with q=0."""
    wanted = {
        name.strip()
        for name, _, weight in (part.partition(";") for part in accept_encoding.lower().split(","))
        if not _REFUSED.fullmatch(weight.strip())
    }
    return "*" in wanted or wanted.issuperset(name.strip() for name in coding.lower().split(","))


def read_timeout_s(rule_headers: dict[str, str]) -> float | None:
    """How long the client says it waits; None when it does not say, or where its SDK says nonsense.

    Raises a 400 Refusal for nonsense in our own field: whoever sets that means something by it.
    """
    asked = rule_headers.get(TIMEOUT_HEADER)
    if asked is not None:
        seconds = _seconds(asked)
        if seconds is None:
            raise Refusal(
                400,
                f"{TIMEOUT_HEADER} is {asked[:20]!r}: expected seconds above 0, at most {_READ_TIMEOUT_MAX_S:.0f}; "
                "send a number, or leave the header out",
                reason="invalid_header",
                param=TIMEOUT_HEADER,
            )
        return seconds
    return _seconds(rule_headers.get("x-stainless-read-timeout", ""))


def _seconds(text: str) -> float | None:
    """A number of seconds that somebody may wait, else None."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= _READ_TIMEOUT_MAX_S else None
