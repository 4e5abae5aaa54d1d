"""An asyncio loop in virtual time, seeded: the same seed is the same run, and an hour costs only its callbacks.

`SimLoop` is asyncio's own selector loop on a `Network` that lives in memory: transports, servers, streams, happy
eyeballs and TLS are asyncio's code of the running Python version, and only sockets, name resolution and time are
replaced. It owns no file descriptor.

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
import threading
from asyncio import base_events, selector_events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

from tests.simulation.agenda import NS, Agenda, Trace, after_ns, instant_ns
from tests.simulation.net import Network
from tests.simulation.poller import Poller

LIVELOCK_CALLBACKS = 1_000_000
COLLECT_EVERY_CALLBACKS = 100_000
COMPACT_ABOVE_TIMERS = 100

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


class Deadlock(RuntimeError):
    """Every task waits, no timer is pending and nothing is on the wire: time can never move again."""


class Livelock(RuntimeError):
    """Callbacks go on running at one instant of virtual time."""


class Unhandled(RuntimeError):
    """An exception that nobody awaited: raised by a callback, or left in a task or future that was dropped."""


class SimTask(asyncio.Task[Any]):
    """A task that hashes by its number."""

    def __init__(self, coro: Any, *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class SimLoop(selector_events.BaseSelectorEventLoop):
    """See the module header.

    rng            seeded; the world draws its own generators from it before the run starts
    network        the one network of this loop
    trace          hash of everything that happened
    after_event    called after each callback: the place for invariants; what it raises ends the run
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _process_events: Callable[[Any], None]

    def __init__(self, seed: int, *, permute: bool = True) -> None:
        self.seed = seed
        self.rng = random.Random(f"world {seed}")
        self.trace = Trace()
        self.network = Network(random.Random(f"network {seed}"), trace=self.trace)
        self.callbacks = 0
        self.after_event: Callable[[], None] | None = None
        self._poller = Poller(self.network)
        self._timers: Agenda[asyncio.TimerHandle] = Agenda(random.Random(f"timers {seed}") if permute else None)
        self._cancelled_timers = 0
        self._callbacks_at_instant = 0
        self._unhandled: list[dict[str, Any]] = []
        self._signals: dict[int, Callable[[], object]] = {}
        self._task_count = 0
        self._thread = threading.get_ident()
        super().__init__(self._poller)

    # -- time ---------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.network.now_ns / NS

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._call_at_ns(self.network.now_ns + after_ns(delay), callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._call_at_ns(instant_ns(when), callback, args, context)

    def _call_at_ns(
        self, due_ns: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        timer = asyncio.TimerHandle(due_ns / NS, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]  # makes cancel() report to the loop
        self._timers.add(due_ns, timer)
        return timer

    def _timer_handle_cancelled(self, _handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1

    def _run_once(self) -> None:
        """One turn: wait if nothing is ready, then run what is ready now, each callback followed by the checks."""
        self._compact_timers()
        self._process_events(self._wait())
        self._move_due_timers()
        self.trace.note(self.network.now_ns, len(self._ready))
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
                self._after_callback()

    def _wait(self) -> Any:
        """Let time pass until something is ready; what the poller reported."""
        while True:
            self.network.deliver()
            events = self._poller.select()
            if events or self._ready or self._stopping or self._timer_is_due():
                return events
            self._advance()

    def _advance(self) -> None:
        instants = [ns for ns in (self._timers.next_ns, self.network.next_ns) if ns is not None]
        if not instants:
            raise Deadlock(f"at {self.time():.6f} s every task waits and nothing is due:\n{self._describe_tasks()}")
        self.network.now_ns = min(instants)
        self._callbacks_at_instant = 0

    def _timer_is_due(self) -> bool:
        while (due_ns := self._timers.next_ns) is not None:
            if not self._timers.peek().cancelled():
                return due_ns <= self.network.now_ns
            self._timers.take()
            self._cancelled_timers -= 1
        return False

    def _move_due_timers(self) -> None:
        while self._timer_is_due():
            timer = self._timers.take()
            timer._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(timer)

    def _compact_timers(self) -> None:
        """Drop cancelled timers once they are the larger part; constant cost each, as in asyncio."""
        if self._cancelled_timers > COMPACT_ABOVE_TIMERS and self._cancelled_timers * 2 > len(self._timers):
            self._timers.keep([entry for entry in self._timers.entries if not entry[3].cancelled()])
            self._cancelled_timers = 0

    def _after_callback(self) -> None:
        self.callbacks += 1
        self._callbacks_at_instant += 1
        if self._callbacks_at_instant > LIVELOCK_CALLBACKS:
            raise Livelock(
                f"{LIVELOCK_CALLBACKS} callbacks at {self.time():.6f} s without time moving:\n{self._describe_tasks()}"
            )
        if self.after_event is not None:
            self.after_event()
        if self.callbacks % COLLECT_EVERY_CALLBACKS == 0:
            gc.collect()
        self.raise_unhandled()

    # -- failures -----------------------------------------------------------------------------------------------------

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep it: raising here would be lost where the caller is a finalizer."""
        self._unhandled.append(context)

    def raise_unhandled(self) -> None:
        """Raise Unhandled for what reached the loop since the last call."""
        if self._unhandled:
            contexts, self._unhandled = self._unhandled, []
            told = "; ".join(f"{context['message']}: {context.get('exception')!r}" for context in contexts)
            raise Unhandled(f"at {self.time():.6f} s {told}") from contexts[0].get("exception")

    def _describe_tasks(self) -> str:
        waiting = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        return "\n".join(f"  {task.get_name()}: {_where(task)}" for task in waiting) or "  (no task)"

    # -- tasks, threads, signals --------------------------------------------------------------------------------------

    def create_task(self, coro: Any, *, name: Any = None, **options: Any) -> asyncio.Task[Any]:
        self._task_count += 1
        return SimTask(coro, number=self._task_count, loop=self, name=name or f"Task-{self._task_count}", **options)

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"call from thread {threading.current_thread().name}: a simulation has one thread")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Args], Result], *args: *Args
    ) -> asyncio.Future[Result]:
        """Run it now, in no time; the future is done in the next turn, so that callers always suspend."""
        future = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_soon(_fail_unless_done, future, error)
        else:
            self.call_soon(_finish_unless_done, future, result)
        return future

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

    # -- no descriptors -----------------------------------------------------------------------------------------------

    def _make_self_pipe(self) -> None:
        """Nothing wakes this loop from outside."""

    def _close_self_pipe(self) -> None:
        self._timers.clear()

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken."""

    def __repr__(self) -> str:
        return f"<SimLoop seed={self.seed} t={self.time():.6f}s callbacks={self.callbacks} timers={len(self._timers)}>"


def run(main: Callable[[SimLoop], Coroutine[Any, Any, Result]], *, seed: int, permute: bool = True) -> Result:
    """Run `main(loop)` on a fresh loop to its end, cancel what it left behind, and fail on what nobody handled."""
    with _steady_garbage(), asyncio.Runner(loop_factory=lambda: SimLoop(seed, permute=permute)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimLoop)
        result = runner.run(main(loop))
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


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost place at which a task waits."""
    coro: Any = task.get_coro()
    frame: FrameType | None = None
    place = repr(coro)
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "ag_frame", None) or getattr(coro, "gi_frame", None)
        if frame is not None:
            place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        coro = getattr(coro, "cr_await", None) or getattr(coro, "ag_await", None) or getattr(coro, "gi_yieldfrom", None)
    return place


def _finish_unless_done(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail_unless_done(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
