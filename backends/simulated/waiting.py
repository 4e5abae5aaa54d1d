"""The two orders in which a continuous batching engine lets sequences wait: by arrival, or by priority.

Aborted sequences are dropped when they come to the head, not searched for.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

from backends.simulated.sequence import Sequence, SequenceState


class WaitingQueue(Protocol):
    """Who waits. `head` never shows an aborted sequence."""

    def push(self, sequence: Sequence) -> None:
        """A new arrival."""
        ...

    def push_back_preempted(self, sequence: Sequence) -> None:
        """A victim returns, ahead of its equals."""
        ...

    def head(self) -> Sequence | None:
        """The next to be admitted, None when nobody waits."""
        ...

    def pop(self) -> Sequence:
        """Take the head."""
        ...


class ArrivalQueue:
    """First come, first served; a preempted sequence goes to the very front."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: deque[Sequence] = deque()

    def push(self, sequence: Sequence) -> None:
        self._queue.append(sequence)

    def push_back_preempted(self, sequence: Sequence) -> None:
        self._queue.appendleft(sequence)

    def head(self) -> Sequence | None:
        while self._queue and self._queue[0].state is SequenceState.ABORTED:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def pop(self) -> Sequence:
        return self._queue.popleft()


class PriorityQueue:
    """Lowest priority number first, then by arrival; a preempted sequence keeps its place by these two."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.priority, sequence.arrival_s, sequence.number, sequence))

    def push_back_preempted(self, sequence: Sequence) -> None:
        self.push(sequence)

    def head(self) -> Sequence | None:
        while self._heap and self._heap[0][3].state is SequenceState.ABORTED:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[3]
