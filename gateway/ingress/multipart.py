"""The one field that the gateway needs of a multipart body: `model`, wherever it stands.

The body is searched in place (25 MB of sound is not copied) and relayed byte for byte with its Content-Type. Parts are
only walked: file names are never used for anything. A body whose boundaries do not hold is refused here, since an
engine may wait for the rest for ever.
"""

from __future__ import annotations

import re

from gateway.errors import Refusal
from gateway.exchange import Facts
from gateway.ingress.facts import MEDIA_TOKENS, MODEL_MAX_CHARS, checked_model

PARTS_MAX = 1_000
PART_HEAD_MAX_BYTES = 16 * 1024

_BOUNDARY = re.compile(r"""boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))""", re.IGNORECASE)
# The line's start anchors it, and nothing is tried twice: else it would take quadratic time on a hostile part head. What
# stands in quotes is stepped over, since a file may be called "x; name=model".
_NAME = re.compile(
    rb"""\r\ncontent-disposition:(?:[^\r\n";]|"(?:[^"\\\r\n]|\\[^\r\n])*+"|;(?![ \t]*name=))*+"""
    rb""";[ \t]*name=(?:"([^"\r\n]*)"|([^;\s"]+))""",
    re.IGNORECASE,
)
_FIRST_LINE = re.compile(rb"(?:\r\n)*+--([^\r\n]{1,70}?)[ \t]*\r\n")


def read_multipart(body: bytes, content_type: str, *, default_model: str | None = None) -> Facts:
    """The facts of a multipart body. Raises a 400 Refusal when it is broken or names no model."""
    model, stream = default_model, False
    for name, start, end in _parts(body, _boundary(content_type)):
        if name == b"model":
            if end - start > 4 * MODEL_MAX_CHARS:
                raise _broken(f"field model has {end - start} bytes: expected the name of a model")
            model = body[start:end].decode("utf-8", "replace").strip()
        elif name == b"stream":
            stream = body[start : min(end, start + 8)].strip().lower() in (b"true", b"1")
    if model is None:
        raise _broken("field model is missing: expected a part with the name of a served model")
    return Facts(model=checked_model(model), stream=stream, prompt_tokens=MEDIA_TOKENS)


def renamed(body: bytes, model: str) -> bytes:
    """The body, which `read_multipart` has accepted, with another model name in it; all else stays.

    The boundary is read off the body's first line with anything on it; a body that begins with other words stays as it is.
    """
    first_line = _FIRST_LINE.match(body)
    if first_line is None:
        return body
    for name, start, end in reversed(_parts(body, first_line[1])):
        if name == b"model":
            body = b"%b%b%b" % (body[:start], model.encode(), body[end:])
    return body


def _boundary(content_type: str) -> bytes:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise _broken("Content-Type has no boundary: expected multipart/form-data; boundary=...")
    return (found[1] or found[2]).encode("latin-1", "replace")


def _parts(body: bytes, boundary: bytes) -> list[tuple[bytes, int, int]]:
    """Name, start and end of each part's content."""
    delimiter = b"--" + boundary
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    if at == 1:
        raise _broken("body does not hold its boundary: send it as the Content-Type says")
    found: list[tuple[bytes, int, int]] = []
    while True:
        at += len(delimiter)
        mark = body[at : at + 2]
        if mark == b"--":
            return found
        line_end = body.find(b"\r\n", at, at + PART_HEAD_MAX_BYTES)
        if line_end < 0 or body[at:line_end].strip(b" \t"):
            raise _broken("a boundary is malformed: expected CRLF or -- after it")
        start = body.find(b"\r\n\r\n", line_end, line_end + PART_HEAD_MAX_BYTES)
        end = body.find(b"\r\n" + delimiter, max(start, line_end))
        if start < 0 or end < 0:
            raise _broken("a part is cut short: expected its head, its content and the closing boundary")
        if len(found) >= PARTS_MAX:
            raise _broken(f"body has more than {PARTS_MAX} parts: send fewer")
        name = _NAME.search(body, line_end, start + 2)
        found.append(((name[1] or name[2] or b"") if name else b"", min(start + 4, end), end))
        at = end + 2


def _broken(message: str) -> Refusal:
    return Refusal(400, f"multipart body: {message}", reason="invalid_multipart")
