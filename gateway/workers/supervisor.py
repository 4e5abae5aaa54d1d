"""`headrace serve --workers N`: one process that serves nothing itself and keeps everything that outlives a worker.

    owns            the listening sockets, the admin listener, the private Valkey, the merged metrics
    keeps running   one decider and N workers (gateway.workers.crew)
    settles         what a process that died held in the queue, at once instead of when its session runs out

A worker that dies takes its own connections with it and nobody else's: connections that nobody has accepted yet wait in
the sockets' backlog, which is ours. The decider is a process of its own, so that neither a relay nor this supervisor
ever waits for a decision, and so that a fault in it costs a change of leadership and no stream.

    SIGTERM, Ctrl-C   drain all within drain_s, exit 0; a second one ends at once
    SIGHUP            read the settings again and replace every process, new ones first; settings that cannot be used,
                      or processes that do not come up with them, change nothing

Settings that belong to what this process owns stay as they were started: listeners, Redis, state directory, the number
of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.metadata import version

from gateway.addresses import AddressError, parse_listen
from gateway.admin.listener import cannot_listen, listen_admin, url_of
from gateway.app import Role, open_queue
from gateway.control.energy import tell_costs
from gateway.control.presence import BEAT_S, LEADER_VALID_S
from gateway.ingress.server import BACKLOG
from gateway.instruments import BUILD_INFO, LEADER, WORKER_RESTARTS, WORKER_UP
from gateway.logs import Log
from gateway.queue.base import Queue, QueueUnavailable, Session
from gateway.queue.embedded import EmbeddedValkey
from gateway.settings import Settings
from gateway.settings_file import SettingsError, describe
from gateway.stop_signals import finished_before, stop_signals
from gateway.telemetry import Telemetry
from gateway.workers.accepting import listening_sockets, new_board
from gateway.workers.channel import Report, Start
from gateway.workers.child import Child
from gateway.workers.crew import DIED, LEFT, RELOAD, Crew, CrewTimes
from gateway.workers.merge import GaugeValues, Measured, add_counts, merge_gauges
from policies.yaml_source import DocumentError

COMMAND = (sys.executable, "-m", "gateway.workers.worker")
DECIDER = "decider"
TELL_S = 0.3
"""What one frozen process costs a scrape."""
SETTLE_WITHIN_S = 5.0
"""After that the session of a process has run out by itself."""
SETTLE_AGAIN_S = 0.2
BELIEVED_S = LEADER_VALID_S - BEAT_S
"""A process that has told nothing for so long may have been replaced as the leader: its last renewal is at most a beat
older than its last word."""


class Supervisor:
    """See the module header; `run` is its whole life. Also what the admin listener asks (`Administered`)."""

    def __init__(
        self,
        settings: Settings,
        *,
        workers: int,
        log: Log,
        reread: Callable[[], Settings],
        command: Sequence[str] = COMMAND,
        times: CrewTimes | None = None,
        rng: random.Random | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """reread: the settings as they stand in file, environment and flags now. command starts one process."""
        self.public_url = self.admin_url = ""
        self._settings = settings
        self._log = log
        self._reread = reread
        self._command = command
        self._monotonic = monotonic
        self._rng = rng or random.Random()
        self._version = version("headrace")
        self._telemetry = Telemetry(version=self._version, longest_s=settings.timeouts.total_s)
        self._telemetry.on_refresh(self._refresh)
        self._board = new_board(2 * workers)
        self._sockets: list[socket.socket] = []
        self._valkey: EmbeddedValkey | None = None
        self._redis_url = ""
        self._queue: Queue | None = None
        self._stopping = False
        names = [DECIDER, *map(str, range(workers))]
        for name, reason in itertools.product(names, (DIED, LEFT, RELOAD)):
            self._telemetry.add(WORKER_RESTARTS, 0, name, reason)
        self._crew = Crew(
            names,
            self._child,
            rng=self._rng,
            log=log,
            on_ended=self._ended,
            on_replaced=self._replaced,
            times=times,
        )

    async def run(self) -> int:
        """Serve until told to stop: 0, or 1 where a second signal cut that short.

        Raises what an operator has to put right; ProcessRefused, in a group, when a process does not start.
        """
        async with AsyncExitStack() as stack:
            first, second = stack.enter_context(stop_signals())
            hangup = stack.enter_context(_event_on(signal.SIGHUP))
            self._log.info("starting", settings=describe(self._settings))
            await self._own(stack)
            async with asyncio.TaskGroup() as group:
                forever = [group.create_task(self._reload_on(hangup))]
                if self._valkey is not None:
                    forever.append(group.create_task(self._valkey.keep_running()))
                crew = group.create_task(self._crew.run())
                if await finished_before(first, self._crew.served()):
                    self._log.info("serving", public=self.public_url, admin=self.admin_url)
                    sys.stdout.write(f"serving on {self.public_url}, metrics on {self.admin_url}/metrics\n")
                    sys.stdout.flush()
                    await first.wait()
                begun_s = self._monotonic()
                finished = await self._drain(second)
                await crew
                for task in forever:
                    task.cancel()
        self._log.info("stopped", cut_short=not finished, took_s=round(self._monotonic() - begun_s, 3))
        return 0 if finished else 1

    async def _own(self, stack: AsyncExitStack) -> None:
        """Everything that outlives a process, in the order in which one needs the other."""
        stack.callback(os.close, self._board.fd)
        public = parse_listen(self._settings.listen)
        try:
            for sock in listening_sockets(public.host, public.port, backlog=BACKLOG):
                self._sockets.append(stack.enter_context(sock))
        except OSError as error:
            raise cannot_listen(error, "listen", public) from None
        self.public_url = url_of(self._sockets[0], public) + self._settings.mount_path
        self.admin_url = await listen_admin(
            stack,
            self,
            self._telemetry,
            self._settings.admin_listen,
            self._gather,
            metrics_listen=self._settings.metrics_listen,
        )
        url = self._settings.redis_url
        if url is None:
            self._valkey = EmbeddedValkey(self._settings.state_dir, log=self._log)
            await stack.enter_async_context(self._valkey)
            url = self._valkey.url
        self._redis_url = url
        self._queue = open_queue(url, pool=self._settings.pool, log=self._log, rng=self._rng)
        stack.push_async_callback(self._queue.close)
        if self._valkey is not None:
            await _begin_leadership(self._queue)

    async def _drain(self, second: asyncio.Event) -> bool:
        """End every process; True when each could finish what it ran, or had drain_s for it."""
        self._log.info("draining", at_most_s=self._settings.timeouts.drain_s)
        self._stopping = True
        for sock in self._sockets:
            sock.close()
        finished = await finished_before(second, self._crew.drain(self._settings.timeouts.drain_s))
        if not finished:
            await self._crew.hurry()
        return finished

    async def _reload_on(self, hangup: asyncio.Event) -> None:
        await self._crew.served()
        while True:
            await hangup.wait()
            hangup.clear()
            await self._reload()

    async def _reload(self) -> None:
        before = self._settings
        try:
            read = self._reread()
        except (SettingsError, AddressError, DocumentError) as error:
            self._log.error("settings refused, the running ones stay", reason=str(error))
            return
        ours = {name: getattr(before, name) for name in _OURS}
        changed = [name for name, value in ours.items() if getattr(read, name) != value]
        if changed:
            self._log.warning("settings that only a restart changes stay as they were", settings=changed)
        self._settings = replace(read, **ours)
        self._log.info("replacing every process", settings=describe(self._settings))
        if await self._crew.roll():
            self._log.info("every process replaced")
        else:
            self._settings = before

    # -- processes -------------------------------------------------------------------------------------------------

    def _child(self, name: str) -> Child:
        settings = replace(self._settings, redis_url=self._redis_url)
        if name == DECIDER:
            start = Start.of(settings, role=Role.DECIDER, name=name)
        else:
            start = Start.of(
                settings,
                role=Role.WORKER,
                name=name,
                public_fds=tuple(sock.fileno() for sock in self._sockets),
                board_fd=self._board.fd,
                place=min(set(range(self._board.places)) - self._places_taken()),
            )
        return Child(self._command, start, on_counts=self._counted, monotonic=self._monotonic, log=self._log)

    def _places_taken(self) -> set[int]:
        return {child.start.place for child in self._workers() if not child.leaving.is_set()}

    def _workers(self) -> list[Child]:
        return [child for child in self._crew.children if child.name != DECIDER]

    def _counted(self, report: Report) -> None:
        add_counts(self._telemetry, report.counts)

    def _replaced(self, name: str, reason: str) -> None:
        self._telemetry.add(WORKER_RESTARTS, 1, name, reason)

    async def _ended(self, child: Child) -> None:
        """Give back what a process that did not end well has left: its place, its works in the queue, its leadership."""
        place = child.start.place
        if child.name != DECIDER and place not in self._places_taken():
            self._board.close(place)
        session = Session(*child.report.session)
        if child.exit_code == 0 or not session.epoch:
            return
        until_s = self._monotonic() + SETTLE_WITHIN_S
        while not await self._settled(session, child.report.leads_epoch):
            if self._monotonic() > until_s:
                self._log.warning(
                    "session of a dead process runs out by itself", process=child.name, session=session.id
                )
                return
            await asyncio.sleep(SETTLE_AGAIN_S)

    async def _settled(self, session: Session, leads_epoch: int) -> bool:
        assert self._queue is not None
        try:
            if leads_epoch:
                await self._queue.resign(session.id, epoch=leads_epoch)
            over = await self._queue.end_session(session)
        except QueueUnavailable:
            return False
        self._log.info("session of a dead process ended", session=session.id, works=len(over.owner_gone))
        return True

    # -- what is told to operators ---------------------------------------------------------------------------------

    async def _gather(self) -> None:
        await self._crew.tell(TELL_S)

    def _refresh(self, telemetry: Telemetry) -> None:
        merge_gauges(
            telemetry, [Measured(_gauges(child), decides=child.name == DECIDER) for child in self._crew.children]
        )
        tell_costs(telemetry)
        telemetry.set(BUILD_INFO, 1, self._version)
        for place in self._crew.places[1:]:
            telemetry.set(WORKER_UP, int(_answers(place.child)), place.name)

    def unready(self) -> str:
        """See `gateway.admin.api.Administered`."""
        if self._stopping:
            return "draining"
        decider, *workers = (place.child for place in self._crew.places)
        serving = [child for child in workers if child is not None and _answers(child)]
        if not serving:
            return f"no worker serves: 0 of {len(workers)} answer"
        if decider is None or not _answers(decider):
            return "no process decides: the decider does not answer"
        if decider.report.unready:
            return decider.report.unready
        return min((child.report.unready for child in serving), key=bool)

    def status(self) -> Mapping[str, object]:
        """See `gateway.admin.api.Administered`: what the decider tells, and every worker."""
        decider = self._crew.places[0].child
        return {
            **({} if decider is None else _status(decider)),
            "public_url": self.public_url,
            "decider": None if decider is None else _process_status(decider),
            "workers": [_process_status(child) for child in sorted(self._workers(), key=lambda child: child.name)],
        }

    def policy(self) -> Mapping[str, object]:
        """See `gateway.admin.api.Administered`."""
        decider = self._crew.places[0].child
        return {} if decider is None else decider.report.policy

    def __repr__(self) -> str:
        return f"<Supervisor {self.public_url} {self._crew!r}>"


async def _begin_leadership(queue: Queue) -> None:
    """Leave a record of a leadership that was given up in a store that only we can reach.

    A decider that finds no record, or one whose maker just vanished, waits for leaders that the store may have forgotten.
    Here there are none.
    """
    with contextlib.suppress(QueueUnavailable):
        record = await queue.lead("supervisor", now_ms=await queue.time_ms(), valid_for_ms=1)
        await queue.resign("supervisor", epoch=record.epoch)


_OURS = ("listen", "admin_listen", "metrics_listen", "redis_url", "pool", "state_dir", "workers")
"""Settings of what the supervisor itself owns."""


def _answers(child: Child | None) -> bool:
    """It serves, and is not late with an answer."""
    return child is not None and child.up.is_set() and not child.ended.is_set() and child.silent_for_s() < TELL_S * 0.9


def _believed(child: Child) -> bool:
    """What it said last of leading is still to be believed: it reports a few times a second, frozen or lost it does not."""
    return child.unheard_s < BELIEVED_S


def _gauges(child: Child) -> GaugeValues:
    gauges = child.gauges
    if _believed(child) or LEADER.name not in gauges:
        return gauges
    return {**gauges, LEADER.name: dict.fromkeys(gauges[LEADER.name], 0.0)}


def _status(decider: Child) -> Mapping[str, object]:
    status = decider.report.status
    return status if _believed(decider) else {**status, "leads": False}


def _process_status(child: Child) -> dict[str, object]:
    state = "starting"
    if child.leaving.is_set():
        state = "leaving"
    elif child.up.is_set():
        state = "up" if _answers(child) else "silent"
    return {
        "name": child.name,
        "pid": child.pid,
        "state": state,
        "uptime_s": round(child.lived_s, 1),
        "in_flight": child.report.in_flight,
        "connections": child.report.connections,
        "unready": child.report.unready,
    }


@contextlib.contextmanager
def _event_on(number: signal.Signals) -> Iterator[asyncio.Event]:
    """An event that the signal sets while the context lasts."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        loop.remove_signal_handler(number)
