"""How many sequences of works without an objective may be in flight: what the guards have shown to be safe, and no leap beyond it.

The guards judge one more work by forecasts; the window keeps their errors small. It grows only while it is used, or too full for the
next work, there is a backlog and every guard passes: by half a second until the first hold on a new engine, once that has shown a token, then by
5 % a tick; it holds for HOLD_S after a change down; and it is cut once per dead time, to a part of what is in flight, so that
the cut is felt.
Where what it adds is felt late (heat) it grows by SLOW_PER_S.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.limits.fixed import taken

START_FACTOR_PER_S = 1.5
GROW_BY = 0.05
SLOW_PER_S = 0.004
USED_SHARE = 0.85
HOLD_S = 2.0
DEAD_TIME_S = 2.0
LEAST = 1.0


@dataclass(slots=True)
class Growth:
    """See the module header. One per engine; `limit` is a real number, sequences are held to its whole part."""

    limit: float
    most: float
    new: bool = True
    held_until_s: float = 0.0
    cut_s: float = float("-inf")
    ticked_s: float | None = None

    def tick(
        self, *, held: int, backlog: bool, clear: bool, now_s: float, slowly: bool = False, sequences: int = 1
    ) -> None:
        """A control tick. held: sequences without objective in flight; clear: every guard would let one more in; sequences: of
        the work that comes next."""
        since_s = 0.0 if self.ticked_s is None else min(1.0, max(0.0, now_s - self.ticked_s))
        self.ticked_s = now_s
        if not clear:
            self.new = self.new and held < USED_SHARE * self.limit
            return
        window = int(self.limit)
        used = held >= USED_SHARE * window or held + taken(sequences, window) > window
        if not backlog or not used or now_s < self.held_until_s:
            return
        if slowly:
            self.limit *= 1 + SLOW_PER_S * since_s
        elif self.new:
            self.limit = max(self.limit + 1, self.limit * START_FACTOR_PER_S**since_s)
        else:
            self.limit += max(1.0, GROW_BY * self.limit)
        self.limit = min(self.limit, self.most)

    def cut(
        self,
        factor: float,
        *,
        held: int,
        now_s: float,
        hold_s: float = HOLD_S,
        dead_s: float = DEAD_TIME_S,
        least: float = LEAST,
    ) -> bool:
        """Shrink, unless the last cut cannot have shown yet, and not below `least`. Nothing is aborted."""
        if now_s - self.cut_s < dead_s:
            return False
        self.limit = max(min(least, self.limit), factor * min(self.limit, held + 1))
        self.new = False
        self.cut_s = now_s
        self.held_until_s = max(self.held_until_s, now_s + hold_s)
        return True
