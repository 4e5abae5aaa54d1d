"""Writes Prometheus text: samples with labels, and histograms that cost one bisection per observation.

Not prometheus-client, because the labels' order, the `_created` gauges and the names with a colon have to come out as
the real engines write them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence


class Histogram:
    """Counts per bucket; bounds ascend, +Inf is implied."""

    __slots__ = ("_counts", "bounds", "count", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `times` observations of the same value."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.count += times
        self.total += value * times

    def cumulative(self) -> Iterable[tuple[str, int]]:
        """(le, observations at most le), the last with le "+Inf"."""
        seen = 0
        for bound, count in zip(self.bounds, self._counts, strict=False):
            seen += count
            yield str(float(bound)), seen
        yield "+Inf", self.count


Sample = tuple[Mapping[str, str], float]
"""Labels beyond those that every sample carries, and the value."""


class Exposition:
    """One scrape being written.

    labels      carried by every sample; all are written in alphabetical order, as prometheus-client does
    created_s   wall time at which the counters began, told in the `_created` gauges
    """

    def __init__(self, labels: Mapping[str, str], *, created_s: float) -> None:
        self._labels = dict(labels)
        self._created_s = created_s
        self._lines: list[str] = []

    def gauge(self, name: str, text: str, *samples: Sample) -> None:
        """A value that goes up and down."""
        self._head(name, text, "gauge")
        for labels, value in samples:
            self._sample(name, labels, value)

    def counter(self, name: str, text: str, *samples: Sample) -> None:
        """A counter, whose name ends in _total, and the gauge of when each series began."""
        self._head(name, text, "counter")
        for labels, value in samples:
            self._sample(name, labels, value)
        created = name.removesuffix("_total") + "_created"
        self._head(created, text, "gauge")
        for labels, _ in samples:
            self._sample(created, labels, self._created_s)

    def plain_counter(self, name: str, *samples: Sample) -> None:
        """A counter without help text, suffix or creation time."""
        self._head(name, "", "counter")
        for labels, value in samples:
            self._sample(name, labels, value)

    def plain_histogram(self, name: str, histogram: Histogram, text: str = "") -> None:
        """Buckets, count and sum."""
        self._head(name, text, "histogram")
        bucket = self._series(f"{name}_bucket", {"le": _BOUND})  # the rest of it is the same for each
        for bound, count in histogram.cumulative():
            self._lines.append(f"{bucket.replace(_BOUND, bound)} {float(count)!r}")
        self._sample(f"{name}_count", {}, histogram.count)
        self._sample(f"{name}_sum", {}, histogram.total)

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """The same and the gauge of when it began."""
        self.plain_histogram(name, histogram, text)
        self._head(f"{name}_created", text, "gauge")
        self._sample(f"{name}_created", {}, self._created_s)

    def text(self) -> str:
        """All of it, the last line ended."""
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, text: str, kind: str) -> None:
        if text:
            self._lines.append(f"# HELP {name} {text}")
        self._lines.append(f"# TYPE {name} {kind}")

    def _sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        self._lines.append(f"{self._series(name, labels)} {float(value)!r}")

    def _series(self, name: str, labels: Mapping[str, str]) -> str:
        merged = {**self._labels, **labels}
        inside = ",".join(f'{label}="{_escape(merged[label])}"' for label in sorted(merged))
        return f"{name}{{{inside}}}" if inside else name


_BOUND = "\0"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
