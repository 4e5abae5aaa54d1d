"""Spans of a request: what it was waiting for, who had it, and that a trace goes on from the client to the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.observe.tracing import Span, Trace, Tracer, read_traceparent
from policies.vocabulary import Outcome, Result

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
UNSAMPLED = f"00-{TRACE_ID}-00f067aa0ba902b7-00"
OUTCOME = Outcome(
    work_id="w1",
    class_name="interactive",
    tenant="acme",
    model="m",
    engine="e1",
    result=Result.COMPLETED,
    reason="",
    status=200,
    attempts=1,
    prompt_tokens=100,
    output_tokens=11,
    total_s=3.0,
    queued_s=1.0,
    ttft_s=1.6,
    engine_ttft_s=0.5,
)


class Kept:
    """A tracer's sink."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def tracer(self, sample_ratio: float = 1.0) -> Tracer:
        return Tracer(self.spans.extend, sample_ratio=sample_ratio, rng=random.Random(7))

    def one(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name == name]
        return found


def begun(tracer: Tracer, traceparent: str | None = CLIENT) -> Trace:
    trace = tracer.begin(traceparent)
    assert trace is not None
    return trace


def carried(kept: Kept, outcome: Outcome = OUTCOME) -> bytes:
    """A request accepted at 100 s, granted at 101, sent at 101.1, first token at 101.6, ended at 103; its traceparent."""
    tracer = kept.tracer()
    trace = begun(tracer)
    trace.granted("e1", queued_s=100.0, now_s=101.0)
    headers = trace.sent([(b"traceparent", CLIENT.encode()), (b"x-custom", b"1")], 101.1)
    trace.ended(103.0, engine_ttft_s=0.5, failed="")
    tracer.settled(trace, outcome, request_id="r1", path="/v1/completions", now_s=103.0)
    assert (b"x-custom", b"1") in headers
    (ours,) = [value for name, value in headers if name == b"traceparent"]
    return ours


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00-1-2-01",
        f"ff-{TRACE_ID}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"{CLIENT}-more",
        CLIENT.upper(),
        CLIENT + "\r\nx: y",
    ],
)
def test_a_traceparent_that_is_none_is_ignored(text: str | None) -> None:
    assert read_traceparent(text) is None


@pytest.mark.parametrize(
    ("text", "sampled"), [(CLIENT, True), (UNSAMPLED, False), (f"cc-{TRACE_ID}-00f067aa0ba902b7-09-later", True)]
)
def test_a_traceparent_names_its_trace_and_says_whether_it_is_kept(text: str, sampled: bool) -> None:
    parent = read_traceparent(text)

    assert parent is not None
    assert (parent.trace_id, parent.span_id, parent.sampled) == (TRACE_ID, "00f067aa0ba902b7", sampled)


def test_every_part_of_a_request_is_a_span_below_the_clients() -> None:
    kept = Kept()

    carried(kept)

    times = {span.name: (span.from_s, span.to_s) for span in kept.spans}
    assert times == {
        "request": (100.0, 103.0),
        "queue": (100.0, 101.0),
        "dispatch": (101.0, 101.1),
        "attempt": (101.1, 103.0),
        "first_token": (101.1, pytest.approx(101.6)),
        "relay": (pytest.approx(101.6), 103.0),
    }
    request, attempt = kept.one("request"), kept.one("attempt")
    assert request.parent_id == "00f067aa0ba902b7"
    assert {kept.one(name).parent_id for name in ("queue", "dispatch", "attempt")} == {request.span_id}
    assert {kept.one(name).parent_id for name in ("first_token", "relay")} == {attempt.span_id}
    assert {span.trace_id for span in kept.spans} == {TRACE_ID}
    assert len({span.span_id for span in kept.spans}) == len(kept.spans)


def test_the_engine_is_told_the_attempt_in_the_place_of_the_clients_span() -> None:
    kept = Kept()

    sent = carried(kept)

    assert sent == f"00-{TRACE_ID}-{kept.one('attempt').span_id}-01".encode()


def test_a_second_try_waits_from_the_end_of_the_first() -> None:
    kept = Kept()
    tracer = kept.tracer()
    trace = begun(tracer)
    trace.granted("e1", queued_s=100.0, now_s=100.5)
    trace.sent((), 100.5)
    trace.ended(101.0, engine_ttft_s=None, failed="connection_reset")
    trace.granted("e2", queued_s=100.0, now_s=101.5)
    trace.sent((), 101.5)
    trace.ended(103.0, engine_ttft_s=0.1, failed="")

    tracer.settled(trace, replace(OUTCOME, attempts=2), request_id="r1", path="/v1/completions", now_s=103.0)

    queues = [(span.from_s, span.to_s) for span in kept.spans if span.name == "queue"]
    attempts = [(span.attributes["headrace.engine"], span.failed) for span in kept.spans if span.name == "attempt"]
    assert queues == [(100.0, 100.5), (101.0, 101.5)]
    assert attempts == [("e1", "connection_reset"), ("e2", "")]


def test_a_work_that_was_refused_while_it_waited_shows_its_wait_and_why() -> None:
    kept = Kept()
    tracer = kept.tracer()
    shed = replace(OUTCOME, result=Result.SHED, reason="wait_too_long", status=503, engine="", attempts=0)

    tracer.settled(begun(tracer, None), shed, request_id="r1", path="/v1/completions", now_s=103.0)

    assert [(span.name, span.failed) for span in kept.spans] == [("request", "wait_too_long"), ("queue", "")]
    assert kept.spans[0].parent_id == ""


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_the_part_of_the_requests_that_is_traced_is_the_one_that_is_set(ratio: float) -> None:
    tracer = Kept().tracer(ratio)

    traced = sum(tracer.begin(None) is not None for _ in range(4000))

    assert traced == pytest.approx(4000 * ratio, abs=120)


@pytest.mark.parametrize(("traceparent", "traced"), [(CLIENT, True), (UNSAMPLED, False)])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_clients_decision_on_sampling_is_kept(traceparent: str, traced: bool, ratio: float) -> None:
    assert (Kept().tracer(ratio).begin(traceparent) is not None) == traced


def test_attributes_hold_only_names_and_numbers_of_ours() -> None:
    kept = Kept()

    carried(kept)

    def words(spans: Sequence[Span]) -> set[str]:
        return {str(value) for span in spans for value in span.attributes.values()}

    assert words(kept.spans) <= {
        "/v1/completions", "200", "m", "100", "11", "r1", "w1", "interactive", "acme", "completed", "1", "1.6", "e1",
    }  # fmt: skip
