"""Bytes of an HTTP/1.1 answer's head, and whole answers for connections on which no request could be read.

One `Server`, one `Date`, and one `Connection` field by our own rule: the engine's are never copied beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus

from gateway.errors import Dialect, Refusal, render_body

SERVER = "headrace"

JSON = ("content-type", "application/json")


class DateLine:
    """The `Server` and `Date` fields as whole lines, made at most once a second.

    wall_s gives seconds since the epoch.
    """

    __slots__ = ("_line", "_second", "_wall_s")

    def __init__(self, wall_s: Callable[[], float]) -> None:
        self._wall_s = wall_s
        self._second = -1
        self._line = ""

    def __call__(self) -> str:
        second = int(self._wall_s())
        if second != self._second:
            self._second = second
            self._line = f"server: {SERVER}\r\ndate: {formatdate(second, usegmt=True)}\r\n"
        return self._line


def head(status: int, own_lines: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Status line and fields. own_lines are whole lines with their ends; fields that hold a line break are left out."""
    lines = [_STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n", own_lines]
    for name, value in headers:
        if "\n" not in value and "\r" not in value:
            lines.append(f"{name}: {value}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode("latin-1", "replace")


def refusal_headers(refusal: Refusal, content_type: str = JSON[1]) -> list[tuple[str, str]]:
    """The refusal's own fields, with a Retry-After that SDKs honour (whole seconds, 1 to 60)."""
    headers = [(JSON[0], content_type), *refusal.headers]
    if refusal.retry_after_s is not None:
        headers.append(("retry-after", str(min(60, max(1, math.ceil(refusal.retry_after_s))))))
    return headers


def closing_answer(refusal: Refusal, date_line: DateLine) -> bytes:
    """A whole answer after which the connection ends, for when there is no request to answer to."""
    body = render_body(refusal, Dialect.OPENAI)
    own = f"{date_line()}content-length: {len(body)}\r\nconnection: close\r\n"
    return head(refusal.status, own, refusal_headers(refusal)) + body


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
