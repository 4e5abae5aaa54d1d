"""How long a work will still run: survival functions of output lengths, never point predictions.

For each of (tenant, class, model), (class, model) and model a histogram over log-spaced bins, ended and censored works
apart, with a half-life; each level is believed by n/(n + 20), the rest is the next coarser one's, the last a prior. From
the blend S come, in O(1) by its integrals A and B:

    E[min(L - g, H) | L > g]    = (A(g+H) - A(g)) / S(g),                     A(x) = ∫0..x S
    E[min(L - g, H)^2 | L > g]  = 2 (B(g+H) - B(g) - g (A(g+H) - A(g))) / S(g),   B(x) = ∫0..x t S(t)

Censored (Kaplan-Meier): a work that was aborted, or cut off by its own max_tokens, would have run longer; and so will all
that run now, which is why they are looked at whenever the tables are rebuilt. Without them the short works of a new
workload, which end first, would pass for all of it. A work's own max_tokens bounds H and is the atom at its end.

Every control tick asks for every work in flight, so what a work without a bound will make is worked out once for each bin
of shown tokens and kept as long as the tables are (`ahead`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate

HORIZONS = (64, 256, 512, 1024)
"""Engine steps ahead that forecasts are made for."""
BINS = 64
LONGEST_TOKENS = 32_768
EDGES = tuple(0.0 if i == 0 else LONGEST_TOKENS ** (i / BINS) for i in range(BINS + 1))
HALF_LIFE_WORKS = 2000
BELIEVED_WORKS = 20
PRIOR_MEDIAN_TOKENS = 350.0
PRIOR_SIGMA = 1.5
"""Of the logarithm. Longer than most answers are: a new engine takes in hundreds of works before the first of them has shown how long
they run, and what has begun stays. See decision 0044."""
LEAST_LEFT = 1e-6
KEYS_KEPT = 2048
BINS_PER_LOG = BINS / math.log(LONGEST_TOKENS)

Key = tuple[str, ...]
Ahead = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""For each of HORIZONS: mean and variance of the tokens made by then, and the chance to run still."""


def levels(tenant: str, class_name: str, model: str) -> tuple[Key, Key, Key]:
    """From the finest to the coarsest."""
    return (class_name, model, tenant), (class_name, model), (model,)


def bin_of(tokens: float) -> int:
    """The bin that holds a length."""
    if tokens < EDGES[1]:
        return 0
    found = min(BINS - 1, int(math.log(tokens) * BINS_PER_LOG))
    return found + (found + 1 < BINS and tokens >= EDGES[found + 1]) - (tokens < EDGES[found])


class Survival:
    """One survival function with its integrals. `at_edges` is S at EDGES, falling from 1."""

    __slots__ = ("_a", "_ahead", "_b", "at_edges")

    def __init__(self, at_edges: Iterable[float]) -> None:
        self.at_edges = tuple(at_edges)
        self._ahead: dict[int, Ahead] = {}
        areas, moments = [0.0], [0.0]
        for low, high, s_low, s_high in zip(EDGES, EDGES[1:], self.at_edges, self.at_edges[1:], strict=False):
            area, moment = _integrals(low, high, s_low, s_high)
            areas.append(areas[-1] + area)
            moments.append(moments[-1] + moment)
        self._a, self._b = tuple(areas), tuple(moments)

    def growth(self, shown_tokens: float, horizon: float) -> tuple[float, float, float]:
        """What a work of `shown_tokens` still makes within `horizon` steps: mean and variance of its tokens; and the
        chance that it still runs then."""
        if horizon <= 0:
            return 0.0, 0.0, 1.0
        shown = min(shown_tokens, LONGEST_TOKENS - 1.0)
        left, area, moment = self._upto(shown)
        if left < LEAST_LEFT:  # nobody has run so long: it may end at any moment, or not at all
            return horizon / 2, horizon * horizon / 12, 1.0
        left_then, area_then, moment_then = self._upto(min(shown + horizon, LONGEST_TOKENS))
        mean = min(horizon, (area_then - area) / left)
        square = 2 * (moment_then - moment - shown * (area_then - area)) / left
        return mean, max(0.0, square - mean * mean), min(1.0, left_then / left)

    def ahead(self, shown_tokens: float) -> Ahead:
        """`growth` at all HORIZONS for a work in the middle of the bin of its shown tokens; O(1) once a bin was asked for."""
        at = bin_of(shown_tokens)
        found = self._ahead.get(at)
        if found is None:
            middle = (EDGES[at] + EDGES[at + 1]) / 2 if at else 0.0
            means, variances, survives = zip(*(self.growth(middle, horizon) for horizon in HORIZONS), strict=True)
            found = self._ahead[at] = means, variances, survives
        return found

    def _upto(self, tokens: float) -> tuple[float, float, float]:
        """(S, A, B) at a length."""
        at = bin_of(tokens)
        low, high, s_low, s_high = EDGES[at], EDGES[at + 1], self.at_edges[at], self.at_edges[at + 1]
        s_here = s_low + (s_high - s_low) * (tokens - low) / (high - low)
        area, moment = _integrals(low, tokens, s_low, s_here)
        return s_here, self._a[at] + area, self._b[at] + moment


class Lengths:
    """What is known of output lengths, for every tenant, class and model. `begin` and `go_on`, or `rebuild` at once,
    make what `of` hands out."""

    __slots__ = ("_built", "_known", "_left", "_still", "_unit")

    def __init__(self) -> None:
        self._known: dict[Key, _Histogram] = {}
        self._built: dict[Key, Survival] = {}
        self._left: deque[Key] = deque()
        self._still: dict[Key, list[float]] = {}
        self._unit = 1.0

    def ended(self, keys: Iterable[Key], tokens: int, *, censored: bool) -> None:
        """A work ended after so many tokens; censored: it would have gone on."""
        self._unit *= 2 ** (1 / HALF_LIFE_WORKS)
        at = bin_of(tokens)
        for key in keys:
            histogram = self._known.pop(key, None)
            if histogram is None:
                if len(self._known) >= KEYS_KEPT:  # the one of which nothing has ended for the longest
                    self._known.pop(next(iter(self._known)))
                histogram = _Histogram()
            self._known[key] = histogram
            (histogram.censored if censored else histogram.ended)[at] += self._unit
        if self._unit > 1e9:
            for histogram in self._known.values():
                histogram.scale(1 / self._unit)
            self._unit = 1.0

    def rebuild(self, running: Iterable[tuple[Iterable[Key], int]]) -> None:
        """Take in what ended since; running: keys and shown tokens of all works in flight."""
        self.begin(running)
        self.go_on(len(self._left))

    def begin(self, running: Iterable[tuple[Iterable[Key], int]]) -> None:
        """Begin a rebuild, that `go_on` brings to its end: the coarse levels first, then what runs."""
        self._still = {}
        for keys, tokens in running:
            at = bin_of(tokens)
            for key in keys:
                self._still.setdefault(key, [0.0] * BINS)[at] += 1.0
        keys_ = self._known.keys() | self._still.keys()
        self._left = deque(sorted(keys_, key=lambda one: (len(one), one not in self._still, one)))
        for key in self._built.keys() - keys_:
            del self._built[key]

    def go_on(self, most: int) -> bool:
        """Rebuild so many more at most; False when all is done."""
        some = min(most, len(self._left))
        for _ in range(some):
            key = self._left.popleft()
            coarser = self._built.get(key[:-1] if len(key) == 3 else key[1:], PRIOR)
            self._built[key] = self._blend(self._known.get(key), self._still.get(key), coarser)
        return some > 0

    def of(self, keys: Iterable[Key]) -> Survival:
        """The finest that is known, as of the last rebuild."""
        for key in keys:
            found = self._built.get(key)
            if found is not None:
                return found
        return PRIOR

    def _blend(self, known: _Histogram | None, still: list[float] | None, coarser: Survival) -> Survival:
        unit = 1 / self._unit
        ended = [0.0] * BINS if known is None else [one * unit for one in known.ended]
        censored = [0.0] * BINS if known is None else [one * unit for one in known.censored]
        if still is not None:
            censored = [one + other for one, other in zip(censored, still, strict=True)]
        # The coarser level enters as BELIEVED_WORKS works of its own: the weight n/(n + 20), and its tail beyond all seen.
        prior = [
            BELIEVED_WORKS * (above - below)
            for above, below in zip(coarser.at_edges, coarser.at_edges[1:], strict=False)
        ]
        ended = [one + other for one, other in zip(ended, prior, strict=True)]
        leaving = [one + other for one, other in zip(ended, censored, strict=True)]
        at_risk = [*accumulate(reversed(leaving))][::-1]
        survives, found = 1.0, [1.0]
        for gone, gave_up, risk in zip(ended, censored, at_risk, strict=True):
            exposed = risk - gave_up / 2  # censored within the bin: half of it at risk, the actuary's rule
            survives *= max(0.0, 1 - gone / exposed) if exposed > 0 else 0.0
            found.append(survives)
        return Survival(found)

    # -- keeping -------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Mapping[str, object]:
        """Classes and models only: tenants are many, and learned again within twenty works."""
        return {
            "\n".join(key): {
                "ended": _sparse(histogram.ended, 1 / self._unit),
                "censored": _sparse(histogram.censored, 1 / self._unit),
            }
            for key, histogram in self._known.items()
            if len(key) < 3
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over a predecessor's; what cannot be read is left out."""
        self._unit = 1.0
        for name, one in state.items():
            if isinstance(one, Mapping):
                histogram = _Histogram(_dense(one.get("ended")), _dense(one.get("censored")))
                self._known[tuple(str(name).split("\n"))] = histogram
        self.rebuild(())

    def __repr__(self) -> str:
        return f"<Lengths {len(self._known)} histograms>"


class _Histogram:
    __slots__ = ("censored", "ended")

    def __init__(self, ended: list[float] | None = None, censored: list[float] | None = None) -> None:
        self.ended = [0.0] * BINS if ended is None else ended
        self.censored = [0.0] * BINS if censored is None else censored

    def scale(self, factor: float) -> None:
        self.ended = [one * factor for one in self.ended]
        self.censored = [one * factor for one in self.censored]


def _integrals(low: float, high: float, s_low: float, s_high: float) -> tuple[float, float]:
    """∫ S and ∫ t S over an interval on which S is linear."""
    width = high - low
    area = width * (s_low + s_high) / 2
    return area, low * area + width * width * (s_low + 2 * s_high) / 6


def _prior() -> Survival:
    """Lognormal, cut at the end: most answers are short, some are very long."""
    scale = PRIOR_SIGMA * math.sqrt(2)
    above = [1.0]
    above += [math.erfc(math.log(edge / PRIOR_MEDIAN_TOKENS) / scale) / 2 for edge in EDGES[1:]]
    above[-1] = 0.0
    return Survival(above)


PRIOR = _prior()


def _sparse(counts: list[float], unit: float) -> dict[str, float]:
    return {str(at): round(count * unit, 3) for at, count in enumerate(counts) if count * unit >= 0.001}


def _dense(counts: object) -> list[float]:
    found = [0.0] * BINS
    if isinstance(counts, Mapping):
        for at, count in counts.items():
            if str(at).isdigit() and int(at) < BINS and isinstance(count, int | float):
                found[int(at)] = float(count)
    return found
