"""Interactive and bulk streams against several gateways at once, each byte of which is known beforehand.

An engine's answer follows from the prompt alone, so a stream is whole when its text is the one that an engine gives
when it is asked directly. Each stream has a connection of its own, so that it is in one process of one gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson

from tests.end_to_end.dialects import COMPLETIONS
from tests.end_to_end.engine_process import eventually
from tests.gateway.ingress.raw_client import RawClient, request

MODEL = "sim-8b"
TOKENS = {"interactive": 8, "bulk": 40}
ANSWER_S = 25.0
"""A stream without a byte for so long hangs."""


@dataclass
class Told:
    """How one stream went for its client.

    status   0: no answer's head came
    whole    its framing and its last event came
    """

    gateway: str
    class_name: str
    started_s: float
    client_port: int = 0
    status: int = 0
    first_s: float = 0.0
    ended_s: float = 0.0
    body: bytes = b""
    whole: bool = False

    @property
    def text(self) -> str:
        return COMPLETIONS.text(self.body)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.started_s if self.first_s else float("inf")

    def __repr__(self) -> str:
        return (
            f"<{self.gateway} {self.class_name} {self.status} whole={self.whole} ttft={self.ttft_s:.2f} "
            f"lasted={self.ended_s - self.started_s:.2f} {len(self.body)} bytes {self.body[-200:]!r}>"
        )


@dataclass
class Traffic:
    """Streams under way and ended. `right` is each class's text."""

    ports: dict[str, int]
    group: asyncio.TaskGroup
    right: dict[str, str]
    told: list[Told] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)

    def stop(self, *names: str) -> None:
        """Start nothing more against these gateways, all by default; what runs goes on."""
        self.stopped.update(names or self.ports)

    def steady(self, *, interactive_per_s: float, bulk: int) -> None:
        """Until stopped: interactive streams at a rate, and so many bulk streams at once, on each gateway."""
        for name in self.ports:
            self.group.create_task(self._at_rate(name, interactive_per_s))
            for _ in range(bulk):
                self.group.create_task(self._one_by_one(name))

    async def stream(self, name: str, class_name: str) -> Told:
        """One stream to its end."""
        told = Told(name, class_name, time.monotonic())
        self.told.append(told)
        try:
            async with RawClient(self.ports[name], wait_s=ANSWER_S) as client:
                told.client_port = client.local_port
                await client.send(ask(class_name))
                head = await client.read_head()
                told.status = head.status
                if head.status != 200:
                    await client._read_body(head, "POST")
                    told.body = head.body
                    return told
                while chunk := await client.read_chunk():
                    if not told.first_s and b"data: {" in chunk:
                        told.first_s = time.monotonic()
                    told.body += chunk
                told.whole = told.body.endswith(b"data: [DONE]\n\n")
        except (OSError, EOFError):
            told.whole = False
        finally:
            told.ended_s = time.monotonic()
        return told

    def of(self, class_name: str, *names: str) -> list[Told]:
        return [told for told in self.told if told.class_name == class_name and told.gateway in (names or self.ports)]

    def live(self, name: str) -> list[Told]:
        """Streams of a gateway that have shown a token and go on."""
        return [told for told in self.told if told.gateway == name and told.first_s and not told.ended_s]

    def wrong(self, besides: Iterable[int] = ()) -> list[Told]:
        """Streams that are not what they should be, besides those on these client's ports."""
        spared = set(besides)
        return [
            told
            for told in self.told
            if told.client_port not in spared
            and not (told.status == 200 and told.whole and told.text == self.right[told.class_name])
        ]

    def late(self, since_s: float, objective_s: float, *names: str) -> list[Told]:
        """Interactive streams started since then whose first token missed the objective."""
        now_s = time.monotonic()
        asked = [told for told in self.of("interactive", *names) if since_s <= told.started_s <= now_s - objective_s]
        assert len(asked) >= 10, f"{len(asked)} interactive streams since then say nothing"
        return [told for told in asked if told.ttft_s > objective_s]

    async def flows(self, *names: str, streams: int = 3) -> None:
        """Wait until so many bulk streams more have ended on each of these gateways."""
        before = {name: self.ended("bulk", name) for name in names}
        await eventually(
            lambda: all(self.ended("bulk", name) >= before[name] + streams for name in names), within_s=ANSWER_S
        )

    def ended(self, class_name: str, name: str) -> int:
        return sum(told.whole for told in self.of(class_name, name))

    async def _at_rate(self, name: str, per_s: float) -> None:
        due_s = time.monotonic()
        while name not in self.stopped:
            self.group.create_task(self.stream(name, "interactive"))
            due_s += 1 / per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def _one_by_one(self, name: str) -> None:
        while name not in self.stopped:
            await self.stream(name, "bulk")


@asynccontextmanager
async def traffic(ports: dict[str, int], engine_port: int) -> AsyncIterator[Traffic]:
    """Streams against these gateways; none is started after the block, and all have ended when the context has."""
    async with asyncio.TaskGroup() as direct:
        right = {name: direct.create_task(_text(engine_port, name)) for name in TOKENS}
    async with asyncio.TaskGroup() as group:
        streams = Traffic(ports, group, {name: task.result() for name, task in right.items()})
        try:
            yield streams
        finally:
            streams.stop()


def ask(class_name: str, *, tokens: int | None = None, stream: bool = True) -> bytes:
    """A request of a class for an answer of known length."""
    body = {
        "model": MODEL,
        "prompt": f"water for {class_name}",
        "max_tokens": tokens or TOKENS[class_name],
        "ignore_eos": True,
        "stream": stream,
    }
    headers = ("Content-Type: application/json", f"X-Headrace-Class: {class_name}")
    return request("POST", "/v1/completions", orjson.dumps(body), *headers)


async def _text(engine_port: int, class_name: str) -> str:
    async with RawClient(engine_port) as client:
        answer = await client.ask(ask(class_name))
    assert answer.whole
    return COMPLETIONS.text(answer.body)
