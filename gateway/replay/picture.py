"""The picture of a replay: first tokens against the objective, batch, KV memory and queues over time."""

from __future__ import annotations

from gateway.replay.chart import Line, Panel, svg
from gateway.replay.figures import quantile
from gateway.replay.rows import Row
from gateway.replay.world import Played, Seen
from policies.schema import Policy

BIN_S = 10.0


def picture(title: str, played: Played, policy: Policy) -> str:
    """As SVG."""
    return svg(title, [_first_tokens(played, policy), _batch(played), _kv(played), _queues(played, policy)])


def _first_tokens(played: Played, policy: Policy) -> Panel:
    names = [name for name, one in policy.classes.items() if one.has_ttft_objective]
    lines: list[Line] = []
    for name in names:
        rows = [row for row in played.rows if row.class_name == name and row.ttft_s is not None]
        lines.append(Line(name, [(row.arrival_s, row.ttft_s or 0.0) for row in rows], dots=True))
        lines.append(Line(f"{name}, p95 of {BIN_S:g} s", _p95(rows)))
    objectives = ((name, policy.classes[name].ttft_sla_s) for name in names)
    levels = [(f"objective of {name}", sla_s) for name, sla_s in objectives if sla_s is not None]
    return Panel("time to first token", lines, "s", log_y=True, levels=levels)


def _p95(rows: list[Row]) -> list[tuple[float, float]]:
    bins: dict[int, list[float]] = {}
    for row in rows:
        if row.ttft_s is not None:
            bins.setdefault(int(row.arrival_s // BIN_S), []).append(row.ttft_s)
    return [((number + 0.5) * BIN_S, quantile(sorted(ttft_s), 0.95) or 0.0) for number, ttft_s in sorted(bins.items())]


def _batch(played: Played) -> Panel:
    lines = []
    for engine, seen in _by_engine(played):
        lines.append(Line(f"{engine} running", [(one.at_s, float(one.running)) for one in seen]))
        lines.append(Line(f"{engine} waiting", [(one.at_s, float(one.waiting)) for one in seen], dashed=True))
    return Panel("batch: sequences that run and wait in the engine", lines)


def _kv(played: Played) -> Panel:
    lines = [
        Line(engine, [(one.at_s, 100 * one.kv_used_fraction) for one in seen]) for engine, seen in _by_engine(played)
    ]
    return Panel("KV memory in use", lines, "%", levels=[("full", 100.0)])


def _queues(played: Played, policy: Policy) -> Panel:
    first = _by_engine(played)[0][1]
    lines = [Line(name, [(one.at_s, float(one.queued.get(name, 0))) for one in first]) for name in policy.classes]
    return Panel("our queue, by class", lines)


def _by_engine(played: Played) -> list[tuple[str, list[Seen]]]:
    found: dict[str, list[Seen]] = {}
    for one in played.seen:
        found.setdefault(one.engine, []).append(one)
    return sorted(found.items())
