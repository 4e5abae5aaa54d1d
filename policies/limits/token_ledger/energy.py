"""Joules per token: by how many sequences run, and so when works that can wait should run.

An engine's step costs nearly the same energy for one sequence as for thirty, so a token is cheapest in a dense batch; past
the best one it gets dearer again where memory is full. The curve is learned from the engine's own counters, for sequences
in half octaves. From it come two bounds on works without an objective: nothing is added where tokens are dearer than the
best by DEARER, and works are kept until enough of them wait to run densely (`Bursts`), for a bounded time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

DEARER = 1.1
"""Times the best joules per token that are as good."""
WINDOW_S = 1.0
"""Energy is read once a second."""
KEPT = 0.98
"""Of what a bin knows, when something new comes to it."""
LEAST_TOKENS = 200.0


def bin_of(sequences: float) -> int:
    return round(2 * math.log2(max(1.0, sequences)))


@dataclass(slots=True)
class EnergyCurve:
    """Joules per generated token by bins of sequences. One per engine."""

    _bins: dict[int, tuple[float, float]] = field(default_factory=dict)
    _from: tuple[float, float, float, int] | None = None
    """Time, joules, tokens and sequences at the window's begin."""

    def saw(self, joules_total: float, tokens_total: float, sequences: int, now_s: float) -> None:
        """The engine's counters now. A window counts for the mean of the sequences at its ends; one in which they fell says
        nothing."""
        begun = self._from
        if begun is not None and now_s - begun[0] < WINDOW_S:
            return
        self._from = (now_s, joules_total, tokens_total, sequences)
        if begun is None or not sequences or not begun[3]:
            return
        at = bin_of((begun[3] + sequences) / 2)
        joules, tokens = joules_total - begun[1], tokens_total - begun[2]
        if joules > 0 and tokens > 0:
            before = self._bins.get(at, (0.0, 0.0))
            self._bins[at] = KEPT * before[0] + joules, KEPT * before[1] + tokens

    def efficient(self) -> int | None:
        """The fewest sequences whose tokens are as cheap as the best, or more than ever ran where the curve fell to its end;
        None while nothing is known."""
        known = self._known()
        if not known:
            return None
        least = min(known.values())
        fewest = min(at for at, joules in known.items() if joules <= DEARER * least)
        return math.ceil(2 ** ((fewest + (fewest == max(known))) / 2))

    def past_best(self, sequences: float) -> tuple[float, float] | None:
        """(joules of a token, the most that is as good as the best) past the best batch; None before it, or not known."""
        known = self._known()
        joules = known.get(bin_of(sequences))
        if joules is None or bin_of(sequences) <= min(known, key=lambda at: (known[at], at)):
            return None
        return joules, DEARER * min(known.values())

    def _known(self) -> dict[int, float]:
        return {at: joules / tokens for at, (joules, tokens) in sorted(self._bins.items()) if tokens >= LEAST_TOKENS}


@dataclass(slots=True)
class Bursts:
    """When an engine is open for works without an objective. lacking: of them, for an efficient batch, at the last tick; at
    least 1 while it is closed.

    Open once enough wait for an efficient batch, once one has waited for `wait_s`, or while the curve is not known; closed when
    none waits in the queue any more.
    """

    wait_s: float
    open: bool = True
    lacking: int = 1
    _since_s: float | None = None

    def tick(self, *, queued: int, held: int, efficient: int | None, now_s: float) -> None:
        lacking = 0 if efficient is None else efficient - queued - held
        self.lacking = max(1, lacking)
        if not queued:
            self.open, self._since_s = efficient is None, None
            return
        if self._since_s is None:
            self._since_s = now_s
        self.open = self.open or lacking <= 0 or now_s - self._since_s >= self.wait_s
