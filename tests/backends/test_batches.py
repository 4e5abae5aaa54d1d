"""A request batch that was taken apart and put together again reads as if one engine had answered it whole."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.dialects.batch_stream import StreamJoin
from backends.dialects.batches import AnswerJoin, Inputs, JoinError, inputs, top_n
from backends.sse import events

token_lists = st.lists(st.integers(0, 50_000), min_size=1, max_size=5)
arrays = st.lists(st.text(max_size=12), min_size=1, max_size=20) | st.lists(token_lists, min_size=1, max_size=20)
Body = dict[str, Any]


def spelled(document: Body, draw: st.DataObject) -> bytes:
    """The document as some client or engine writes it."""
    indent = draw.draw(st.sampled_from([None, 1]))
    return json.dumps(document, ensure_ascii=draw.draw(st.booleans()), indent=indent).encode()


def cut(found: Inputs, most: int) -> list[tuple[int, bytes]]:
    """(first index, body) of each part of at most so many inputs."""
    return [(first, found.part(first, min(first + most, len(found)))) for first in range(0, len(found), most)]


def words(prompt: object) -> int:
    return len(prompt) if isinstance(prompt, str | list) else 0


def completion(body: Body, number: str) -> Body:
    """What an engine answers to prompts: of each, something that only it leads to."""
    prompts: list[object] = body["prompt"]
    choices = [
        {"index": index, "text": f"<{prompt}>", "logprobs": None, "finish_reason": "length", "extra": {"index": 7}}
        for index, prompt in enumerate(prompts)
    ]
    tokens = sum(map(words, prompts))
    usage = {
        "prompt_tokens": tokens,
        "completion_tokens": len(prompts),
        "total_tokens": tokens + len(prompts),
        "prompt_tokens_details": {"cached_tokens": len(prompts) * 2},
    }
    return {"id": number, "object": "text_completion", "created": 5, "model": "m", "choices": choices, "usage": usage}


@given(arrays, st.integers(1, 8), st.data())
def test_the_parts_of_an_array_hold_each_input_once_and_in_order(array: Any, most: int, data: st.DataObject) -> None:
    document = {"model": "m", "stream": False, "prompt": array, "stop": ["[", "]"], "π": [[1], {"prompt": [1, 2]}]}
    found = inputs(spelled(document, data), "/v1/completions")

    assert found is not None
    parts = [orjson.loads(part) for _, part in cut(found, most)]

    assert [one for part in parts for one in part["prompt"]] == array
    assert all(len(part["prompt"]) <= most for part in parts)
    assert all({**part, "prompt": array} == document for part in parts)


@given(arrays, st.integers(1, 8), st.booleans(), st.data())
def test_answers_to_parts_join_to_the_answer_to_the_whole(
    array: Any, most: int, usage_first: bool, data: st.DataObject
) -> None:
    whole = {"model": "m", "prompt": array}
    found = inputs(spelled(whole, data), "/v1/completions")
    assert found is not None
    parts = cut(found, most)
    join = AnswerJoin("/v1/completions", [first for first, _ in parts])

    for number in data.draw(st.permutations(range(len(parts)))):
        assert not join.complete
        answer = completion(orjson.loads(parts[number][1]), "cmpl-1")
        if usage_first:
            answer = dict(reversed(answer.items()))
        join.add(number, spelled(answer, data))

    assert join.complete
    assert orjson.loads(b"".join(join.pieces())) == completion(whole, "cmpl-1")


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 8), st.none() | st.integers(1, 9), st.data()
)
def test_a_rerank_of_parts_is_the_rerank_of_the_whole(
    scores: list[int], most: int, wanted: int | None, data: st.DataObject
) -> None:
    def rerank(documents: list[str]) -> Body:
        results = [
            {"index": index, "document": {"text": text}, "relevance_score": int(text.partition(" ")[2]) / 10}
            for index, text in enumerate(documents)
        ]
        results.sort(key=lambda one: -float(one["relevance_score"]))  # type: ignore[arg-type]
        return {"id": "r", "results": results[:wanted], "usage": {"total_tokens": len(documents)}}

    documents = [f"{number} {score}" for number, score in enumerate(scores)]
    body = spelled({"model": "m", "query": "q", "documents": documents, "top_n": wanted}, data)
    found = inputs(body, "/v2/rerank")
    assert found is not None
    parts = cut(found, most)
    join = AnswerJoin("/v2/rerank", [first for first, _ in parts], top_n=top_n(body))

    for number, (_, part) in enumerate(parts):
        join.add(number, spelled(rerank(orjson.loads(part)["documents"]), data))

    assert orjson.loads(b"".join(join.pieces())) == rerank(documents)


def test_a_bare_list_of_results_is_joined_as_one() -> None:
    join = AnswerJoin("/rerank", [0, 2])

    join.add(1, b'[{"index":0,"score":0.7}]')
    join.add(0, b'[{"index":1,"score":0.9},{"index":0,"score":0.1}]')

    assert orjson.loads(b"".join(join.pieces())) == [
        {"index": 1, "score": 0.9},
        {"index": 2, "score": 0.7},
        {"index": 0, "score": 0.1},
    ]


def test_a_ranking_that_is_in_the_documents_order_stays_so() -> None:
    join = AnswerJoin("/rerank", [0, 2])

    join.add(0, b'[{"index":0,"score":0.1},{"index":1,"score":0.9}]')
    join.add(1, b'[{"index":0,"score":0.7}]')

    assert [one["index"] for one in orjson.loads(b"".join(join.pieces()))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt":"one"}'),
        ("/v1/completions", b'{"prompt":[1,2,3]}'),
        ("/v1/completions", b'{"prompt":[]}'),
        ("/v1/completions", b'{"prompt":["a","b"],"prompt":["c","d"]}'),
        ("/v1/chat/completions", b'{"messages":[{},{}]}'),
        ("/v1/responses", b'{"input":[{},{}]}'),
        ("/v1/score", b'{"text_1":["a","b"],"text_2":["c","d"]}'),
        ("/v1/embeddings", b'{"input":{"prompt":["a","b"]}}'),
        ("/v1/embeddings", b'{"input":["a","b"],"encoding_format":"bytes"}'),
        ("/pooling", b'{"encoding_format":"bytes_only","input":["a","b"]}'),
    ],
)
def test_what_is_no_array_of_inputs_stays_whole(path: str, body: bytes) -> None:
    assert inputs(body, path) is None


@pytest.mark.parametrize("body", [b"", b"nonsense", b"{}", b'{"choices":7}', b'{"choices":[1,', b'{"choices":[7]}'])
def test_an_answer_that_cannot_be_joined_is_told(body: bytes) -> None:
    with pytest.raises(JoinError, match="choices"):
        AnswerJoin("/v1/completions", [0]).add(0, body)


def test_numbers_and_unknown_fields_of_an_answer_are_the_engines_bytes() -> None:
    join = AnswerJoin("/v1/embeddings", [0, 1])

    join.add(0, b'{"data":[{"index":0,"embedding":[1e-05,NaN]}],"x":1.50}')
    join.add(1, b'{"data":[{"embedding":[2.0E3],"index":0}],"x":2}')

    joined = b'{"data":[{"index":0,"embedding":[1e-05,NaN]},{"embedding":[2.0E3],"index":1}],"x":1.50}'
    assert b"".join(join.pieces()) == joined


# -- streams -----------------------------------------------------------------------------------------------------------

texts = st.sampled_from(["a", " b", '"', "\\", '\\"', "\n", "é", "", "]}", '"text":"'])


def streamed(number: int, tokens: list[list[str]], style: str, *, usage: bool) -> list[bytes]:
    """One part's events, as vLLM or as llama.cpp orders their members."""
    common = {"id": f"cmpl-{number}", "object": "text_completion", "created": number, "model": f"m{number}"}
    found: list[bytes] = []
    for index, own in enumerate(tokens):
        for at, text in enumerate(own):
            finish = "stop" if at == len(own) - 1 else None
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
            if style == "vllm-logprobs":
                choice["logprobs"] = {"tokens": [text], "top_logprobs": [{"index": -1.5, "id": at}]}
            if style == "llamacpp":
                choice = {"text": text, "index": index, "logprobs": None, "finish_reason": finish}
            event = {**common, "choices": [choice]} if style != "llamacpp" else {"choices": [choice], **common}
            found.append(b"data: " + orjson.dumps(event) + b"\n\n")
    if usage:
        count = sum(map(len, tokens))
        event = {**common, "choices": [], "usage": {"prompt_tokens": len(tokens), "completion_tokens": count}}
        found.append(b"data: " + orjson.dumps(event) + b"\n\n")
    return [*found, b"data: [DONE]\n\n"]


part_tokens = st.lists(st.lists(texts, min_size=1, max_size=4), min_size=1, max_size=3)


@given(
    st.lists(part_tokens, min_size=1, max_size=4),
    st.sampled_from(["vllm", "vllm-logprobs", "llamacpp"]),
    st.booleans(),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_joined_streams_read_as_one(parts: list[Any], style: str, usage: bool, read_bytes: int, rng: Any) -> None:
    firsts = [sum(map(len, parts[:number])) for number in range(len(parts))]
    join = StreamJoin(firsts)
    left = {number: b"".join(streamed(number, part, style, usage=usage)) for number, part in enumerate(parts)}
    out = b""

    while left:
        number = rng.choice(sorted(left))
        size = rng.randint(1, read_bytes)
        out += join.feed(number, left[number][:size])
        left[number] = left[number][size:]
        if not left[number]:
            out += join.ended(number)
            del left[number]
    out += join.tail()

    payloads = [event.data for event in events(out)]
    assert payloads.pop() == b"[DONE]"
    assert b"[DONE]" not in payloads
    read = [orjson.loads(payload) for payload in payloads]
    if usage:
        count = sum(len(own) for part in parts for own in part)
        assert read.pop()["usage"] == {"prompt_tokens": sum(map(len, parts)), "completion_tokens": count}
    assert len({(one["id"], one["created"], one["model"]) for one in read}) <= 1
    said: dict[int, list[str]] = {}
    ends: dict[int, int] = {}
    for one in read:
        (choice,) = one["choices"]
        said.setdefault(choice["index"], []).append(choice["text"])
        ends[choice["index"]] = ends.get(choice["index"], 0) + (choice["finish_reason"] is not None)
    assert said == dict(enumerate(own for part in parts for own in part))
    assert set(ends.values()) == {1}


def test_several_choices_in_one_event_and_data_over_lines_keep_their_form() -> None:
    join = StreamJoin([0, 8])

    out = join.feed(1, b'event: x\nid: 7\ndata: {"id":"a","choices":[{"index":1},\ndata: {"index": 0 }]}\n\n')

    (event,) = events(out)
    assert [choice["index"] for choice in orjson.loads(event.data)["choices"]] == [9, 8]


def test_comments_pass_and_a_null_does_not_and_an_endless_event_ends_the_batch() -> None:
    join = StreamJoin([0, 1])

    assert join.feed(0, b": ping\n\ndata: null\n\n") == b": ping\n\n"
    with pytest.raises(JoinError, match="event of more than"):
        join.feed(0, b"data: " + b"x" * (5 * 1024 * 1024))
