"""Open and closed loops. Both send until they are through or cancelled; whoever started them waits for the answers.

Open: requests come when they are due, whatever became of earlier ones. Closed: a fixed number of clients, each of which
sends its next request when its last is answered, after thinking; a refused one waits as it was told, a failed one a
second. Neither makes a task per request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gateway.load.client import Client, Exchange
from gateway.replay.trace import Request

TIMER_S: Final = 0.002
"""What a loop's timers may be late by themselves; a request sent within that counts from when it was sent."""
FAILED_PAUSE_S: Final = 1.0
TURN_REQUESTS: Final = 16
"""Sent at most in one turn of the loop by a generator that is behind, so that answers are read in between."""


async def open_loop(client: Client, requests: Iterable[Request]) -> None:
    """Send each request at its arrival, counted from now."""
    started_s = client.clock()
    behind = 0
    for request in requests:
        due_s = started_s + request.arrival_s
        now_s = client.clock()
        if due_s > now_s:
            await asyncio.sleep(due_s - now_s)
            behind = 0
            now_s = client.clock()
        elif (behind := behind + 1) % TURN_REQUESTS == 0:
            await asyncio.sleep(0)
        client.send(request, now_s if now_s - due_s <= TIMER_S else due_s)


class ClosedLoop:
    """So many clients at one target.

    requests   what they send, in turn; each is due when its client is ready
    ramp_s     in which the clients come, evenly
    think_s    between an answer and the next request
    """

    def __init__(
        self, client: Client, requests: Iterator[Request], *, clients: int, ramp_s: float = 0.0, think_s: float = 0.0
    ) -> None:
        self._client = client
        self._requests = requests
        self._clients = clients
        self._ramp_s = ramp_s
        self._think_s = think_s
        self._waiting: dict[int, asyncio.TimerHandle] = {}
        self._live = 0
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Send until there are no more requests, or until cancelled: nothing new is sent then."""
        loop, started_s = self._client.loop, self._client.loop.time()
        try:
            self._live = self._clients
            for seat in range(self._clients):
                at_s = started_s + self._ramp_s * seat / self._clients
                self._waiting[seat] = loop.call_at(at_s, self._send, seat)
            await self._over.wait()
        finally:
            self._requests = iter(())
            for handle in self._waiting.values():
                handle.cancel()
            self._waiting.clear()

    def _send(self, seat: int) -> None:
        self._waiting.pop(seat, None)
        request = next(self._requests, None)
        if request is None:
            self._live -= 1
            if not self._live:
                self._over.set()
            return
        self._client.send(request, self._client.clock(), self._next(seat))

    def _next(self, seat: int) -> Callable[[Exchange], None]:
        def ended(exchange: Exchange) -> None:
            pause_s = self._think_s
            if exchange.failure:
                pause_s = FAILED_PAUSE_S if exchange.retry_after_s is None else exchange.retry_after_s
            self._waiting[seat] = self._client.loop.call_later(pause_s, self._send, seat)

        return ended


async def answered(client: Client, *, within_s: float) -> bool:
    """Wait until nothing is under way; False when something still is after within_s."""
    try:
        async with asyncio.timeout(within_s):
            await client.idle.wait()
    except TimeoutError:
        return False
    return True
