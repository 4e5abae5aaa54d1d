"""What the demo's clients saw, as they saw it: counted on their side of the public port.

Rates and quantiles are of the last `RECENT_S`, attainment is of everything since the start. A refused or failed
request of a class with an objective has missed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles

RECENT_S = 15.0


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
    """One class's counts. `clock` gives monotonic seconds; `ttft_sla_s` may be set once it is known."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = clock()
        self.ttft_sla_s: float | None = None
        self.sent = self.completed = self.refused = self.failed = 0
        self._met = 0
        self._judged = 0
        self._ttfts: deque[tuple[float, float]] = deque()
        self._tokens: deque[tuple[float, int]] = deque()
        self._recent_tokens = 0

    def start(self) -> None:
        """A request left."""
        self.sent += 1

    def first_token(self, ttft_s: float) -> None:
        """Its first token came."""
        self._ttfts.append((self._clock(), ttft_s))
        self._judge(ttft_s)

    def tokens(self, count: int) -> None:
        """More tokens came."""
        self._tokens.append((self._clock(), count))
        self._recent_tokens += count

    def complete(self) -> None:
        """It ended well."""
        self.completed += 1

    def refuse(self) -> None:
        """The gateway refused it: 429 or 503."""
        self.refused += 1
        self._judge(None)

    def fail(self, *, began: bool) -> None:
        """It broke. began: its first token had come and was judged already."""
        self.failed += 1
        if not began:
            self._judge(None)

    def figures(self) -> Figures:
        """Where this class stands now."""
        now_s = self._clock()
        while self._ttfts and self._ttfts[0][0] < now_s - RECENT_S:
            self._ttfts.popleft()
        while self._tokens and self._tokens[0][0] < now_s - RECENT_S:
            self._recent_tokens -= self._tokens.popleft()[1]
        ttfts = [ttft_s for _, ttft_s in self._ttfts]
        cuts = quantiles(ttfts, n=100, method="inclusive") if len(ttfts) > 1 else ttfts * 99
        return Figures(
            sent=self.sent,
            running=self.sent - self.completed - self.refused - self.failed,
            completed=self.completed,
            refused=self.refused,
            failed=self.failed,
            ttft_p50_s=cuts[49] if cuts else None,
            ttft_p99_s=cuts[98] if cuts else None,
            attained_fraction=self._met / self._judged if self._judged else None,
            tokens_per_s=self._recent_tokens / max(1e-9, min(RECENT_S, now_s - self._started_s)),
        )

    def _judge(self, ttft_s: float | None) -> None:
        if self.ttft_sla_s is not None:
            self._judged += 1
            self._met += ttft_s is not None and ttft_s <= self.ttft_sla_s
