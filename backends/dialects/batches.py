"""Request batches: one request with many inputs taken apart by its inputs, and the answers to the parts put together.

    request   an array of prompts, texts or documents in one field; a list of token ids is one prompt
    answer    choices, data or results, each with its `index`; a bare list where the route answers with one

A part is the client's bytes with a shorter array, and the joined answer is the bytes of the parts' answers: indices are
moved on, usage is summed, everything that stands once is the first part's. Ranked answers (rerank) are merged by score,
stable by index, and cut to the client's `top_n`, as the engine would have done. What cannot be joined so raises JoinError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson

from backends.dialects.payload import count, load, load_object
from backends.dialects.scan import Span, items, members, skip_space


class JoinError(Exception):
    """The answer to a part is not of a form that can be joined; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a route carries several inputs and the answers to them.

    asked      fields of which one holds the array of inputs
    alone      fields that must not be arrays themselves: then inputs go in pairs and are not told apart
    answers    name of the answer's array
    ranked     answers are sorted by score
    """

    asked: tuple[str, ...]
    answers: str
    alone: tuple[str, ...] = ()
    ranked: bool = False


_EMBED = Form(("input",), "data")
_RERANK = Form(("documents", "texts"), "results", ranked=True)
_SCORE = Form(("text_2", "documents"), "data", alone=("text_1", "queries"))
FORMS: Mapping[str, Form] = {
    "/v1/completions": Form(("prompt",), "choices"),
    "/v1/embeddings": _EMBED,
    "/pooling": _EMBED,
    "/classify": _EMBED,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/score": _SCORE,
    "/v1/score": _SCORE,
}
"""Engine path -> its form. Other routes carry one input a request."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The array of inputs in a request's body: where it and each of its items stand."""

    body: bytes
    array: Span
    items: Sequence[Span]

    def __len__(self) -> int:
        return len(self.items)

    def part(self, first: int, stop: int) -> bytes:
        """The body with the inputs from `first` up to `stop` only."""
        kept = self.body[self.items[first][0] : self.items[stop - 1][1]]
        return b"%b[%b]%b" % (self.body[: self.array[0]], kept, self.body[self.array[1] :])


def inputs(body: bytes, path: str) -> Inputs | None:
    """The inputs of a valid JSON request; None where it has no array of them, or one that must stay whole."""
    form = FORMS.get(path)
    if form is None:
        return None
    arrays: list[Span] = []
    for key, start, end in members(body):
        if key in form.alone and body[start] == _BRACKET:
            return None
        if key == "encoding_format" and body[start:end] not in JSON_FORMATS:
            return None
        if key in form.asked and body[start] == _BRACKET:
            arrays.append((start, end))
    if len(arrays) != 1:  # none, or written twice: readers differ in which one counts
        return None
    found = list(items(body, arrays[0][0]))
    if not found or body[found[0][0]] in _NUMBER:
        return None
    return Inputs(body, arrays[0], found)


def top_n(body: bytes) -> int | None:
    """How many ranked results the client wants; None: all."""
    wanted = next((load(body[start:end]) for key, start, end in members(body) if key == "top_n"), None)
    return count(wanted) or None


class AnswerJoin:
    """Joins whole answers. Parts may come in any order; `pieces` gives the joined answer once all are there."""

    __slots__ = ("_answers", "_firsts", "_form", "_top_n")

    def __init__(self, path: str, firsts: Sequence[int], *, top_n: int | None = None) -> None:
        """firsts: index of each part's first input. top_n: see the function of that name."""
        self._form = FORMS[path]
        self._firsts = firsts
        self._top_n = top_n
        self._answers: dict[int, _Answer] = {}

    @property
    def complete(self) -> bool:
        """True once every part's answer is there."""
        return len(self._answers) == len(self._firsts)

    def add(self, part: int, body: bytes) -> None:
        """Take a part's whole answer. Raises JoinError."""
        try:
            self._answers[part] = _read(body, self._form, self._firsts[part])
        except (ValueError, IndexError) as error:
            raise JoinError(f"it is no JSON with an array of {self._form.answers}") from error

    def pieces(self) -> Iterator[bytes]:
        """The joined answer, in pieces to be written one after another."""
        answers = [self._answers[part] for part in range(len(self._firsts))]
        yield self._before(answers)
        shown = self._ranked(answers) if self._form.ranked else [one for answer in answers for one in answer.items]
        for number, one in enumerate(shown):
            yield one if not number else b"," + one
        yield self._after(answers)

    def _before(self, answers: Sequence[_Answer]) -> bytes:
        """The first answer up to and with the array's bracket."""
        first = answers[0]
        opening = first.array[0] + 1
        if first.usage is None or first.usage[0] > opening:
            return first.body[:opening]
        start, end = first.usage
        return first.body[:start] + _usage_sum(answers) + first.body[end:opening]

    def _after(self, answers: Sequence[_Answer]) -> bytes:
        first = answers[0]
        closing = first.array[1] - 1
        if first.usage is None or first.usage[0] < closing:
            return first.body[closing:]
        start, end = first.usage
        return first.body[closing:start] + _usage_sum(answers) + first.body[end:]

    def _ranked(self, answers: Sequence[_Answer]) -> list[bytes]:
        """By score where every engine's list came so, else in the order of the documents."""
        if all(answer.descending for answer in answers):
            rows = [
                (-score, index, one)
                for answer in answers
                for score, index, one in zip(answer.scores, answer.indices, answer.items, strict=True)
            ]
        else:
            rows = [
                (0.0, index, one) for answer in answers for index, one in zip(answer.indices, answer.items, strict=True)
            ]
        rows.sort(key=lambda row: row[:2])
        return [one for _, _, one in rows][: self._top_n]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One part's answer, taken apart. items are moved on to the indices of the whole; scores only where ranked."""

    body: bytes
    array: Span
    usage: Span | None
    items: list[bytes]
    indices: list[int]
    scores: list[float]

    @property
    def descending(self) -> bool:
        return len(self.scores) == len(self.items) and all(
            one >= after for one, after in zip(self.scores, self.scores[1:], strict=False)
        )


def _read(body: bytes, form: Form, first: int) -> _Answer:
    at = skip_space(body, 0)
    usage: Span | None = None
    array: Span | None = None
    if body[at] == _BRACKET:  # a bare list, as TEI and SGLang answer a rerank
        array = (at, body.rindex(b"]") + 1)
    else:
        for key, start, end in members(body):
            if key == form.answers and body[start] == _BRACKET:
                array = (start, end)
            elif key == "usage" and body[start] == _BRACE:
                usage = (start, end)
    if array is None:
        raise ValueError(f"no {form.answers}")
    answer = _Answer(body, array, usage, [], [], [])
    for start, end in items(body, array[0]):
        index, moved = _moved(body[start:end], first)
        answer.items.append(moved)
        answer.indices.append(first + len(answer.indices) if index is None else index)
        if form.ranked and (score := _score(moved)) is not None:
            answer.scores.append(score)
    return answer


def moved_index(item: bytes, by: int) -> bytes:
    """A choice, an embedding or a result with its index moved on. Raises ValueError or IndexError on what is no object."""
    return _moved(item, by)[1]


def _moved(item: bytes, by: int) -> tuple[int | None, bytes]:
    for key, start, end in members(item):
        if key == "index":
            index = count(load(item[start:end]))
            if index is None:
                return None, item
            return index + by, b"%b%d%b" % (item[:start], index + by, item[end:]) if by else item
    return None, item


def _score(item: bytes) -> float | None:
    for key, start, end in members(item):
        if key in {"relevance_score", "score"}:
            score = load(item[start:end])
            return float(score) if isinstance(score, int | float) else None
    return None


def _usage_sum(answers: Sequence[_Answer]) -> bytes:
    usages = [load_object(one.body[slice(*one.usage)]) for one in answers if one.usage is not None]
    return orjson.dumps(summed([usage for usage in usages if usage is not None]))


def summed(usages: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Usage objects added up, member by member and at every level; what holds no number is the first one's."""
    total: dict[str, object] = {}
    for key in dict.fromkeys(key for usage in usages for key in usage):
        values = [usage[key] for usage in usages if usage.get(key) is not None]
        objects = [value for value in values if isinstance(value, dict)]
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if objects:
            total[key] = summed(objects)
        elif numbers:
            total[key] = sum(numbers)
        else:
            total[key] = values[0] if values else None
    return total


_BRACKET, _BRACE = b"[{"
JSON_FORMATS = frozenset({b"null", b'"float"', b'"base64"'})
"""Forms of embeddings that stand in a JSON answer; vLLM's "bytes" are the answer itself."""
_NUMBER = frozenset(b"-0123456789")
