"""An asyncio loop in virtual time with a network: the same seed is the same run, and an hour costs only its callbacks.

Time, timers and tasks are those of a replay (`gateway.replay.loop`); here they get a network. `SimLoop` is asyncio's own
selector loop on a `Network` that lives in memory: transports, servers, streams, happy eyeballs and TLS are asyncio's
code of the running Python version, and only sockets, name resolution and time are replaced. It owns no file descriptor.

Order. The seed permutes what asyncio leaves open (timers due at one instant, readiness of several sockets in one turn,
arrivals at one instant) and nothing else. Callbacks of `call_soon` keep their order, which is documented and which
libraries build on. `permute=False` makes ties FIFO, to see whether a failure hangs on their order.

Determinism. Tasks hash by number, not by address, so that sets of them (TaskGroup, `asyncio.wait`, `all_tasks`) are
walked in the same order in every process; garbage is collected at fixed callback counts, since finalizers act; executor
calls run inline; another thread is refused. What stays outside: code that reads a real clock or real randomness.

A run fails with `Deadlock` when every task waits and nothing is due, with `Livelock` when time stands still while
callbacks run, and with `Unhandled` when an exception reached the loop that asyncio would merely have logged.
"""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import ssl
from asyncio import base_events, selector_events
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple

from gateway.replay.agenda import NS
from gateway.replay.loop import VirtualTime
from tests.simulation.net import Network
from tests.simulation.poller import Poller
from tests.simulation.trace import Trace

LIVELOCK_CALLBACKS = 100_000
COLLECT_EVERY_CALLBACKS = 100_000

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


class Livelock(RuntimeError):
    """Callbacks go on running at one instant of virtual time."""


class SimLoop(VirtualTime, selector_events.BaseSelectorEventLoop):
    """See the module header.

    rng            seeded; the world draws its own generators from it before the run starts
    network        the one network of this loop
    trace          hash of everything that happened
    over           the run has failed: what is left is only tidied up, whatever it says
    after_event    called after each callback with the host that it ran on: the place for invariants; what it raises
                   ends the run
    """

    _process_events: Callable[[Any], None]

    def __init__(self, seed: int, *, permute: bool = True) -> None:
        self.seed = seed
        self.rng = random.Random(f"world {seed}")
        self.trace = Trace()
        self.network = Network(random.Random(f"network {seed}"), trace=self.trace)
        self.callbacks = 0
        self.after_event: Callable[[str], None] | None = None
        self.over = False
        self._poller = Poller(self.network)
        self._held_back: dict[str, list[asyncio.Handle]] = {}
        self._callbacks_at_instant = 0
        self._signals: dict[int, Callable[[], object]] = {}
        super().__init__(random.Random(f"timers {seed}") if permute else None, self._poller)

    @property
    def now_ns(self) -> int:
        """The network's clock is the loop's."""
        return self.network.now_ns

    @now_ns.setter
    def now_ns(self, now_ns: int) -> None:
        self.network.now_ns = now_ns

    def time(self) -> float:
        return self.network.now_ns / NS

    def _run_once(self) -> None:
        """One turn: wait if nothing is ready, then run what is ready now, each callback followed by the checks."""
        self._compact_timers()
        if self._held_back:
            self._let_thawed_go_on()
        self._process_events(self._wait())
        self._move_due_timers()
        self.trace.turn(self.network.now_ns, len(self._ready))
        ready, network = self._ready, self.network
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled and not (network.frozen and self._holds_back(handle)):
                handle._run()
                self._after_callback(handle)

    def _holds_back(self, handle: asyncio.Handle) -> bool:
        """A process that is stopped runs nothing; its timers become due all the same and fire once it goes on."""
        host = self.network.stopped(handle._context)  # type: ignore[attr-defined]
        if host is not None:
            self._held_back.setdefault(host, []).append(handle)
        return host is not None

    def _let_thawed_go_on(self) -> None:
        for host in [host for host in self._held_back if host not in self.network.frozen]:
            self._ready.extend(self._held_back.pop(host))

    def _wait(self) -> Any:
        """Let time pass until something is ready; what the poller reported."""
        while True:
            self.network.deliver()
            events = self._poller.select() if self.network.touched else []
            if events or self._ready or self._stopping:
                return events
            timer_ns = self._next_timer_ns()
            if timer_ns is not None and timer_ns <= self.network.now_ns:
                return events
            self._advance(timer_ns)

    def _advance(self, timer_ns: int | None) -> None:
        instants = [ns for ns in (timer_ns, self.network.next_ns) if ns is not None]
        if not instants:
            raise self._deadlock()
        self.network.now_ns = min(instants)
        self._callbacks_at_instant = 0

    def _after_callback(self, handle: asyncio.Handle) -> None:
        self.callbacks += 1
        self._callbacks_at_instant += 1
        if self._callbacks_at_instant > LIVELOCK_CALLBACKS:
            raise Livelock(
                f"{LIVELOCK_CALLBACKS} callbacks at {self.time():.6f} s without time moving:\n{self._describe_tasks()}"
            )
        if (check := self.after_event) is not None:
            self.after_event = None  # what it raises ends the run, and what is left is only tidied up
            check(self.network.host_of(handle._context))  # type: ignore[attr-defined]
            self.after_event = check
        if self.callbacks % COLLECT_EVERY_CALLBACKS == 0:
            gc.collect()
        if self._unhandled and not self.over:
            self.raise_unhandled()

    # -- signals ---------------------------------------------------------------------------------------------------------

    def add_signal_handler(self, sig: int, callback: Callable[[*Args], object], *args: *Args) -> None:
        """Remember it for `send_signal`; the process's real signals are not touched."""
        self._signals[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self._signals.pop(sig, None) is not None

    def send_signal(self, sig: signal.Signals) -> None:
        """Deliver a signal to whoever added a handler. Raises KeyError when nobody did."""
        self.call_soon(self._signals[sig])

    # -- network ------------------------------------------------------------------------------------------------------

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[tuple[Any, Any, int, str, Any]]:
        await asyncio.sleep(0)
        return self.network.resolve(host, int(port or 0), family)

    async def _connect_sock(
        self, exceptions: list[list[OSError]], addr_info: Sequence[Any], local_addr_infos: Any = None
    ) -> Any:
        """As asyncio's, which makes a real socket here; everything else of create_connection is asyncio's own."""
        errors: list[OSError] = []
        exceptions.append(errors)
        sock: Any = self.network.socket(addr_info[0])
        try:
            await self.sock_connect(sock, addr_info[4])
        except OSError as error:
            errors.append(error)
            sock.close()
            raise
        except BaseException:
            sock.close()
            raise
        return sock

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.BaseProtocol],
        host: str | Sequence[str] | None = None,
        port: int | None = None,
        *,
        family: int = 0,
        sock: Any = None,
        backlog: int = 100,
        ssl: ssl.SSLContext | None = None,
        start_serving: bool = True,
        **_options: Any,
    ) -> base_events.Server:
        """As asyncio's, on virtual sockets. Options of the kernel (reuse_port, keep_alive, flags) mean nothing here."""
        if sock is None:
            names = [host] if host is None or isinstance(host, str) else host
            sockets = [self._bound(info) for name in names for info in self.network.resolve(name, port or 0, family)]
        else:
            sockets = [sock]
        server = base_events.Server(self, sockets, protocol_factory, ssl, backlog, None)
        if start_serving:
            await server.start_serving()
        return server

    def _bound(self, info: Sequence[Any]) -> Any:
        sock: Any = self.network.socket(info[0])
        try:
            sock.bind(info[4])
        except OSError:
            sock.close()
            raise
        return sock

    def drop_connections(self) -> None:
        """Close all that are open: what a failed run leaves would be told as a leak of the test that runs by then."""
        for transport in list(self._transports.values()):  # type: ignore[attr-defined]
            transport.abort()

    # -- no descriptors -----------------------------------------------------------------------------------------------

    def _make_self_pipe(self) -> None:
        """Nothing wakes this loop from outside."""

    def _close_self_pipe(self) -> None:
        self._timers.clear()

    def __repr__(self) -> str:
        return f"<SimLoop seed={self.seed} t={self.time():.6f}s callbacks={self.callbacks} timers={len(self._timers)}>"


def run(main: Callable[[SimLoop], Coroutine[Any, Any, Result]], *, seed: int, permute: bool = True) -> Result:
    """Run `main(loop)` on a fresh loop to its end, cancel what it left behind, and fail on what nobody handled."""
    with _steady_garbage(), asyncio.Runner(loop_factory=lambda: SimLoop(seed, permute=permute)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimLoop)
        try:
            result = runner.run(main(loop))
        except BaseException:
            loop.over = True
            loop.drop_connections()
            raise
        finally:
            loop.network.thaw_all()  # what is stopped could not be cancelled
        gc.collect()
        loop.raise_unhandled()
    return result


@contextmanager
def _steady_garbage() -> Iterator[None]:
    """Collect only when the loop says so, and only what the run itself made."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
