"""One attempt's reply: what is held, what is sent, and how each kind of end reads to the client and to the service."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson
import pytest

from backends.base import CallFailure, FailureKind
from gateway.dispatch.relay import FRAMING_END_S, HELD_ERROR_BYTES, Relay
from gateway.dispatch.reply import Reply
from gateway.errors import Dialect, render_body
from gateway.exchange import Exchange, Facts
from gateway.series import Spread
from gateway.settings import Timeouts

SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"server", b"uvicorn")]
JSON = [(b"content-type", b"application/json")]


@dataclass
class FakeDownstream:
    """Records what a client would see."""

    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    end: str = ""
    gone: bool = False
    unsent_bytes: int = 0
    content_length: int | None = None

    @property
    def started(self) -> bool:
        return self.status != 0

    def start(self, status: int, headers: Sequence[tuple[str, str]], *, content_length: int | None = None) -> None:
        self.status, self.headers, self.content_length = status, list(headers), content_length

    def write(self, data: bytes) -> None:
        assert self.started
        assert data
        self.body += data

    def finish(self) -> None:
        self.end = "finished"

    def abort(self) -> None:
        self.end = "aborted"

    def watch(
        self, *, on_pause: Callable[[], None], on_resume: Callable[[], None], on_gone: Callable[[], None]
    ) -> None:
        self.on_pause, self.on_resume = on_pause, on_resume


@dataclass
class FakeCall:
    log: list[str] = field(default_factory=list)

    def pause(self) -> None:
        self.log.append("pause")

    def resume(self) -> None:
        self.log.append("resume")

    def abort(self) -> None:
        self.log.append("abort")


@dataclass
class FakeClock:
    time_s: float = 100.0

    def now_s(self) -> float:
        return self.time_s

    def pool_s(self) -> float:
        return self.time_s


class Bench:
    """A relay between a scripted engine and a recording client."""

    def __init__(
        self,
        *,
        stream: bool = True,
        path: str = "/v1/chat/completions",
        dialect: Dialect = Dialect.OPENAI,
        timeouts: Timeouts = Timeouts(),
        strip_usage: bool = False,
    ) -> None:
        self.counted_s = -math.inf
        self.clock = FakeClock()
        self.client = FakeDownstream()
        self.exchange = Exchange(
            request_id="r1",
            method=b"POST",
            path=path,
            target=path.encode(),
            dialect=dialect,
            headers=(),
            body=b"{}",
            facts=Facts(model="m", stream=stream),
            tenant="t",
            downstream=self.client,
            accepted_s=self.clock.time_s,
        )
        self.reply = Reply(self.exchange, self.clock, timeouts)
        self.first_tokens: list[float] = []
        self.gaps = Spread((0.05, 0.5))
        self.relay = Relay(
            self.exchange,
            self.reply,
            engine="e1",
            clock=self.clock,
            timeouts=timeouts,
            strip_usage=strip_usage,
            on_first_token=self.first_tokens.append,
            on_gap=self.gaps.observe,
            counted_s=lambda: self.counted_s,
        )
        self.call = FakeCall()
        self.relay.attach(self.call)

    def play(
        self, *pieces: bytes, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = SSE, end: str = "clean"
    ) -> None:
        self.relay.on_head(status, headers)
        for piece in pieces:
            self.relay.on_body(piece)
        if end == "clean":
            self.relay.on_end()
        elif end == "cut":
            self.relay.on_failure(CallFailure(FailureKind.TRUNCATED, "cut", sent=True, response_started=True))


def event(payload: object) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def delta(text: str | None = None, *, finish: str | None = None, role: bool = False) -> bytes:
    inner: dict[str, object] = {"role": "assistant", "content": ""} if role else {}
    if text is not None:
        inner["content"] = text
    return event({"id": "c", "choices": [{"index": 0, "delta": inner, "finish_reason": finish}]})


DONE = b"data: [DONE]\n\n"
GOOD = (delta(role=True), delta("Hel"), delta("lo"), delta(finish="stop"), DONE)


async def test_a_good_stream_reaches_the_client_byte_for_byte() -> None:
    bench = Bench()

    bench.play(*GOOD)

    end = await bench.relay.done
    assert end.fault is None
    assert bench.client.body == b"".join(GOOD)
    assert bench.client.end == "finished"
    assert end.output_tokens == 2


async def test_the_gaps_between_tokens_are_counted_and_a_client_that_pauses_makes_none() -> None:
    bench = Bench()
    bench.play(GOOD[0], GOOD[1], end="open")

    for gap_s, piece in ((0.02, delta("a")), (0.3, delta("b")), (0.01, b": ping\n\n"), (0.2, DONE)):
        bench.clock.time_s += gap_s
        bench.relay.on_body(piece)
    bench.client.on_pause()
    bench.clock.time_s += 60.0
    bench.client.on_resume()
    bench.clock.time_s += 0.04
    bench.relay.on_body(delta("c"))

    assert bench.gaps.counts == [2, 1, 0]
    assert bench.gaps.total == pytest.approx(0.36)


async def test_nothing_is_committed_before_the_first_token() -> None:
    bench = Bench()

    bench.play(delta(role=True), b": ping\n\n", end="open")

    assert not bench.client.started
    assert bench.first_tokens == []


async def test_streams_say_that_proxies_must_not_buffer_and_keep_one_server_field() -> None:
    bench = Bench()

    bench.play(*GOOD)

    names = [name for name, _ in bench.client.headers]
    assert ("x-accel-buffering", "no") in bench.client.headers
    assert ("cache-control", "no-cache") in bench.client.headers
    assert "server" not in names
    assert bench.client.content_length is None


@pytest.mark.parametrize(
    ("payload", "status"),
    [
        ({"error": {"message": "busy", "type": "Service Unavailable", "code": 503}}, 503),
        ({"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}, 400),
        ({"error": "Model is overloaded", "error_type": "overloaded"}, 429),
    ],
)
async def test_an_error_inside_a_200_becomes_a_status_while_nothing_was_sent(payload: object, status: int) -> None:
    bench = Bench()

    bench.play(event(payload), DONE)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.refusal.status == status
    assert end.fault.elsewhere == (status != 400)
    assert not end.committed
    assert not bench.client.started


async def test_an_error_after_text_is_an_event_that_sdks_raise_on_and_no_done() -> None:
    bench = Bench()

    bench.play(delta("half"), event({"object": "error", "message": "engine died", "code": 500}), DONE)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.committed
    assert bench.client.body.startswith(delta("half"))
    last = orjson.loads(bench.client.body.split(b"data: ")[-1])
    assert last["error"]["message"] == "engine died"
    assert b"[DONE]" not in bench.client.body
    assert bench.client.end == "aborted"


async def test_an_aborted_finish_before_any_text_may_move_elsewhere() -> None:
    bench = Bench()

    bench.play(delta(finish="abort"), DONE)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.elsewhere
    assert not end.committed


async def test_an_aborted_finish_after_text_is_a_failure() -> None:
    bench = Bench()

    bench.play(delta("some"), delta(finish="abort"), DONE)

    end = await bench.relay.done
    assert end.fault is not None
    assert b'"error"' in bench.client.body
    assert b"[DONE]" not in bench.client.body


async def test_a_stream_of_nothing_but_done_is_a_failure() -> None:
    bench = Bench()

    bench.play(DONE)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.elsewhere


async def test_a_stream_of_usage_and_done_without_a_choice_is_a_failure() -> None:
    bench = Bench()

    bench.play(event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}), DONE)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.elsewhere


async def test_a_stream_that_ends_without_its_terminator_never_looks_finished() -> None:
    bench = Bench()

    bench.play(delta("half of an "), delta("answer"))

    end = await bench.relay.done
    assert end.fault is not None
    assert bench.client.end == "aborted"
    assert b'"error"' in bench.client.body


async def test_a_stream_cut_in_the_middle_of_an_event_drops_the_piece_and_tells() -> None:
    bench = Bench()

    bench.play(delta("half"), b'data: {"choices":[{"index":0,"del', end="cut")

    await bench.relay.done
    assert bench.client.body.startswith(delta("half") + b"data: {")
    for block in bench.client.body.split(b"\n\n")[:-1]:
        orjson.loads(block.removeprefix(b"data: "))


async def test_a_responses_stream_ends_with_response_completed_and_fails_with_its_own_event() -> None:
    created = (
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1"}}\n\n'
    )
    text = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":1,"delta":"hey"}\n\n'
    completed = (
        b'event: response.completed\ndata: {"type":"response.completed","sequence_number":2,'
        b'"response":{"id":"resp_1","status":"completed"}}\n\n'
    )
    good = Bench(path="/v1/responses", dialect=Dialect.RESPONSES)
    bad = Bench(path="/v1/responses", dialect=Dialect.RESPONSES)

    good.play(created, text, completed)
    bad.play(created, text, end="cut")

    assert (await good.relay.done).fault is None
    assert (await good.relay.done).response_id == "resp_1"
    assert good.client.body == created + text + completed
    assert (await bad.relay.done).fault is not None
    last = bad.client.body.split(b"\n\n")[-2]
    assert last.startswith(b"event: error\ndata: ")
    payload = orjson.loads(last.split(b"data: ")[1])
    assert payload["type"] == "error"
    assert payload["sequence_number"] == 2
    assert isinstance(payload["code"], str)


@pytest.mark.parametrize(
    ("cached", "found"), [({}, None), ({"prompt_tokens_details": {"cached_tokens": 4}}, 4)], ids=["bare", "cached"]
)
async def test_usage_that_we_asked_for_is_counted_and_taken_out(cached: dict[str, object], found: int | None) -> None:
    bench = Bench(strip_usage=True)
    usage = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 9, **cached}})

    bench.play(delta("a"), delta(finish="stop"), usage, DONE)

    end = await bench.relay.done
    assert (end.prompt_tokens, end.output_tokens, end.cached_tokens) == (7, 9, found)
    assert b"usage" not in bench.client.body
    assert bench.client.body.endswith(DONE)


async def test_an_error_status_is_kept_with_its_body_and_is_not_retried_when_it_is_the_clients_fault() -> None:
    bench = Bench(stream=False)
    body = b'{"error":{"message":"maximum context length is 4096","type":"BadRequestError","param":null,"code":400}}'

    bench.play(body, status=400, headers=JSON)

    end = await bench.relay.done
    assert end.fault is not None
    assert not end.fault.elsewhere
    assert end.fault.body == body


@pytest.mark.parametrize("status", [401, 403, 407])
async def test_an_engine_that_refuses_our_credentials_is_not_the_clients_401(status: int) -> None:
    bench = Bench(stream=False)

    bench.play(b'{"error":"Unauthorized"}', status=status, headers=JSON)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.refusal.status == 502


async def test_an_aborted_whole_answer_is_a_failure_that_may_move() -> None:
    bench = Bench(stream=False)

    bench.play(b'{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}', headers=JSON)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.elsewhere
    assert not bench.client.started


async def test_a_long_whole_answer_goes_through_without_being_held() -> None:
    bench = Bench(stream=False)
    piece = b'"' + b"x" * 700_000

    bench.play(piece, piece, end="open")

    assert bench.client.body == piece + piece


WHOLE = b'{"object":"chat.completion","choices":[{"index":0,"message":{"content":"Hello"},"finish_reason":"stop"}]}'


@pytest.mark.parametrize("body", [b"", b" \n", WHOLE[:60], WHOLE[:-1], b"<html>no engine</html>"])
async def test_a_body_that_is_not_the_json_it_is_labelled_as_is_no_answer(body: bytes) -> None:
    """A body without a length ends with its connection, so that its framing is whole wherever it was cut."""
    bench = Bench(stream=False)

    bench.play(*filter(None, [body]), headers=JSON)

    end = await bench.relay.done
    assert end.fault is not None
    assert (end.fault.refusal.status, end.fault.elsewhere) == (502, True)
    assert not bench.client.started


@pytest.mark.parametrize("body", [b"null", b"3", b'"text"', b'{"a":NaN}', b'{"a":"\xff"}', b"[" * 3000 + b"]" * 3000])
async def test_any_json_is_an_answer(body: bytes) -> None:
    bench = Bench(stream=False)

    bench.play(body, headers=JSON)

    assert (await bench.relay.done).fault is None
    assert (bench.client.body, bench.client.end) == (body, "finished")


async def test_an_answer_without_content_needs_no_json() -> None:
    bench = Bench(stream=False)

    bench.play(status=204, headers=JSON)

    assert (await bench.relay.done).fault is None


@pytest.mark.parametrize(
    ("tail", "ended"), [([b"}"], True), ([b"}", b"\n", b"\n"], True), ([b","], False), ([b" "], False)]
)
async def test_a_long_json_answer_that_stops_in_the_middle_does_not_end_properly(
    tail: list[bytes], *, ended: bool
) -> None:
    bench = Bench(stream=False)

    bench.play(b'{"pad":"' + b"x" * 1_100_000, b'"', *tail, headers=JSON)

    assert ((await bench.relay.done).fault is None) == ended
    assert bench.client.end == ("finished" if ended else "aborted")


@pytest.mark.parametrize(
    ("headers", "body"),
    [(JSON, b'{"pad":"%b' % (b"x" * 1_100_000)), ([(b"content-type", b"audio/wav")], b"RIFF\0\0")],
)
async def test_an_answer_that_is_no_stream_is_cut_where_it_broke_though_a_stream_was_asked_for(
    headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    bench = Bench(stream=True)

    bench.relay.on_head(200, headers)
    bench.relay.on_body(body)
    bench.relay.on_failure(CallFailure(FailureKind.RESET, "connection lost", sent=True, response_started=True))

    assert (await bench.relay.done).committed
    assert (bench.client.body, bench.client.end) == (body, "aborted")


async def test_an_answer_that_cannot_be_read_is_told_with_the_reason() -> None:
    bench = Bench()

    bench.relay.on_failure(
        CallFailure(FailureKind.BAD_RESPONSE, "head over 65536 bytes", sent=True, response_started=True)
    )

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.refusal.message == "engine e1 gave an answer that cannot be read: head over 65536 bytes; try again"


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, br"])
async def test_an_error_in_a_coding_that_cannot_be_undone_is_told_without_its_bytes(coding: bytes) -> None:
    bench = Bench(stream=False)

    bench.play(b"\x1b\x0a\x00\xf8\x8fabc", status=503, headers=[*JSON, (b"content-encoding", coding)])

    end = await bench.relay.done
    assert end.fault is not None
    assert (end.fault.refusal.message, end.fault.body) == ("engine e1 answered 503", None)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (JSON, WHOLE),
        (JSON, b'{"pad":"%b"}' % (b"x" * 1_100_000)),
        ([(b"content-type", b"audio/wav")], b"RIFF\0\0"),
    ],
)
async def test_a_client_that_was_promised_events_is_not_sent_anything_else(
    headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    bench = Bench(timeouts=Timeouts(queue_headers_after_s=10))
    bench.clock.time_s += 11
    bench.reply.check(bench.clock.time_s)
    promised = bench.client.body

    bench.play(body, headers=headers)

    end = await bench.relay.done
    assert end.fault is not None
    assert (end.fault.refusal.reason, end.fault.elsewhere, end.committed) == ("no_stream", False, False)
    assert bench.client.body == promised


@pytest.mark.parametrize("cut", range(0, 24, 3))
async def test_the_id_of_a_long_response_is_found_wherever_it_stands(cut: int) -> None:
    bench = Bench(stream=False, path="/v1/responses", dialect=Dialect.RESPONSES)
    whole = b'{"pad":"%b","id":"resp_1234567","object":"response"}' % (b"x" * 1_100_000)
    at = whole.index(b'"id"') + cut

    bench.play(whole[:at], whole[at:], headers=JSON)

    assert (await bench.relay.done).response_id == "resp_1234567"


async def test_silence_before_the_first_byte_is_a_504_that_names_its_timer_and_is_not_repeated() -> None:
    bench = Bench(timeouts=Timeouts(first_byte_s=10))
    bench.clock.time_s += 10.1

    bench.relay.check(bench.clock.time_s)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.refusal.status == 504
    assert end.fault.refusal.reason == "first_byte"
    assert not end.fault.elsewhere
    assert bench.call.log == ["abort"]


@pytest.mark.parametrize(("stream", "cut_after_s"), [(True, 10.5), (False, 70.5)])
async def test_a_whole_answer_may_take_as_long_as_its_engine_makes_tokens_and_a_first_token_may_not(
    *, stream: bool, cut_after_s: float
) -> None:
    bench = Bench(stream=stream, timeouts=Timeouts(first_byte_s=10))
    begun_s = bench.clock.time_s

    while not bench.relay.done.done() and bench.clock.time_s < begun_s + 200:
        if bench.clock.time_s <= begun_s + 60:
            bench.counted_s = bench.clock.time_s
        bench.clock.time_s += 0.5
        bench.relay.check(bench.clock.time_s)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.refusal.reason == "first_byte"
    assert bench.clock.time_s - begun_s == cut_after_s


async def test_a_gap_between_tokens_fails_by_its_own_timer() -> None:
    bench = Bench(timeouts=Timeouts(first_byte_s=120, inter_token_s=30))
    bench.clock.time_s += 90
    bench.relay.check(bench.clock.time_s)
    bench.play(delta("a"), end="open")
    bench.clock.time_s += 29
    bench.relay.check(bench.clock.time_s)
    bench.relay.on_body(delta("b"))
    assert not bench.relay.done.done()

    bench.clock.time_s += 31
    bench.relay.check(bench.clock.time_s)

    end = await bench.relay.done
    assert end.fault is not None
    assert end.fault.refusal.reason == "inter_token"


async def test_an_answer_that_takes_too_long_is_not_said_to_be_silent() -> None:
    bench = Bench(timeouts=Timeouts(total_s=10.0))
    bench.play(delta("Hi"), end="")
    bench.clock.time_s += 10.5
    bench.relay.on_body(delta(" there"))

    bench.relay.check(bench.clock.now_s())

    end = await bench.relay.done
    assert end.fault is not None
    assert "had not answered in full after total_s = 10 s" in end.fault.refusal.message


async def test_a_complete_stream_whose_framing_never_ends_is_a_success_soon() -> None:
    bench = Bench(timeouts=Timeouts(inter_token_s=30))
    bench.play(*GOOD, end="open")
    bench.relay.check(bench.clock.time_s + FRAMING_END_S - 0.1)
    assert not bench.relay.done.done()

    bench.relay.check(bench.clock.time_s + FRAMING_END_S + 0.1)

    assert (await bench.relay.done).fault is None
    assert (bench.client.body, bench.client.end) == (b"".join(GOOD), "finished")


async def test_a_connection_that_breaks_after_a_complete_stream_takes_nothing_from_it() -> None:
    bench = Bench()

    bench.play(*GOOD, end="cut")

    assert (await bench.relay.done).fault is None
    assert (bench.client.body, bench.client.end) == (b"".join(GOOD), "finished")


async def test_an_endless_error_body_is_not_waited_for() -> None:
    bench = Bench(stream=False)

    bench.play(b"x" * (HELD_ERROR_BYTES + 1), status=500, headers=JSON, end="open")

    end = await bench.relay.done
    assert end.fault is not None
    assert (end.fault.refusal.status, end.fault.refusal.message) == (500, "engine e1 answered 500")
    assert bench.call.log == ["abort"]


@pytest.mark.parametrize("field", [b'"message":"\\ud800"', b'"message":NaN,"code":%b' % (b"9" * 40)])
async def test_an_error_that_json_cannot_hold_is_told_all_the_same(field: bytes) -> None:
    whole, streamed = Bench(stream=False), Bench()

    whole.play(b'{"error":{%b}}' % field, status=400, headers=JSON)
    streamed.play(delta("a"), b'data: {"error":{%b}}\n\n' % field)

    end = await whole.relay.done
    assert end.fault is not None
    assert b'"error"' in render_body(end.fault.refusal, Dialect.OPENAI)
    assert b'data: {"error":' in streamed.client.body


async def test_comments_of_an_engine_are_no_progress() -> None:
    bench = Bench(timeouts=Timeouts(first_byte_s=10))
    bench.play(b": ping\n\n", end="open")
    bench.clock.time_s += 9
    bench.relay.on_body(b": ping\n\n")

    bench.clock.time_s += 2
    bench.relay.check(bench.clock.time_s)

    assert bench.relay.done.done()


async def test_the_token_gap_rests_while_the_client_takes_nothing() -> None:
    bench = Bench(timeouts=Timeouts(inter_token_s=30, stalled_client_s=100))
    bench.play(delta("a"), end="open")
    bench.client.on_pause()
    bench.clock.time_s += 60
    bench.relay.check(bench.clock.time_s)
    bench.reply.check(bench.clock.time_s)
    assert bench.call.log == ["pause"]

    bench.client.on_resume()
    bench.clock.time_s += 29
    bench.relay.check(bench.clock.time_s)

    assert not bench.relay.done.done()


async def test_a_client_that_takes_no_byte_is_cut_in_the_end() -> None:
    bench = Bench(timeouts=Timeouts(stalled_client_s=50))
    bench.play(delta("a"), end="open")
    bench.client.on_pause()

    bench.clock.time_s += 51
    bench.reply.check(bench.clock.time_s)

    assert bench.client.end == "aborted"
    assert bench.reply.cut_reason == "stalled_client"


async def test_a_client_that_reads_slowly_is_not_cut() -> None:
    bench = Bench(timeouts=Timeouts(stalled_client_s=50))
    bench.play(delta("a"), end="open")
    bench.client.unsent_bytes = 100_000
    bench.client.on_pause()

    for _ in range(5):
        bench.clock.time_s += 30
        bench.client.unsent_bytes -= 1_000
        bench.reply.check(bench.clock.time_s)

    assert bench.client.end == ""


async def test_a_waiting_stream_is_opened_and_kept_alive_by_comments() -> None:
    bench = Bench(timeouts=Timeouts(queue_headers_after_s=10, keepalive_comment_s=15))
    for _ in range(40):
        bench.clock.time_s += 1
        bench.reply.check(bench.clock.time_s)

    assert bench.client.status == 200
    assert bench.client.body.count(b": ") == 3
    assert b"data" not in bench.client.body


async def test_a_failure_after_an_early_200_is_an_event_with_status_and_hint() -> None:
    bench = Bench(timeouts=Timeouts(queue_headers_after_s=10))
    bench.clock.time_s += 11
    bench.reply.check(bench.clock.time_s)
    bench.play(event({"error": {"message": "busy", "code": 503}}), DONE)
    end = await bench.relay.done
    assert end.fault is not None

    bench.reply.fail(end.fault.refusal)

    payload = orjson.loads(bench.client.body.split(b"data: ")[-1])
    assert payload["error"]["status"] == 503
    assert payload["error"]["retry_after_s"] >= 1
    assert bench.client.end == "finished"


async def test_a_whole_answer_of_a_waiting_request_gets_no_early_byte() -> None:
    bench = Bench(stream=False, timeouts=Timeouts(queue_headers_after_s=10))

    bench.clock.time_s += 100
    bench.reply.check(bench.clock.time_s)

    assert not bench.client.started
