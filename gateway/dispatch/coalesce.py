"""Bulk that starts on one engine at one moment goes out as one call with an array, for engines that pad.

Each work keeps its place in queue, ledger and metrics, its relay and its outcome; only the call to the engine is shared.
To a relay it looks like a call of its own: what comes back is taken apart (`backends.dialects.arrays`), and everybody
hears what he would have heard alone.

* Nobody waits for company: mates are those whose attempts begin in one turn of the loop, as those do that one dispatch
  round granted. A work without mates goes out as it is, a turn later.
* Nobody suffers for another's input. Whatever goes wrong once an engine has been sent an array (an error status, an answer
  that cannot be taken apart, a broken connection) says nothing of any one of them, so each is sent alone, once, as part of
  the same attempt, and what then happens to it is its own. Where nothing was sent, all hear so. What is tried again goes
  alone.
* A mate that leaves is left out of the answer; once all have left, the call is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from backends.base import Backend, Call, CallFailure, EngineRequest, Headers, Receiver
from backends.dialects.arrays import JOINED_PATHS, Single, joined, parted, single
from backends.dialects.batches import JoinError
from policies.ordering.gather import length_bucket
from policies.schema import ClassPolicy
from policies.vocabulary import Work

INPUTS_MAX_BYTES = 256 * 1024
"""Inputs of one array together. One that is longer goes alone."""
ANSWER_MAX_BYTES = 32 * 1024 * 1024
"""An answer to an array that is held until it is whole."""
_OWN_HEADERS = frozenset({b"x-request-id", b"traceparent", b"tracestate"})
"""Names of a single request, that say nothing of how it is to be answered. The first one's go out, its id marked."""


def may_join(work: Work, one: ClassPolicy) -> bool:
    """Whether a work may share a call: bulk with one input, not tried before, answered whole. `one`: its class."""
    return (
        work.path in JOINED_PATHS
        and work.sequences == 1
        and not (work.attempt or work.streams)
        and not one.has_ttft_objective
    )


class Coalescer:
    """See the module header. One per process."""

    __slots__ = ("_gathering",)

    def __init__(self) -> None:
        self._gathering: dict[tuple[int, Hashable], list[_Mate]] = {}

    def call(
        self, backend: Backend, request: EngineRequest, receiver: Receiver, work: Work, *, inputs_max: int
    ) -> Call:
        """As `backend.call`, together with what else is alike and begins in this turn of the loop.

        inputs_max   inputs of one array
        """
        one = single(request.body)
        if one is None:
            return backend.call(request, receiver)
        if not self._gathering:
            asyncio.get_running_loop().call_soon(self._send)
        headers = tuple(pair for pair in request.headers if pair[0] not in _OWN_HEADERS)
        sent = (backend, request.method, request.target, headers, one.shape)
        mate = _Mate(backend, request, receiver, one)
        key = inputs_max, (*sent, work.tenant, work.class_name, length_bucket(work))
        self._gathering.setdefault(key, []).append(mate)
        return mate

    def _send(self) -> None:
        gathering, self._gathering = self._gathering, {}
        for (inputs_max, _), mates in gathering.items():
            for some in _bounded([mate for mate in mates if not mate.left], inputs_max):
                if len(some) > 1:
                    _Array(some)
                else:
                    some[0].go_alone()

    def __repr__(self) -> str:
        return f"<Coalescer gathering={sum(map(len, self._gathering.values()))}>"


def _bounded(mates: Sequence[_Mate], inputs_max: int) -> Iterator[list[_Mate]]:
    """Mates in order, as many at a time as may be in one array."""
    some: list[_Mate] = []
    held_bytes = 0
    for mate in mates:
        given_bytes = len(mate.single.given)
        if some and (len(some) == inputs_max or held_bytes + given_bytes > INPUTS_MAX_BYTES):
            yield some
            some, held_bytes = [], 0
        some.append(mate)
        held_bytes += given_bytes
    if some:
        yield some


class _Mate:
    """One work's call: a part of a shared one, or one of its own. A `Call`.

    left   nobody listens any more
    """

    __slots__ = ("_array", "_backend", "_call", "_paused", "_receiver", "left", "request", "single")

    def __init__(self, backend: Backend, request: EngineRequest, receiver: Receiver, one: Single) -> None:
        self._backend = backend
        self._receiver = receiver
        self._array: _Array | None = None
        self._call: Call | None = None
        self._paused = False
        self.request = request
        self.single = one
        self.left = False

    def pause(self) -> None:
        self._paused = True
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        self._paused = False
        if self._call is not None:
            self._call.resume()

    def abort(self) -> None:
        if self.left:
            return
        self.left = True
        if self._call is not None:
            self._call.abort()
        elif self._array is not None:
            self._array.deserted()

    def call(self, request: EngineRequest, array: _Array) -> Call:
        """Send an array to the engine that all mates were granted."""
        return self._backend.call(request, array)

    def go_with(self, array: _Array) -> None:
        """Be a part of a shared call."""
        self._array = array

    def go_alone(self) -> None:
        """Be a call of its own from now on, of which nothing has been heard yet."""
        self._array = None
        if not self.left:
            self._call = self._backend.call(self.request, self._receiver)
            if self._paused:
                self._call.pause()

    def answered(self, content_type: bytes, part: bytes) -> None:
        """Hear one's own part of an answer. What else its head said was said of the whole."""
        self._array = None
        headers = ((b"content-type", content_type), (b"content-length", b"%d" % len(part)))
        if not self.left:
            self._receiver.on_head(200, headers)
        if not self.left:
            self._receiver.on_body(part)
        if not self.left:
            self._receiver.on_end()

    def failed(self, failure: CallFailure) -> None:
        """Hear that nothing was sent."""
        self._array = None
        if not self.left:
            self._receiver.on_failure(failure)


class _Array:
    """One call for several mates. A `Receiver`; sent when made."""

    __slots__ = ("_call", "_content_type", "_held", "_held_bytes", "_mates")

    def __init__(self, mates: Sequence[_Mate]) -> None:
        self._mates = mates
        self._content_type = b""
        self._held: list[bytes] = []
        self._held_bytes = 0
        first = mates[0]
        headers = [_marked(pair, len(mates)) for pair in first.request.headers]
        for mate in mates:
            mate.go_with(self)
        body = joined([mate.single for mate in mates])
        self._call = first.call(replace(first.request, headers=headers, body=body), self)

    def deserted(self) -> None:
        """A mate has left."""
        if all(mate.left for mate in self._mates):
            self._call.abort()

    def on_head(self, status: int, headers: Headers) -> None:
        fields = dict(headers)
        self._content_type = fields.get(b"content-type", b"")
        coded = b"content-encoding" in fields
        if status != 200 or coded or not self._content_type.lower().startswith(b"application/json"):
            self._each_alone()

    def on_body(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > ANSWER_MAX_BYTES:
            self._each_alone()

    def on_end(self) -> None:
        try:
            parts = parted(b"".join(self._held), [mate.single for mate in self._mates])
        except JoinError:
            self._each_alone()
            return
        for mate, part in zip(self._mates, parts, strict=True):
            mate.answered(self._content_type, part)

    def on_failure(self, failure: CallFailure) -> None:
        if failure.sent:
            self._each_alone()
            return
        for mate in self._mates:
            mate.failed(failure)

    def _each_alone(self) -> None:
        self._call.abort()
        self._held.clear()
        for mate in self._mates:
            mate.go_alone()


def _marked(field: tuple[bytes, bytes], mates: int) -> tuple[bytes, bytes]:
    """A header field as it goes out with an array: the first one's request id, and how many others are with it."""
    name, value = field
    return (name, b"%b-with-%d" % (value, mates - 1)) if name == b"x-request-id" else field
