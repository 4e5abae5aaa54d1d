"""Requests that were joined to one array get, each of them, the answer to its own input."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.dialects.arrays import Single, joined, parted, shares, single
from backends.dialects.batches import JoinError

texts = st.text(max_size=12)
token_lists = st.lists(st.integers(0, 50_000), min_size=1, max_size=5)
many = st.lists(texts, min_size=1, max_size=12) | st.lists(token_lists, min_size=1, max_size=12)
Body = dict[str, Any]


def asked(given_input: object, **more: object) -> Single | None:
    return single(json.dumps({"model": "m", "input": given_input, **more}).encode())


def cost(one: object) -> int:
    return len(one) if isinstance(one, list) else len(str(one).encode())


def embedding_of(one: object) -> list[float]:
    """Something that only this input leads to."""
    return [float(cost(one)), *(ord(letter) + 0.5 for letter in json.dumps(one))]


def answer(body: Body, order: list[int] | None = None) -> Body:
    """What an engine answers, in that order of the embeddings."""
    array: list[Any] = body["input"] if isinstance(body["input"], list) else [body["input"]]
    if array and isinstance(array[0], int):
        array = [array]
    data = [{"object": "embedding", "index": at, "embedding": embedding_of(one)} for at, one in enumerate(array)]
    tokens = sum(map(cost, array))
    return {
        "id": "embd-1",
        "object": "list",
        "model": "m",
        "data": data if order is None else [data[at] for at in order],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": None},
    }


@given(many, st.booleans(), st.data())
def test_any_inputs_joined_and_parted_give_each_what_it_gets_alone(
    array: list[Any], in_list: bool, data: st.DataObject
) -> None:
    indent, escaped = data.draw(st.sampled_from([None, 1])), data.draw(st.booleans())
    document = {"model": "m", "encoding_format": "float", "π": ["input", {"input": [1]}]}
    bodies = [
        json.dumps({**document, "input": [one] if in_list else one, "user": "u"}, indent=indent, ensure_ascii=escaped)
        for one in array
    ]
    singles = [single(body.encode()) for body in bodies]
    found = [one for one in singles if one is not None]
    assert len(found) == len(array)
    assert len({one.shape for one in found}) == 1

    whole = orjson.loads(joined(found))
    order = data.draw(st.permutations(range(len(array))))
    told = json.dumps(answer(whole, order), indent=data.draw(st.sampled_from([None, 1]))).encode()
    parts = [orjson.loads(part) for part in parted(told, found)]

    assert whole == {**document, "input": array, "user": "u"}
    usages = [part.pop("usage") for part in parts]
    alone = [answer({"input": one}) for one in array]
    costs = [one.pop("usage") for one in alone]
    assert parts == alone
    assert sum(usage["total_tokens"] for usage in usages) == sum(map(cost, array))
    if isinstance(array[0], list):
        assert usages == costs


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.integers(0, 100_000))
def test_shares_of_usage_add_up_and_nobody_is_left_without_where_there_is_enough(sizes: list[int], told: int) -> None:
    usage = {"prompt_tokens": told, "total_tokens": told, "details": {"cached_tokens": told // 2}, "tier": "a"}

    own: list[Any] = shares(usage, sizes)

    assert sum(one["prompt_tokens"] for one in own) == told
    assert sum(one["details"]["cached_tokens"] for one in own) == told // 2
    assert all(one["prompt_tokens"] == one["total_tokens"] for one in own)
    assert all(one["tier"] == "a" for one in own)
    assert told < len(sizes) or min(one["prompt_tokens"] for one in own) >= 1


def test_shares_follow_the_sizes_of_the_inputs() -> None:
    own = shares({"prompt_tokens": 103}, [1, 51, 51])

    assert own == [{"prompt_tokens": 1}, {"prompt_tokens": 51}, {"prompt_tokens": 51}]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m"}',
        b'{"input":["a","b"]}',
        b'{"input":[[1,2],[3]]}',
        b'{"input":[]}',
        b'{"input":[[]]}',
        b'{"input":[["a"]]}',
        b'{"input":{"text":"a"}}',
        b'{"input":[{"image":"x"}]}',
        b'{"input":null}',
        b'{"input":5}',
        b'{"input":"a","input":"b"}',
        b'{"input":"a","\\u0069nput":"b"}',
        b'{"input":"a","encoding_format":"bytes"}',
    ],
)
def test_what_has_no_single_input_or_asks_for_no_json_is_not_joined(body: bytes) -> None:
    assert single(body) is None


def test_other_parameters_and_other_kinds_of_input_are_another_shape() -> None:
    shapes = {
        one.shape
        for one in (
            asked("a"),
            asked([1, 2]),
            asked("a", dimensions=3),
            asked("a", encoding_format="base64"),
            asked("a", user="u"),
        )
        if one is not None
    }

    assert len(shapes) == 5


def test_an_answer_without_usage_is_parted_without() -> None:
    pair = [one for one in (asked("a"), asked("b")) if one is not None]

    parts = parted(b'{"data":[{"index":1,"embedding":"B"},{"embedding":"A","index":0}]}', pair)

    assert parts == [b'{"data":[{"embedding":"A","index":0}]}', b'{"data":[{"index":0,"embedding":"B"}]}']


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"data":7}',
        b'{"error":{"message":"no"}}',
        b'{"data":[]}',
        b'{"data":[{"index":0}]}',
        b'{"data":[{"index":0},{"index":0}]}',
        b'{"data":[{"index":0},{"index":2}]}',
        b'{"data":[{"index":0},{"index":1},{"index":2}]}',
        b'{"data":[{"index":0},{"index":1},{"index":1}]}',
        b'{"data":[{"index":0},{}]}',
        b'{"data":[{"index":0},{"index":-1}]}',
        b'{"data":[{"index":0},{"index":"1"}]}',
        b'{"data":[0,1]}',
        b'{"data":[{"index":0},{"index":1',
        b'{"data":[{"index":0},{"index":1}]',
        b'{"data":[{"index":0},{"index":1}]}}',
        b'{"data":[{"index":0},{"index":1}],"usage":nothing}',
        b'{"data":[{"index":0,"embedding":[1,2},{"index":1,"embedding":[3]}]}',
    ],
)
def test_an_answer_that_is_not_one_embedding_for_each_input_is_nobodys(told: bytes) -> None:
    pair = [one for one in (asked("a"), asked("b")) if one is not None]

    with pytest.raises(JoinError):
        parted(told, pair)
