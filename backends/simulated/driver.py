"""Lets the virtual engine run in a loop's time, and tells each listener of its tokens as steps end.

One timer for the engine, whatever the number of streams: it is set to the end of the step under way, and then every
listener with new tokens is called. When the loop is late, steps pile up and a listener gets several tokens at once, as
with the real engines. Only `loop.time`, `loop.call_at` and `loop.call_soon` are used, so a virtual loop does as well.

Engine time is loop time since the start, times `speed`. `freeze` stops it, as SIGSTOP of a real engine's core does: the
HTTP face goes on answering, the gauges stand still, and what is submitted is not seen by the engine until `thaw`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from backends.simulated.engine import Engine
from backends.simulated.sequence import EventKind, Sequence, SequenceState


class Listener(Protocol):
    """Follows one sequence. Called on the loop's thread, never from within `Driver.submit`; must not raise."""

    sequence: Sequence

    def on_step(self) -> None:
        """The sequence may have more tokens than at the last call."""
        ...

    def on_finished(self) -> None:
        """It has all its tokens; called once, after which nothing more comes."""
        ...


class Wake(Protocol):
    """A call to come."""

    def cancel(self) -> None:
        """Let it not come."""
        ...


class Loop(Protocol):
    """What a driver needs of an event loop."""

    def time(self) -> float:
        """Seconds."""
        ...

    def call_soon(self, callback: Callable[[], object], /) -> Wake:
        """Call this loop turn."""
        ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Wake:
        """Call at a time on the loop's clock."""
        ...


class Driver:
    """See the module header."""

    def __init__(self, engine: Engine, loop: Loop, *, speed: float = 1.0) -> None:
        if not speed > 0 or math.isinf(speed):
            raise ValueError(f"speed {speed}: must be > 0 and finite; 1 is real time")
        self.engine = engine
        self.speed = speed
        self._loop = loop
        self._origin_s = loop.time()
        self._frozen_s: float | None = None
        self._held: list[Sequence] = []
        self._listeners: dict[Sequence, Listener] = {}
        self._showing: dict[Sequence, Listener] = {}
        self._wake: Wake | None = None

    @property
    def now_s(self) -> float:
        """Engine time."""
        loop_s = self._loop.time() if self._frozen_s is None else self._frozen_s
        return (loop_s - self._origin_s) * self.speed

    @property
    def held(self) -> int:
        """Sequences submitted since `freeze`, which the engine has not seen."""
        return len(self._held)

    @property
    def frozen(self) -> bool:
        return self._frozen_s is not None

    def submit(self, listener: Listener) -> None:
        """Hand a sequence to the engine. Raises ValueError for one that could never run."""
        sequence = listener.sequence
        self.engine.scheduler.check(sequence)
        self._listeners[sequence] = listener
        if self.frozen:
            self._held.append(sequence)
            return
        self.engine.submit(sequence, self.now_s)
        self._ensure_awake()

    def abort(self, sequence: Sequence) -> None:
        """Give a sequence up; its listener hears nothing more. Idempotent, safe after the end."""
        if self._listeners.pop(sequence, None) is None:
            return
        self._showing.pop(sequence, None)
        if sequence in self._held:
            self._held.remove(sequence)
            sequence.state = SequenceState.ABORTED
        else:
            self.engine.abort(sequence, self.now_s)
            self._ensure_awake()

    def freeze(self) -> None:
        """Stop engine time. Idempotent."""
        if self._frozen_s is None:
            self._frozen_s = self._loop.time()
            self._cancel_wake()

    def thaw(self) -> None:
        """Let engine time go on from where it stopped. Idempotent."""
        if self._frozen_s is None:
            return
        self._origin_s += self._loop.time() - self._frozen_s
        self._frozen_s = None
        held, self._held = self._held, []
        now_s = self.now_s
        for sequence in held:
            self.engine.submit(sequence, now_s)
        self._ensure_awake()

    def close(self) -> None:
        """Cancel the timer and forget all listeners."""
        self._cancel_wake()
        self._listeners.clear()
        self._showing.clear()

    def _ensure_awake(self) -> None:
        """Have `_on_wake` called: at the end of the step under way if a timer says so already, else this loop turn."""
        if self._wake is None and not self.frozen and self.engine.busy:
            self._wake = self._loop.call_soon(self._on_wake)

    def _cancel_wake(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None

    def _on_wake(self) -> None:
        self._wake = None
        finished: list[Listener] = []
        for event in self.engine.advance(self.now_s):
            listener = self._listeners.get(event.sequence)
            if listener is None:
                continue
            if event.kind is EventKind.FIRST_TOKEN:
                self._showing[event.sequence] = listener
            elif event.kind is EventKind.FINISHED:
                finished.append(listener)
        for listener in finished:
            self._listeners.pop(listener.sequence, None)
            self._showing.pop(listener.sequence, None)
        self._sleep_until_step_end()
        for listener in self._showing.values():
            listener.on_step()
        for listener in finished:
            listener.on_finished()

    def _sleep_until_step_end(self) -> None:
        step_end_s = self.engine.next_step_s()
        if step_end_s < math.inf:
            self._wake = self._loop.call_at(self._origin_s + step_end_s / self.speed, self._on_wake)

    def __repr__(self) -> str:
        return f"<Driver speed={self.speed:g} listeners={len(self._listeners)} frozen={self.frozen} {self.engine!r}>"
