"""CPU of the engine side's client: per call on a warm connection, and per streamed chunk.

    python -m tests.benchmarks.bench_connection [--uvloop] [--calls N] [--chunks N]

Client and scripted engine run in one process; the engine's share is measured by itself with a bare client that only
counts bytes, and subtracted, so that what is shown is what the client costs. Chunks are written one a loop turn, as an
engine does, so that each is a read of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import cast

import uvloop

from backends.base import CallFailure, EngineAddress, EngineRequest, Headers
from backends.connection import EnginePool

CHUNK = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" token","logprobs":null}]}\n\n'
FRAMED = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
HEAD = b"HTTP/1.1 200 OK\r\ndate: x\r\nserver: uvicorn\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SMALL = (
    b"HTTP/1.1 200 OK\r\ndate: x\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
)
REQUEST = EngineRequest(
    b"POST",
    b"/v1/completions",
    ((b"content-type", b"application/json"), (b"x-request-id", b"r-1"), (b"traceparent", b"00-1-2-01")),
    b'{"model":"m","prompt":"hello","stream":true,"max_tokens":100}',
)


class Engine(asyncio.Protocol):
    """Answers each read with a small reply, or with `chunks` chunks, one a loop turn."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self._left = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self._chunks:
            self._transport.write(SMALL)
            return
        self._transport.write(HEAD)
        self._left = self._chunks
        self._next()

    def _next(self) -> None:
        self._transport.write(FRAMED)
        self._left -= 1
        if self._left:
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._transport.write(b"0\r\n\r\n")


class Bare(asyncio.Protocol):
    """The least a client can do: write fixed bytes, look for the reply's end, count reads."""

    def __init__(self, rounds: int, end: bytes, done: asyncio.Future[None]) -> None:
        self._rounds, self._end, self._done = rounds, end, done
        self.reads = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(REQUEST.body)

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        if data.endswith(self._end):
            self._rounds -= 1
            if self._rounds:
                self._transport.write(REQUEST.body)
            else:
                self._done.set_result(None)


class Rounds:
    """A receiver that starts the next call at the end of each."""

    def __init__(self, pool: EnginePool, rounds: int, done: asyncio.Future[None]) -> None:
        self._pool, self._rounds, self._done = pool, rounds, done
        self.pieces = 0

    def on_head(self, status: int, headers: Headers) -> None:
        pass

    def on_body(self, data: bytes) -> None:
        self.pieces += 1

    def on_end(self) -> None:
        self._rounds -= 1
        if self._rounds:
            self._pool.call(REQUEST, self)
        else:
            self._done.set_result(None)

    def on_failure(self, failure: CallFailure) -> None:
        self._done.set_exception(RuntimeError(failure.detail))


async def _measure(rounds: int, chunks: int) -> tuple[float, float, int]:
    """CPU seconds of the bare client and of ours for the same work, and the body pieces told."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(chunks), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    done: asyncio.Future[None] = loop.create_future()
    began_s = time.process_time()
    transport, _ = await loop.create_connection(
        lambda: Bare(rounds, b"0\r\n\r\n" if chunks else b"{}", done), "127.0.0.1", port
    )
    await done
    bare_s = time.process_time() - began_s
    transport.close()

    pool = EnginePool(EngineAddress("e", f"http://127.0.0.1:{port}"))
    await pool.fetch(b"GET", b"/warm")
    done = loop.create_future()
    receiver = Rounds(pool, rounds, done)
    began_s = time.process_time()
    pool.call(REQUEST, receiver)
    await done
    ours_s = time.process_time() - began_s
    await pool.close()
    server.close()
    return bare_s, ours_s, receiver.pieces


async def _best(rounds: int, chunks: int, repeats: int = 5) -> tuple[float, float, int]:
    """The least of several measurements of each side: noise only ever adds."""
    measured = [await _measure(rounds, chunks) for _ in range(repeats)]
    return min(m[0] for m in measured), min(m[1] for m in measured), measured[0][2]


async def _main(calls: int, chunks: int) -> None:
    bare_s, ours_s, _ = await _best(calls, 0)
    print(
        f"call:  {(ours_s - bare_s) / calls * 1e6:6.2f} us added, {ours_s / calls * 1e6:6.2f} us with engine and loop"
    )
    bare_s, ours_s, pieces = await _best(20, chunks // 20)
    print(
        f"chunk: {(ours_s - bare_s) / pieces * 1e6:6.2f} us added, {ours_s / pieces * 1e6:6.2f} us with engine and loop"
    )


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--chunks", type=int, default=200_000)
    options = parser.parse_args()
    factory = uvloop.new_event_loop if options.uvloop else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_main(options.calls, options.chunks))


if __name__ == "__main__":
    main()
