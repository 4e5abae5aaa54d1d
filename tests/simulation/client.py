"""A scripted HTTP client on the wire: it does what its plan says, and reports what it saw of its answer.

Its own reading of HTTP is small and strict, so that it shares no bug with what it checks: a head, then a body by
Content-Length or in chunks, complete or not.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass

import orjson

from tests.simulation.faults import Behaviour, ClientPlan
from tests.simulation.invariants import Seen

SLOW_READ_EVERY_S = 0.05
SLOW_SEND_EVERY_S = 0.02
SLOW_SEND_BYTES = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer as far as it came. body holds no chunk framing."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool


class ScriptedClient(asyncio.Protocol):
    """One connection of one client; `run` plays it to its end. Raises OSError when it cannot connect.

    closed   set when the connection is lost
    """

    def __init__(self, plan: ClientPlan, request_id: str) -> None:
        loop = asyncio.get_running_loop()
        self.plan = plan
        self._reading = Reading()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._request_id = request_id
        self._transport: asyncio.Transport | None = None
        self._more = asyncio.Event()

    async def run(self, host: str, port: int, *, longest_s: float) -> Answer | None:
        """Play the plan; the answer as far as it came, None when no head came. Raises TimeoutError past longest_s."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, host, port)
        assert self._transport is not None
        try:
            async with asyncio.timeout(longest_s):
                await self._play(self._transport)
        finally:
            if not self._transport.is_closing():
                self._transport.close()
        return self._reading.answer

    # -- asyncio's calls ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reading.feed(data)
        self._more.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
        self._more.set()

    # -- the script ---------------------------------------------------------------------------------------------------

    async def _play(self, transport: asyncio.Transport) -> None:
        behaviour = self.plan.behaviour
        await self._send(transport)
        if behaviour is Behaviour.LEAVES_BEFORE_HEAD:
            await self._wait(self.plan.patience_s)
            transport.close()
        elif behaviour in {Behaviour.LEAVES_MIDWAY, Behaviour.RESETS_MIDWAY}:
            await self._until_received(200)
            await self._wait(self.plan.patience_s)
            if behaviour is Behaviour.RESETS_MIDWAY and not transport.is_closing():
                linger = struct.pack("ii", 1, 0)
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            transport.abort()
        elif behaviour is Behaviour.STOPS_READING:
            transport.pause_reading()
            await self._wait(self.plan.patience_s + 1)
            transport.abort()
        elif behaviour is Behaviour.HALF_CLOSES:
            transport.write_eof()
            await self.closed
        elif behaviour is Behaviour.READS_SLOWLY:
            await self._read_slowly(transport)
        else:
            await self._until_answered()

    async def _send(self, transport: asyncio.Transport) -> None:
        request = self._request()
        if self.plan.behaviour is not Behaviour.SENDS_SLOWLY:
            transport.write(request)
            return
        for begin in range(0, len(request), SLOW_SEND_BYTES):
            transport.write(request[begin : begin + SLOW_SEND_BYTES])
            await asyncio.sleep(SLOW_SEND_EVERY_S)

    async def _read_slowly(self, transport: asyncio.Transport) -> None:
        while not self._answered:
            transport.resume_reading()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            transport.pause_reading()
            await asyncio.sleep(SLOW_READ_EVERY_S)

    async def _until_answered(self) -> None:
        while not self._answered:
            self._more.clear()
            await self._more.wait()

    async def _until_received(self, size_bytes: int) -> None:
        while self._reading.received_bytes < size_bytes and not self._answered:
            self._more.clear()
            await self._more.wait()

    async def _wait(self, delay_s: float) -> None:
        await asyncio.wait([self.closed], timeout=delay_s)

    @property
    def _answered(self) -> bool:
        return self.closed.done() or self._reading.complete

    def _request(self) -> bytes:
        plan = self.plan
        prompt = " ".join(["water"] * plan.words)
        body = orjson.dumps(
            {
                "model": "sim",
                "messages": [{"role": "user", "content": f"{plan.number} {prompt}"}],
                "max_tokens": plan.max_tokens,
                "ignore_eos": True,
                "stream": plan.stream,
                **({"stream_options": {"include_usage": True}} if plan.stream and plan.number % 2 else {}),
            }
        )
        connection = "keep-alive" if plan.behaviour is Behaviour.KEEPS_ALIVE else "close"
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
            f"x-request-id: {self._request_id}\r\nx-headrace-class: {plan.class_name}\r\n"
            f"content-length: {len(body)}\r\nconnection: {connection}\r\n\r\n"
        )
        return head.encode() + body


def seen_of(answer: Answer | None) -> Seen:
    """What a client of the chat API makes of its answer."""
    if answer is None:
        return Seen()
    seen = Seen(status=answer.status, complete=answer.complete, failed=answer.status >= 400)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        _read_events(answer.body, seen)
    elif answer.complete:
        _read_usage(orjson.loads(answer.body), seen)
    return seen


class Reading:
    """An HTTP/1.1 answer as it comes in; every byte is read once.

    received_bytes   head and framing included
    """

    def __init__(self) -> None:
        self.received_bytes = 0
        self.complete = False
        self._raw = bytearray()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._left_bytes: int | None = None

    @property
    def answer(self) -> Answer | None:
        """What has come so far; None before the head is whole."""
        return Answer(self._status, self._headers, bytes(self._body), self.complete) if self._status else None

    def feed(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self._raw += data
        if not self._status:
            self._read_head()
        if self._status and not self.complete:
            if self._left_bytes is None:
                self._read_chunks()
            else:
                self._read_counted(self._left_bytes)

    def _read_head(self) -> None:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return
        status_line, *lines = self._raw[:end].decode("latin-1").split("\r\n")
        del self._raw[: end + 4]
        fields = (line.partition(":") for line in lines)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        self._status = int(status_line.split(" ")[1])
        if self._headers.get("transfer-encoding") != "chunked":
            self._left_bytes = int(self._headers.get("content-length", "0"))

    def _read_counted(self, left_bytes: int) -> None:
        self._body += self._raw[:left_bytes]
        self._left_bytes = max(0, left_bytes - len(self._raw))
        self._raw.clear()
        self.complete = not self._left_bytes

    def _read_chunks(self) -> None:
        """Whole chunks only: what there is of one that is not whole yet is of no use to anybody."""
        while (line_end := self._raw.find(b"\r\n")) >= 0:
            size = int(self._raw[:line_end].partition(b";")[0], 16)
            begin = line_end + 2
            if len(self._raw) < begin + size + 2:
                return
            self._body += self._raw[begin : begin + size]
            del self._raw[: begin + size + 2]
            if size == 0:
                self.complete = True
                return


def _read_events(body: bytes, seen: Seen) -> None:
    """A stream is whole only with its [DONE]; without one, or with an error in it, it has failed."""
    done = False
    whole_events = body.split(b"\n\n")[:-1]
    for event in whole_events:
        for line in event.split(b"\n"):
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                document = orjson.loads(line[6:])
                seen.failed = seen.failed or "error" in document
                _read_usage(document, seen)
    if seen.complete and not done and not seen.failed:
        raise AssertionError(f"a stream ended cleanly without [DONE]: {body[-200:]!r}")


def _read_usage(document: dict[str, object], seen: Seen) -> None:
    usage = document.get("usage")
    if isinstance(usage, dict):
        seen.tokens = usage["completion_tokens"]
