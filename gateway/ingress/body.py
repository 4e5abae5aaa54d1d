"""Taking in a request's body: bounded in size, in time, and in what all requests hold together.

A sender that pauses, or that sends slower than BYTES_PER_S_MIN after its first `request_body_s`, is answered 408: a
byte now and then must not hold a connection and a body for ever. The bound ends with the body; the answer may take as
long as it takes.

The budget counts bytes as they arrive, not as they are announced, and gives them back once, when the exchange ends.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from gateway.errors import Refusal

BYTES_PER_S_MIN = 1024


class BodyBudget:
    """Bytes of request bodies held by all exchanges together."""

    __slots__ = ("bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<BodyBudget {self.held_bytes} of {self.bytes_max} bytes>"

    def hold(self) -> Hold:
        """A share of the budget, empty at first, to be used as a context manager."""
        return Hold(self)


class Hold:
    """What one exchange holds of the budget; given back at the end of its `with` block, whatever happens."""

    __slots__ = ("_budget", "held_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.held_bytes -= self.held_bytes
        self.held_bytes = 0

    def check(self, more_bytes: int) -> None:
        """Raises a 503 Refusal when so many more bytes would not fit now."""
        if self._budget.held_bytes + more_bytes > self._budget.bytes_max:
            raise Refusal(
                503,
                "the gateway holds as many request bytes as it may: retry later",
                "overloaded_error",
                "bodies_full",
                retry_after_s=2,
            )

    def take(self, more_bytes: int) -> None:
        """Count bytes that arrived. Raises like `check`, and then has not counted them."""
        self.check(more_bytes)
        self._budget.held_bytes += more_bytes
        self.held_bytes += more_bytes


def check_announced(request: web.BaseRequest, hold: Hold, *, body_max_bytes: int) -> None:
    """Refuse from the head alone what could not be taken: too long (413), no room (503), coded (415 and 501)."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        raise Refusal(
            415,
            "Content-Encoding is not supported for request bodies: send the body uncompressed",
            reason="unsupported_encoding",
            headers=(("accept-encoding", "identity"),),
        )
    transfer = request.headers.get("transfer-encoding", "chunked").strip().lower()
    if transfer != "chunked":
        # The parser undoes the chunks and would hand us what is coded within them as if it were plain.
        raise Refusal(
            501,
            "Transfer-Encoding other than chunked is not supported: send the body uncompressed",
            reason="unsupported_encoding",
        )
    length = request.headers.get("content-length", "").lstrip("0")  # zeros by the thousand are no number to int()
    if length.isdigit():
        if int(length) > body_max_bytes:
            raise _too_large(body_max_bytes)
        hold.check(int(length))


async def read_body(request: web.BaseRequest, hold: Hold, *, body_max_bytes: int, silence_s: float) -> bytes:
    """All of the body, as the client sent it (chunk framing undone). Raises a Refusal of 400, 408, 413 or 503."""
    content = request.content
    if content.is_eof():
        whole = content.read_nowait()
        if len(whole) > body_max_bytes:
            raise _too_large(body_max_bytes)
        hold.take(len(whole))
        return whole
    pieces: list[bytes] = []
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    try:
        async with asyncio.timeout(silence_s) as bound:
            while piece := await content.readany():
                if hold.held_bytes + len(piece) > body_max_bytes:
                    raise _too_large(body_max_bytes)
                hold.take(len(piece))
                pieces.append(piece)
                slowest_s = began_s + silence_s + hold.held_bytes / BYTES_PER_S_MIN
                bound.reschedule(min(loop.time() + silence_s, slowest_s))
    except TimeoutError:
        raise Refusal(
            408,
            f"request body did not arrive in time: send it without pauses of {silence_s:g} s and faster than "
            f"{BYTES_PER_S_MIN} bytes/s",
            "timeout_error",
            "request_body_timeout",
        ) from None
    except RequestPayloadError:
        raise Refusal(
            400, "request body's framing is broken: check its chunks or length", reason="invalid_framing"
        ) from None
    return b"".join(pieces) if len(pieces) != 1 else pieces[0]


def _too_large(body_max_bytes: int) -> Refusal:
    return Refusal(
        413,
        f"request body is longer than the limit of {body_max_bytes} bytes: send a smaller one",
        reason="body_too_large",
    )
