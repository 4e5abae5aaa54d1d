"""Splices change exactly what they say and leave every other byte alone."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.dialects.scan import members
from gateway.ingress.body_edits import edited, splice

KEYS = ("model", "stream_options", "priority", "return_token_ids", "temperature", 'quo"te', "back\\slash", "ключ", "")
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)
spaces = st.text(" \t\r\n", max_size=3)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON objects as clients write them: any white space, any escapes, in any key order."""
    document = draw(st.dictionaries(st.sampled_from(KEYS), values, max_size=6))
    pairs = [
        f"{draw(spaces)}{json.dumps(key, ensure_ascii=draw(st.booleans()))}{draw(spaces)}:{draw(spaces)}"
        f"{json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])))}{draw(spaces)}"
        for key, value in document.items()
    ]
    return f"{draw(spaces)}{{{','.join(pairs) or draw(spaces)}}}{draw(spaces)}".encode()


edits = st.dictionaries(st.sampled_from(["model", "priority", "return_token_ids", "new"]), values, max_size=3)


@given(bodies(), edits)
def test_a_spliced_body_reads_as_the_edited_object(body: bytes, wanted: dict[str, object]) -> None:
    result = splice(body, {key: orjson.dumps(value) for key, value in wanted.items()})

    assert orjson.loads(result) == {**orjson.loads(body), **orjson.loads(orjson.dumps(wanted))}


@given(bodies(), edits)
def test_every_byte_outside_the_edited_values_stays(body: bytes, wanted: dict[str, object]) -> None:
    result = splice(body, {key: orjson.dumps(value) for key, value in wanted.items()})

    at, end = 0, 0
    for key, start, end in members(body):
        if key in wanted:
            kept = body[at:start]
            assert result.startswith(kept)
            result = result[len(kept) :].removeprefix(orjson.dumps(wanted[key]))
            at = end
    tail = body[at:]
    brace = tail.rindex(b"}")
    assert result.startswith(tail[:brace])
    assert result.endswith(tail[brace:])


@given(bodies())
def test_members_are_exactly_the_top_level_values(body: bytes) -> None:
    found = {key: orjson.loads(body[start:end]) for key, start, end in members(body)}

    assert found == orjson.loads(body)


@given(bodies())
def test_asking_for_usage_keeps_the_clients_other_options(body: bytes) -> None:
    before = orjson.loads(body)

    after = orjson.loads(edited(body, include_usage=True))

    options = before.get("stream_options")
    if isinstance(options, dict):
        assert after["stream_options"] == {**options, "include_usage": True}
    elif options is None:
        assert after["stream_options"] == {"include_usage": True}
    else:
        assert after["stream_options"] == options
    assert {k: v for k, v in after.items() if k != "stream_options"} == {
        k: v for k, v in before.items() if k != "stream_options"
    }


def test_a_key_written_twice_is_replaced_twice() -> None:
    assert edited(b'{"model":"a","x":1,"model":"b"}', model="c") == b'{"model":"c","x":1,"model":"c"}'


def test_a_key_hidden_by_escapes_is_found() -> None:
    assert edited(rb'{"mod\u0065l":"a"}', model="c") == rb'{"mod\u0065l":"c"}'


def test_a_nested_key_of_the_same_name_is_left_alone() -> None:
    body = b'{"tools":[{"model":"deep","priority":1}],"model":"a"}'

    assert edited(body, model="c", priority=7) == b'{"tools":[{"model":"deep","priority":1}],"model":"c","priority":7}'


def test_numbers_keep_the_form_the_client_gave_them() -> None:
    body = b'{"temperature":1.000,"seed":123456789012345678901234567890,"model":"a"}'

    assert edited(body, model="b").startswith(b'{"temperature":1.000,"seed":123456789012345678901234567890,')


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"model":"m"}', b'{"model":"m","max_output_tokens":7}'),
        (b'{"max_tokens": 500, "n": 1}', b'{"max_tokens": 7, "n": 1}'),
        (b'{"max_tokens":500,"max_completion_tokens":9}', b'{"max_tokens":7,"max_completion_tokens":7}'),
    ],
)
def test_every_limit_of_the_client_is_replaced_and_one_is_written_where_there_was_none(
    body: bytes, wanted: bytes
) -> None:
    assert edited(body, output_limit=7, limit_field="max_output_tokens") == wanted


def test_without_edits_it_is_the_same_object() -> None:
    body = b'{"model":"a"}'

    assert edited(body) is body


@pytest.mark.parametrize("empty", [b"{}", b" { \n } "])
def test_an_empty_object_gets_its_first_member_without_a_comma(empty: bytes) -> None:
    assert orjson.loads(splice(empty, {"a": b"1", "b": b"2"})) == {"a": 1, "b": 2}


def test_a_multipart_alias_is_replaced_and_every_other_byte_stays() -> None:
    sound = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nname="model"\r\n\r\nno\xff\r\n'
    head = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
    body = sound + head + b"alias\r\n--b--\r\n"

    assert edited(body, model="whisper", include_usage=True) == sound + head + b"whisper\r\n--b--\r\n"


def test_a_multipart_alias_is_replaced_behind_empty_lines_too() -> None:
    head = b'\r\n\r\n--b \r\nContent-Disposition: form-data; name="model"\r\n\r\n'

    assert edited(head + b"alias\r\n--b--\r\n", model="whisper") == head + b"whisper\r\n--b--\r\n"


@pytest.mark.parametrize("body", [b"", b"plain text", b"[1]", b"--no boundary"])
def test_a_body_that_cannot_be_edited_stays(body: bytes) -> None:
    assert edited(body, model="m", include_usage=True, priority=1) == body
