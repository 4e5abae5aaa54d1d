"""What happens when, in virtual time: an integer clock and a heap of what is due.

Time is an integer number of nanoseconds, so that two instants are equal or they are not. A float would move timers
that are meant for one instant apart by rounding, and their order would hang on the magnitude of the clock.

Two things due at one instant have no promised order (the asyncio documentation calls it undefined for timers, and a
network promises none between connections), so the seed draws it. Everything that *is* promised is kept elsewhere:
`call_soon` is a FIFO that libraries rely on (`Future` callbacks, `connection_made` before the waiter wakes), and the
bytes of one connection stay in order.
"""

from __future__ import annotations

import heapq
import math
import random
from typing import Generic, TypeVar

NS = 1_000_000_000
NEVER_NS = 2**62
"""Stands for an infinite delay: 146 years."""

Item = TypeVar("Item")


def after_ns(delay_s: float) -> int:
    """A delay in whole nanoseconds, never shorter than asked for; a negative one is none."""
    if delay_s <= 0:
        return 0
    return NEVER_NS if delay_s >= NEVER_NS / NS else math.ceil(round(delay_s * NS, 3))


def instant_ns(at_s: float) -> int:
    """The first whole nanosecond at which a clock read as `ns / 1e9` shows `at_s` or later.

    Rounding down would wake a caller that sees the clock short of its deadline, which then sleeps until the same
    instant, for ever.
    """
    if at_s >= NEVER_NS / NS:
        return NEVER_NS
    nearest = round(at_s * NS)
    return nearest if nearest / NS >= at_s else nearest + 1


class Agenda(Generic[Item]):
    """A heap of items by instant. Items of one instant come out in an order drawn from `rng`, or FIFO without one."""

    __slots__ = ("_added", "_heap", "_rng")

    def __init__(self, rng: random.Random | None) -> None:
        self._heap: list[tuple[int, float, int, Item]] = []
        self._rng = rng
        self._added = 0

    def add(self, due_ns: int, item: Item) -> None:
        self._added += 1
        tie = 0.0 if self._rng is None else self._rng.random()
        heapq.heappush(self._heap, (due_ns, tie, self._added, item))

    @property
    def next_ns(self) -> int | None:
        """The earliest instant on the agenda; None when it is empty."""
        return self._heap[0][0] if self._heap else None

    def peek(self) -> Item:
        """The item that `take` would return. Raises IndexError when empty."""
        return self._heap[0][3]

    def take(self) -> Item:
        """Remove and return the earliest item. Raises IndexError when empty."""
        return heapq.heappop(self._heap)[3]

    def keep(self, wanted: list[tuple[int, float, int, Item]]) -> None:
        """Replace the content by `wanted`, a part of `entries`; O(n)."""
        heapq.heapify(wanted)
        self._heap = wanted

    @property
    def entries(self) -> list[tuple[int, float, int, Item]]:
        """Everything on the agenda in heap order; for `keep`."""
        return self._heap

    def clear(self) -> None:
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)
