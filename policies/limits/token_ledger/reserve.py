"""KV memory that patient works leave free for urgent ones to come: no more than it takes.

An urgent work that finds no room waits in our queue until something has ended, since what has begun cannot be taken back.
It can wait for as long as its objective leaves beyond its own first token (`patience_s`). Meanwhile memory comes free, at
`rate` tokens a second: what is expected to end, less what urgent works take. With R tokens free a prompt of p comes too late if

    p > R + rate·patience,     or, where one of x came t seconds before it,     p + x > R + rate·(patience + t).

For arrivals at a steady rate λ the chance of either is, with θ = R + rate·patience,

    P(p > θ) + λ/rate · E[max(0, p + x - θ)],

p and x drawn from the prompts of late. R is the least that keeps it within the risk. What this leaves out, a third prompt
in that time and works that end in bunches, is made up for by believing in half the rate.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

POINTS = 48
"""Quantiles that stand for the prompts of late: pairs of them are looked at."""
ARRIVALS_S = 60.0
LEAST_ARRIVALS_S = 5.0
BELIEVED_RATE = 0.5
LEAST_RATE = 100.0
"""KV tokens a second: an engine on which nothing is expected to end still goes on."""
HALVINGS = 12


class Shocks:
    """What urgent prompts take of memory when they come. Made anew when the prompts of late are looked at."""

    __slots__ = ("_pairs", "_prompts", "_tails", "longest", "mean")

    def __init__(self, prompts: Iterable[int]) -> None:
        """prompts: tokens in memory of each urgent prompt of late, cached or not; at least one."""
        self._prompts = sorted(prompts)
        count = len(self._prompts)
        points = min(POINTS, count)
        some = [self._prompts[int((number + 0.5) / points * count)] for number in range(points)]
        self._pairs = sorted(one + other for one in some for other in some)
        tails = [0.0]
        for pair in reversed(self._pairs):
            tails.append(tails[-1] + pair)
        self._tails = tails[::-1]
        self.longest, self.mean = self._prompts[-1], sum(self._prompts) / count

    def late(self, room_tokens: float, arrivals_per_token: float) -> float:
        """The chance of the module header; may be above 1. room_tokens: θ; arrivals_per_token: λ/rate."""
        above = bisect_right(self._pairs, room_tokens)
        excess = self._tails[above] - room_tokens * (len(self._pairs) - above)
        longer = len(self._prompts) - bisect_right(self._prompts, room_tokens)
        return longer / len(self._prompts) + arrivals_per_token * excess / len(self._pairs)

    def __repr__(self) -> str:
        return f"<Shocks {len(self._prompts)} prompts, mean {self.mean:.0f}, longest {self.longest}>"


class Reserve:
    """See the module header. One per engine. tokens: to be left free beside `spare_tokens`."""

    __slots__ = ("_arrivals", "_since_s", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self._arrivals: deque[float] = deque()
        self._since_s: float | None = None

    def granted(self, now_s: float) -> None:
        """An urgent work was given to the engine."""
        self._arrivals.append(now_s)
        self._forget(now_s)  # an engine that tells nothing of its memory is never looked at

    def look(
        self,
        shocks: Shocks,
        *,
        ending_per_s: float,
        patience_s: float,
        spare_tokens: float,
        risk: float,
        now_s: float,
    ) -> None:
        """Once a tick.

        ending_per_s   KV tokens that come free as works end, less what all of them grow by
        patience_s     that a long prompt can wait for memory; >= 0
        spare_tokens   that patient works leave free in any case
        """
        self._forget(now_s)
        if self._since_s is None:
            self._since_s = now_s
        per_s = max(1, len(self._arrivals)) / min(ARRIVALS_S, max(LEAST_ARRIVALS_S, now_s - self._since_s))
        rate = max(LEAST_RATE, BELIEVED_RATE * (ending_per_s - per_s * shocks.mean))
        room, arrivals_per_token = spare_tokens + rate * patience_s, per_s / rate
        low, high = 0.0, float(shocks.longest)
        if shocks.late(room, arrivals_per_token) <= risk:
            high = 0.0
        for _ in range(HALVINGS if high else 0):
            middle = (low + high) / 2
            if shocks.late(middle + room, arrivals_per_token) <= risk:
                high = middle
            else:
                low = middle
        self.tokens = high

    def _forget(self, now_s: float) -> None:
        while self._arrivals and self._arrivals[0] < now_s - ARRIVALS_S:
            self._arrivals.popleft()

    def __repr__(self) -> str:
        return f"<Reserve {self.tokens:.0f} tokens>"
