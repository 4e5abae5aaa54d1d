"""KV memory in use: our ledger, corrected by how far it was off when the engine last told.

The ledger runs ahead of telemetry and knows only what we sent. What it does not know is slow: prompts that share a prefix
make it too high, traffic that is not ours too low. So telemetry corrects an offset, smoothed, and never the sum itself.

A prompt without a first token is in the ledger, and in the engine at most in part: it is left out of the comparison. Where
its answer shows nothing before its end nobody can see how much of it is taken in: so the ledger is off only by what lies
outside of its sums without and with such prompts. It is compared as of the moment of the poll, for which its last sums are
kept.
"""

from __future__ import annotations

from collections import deque

WEIGHT = 0.3
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

    def tick(self, held_tokens: float, now_s: float, *, pending: float = 0.0, unseen: float = 0.0) -> None:
        """Note what the ledger holds now: prompts without a first token included, `pending` tokens, and `unseen` those of them
        of which nobody sees one."""
        self._sums.append((now_s, held_tokens - pending, held_tokens - pending + unseen))

    def polled(self, used_tokens: float, taken_s: float) -> bool:
        """Take in a poll, of pool time `taken_s`. False for one that was seen before."""
        if self._taken_s is not None:
            since_s = taken_s - self._taken_s
            if since_s < 0.02:
                return False
            self.period_s += WEIGHT * (min(since_s, 2 * self.period_s) - self.period_s)
        self._taken_s = taken_s
        if self._sums:
            _, least, most = min(self._sums, key=lambda one: abs(one[0] - taken_s))
            beyond = used_tokens - self.offset_tokens
            self.offset_tokens += WEIGHT * (beyond - min(max(beyond, least), most))
        return True

    def used_tokens(self, ledger_tokens: float, capacity_tokens: float) -> float:
        """KV tokens in use now, 0 at least."""
        return ledger_tokens + min(max(self.offset_tokens, -ledger_tokens), capacity_tokens)

    def __repr__(self) -> str:
        return f"<OffsetFilter {self.offset_tokens:+.0f} tokens>"
