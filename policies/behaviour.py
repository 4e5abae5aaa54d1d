"""How a key's requests come and go: the pace of a program, of people, or nothing that could be told.

Read where neither a rule of the policy nor the shape of a request says who waits for it. Two patterns are told, and only
on plain evidence, since a guess either makes people wait or lets bulk in among them:

    LOOP     a program that keeps a fixed number of requests in flight, or sends them in rounds: the next one comes at once
             when one ends, the number in flight rises to its highest again and again and not above (that of people
             wanders, and seldom meets its peak), nothing is streamed, nobody leaves
    PERSON   few at a time with seconds between them, and streams or people who left in them

State is a few moving averages for each of KEYS_MAX keys, least recently used ones first forgotten; nothing of a request
is kept. Every process keeps its own: connections of one client stay with a process, and its part of a fixed number in
flight is a fixed number too. So the number that makes a LOOP may be lower where there are several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

KEYS_MAX = 4096
SNAPSHOT_KEYS_MAX = 512

LOOP_ARRIVALS = 64
LOOP_IN_FLIGHT = 4
"""In flight in the whole gateway: an agent that works alone, one call after another, is somebody's and stays light."""
STEADY_RUN = 8
"""Arrivals without a new highest number, for each one in flight: in so many, what wanders has wandered off."""
REFILL_S = 0.25
REFILLED = 0.8
AT_PEAK = 0.7
AT_PEAK_STILL = 0.35
"""A key that was told is not untold by a few crests that fell short: its requests would change their class to and fro."""
CREST_PART = 32
"""A crest meets the highest number within this part of it, or one: some are always just being sent again."""
STREAMED_NONE = 0.05
LEFT_NONE = 0.01

PERSON_ARRIVALS = 8
PERSON_IN_FLIGHT = 2.0
PERSON_PAUSE_S = 1.0
STREAMED_MOSTLY = 0.5

WEIGHT = 1 / 32
PEAK_ARRIVALS = 256
PEAK_RUN = 16
PAUSE_MAX_S = 600.0


class Pattern(StrEnum):
    """What a key's requests look like."""

    LOOP = "loop"
    PERSON = "person"


@dataclass(slots=True)
class _Key:
    """One key. Shares are moving averages over its requests.

    at_peak             crests of the number in flight that meet its highest
    peak, peak_before   most in flight in this run of arrivals, and in the one before; a run is as long as a wandering
                        number needs to wander off
    told                the pattern at the last arrival
    raised, raised_to   the arrival that last brought more in flight, by more than a crest may differ, and how many
    """

    in_flight: int = 0
    arrivals: int = 0
    ended_s: float = -math.inf
    streamed: float = 0.0
    left: float = 0.0
    refilled: float = 0.0
    at_peak: float = 0.0
    level: float = 0.0
    pause_s: float = 0.0
    peak: int = 0
    peak_before: int = 0
    since_peak: int = 0
    raised: int = 0
    raised_to: int = 0
    rising: bool = False
    told: Pattern | None = None

    @property
    def highest(self) -> int:
        """Most in flight, as far back as it is remembered."""
        return max(self.peak, self.peak_before)

    def arrived(self, *, streamed: bool, now_s: float) -> None:
        self.in_flight += 1
        self.arrivals += 1
        weight = max(WEIGHT, 1 / self.arrivals)
        self.streamed += weight * (streamed - self.streamed)
        since_s = now_s - self.ended_s
        self.refilled += weight * ((since_s <= REFILL_S) - self.refilled)
        if math.isfinite(since_s) and self.in_flight == 1:
            self.pause_s += weight * (min(since_s, PAUSE_MAX_S) - self.pause_s)
        self.level += weight * (self.in_flight - self.level)
        self.since_peak += 1
        if self.in_flight > self.peak:
            if self.in_flight > self.raised_to + self.raised_to // CREST_PART:
                self.raised, self.raised_to = self.arrivals, self.in_flight
            self.peak = self.in_flight
        if self.since_peak > PEAK_ARRIVALS + PEAK_RUN * self.highest:
            self.peak_before, self.peak, self.since_peak = self.peak, 0, 0
        self.rising = True

    def ended(self, *, left: bool, now_s: float) -> None:
        if self.rising:  # a crest: the next event after an arrival
            self.rising = False
            meets = self.in_flight >= self.highest - max(1, self.highest // CREST_PART)
            self.at_peak += max(WEIGHT, 1 / max(1, self.arrivals)) * (meets - self.at_peak)
        self.in_flight = max(0, self.in_flight - 1)
        self.ended_s = now_s
        self.left += max(WEIGHT, 1 / max(1, self.arrivals)) * (left - self.left)

    def pattern(self, loop_in_flight: int) -> Pattern | None:
        self.told = self._pattern(loop_in_flight)
        return self.told

    def _pattern(self, loop_in_flight: int) -> Pattern | None:
        if (
            self.arrivals >= LOOP_ARRIVALS
            and self.level >= loop_in_flight - 0.5
            and self.refilled >= REFILLED
            and self.at_peak >= (AT_PEAK_STILL if self.told is Pattern.LOOP else AT_PEAK)
            and self.arrivals - self.raised >= LOOP_ARRIVALS + STEADY_RUN * self.highest
            and self.streamed <= STREAMED_NONE
            and self.left <= LEFT_NONE
        ):
            return Pattern.LOOP
        if (
            self.arrivals >= PERSON_ARRIVALS
            and self.level <= PERSON_IN_FLIGHT
            and self.pause_s >= PERSON_PAUSE_S
            and (self.streamed >= STREAMED_MOSTLY or self.left > LEFT_NONE)
        ):
            return Pattern.PERSON
        return None


class Behaviours:
    """See the module header. One writer: whoever serves the requests. Names are the caller's: tenant and key id."""

    __slots__ = ("_keys", "_loop_in_flight")

    def __init__(self, *, processes: int = 1) -> None:
        """processes: that share the gateway's requests among them."""
        self._keys: dict[str, _Key] = {}
        self._loop_in_flight = max(2, -(-LOOP_IN_FLIGHT // max(1, processes)))

    def arrived(self, name: str, *, streamed: bool, now_s: float) -> Pattern | None:
        """A request came; what its key's requests look like, itself included."""
        key = self._keys.pop(name, None) or _Key()
        self._keys[name] = key
        if len(self._keys) > KEYS_MAX:
            del self._keys[next(iter(self._keys))]
        key.arrived(streamed=streamed, now_s=now_s)
        return key.pattern(self._loop_in_flight)

    def ended(self, name: str, *, left: bool, now_s: float) -> None:
        """A request is over. left: its client went away before it was answered."""
        key = self._keys.get(name)
        if key is not None:
            key.ended(left=left, now_s=now_s)

    def in_flight(self, name: str) -> int:
        """Requests of a key that are not over."""
        key = self._keys.get(name)
        return 0 if key is None else key.in_flight

    def snapshot(self) -> Mapping[str, object]:
        """JSON-ready: what was learned of the latest keys; what is in flight ends with its process."""
        latest = list(self._keys.items())[-SNAPSHOT_KEYS_MAX:]
        return {
            "keys": {
                name: [
                    key.arrivals,
                    key.streamed,
                    key.left,
                    key.refilled,
                    key.at_peak,
                    key.level,
                    key.pause_s,
                    key.highest,
                ]
                for name, key in latest
            }
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a predecessor's snapshot; what cannot be read is left out, and keys that are known here stay."""
        keys = state.get("keys")
        for name, row in keys.items() if isinstance(keys, Mapping) else ():
            if name in self._keys or len(self._keys) >= KEYS_MAX or not _readable(row):
                continue
            arrivals, streamed, left, refilled, at_peak, level, pause_s, peak = row[:8]
            self._keys[str(name)] = _Key(
                arrivals=int(arrivals),
                streamed=streamed,
                left=left,
                refilled=refilled,
                at_peak=at_peak,
                level=level,
                pause_s=pause_s,
                peak_before=int(peak),
            )

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<Behaviours keys={len(self._keys)}>"


def _readable(row: object) -> bool:
    return (
        isinstance(row, list)
        and len(row) >= 8
        and all(isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in row[:8])
    )
