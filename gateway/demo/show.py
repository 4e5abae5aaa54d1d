"""The running demo: clients at work, the gateway's page read each second, and both shown.

Ends when cancelled; everything it started is its own and ends with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import NoReturn

import aiohttp
import orjson
from rich.console import Console, Group
from rich.live import Live

from gateway.demo.load import Load
from gateway.demo.tally import Tally
from gateway.demo.view import busy_host, closing_lines, live_view, plain_line
from gateway.demo.watch import GatewayPage, lag_p99_s, read_page
from gateway.demo.workload import conversation, summarisation
from gateway.load.score import Figures, Score

SHOW_EVERY_S = 1.0
CHAT_EVERY_S = 4.0
LAG_PAGES = 30
"""So many pages back the loop's lag is looked at."""
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
    """One performance on one stage. `console` decides between a live view (a terminal) and plain lines.

    closing   what it came to, once `play` has ended
    """

    def __init__(self, stage: Stage, session: aiohttp.ClientSession, console: Console) -> None:
        clock = asyncio.get_running_loop().time
        self._stage = stage
        self._session = session
        self._console = console
        self._clock = clock
        self._started_s = clock()
        self._page = GatewayPage()
        self._tallies = {name: Tally(Score(clock)) for name in ("interactive", "bulk")}
        self._load = Load(stage.public_url, stage.model, self._tallies)
        self._lags: deque[Mapping[float, float]] = deque(maxlen=LAG_PAGES)
        self._first_lag: Mapping[float, float] | None = None
        self._said = ""
        self.closing: list[str] = []

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
            # Before the load is closed: what is cut by that has not failed.
            lag_s = lag_p99_s(self._page.loop_lag, self._first_lag or {})
            self.closing = closing_lines(self._clock() - self._started_s, self._tallies, lag_s)
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
        self._lags.append(self._page.loop_lag)
        if self._first_lag is None:
            self._first_lag = self._page.loop_lag
        for name, tally in self._tallies.items():
            tally.score.ttft_sla_s = self._page.objective_s.get(name)

    def _print_line(self) -> None:
        self._console.print(plain_line(*self._seen()), soft_wrap=True, markup=False, highlight=False)
        for note in filter(None, (self._busy_host(), self._said)):
            self._console.print(f"        {note}", soft_wrap=True, markup=False, highlight=False)
        self._said = ""

    def _live(self) -> Group:
        return live_view(*self._seen(), [*filter(None, (self._busy_host(), self._said)), "Ctrl-C ends everything."])

    def _busy_host(self) -> str:
        return busy_host(lag_p99_s(self._page.loop_lag, self._lags[0])) if self._lags else ""

    def _seen(self) -> tuple[float, GatewayPage, dict[str, Figures]]:
        figures = {name: tally.score.figures() for name, tally in self._tallies.items()}
        return self._clock() - self._started_s, self._page, figures

    def _notes(self) -> list[str]:
        return [
            f"gateway   {self._stage.public_url}/v1",
            f"metrics   {self._stage.admin_url}/metrics",
            f"status    {self._stage.admin_url}/admin/v1/status",
            f"try       {self._stage.curl}",
            "end       Ctrl-C, or --for SECONDS; the ten minutes of the trace repeat until then",
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
