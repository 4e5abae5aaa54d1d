"""Which calls go out as one, and what each of those who share one hears of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, cast

import orjson
import pytest

from backends.base import Backend, Call, CallFailure, EngineRequest, FailureKind, Headers, Receiver
from gateway.dispatch.coalesce import ANSWER_MAX_BYTES, INPUTS_MAX_BYTES, Coalescer, may_join
from policies.schema import ClassPolicy
from policies.vocabulary import Work

JSON = [(b"content-type", b"application/json; charset=utf-8"), (b"x-compute-tokens", b"80")]
WORK = Work("w", "bulk", "t", "m", "/v1/embeddings", 0.0, 0.0, prompt_tokens=4, streams=False)
BULK, URGENT = ClassPolicy(), ClassPolicy(ttft_sla_s=1.0)


@dataclass
class FakeCall:
    """A call that reached the engine."""

    request: EngineRequest
    receiver: Receiver
    paused: bool = False
    aborted: bool = False

    @property
    def inputs(self) -> Any:
        return orjson.loads(self.request.body)["input"]

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True

    def answer(self, status: int, body: object, headers: Headers = JSON) -> None:
        """A whole answer, as far as its receiver listens."""
        told = body if isinstance(body, bytes) else orjson.dumps(body)
        self.receiver.on_head(status, headers)
        if not self.aborted and told:
            self.receiver.on_body(told)
        if not self.aborted:
            self.receiver.on_end()

    def embed(self) -> None:
        """The right answer."""
        data = [{"index": at, "embedding": [one]} for at, one in enumerate(self.inputs)]
        self.answer(200, {"data": data, "usage": {"prompt_tokens": len(data)}})


@dataclass
class FakeEngine:
    """A backend that keeps its calls."""

    calls: list[FakeCall] = field(default_factory=list)
    __hash__ = object.__hash__

    def call(self, request: EngineRequest, receiver: Receiver) -> Call:
        self.calls.append(FakeCall(request, receiver))
        return self.calls[-1]


@dataclass
class Heard:
    """What one work's relay hears."""

    status: int = 0
    headers: Headers = ()
    body: bytes = b""
    ended: bool = False
    failure: CallFailure | None = None

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.ended = True

    def on_failure(self, failure: CallFailure) -> None:
        self.failure = failure


@dataclass
class Bench:
    """A coalescer before one engine; `sent` and `heard` have an item for each call that was asked for."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    coalescer: Coalescer = field(default_factory=Coalescer)
    sent: list[Call] = field(default_factory=list)
    heard: list[Heard] = field(default_factory=list)

    def ask(self, one: object, *headers: tuple[bytes, bytes], inputs_max: int = 64, work: Work = WORK) -> None:
        body = orjson.dumps({"model": "m", "input": one})
        number = len(self.sent)
        fields = [*headers, (b"x-request-id", b"r%d" % number)]
        request = EngineRequest(b"POST", b"/v1/embeddings", fields, body)
        self.heard.append(Heard())
        backend = cast("Backend", self.engine)
        self.sent.append(self.coalescer.call(backend, request, self.heard[-1], work, inputs_max=inputs_max))

    @property
    def inputs(self) -> list[Any]:
        return [call.inputs for call in self.engine.calls]


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def turn() -> None:
    await asyncio.sleep(0)


# -- who goes with whom ------------------------------------------------------------------------------------------------


async def test_calls_of_one_turn_are_one_and_each_hears_its_own(bench: Bench) -> None:
    for one in ("a", "b", "c"):
        bench.ask(one)
    assert not bench.engine.calls
    await turn()
    bench.engine.calls[0].embed()

    assert bench.inputs == [["a", "b", "c"]]
    assert [orjson.loads(heard.body) for heard in bench.heard] == [
        {"data": [{"index": 0, "embedding": [one]}], "usage": {"prompt_tokens": 1}} for one in ("a", "b", "c")
    ]
    assert all(heard.ended for heard in bench.heard)
    assert [dict(heard.headers)[b"content-length"] for heard in bench.heard] == [b"%d" % len(bench.heard[0].body)] * 3
    assert all(b"x-compute-tokens" not in dict(heard.headers) for heard in bench.heard)


async def test_a_call_without_company_goes_out_as_it_is(bench: Bench) -> None:
    bench.ask("a")
    await turn()
    bench.ask("b")
    await turn()

    assert bench.inputs == ["a", "b"]
    assert [call.receiver for call in bench.engine.calls] == bench.heard


async def test_what_has_several_inputs_already_goes_out_at_once(bench: Bench) -> None:
    bench.ask(["a", "b"])

    assert bench.inputs == [["a", "b"]]


async def test_other_headers_tenants_classes_and_lengths_go_apart(bench: Bench) -> None:
    bench.ask("a")
    bench.ask("b", (b"x-tier", b"1"))
    bench.ask("c", work=replace(WORK, tenant="u"))
    bench.ask("d", work=replace(WORK, class_name="nightly"))
    bench.ask("e", work=replace(WORK, prompt_tokens=8))
    bench.ask("f", work=replace(WORK, prompt_tokens=7))
    await turn()

    assert bench.inputs == [["a", "f"], "b", "c", "d", "e"]


async def test_traces_and_request_ids_keep_nobody_apart_and_the_first_ones_go_out(bench: Bench) -> None:
    bench.ask("a", (b"traceparent", b"00-1"))
    bench.ask("b", (b"traceparent", b"00-2"))
    await turn()

    (call,) = bench.engine.calls
    assert call.request.headers == [(b"traceparent", b"00-1"), (b"x-request-id", b"r0-with-1")]


async def test_an_array_is_bounded_in_inputs_and_in_bytes(bench: Bench) -> None:
    for one in ("a", "b", "c", "d", "e"):
        bench.ask(one, inputs_max=2)
    long = "x" * (INPUTS_MAX_BYTES // 2 - 2)
    for one in (long, long, long):
        bench.ask(one)
    await turn()

    assert bench.inputs == [["a", "b"], ["c", "d"], "e", [long, long], long]


@pytest.mark.parametrize(
    "other",
    [
        {"path": "/v1/completions"},
        {"path": "/v1/rerank"},
        {"sequences": 2},
        {"attempt": 1},
        {"streams": True},
    ],
)
def test_only_bulk_with_one_input_and_a_whole_answer_may_share_and_only_at_first(other: dict[str, Any]) -> None:
    assert may_join(WORK, BULK)
    assert not may_join(WORK, URGENT)
    assert not may_join(replace(WORK, **other), BULK)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (400, {"error": {"message": "no"}}, JSON),
        (500, {"error": {"message": "no"}}, JSON),
        (503, b"", []),
        (200, {"data": [{"index": 0, "embedding": []}]}, JSON),
        (200, b'{"data": [', JSON),
        (200, {"error": {"message": "no"}}, JSON),
        (200, b"\1\2", [(b"content-type", b"application/octet-stream")]),
        (200, b"\1\2", [*JSON, (b"content-encoding", b"zstd")]),
        (200, b"x" * (ANSWER_MAX_BYTES + 1), JSON),
    ],
)
async def test_after_a_bad_answer_each_is_sent_alone_and_once(
    bench: Bench, status: int, body: object, headers: Headers
) -> None:
    bench.ask("a")
    bench.ask("b")
    await turn()
    bench.engine.calls[0].answer(status, body, headers)

    assert bench.inputs == [["a", "b"], "a", "b"]
    first, second = bench.engine.calls[1:]
    assert [first.receiver, second.receiver] == bench.heard
    assert all(not heard.status for heard in bench.heard)
    assert [dict(call.request.headers)[b"x-request-id"] for call in (first, second)] == [b"r0", b"r1"]


async def test_after_a_broken_connection_each_is_sent_alone(bench: Bench) -> None:
    bench.ask("a")
    bench.ask("b")
    await turn()
    bench.engine.calls[0].receiver.on_failure(CallFailure(FailureKind.RESET, "", sent=True, response_started=False))

    assert bench.inputs == [["a", "b"], "a", "b"]
    assert all(heard.failure is None for heard in bench.heard)


async def test_where_nothing_was_sent_everybody_hears_so(bench: Bench) -> None:
    failure = CallFailure(FailureKind.CONNECT_REFUSED, "", sent=False, response_started=False)
    bench.ask("a")
    bench.ask("b")
    await turn()
    bench.engine.calls[0].receiver.on_failure(failure)

    assert len(bench.engine.calls) == 1
    assert [heard.failure for heard in bench.heard] == [failure, failure]


# -- who leaves --------------------------------------------------------------------------------------------------------


async def test_who_leaves_before_the_call_is_not_in_it(bench: Bench) -> None:
    for one in ("a", "b", "c"):
        bench.ask(one)
    bench.sent[1].abort()
    await turn()

    assert bench.inputs == [["a", "c"]]


async def test_who_leaves_during_the_call_hears_nothing_and_the_others_all(bench: Bench) -> None:
    bench.ask("a")
    bench.ask("b")
    await turn()
    bench.sent[0].abort()
    bench.engine.calls[0].embed()

    assert not bench.engine.calls[0].aborted
    assert bench.heard[0] == Heard()
    assert orjson.loads(bench.heard[1].body)["data"] == [{"index": 0, "embedding": ["b"]}]


async def test_once_all_have_left_the_call_is_aborted(bench: Bench) -> None:
    bench.ask("a")
    bench.ask("b")
    await turn()
    bench.sent[0].abort()
    assert not bench.engine.calls[0].aborted
    bench.sent[1].abort()

    assert bench.engine.calls[0].aborted


async def test_who_left_is_not_sent_alone_and_who_leaves_then_ends_his_own_call(bench: Bench) -> None:
    for one in ("a", "b", "c"):
        bench.ask(one)
    await turn()
    bench.sent[0].abort()
    bench.sent[1].pause()
    bench.engine.calls[0].answer(400, {})
    bench.sent[2].abort()

    assert bench.inputs == [["a", "b", "c"], "b", "c"]
    assert [call.aborted for call in bench.engine.calls] == [True, False, True]
    assert [call.paused for call in bench.engine.calls] == [False, True, False]
