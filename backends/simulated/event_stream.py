"""One server-sent event stream on its way to a client, written in callbacks.

Events go straight to the transport, framed here, because a task switch per token and stream would cost more than the
engine's step. Headers and the end are aiohttp's. A client that reads slowly is not waited for: `congested` says so,
tokens pile up in their `Choice`, and a later event carries several, as with the real engines.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

_CONGESTED_BYTES = 64 * 1024


class EventStream:
    """See the module header. Made after the response was prepared."""

    __slots__ = ("_chunked", "_response", "_transport")

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._response = response
        self._transport: asyncio.Transport | None = request.transport
        self._chunked = request.version >= HttpVersion11

    @property
    def congested(self) -> bool:
        """True while the client has so much left to read that more should wait."""
        transport = self._transport
        return transport is not None and transport.get_write_buffer_size() > _CONGESTED_BYTES

    def send(self, events: bytes) -> None:
        """Write whole events; nothing when the client is gone. `events` is not empty."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    async def finish(self, last_events: bytes = b"") -> web.StreamResponse:
        """Write the last events and end the body; waits for the client to make room."""
        if last_events:
            await self._response.write(last_events)
        await self._response.write_eof()
        return self._response


async def open_event_stream(request: web.Request, headers: dict[str, str]) -> EventStream:
    """Answer 200 at once, before there is anything to say."""
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return EventStream(request, response)
