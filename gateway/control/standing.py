"""Whether one engine is in rotation, why not, and when it may be tried out again.

Written by the process that leads (`gateway.control.health` puts out, `gateway.control.poller` tries out); the others
take it over from the leader's snapshot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

HOLD_S, HOLD_MAX_S = 1.0, 60.0
"""From a fall to the first trial: twice as long after each further fall."""
TRIAL_EVERY_MAX_S = 15.0
FORGIVEN_S = 300.0
"""After so long in rotation a new fall is held no longer than a first one."""


class Why(StrEnum):
    """Why an engine is out of rotation; see `gateway.control.health`."""

    FAILING = "failing"
    STALLED = "stalled"
    DRAINING = "draining"
    ASLEEP = "asleep"
    SILENT = "silent"


@dataclass(slots=True)
class Standing:
    """How one engine stands.

    why          it is out of rotation; None: it is in
    since_s      pool time of that
    unproved     it was down, and has made no token since
    trial_due_s  monotonic time from which a generation may try it out; inf: not to be tried
    """

    why: Why | None = None
    detail: str = ""
    since_s: float = -math.inf
    unproved: bool = False
    trial_due_s: float = math.inf
    falls: int = 0
    failed_trials: int = 0

    @property
    def good(self) -> bool:
        """It may have work, as far as this goes."""
        return self.why is None and not self.unproved

    def leave(self, why: Why, detail: str, *, pool_s: float, now_s: float) -> None:
        """Out of rotation from now on."""
        self.falls = self.falls + 1 if pool_s - self.since_s < FORGIVEN_S else 1
        self.why, self.detail, self.since_s = why, detail, pool_s
        self.failed_trials = 0
        self.trial_due_s = now_s + min(HOLD_MAX_S, HOLD_S * 2.0 ** (self.falls - 1))

    def lost(self, now_s: float) -> None:
        """It is down: whoever answers there next has to make a token first."""
        if not self.unproved:
            self.unproved, self.failed_trials, self.trial_due_s = True, 0, now_s

    def back(self, pool_s: float) -> None:
        """In rotation again."""
        self.why, self.detail, self.since_s = None, "", pool_s
        self.unproved, self.failed_trials, self.trial_due_s = False, 0, math.inf

    def adopt(self, why: str, *, unproved: bool) -> None:
        """As the leader says it is. When to try it out is for a leader to decide."""
        self.why = Why(why) if why in _REASONS else None
        self.unproved = unproved
        self.trial_due_s = math.inf

    def tried(self, problem: str, *, pool_s: float, now_s: float) -> None:
        """A generation was asked of it; "" when it made a token."""
        if not problem:
            self.back(pool_s)
            return
        self.failed_trials += 1
        self.detail = problem
        self.trial_due_s = now_s + min(TRIAL_EVERY_MAX_S, HOLD_S * 2.0 ** (self.failed_trials - 1))


_REASONS = frozenset(why.value for why in Why)
