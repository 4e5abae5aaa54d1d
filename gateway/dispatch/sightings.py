"""What engines themselves say they run, against what the leader knows to run there: what is left for those out of contact.

A process that has fallen silent may be dead or cut off. If it is dead its engines' connections ended with it, and the engines
soon run that much less; if it is cut off its works run on. So each poll is compared with the attempts of the processes in
contact that were surely on the engine at that moment. What the engine counts beyond them is the most that the silent
ones can have there together (foreign traffic too, which only keeps more free than needed).

An attempt is sure when it began SURE_S before the engine was asked and did not end until SEEN_END_S after the answer was
read, by the clock of its process: on a busy machine an answer may lie unread for seconds. A process of which nothing was heard since the poll makes none of its attempts sure. An engine that tells less than
what is sure is not believed: its counters are late, or frozen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from backends.base import Sample, Signal

SURE_S = 0.5
SEEN_END_S = 0.1
KEPT_S = 5.0
LOOKS = 4


@dataclass(frozen=True, slots=True)
class _Past:
    """An attempt that has ended."""

    engine: str
    began_s: float
    ended_s: float


class Sightings:
    """See the module header. Its owner is the steward."""

    __slots__ = ("_looks", "_past")

    def __init__(self) -> None:
        self._past: deque[_Past] = deque()
        self._looks: dict[str, deque[tuple[float, int]]] = {}

    def ended(self, engine: str, began_s: float, ended_s: float) -> None:
        """An attempt of a process in contact has ended, in pool time."""
        self._past.append(_Past(engine, began_s, ended_s))
        self.forget_old(ended_s)  # a process that does not lead looks at nothing

    def look(
        self, engine: str, sample: Sample, *, asked_s: float, taken_s: float, running: Callable[[float], int]
    ) -> None:
        """Take in a poll, again and again for as long as it is the newest: more becomes sure about it.

        asked_s, taken_s   before it was asked for and when its answer was read, in pool time
        running            attempts that run by now and began before a time, of processes heard since the answer was read
        """
        decoding, waiting = sample.value(Signal.RUNNING), sample.value(Signal.WAITING)
        if decoding is None or waiting is None:
            return
        sure_s = asked_s - SURE_S
        sure = running(sure_s) + sum(
            one.engine == engine and one.began_s <= sure_s and one.ended_s >= taken_s + SEEN_END_S for one in self._past
        )
        beyond = int(decoding + waiting) - sure
        looks = self._looks.setdefault(engine, deque(maxlen=LOOKS))
        if looks and looks[-1][0] == asked_s:
            looks.pop()
        if beyond >= 0:
            looks.append((asked_s, beyond))

    def at_most(self, engine: str, since_s: float) -> int | None:
        """The most that silent processes can have on an engine, by polls asked for since then; None: it cannot be told."""
        return min((beyond for asked_s, beyond in self._looks.get(engine, ()) if asked_s >= since_s), default=None)

    def forget_old(self, now_s: float) -> None:
        while self._past and self._past[0].ended_s < now_s - KEPT_S:
            self._past.popleft()

    def forget_all(self) -> None:
        """This process leads no more, or anew."""
        self._past.clear()
        self._looks.clear()

    def __repr__(self) -> str:
        return f"<Sightings {' '.join(f'{name}={looks[-1][1]}' for name, looks in self._looks.items() if looks)}>"
