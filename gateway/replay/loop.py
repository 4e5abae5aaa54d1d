"""An asyncio loop in virtual time: time moves only when nothing is ready, then straight to the next timer.

`VirtualTime` is what every such loop has in common: the clock, the timers, tasks that hash by number. It stands on
asyncio's own base loop, so that futures, tasks, locks and time-outs are the running Python version's. `VirtualLoop` is
the loop of a replay: no sockets, no threads, nothing but timers. The simulation of the whole gateway in `tests` puts a
network in memory under the same time.

Determinism. Timers due at one instant run in the order in which they were set, or in an order drawn from `rng`; tasks
hash by number and not by address, so that sets of them are walked in one order in every process; executor calls run
inline; another thread is refused. What stays outside: code that reads a real clock or real randomness.

A run fails with `Deadlock` when every task waits and nothing is due, and with `Unhandled` when an exception reached the
loop that asyncio would merely have logged.
"""

from __future__ import annotations

import asyncio
import random
import threading
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple

from gateway.replay.agenda import NS, Agenda, after_ns, instant_ns

COMPACT_ABOVE_TIMERS = 100

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


class Deadlock(RuntimeError):
    """Every task waits, no timer is pending and nothing is on the wire: time can never move again."""


class Unhandled(RuntimeError):
    """An exception that nobody awaited: raised by a callback, or left in a task or future that was dropped."""


class NumberedTask(asyncio.Task[Any]):
    """A task that hashes by its number."""

    def __init__(self, coro: Any, *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualTime(base_events.BaseEventLoop):
    """See the module header. A loop adds `_run_once`, and may keep `now_ns` elsewhere.

    now_ns   nanoseconds since the start
    """

    now_ns: int = 0
    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self, rng: random.Random | None, *base_args: Any) -> None:
        """rng draws the order of timers due at one instant; None: as they were set. base_args: the base loop's."""
        self._timers: Agenda[asyncio.TimerHandle] = Agenda(rng)
        self._cancelled_timers = 0
        self._unhandled: list[dict[str, Any]] = []
        self._task_count = 0
        self._thread = threading.get_ident()
        super().__init__(*base_args)

    # -- time ---------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now_ns / NS

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Args], object],
        *args: *Args,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._call_at_ns(self.now_ns + after_ns(delay), callback, args, context)

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

    def _next_timer_ns(self) -> int | None:
        """When the earliest timer is due that was not cancelled; None without one."""
        while (due_ns := self._timers.next_ns) is not None:
            if not self._timers.peek().cancelled():
                return due_ns
            self._timers.take()
            self._cancelled_timers -= 1
        return None

    def _move_due_timers(self) -> None:
        while (due_ns := self._next_timer_ns()) is not None and due_ns <= self.now_ns:
            timer = self._timers.take()
            timer._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(timer)

    def _compact_timers(self) -> None:
        """Drop cancelled timers once they are the larger part; constant cost each, as in asyncio."""
        if self._cancelled_timers > COMPACT_ABOVE_TIMERS and self._cancelled_timers * 2 > len(self._timers):
            self._timers.keep([entry for entry in self._timers.entries if not entry[3].cancelled()])
            self._cancelled_timers = 0

    def _deadlock(self) -> Deadlock:
        return Deadlock(f"at {self.time():.6f} s every task waits and nothing is due:\n{self._describe_tasks()}")

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

    # -- tasks and threads --------------------------------------------------------------------------------------------

    def create_task(self, coro: Any, *, name: Any = None, **options: Any) -> asyncio.Task[Any]:
        self._task_count += 1
        return NumberedTask(
            coro, number=self._task_count, loop=self, name=name or f"Task-{self._task_count}", **options
        )

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
        del executor
        future = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_soon(_fail_unless_done, future, error)
        else:
            self.call_soon(_finish_unless_done, future, result)
        return future

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken."""


class VirtualLoop(VirtualTime):
    """The loop of a replay: timers and callbacks, in the order in which they were set."""

    def __init__(self) -> None:
        super().__init__(None)

    def _run_once(self) -> None:
        """One turn: move time if nothing is ready, then run what is ready now."""
        self._compact_timers()
        ready = self._ready
        if not ready and not self._stopping:
            due_ns = self._next_timer_ns()
            if due_ns is None:
                raise self._deadlock()
            self.now_ns = max(self.now_ns, due_ns)
        self._move_due_timers()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
        if self._unhandled:
            self.raise_unhandled()

    def __repr__(self) -> str:
        return f"<VirtualLoop t={self.time():.6f}s timers={len(self._timers)}>"


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a fresh `VirtualLoop` to its end, cancel what it left behind, fail on what nobody handled."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        result = runner.run(main)
        loop.raise_unhandled()
    return result


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
