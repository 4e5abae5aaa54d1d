"""Where one request spent its time, as spans: W3C trace context in and out, and the marks that a request leaves on its way.

    request      accepted to settled
      queue      accepted, or given back by an engine that failed, to granted
      dispatch   granted to sent
      attempt    sent to ended, one for each try
        first_token   sent to the engine's first token
        relay         first token to the last byte

A request only leaves marks, which are numbers in a list; spans are made of them once it has ended. Without a tracer
there is not even the list. A client's `traceparent` is continued, its decision on sampling with it; the engine is given
one that names the attempt. Attributes hold names and numbers of ours, never a word of a prompt or an answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backends.base import Headers
from policies.vocabulary import Outcome, Result

Attributes = Mapping[str, str | int | float]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class Parent:
    """What a `traceparent` says. Ids are hexadecimal."""

    trace_id: str
    span_id: str
    sampled: bool


def read_traceparent(text: str | None) -> Parent | None:
    """What the field says, None for none or one that is to be ignored (W3C Trace Context, level 1)."""
    found = _TRACEPARENT.fullmatch(text.strip()) if text else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


@dataclass(frozen=True, slots=True)
class Span:
    """One interval, in seconds on the monotonic clock. parent_id "": it has none. failed: why, "" if it did not."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    from_s: float
    to_s: float
    attributes: Attributes = field(default_factory=dict)
    failed: str = ""
    kind: str = "internal"


@dataclass(slots=True)
class _Try:
    """Marks of one attempt; None: it has not come so far."""

    engine: str
    span_id: str
    queued_s: float
    granted_s: float
    sent_s: float | None = None
    engine_ttft_s: float | None = None
    ended_s: float | None = None
    failed: str = ""


class Trace:
    """The marks of one request that is traced."""

    __slots__ = ("_new_id", "_parent", "_span_id", "_tries", "trace_id")

    def __init__(self, trace_id: str, parent: Parent | None, new_id: Callable[[], str]) -> None:
        self.trace_id = trace_id
        self._parent = parent
        self._new_id = new_id
        self._span_id = new_id()
        self._tries: list[_Try] = []

    def granted(self, engine: str, *, queued_s: float, now_s: float) -> None:
        """Leave to start was given. queued_s: since when it was waited for, where no earlier try ended later."""
        waited_since_s = self._tries[-1].ended_s if self._tries else None
        self._tries.append(_Try(engine, self._new_id(), waited_since_s or queued_s, now_s))

    def sent(self, headers: Headers, now_s: float) -> Headers:
        """The call goes out: its fields, with a `traceparent` of this attempt in the place of the client's."""
        attempt = self._tries[-1]
        attempt.sent_s = now_s
        ours = (b"traceparent", f"00-{self.trace_id}-{attempt.span_id}-01".encode())
        return [*(pair for pair in headers if pair[0] != b"traceparent"), ours]

    def ended(self, now_s: float, *, engine_ttft_s: float | None, failed: str) -> None:
        """The attempt is over. failed: the fault's reason, "" for none."""
        attempt = self._tries[-1]
        attempt.ended_s, attempt.engine_ttft_s, attempt.failed = now_s, engine_ttft_s, failed

    def spans(self, outcome: Outcome, request_id: str, path: str, settled_s: float) -> list[Span]:
        """All of it, parents first, once the request has settled."""
        accepted_s = settled_s - outcome.total_s
        failed = "" if outcome.result in {Result.COMPLETED, Result.CANCELLED} else outcome.reason or outcome.result
        parent_id = "" if self._parent is None else self._parent.span_id
        attributes: dict[str, str | int | float] = {
            "http.route": path,
            "http.response.status_code": outcome.status,
            "gen_ai.request.model": outcome.model,
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.output_tokens": outcome.output_tokens,
            "headrace.request_id": request_id,
            "headrace.work_id": outcome.work_id,
            "headrace.class": outcome.class_name,
            "headrace.tenant": outcome.tenant,
            "headrace.result": outcome.result.value,
            "headrace.attempts": outcome.attempts,
        }
        if outcome.ttft_s is not None:
            attributes["headrace.ttft_s"] = outcome.ttft_s
        made = [
            Span(
                "request", self.trace_id, self._span_id, parent_id, accepted_s, settled_s, attributes, failed, "server"
            )
        ]
        if not self._tries and settled_s > accepted_s:
            made.append(self._under(self._span_id, "queue", accepted_s, settled_s))
        for number, attempt in enumerate(self._tries, 1):
            made += self._of_try(attempt, number, settled_s)
        return made

    def _of_try(self, attempt: _Try, number: int, settled_s: float) -> list[Span]:
        made = [self._under(self._span_id, "queue", attempt.queued_s, attempt.granted_s)]
        sent_s, ended_s = attempt.sent_s, attempt.ended_s if attempt.ended_s is not None else settled_s
        of_engine: Attributes = {"headrace.engine": attempt.engine, "headrace.attempt": number}
        to_s = sent_s if sent_s is not None else ended_s
        made.append(self._under(self._span_id, "dispatch", attempt.granted_s, to_s, of_engine))
        if sent_s is None:
            return made
        made.append(
            Span(
                "attempt",
                self.trace_id,
                attempt.span_id,
                self._span_id,
                sent_s,
                ended_s,
                of_engine,
                attempt.failed,
                "client",
            )
        )
        if attempt.engine_ttft_s is not None:
            first_s = min(sent_s + attempt.engine_ttft_s, ended_s)
            made.append(self._under(attempt.span_id, "first_token", sent_s, first_s))
            made.append(self._under(attempt.span_id, "relay", first_s, ended_s))
        return made

    def _under(
        self, parent_id: str, name: str, from_s: float, to_s: float, attributes: Attributes | None = None
    ) -> Span:
        return Span(name, self.trace_id, self._new_id(), parent_id, from_s, max(from_s, to_s), attributes or {})


class Tracer:
    """Decides which requests are traced, and hands their spans on."""

    __slots__ = ("_rng", "_sample_ratio", "_sink")

    def __init__(self, sink: Callable[[list[Span]], None], *, sample_ratio: float, rng: random.Random) -> None:
        """sink gets the spans of one request; called on the loop, must not block. sample_ratio: of requests that bring no
        decision of their own, 0 to 1."""
        self._sink = sink
        self._sample_ratio = sample_ratio
        self._rng = rng

    def begin(self, traceparent: str | None) -> Trace | None:
        """The trace of a request that begins; None: it is not traced."""
        parent = read_traceparent(traceparent)
        if parent is None:
            if self._rng.random() >= self._sample_ratio:
                return None
            return Trace(f"{self._rng.getrandbits(128) or 1:032x}", None, self._new_id)
        return Trace(parent.trace_id, parent, self._new_id) if parent.sampled else None

    def settled(self, trace: Trace, outcome: Outcome, *, request_id: str, path: str, now_s: float) -> None:
        """Hand on what became of a request."""
        self._sink(trace.spans(outcome, request_id, path, now_s))

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(64) or 1:016x}"
