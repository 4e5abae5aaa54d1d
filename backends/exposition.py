"""Prometheus text (0.0.4 and OpenMetrics) to numbers, for the few names that are wanted.

A vLLM page has some 650 lines, most of them histogram buckets nobody here reads, so only the wanted names are looked for. Of wanted lines everything is understood: escaped label values, braces and spaces inside them, time stamps,
exemplars, NaN and infinities. A malformed line is skipped, as a scraper would have to; what a number means (absurd or
not) is for the caller.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import lru_cache

Series = list[tuple[dict[str, str], float]]
"""The samples of one name: labels and value, in the page's order; repeated ones are kept."""

LABELS_KEPT = 8192
"""Sets of labels that are known again; past that many the oldest are read anew."""

_LABELS = rb'\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}'
_REST = re.compile(rb"[ \t]*(" + _LABELS + rb")?[ \t]*([^\s#{}]+)(?:[ \t]+[-+.\deE]+)?\s*(?:#.*)?$", re.DOTALL)
_LABEL = re.compile(rb'[ \t]*([^\s",=]+)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)', re.DOTALL)
_INDENTED = re.compile(rb"\n[ \t]+")
_TIME = re.compile(rb"[-+.\deE]+")
_AFTER_NAME = frozenset({b"{", b" ", b"\t"})
_ESCAPES = {b"\\\\": b"\\", b'\\"': b'"', b"\\n": b"\n"}
_ESCAPE = re.compile(rb"\\.", re.DOTALL)


def parse(text: bytes, wanted: Collection[str]) -> dict[str, Series]:
    """The series of the wanted sample names (a counter's ends in _total). A name without a sample is absent.

    Labels are shared between samples and pages: not to be changed.
    """
    return _search(b"\n" + text, wanted) or _search(_INDENTED.sub(b"\n", b"\n" + text), wanted)


def _search(text: bytes, wanted: Collection[str]) -> dict[str, Series]:
    """Names are searched for, and the labels that were seen before are known: fifty engines are read twice a second."""
    found: dict[str, Series] = {}
    find = text.find
    for name in wanted:
        needle = b"\n" + name.encode()
        at = find(needle)
        while at >= 0:
            after = at + len(needle)
            end = find(b"\n", after)
            if text[after : after + 1] in _AFTER_NAME:
                sample = _read_sample(text[after:end] if end >= 0 else text[after:])
                if sample is not None:
                    found.setdefault(name, []).append(sample)
            at = find(needle, after)
    return found


def _read_sample(line: bytes) -> tuple[dict[str, str], float] | None:
    """What follows a name on its line."""
    if b"#" in line:  # an exemplar, or a label that holds one
        rest = _REST.match(line)
        if rest is None:
            return None
        braced, value = rest[1], rest[2]
    else:
        cut = line.rfind(b"}") + 1
        braced = line[:cut].strip() or None
        words = line[cut:].split()
        if not 1 <= len(words) <= 2 or (len(words) == 2 and not _TIME.fullmatch(words[1])):
            return None
        value = words[0]
    labels = _read_labels(braced)
    if labels is None or b"_" in value:  # Python reads 1_0 as a number, the format does not
        return None
    try:
        return labels, float(value)
    except ValueError:
        return None


@lru_cache(LABELS_KEPT)
def _read_labels(braced: bytes | None) -> dict[str, str] | None:
    if braced is None:
        return {}
    if braced[:1] != b"{":
        return None
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
