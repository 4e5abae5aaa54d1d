"""Where the parts of a JSON text stand: members of an object and items of an array, as offsets into the bytes.

For edits that leave every byte outside them alone: number formats, key order, white space, unknown fields. Exact on valid
JSON, whatever its escapes, nesting and white space; what engines write beside the standard (NaN, broken UTF-8) is passed
over like any other value. On anything else it raises ValueError or IndexError, after time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

_STRUCTURE = re.compile(rb'["{}\[\]]')
_SPACE = re.compile(rb"[ \t\r\n]*")
_SCALAR = re.compile(rb"[^,}\] \t\r\n]+")
_QUOTE, _COMMA, _BACKSLASH = b'",\\'
_OPENING = frozenset(b"{[")
_BRACKET, _CLOSING = b"[]"
_NESTED = (b"[", b"{", b'"')
_NUMBER = frozenset(b"-0123456789")

Span = tuple[int, int]
"""Start and end of a value."""


def members(body: bytes, at: int = 0) -> Iterator[tuple[str, int, int]]:
    """Key, start and end of each member of the object that opens at or after `at`, in order."""
    at = skip_space(body, body.index(b"{", at) + 1)
    while body[at] == _QUOTE:
        key_end = _string_end(body, at)
        key = orjson.loads(body[at:key_end]) if _BACKSLASH in body[at:key_end] else body[at + 1 : key_end - 1].decode()
        start = skip_space(body, skip_space(body, key_end) + 1)
        end = _value_end(body, start)
        yield key, start, end
        at = skip_space(body, end)
        if body[at] != _COMMA:
            return
        at = skip_space(body, at + 1)


def items(body: bytes, at: int = 0) -> Iterator[Span]:
    """Start and end of each item of the array that opens at or after `at`, in order."""
    at = skip_space(body, body.index(b"[", at) + 1)
    while body[at] != _CLOSING:
        end = _value_end(body, at)
        if end == at:
            raise ValueError(f"no JSON value at byte {at}: expected an array's item")
        yield at, end
        at = skip_space(body, end)
        if body[at] != _COMMA:
            return
        at = skip_space(body, at + 1)


def skip_space(body: bytes, at: int) -> int:
    found = _SPACE.match(body, at)
    return found.end() if found else at


def _string_end(body: bytes, at: int) -> int:
    """Index past the closing quote of the string that opens at `at`."""
    while True:
        at = body.index(b'"', at + 1)
        before = at - 1
        while body[before] == _BACKSLASH:
            before -= 1
        if (at - before) % 2:
            return at + 1


def _value_end(body: bytes, at: int) -> int:
    first = body[at]
    if first == _QUOTE:
        return _string_end(body, at)
    if first not in _OPENING:
        found = _SCALAR.match(body, at)
        return found.end() if found else at
    depth = closed = 0
    while True:
        found = _STRUCTURE.search(body, at)
        if found is None:
            raise ValueError("body is not valid JSON: expected a closing bracket; parse it before editing")
        at = found.end()
        mark = body[found.start()]
        if mark == _QUOTE:
            at = _string_end(body, found.start())
        elif mark in _OPENING:
            depth += 1
            if mark == _BRACKET and body[at] in _NUMBER:
                # An embedding is 20 KB of numbers: to its bracket at the speed of memory. What stands up to the next
                # bracket is looked through once, so that this stays linear too.
                if closed < at:
                    closed = body.index(b"]", at)
                if all(body.find(opened, at, closed) < 0 for opened in _NESTED):
                    at = closed
        else:
            depth -= 1
            if not depth:
                return at
