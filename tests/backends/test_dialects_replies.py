"""Whole answers and error bodies, in every shape that engines use."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.dialects import EngineError, ReplyFacts, read_error, read_reply


def chat_reply(*finishes: str, **more: object) -> dict[str, object]:
    message = {"role": "assistant", "content": 'say "usage": {"prompt_tokens": 99}'}
    choices = [{"index": i, "message": message, "finish_reason": finish} for i, finish in enumerate(finishes)]
    return {
        "id": "c",
        "choices": choices,
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        **more,
    }


@pytest.mark.parametrize(
    ("payload", "prompt_tokens", "output_tokens"),
    [
        (chat_reply("stop"), 3, 2),
        ({"object": "response", "status": "completed", "usage": {"input_tokens": 4, "output_tokens": 6}}, 4, 6),
        ({"generated_text": "x", "details": {"finish_reason": "length", "generated_tokens": 7}}, None, 7),
        ([{"generated_text": "x", "details": {"generated_tokens": 7}}, {"details": {"generated_tokens": 5}}], None, 12),
        ({"data": [{"embedding": "AAAA"}], "usage": {"prompt_tokens": 8, "total_tokens": 8}}, 8, None),
        ({"results": [], "usage": {"total_tokens": 11}}, 11, None),
        ({"text": "hello", "usage": {"type": "duration", "seconds": 3}}, None, None),
        ({"count": 4, "tokens": [1, 2]}, None, None),
        ({"error": None, "usage": None}, None, None),
        ({"usage": {"prompt_tokens": 2**62, "completion_tokens": 5}}, None, 5),
        ([1, 2], None, None),
        ("text", None, None),
    ],
)
def test_usage_is_read_from_every_kind_of_answer(
    payload: object, prompt_tokens: int | None, output_tokens: int | None
) -> None:
    assert read_reply(json.dumps(payload).encode(), "/v1/x") == ReplyFacts(prompt_tokens, output_tokens)


@pytest.mark.parametrize(
    ("usage", "facts"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}, ReplyFacts(9, None, 8)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}, ReplyFacts(9, None, 0)),
        ({"input_tokens": 1, "cache_read_input_tokens": 9, "output_tokens": 2}, ReplyFacts(10, 2, 9)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, ReplyFacts(9)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": -3}}, ReplyFacts(9)),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": True}}, ReplyFacts(9)),
    ],
)
def test_what_was_cached_of_a_prompt_is_read_where_usage_says_it(usage: dict[str, object], facts: ReplyFacts) -> None:
    assert read_reply(json.dumps({"usage": usage}).encode(), "/v1/x") == facts
    assert read_reply(json.dumps({"x": "y" * 2_000_000, "usage": usage}).encode(), "/v1/x") == facts


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        (chat_reply("stop", "abort"), 503),
        (chat_reply("error"), 502),
        ({"generated_text": "", "details": {"finish_reason": "error"}}, 502),
        ([{"details": {"finish_reason": "length"}}, {"details": {"finish_reason": "abort"}}], 503),
        ({"type": "message", "stop_reason": "abort"}, 503),
    ],
)
def test_an_aborted_answer_is_a_failure(payload: object, status: int) -> None:
    facts = read_reply(json.dumps(payload).encode(), "/v1/chat/completions")

    assert facts.aborted
    assert facts.error is not None
    assert (facts.error.status, facts.error.reason) == (status, "aborted")


def test_a_200_that_holds_an_error_object_is_an_error() -> None:
    facts = read_reply(b'{"object":"error","message":"engine died","type":"InternalServerError","code":500}', "/v1/x")

    assert facts.error == EngineError(500, "engine died", "InternalServerError", 500)


@pytest.mark.parametrize(
    "payload", [{"detail": "dead"}, {"message": "dead", "code": 500}, {"errors": [{"message": "dead", "code": 500}]}]
)
def test_an_error_by_another_name_is_one_where_choices_belong(payload: object) -> None:
    body = json.dumps(payload).encode()

    made, other = read_reply(body, "/v1/chat/completions").error, read_reply(body, "/v1/vendor/thing").error

    assert made is not None
    assert (made.status, made.message, other) == (500, "dead", None)


@pytest.mark.parametrize(
    ("path", "failed"), [("/v1/responses", True), ("/v1/responses/resp_1", False), ("/v1/batches", False)]
)
def test_a_failed_status_is_an_error_where_the_response_is_made(path: str, *, failed: bool) -> None:
    facts = read_reply(b'{"status": "failed", "error": null}', path)

    assert (facts.error is not None) == failed


@pytest.mark.parametrize("usage_first", [True, False])
def test_a_huge_answer_is_read_at_its_ends(*, usage_first: bool) -> None:
    usage = {"usage": {"prompt_tokens": 8, "completion_tokens": 0}}
    data = {"data": ["x" * 2_000_000]}
    body = json.dumps({**usage, **data} if usage_first else {**data, **usage}).encode()

    assert read_reply(body, "/v1/embeddings") == ReplyFacts(8, 0)


def test_a_huge_answer_whose_usage_is_nonsense_says_nothing_of_it() -> None:
    body = b'{"data":"' + b"x" * 2_000_000 + b'","usage":{"a":' + b"[" * 3_000

    assert read_reply(body, "/v1/embeddings") == ReplyFacts()


def test_a_huge_answer_that_was_aborted_is_found_and_a_quoted_one_is_not() -> None:
    quoted = json.dumps(chat_reply("stop", pad="x" * 2_000_000, said='"finish_reason": "abort"')).encode()
    aborted = json.dumps(chat_reply("abort", pad="x" * 2_000_000)).encode()

    assert (read_reply(quoted, "/").aborted, read_reply(aborted, "/").aborted) == (False, True)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            400,
            b'{"error":{"message":"bad","type":"BadRequestError","param":"n","code":400}}',
            EngineError(400, "bad", "BadRequestError", 400, "n", "rejected"),
        ),
        (
            400,
            b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}',
            EngineError(400, "too long", "BadRequestError", 400, None, "rejected"),
        ),
        (
            400,
            b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error","n_ctx":2048}}',
            EngineError(400, "too long", "exceed_context_size_error", 400, None, "rejected"),
        ),
        (401, b'{"error":"Unauthorized"}', EngineError(401, "Unauthorized", reason="rejected")),
        (404, b'{"detail":"Not Found"}', EngineError(404, "Not Found", reason="rejected")),
        (
            422,
            b'{"detail":[{"loc":["body"],"msg":"field required"},{"msg":"not a list"}]}',
            EngineError(422, "field required; not a list", reason="rejected"),
        ),
        (
            429,
            b'{"error":"Model is overloaded","error_type":"overloaded"}',
            EngineError(429, "Model is overloaded", "overloaded", reason="overloaded"),
        ),
        (
            503,
            b'{"error":{"message":"queue full","type":"overloaded_error","param":null,"code":null}}',
            EngineError(503, "queue full", "overloaded_error", reason="overloaded"),
        ),
        (500, b'{"message":"dead"}', EngineError(500, "dead")),
        (500, b"Internal Server Error", EngineError(500, "Internal Server Error")),
        (502, b"<html>" + b"x" * 500 + b"</html>", EngineError(502, "")),
        (500, b"", EngineError(500, "")),
        (500, b"[[[", EngineError(500, "[[[")),
        (302, b"", EngineError(502, "")),
    ],
)
def test_an_error_body_is_understood_and_the_status_stays(status: int, body: bytes, expected: EngineError) -> None:
    assert read_error(body, status) == expected


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_no_bytes_make_it_raise(junk: bytes) -> None:
    assert read_error(junk, 500).status == 500
    assert read_reply(junk, "/v1/responses").prompt_tokens is None


@pytest.mark.parametrize("depth", [1_000, 200_000])
def test_deep_nesting_is_no_recursion(depth: int) -> None:
    body = b'{"error":' + b"[" * depth + b"]" * depth + b"}"

    assert read_error(body, 500).status == 500
    assert read_reply(b"[" * depth, "/").error is None
