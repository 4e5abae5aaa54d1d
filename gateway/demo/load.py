"""The demo's clients: real HTTP through the public port, as applications would send it.

Interactive requests are an open loop (they come when the trace says, whatever became of earlier ones); bulk is a
closed one (a fixed number of clients, each with one request at a time, which wait as `Retry-After` says). Every
request is streamed, so that tokens are counted as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import count
from typing import NoReturn

import aiohttp
import orjson

from gateway.demo.score import Score
from gateway.demo.workload import Arrival, Lengths, prompt_text

RETRY_MAX_S = 60.0
ARRIVE_EVERY_S = 0.5
_EVENT = b"data: {"
_ERROR = b'data: {"error"'


class Load:
    """Sends to one gateway under one model name. Scores are by class."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, scores: dict[str, Score]) -> None:
        """url: the public base URL. The session must allow as many connections as there are requests."""
        self._session = session
        self._url = url + "/v1/chat/completions"
        self._model = model
        self.scores = scores
        self._numbers = count()

    async def interactive(self, arrivals: Iterable[Arrival]) -> None:
        """Send each arrival at its time, until the last; waits for the answers of those under way."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                await asyncio.sleep(started_s + arrival.at_s - loop.time())
                group.create_task(self.send("interactive", arrival.lengths))

    async def bulk(self, lengths: Iterator[Lengths], clients: int) -> None:
        """Keep `clients` requests under way until cancelled; the clients come one after another, as people do."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._bulk_client(lengths))
                await asyncio.sleep(ARRIVE_EVERY_S)

    async def _bulk_client(self, lengths: Iterator[Lengths]) -> NoReturn:
        while True:
            wait_s = await self.send("bulk", next(lengths))
            await asyncio.sleep(wait_s)

    async def send(self, class_name: str, lengths: Lengths) -> float:
        """Send one request, count what comes, and return how many seconds to wait before the next one."""
        score = self.scores[class_name]
        loop = asyncio.get_running_loop()
        body = orjson.dumps(
            {
                "model": self._model,
                "messages": [
                    {"role": "user", "content": prompt_text(lengths.prompt_tokens, next(self._numbers))},
                ],
                "max_tokens": lengths.output_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        headers = {"Content-Type": "application/json", "X-Headrace-Class": class_name}
        sent_s = loop.time()
        began = False
        score.start()
        try:
            async with self._session.post(self._url, data=body, headers=headers) as reply:
                if reply.status != 200:
                    score.refuse()
                    return _retry_after_s(reply)
                async for chunk in reply.content.iter_any():
                    events = chunk.count(_EVENT)
                    if events and not began and _ERROR not in chunk:
                        began = True
                        score.first_token(loop.time() - sent_s)
                    if _ERROR in chunk:
                        score.fail(began=began)
                        return 1.0
                    score.tokens(events)
            score.complete()
        except (aiohttp.ClientError, TimeoutError):
            score.fail(began=began)
            return 1.0
        return 0.0


def _retry_after_s(reply: aiohttp.ClientResponse) -> float:
    text = reply.headers.get("Retry-After", "")
    return min(float(text), RETRY_MAX_S) if text.isascii() and text.isdigit() else 1.0
