"""Readers of streams: what they count, what they take out, which errors they find, and that no cut changes it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.dialects import EngineError, StreamReader, open_reader
from backends.sse import EventSplitter

DATA = Path(__file__).parent.parent / "data" / "engines"
RECORDED = sorted(path.name for path in DATA.glob("*.sse"))


def chat(content: str | None = None, finish: str | None = None, **more: object) -> bytes:
    delta = {} if content is None else {"content": content}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return event({"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more})


def event(payload: object, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(payload)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


@dataclass
class Seen:
    """What one reader made of one stream."""

    reader: StreamReader
    forwarded: bytes
    error: EngineError | None


def read(
    reads: list[bytes],
    dialect: str = "openai",
    *,
    sequences: int = 1,
    strip_usage: bool = False,
    hold_max_bytes: int = 16384,
) -> Seen:
    reader = open_reader(dialect, "/v1/chat/completions", sequences=sequences, strip_usage=strip_usage)
    splitter = EventSplitter(hold_max_bytes)
    forwarded: list[bytes] = []
    for data in reads:
        ready = splitter.feed(data)
        remark = reader.inspect(ready) if ready else None
        forwarded.append(ready if remark is None else remark.forward)
        if remark is not None and remark.error is not None:
            return Seen(reader, b"".join(forwarded), remark.error)
    return Seen(reader, b"".join(forwarded) + splitter.take_rest(), None)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(a % (len(data) + 1) for a in at)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def facts(seen: Seen) -> tuple[object, ...]:
    reader = seen.reader
    usage = (reader.prompt_tokens, reader.output_tokens)
    return (reader.started, reader.tokens, usage, reader.finished, reader.terminated, seen.error, seen.forwarded)


# -- the recorded streams -------------------------------------------------------------------------------------------


def by_json(stream: bytes) -> tuple[int, tuple[object, object], set[object]]:
    """Tokens, usage and finished indexes of a recorded stream, from its JSON, event by event."""
    tokens, usage, finished = 0, (None, None), set()
    for block in stream.split(b"\n\n")[:-1]:
        data = block.removeprefix(b"data: ")
        payload = {} if data == b"[DONE]" else json.loads(data)
        for choice in payload.get("choices", []):
            delta = choice.get("delta", {})
            empty_token = choice.get("text") == "" and choice["finish_reason"] is None
            tokens += bool(delta.get("content") or choice.get("text") or empty_token)
            if choice["finish_reason"] not in {None, "abort"}:
                finished.add(choice["index"])
        if payload.get("usage"):
            usage = (payload["usage"]["prompt_tokens"], payload["usage"]["completion_tokens"])
    return tokens, usage, finished


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_stream_is_counted_as_its_json_says(name: str) -> None:
    stream = (DATA / name).read_bytes()
    tokens, usage, finished = by_json(stream)

    seen = read([part + b"\n\n" for part in stream.split(b"\n\n")[:-1]], sequences=max(1, len(finished)))

    assert seen.reader.tokens == tokens
    assert (seen.reader.prompt_tokens, seen.reader.output_tokens) == usage
    assert seen.reader.finished == bool(finished)
    assert seen.reader.terminated == (seen.error is None)


@settings(deadline=None)
@given(
    st.sampled_from(RECORDED),
    st.lists(st.integers(0, 4000), max_size=30),
    st.sampled_from([16384, 300, 40]),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_no_cut_of_a_recorded_stream_changes_what_is_read(
    name: str, at: list[int], hold_max_bytes: int, line_end: str
) -> None:
    stream = (DATA / name).read_bytes().replace(b"\n", line_end.encode())
    whole = read([stream])

    seen = read(cut(stream, at), hold_max_bytes=hold_max_bytes)

    assert facts(seen)[1:6] == facts(whole)[1:6]
    if hold_max_bytes == 16384:  # an event let through in pieces starts the stream and cannot be taken back
        assert (seen.reader.started, seen.forwarded) == (whole.reader.started, whole.forwarded)


@settings(deadline=None)
@given(
    st.lists(st.text(max_size=8), min_size=1, max_size=12), st.lists(st.integers(0, 4000), max_size=12), st.booleans()
)
def test_the_fast_way_counts_what_the_slow_way_counts(texts: list[str], at: list[int], ascii_only: bool) -> None:
    def chunk(text: str) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=ascii_only).encode() + b"\n\n"

    stream = b"".join(map(chunk, ["first", *texts])) + chat(finish="stop") + DONE

    seen = read(cut(stream, at))

    assert seen.reader.tokens == 1 + len(texts)
    assert (seen.reader.finished, seen.reader.terminated, seen.forwarded) == (True, True, stream)


@pytest.mark.parametrize(
    "last",
    [
        b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason" : "stop"}]}\n\n',
        b'data:{"choices":[{"finish_reason":"stop","index":0,"delta":{"content":"x"}}]}\n\n',
        b'data: {"choices":\ndata: [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}\n\n',
    ],
)
def test_no_spelling_of_a_finish_is_missed_after_plain_tokens(last: bytes) -> None:
    seen = read([chat("plain"), chat("tokens"), last])

    assert (seen.reader.finished, seen.reader.tokens) == (True, 3)


# -- what starts and what ends a stream -----------------------------------------------------------------------------


def spoken(**delta: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


@pytest.mark.parametrize(
    "block",
    [
        b": PROCESSING\n\n",
        b":\n\n",
        b"retry: 3000\n\n",
        b"data: not json\n\n",
        b"data: 7\n\n",
        spoken(role="assistant", content=""),
        spoken(role="assistant", content=None),
        event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 0}}),
        event({"choices": None}),
        event({"usage": None, "error": None}),
        event({"choices": [None, 3, {"delta": None}]}),
    ],
)
def test_what_bears_no_token_does_not_start_a_stream(block: bytes) -> None:
    seen = read([block])

    assert (seen.reader.started, seen.reader.tokens, seen.error, seen.forwarded) == (False, 0, None, block)


@pytest.mark.parametrize(
    "block",
    [
        spoken(content="x"),
        spoken(reasoning=" think"),
        spoken(reasoning_content=" more", x_vendor={"a": [1]}),
        spoken(tool_calls=[{"index": 0, "function": {"name": "weather", "arguments": ""}}]),
        spoken(function_call={"name": "f"}),
        spoken(refusal="no"),
        spoken(audio={"data": "AAAA"}),
        event({"choices": [{"index": 0, "text": "x", "finish_reason": None}]}),
        event({"choices": [{"index": 0, "text": "", "finish_reason": None, "token_ids": [5]}]}),
        b'data: {"choices": [{"delta": {"content": "x"}, "logprobs": NaN}]}\n\n',
        b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n',
        event({"type": "transcript.text.delta", "delta": "x"}),
    ],
)
def test_whatever_a_model_says_starts_a_stream(block: bytes) -> None:
    seen = read([block])

    assert (seen.reader.started, seen.reader.tokens) == (True, 1)


def test_token_ids_count_where_an_event_carries_several_tokens() -> None:
    seen = read([event({"choices": [{"index": 0, "text": "abc", "token_ids": [1, 2, 3], "finish_reason": None}]})])

    assert seen.reader.tokens == 3


def test_a_stream_of_two_sequences_is_finished_when_both_are() -> None:
    def end(index: int) -> bytes:
        return event({"choices": [{"index": index, "delta": {}, "finish_reason": "stop"}]})

    one = read([chat("a"), end(1)], sequences=2)
    both = read([chat("a"), end(1), end(0)], sequences=2)

    assert (one.reader.finished, both.reader.finished) == (False, True)


def test_an_empty_finish_reason_finishes_nothing() -> None:
    seen = read([chat("a", ""), DONE])

    assert (seen.reader.finished, seen.reader.terminated) == (False, True)


def test_the_native_stream_of_llama_cpp_ends_with_stop() -> None:
    first = event({"index": 0, "content": " Paris", "tokens": [7042], "stop": False, "tokens_predicted": 1})
    last = event({"content": "", "tokens": [], "stop": True, "tokens_predicted": 1, "tokens_evaluated": 5})

    half = read([first])
    whole = read([first + last])

    assert facts(half)[:5] == (True, 1, (None, None), False, False)
    assert facts(whole)[:5] == (True, 1, (5, 1), True, True)


def test_an_audio_stream_ends_with_its_last_typed_event() -> None:
    delta = event({"type": "transcript.text.delta", "delta": "hey"})
    last = event({"type": "transcript.text.done", "text": "hey", "usage": {"input_tokens": 9, "output_tokens": 1}})

    seen = read([delta, last])

    assert facts(seen) == (True, 1, (9, 1), True, True, None, delta + last)


# -- usage ----------------------------------------------------------------------------------------------------------

USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}})


@pytest.mark.parametrize("reads", [[chat("hi") + USAGE + DONE], [chat("hi"), USAGE, DONE]])
def test_the_usage_event_that_we_asked_for_is_taken_out(reads: list[bytes]) -> None:
    seen = read(reads, strip_usage=True)

    assert seen.forwarded == chat("hi") + DONE
    assert (seen.reader.prompt_tokens, seen.reader.output_tokens) == (7, 2)


def test_usage_beside_choices_stays_as_the_engine_sent_it() -> None:
    block = chat("hi", usage={"prompt_tokens": 7, "completion_tokens": 1})

    seen = read([block], strip_usage=True)

    assert (seen.forwarded, seen.reader.output_tokens) == (block, 1)


@pytest.mark.parametrize("usage", [None, 5, {}, {"prompt_tokens": -1}, {"prompt_tokens": "7"}, {"prompt_tokens": True}])
def test_absurd_usage_is_unknown(usage: object) -> None:
    seen = read([event({"choices": [], "usage": usage})])

    assert (seen.reader.prompt_tokens, seen.reader.output_tokens) == (None, None)


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (
            {"error": {"message": "dead", "type": "InternalServerError", "param": "p", "code": 500}},
            EngineError(500, "dead", "InternalServerError", 500, "p", "engine_error"),
        ),
        (
            {"object": "error", "message": "dead", "type": "InternalServerError", "param": None, "code": 500},
            EngineError(500, "dead", "InternalServerError", 500, None, "engine_error"),
        ),
        (
            {"error": {"message": "busy", "type": "Service Unavailable", "code": 503}},
            EngineError(503, "busy", "Service Unavailable", 503, None, "overloaded"),
        ),
        (
            {"error": {"message": "bad", "type": "BadRequestError", "code": 400}},
            EngineError(400, "bad", "BadRequestError", 400, None, "rejected"),
        ),
        (
            {"error": "Request failed during generation: out of memory", "error_type": "generation"},
            EngineError(
                500, "Request failed during generation: out of memory", "generation", None, None, "engine_error"
            ),
        ),
        (
            {"error": "Model is overloaded", "error_type": "overloaded"},
            EngineError(429, "Model is overloaded", "overloaded", None, None, "overloaded"),
        ),
        (
            {"error": {"message": "Model is overloaded", "http_status_code": 422}},
            EngineError(429, "Model is overloaded", "", None, None, "overloaded"),
        ),
        (
            {"error": {"message": "Request failed during generation: x", "http_status_code": 422}},
            EngineError(500, "Request failed during generation: x", "", None, None, "engine_error"),
        ),
        (
            {"error": {"message": "Input validation error: x", "http_status_code": 422}},
            EngineError(422, "Input validation error: x", "", None, None, "rejected"),
        ),
        ({"error": "boom"}, EngineError(500, "boom")),
        ({"error": True, "message": "boom"}, EngineError(500, "boom")),
        ({"error": {"code": "server_error"}}, EngineError(500, "", "", "server_error")),
        ({"detail": "dead"}, EngineError(500, "dead")),
        ({"detail": [{"msg": "too long"}], "status": 422}, EngineError(422, "too long", reason="rejected")),
        ({"message": "busy", "code": 503}, EngineError(503, "busy", "", 503, None, "overloaded")),
        ({"errors": [{"message": "dead", "code": 500}]}, EngineError(500, "dead", "", 500)),
        ({"errors": ["dead"]}, EngineError(500, "dead")),
    ],
)
def test_an_error_inside_a_200_is_found_in_every_shape(payload: object, expected: EngineError) -> None:
    seen = read([chat("ok so far") + chat("more"), chat("last") + event(payload) + DONE])

    assert seen.error == expected
    assert seen.forwarded == chat("ok so far") + chat("more") + chat("last")


@pytest.mark.parametrize(
    "payload",
    [
        {"errors": []},
        {"message": "queued"},
        {"message": "queued", "code": 200},
        {"detail": None},
        {"choices": [{}], "detail": "x"},
    ],
)
def test_a_word_of_a_server_that_names_no_fault_is_no_error(payload: object) -> None:
    assert read([chat("a"), event(payload), chat("", "stop"), DONE]).error is None


@pytest.mark.parametrize(("finish", "status"), [("abort", 503), ("error", 502)])
def test_an_aborted_finish_is_an_error_and_not_an_end(finish: str, status: int) -> None:
    seen = read([chat("a"), chat("b"), chat("", finish), DONE])

    assert seen.error is not None
    assert (seen.error.status, seen.error.reason, seen.reader.finished) == (status, "aborted", False)


def test_a_queued_stream_that_was_shut_down_is_terminated_but_neither_started_nor_finished() -> None:
    seen = read([event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}}), DONE])

    assert (seen.reader.terminated, seen.reader.started, seen.reader.finished) == (True, False, False)


def test_after_an_error_nothing_more_goes_out() -> None:
    reader = open_reader("openai", "/v1/completions", sequences=1, strip_usage=False)
    first = reader.inspect(event({"error": "boom"}))

    later = reader.inspect(chat("late"))

    assert first is not None
    assert (later and later.forward, later and later.error) == (b"", first.error)


@settings(deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["openai", "responses", "messages", "tgi"]))
def test_no_bytes_make_a_reader_raise(junk: bytes, dialect: str) -> None:
    stream = chat("x") + b"data: " + junk + b"\n\n" + b"data: {" + junk + b"}\n\n"

    seen = read([stream, junk], dialect)

    assert seen.error is None or seen.error.status >= 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "choices",
    "delta",
    "usage",
    "error",
    "type",
    "code",
    "details",
    "token",
    "response",
    "message",
    "finish_reason",
]


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(KEYS), json_values | st.dictionaries(st.sampled_from(KEYS), json_values)),
    st.sampled_from(["openai", "responses", "messages", "tgi"]),
)
def test_no_json_makes_a_reader_raise(payload: dict[str, object], dialect: str) -> None:
    choices = event({"choices": [payload, {"delta": payload}]})

    seen = read([event(payload), choices], dialect)

    assert seen.error is None or 400 <= seen.error.status <= 599


# -- long events ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [600_000, 8_000_000])
def test_a_huge_event_counts_once_and_passes_whole(size: int) -> None:
    stream = chat("x" * size) + chat(None, "stop") + DONE

    seen = read([stream[i : i + 65536] for i in range(0, len(stream), 65536)])

    assert seen.forwarded == stream
    assert (seen.reader.started, seen.reader.tokens, seen.reader.finished) == (True, 1, True)


def test_a_huge_event_starts_the_stream_with_its_first_piece() -> None:
    seen = read([chat("x" * 40_000)[:30_000]])

    assert seen.reader.started


def test_long_opening_events_do_not_start_a_stream() -> None:
    created = {"type": "response.created", "sequence_number": 0, "response": {"instructions": "x" * 40_000}}
    block = event(created, "response.created")
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "ids": "1," * 20_000})

    responses = read([block[:30_000], block[30_000:]], "responses")
    openai = read([role[:30_000], role[30_000:]])

    assert (responses.reader.started, responses.reader.next_sequence_number) == (False, 1)
    assert (openai.reader.started, openai.reader.tokens) == (False, 0)


def test_a_long_comment_does_not_start_a_stream() -> None:
    comment = b": " + b"x" * 40_000

    seen = read([comment[:30_000], comment[30_000:], b"\n\n", chat("a")])

    assert (seen.reader.tokens, seen.forwarded) == (1, comment + b"\n\n" + chat("a"))
    assert read([comment]).reader.started is False


def test_the_usage_of_a_long_last_event_is_read() -> None:
    response = {"output": "x" * 100_000, "usage": {"input_tokens": 5, "output_tokens": 9}}
    block = event({"type": "response.completed", "sequence_number": 3, "response": response}, "response.completed")

    seen = read([block[i : i + 10_000] for i in range(0, len(block), 10_000)], "responses")

    assert (seen.reader.terminated, seen.reader.prompt_tokens, seen.reader.output_tokens) == (True, 5, 9)


def test_the_last_event_is_read_without_its_empty_line() -> None:
    reader = open_reader("openai", "/v1/chat/completions", sequences=1, strip_usage=False)

    reader.inspect(b"data: [DONE]\n")

    assert reader.terminated


# -- the other dialects ---------------------------------------------------------------------------------------------


def responses_event(kind: str, number: int, **more: object) -> bytes:
    return event({"type": kind, "sequence_number": number, **more}, kind)


def test_a_responses_stream_ends_without_done() -> None:
    created = responses_event("response.created", 0, response={"status": "in_progress", "error": None})
    delta = responses_event("response.output_text.delta", 1, delta="hey")
    usage = {"input_tokens": 4, "output_tokens": 1}
    completed = responses_event("response.completed", 2, response={"status": "completed", "usage": usage})

    opened = read([created], "responses")
    whole = read([created + delta, completed], "responses")

    assert (opened.reader.started, opened.reader.next_sequence_number) == (False, 1)
    assert facts(whole) == (True, 1, (4, 1), True, True, None, created + delta + completed)
    assert whole.reader.next_sequence_number == 3


@pytest.mark.parametrize(
    ("block", "status", "code"),
    [
        (responses_event("error", 2, code="server_error", message="dead", param=None), 500, "server_error"),
        (responses_event("response.failed", 2, response={"error": {"code": "x", "message": "dead"}}), 500, "x"),
        (event({"error": {"message": "dead", "code": 503}}), 503, 503),
    ],
)
def test_a_failed_response_is_an_error(block: bytes, status: int, code: object) -> None:
    delta = responses_event("response.output_text.delta", 1, delta="hey")

    seen = read([delta + block], "responses")

    assert seen.error is not None
    assert (seen.error.status, seen.error.message, seen.error.code) == (status, "dead", code)
    assert (seen.forwarded, seen.reader.next_sequence_number) == (delta, 2)


def messages_event(kind: str, **more: object) -> bytes:
    return event({"type": kind, **more}, kind)


def test_a_messages_stream_ends_with_message_stop() -> None:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 3, "output_tokens": 1}
    opening = messages_event("message_start", message={"usage": usage}) + messages_event("ping")
    block_start = messages_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    texts = [
        messages_event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        for text in ("Hel", "lo", " there", " you")
    ]
    ending = messages_event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 4})
    stop = messages_event("message_stop")

    opened = read([opening, block_start], "messages")
    whole = read([opening, block_start, *texts, ending, stop], "messages")

    assert opened.reader.started is False
    assert facts(whole)[:6] == (True, 4, (8, 4), True, True, None)


def test_a_messages_error_event_is_an_error() -> None:
    seen = read([messages_event("error", error={"type": "overloaded_error", "message": "Overloaded"})], "messages")

    assert seen.error == EngineError(503, "Overloaded", "overloaded_error", None, None, "overloaded")


def tgi_event(text: str, generated: str | None = None, details: object = None) -> bytes:
    token = {"id": 1, "text": text, "logprob": -0.1, "special": False}
    return (
        b"data:"
        + json.dumps({"index": 1, "token": token, "generated_text": generated, "details": details}).encode()
        + b"\n\n"
    )


def test_a_tgi_stream_ends_with_the_generated_text() -> None:
    details = {"finish_reason": "length", "generated_tokens": 2, "input_length": 6}
    stream = b":\n\n" + tgi_event("a") + tgi_event("b", "ab", details)

    half = read([b":\n\n" + tgi_event("a")], "tgi")
    whole = read([stream], "tgi")

    assert (half.reader.started, half.reader.finished, half.reader.terminated) == (True, False, False)
    assert facts(whole) == (True, 2, (6, 2), True, True, None, stream)


def test_a_tgi_stream_can_be_nothing_but_an_error() -> None:
    seen = read([b'data:{"error":"Model is overloaded","error_type":"overloaded"}\n\n'], "tgi")

    assert seen.error is not None
    assert (seen.error.status, seen.forwarded, seen.reader.started) == (429, b"", False)


def test_an_unknown_dialect_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="dialect 'grpc' of /x: expected one of openai, responses, messages, tgi"):
        open_reader("grpc", "/x", sequences=1, strip_usage=False)


@pytest.mark.parametrize("cached", [0, 33])
def test_timings_of_llamacpp_stand_for_usage_where_there_is_none(cached: int) -> None:
    reader = open_reader("openai", "/v1/chat/completions", sequences=1, strip_usage=False)

    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    timings = {"cache_n": cached, "prompt_n": 1, "predicted_n": 5, "predicted_ms": 50.5}
    reader.inspect(b"data: " + json.dumps({**last, "timings": timings}).encode() + b"\n\n")

    assert (reader.prompt_tokens, reader.output_tokens) == (cached + 1, 5)
