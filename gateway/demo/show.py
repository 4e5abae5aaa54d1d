"""The running demo: clients at work, the gateway's page read each second, and both shown.

Ends when cancelled; everything it started is its own and ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import NoReturn

import aiohttp
import orjson
from rich.console import Console, Group
from rich.live import Live

from gateway.demo.load import Load
from gateway.demo.view import live_view, plain_line
from gateway.demo.watch import GatewayPage, read_page
from gateway.demo.workload import conversation, summarisation
from gateway.load.score import Figures, Score

SHOW_EVERY_S = 1.0
CHAT_EVERY_S = 4.0
QUESTIONS = ("Name three rivers.", "What does a water wheel do?", "Say one sentence about rain.", "What is a dam?")


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the demo plays and how hard.

    rate          interactive traffic, times the trace
    bulk_clients  bulk requests under way at any time
    chat_model    a model whose answers are text, asked a question now and then; "" for none
    """

    public_url: str
    admin_url: str
    model: str
    rate: float
    bulk_clients: int
    chat_model: str = ""

    @property
    def curl(self) -> str:
        """A request to try, ready to be pasted."""
        body = {"model": self.chat_model or self.model, "messages": [{"role": "user", "content": "Hello!"}]}
        return (
            f"curl {self.public_url}/v1/chat/completions -H 'Content-Type: application/json'"
            f" -d '{orjson.dumps({**body, 'max_tokens': 60}).decode()}'"
        )


class Show:
    """One performance on one stage. `console` decides between a live view (a terminal) and plain lines."""

    def __init__(self, stage: Stage, session: aiohttp.ClientSession, console: Console) -> None:
        clock = asyncio.get_running_loop().time
        self._stage = stage
        self._session = session
        self._console = console
        self._clock = clock
        self._started_s = clock()
        self._page = GatewayPage()
        self._load = Load(stage.public_url, stage.model, {"interactive": Score(clock), "bulk": Score(clock)})
        self._said = ""

    async def play(self) -> None:
        """Send, watch and show until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._load.interactive(conversation(self._stage.rate)))
                group.create_task(self._load.bulk(summarisation(), self._stage.bulk_clients))
                group.create_task(self._screen())
                if self._stage.chat_model:
                    group.create_task(self._chat())
        finally:
            await self._load.close()

    async def _screen(self) -> None:
        for note in self._notes():
            self._console.print(note, soft_wrap=True, markup=False, highlight=False)
        if not self._console.is_terminal:
            await self._each_second(self._print_line)
        with Live(console=self._console, auto_refresh=False) as live:
            await self._each_second(lambda: live.update(self._live(), refresh=True))

    async def _each_second(self, show: Callable[[], None]) -> NoReturn:
        while True:
            await self._look()
            show()
            await asyncio.sleep(SHOW_EVERY_S)

    async def _look(self) -> None:
        """Read the gateway's page; one that does not come leaves the last one standing."""
        try:
            async with asyncio.timeout(SHOW_EVERY_S):
                self._page = await read_page(self._session, self._stage.admin_url)
        except (aiohttp.ClientError, TimeoutError):
            return
        for name, score in self._load.scores.items():
            score.ttft_sla_s = self._page.objective_s.get(name)

    def _print_line(self) -> None:
        self._console.print(plain_line(*self._seen()), soft_wrap=True, markup=False, highlight=False)
        if self._said:
            self._console.print(f"        {self._said}", soft_wrap=True, markup=False, highlight=False)
            self._said = ""

    def _live(self) -> Group:
        return live_view(*self._seen(), [*([self._said] if self._said else []), "Ctrl-C ends everything."])

    def _seen(self) -> tuple[float, GatewayPage, dict[str, Figures]]:
        figures = {name: score.figures() for name, score in self._load.scores.items()}
        return self._clock() - self._started_s, self._page, figures

    def _notes(self) -> list[str]:
        return [
            f"gateway   {self._stage.public_url}/v1",
            f"metrics   {self._stage.admin_url}/metrics",
            f"status    {self._stage.admin_url}/admin/v1/status",
            f"try       {self._stage.curl}",
        ]

    async def _chat(self) -> None:
        for question in cycle(QUESTIONS):
            self._said = await self._answer(question) or self._said
            await asyncio.sleep(CHAT_EVERY_S)

    async def _answer(self, question: str) -> str:
        body = {
            "model": self._stage.chat_model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 40,
            "temperature": 0.2,
        }
        try:
            async with self._session.post(f"{self._stage.public_url}/v1/chat/completions", json=body) as reply:
                if reply.status != 200:
                    return ""
                text = orjson.loads(await reply.read())["choices"][0]["message"]["content"]
        except (aiohttp.ClientError, TimeoutError):
            return ""
        return f"{self._stage.chat_model}: {question} → {' '.join(text.split())}"
