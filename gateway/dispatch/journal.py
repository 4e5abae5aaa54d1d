"""What this process tells the leader of its attempts one by one: beginnings, first tokens, growth, ends.

A leader sizes batches by what it learns from single works (how long answers get, how late first tokens are, whose tenant
was served), and most works run in other processes. So each process writes down what happens to its attempts and sends it
with its session's renewals, numbered, until a renewal is answered. A repeated renewal tells the same numbers again, and
the leader takes each once.

Whenever another leader is heard of, or the session is registered anew, all that runs is told from its beginning, so that
no leader needs a predecessor's memory of it. A process that leads tells nothing: its dispatcher sees its own attempts.

Bounds: EVENTS_KEPT while nobody answers, the oldest are dropped and counted; EVENTS_SENT with one renewal, the rest with
the next. What is dropped costs the leader what it would have learned, and no place: those are in the report's sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from gateway.dispatch.ledger import Entry, Ledger
from gateway.queue.base import Answered, Began, Ended, Grew, Told
from policies.vocabulary import Outcome, Work

EVENTS_KEPT = 8192
EVENTS_SENT = 2048
GROWTH_SENT = 4096
"""Attempts whose growth is told at once: those that began first."""
GROWTH_EVERY_MS = 400
"""Less than a beat, so that each beat tells it."""

Key = tuple[str, int]


class Journal:
    """See the module header. One writer: the process's dispatcher.

    dropped   events that nobody was told
    """

    __slots__ = ("_began", "_events", "_grew_ms", "_ledger", "_next", "_sent", "_told_to", "dropped")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._events: deque[Told] = deque()
        self._began: dict[Key, int] = {}
        self._next = 1
        self._sent = 0
        self._grew_ms = 0
        self._told_to = 0
        self.dropped = 0

    def began(self, work: Work, engine: str, attempt: int, now_ms: int) -> None:
        """An attempt was sent from here."""
        if self._told_to:
            self._began[work.id, attempt] = self._tell(now_ms, Began(work, engine, attempt))

    def first_token(self, work_id: str, attempt: int, engine_ttft_s: float, now_ms: int) -> None:
        began = self._began.get((work_id, attempt))
        if began is not None:
            self._tell(now_ms, Answered(began, engine_ttft_s))

    def ended(self, work_id: str, attempt: int, outcome: Outcome | None, now_ms: int) -> None:
        began = self._began.pop((work_id, attempt), None)
        if began is not None:
            self._tell(now_ms, Ended(began, outcome))

    def to_tell(self, epoch: int, now_ms: int) -> tuple[Told, ...]:
        """The events for a renewal that is about to be sent. epoch: of the leader in force; 0: this process leads."""
        if epoch != self._told_to:
            self._told_to = epoch
            self._tell_all()
        if epoch and self._began and now_ms - self._grew_ms >= GROWTH_EVERY_MS:
            self._grew_ms = now_ms
            self._tell(now_ms, self._growth())
        sent = tuple(self._events) if len(self._events) <= EVENTS_SENT else tuple(self._first(EVENTS_SENT))
        if sent:
            self._sent = sent[-1].number
        return sent

    def answered(self) -> None:
        """The last renewal has arrived: what it told is told."""
        while self._events and self._events[0].number <= self._sent:
            self._events.popleft()

    def registered(self) -> None:
        """The session is a new one: numbers begin anew, and so does what is told."""
        self._events.clear()
        self._next, self._sent, self._told_to = 1, 0, 0

    def _tell_all(self) -> None:
        """To a leader that may know nothing of what runs here."""
        self._began.clear()
        if not self._told_to:
            self._events.clear()
            return
        for engine, (work_id, attempt), entry in self._running():
            began = Began(entry.work, engine, attempt, entry.output_tokens, entry.prefilled)
            self._began[work_id, attempt] = self._tell(int(entry.taken_s * 1000), began)

    def _running(self) -> Iterator[tuple[str, Key, Entry]]:
        for engine, ledger in self._ledger:
            for key, entry in ledger.entries.items():
                if entry.taken:  # and no claim of ours whose answer we do not know
                    yield engine, key, entry

    def _growth(self) -> Grew:
        began = self._began
        shown = [
            (began[key], entry.output_tokens if entry.progress is None else entry.progress.output_tokens)
            for _, key, entry in self._running()
            if key in began
        ]
        if len(shown) <= GROWTH_SENT:
            return Grew(self._next, tuple(shown))
        shown.sort()
        return Grew(shown[GROWTH_SENT][0], tuple(shown[:GROWTH_SENT]))

    def _first(self, count: int) -> Iterator[Told]:
        for _, event in zip(range(count), self._events, strict=False):
            yield event

    def _tell(self, at_ms: int, event: Began | Answered | Grew | Ended) -> int:
        number = self._next
        self._next += 1
        self._events.append(Told(number, at_ms, event))
        if len(self._events) > EVENTS_KEPT:
            self._events.popleft()
            self.dropped += 1
        return number

    def __repr__(self) -> str:
        return f"<Journal told_to={self._told_to} running={len(self._began)} untold={len(self._events)}>"
