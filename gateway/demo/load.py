"""The demo's clients: real HTTP through the public port, as applications would send it.

Interactive requests are an open loop (they come when the trace says, whatever became of earlier ones); bulk is a
closed one (a fixed number of clients, each with one request at a time, which wait as `Retry-After` says). Every
request is streamed, so that tokens are counted as they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gateway.load.client import Client, Target, Watch
from gateway.load.run import ClosedLoop, open_loop
from gateway.replay.trace import Request

ARRIVE_EVERY_S = 0.5


class Load:
    """Sends to one gateway under one model name until closed. Watches are by class. Made on a running loop."""

    def __init__(self, url: str, model: str, watches: Mapping[str, Watch]) -> None:
        """url: the public base URL."""
        self._client = Client(Target(url, model), watches)

    async def interactive(self, requests: Iterable[Request]) -> None:
        """Send each request at its time, until the last."""
        await open_loop(self._client, requests)

    async def bulk(self, requests: Iterator[Request], clients: int) -> None:
        """Keep `clients` requests under way until cancelled; the clients come one after another, as people do."""
        await ClosedLoop(self._client, requests, clients=clients, ramp_s=ARRIVE_EVERY_S * clients).run()

    async def close(self) -> None:
        """Give up what is under way."""
        await self._client.close()
