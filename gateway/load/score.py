"""Where one class stands now, as its clients see it: counted on their side of the port.

Rates and quantiles are of the last `RECENT_S`, attainment is of everything since the start. A refused or failed
request of a class with an objective has missed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from typing import Final

from gateway.load.client import Exchange

RECENT_S: Final = 15.0
SLOT_S: Final = 0.25
"""Tokens are counted in slots of so long, so that a chunk adds to a number and keeps nothing."""
REFUSALS: Final = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Figures:
    """One class now. Times in seconds, None when nothing was seen; attained_fraction None without an objective."""

    sent: int
    running: int
    completed: int
    refused: int
    failed: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    attained_fraction: float | None
    tokens_per_s: float


class Score:
    """One class's counts; a `gateway.load.client.Watch`.

    clock        monotonic seconds
    ttft_sla_s   may be set once it is known; None: no objective
    """

    def __init__(self, clock: Callable[[], float], *, ttft_sla_s: float | None = None) -> None:
        self._clock = clock
        self._started_s = clock()
        self.ttft_sla_s = ttft_sla_s
        self.sent = self.completed = self.refused = self.failed = 0
        self._met = 0
        self._judged = 0
        self._ttfts: deque[tuple[float, float]] = deque()
        self._slots: deque[list[float]] = deque()
        self._slot_ends_s = -1.0

    def start(self) -> None:
        """A request left."""
        self.sent += 1

    def first_token(self, ttft_s: float) -> None:
        """Its first token came."""
        self._ttfts.append((self._clock(), ttft_s))
        self._judge(ttft_s)

    def tokens(self, count: int, gap_s: float | None = None) -> None:  # noqa: ARG002, gaps are kept by a Record
        """More tokens came."""
        now_s = self._clock()
        if now_s >= self._slot_ends_s:
            self._slot_ends_s = now_s + SLOT_S
            self._slots.append([now_s, 0])
        self._slots[-1][1] += count

    def ended(self, exchange: Exchange) -> None:
        """It is over."""
        if not exchange.failure:
            self.completed += 1
            return
        if exchange.status in REFUSALS:
            self.refused += 1
        else:
            self.failed += 1
        if exchange.first_s is None:
            self._judge(None)

    def figures(self) -> Figures:
        """Where this class stands now."""
        now_s = self._clock()
        while self._ttfts and self._ttfts[0][0] < now_s - RECENT_S:
            self._ttfts.popleft()
        while self._slots and self._slots[0][0] < now_s - RECENT_S:
            self._slots.popleft()
        ttfts = [ttft_s for _, ttft_s in self._ttfts]
        cuts = quantiles(ttfts, n=100, method="inclusive") if len(ttfts) > 1 else ttfts * 99
        recent_tokens = sum(count for _, count in self._slots)
        return Figures(
            sent=self.sent,
            running=self.sent - self.completed - self.refused - self.failed,
            completed=self.completed,
            refused=self.refused,
            failed=self.failed,
            ttft_p50_s=cuts[49] if cuts else None,
            ttft_p99_s=cuts[98] if cuts else None,
            attained_fraction=self._met / self._judged if self._judged else None,
            tokens_per_s=recent_tokens / max(1e-9, min(RECENT_S, now_s - self._started_s)),
        )

    def _judge(self, ttft_s: float | None) -> None:
        if self.ttft_sla_s is not None:
            self._judged += 1
            self._met += ttft_s is not None and ttft_s <= self.ttft_sla_s
