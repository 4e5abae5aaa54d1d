"""How busy urgent works alone keep an engine, and how much slower works that can wait may make it then.

For classes that promise a slowdown. An engine whose prompts fill a part `busy` of its time makes the next one wait for
busy / (1 - busy) of one, so a promise to make first tokens no more than S times as slow allows little where it is busy at
its peak, and S where it idles. Works without an objective that decode make every step longer; and they are still there
when the next burst comes, so it is the peak that counts and not the moment.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
"""Over which prompt tokens are counted: a burst is longer than that."""
KEPT = 600
"""Looks, one a second, of which the 95th percentile is the peak."""
EASED = 2.2
"""Times the promised part beyond 1 that is let happen by this reckoning, which takes every prompt for one that comes at the peak.
Cell llm-d, promise 1.3, the 95th percentile over that without bulk, and items of 3,000 done in time (A100, seeds 1 and 2; four H100,
seeds 2 and 3): with 1.7 1.19 and 1.22, all; 1.08 and 1.09, 2,556 and 2,741; with 2.2 1.19 and 1.22, all; 1.09 and 1.11, 2,967 and
all; with 2.8 1.19 and 1.23; 1.10 and 1.10, all."""
MOST_BUSY = 0.95
"""Beyond that the queue grows whoever is there, and nothing is left to promise."""


class UrgentLoad:
    """See the module header. One per engine."""

    __slots__ = ("_arrived", "_looks", "_tokens", "peak_tokens_per_s")

    def __init__(self) -> None:
        self._arrived: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self._looks: deque[float] = deque(maxlen=KEPT)
        self.peak_tokens_per_s = 0.0

    def granted(self, prompt_tokens: int, now_s: float) -> None:
        """An urgent work was given to the engine."""
        self._arrived.append((now_s, prompt_tokens))
        self._tokens += prompt_tokens

    def look(self, now_s: float) -> None:
        """Once a second."""
        while self._arrived and self._arrived[0][0] <= now_s - WINDOW_S:
            self._tokens -= self._arrived.popleft()[1]
        self._looks.append(self._tokens / WINDOW_S)
        self.peak_tokens_per_s = sorted(self._looks)[int(0.95 * (len(self._looks) - 1))]

    def may_be_slower(self, step_s: float, prompt_tokens: float, slowdown: float) -> float:
        """How many times slower works that can wait may make it at the peak, for first tokens to be at most `slowdown` times as
        slow. step_s: of one with an urgent prompt of prompt_tokens, without any of those works."""
        factor = 1 + EASED * (slowdown - 1)
        busy = min(MOST_BUSY, self.peak_tokens_per_s * step_s / prompt_tokens)
        if busy <= 0:
            return factor
        waits = factor * busy / (1 - busy)
        return min(factor, waits / (1 + waits) / busy)
