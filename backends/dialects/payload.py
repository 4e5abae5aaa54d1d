"""What the JSON payloads of all dialects have in common: tolerant decoding, token counts, aborted finishes.

Engines write JSON that strict parsers refuse (NaN in logprobs, lone surrogates, broken UTF-8); a reader that gave up
on it would miss a finish or an error. Everything here answers None or a default instead of raising, and gives nothing
that cannot be written as JSON again, since a message or a code goes on to the client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import orjson

ABORTED_FINISHES = frozenset({"abort", "error"})
"""Finish reasons with which engines end an answer that is none: on shutdown, on /abort_requests, on a crash."""

INT_MAX_DIGITS = 19
"""Every whole number with fewer digits has 64 bits."""

COUNT_MAX = 1_000_000_000
"""More tokens than one answer can cost: a number beyond it is a mistake, and would spoil every sum that it enters."""

JsonObject = dict[str, object]


def load(data: bytes) -> object:
    """The JSON value of `data`; None when it holds none (which JSON's own null is not told from)."""
    try:
        value: object = orjson.loads(data)
    except ValueError:
        try:
            value = json.loads(data.decode("utf-8", "replace"), parse_int=_whole)
            if b"\\u" in data:  # perhaps half of a pair, which only this detour replaces wherever it stands
                value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
    return value


def holds_json(data: bytes) -> bool:
    """False only for what certainly is no JSON value; nesting too deep to be read is given the benefit of the doubt."""
    try:
        orjson.loads(data)
    except ValueError:
        try:
            json.loads(data.decode("utf-8", "replace"), parse_int=_whole)
        except RecursionError:
            return True
        except ValueError:
            return False
    return True


def _whole(digits: str) -> float:
    """A whole number as orjson reads it: past 64 bits it is a float."""
    return int(digits) if len(digits) < INT_MAX_DIGITS else float(digits)


def load_object(data: bytes) -> JsonObject | None:
    """The JSON object in `data`, None for anything else."""
    value = load(data)
    return value if isinstance(value, dict) else None


def count(value: object) -> int | None:
    """A token count, or None when the value is not a whole number from 0 to COUNT_MAX."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX:
        return value
    return None


def text(value: object) -> str:
    """The value if it is a string, else ""."""
    return value if isinstance(value, str) else ""


def child(payload: Mapping[str, object], key: str) -> JsonObject:
    """The object under `key`, {} when there is none."""
    value = payload.get(key)
    return value if isinstance(value, dict) else {}


Usage = tuple[int | None, int | None, int | None]
"""Prompt tokens, output tokens, and those of the prompt that were found in a prefix cache; None for what is not said."""


def usage_tokens(usage: Mapping[str, object]) -> Usage:
    """What a usage object of any dialect says.

    Messages counts cached prompt tokens beside input_tokens, so they are added; a rerank says total_tokens only.
    """
    prompt = count(usage.get("prompt_tokens"))
    output = count(usage.get("completion_tokens"))
    if prompt is None and (prompt := count(usage.get("input_tokens"))) is not None:
        prompt += count(usage.get("cache_creation_input_tokens")) or 0
        prompt += count(usage.get("cache_read_input_tokens")) or 0
    if output is None:
        output = count(usage.get("output_tokens"))
    if prompt is None and output is None:
        prompt = count(usage.get("total_tokens"))
    return prompt, output, _cached_tokens(usage)


def _cached_tokens(usage: Mapping[str, object]) -> int | None:
    for details in ("prompt_tokens_details", "input_tokens_details"):
        if (cached := count(child(usage, details).get("cached_tokens"))) is not None:
            return cached
    return count(usage.get("cache_read_input_tokens"))
