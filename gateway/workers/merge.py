"""One metrics page for several processes: what each counted is sent on and added up, what each measures is merged.

A process tells what it counted *since it last told*, and the supervisor adds that to its own counters and histograms.
So nothing has to be done when a process dies: what it told stays in the sums, they never fall, and what is lost with
it is what it had not told yet (half a second's worth at most, see gateway.workers.worker). The cost follows what has changed,
and a page is rendered from one registry, as in a single process.

Gauges are values of now. They are kept by process, merged by the rule of their row (`Instrument.merge`) when a page is
made, and go with the process.

A row or a label that the other side does not know is passed over: during a rolling restart onto a new version both
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, sub
from typing import Any

from gateway.instruments import INSTRUMENTS
from gateway.series import Labels, Merge
from gateway.telemetry import Telemetry

Told = dict[str, list[list[Any]]]
"""By name of the row, JSON-ready: [labels, amount] of a counter or gauge, [labels, counts, total] of a histogram, and
[trace id, value, time] of those that a trace tells of, where there are any."""

GaugeValues = Mapping[str, Mapping[Labels, float]]
"""By name of the row."""


class Teller:
    """The side that tells. Remembers what was told of each series."""

    __slots__ = ("_counted", "_spread", "_telemetry")

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._counted: dict[tuple[str, Labels], float] = {}
        self._spread: dict[tuple[str, Labels], tuple[list[int], float]] = {}

    def counts(self) -> Told:
        """What was counted since the last call, a new series also when it is at 0. Looks at each series there is."""
        told: Told = {}
        for counter in self._telemetry.counters():
            name = counter.instrument.name
            for labels, tally in counter.children.items():
                was = self._counted.get((name, labels))
                if tally.value != was:
                    self._counted[name, labels] = tally.value
                    told.setdefault(name, []).append([labels, tally.value - (was or 0.0)])
        for histogram in self._telemetry.histograms():
            name = histogram.instrument.name
            for labels, spread in histogram.children.items():
                counts, total = self._spread.get((name, labels), (None, 0.0))
                if spread.counts != counts:
                    self._spread[name, labels] = (spread.counts.copy(), spread.total)
                    grown = spread.counts if counts is None else list(map(sub, spread.counts, counts))
                    marks, spread.marks = spread.marks, None
                    newer = [list(marks.values())] if marks else []
                    told.setdefault(name, []).append([labels, grown, spread.total - total, *newer])
        return told

    def gauges(self) -> Told:
        """All gauges, after a refresh."""
        self._telemetry.refresh()
        return {
            gauge.instrument.name: [[labels, value] for labels, value in gauge.children.items()]
            for gauge in self._telemetry.gauges()
            if gauge.children
        }


def add_counts(telemetry: Telemetry, told: Told) -> None:
    """Add what one process counted to the sums of all."""
    for name, series in told.items():
        row = _ROWS.get(name)
        for labels, *amounts in series:
            if row is None or len(labels) != len(row.labels):
                continue
            if len(amounts) == 1:
                telemetry.add(row, amounts[0], *labels)
            else:
                telemetry.keep(row, *labels).absorb(*amounts)


def gauge_values(told: Told) -> GaugeValues:
    """One process's gauges as they are kept."""
    return {name: {tuple(labels): value for labels, value in series} for name, series in told.items()}


@dataclass(frozen=True, slots=True)
class Measured:
    """One process's gauges and whether it is the one that decides."""

    values: GaugeValues = field(default_factory=dict)
    decides: bool = False


def merge_gauges(telemetry: Telemetry, processes: Sequence[Measured]) -> None:
    """Replace every gauge by what the processes measure, each row merged by its rule."""
    for gauge in telemetry.gauges():
        row, merged = gauge.instrument, dict[Labels, float]()
        for process in processes:
            if process.decides or row.merge is not Merge.DECIDER:
                for labels, value in process.values.get(row.name, {}).items():
                    if len(labels) == len(row.labels):
                        merged[labels] = _JOIN[row.merge](merged[labels], value) if labels in merged else value
        gauge.replace(merged)


_ROWS = {row.name: row for row in INSTRUMENTS}

_JOIN: Mapping[Merge, Callable[[float, float], float]] = {
    Merge.SUM: add,
    Merge.MIN: min,
    Merge.MAX: max,
    Merge.DECIDER: max,  # two deciders are there only while one takes over from the other
}
