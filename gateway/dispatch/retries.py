"""How many attempts may be second ones: a budget, so that a pool that fails is not asked twice for everything (FAI-09).

Clients retry by themselves; a gateway that doubles each of their tries turns a bad minute into a storm. So a second attempt
takes 1 from a balance that every first attempt raises by SHARE and every second of time by PER_S. A retry of a request
that no engine received (its connection was refused) costs engines nothing and is free.

After the retry budgets of Finagle: the share for busy times, the trickle so that a quiet gateway retries every request.
"""

from __future__ import annotations

SHARE = 0.1
PER_S = 1.0
BALANCE_MAX = 20.0


class RetryBudget:
    """See the module header. One per process."""

    __slots__ = ("_at_s", "_balance")

    def __init__(self, now_s: float) -> None:
        self._balance = BALANCE_MAX
        self._at_s = now_s

    def attempted(self) -> None:
        """A first attempt is made."""
        self._balance = min(BALANCE_MAX, self._balance + SHARE)

    def take(self, now_s: float) -> bool:
        """May one more attempt be a second one? True takes it."""
        self._balance = min(BALANCE_MAX, self._balance + (now_s - self._at_s) * PER_S)
        self._at_s = now_s
        if self._balance < 1:
            return False
        self._balance -= 1
        return True

    def __repr__(self) -> str:
        return f"<RetryBudget {self._balance:.1f}>"
