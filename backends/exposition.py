"""Prometheus text (0.0.4 and OpenMetrics) to numbers, for the few names that are wanted.

A vLLM page has some 650 lines, most of them histogram buckets nobody here reads, so a line is looked at only as far as
its name. Of wanted lines everything is understood: escaped label values, braces and spaces inside them, time stamps,
exemplars, NaN and infinities. A malformed line is skipped, as a scraper would have to; what a number means (absurd or
not) is for the caller.
"""

from __future__ import annotations

import re
from collections.abc import Collection

Series = list[tuple[dict[str, str], float]]
"""The samples of one name: labels and value, in the page's order; repeated ones are kept."""

_LABELS = rb'\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}'
_REST = re.compile(rb"[ \t]*(" + _LABELS + rb")?[ \t]*([^\s#{}]+)(?:[ \t]+[-+.\deE]+)?\s*(?:#.*)?$", re.DOTALL)
_LABEL = re.compile(rb'[ \t]*([^\s",=]+)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)', re.DOTALL)
_NAME = re.compile(rb"[ \t]*([^\s{#]+)")
_ESCAPES = {b"\\\\": b"\\", b'\\"': b'"', b"\\n": b"\n"}
_ESCAPE = re.compile(rb"\\.", re.DOTALL)


def parse(text: bytes, wanted: Collection[str]) -> dict[str, Series]:
    """The series of the wanted sample names (a counter's ends in _total). A name without a sample is absent."""
    names = {name.encode(): name for name in wanted}
    found: dict[str, Series] = {}
    match_name = _NAME.match
    for line in text.split(b"\n"):
        start = match_name(line)
        if start is None:
            continue
        name = names.get(start[1])
        if name is None:
            continue
        sample = _read_sample(line, start.end())
        if sample is not None:
            found.setdefault(name, []).append(sample)
    return found


def _read_sample(line: bytes, at: int) -> tuple[dict[str, str], float] | None:
    rest = _REST.match(line, at)
    if rest is None or b"_" in rest[2]:  # Python reads 1_0 as a number, the format does not
        return None
    labels = _read_labels(rest[1])
    if labels is None:
        return None
    try:
        return labels, float(rest[2])
    except ValueError:
        return None


def _read_labels(braced: bytes | None) -> dict[str, str] | None:
    if braced is None:
        return {}
    inner = braced[1:-1].strip()
    labels: dict[str, str] = {}
    at = 0
    while at < len(inner):
        label = _LABEL.match(inner, at)
        if label is None:
            return None
        value = label[2]
        if b"\\" in value:
            value = _ESCAPE.sub(lambda escape: _ESCAPES.get(escape[0], escape[0]), value)
        labels[label[1].decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        at = label.end()
    return labels
