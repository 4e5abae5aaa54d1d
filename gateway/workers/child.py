"""One process under the supervisor, from its start to its end, as the supervisor sees it.

It is started with the channel as its standard input and in a session of its own, so that Ctrl-C at a terminal reaches
the supervisor alone, which drains before anything ends. Its end is known by two signs, the end of the channel and the
exit of the process; whichever comes first, the other is made to follow.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.logs import Log
from gateway.workers.channel import Channel, Do, Order, Report, Start
from gateway.workers.merge import GaugeValues, gauge_values

EXIT_S = 5.0
"""For the process to exit once it has closed the channel, or the channel to close once the process has gone."""


class Child:
    """See the module header; `run` is its whole life.

    up        it has said that it serves
    leaving   it takes nothing new any more: it said so, was told to, or has ended
    ended     the process is gone
    report    the last one, with status, policy and readiness as of the last answer
    gauges    as of the last answer; none once it has ended
    heard     how many reports came; heard_s: when the last one did
    """

    def __init__(
        self,
        command: Sequence[str],
        start: Start,
        *,
        on_counts: Callable[[Report], None],
        monotonic: Callable[[], float],
        log: Log,
    ) -> None:
        self.name = start.name
        self.start = start
        self.pid = 0
        self.exit_code: int | None = None
        self.up = asyncio.Event()
        self.leaving = asyncio.Event()
        self.ended = asyncio.Event()
        self.started_s = monotonic()
        self.report = Report()
        self.gauges: GaugeValues = {}
        self.heard = 0
        self.heard_s = monotonic()
        self._command = command
        self._on_counts = on_counts
        self._monotonic = monotonic
        self._log = log
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._order: Do | None = None
        self._told = 0
        self._told_s = 0.0
        self._answered = asyncio.Event()
        self._answered.set()

    @property
    def lived_s(self) -> float:
        """Seconds since its start."""
        return self._monotonic() - self.started_s

    @property
    def unheard_s(self) -> float:
        """For how long no report has come, asked for or not."""
        return self._monotonic() - self.heard_s

    def silent_for_s(self) -> float:
        """For how long a question has been waiting for its answer; 0 with none under way."""
        return 0.0 if self._answered.is_set() else self._monotonic() - self._told_s

    async def run(self) -> None:
        """Start it and hear it until it is gone. Cancelled: it is killed."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=theirs.fileno(),
                    pass_fds=[fd for fd in (*self.start.public_fds, self.start.board_fd) if fd >= 0],
                    start_new_session=True,
                )
            self.pid = self._process.pid
            self._channel = await Channel.on(ours)
            self._channel.send(self.start)
            if self._order is not None:
                self._channel.send(Order(self._order))
            await self._hear(self._channel)
            await self._exited()
        finally:
            if self._channel is None:
                ours.close()
            await self._gone()

    def retire(self) -> None:
        """Have it leave gently: others take over."""
        self._leave(Do.RETIRE)

    def drain(self) -> None:
        """Have it finish what runs and end."""
        self._leave(Do.DRAIN)

    def hurry(self) -> None:
        """Have it end at once."""
        self._leave(Do.HURRY)

    def kill(self) -> None:
        """End it without its help."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def tell(self) -> None:
        """Wait for a full report. One question is under way at a time, and all who wait share its answer."""
        if self._answered.is_set() and self._channel is not None and not self.ended.is_set():
            self._answered.clear()
            self._told += 1
            self._told_s = self._monotonic()
            self._channel.send(Order(Do.TELL, self._told))
        await self._answered.wait()

    def _leave(self, how: Do) -> None:
        self._order = how
        self.leaving.set()
        if self._channel is not None:
            self._channel.send(Order(how))

    async def _hear(self, channel: Channel) -> None:
        while (report := await channel.receive(Report)) is not None:
            self.heard += 1
            self.heard_s = self._monotonic()
            self._on_counts(report)
            if report.answers:
                self.gauges = gauge_values(report.gauges)
                self.report = replace(report, counts={}, gauges={})
                self._answered.set()
            else:
                last = self.report
                self.report = replace(report, counts={}, status=last.status, policy=last.policy, unready=last.unready)
            if report.up:
                self.up.set()
            if report.leaving:
                self.leaving.set()

    async def _exited(self) -> None:
        """The channel has ended: so must the process."""
        assert self._process is not None
        try:
            async with asyncio.timeout(EXIT_S):
                await self._process.wait()
        except TimeoutError:
            self._log.warning("process did not exit and is killed", process=self.name, pid=self.pid)

    async def _gone(self) -> None:
        if self._process is not None:
            self.kill()
            self.exit_code = await self._process.wait()
        if self._channel is not None:
            self._channel.close()
        self.gauges = {}
        self._answered.set()
        self.leaving.set()
        self.ended.set()

    def __repr__(self) -> str:
        state = (
            "ended"
            if self.ended.is_set()
            else "leaving"
            if self.leaving.is_set()
            else "up"
            if self.up.is_set()
            else "starting"
        )
        return f"<Child {self.name} pid={self.pid} {state}>"
