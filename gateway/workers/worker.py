"""One process under the supervisor: `python -m gateway.workers.worker`, spoken to through its standard input.

It is a whole `Gateway` in one of two roles. A worker accepts connections off the supervisor's sockets and relays; the
decider polls engines and dispatches for all workers, so that no relay waits for a decision on the same loop.

    SIGTERM, or RETIRE     accept no connection, answer for RETIRE_S what comes on those there are, then as on DRAIN
    DRAIN                  take nothing new, finish what runs within drain_s, exit 0
    SIGTERM twice, HURRY   end at once
    the channel's end      the supervisor is gone: end at once, since nobody would restart or merge us

It reports every PUSH_S (PUSH_MAX_S where there are very many series) what it counted since, and once more after its
last work, so that kill -9 loses at most the counts of half a second and any other end loses none.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from gateway.app import Gateway, Role
from gateway.cli import exit_code
from gateway.logs import Log, open_logs
from gateway.settings import Settings
from gateway.stop_signals import finished_before, stop_signals
from gateway.with_parent import end_with_parent
from gateway.workers.accepting import Acceptor, Board
from gateway.workers.channel import CHANNEL_FD, Channel, Do, Order, Report, Start
from gateway.workers.merge import Teller

PUSH_S, PUSH_MAX_S = 0.1, 0.5
PUSH_PAUSES = 50
"""The pause after a report is at least this many times as long as the report took: a fiftieth of the loop is for it."""
RETIRE_S = 2.0
"""For clients that keep their connections to use them once more, and to be told by the answer that it was the last."""


def main() -> int:
    """Run until drained; see the module header. 1: something was cut short, 2: it cannot start, told on stderr."""
    _die_with_parent()
    return exit_code(_run)


def _run() -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(socket.socket(fileno=CHANNEL_FD)))


def _die_with_parent() -> None:
    """The channel's end tells a loop that turns; one that does not would keep the port. A parent that died before this
    is told by the channel alone."""
    end_with_parent(signal.SIGKILL)


async def _serve(end: socket.socket) -> int:
    channel = await Channel.on(end)
    start = await channel.receive(Start)
    if start is None:
        return 1
    settings = start.read_settings()
    with _logging(settings) as log:
        return await Process(start, settings, channel, log.bind(process=start.name)).run()


@contextmanager
def _logging(settings: Settings) -> Iterator[Log]:
    logs = open_logs(log_format=settings.log_format, log_level=settings.log_level)
    logs.adopt_stdlib()
    try:
        yield logs.log
    finally:
        logs.close()


class Process:
    """See the module header."""

    def __init__(self, start: Start, settings: Settings, channel: Channel, log: Log) -> None:
        self._start = start
        self._channel = channel
        self._log = log
        self._gateway = Gateway(settings, log=log, role=start.role)
        self._acceptor: Acceptor | None = None
        self._accepts = start.role is Role.WORKER
        self._drain = asyncio.Event()
        self._up = self._leaving = False

    async def run(self) -> int:
        """0 when all that ran has ended."""
        with stop_signals() as (first, second):
            async with self._gateway:
                self._teller = Teller(self._gateway.telemetry)
                async with asyncio.TaskGroup() as group:
                    obeying = group.create_task(self._obey(first, second))
                    pushing = group.create_task(self._push())
                    await finished_before(first, self._accept() if self._accepts else self._stand_by())
                    self._leaving = True
                    self._report()
                    if self._accepts:
                        self._gateway.ingress.retire()
                        await finished_before(self._drain, finished_before(second, asyncio.sleep(RETIRE_S)))
                    finished = await finished_before(second, self._gateway.drain())
                    pushing.cancel()
                    obeying.cancel()
            self._report()  # what was cut while the gateway closed has been counted, too
            await self._channel.drained()
        return 0 if finished else 1

    # -- what it is for --------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        """Take connections until cancelled. Our copies of the sockets are closed then; the others' go on."""
        ingress = self._gateway.ingress
        with contextlib.ExitStack() as stack:
            self._acceptor = Acceptor(
                [stack.enter_context(socket.socket(fileno=fd)) for fd in self._start.public_fds],
                ingress.new_connection,
                board=Board(self._start.board_fd),
                place=self._start.place,
                open_connections=lambda: ingress.open_connections,
                log=self._log,
            )
            self._up = True
            self._report()
            await self._acceptor.run()

    async def _stand_by(self) -> None:
        """Say that we are up, now that the engines were heard, so that workers find their state; decide until cancelled."""
        self._up = True
        self._report()
        await asyncio.Event().wait()

    # -- the supervisor --------------------------------------------------------------------------------------------

    async def _obey(self, first: asyncio.Event, second: asyncio.Event) -> None:
        while (order := await self._channel.receive(Order)) is not None:
            if order.do is Do.TELL:
                self._report(answers=order.seq)
                continue
            first.set()
            if order.do is not Do.RETIRE:
                self._drain.set()
            if order.do is Do.HURRY:
                second.set()
        for event in (first, self._drain, second):
            event.set()

    async def _push(self) -> None:
        loop, pause_s = asyncio.get_running_loop(), PUSH_S
        while True:
            await asyncio.sleep(pause_s)
            began_s = loop.time()
            self._report()
            pause_s = min(PUSH_MAX_S, max(PUSH_S, PUSH_PAUSES * (loop.time() - began_s)))
            await self._channel.drained()

    def _report(self, *, answers: int = 0) -> None:
        gateway = self._gateway
        if self._acceptor is not None and not self._leaving:
            self._acceptor.refresh()
        session = gateway.presence.session
        self._channel.send(
            Report(
                answers=answers,
                up=self._up,
                leaving=self._leaving,
                session=(session.id, session.epoch),
                leads_epoch=gateway.presence.epoch,
                in_flight=gateway.ingress.in_flight,
                connections=gateway.ingress.open_connections,
                counts=self._teller.counts(),
                gauges=self._teller.gauges() if answers else {},
                unready=gateway.overview.unready() if answers else "",
                status=gateway.overview.status() if answers and not self._accepts else {},
                policy=gateway.overview.policy() if answers and not self._accepts else {},
            )
        )


if __name__ == "__main__":
    sys.exit(main())
