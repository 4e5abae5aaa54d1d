"""CPU of one relayed chunk inside the gateway: reply reader, relay, reply and downstream; the sockets are left out.

    python -m tests.benchmarks.bench_relay

Chunks are vLLM's, one a read. CPU time of this thread, the best of several rounds, since the machine may be busy.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

from backends.reply import ReplyReader
from gateway.clock import PoolClock
from gateway.dispatch.relay import Relay
from gateway.dispatch.reply import Reply
from gateway.errors import Dialect
from gateway.exchange import Exchange, Facts
from gateway.ingress.connection import Connection
from gateway.ingress.downstream import TransportDownstream
from gateway.ingress.wire import DateLine
from gateway.instruments import ITL
from gateway.series import Spread
from gateway.settings import Timeouts
from tests.benchmarks.bench_dialects import vllm_chunk

CHUNKS = 20_000
ROUNDS = 9
WARM_CHUNKS = 50
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Sink:
    """A client's transport and connection in one, and the call to the engine: takes all, and never fills up."""

    draining = writing_paused = False

    def __init__(self) -> None:
        self.transport = self
        self.got_bytes = 0

    def write(self, data: bytes) -> None:
        self.got_bytes += len(data)

    def is_closing(self) -> bool:
        return False

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...


async def chunk_us(reads: list[bytes]) -> float:
    """Microseconds of CPU for each read of a stream."""
    clock, timeouts, sink = PoolClock(), Timeouts(), Sink()
    downstream = TransportDownstream(
        cast("Connection", sink),
        asyncio.get_running_loop(),
        DateLine(time.time),
        method="POST",
        http_1_0=False,
        keep_alive=True,
        body_read=lambda: True,
    )
    exchange = Exchange(
        request_id="r",
        method=b"POST",
        path="/v1/chat/completions",
        target=b"/v1/chat/completions",
        dialect=Dialect.OPENAI,
        headers=(),
        body=b"{}",
        facts=Facts(model="tiny", stream=True),
        tenant="t",
        downstream=downstream,
        accepted_s=clock.now_s(),
    )
    relay = Relay(
        exchange,
        Reply(exchange, clock, timeouts),
        engine="e",
        clock=clock,
        timeouts=timeouts,
        strip_usage=False,
        on_first_token=lambda _ttft_s: None,
        on_gap=Spread(ITL.buckets).observe,
    )
    relay.attach(sink)
    feed = ReplyReader(relay).feed
    feed(HEAD)
    for read in reads[:WARM_CHUNKS]:
        feed(read)
    begun_s = time.thread_time()
    for read in reads[WARM_CHUNKS:]:
        feed(read)
    used_s = time.thread_time() - begun_s
    assert relay.output_tokens == len(reads)
    assert sink.got_bytes > sum(map(len, reads))
    return used_s / (len(reads) - WARM_CHUNKS) * 1e6


def main() -> None:
    reads = [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in map(vllm_chunk, range(CHUNKS))]
    with asyncio.Runner() as runner:
        print(f"{min(runner.run(chunk_us(reads)) for _ in range(ROUNDS)):.2f} µs of CPU a chunk")


if __name__ == "__main__":
    main()
