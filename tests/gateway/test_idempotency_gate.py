"""The gate's own end of a request: its answer is kept at once, also when the client is gone before that is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from gateway.clock import PoolClock
from gateway.errors import Dialect
from gateway.exchange import Exchange, Facts
from gateway.idempotency.answers import LEASE_S, MemoryAnswers
from gateway.idempotency.gate import HEADER, Idempotent
from gateway.telemetry import Telemetry


class Client:
    """A way back to a client that takes everything."""

    started = gone = False
    unsent_bytes = 0

    def start(self, status: int, headers: Sequence[tuple[str, str]], *, content_length: int | None = None) -> None: ...

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None: ...

    def abort(self) -> None: ...

    def watch(
        self, *, on_pause: Callable[[], None], on_resume: Callable[[], None], on_gone: Callable[[], None]
    ) -> None: ...


class Answering:
    """A service that answers at once."""

    async def serve(self, exchange: Exchange) -> None:
        exchange.downstream.start(200, [], content_length=2)
        exchange.downstream.write(b"{}")
        exchange.downstream.finish()


class SlowAnswers(MemoryAnswers):
    """A store that has not answered yet when `asked` is set, until `go` is."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.written = asyncio.Event()

    async def replace(self, digest: str, expected: bytes, record: bytes, lifetime_s: float) -> bool:
        self.asked.set()
        await self.go.wait()
        done = await super().replace(digest, expected, record, lifetime_s)
        self.written.set()
        return done


async def test_an_answer_whose_client_left_while_it_was_kept_is_kept_without_delay() -> None:
    answers, clock = SlowAnswers(), PoolClock()
    gate = Idempotent(
        Answering(),
        answers,
        keep_s=60.0,
        name="here",
        clock=clock,
        telemetry=Telemetry(version="0", longest_s=60.0),
        log=structlog.get_logger(),
    )
    exchange = Exchange(
        request_id="r",
        method=b"POST",
        path="/v1/completions",
        target=b"/v1/completions",
        dialect=Dialect.OPENAI,
        headers=(),
        body=b"{}",
        facts=Facts(model="m"),
        tenant="t",
        downstream=Client(),
        accepted_s=clock.now_s(),
        rule_headers={HEADER: "k"},
    )
    running = asyncio.ensure_future(gate.run())
    handler = asyncio.ensure_future(gate.serve(exchange))
    await answers.asked.wait()
    while gate._ended.is_set():  # until `run` has looked, and found that nothing is left for it
        await asyncio.sleep(0)
    handler.cancel()
    await asyncio.wait([handler])

    answers.go.set()
    async with asyncio.timeout(LEASE_S / 6):
        await answers.written.wait()

    running.cancel()
    await asyncio.wait([running])
    assert repr(gate) == "<Idempotent running=0 to end=0 kept=10 bytes>"
