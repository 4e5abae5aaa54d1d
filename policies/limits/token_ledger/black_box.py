"""An engine that tells nothing of its memory: how many tokens it bears is found out by how it answers.

The tokens in flight are bounded. The bound grows while it is used, or too full for the next work, and the worst first token is well
inside its objective: by half a second before the first loss, then towards the level at which it was lost, slower the nearer it is; and it
leaves BACKOFF of itself when first tokens or gaps show that it was too much, once in LOSS_EVERY_S.
"""

from __future__ import annotations

from dataclasses import dataclass

START_TOKENS = 16_384.0
SAFE_SHARE = 0.5
"""Of the memory that an engine told of before it fell silent: what it is given if it held nothing at that moment."""
LEAST_TOKENS = 2_048.0
USED_SHARE = 0.85
TOO_LATE = 0.7
EASY = 0.45
GAP_FACTOR = 5.0
BACKOFF = 0.85
LOSS_EVERY_S = 5.0
NEW_FACTOR_PER_S = 1.5
SLOWEST_PER_S = 0.004
APPROACH_PER_S = 0.03


@dataclass(slots=True)
class BlackBox:
    """See the module header. One per engine; fed at every control tick while the engine is silent."""

    limit_tokens: float = START_TOKENS
    peak_tokens: float | None = None
    lost_s: float = float("-inf")
    ticked_s: float | None = None
    usual_gap_s: float | None = None

    def begin(self, held_tokens: float, most_tokens: float) -> None:
        """The engine has just fallen silent: what it holds, it bears, and were that nothing, half of the memory that it told
        of, START_TOKENS at most. most_tokens: what it could bear by its own word, the level to approach."""
        self.limit_tokens = max(held_tokens, min(START_TOKENS, SAFE_SHARE * most_tokens))
        self.peak_tokens = max(most_tokens, self.limit_tokens)
        self.ticked_s = None

    def tick(
        self, held_tokens: float, *, worst: float | None, gap_s: float | None, now_s: float, next_tokens: float = 0.0
    ) -> None:
        """worst: of the latest first tokens, the largest part used of the time allowed; gap_s: between tokens, now; next_tokens: what
        the work that comes next asks for; 0 where none waits."""
        since_s = 0.0 if self.ticked_s is None else min(1.0, max(0.0, now_s - self.ticked_s))
        self.ticked_s = now_s
        torn = gap_s is not None and self.usual_gap_s is not None and gap_s > GAP_FACTOR * self.usual_gap_s
        if gap_s is not None and not torn:
            before = self.usual_gap_s
            self.usual_gap_s = gap_s if before is None else before + 0.02 * (gap_s - before)
        if torn or (worst is not None and worst > TOO_LATE):
            if now_s - self.lost_s >= LOSS_EVERY_S:
                self.lost_s = now_s
                self.peak_tokens = self.limit_tokens
                self.limit_tokens = max(LEAST_TOKENS, BACKOFF * self.limit_tokens)
        elif (worst is None or worst < EASY) and (
            held_tokens >= USED_SHARE * self.limit_tokens or held_tokens + next_tokens > self.limit_tokens
        ):
            if self.peak_tokens is None:
                self.limit_tokens *= NEW_FACTOR_PER_S**since_s
            else:
                distance = max(0.0, self.peak_tokens - self.limit_tokens)
                self.limit_tokens += since_s * max(SLOWEST_PER_S * self.limit_tokens, APPROACH_PER_S * distance)
