"""The answer to a request batch that was split: its parts' replies on one side, the client's one reply on the other.

Each part is a work of its own: it waits, is granted, tried (again) and settled like any other, and writes into a
`PartReply` as it would into a client's. Here what they write becomes one answer (`backends.dialects.batches`):

* A stream passes events on as they come, under the indices of the whole array.
* A whole answer is held until the last part is there, so that a part that fails can still become a status.
* The first part that fails is the batch's failure: its refusal goes to the client, the other parts are cut.
* While the client's buffer is full, all parts are paused and none is started.

At most PARTS_AT_ONCE parts are under way, from the first that is not done: what one request may hold of the queue, of
engines and of memory is bounded, however long its array is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from backends.dialects.batch_stream import StreamJoin
from backends.dialects.batches import AnswerJoin, Inputs, JoinError, inputs, top_n
from gateway.clock import Clock
from gateway.dispatch.reply import Reply
from gateway.errors import Refusal
from gateway.exchange import Exchange
from gateway.ingress.facts import read_json

PARTS_AT_ONCE = 32

Pair = tuple[str, str]
_STREAM, _JSON = "text/event-stream", "application/json"


class PartFailed(Exception):
    """A part failed, and the batch with it: what else runs of it is to be cancelled."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A request that has to go in parts. Parts are made when they are started, so that few are held at a time.

    inputs_max   inputs of one part, the last one has what is left
    """

    exchange: Exchange
    inputs: Inputs
    inputs_max: int

    def __len__(self) -> int:
        return len(self.firsts)

    @property
    def firsts(self) -> Sequence[int]:
        """Index of each part's first input."""
        return range(0, len(self.inputs), self.inputs_max)

    def part(self, number: int, accepted_s: float) -> Exchange:
        """One part, as a request of its own that the gateway took responsibility for at that time."""
        exchange, first = self.exchange, self.firsts[number]
        body = self.inputs.part(first, min(first + self.inputs_max, len(self.inputs)))
        return replace(
            exchange,
            body=body,
            facts=read_json(body, path=exchange.path, default_model=exchange.facts.model),
            # A coded answer could not be joined, so none is accepted.
            rule_headers={**exchange.rule_headers, "accept-encoding": ""},
            response_headers=list(exchange.response_headers),
            accepted_s=accepted_s,
        )


def split(exchange: Exchange, inputs_max: int) -> Batch | None:
    """A request with more than `inputs_max` inputs as a batch; None where it stays whole.

    What asks for several answers to each input (n, best_of) stays whole.
    """
    facts = exchange.facts
    if facts.inputs <= inputs_max or facts.copies > 1:
        return None
    found = inputs(exchange.body, exchange.path)
    if found is None or len(found) <= inputs_max:
        return None
    return Batch(exchange, found, inputs_max)


class PartReply:
    """The reply to one part: what `Reply` is to a client. Its `Outlet`."""

    __slots__ = (
        "_assembly",
        "_number",
        "_on_pause",
        "_on_resume",
        "_opened",
        "cut_reason",
        "ended",
        "exchange",
        "first_content_s",
        "held",
        "status",
    )

    def __init__(self, assembly: Assembly, number: int, exchange: Exchange) -> None:
        self._assembly = assembly
        self._number = number
        self._on_pause: Callable[[], None] | None = None
        self._on_resume: Callable[[], None] | None = None
        self._opened = False
        self.exchange = exchange
        self.held: list[bytes] = []
        self.status = 499
        self.first_content_s: float | None = None
        self.ended = False
        self.cut_reason = ""

    @property
    def opened(self) -> bool:
        return self._opened

    @property
    def paused(self) -> bool:
        return self._assembly.paused

    def follow(self, on_pause: Callable[[], None], on_resume: Callable[[], None]) -> None:
        self._on_pause, self._on_resume = on_pause, on_resume
        if self.paused:
            on_pause()

    def unfollow(self) -> None:
        self._on_pause = self._on_resume = None

    def pause(self) -> None:
        """The client's buffer is full."""
        if self._on_pause is not None:
            self._on_pause()

    def resume(self) -> None:
        """The client's buffer has drained."""
        if self._on_resume is not None:
            self._on_resume()

    def open(self, status: int, headers: Sequence[Pair], content_length: int | None = None) -> None:  # noqa: ARG002
        if not self._opened and not self.ended:
            self._opened = True
            self.status = status
            self._assembly.opened(self, headers)

    def write(self, data: bytes) -> None:
        if self.ended:
            return
        if self.first_content_s is None:
            self.first_content_s = self._assembly.now_s()
        self._assembly.wrote(self, self._number, data)

    def finish(self) -> None:
        if not self.ended:
            self.ended = True
            self._assembly.finished(self, self._number)

    def fail(self, refusal: Refusal, *, sequence_number: int = 0, mid_event: bool = False) -> None:  # noqa: ARG002
        self.relay_error(refusal, None, "")

    def relay_error(self, refusal: Refusal, body: bytes | None, content_type: str) -> None:
        if not self.ended:
            self.ended = True
            self.status = refusal.status
            self._assembly.failed(refusal, body, content_type)


class Assembly:
    """See the module header. Owned by the task that serves the batch."""

    def __init__(self, batch: Batch, reply: Reply, clock: Clock) -> None:
        self._batch = batch
        self._reply = reply
        self._clock = clock
        self._room = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure: tuple[Refusal, bytes | None, str] | None = None
        self._headers: list[Pair] = []
        self._engines: dict[str, None] = {}
        self._parts: dict[int, PartReply] = {}
        self._done: set[int] = set()
        self._first_open = 0
        exchange, firsts = batch.exchange, batch.firsts
        self._stream = StreamJoin(firsts) if exchange.facts.stream else None
        self._answer = None if self._stream else AnswerJoin(exchange.path, firsts, top_n=top_n(exchange.body))
        reply.follow(self._pause, self._resume)

    def __repr__(self) -> str:
        return f"<Assembly parts={len(self._batch)} open={len(self._parts)} failed={self._failure is not None}>"

    def now_s(self) -> float:
        return self._clock.now_s()

    @property
    def paused(self) -> bool:
        """True while the client's buffer is full."""
        return self._reply.paused

    async def start(self, number: int) -> PartReply:
        """Wait until a part may be started; parts are started in order."""
        while self.paused or number >= self._first_open + PARTS_AT_ONCE:
            self._room.clear()
            await self._room.wait()
        accepted_s = self._batch.exchange.accepted_s if number < PARTS_AT_ONCE else self.now_s()
        part = self._parts[number] = PartReply(self, number, self._batch.part(number, accepted_s))
        return part

    async def watch(self) -> None:
        """Raises PartFailed as soon as the batch has failed."""
        await self._failed.wait()
        raise PartFailed

    def end(self) -> None:
        """Every part is over: end the client's answer."""
        if self._failure is not None:
            self._reply.relay_error(*self._failure)
        elif self._stream is not None:
            self._send(self._stream.tail())
            self._reply.finish()
        elif self._answer is not None:
            pieces = list(self._answer.pieces())
            self._reply.open(200, self._shown_headers(), sum(map(len, pieces)))
            for piece in pieces:
                self._reply.write(piece)
            self._reply.finish()

    # -- what parts do -------------------------------------------------------------------------------------------------

    def opened(self, part: PartReply, headers: Sequence[Pair]) -> None:
        """The head of a part's answer is there; the first one's is the client's."""
        self._engines.update(
            (value, None) for name, value in part.exchange.response_headers if name == "x-headrace-engine"
        )
        expected = _JSON if self._stream is None else _STREAM
        kind = next((value for name, value in headers if name == "content-type"), "")
        if not kind.lower().startswith(expected):
            self._spoiled(part, f"it is {kind[:60]!r} and not {expected}")
        elif not self._headers:
            self._headers = list(headers)

    def wrote(self, part: PartReply, number: int, data: bytes) -> None:
        """A part has content."""
        if self._stream is None:
            part.held.append(data)
            return
        try:
            self._send(self._stream.feed(number, data))
        except JoinError as error:
            self._spoiled(part, str(error))

    def finished(self, part: PartReply, number: int) -> None:
        """A part has all of its answer."""
        try:
            if self._stream is not None:
                self._send(self._stream.ended(number))
            elif self._answer is not None:
                self._answer.add(number, b"".join(part.held))
                part.held.clear()
        except JoinError as error:
            self._spoiled(part, str(error))
        del self._parts[number]
        self._done.add(number)
        while self._first_open in self._done:
            self._done.discard(self._first_open)
            self._first_open += 1
        self._room.set()

    def failed(self, refusal: Refusal, body: bytes | None, content_type: str) -> None:
        """A part has no answer: then the batch has none. The first failure counts."""
        if self._failure is None:
            self._failure = refusal, body, content_type
            for part in self._parts.values():
                part.cut_reason = "part_failed"
            self._failed.set()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        if data and self._failure is None:
            self._reply.open(200, self._shown_headers())
            self._reply.write(data)

    def _shown_headers(self) -> list[Pair]:
        """The first part's head, and the engines that have answered by now."""
        ours = {name for name, _ in self._batch.exchange.response_headers}
        kept = [(name, value) for name, value in self._headers if name not in ours]
        return [*kept, ("x-headrace-engine", ", ".join(self._engines)), ("x-headrace-parts", str(len(self._batch)))]

    def _spoiled(self, part: PartReply, why: str) -> None:
        """An engine's answer cannot be joined: the part has failed, though its engine does not know."""
        part.ended = True
        part.status = 502
        message = f"the answer to a part of the request batch cannot be joined: {why}; send fewer inputs in one request"
        self.failed(Refusal(502, message, "server_error", "bad_response"), None, "")

    def _pause(self) -> None:
        for part in self._parts.values():
            part.pause()

    def _resume(self) -> None:
        for part in self._parts.values():
            part.resume()
        self._room.set()
