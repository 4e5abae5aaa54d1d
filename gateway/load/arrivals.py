"""When made-up requests come: a process of mean rate one, drawn once, and bent to a rate that changes over time.

The process says how even the traffic is (`cv`, the standard deviation of the gaps over their mean: 0 is a metronome, 1
is Poisson, more is burstier: gaps are Gamma). The rate says how much of it there is: stretches in each of which it goes
evenly from one value to another, so that a ramp, a staircase and bursts are the same thing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stretch:
    """So many seconds in which the rate goes evenly from one value to another, in requests per second."""

    duration_s: float
    from_rps: float
    to_rps: float

    @property
    def requests(self) -> float:
        """Expected."""
        return self.duration_s * (self.from_rps + self.to_rps) / 2

    def at_s(self, requests: float) -> float:
        """Seconds after which that many are expected, requests <= all of it."""
        slope = (self.to_rps - self.from_rps) / self.duration_s
        if abs(slope) * self.duration_s < 1e-9 * max(self.from_rps, self.to_rps):
            return requests / self.from_rps
        # from·t + slope·t²/2 = requests, in the form that loses nothing where the slope is small
        root = math.sqrt(max(0.0, self.from_rps**2 + 2 * slope * requests))
        return 2 * requests / (self.from_rps + root) if requests else 0.0


def steady(rps: float, duration_s: float, *, ramp_s: float = 0.0) -> list[Stretch]:
    """One rate, reached after ramp_s."""
    ramp_s = min(ramp_s, duration_s)
    ramp = [Stretch(ramp_s, 0.0, rps)] if ramp_s > 0 else []
    return [*ramp, *([Stretch(duration_s - ramp_s, rps, rps)] if duration_s > ramp_s else [])]


def staircase(rates_rps: Sequence[float], step_s: float) -> list[Stretch]:
    """One rate after another, step_s each."""
    return [Stretch(step_s, rps, rps) for rps in rates_rps]


def bursts(low_rps: float, high_rps: float, duration_s: float, *, low_s: float, high_s: float) -> list[Stretch]:
    """High and low in turn, high first, cut at duration_s."""
    found: list[Stretch] = []
    left_s = duration_s
    while left_s > 1e-9:
        for rps, each_s in ((high_rps, high_s), (low_rps, low_s)):
            if (piece_s := min(each_s, left_s)) > 0:
                found.append(Stretch(piece_s, rps, rps))
                left_s -= piece_s
    return found


def arrivals(stretches: Sequence[Stretch], *, cv: float, seed: int) -> Iterator[float]:
    """Seconds since the start, ascending, until the last stretch is over."""
    due = _process(cv, random.Random(seed))
    expected = next(due)
    began_s = before = 0.0
    for stretch in stretches:
        while expected - before < stretch.requests:
            yield began_s + stretch.at_s(expected - before)
            expected = next(due)
        began_s += stretch.duration_s
        before += stretch.requests


def _process(cv: float, dice: random.Random) -> Iterator[float]:
    """Times of a renewal process of mean gap 1. The first comes anywhere in its gap, so that there is no start effect."""
    shape = 1 / (cv * cv) if cv > 0 else 0.0
    at = dice.random() if not shape else dice.gammavariate(shape, 1 / shape) * dice.random()
    while True:
        yield at
        at += dice.gammavariate(shape, 1 / shape) if shape else 1.0
