"""Seats of an engine that does not tell them: how many it decodes while others wait in it and its memory has room.

vLLM tells its seats in developer's mode only. Past them works wait inside the engine, where an urgent one stands behind bulk,
and the first sign would be its late first token. What is seen for one poll may be a prompt that waits for its turn in a
step, so SAMPLES polls in a row must agree. A larger number that runs corrects what was found; after KEPT_S it is found anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.vocabulary import EngineView

SAMPLES = 3
ROOMY_FRACTION = 0.8
"""With more of its memory in use, works may wait for that."""
KEPT_S = 600.0
SAME_POLL_S = 0.01


@dataclass(slots=True)
class FoundSeats:
    """See the module header. One per engine, fed at every control tick. value: None while nothing was found."""

    value: int | None = None
    _found_s: float = -math.inf
    _polled_s: float = -math.inf
    _running: int = 0
    _agreed: int = 0

    def hear(self, view: EngineView, now_s: float) -> None:
        """Take in what the engine says that it runs and has waiting, once a poll."""
        running, waiting, used = view.running, view.waiting, view.kv_used_fraction
        polled_s = now_s - running.age_s
        if not (running.known and waiting.known) or polled_s - self._polled_s < SAME_POLL_S:
            return
        self._polled_s = polled_s
        runs = int(running.value or 0)
        if self.value is not None and (runs > self.value or now_s - self._found_s >= KEPT_S):
            self.value = None
        roomy = used.known and used.value is not None and used.value < ROOMY_FRACTION
        full = roomy and runs > 0 and bool(waiting.value)
        self._agreed = 0 if not full else self._agreed + 1 if runs == self._running else 1
        self._running = runs
        if self._agreed >= SAMPLES:
            self.value, self._found_s = runs, now_s
