"""What polling costs the loop: 50 engines at 2 Hz with vLLM's whole page, served by another process.

    python tests/benchmarks/bench_polling.py [ENGINES] [SECONDS]

Prints the share of a core that this process used while it did nothing but poll, and the longest that a timer of 5 ms was late,
beside the same without polling.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from backends.base import Backend, EngineAddress
from backends.connection import EnginePool
from backends.detect import make_backend
from gateway.clock import PoolClock
from gateway.control.poller import Poller
from gateway.control.roster import Engine, Roster
from gateway.dispatch.ledger import EngineLedger
from gateway.settings import EngineSettings

DATA = Path(__file__).parents[1] / "data" / "engines"
HZ = 2.0


def serve(told: Connection) -> None:
    """One socket for all engines."""
    pages = {
        b"/metrics": (DATA / "vllm_metrics.txt").read_bytes(),
        b"/v1/models": (DATA / "vllm_models.json").read_bytes(),
        b"/health": b"",
        b"/version": b'{"version":"0.32.0"}',
    }

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                page = pages.get(head.split(b" ", 2)[1])
                status = b"404 Not Found" if page is None else b"200 OK"
                body = page or b""
                writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    uvloop.run(run())


async def lateness(for_s: float) -> tuple[float, float]:
    """(CPU share, longest lateness in ms) of this process meanwhile."""
    began_s, cpu_s, worst_s = time.monotonic(), time.process_time(), 0.0
    while time.monotonic() - began_s < for_s:
        due_s = time.monotonic() + 0.005
        await asyncio.sleep(0.005)
        worst_s = max(worst_s, time.monotonic() - due_s)
    return (time.process_time() - cpu_s) / (time.monotonic() - began_s), worst_s * 1000


async def measure(port: int, engines: int, for_s: float) -> None:
    clock = PoolClock()
    roster = Roster(
        Engine(EngineSettings(f"e{number}", f"http://127.0.0.1:{port}"), EngineLedger(), 1 / HZ)
        for number in range(engines)
    )

    async def open_backend(engine: Engine) -> Backend:
        address = EngineAddress(engine.name, engine.settings.url)
        return make_backend("vllm", address, EnginePool(address), monotonic=clock.now_s)

    polled = 0

    def heard(_engine: Engine) -> None:
        nonlocal polled
        polled += 1

    poller = Poller(
        roster,
        open_backend,
        clock=clock,
        poll_s=1 / HZ,
        rng=random.Random(1),
        active=lambda: True,
        on_heard=heard,
    )
    idle = await lateness(for_s / 2)
    polling = asyncio.ensure_future(poller.run())
    await asyncio.sleep(2.0)
    polled = 0
    busy = await lateness(for_s)
    polling.cancel()
    print(f"idle      {idle[0]:6.1%} of a core, a timer late by {idle[1]:5.1f} ms at most")
    print(
        f"polling   {busy[0]:6.1%} of a core, a timer late by {busy[1]:5.1f} ms at most, {polled / for_s:.0f} polls/s"
    )
    print(f"one poll  {(busy[0] - idle[0]) * for_s / max(1, polled) * 1e6:6.0f} us")


def main() -> None:
    engines, for_s = int((sys.argv[1:] or ["50"])[0]), float((sys.argv[2:] or ["10"])[0])
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        uvloop.run(measure(ours.recv(), engines, for_s))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
