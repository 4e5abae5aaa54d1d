"""A real `Ingress` on a free loopback port, in front of a scripted service."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from gateway.clock import PoolClock
from gateway.exchange import Exchange
from gateway.ingress.auth import KeyRing
from gateway.ingress.server import Ingress
from gateway.logs import Logs
from gateway.settings import Settings


async def echo(exchange: Exchange) -> None:
    """Answer with the body that came."""
    downstream = exchange.downstream
    downstream.start(
        200, [("content-type", "application/json"), *exchange.response_headers], content_length=len(exchange.body)
    )
    if exchange.body:
        downstream.write(exchange.body)
    downstream.finish()


@dataclass
class ScriptedService:
    """Keeps what it was given; `script` answers."""

    script: Callable[[Exchange], Awaitable[None]] = echo
    served: list[Exchange] = field(default_factory=list)
    cancelled: int = 0

    async def serve(self, exchange: Exchange) -> None:
        self.served.append(exchange)
        try:
            await self.script(exchange)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class SmallCatalogue:
    """Two models; everything but "unknown" may exist."""

    def models(self) -> Sequence[Mapping[str, object]]:
        return [
            {"id": "tiny", "object": "model", "max_model_len": 2048, "root": "/models/tiny"},
            {"id": "org/large", "object": "model"},
        ]

    def knows(self, model: str) -> bool:
        return model != "unknown"

    def info(self, model: str) -> Mapping[str, object]:
        return {"model_id": model, "max_input_tokens": 1024}


@dataclass
class Stand:
    """A listening ingress and what is behind it."""

    ingress: Ingress
    service: ScriptedService
    port: int
    log: io.BytesIO


Start = Callable[..., Awaitable[Stand]]


@asynccontextmanager
async def standing(settings: Settings, ring: KeyRing, service: ScriptedService) -> AsyncIterator[Stand]:
    stream = io.BytesIO()
    logs = Logs(stream, level="debug")
    ingress = Ingress(
        settings,
        service,
        SmallCatalogue(),
        capacity=lambda query: {"query": query},
        keys=lambda: ring,
        clock=PoolClock(),
        rng=random.Random(7),
        log=logs.log,
    )
    listener = await ingress.listen(host="127.0.0.1", port=0)
    try:
        yield Stand(ingress, service, listener.sockets[0].getsockname()[1], stream)
    finally:
        await ingress.close()
        logs.close()


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts an ingress with settings, a key ring and a script. All end with the test."""
    async with AsyncExitStack() as stack:

        async def begin(
            settings: Settings | None = None,
            *,
            ring: KeyRing | None = None,
            script: Callable[[Exchange], Awaitable[None]] = echo,
        ) -> Stand:
            return await stack.enter_async_context(
                standing(settings or Settings(), ring or KeyRing(), ScriptedService(script))
            )

        yield begin
