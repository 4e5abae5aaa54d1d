"""What is read of bodies, and what is refused before it costs anything."""

from __future__ import annotations

import contextlib
import json
import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import Refusal
from gateway.exchange import Facts
from gateway.ingress.facts import DEPTH_MAX, INPUTS_MAX, MEDIA_TOKENS, SEQUENCES_MAX, _too_deep, read_json
from gateway.ingress.multipart import read_multipart

CHAT = "/v1/chat/completions"
BOUNDARY = "multipart/form-data; boundary=----b0"


def facts(at_path: str = CHAT, /, **body: object) -> Facts:
    return read_json(orjson.dumps({"model": "m", **body}), path=at_path)


def refusal_of(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read_json(body, path=CHAT)
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"model"',
        b"null",
        b'{"model":"m","x":NaN}',
        b'{"model":"m","x":Infinity}',
        b'{"model":"m","x":"\xff"}',
        b'{"model":"m","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model":"m","x":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"model":"m","x":' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
        b'{"model":"m","x":' + b"[" * 2_000_000,
        b'{"model":"m","x":' + b"9" * 1_000_000 + b"}",
        b"{}",
        b'{"model":null}',
        b'{"model":1}',
        b'{"model":["m"]}',
        b'{"model":{"id":"m"}}',
        b'{"model":true}',
        b'{"model":""}',
        b'{"model":"' + b"m" * 5_000 + b'"}',
    ],
)
def test_an_unusable_body_is_a_400_at_once(body: bytes) -> None:
    began_s = time.process_time()

    refusal = refusal_of(body)

    assert (refusal.status, refusal.type) == (400, "invalid_request_error")
    assert time.process_time() - began_s < 0.1


def test_a_hundred_levels_and_many_keys_pass() -> None:
    nested: object = "x"
    for _ in range(100):
        nested = [nested]

    read = facts(metadata=nested, tools=[nested], **{f"k{number}": 1 for number in range(100_000)})

    assert read.model == "m"


@pytest.mark.parametrize(("levels", "refused"), [(DEPTH_MAX - 1, False), (DEPTH_MAX, True), (1_000, True)])
def test_a_body_deeper_than_engines_bear_is_refused(levels: int, refused: bool) -> None:
    body = b'{"model":"m","x":' + b'[{"\\"[":' * (levels // 2) + b"[" * (levels % 2)
    body += b'"]]"' + b"]" * (levels % 2) + b"}]" * (levels // 2) + b"}"

    with pytest.raises(Refusal, match="deeper") if refused else contextlib.nullcontext():
        read_json(body, path=CHAT)


_TEXT = st.text('[]{}"\\a,', max_size=5)


@given(
    st.recursive(_TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3)),
    st.integers(0, 5),
)
def test_depth_is_counted_whatever_strings_hold(value: object, depth_max: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.ingress.facts.DEPTH_MAX", depth_max)

        assert _too_deep(orjson.dumps(value)) == (depth_of(value) > depth_max)


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_called_so(body: bytes) -> None:
    assert refusal_of(body).message == "body is empty: send one JSON object"


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


def test_an_error_never_quotes_the_body() -> None:
    assert "secret" not in refusal_of(b'{"model": secret-text').message


@pytest.mark.parametrize("name", ["max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"])
def test_the_limit_is_found_by_any_name(name: str) -> None:
    assert facts(**{name: 7}).max_tokens == 7


@pytest.mark.parametrize("value", [None, 0, -1, "7", 7.5, True, [7]])
def test_a_limit_that_is_no_limit_is_left_to_the_engine(value: object) -> None:
    assert facts(max_tokens=value).max_tokens is None


def test_a_null_limit_gives_way_to_the_other_one() -> None:
    assert facts(max_completion_tokens=None, max_tokens=9).max_tokens == 9


@pytest.mark.parametrize(
    ("prompt", "tokens", "sequences"),
    [
        ("x" * 40, 10, 1),
        (["x" * 40, "y" * 40], 20, 2),
        ([1, 2, 3], 3, 1),
        ([[1, 2, 3], [4]], 4, 2),
        ("é" * 20, 10, 1),
        ([], 0, 1),
        (None, 0, 1),
        (17, 0, 1),
    ],
)
def test_prompts_of_every_shape_are_estimated(prompt: object, tokens: int, sequences: int) -> None:
    read = facts("/v1/completions", prompt=prompt)

    assert (read.prompt_tokens, read.sequences) == (tokens, sequences)


def test_sequences_are_prompts_times_n_and_never_less() -> None:
    assert facts("/v1/completions", prompt=["a", "b"], n=3).sequences == 6
    assert facts(n=SEQUENCES_MAX).sequences == SEQUENCES_MAX
    assert facts(n="5").sequences == facts(n=5.0).sequences == 5, "as engines read them"
    assert facts(n=-5).sequences == facts(n="many").sequences == facts(n=True).sequences == facts(n=2.5).sequences == 1


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"n": 10**9}, "n is 1000000000: at most 16384 answers may be asked for in one request; send it in several"),
        ({"n": SEQUENCES_MAX + 1}, "n is 16385: at most 16384 answers"),
        ({"n": 10**30}, "n is 9223372036854775808: at most"),
        ({"n": "1000000000"}, "n is 1000000000: at most"),
        ({"n": "9" * 4000}, "n is 9223372036854775808: at most"),
        ({"n": 1e9}, "n is 1000000000: at most"),
        ({"n": 2, "best_of": 10**9}, "best_of is 1000000000: at most"),
        ({"inputs": "a", "parameters": {"best_of": 10**9}}, "best_of is 1000000000: at most"),
        ({"prompt": ["a"] * 129, "n": 128}, "n is 128 for each of 129 inputs: at most 16384 answers"),
    ],
)
def test_more_answers_than_an_engine_takes_in_one_request_are_refused(body: dict[str, object], told: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_json(json.dumps({"model": "m", **body}).encode(), path="/v1/completions")

    assert (caught.value.status, caught.value.reason) == (400, "too_many_sequences")
    assert told in caught.value.message


def test_more_inputs_than_one_request_may_have_are_refused() -> None:
    assert facts("/v1/embeddings", input=["a"] * INPUTS_MAX).sequences == INPUTS_MAX
    with pytest.raises(Refusal, match="the request has 65537 inputs: at most 65536 may be in one"):
        facts("/v1/embeddings", input=["a"] * (INPUTS_MAX + 1))


def test_an_image_counts_flat_and_the_text_beside_it_by_length() -> None:
    parts = [
        {"type": "text", "text": "x" * 396},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}},
    ]

    read = facts(messages=[{"role": "user", "content": parts}])

    assert MEDIA_TOKENS + 99 <= read.prompt_tokens < MEDIA_TOKENS + 110


def test_embeddings_count_inputs_and_responses_items_do_not() -> None:
    assert facts("/v1/embeddings", input=["a", "b", "c"]).sequences == 3
    assert facts("/v1/responses", input=[{"role": "user", "content": "hello"}]).sequences == 1


@pytest.mark.parametrize(
    ("value", "streams"), [(True, True), (False, False), (None, False), ("true", False), (1, False)]
)
def test_only_true_asks_for_a_stream(value: object, streams: bool) -> None:
    assert facts(stream=value).stream is streams


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/v2/rerank", "/score", "/tokenize"])
def test_a_route_without_events_asks_for_no_stream_whatever_its_body_says(path: str) -> None:
    assert not read_json(b'{"model":"m","input":"a","stream":true}', path=path).stream


def test_tgi_parameters_and_default_model_are_read() -> None:
    body = orjson.dumps({"inputs": "x" * 40, "parameters": {"max_new_tokens": 5, "best_of": 2}})

    read = read_json(body, path="/generate_stream", always_stream=True, default_model="only")

    assert read == Facts("only", stream=True, prompt_tokens=10, max_tokens=5, copies=2, sequences=2)


def test_the_fields_for_routing_are_read() -> None:
    read = facts(
        service_tier="flex", stream=True, stream_options={"include_usage": True}, previous_response_id="resp_1"
    )

    assert (read.service_tier, read.wants_usage, read.previous_response_id) == ("flex", True, "resp_1")


odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    "messages", "prompt", "input", "inputs", "n", "best_of", "max_tokens", "stream", "stream_options", "parameters",
    "service_tier", "previous_response_id", "tools", "documents",
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), odd), st.sampled_from([CHAT, "/v1/embeddings", "/v1/responses"]))
def test_odd_shapes_are_never_an_error_but_for_too_many_answers(body: dict[str, object], path: str) -> None:
    refused = ""
    try:
        read = facts(path, **body)
    except Refusal as refusal:
        refused = refusal.reason
    if refused:
        assert refused == "too_many_sequences"
        return

    assert read.prompt_tokens >= 0
    assert 1 <= read.sequences <= SEQUENCES_MAX


def test_hostile_part_heads_take_linear_time() -> None:
    def spent_s(repeats: int) -> float:
        head = b"------b0\r\n" + b"content-disposition:" * repeats + b"\r\n\r\nx\r\n"
        began_s = time.thread_time()
        with pytest.raises(Refusal):
            read_multipart(head * 900 + END, BOUNDARY)
        return time.thread_time() - began_s

    short_s, long_s = (min(spent_s(repeats) for _ in range(3)) for repeats in (100, 800))

    assert long_s < 24 * short_s, (
        "eight times the bytes take eight times as long, and sixty-four when it is their square"
    )


def part(name: str, content: bytes, file: str = "") -> bytes:
    extra = f'; filename="{file}"' if file else ""
    return f'------b0\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + content + b"\r\n"


END = b"------b0--\r\n"


@pytest.mark.parametrize("first", [True, False])
def test_a_multipart_model_is_found_wherever_it_stands(first: bool) -> None:
    sound = part("file", b"\r\n--\0\xff" * 4_000_000, "../../x\0.wav")
    model = part("model", b"whisper")
    body = (model + sound if first else sound + model) + END
    began_s = time.process_time()

    read = read_multipart(body, BOUNDARY)

    assert (read.model, read.stream) == ("whisper", False)
    assert time.process_time() - began_s < 0.5


def test_a_multipart_file_that_contains_a_model_field_is_not_believed() -> None:
    body = part("file", b'Content-Disposition: form-data; name="model"\r\n\r\nfake') + part("model", b"real") + END

    assert read_multipart(body, BOUNDARY).model == "real"


@pytest.mark.parametrize("file", ["x; name=model", "x; name=model; y", 'a\\"; name=model', "C:\\x\\; name=model"])
def test_a_file_that_is_called_like_the_model_field_is_not_believed(file: str) -> None:
    head = f'------b0\r\nContent-Disposition: form-data; filename="{file}"; name="file"\r\n\r\nfake\r\n'.encode()

    assert read_multipart(part("model", b"real") + head + END, BOUNDARY).model == "real"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (part("model", b"m"), BOUNDARY),
        (part("model", b"m")[:-20], BOUNDARY),
        (part("model", b"m") + b"------b0-", BOUNDARY),
        (part("model", b"m") + END, "multipart/form-data"),
        (part("model", b"m") + END, "multipart/form-data; boundary=other"),
        (part("file", b"x") + END, BOUNDARY),
        (part("model", b"m" * 5_000) + END, BOUNDARY),
        (part("model", b"") + END, BOUNDARY),
        (b"", BOUNDARY),
        (b"------b0\r\n------b0\r\n" + END, BOUNDARY),
        (part("x", b"1") * 1_001 + END, BOUNDARY),
    ],
)
def test_a_broken_multipart_body_is_a_400(body: bytes, content_type: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_multipart(body, content_type)

    assert caught.value.status == 400


@given(st.binary(max_size=200))
def test_any_bytes_are_multipart_facts_or_refused(body: bytes) -> None:
    with contextlib.suppress(Refusal):
        assert read_multipart(b"------b0" + body, BOUNDARY, default_model="m").model
