"""Cheap counters, gauges and histograms, and their exposition: the machine below the table in `gateway.instruments`.

The client library's `labels().observe()` costs ten times what a list store does, and would be paid on the path of
every request. So a kept child here is a list, an increment is one store, and the library only does what it is good
at: the two text formats.

Invariants:

* Bounded. A family stops at `SERIES_MAX` children and folds all further label values into one child of `other`s; a
  label value is cut at `LABEL_MAX_CHARS`.
* Only finite numbers. A gauge set to NaN or an infinity loses its series; unknown is absent, never 0.
* `Registry.render` may run in a thread beside the loop: it copies each dict and each child in one step of the
  interpreter, so a scrape sees every child whole, though not all of one instant.

Labels are given by position, in the order of the table. Nothing here knows what any number means.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Exemplar

OTHER = "other"
SERIES_MAX = 2_000
LABEL_MAX_CHARS = 128

Labels = tuple[str, ...]

Mark = tuple[str, float, float]
"""A trace's id, the value that was counted for it, and when, in seconds of wall time."""


class Kind(StrEnum):
    """What an instrument does with its numbers."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(StrEnum):
    """What one gauge means when several processes each have a value for it."""

    DECIDER = "decider"
    """Only what the process that decides says: it alone knows the whole pool."""
    SUM = "sum"
    MIN = "min"
    MAX = "max"


@dataclass(frozen=True, slots=True, eq=False)
class Instrument:
    """One row of the table: a key of dicts on hot paths, so it is hashed as the object that it is, not by its fields.

    name     as exposed, base unit last; counters end in _total
    unit     base unit ("seconds", "tokens", "bytes", "ratio"); "" for plain counts
    help     one sentence for the operator
    labels   names of the labels, in the order in which values are given
    buckets  upper bounds of a histogram, ascending, without +Inf
    merge    of a gauge; counters and histograms are always summed
    """

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    merge: Merge = Merge.DECIDER


class Tally:
    """One series that only grows. `value` is public so that a kept tally costs one store to raise."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Spread:
    """One histogram series: counts per bucket, the last one for everything past the topmost bound, and the sum."""

    __slots__ = ("_bounds", "counts", "marks", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.marks: dict[int, Mark] | None = None

    def observe(self, value: float) -> None:
        """Count one value; one that is not finite is dropped, since it would poison the sum for ever."""
        if math.isfinite(value):
            self.counts[bisect_left(self._bounds, value)] += 1
            self.total += value

    def mark(self, trace_id: str, value: float, at_s: float) -> None:
        """Name the trace of a value that was counted: the newest one of each bucket is kept. at_s: wall time."""
        if math.isfinite(value):
            marks = self.marks
            if marks is None:
                marks = self.marks = {}
            marks[bisect_left(self._bounds, value)] = (trace_id, value, at_s)

    def absorb(self, counts: Sequence[int], total: float, marks: Sequence[Mark] = ()) -> None:
        """Add what another process counted. Its bounds are ours as far as both go (`Histogram` only adds to the end):
        what lies past the topmost bound that both have is past all of ours."""
        both = min(len(counts), len(self.counts)) - 1
        past = self.counts[both:-1]
        merged = [ours + theirs for ours, theirs in zip(self.counts[:both], counts[:both], strict=True)]
        self.counts = [*merged, *past, self.counts[-1] + sum(counts[both:])]
        self.total += total
        for mark in marks:
            self.mark(*mark)


class Counter:
    """All series of one counter."""

    __slots__ = ("children", "instrument")

    def __init__(self, instrument: Instrument) -> None:
        self.instrument = instrument
        self.children: dict[Labels, Tally] = {}

    def child(self, *labels: str) -> Tally:
        """The series of these label values; keep it where the same ones come again."""
        tally = self.children.get(labels)
        if tally is None:
            labels = _bounded(labels, self.instrument, self.children)
            tally = self.children.setdefault(labels, Tally())
        return tally

    def add(self, amount: float, *labels: str) -> None:
        """Raise one series by `amount`, >= 0."""
        self.child(*labels).value += amount

    def family(self) -> Metric:
        """What the client library renders."""
        name = self.instrument.name.removesuffix("_total")
        family = CounterMetricFamily(name, self.instrument.help, labels=self.instrument.labels)
        for labels, tally in list(self.children.items()):
            family.add_metric(labels, tally.value)
        return family


class Gauge:
    """All series of one gauge. Setting None, NaN or an infinity removes the series."""

    __slots__ = ("_by_first", "children", "instrument")

    def __init__(self, instrument: Instrument) -> None:
        self.instrument = instrument
        self.children: dict[Labels, float] = {}
        self._by_first: dict[str, dict[Labels, None]] = {}

    def set(self, value: float | None, *labels: str) -> None:
        """Put one series to `value`, or take it away when the value is unknown."""
        if value is None or not math.isfinite(value):
            self.children.pop(_cut(labels), None)
            return
        if labels in self.children:
            self.children[labels] = value
            return
        key = _cut(labels)
        if key not in self.children:
            key = _bounded(key, self.instrument, self.children)
            if key:
                self._by_first.setdefault(key[0], {})[key] = None
        self.children[key] = value

    def set_only(self, values: Mapping[Labels, float]) -> None:
        """Put these series, and take every other one away; cheaper than to clear it and set each anew."""
        for labels in self.children.keys() - values.keys():
            self.set(None, *labels)
        for labels, value in values.items():
            self.set(value, *labels)

    def drop(self, first_label: str) -> None:
        """Take away every series whose first label is this: the thing it told of is gone. Costs what it takes away."""
        for labels in self._by_first.pop(first_label, ()):
            self.children.pop(labels, None)

    def clear(self) -> None:
        """Take away every series."""
        self.replace({})

    def replace(self, children: Mapping[Labels, float]) -> None:
        """Put these in the place of all series."""
        self.children = dict(children)
        self._by_first = {}
        for labels in self.children:
            if labels:
                self._by_first.setdefault(labels[0], {})[labels] = None

    def family(self) -> Metric:
        """What the client library renders."""
        family = GaugeMetricFamily(self.instrument.name, self.instrument.help, labels=self.instrument.labels)
        for labels, value in list(self.children.items()):
            family.add_metric(labels, value)
        return family


class Histogram:
    """All series of one histogram."""

    __slots__ = ("_bound_texts", "_bounds", "children", "instrument")

    def __init__(self, instrument: Instrument, *, top: float = 0.0) -> None:
        """top: the largest value that must be told from a larger one; bounds are doubled until one reaches it."""
        bounds = list(instrument.buckets)
        while bounds[-1] < top:
            bounds.append(bounds[-1] * 2)
        self.instrument = instrument
        self._bounds = tuple(bounds)
        self._bound_texts = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self.children: dict[Labels, Spread] = {}

    def child(self, *labels: str) -> Spread:
        """The series of these label values; keep it where the same ones come again."""
        spread = self.children.get(labels)
        if spread is None:
            labels = _bounded(labels, self.instrument, self.children)
            spread = self.children.setdefault(labels, Spread(self._bounds))
        return spread

    def observe(self, value: float, *labels: str) -> None:
        """Count one value in one series."""
        self.child(*labels).observe(value)

    def family(self) -> Metric:
        """What the client library renders."""
        family = HistogramMetricFamily(self.instrument.name, self.instrument.help, labels=self.instrument.labels)
        for labels, spread in list(self.children.items()):
            total = spread.total
            counted = list(zip(self._bound_texts, accumulate(spread.counts[:]), strict=True))
            family.add_metric(labels, _with_exemplars(counted, spread.marks), total)
        return family


class Registry:
    """The families of one process, in the order of the table, and their text."""

    __slots__ = ("_families", "_registry")

    def __init__(self, families: Sequence[Counter | Gauge | Histogram]) -> None:
        self._families = families
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every family that has a series (the client library's custom collector protocol)."""
        for family in self._families:
            if family.children:
                yield family.family()

    def describe(self) -> list[Metric]:
        """Nothing: names are unique by the table's own test, so that registering need not collect."""
        return []

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format that `accept` prefers (text 0.0.4 or OpenMetrics)."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


def _with_exemplars(
    counted: list[tuple[str, int]], marks: dict[int, Mark] | None
) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Buckets as the client library renders them; those that a trace tells of lead to it in the OpenMetrics format."""
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = [*counted]
    for place, (trace_id, value, at_s) in (marks or {}).copy().items():
        buckets[place] = (*counted[place], Exemplar({"trace_id": trace_id}, value, at_s))
    return buckets


def _bounded(labels: Labels, instrument: Instrument, children: Mapping[Labels, object]) -> Labels:
    """The labels under which a new child may be kept."""
    if len(labels) != len(instrument.labels):
        raise ValueError(f"{instrument.name}: got {len(labels)} label values for {instrument.labels}")
    if len(children) >= SERIES_MAX:
        return (OTHER,) * len(labels)
    return _cut(labels)


def _cut(labels: Labels) -> Labels:
    """The labels, none of them longer than a label may be."""
    if max(map(len, labels), default=0) <= LABEL_MAX_CHARS:
        return labels
    return tuple(label[:LABEL_MAX_CHARS] for label in labels)
