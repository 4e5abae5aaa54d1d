"""Requests with one input each, put together as one with an array, and its answer taken apart again.

The other way round than `backends.dialects.batches`, for engines that run an array of inputs as one padded batch. What is
joined is `/v1/embeddings`, whose `input` is a text, a list of token ids, or an array with one of these:

    request   the first one's bytes with all inputs in an array; only requests of one `shape` may be joined
    answer    its bytes with one embedding in `data`, under index 0, and with a share of the usage

Engines tell the usage of the whole array only. Shares follow the sizes of the inputs, and their sum is what the engine
told: exact for lists of token ids, of which engines count each id; an estimate by bytes of text otherwise. An answer that
is not of the expected form raises JoinError and is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import orjson

from backends.dialects.batches import JSON_FORMATS, JoinError
from backends.dialects.payload import JsonObject, count, holds_json, load, load_object
from backends.dialects.scan import Span, items, members, skip_space

JOINED_PATHS = frozenset({"/v1/embeddings"})
"""Routes whose requests may be joined."""


@dataclass(frozen=True, slots=True)
class Single:
    """A request's body around its only input.

    before, after   the bytes on both sides of it
    given           the input's own JSON text
    token_ids       it is a list of token ids; engines take no array with texts and lists in it
    size            token ids, or bytes of text, >= 0
    """

    before: bytes
    given: bytes
    after: bytes
    token_ids: bool
    size: int

    @property
    def shape(self) -> tuple[bytes, bytes, bool]:
        """What requests must have in common to be joined: every byte but the input's."""
        return self.before, self.after, self.token_ids


def single(body: bytes) -> Single | None:
    """The only input of a valid JSON request; None where it has none, several, or asks for an answer that is no JSON."""
    inputs: list[Span] = []
    for key, start, end in members(body):
        if key == "input":
            inputs.append((start, end))
        elif key == "encoding_format" and body[start:end] not in JSON_FORMATS:
            return None
    if len(inputs) != 1:  # none, or written twice: readers differ in which one counts
        return None
    start, end = inputs[0]
    before, after = body[:start], body[end:]
    if body[start] == _BRACKET:
        first = list(islice(items(body, start), 2))
        if len(first) == 1 and body[first[0][0]] not in _NUMBER:
            start, end = first[0]
    given = body[start:end]
    if given[0] == _QUOTE:
        return Single(before, given, after, False, len(orjson.loads(given).encode()))
    if given[0] == _BRACKET and given[skip_space(given, 1)] in _NUMBER:
        return Single(before, given, after, True, given.count(b",") + 1)
    return None


def joined(singles: Sequence[Single]) -> bytes:
    """One body with all inputs, in order; they are of one shape."""
    first = singles[0]
    return b"%b[%b]%b" % (first.before, b",".join(one.given for one in singles), first.after)


def parted(answer: bytes, singles: Sequence[Single]) -> list[bytes]:
    """What each request would have been answered alone, in order. Raises JoinError."""
    try:
        array, usage = _spans(answer)
        embeddings = _embeddings(answer, array)
    except (ValueError, IndexError) as error:
        raise JoinError("it is no JSON with an array of data") from error
    # What stands around the array would be in everybody's answer.
    if not holds_json(_spliced(answer, [(array, b"[]")])):
        raise JoinError("it is no JSON")
    if sorted(embeddings) != list(range(len(singles))):
        raise JoinError(f"it has other than one of data for each of {len(singles)} inputs")
    told = None if usage is None else load_object(answer[slice(*usage)])
    usages = [None] * len(singles) if told is None else shares(told, [one.size for one in singles])
    parts = []
    for number, own in enumerate(usages):
        edits = [(array, b"[%b]" % embeddings[number])]
        if usage is not None and own is not None:
            edits.append((usage, orjson.dumps(own)))
        parts.append(_spliced(answer, edits))
    return parts


def shares(usage: JsonObject, sizes: Sequence[int]) -> list[JsonObject]:
    """A usage object shared out by the sizes of the inputs, at every level: whole numbers keep their sum.

    An input has one token at least where there are enough; what is no number is everybody's.
    """
    own: list[JsonObject] = [{} for _ in sizes]
    for key, value in usage.items():
        for one, share in zip(own, _shared(value, sizes), strict=True):
            one[key] = share
    return own


def _shared(value: object, sizes: Sequence[int]) -> Sequence[object]:
    if isinstance(value, dict):
        return shares(value, sizes)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        if value < len(sizes):
            return _spread(value, sizes)
        return [1 + share for share in _spread(value - len(sizes), [max(0, size - 1) for size in sizes])]
    return [value] * len(sizes)


def _spread(total: int, weights: Sequence[int]) -> list[int]:
    """Whole shares by weight, each less than 1 from its quota; their sum is `total`."""
    if not any(weights):
        weights = [1] * len(weights)
    ends = [0, *accumulate(weights)]
    return [total * end // ends[-1] - total * start // ends[-1] for start, end in pairwise(ends)]


def _spans(answer: bytes) -> tuple[Span, Span | None]:
    """Where data and usage stand."""
    found: dict[str, Span] = {}
    for key, start, end in members(answer):
        if (key == "data" and answer[start] == _BRACKET) or (key == "usage" and answer[start] == _BRACE):
            found[key] = start, end
    if "data" not in found:
        raise ValueError("no data")
    return found["data"], found.get("usage")


def _embeddings(answer: bytes, array: Span) -> dict[int, bytes]:
    """Each embedding by its index in the array, with index 0. A second one of an index makes another one missing."""
    found: dict[int, bytes] = {}
    for number, (start, end) in enumerate(items(answer, array[0])):
        index, one = _as_first(answer[start:end])
        found[-1 - number if index is None or index in found else index] = one
    return found


def _as_first(embedding: bytes) -> tuple[int | None, bytes]:
    """An embedding's index, and the embedding with index 0."""
    for key, start, end in members(embedding):
        if key == "index":
            return count(load(embedding[start:end])), b"%b0%b" % (embedding[:start], embedding[end:])
    return None, embedding


def _spliced(answer: bytes, edits: Sequence[tuple[Span, bytes]]) -> bytes:
    pieces: list[bytes] = []
    at = 0
    for (start, end), value in sorted(edits):
        pieces += (answer[at:start], value)
        at = end
    return b"".join((*pieces, answer[at:]))


_BRACKET, _BRACE, _QUOTE = b'[{"'
_NUMBER = frozenset(b"-0123456789")
