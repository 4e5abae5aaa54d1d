"""KV memory in use: our ledger, corrected by how far it was off when the engine last told.

The ledger runs ahead of telemetry and knows only what we sent. What it does not know is slow: prompts that share a prefix
make it too high, traffic that is not ours too low. So telemetry corrects an offset, smoothed, and never the sum itself.

The engine speaks of another moment than the ledger: works came and went around the poll, tokens were shown since, and a
prompt without a first token is there in part. So a poll is compared with all that the ledger held within REACH_S of it,
from the least, without the prompts that were pending, to the most, with them; and only what lies outside of that says that
the ledger is off. In the cell kv-tight, where it never is, the offset wandered around 860 tokens when polls were compared
with one sum: now around 30.
"""

from __future__ import annotations

from collections import deque

WEIGHT = 0.3
REACH_S = 0.3
"""A control tick and a step of the engine: its gauges are as old as the step that it is in."""
KEPT = 16
"""Control ticks whose sums are kept: a poll is seldom older than a few."""


class OffsetFilter:
    """See the module header. One per engine."""

    __slots__ = ("_sums", "_taken_s", "offset_tokens", "period_s")

    def __init__(self) -> None:
        self.offset_tokens = 0.0
        self.period_s = 0.5
        self._taken_s: float | None = None
        self._sums: deque[tuple[float, float, float]] = deque(maxlen=KEPT)

    def tick(self, held_tokens: float, now_s: float, *, pending: float = 0.0) -> None:
        """Note what the ledger holds now: prompts without a first token included, `pending` tokens."""
        self._sums.append((now_s, held_tokens - pending, held_tokens))

    def polled(self, used_tokens: float, taken_s: float) -> bool:
        """Take in a poll, of pool time `taken_s`. False for one that was seen before."""
        if self._taken_s is not None:
            since_s = taken_s - self._taken_s
            if since_s < 0.02:
                return False
            self.period_s += WEIGHT * (min(since_s, 2 * self.period_s) - self.period_s)
        self._taken_s = taken_s
        if self._sums:
            reach_s = max(REACH_S, min(abs(at_s - taken_s) for at_s, _, _ in self._sums))
            near = [(least, most) for at_s, least, most in self._sums if abs(at_s - taken_s) <= reach_s]
            beyond = used_tokens - self.offset_tokens
            least, most = min(one for one, _ in near), max(one for _, one in near)
            self.offset_tokens += WEIGHT * (beyond - min(max(beyond, least), most))
        return True

    def used_tokens(self, ledger_tokens: float, capacity_tokens: float) -> float:
        """KV tokens in use now, 0 at least."""
        return ledger_tokens + min(max(self.offset_tokens, -ledger_tokens), capacity_tokens)

    def __repr__(self) -> str:
        return f"<OffsetFilter {self.offset_tokens:+.0f} tokens>"
