"""A client can tell success, failure and truncation apart, on every endpoint, however the engine's answer ends.

The kind of fault: a broken engine answer that becomes a clean end, an error inside a 200 that passes for an answer, a 200
that is sent before the engine's status is known, and one rule of ending for endpoints that end in different ways.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.end_to_end.conftest import Stage
from tests.end_to_end.counts import counts
from tests.end_to_end.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES, TGI, WAYS, Way, payloads, typed
from tests.end_to_end.scripted_engine import DONE, MODEL, Asked, Wire, answer, delta, event, hello, stream
from tests.gateway.ingress.raw_client import Answer, RawClient, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

every_way = pytest.mark.parametrize("way", WAYS, ids=repr)
both_breaks = pytest.mark.parametrize("end", ["fin", "rst"])
LONG = "0123456789abcdef" * 2_000
"""More than the gateway holds of one event, so that it is passed on in pieces."""


def error_of(way: Way, payload: dict[str, Any]) -> str:
    """The message of an error as the way's clients look for it, as event or as body; fails where there is none."""
    if way is TGI:
        assert isinstance(payload["error"], str)
        assert payload["error_type"]
        return payload["error"]
    if way is RESPONSES and payload.get("type") == "error":
        assert isinstance(payload["code"], str)
        message = payload["message"]
    else:
        if way is MESSAGES:
            assert payload["type"] == "error"
        message = payload["error"]["message"]
        assert payload["error"]["type"]
    assert isinstance(message, str)
    assert message
    return message


def assert_broken_off(way: Way, got: Answer, text: str) -> None:
    """The text so far, one error that the client's SDK raises on, and a transfer without its end."""
    assert got.status == 200
    found = payloads(got.body)
    assert "".join(map(way.read, found)) == text
    assert error_of(way, found[-1])
    assert DONE not in got.body
    assert not any(piece in got.body for piece in way.ending)
    assert not got.whole


# -- an engine that breaks off ---------------------------------------------------------------------------------------


@both_breaks
@every_way
async def test_an_engine_that_breaks_off_after_text_never_looks_finished(stage: Stage, way: Way, end: str) -> None:
    before = await counts(stage.gateway, way.model)
    pieces = [*way.opening, way.token("half of an "), way.token("answer and")]
    stage.engine_for(way).play = stream(*pieces, end=end)

    got = await stage.ask(way.ask())

    assert_broken_off(way, got, "half of an answer and")
    grown = await counts(stage.gateway, way.model) - before
    assert (grown["engine_failed"], grown["completed"], grown["cancelled"]) == (1, 0, 0)


@both_breaks
@every_way
async def test_a_break_inside_an_event_drops_the_piece_and_tells(stage: Stage, way: Way, end: str) -> None:
    pieces = [*way.opening, way.token("whole"), way.token("broken")[:-9]]
    stage.engine_for(way).play = stream(*pieces, end=end)

    assert_broken_off(way, await stage.ask(way.ask()), "whole")


@both_breaks
@every_way
async def test_a_break_inside_a_long_event_is_an_aborted_transfer(stage: Stage, way: Way, end: str) -> None:
    """Part of the event has been sent, so an error event could only be glued to it."""
    before = await counts(stage.gateway, way.model)
    pieces = [*way.opening, way.token("whole"), way.token(LONG)[:-9]]
    stage.engine_for(way).play = stream(*pieces, end=end, pause_s=0.01)

    got = await stage.ask(way.ask())

    assert (got.status, got.whole) == (200, False)
    assert b"".join(pieces).startswith(got.body)
    assert (await counts(stage.gateway, way.model) - before)["engine_failed"] == 1


@every_way
async def test_a_clean_framing_without_the_dialects_end_is_no_success(stage: Stage, way: Way) -> None:
    before = await counts(stage.gateway, way.model)
    stage.engine_for(way).play = stream(*way.opening, way.token("half"))

    assert_broken_off(way, await stage.ask(way.ask()), "half")
    assert (await counts(stage.gateway, way.model) - before)["engine_failed"] == 1


@every_way
async def test_a_body_that_only_ends_with_the_connection_is_judged_by_its_dialect(stage: Stage, way: Way) -> None:
    """On HTTP/1.0 a cut looks like an end on the wire."""

    async def old(_asked: Asked, wire: Wire) -> None:
        await wire.head(version="HTTP/1.0")
        await wire.raw(b"".join([*way.opening, way.token("half")]))

    stage.engine_for(way).play = old

    assert_broken_off(way, await stage.ask(way.ask()), "half")


@both_breaks
@every_way
async def test_a_break_before_any_text_is_a_status(stage: Stage, way: Way, end: str) -> None:
    stage.engine_for(way).play = stream(*way.opening, end=end)

    got = await stage.ask(way.ask())

    assert (got.status, got.one("content-type"), got.whole) == (502, "application/json", True)
    assert error_of(way, got.json())


@both_breaks
async def test_a_break_before_any_text_moves_to_another_engine_unseen(stage: Stage, end: str) -> None:
    stage.first.play = stage.second.play = _once_broken(stage, end)

    got = await stage.ask(CHAT.ask(model=MODEL))

    assert (got.status, got.whole, CHAT.text(got.body)) == (200, True, "Hello")
    assert len(stage.first.requests) == len(stage.second.requests) == 1


def _once_broken(stage: Stage, end: str) -> Any:
    async def play(asked: Asked, wire: Wire) -> None:
        if len(stage.first.requests) + len(stage.second.requests) == 1:
            await stream(*CHAT.opening, end=end)(asked, wire)
        else:
            await hello(asked, wire)

    return play


@pytest.mark.parametrize("size", [600, 3_000_000], ids=["small", "large"])
@both_breaks
@every_way
async def test_a_whole_answer_that_is_cut_is_never_a_shorter_answer(
    stage: Stage, way: Way, end: str, size: int
) -> None:
    body = orjson.dumps(way.whole("x" * size))

    async def cut_short(_asked: Asked, wire: Wire) -> None:
        await wire.head(content_type="application/json", length=len(body))
        await wire.raw(body[: len(body) // 2])
        await asyncio.sleep(0.05)
        wire.fin() if end == "fin" else wire.rst()

    stage.engine_for(way).play = cut_short
    got = await stage.ask(way.ask_whole())

    if size < 1000:
        assert (got.status, got.whole) == (502, True)
        assert error_of(way, got.json())
    else:
        assert (got.status, got.whole) == (200, False)


# -- errors inside a 200 ---------------------------------------------------------------------------------------------

ERRORS = {
    "openai": event({"error": {"message": "engine died", "type": "server_error", "param": None, "code": 500}}),
    "vllm_flat": event({"object": "error", "message": "engine died", "type": "InternalServerError", "code": 500}),
    "tgi_flat": event({"error": "engine died", "error_type": "generation"}),
    "text": event({"error": "engine died"}),
    "messages": typed({"type": "error", "error": {"type": "api_error", "message": "engine died"}}),
    "responses": typed({"type": "error", "sequence_number": 9, "code": "server_error", "message": "engine died"}),
    "named_object": b'event: error\ndata: {"message": "engine died"}\n\n',
    "named_text": b"event: error\ndata: engine died\n\n",
    "error_field": b'error: {"code": 500, "message": "engine died", "type": "server_error"}\n\n',
}
every_error = pytest.mark.parametrize("error", ERRORS.values(), ids=list(ERRORS))


@every_error
@every_way
async def test_an_error_event_after_text_reaches_the_client_in_its_dialect_and_counts(
    stage: Stage, way: Way, error: bytes
) -> None:
    before = await counts(stage.gateway, way.model)
    stage.engine_for(way).play = stream(*way.opening, way.token("ok so far"), error, DONE)

    got = await stage.ask(way.ask())

    assert_broken_off(way, got, "ok so far")
    assert "engine died" in error_of(way, payloads(got.body)[-1])
    grown = await counts(stage.gateway, way.model) - before
    assert (grown["engine_failed"], grown["completed"]) == (1, 0)


@every_error
@every_way
async def test_an_error_event_before_any_text_becomes_a_status(stage: Stage, way: Way, error: bytes) -> None:
    stage.engine_for(way).play = stream(*way.opening, error, DONE)

    got = await stage.ask(way.ask())

    assert (got.status, got.one("content-type"), got.whole) == (500, "application/json", True)
    assert "engine died" in error_of(way, got.json())


@every_error
async def test_an_error_and_the_text_before_it_may_share_one_read(stage: Stage, error: bytes) -> None:
    stage.first.play = stream(event(delta("a")) + event(delta("b")) + error + DONE)

    assert_broken_off(CHAT, await stage.ask(CHAT.ask()), "ab")


@pytest.mark.parametrize("finish", ["abort", "error"])
async def test_a_finish_that_is_an_abort_is_no_success(stage: Stage, finish: str) -> None:
    stage.first.play = stream(event(delta("half")), event(delta(finish=finish)), DONE)

    assert_broken_off(CHAT, await stage.ask(CHAT.ask()), "half")


@every_way
async def test_a_stream_of_nothing_but_its_end_mark_is_no_success(stage: Stage, way: Way) -> None:
    stage.engine_for(way).play = stream(DONE)

    got = await stage.ask(way.ask())

    assert (got.status, got.one("content-type")) == (502, "application/json")
    assert error_of(way, got.json())


@every_way
async def test_an_empty_stream_is_no_success(stage: Stage, way: Way) -> None:
    stage.engine_for(way).play = stream()

    assert (await stage.ask(way.ask())).status == 502


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "engine died", "type": "server_error", "code": 500}},
        {"object": "error", "message": "engine died", "type": "InternalServerError", "code": 500},
        {"error": "engine died", "error_type": "generation"},
    ],
    ids=["openai", "vllm_flat", "tgi_flat"],
)
@every_way
async def test_an_error_object_as_a_whole_200_is_no_success(stage: Stage, way: Way, error: dict[str, object]) -> None:
    before = await counts(stage.gateway, way.model)
    stage.engine_for(way).play = answer(200, error)

    got = await stage.ask(way.ask_whole())
    for_stream = await stage.ask(way.ask())

    assert got.status == for_stream.status == 500
    assert error_of(way, got.json()) == error_of(way, for_stream.json()) == "engine died"
    assert (await counts(stage.gateway, way.model) - before)["engine_failed"] == 2


@every_way
async def test_a_word_like_error_inside_text_is_text(stage: Stage, way: Way) -> None:
    text = '{"error": {"message": "no"}} "object": "error" event: error'
    stage.engine_for(way).play = stream(*way.stream(text))

    got = await stage.ask(way.ask())

    assert (got.whole, way.text(got.body)) == (True, text)


@pytest.mark.parametrize("empty", [{"error": None}, {"error": {}}, {"error": ""}])
async def test_an_empty_error_field_is_no_error(stage: Stage, empty: dict[str, object]) -> None:
    stage.first.play = stream(event({**delta("fine"), **empty}), event(delta(finish="stop")), DONE)

    got = await stage.ask(CHAT.ask())

    assert (got.status, got.whole) == (200, True)


# -- the status before the first byte --------------------------------------------------------------------------------

REFUSED = {
    "object": "error",
    "message": "maximum context length is 4096 tokens",
    "type": "BadRequestError",
    "code": 400,
}
BODIES = {
    "vllm_flat": REFUSED,
    "openai": {"error": {"message": "maximum context length is 4096 tokens", "type": "invalid_request_error"}},
    "tgi": {"error": "maximum context length is 4096 tokens", "error_type": "validation"},
    "detail": {"detail": [{"msg": "maximum context length is 4096 tokens"}]},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
@every_way
async def test_a_400_for_a_stream_is_a_400_with_the_engines_message(
    stage: Stage, way: Way, body: dict[str, object]
) -> None:
    before = await counts(stage.gateway, way.model)
    stage.engine_for(way).play = answer(400, body)

    got = await stage.ask(way.ask())

    assert (got.status, got.one("content-type"), got.whole) == (400, "application/json", True)
    assert error_of(way, got.json()) == "maximum context length is 4096 tokens"
    grown = await counts(stage.gateway, way.model) - before
    assert (grown["client_error"], grown["engine_failed"]) == (1, 0)


@pytest.mark.parametrize("status", [404, 409, 413, 422, 429, 500, 503, 529])
@every_way
async def test_any_error_status_for_a_stream_keeps_its_status(stage: Stage, way: Way, status: int) -> None:
    stage.engine_for(way).play = answer(status, b"<html>no</html>", content_type="text/html")

    got = await stage.ask(way.ask())

    assert (got.status, got.one("content-type")) == (status, "application/json")
    assert error_of(way, got.json())


@every_way
async def test_a_400_sent_as_an_event_stream_is_still_a_400(stage: Stage, way: Way) -> None:
    stage.engine_for(way).play = stream(event(REFUSED), DONE, status=400)

    got = await stage.ask(way.ask())

    assert (got.status, got.one("content-type")) == (400, "application/json")
    assert error_of(way, got.json())


@every_way
async def test_a_client_error_as_the_first_event_of_a_200_is_a_400(stage: Stage, way: Way) -> None:
    stage.engine_for(way).play = stream(event(REFUSED), DONE)

    got = await stage.ask(way.ask())

    assert (got.status, error_of(way, got.json())) == (400, "maximum context length is 4096 tokens")


# -- endpoints end differently ---------------------------------------------------------------------------------------


@both_breaks
@every_way
async def test_a_stream_that_said_all_is_a_success_whatever_breaks_then(stage: Stage, way: Way, end: str) -> None:
    before = await counts(stage.gateway, way.model)
    stage.engine_for(way).play = stream(*way.stream("hey"), end=end)

    got = await stage.ask(way.ask())

    assert (got.status, got.whole, got.body) == (200, True, b"".join(way.stream("hey")))
    assert (await counts(stage.gateway, way.model) - before)["completed"] == 1


@every_way
async def test_a_client_that_leaves_at_the_dialects_end_had_its_whole_answer(stage: Stage, way: Way) -> None:
    """SDKs close a stream there, and need not wait for what ends the framing."""
    before = await counts(stage.gateway, way.model)
    engine = stage.engine_for(way)
    engine.play = stream(*way.stream("hey"), end="hang")

    async with RawClient(stage.port) as client:
        await client.send(way.ask())
        await client.read_head()
        body = b""
        while body != b"".join(way.stream("hey")):
            body += await client.read_chunk()

    await until(lambda: engine.aborted)
    await until(lambda: not engine.active)
    assert (await counts(stage.gateway, way.model) - before)["completed"] == 1


@every_way
async def test_a_good_stream_ends_as_its_endpoint_ends_and_is_a_success(stage: Stage, way: Way) -> None:
    before = await counts(stage.gateway, way.model)
    stage.engine_for(way).play = stream(*way.stream("hey"))

    got = await stage.ask(way.ask())

    assert (got.status, got.whole, got.body) == (200, True, b"".join(way.stream("hey")))
    assert (await counts(stage.gateway, way.model) - before)["completed"] == 1


async def test_an_incomplete_response_is_an_end_too(stage: Stage) -> None:
    last = typed({"type": "response.incomplete", "sequence_number": 3, "response": {"id": "resp_1"}})
    stage.first.play = stream(*RESPONSES.opening, RESPONSES.token("hey"), last)

    got = await stage.ask(RESPONSES.ask())

    assert (got.whole, got.body.endswith(last)) == (True, True)


@pytest.mark.parametrize("kind", ["response.failed", "response.cancelled"])
async def test_a_failed_response_is_no_success(stage: Stage, kind: str) -> None:
    last = typed({"type": kind, "sequence_number": 3, "response": {"error": {"code": "x", "message": "engine died"}}})
    stage.first.play = stream(*RESPONSES.opening, RESPONSES.token("hey"), last)

    assert_broken_off(RESPONSES, await stage.ask(RESPONSES.ask()), "hey")


@both_breaks
async def test_a_broken_response_ends_with_an_error_event_that_continues_the_numbers(stage: Stage, end: str) -> None:
    stage.first.play = stream(*RESPONSES.opening, RESPONSES.token("hey"), end=end)

    got = await stage.ask(RESPONSES.ask())

    assert got.body.rstrip().rpartition(b"\n\n")[2].startswith(b"event: error\n")
    last = payloads(got.body)[-1]
    assert (last["type"], last["sequence_number"]) == ("error", 3)
    assert all(isinstance(last[key], str) and last[key] for key in ("code", "message"))


@pytest.mark.parametrize("way", [CHAT, COMPLETIONS], ids=repr)
async def test_two_sequences_end_when_both_have_ended(stage: Stage, way: Way) -> None:
    """n=2: the first finish reason alone is no end."""

    def finish(index: int) -> bytes:
        choice = {"index": index, "text": "", "delta": {}, "finish_reason": "stop"}
        return event({"id": "x", "choices": [choice]})

    stage.first.play = stream(*way.opening, way.token("a"), finish(0))
    broken = await stage.ask(way.ask(n=2))
    stage.first.play = stream(*way.opening, way.token("a"), finish(0), finish(1), DONE)
    good = await stage.ask(way.ask(n=2))

    assert (broken.whole, good.whole) == (False, True)
