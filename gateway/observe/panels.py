"""The words in which a dashboard is described: boards of rows of panels of queries, and the PromQL that recurs.

A description knows nothing of Grafana's JSON (`gateway.observe.grafana_json` makes that), so that what a board asks can
be read, linted and asked of a Prometheus without it. Metrics are named by their rows of the table, never as text.

Gauges are told by every gateway of a pool and agree, so that they are joined by `max`; counters are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gateway.series import Instrument

RANGE = "$__rate_interval"


class Draw(StrEnum):
    """How a panel is drawn."""

    LINES = "lines"
    STACK = "stack"
    STAT = "stat"
    HEATMAP = "heatmap"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and how its series are named, in Grafana's {{label}} form."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Click:
    """Where a click on a series leads: another board, with its variables set from the series' labels."""

    title: str
    board: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    text        one or two sentences for the reader: what it shows, what is good
    unit        Grafana's name of the unit
    steps       (from value, colour), ascending; coloured in stats, drawn as lines elsewhere
    width       of 24
    """

    title: str
    text: str
    queries: tuple[Query, ...]
    unit: str = "short"
    draw: Draw = Draw.LINES
    width: int = 8
    steps: tuple[tuple[float, str], ...] = ()
    low: float | None = 0.0
    high: float | None = None
    click: Click | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. variables: names of the labels that a reader can choose values of."""

    uid: str
    title: str
    text: str
    variables: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in reading order."""
        return tuple(panel for _, panels in self.rows for panel in panels)


def chosen(*labels: str, **equal: str) -> str:
    """A selector: the labels as the reader chose them, others equal to a value."""
    parts = [f'{label}=~"${label}"' for label in labels]
    parts += [f'{label.removesuffix("_")}="{value}"' for label, value in equal.items()]
    return "{" + ",".join(parts) + "}" if parts else ""


def gauge(row: Instrument, by: str, where: str = "", join: str = "max") -> str:
    """A gauge, joined over the gateways that tell it."""
    return f"{join} by ({by}) ({row.name}{where})" if by else f"{join}({row.name}{where})"


def per_second(row: Instrument, by: str, where: str = "") -> str:
    """A counter's rate."""
    rate = f"(rate({row.name}{where}[{RANGE}]))"
    return f"sum by ({by}) {rate}" if by else f"sum{rate}"


def none_is_zero(expr: str) -> str:
    """For what has no series before it happens for the first time."""
    return f"{expr} or vector(0)"


def quantile(part: float, row: Instrument, by: str, where: str = "") -> str:
    """A quantile of a histogram, 0 to 1."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({part:g}, sum by ({labels}) (rate({row.name}_bucket{where}[{RANGE}])))"


def mean(row: Instrument, by: str, where: str = "") -> str:
    """The mean of a histogram's values."""
    return (
        f"sum by ({by}) (rate({row.name}_sum{where}[{RANGE}])) / sum by ({by}) (rate({row.name}_count{where}[{RANGE}]))"
    )


def quantiles(
    row: Instrument, by: str, where: str = "", parts: tuple[float, ...] = (0.5, 0.95, 0.99)
) -> tuple[Query, ...]:
    """Several quantiles, named p50, p95, ..."""
    names = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",") if label)
    return tuple(Query(quantile(part, row, by, where), f"p{part * 100:g} {names}".strip()) for part in parts)
