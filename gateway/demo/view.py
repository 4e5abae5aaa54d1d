"""The demo on a terminal: a live table; without one, a plain line each second.

Pure but for the writing: values in, renderables or text out.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gateway.demo.tally import Tally
from gateway.demo.watch import EngineLine, GatewayPage
from gateway.load.score import Figures

BAR_CELLS = 20
LATE_S = 0.05
"""Of the loop, from which on first tokens are late for want of CPU, whatever is scheduled."""


def plain_line(elapsed_s: float, page: GatewayPage, figures: Mapping[str, Figures]) -> str:
    """All that matters in one line."""
    interactive, bulk = figures["interactive"], figures["bulk"]
    objective_s = page.objective_s.get("interactive")
    return "  ".join(
        (
            f"{elapsed_s:5.0f} s",
            (
                f"interactive: {interactive.running} open, {page.queued.get('interactive', 0)} queued,"
                f" TTFT p50 {_seconds(interactive.ttft_p50_s)} p99 {_seconds(interactive.ttft_p99_s)}"
                f" of SLA {_seconds(objective_s)}, {_share(interactive.attained_fraction)} inside"
            ),
            f"bulk: {bulk.running} open, {page.queued.get('bulk', 0)} queued, {bulk.completed} done",
            f"{interactive.tokens_per_s + bulk.tokens_per_s:.0f} tokens/s ({bulk.tokens_per_s:.0f} bulk)",
        )
    )


def live_view(elapsed_s: float, page: GatewayPage, figures: Mapping[str, Figures], notes: list[str]) -> Group:
    """Classes, engines and notes (URLs, a ready command, the last answer)."""
    return Group(
        Text(f"headrace demo  {elapsed_s:.0f} s", style="bold"),
        _classes(page, figures),
        Text(),
        _engines(page),
        *(Text(note) for note in notes),
    )


def busy_host(lag_s: float | None) -> str:
    """That the host is late, and not the scheduler; "" while it is not. lag_s: of the loop, 99th percentile."""
    if lag_s is None or lag_s <= LATE_S:
        return ""
    return f"this host is too busy: the loop is {lag_s * 1000:.0f} ms late (p99), and every answer with it"


def closing_lines(elapsed_s: float, tallies: Mapping[str, Tally], lag_s: float | None) -> list[str]:
    """What it came to, all in all."""
    lines = [f"After {elapsed_s:.0f} s:"]
    for name, tally in tallies.items():
        of, ttft, sla_s = tally.score.figures(), tally.ttft.spread(), tally.score.ttft_sla_s
        cut = f", {of.running} cut by the end" if of.running else ""
        inside = "" if sla_s is None else f", {_share(of.attained_fraction)} inside the SLA of {_seconds(sla_s)}"
        lines.append(
            f"  {name}: {of.sent} requests ({of.completed} done, {of.refused} refused, {of.failed} failed{cut}){inside},"
            f" TTFT p50 {_seconds(ttft.p50_s)} p99 {_seconds(ttft.p99_s)}, {tally.tokens_seen / elapsed_s:.0f} tokens/s"
        )
    note = busy_host(lag_s)
    return [*lines, f"  {note}"] if note else lines


def _classes(page: GatewayPage, figures: Mapping[str, Figures]) -> Table:
    names = ("class", "open", "queued", "done", "refused", "failed", "TTFT p50", "p99", "SLA", "inside", "tok/s")
    table = Table(*names, box=None, padding=(0, 1, 0, 0), pad_edge=False)  # a frame would not fit 80 columns
    for name, of in figures.items():
        objective_s = page.objective_s.get(name)
        late = objective_s is not None and of.ttft_p99_s is not None and of.ttft_p99_s > objective_s
        table.add_row(
            name,
            str(of.running),
            str(page.queued.get(name, 0)),
            str(of.completed),
            str(of.refused),
            str(of.failed),
            _seconds(of.ttft_p50_s),
            Text(_seconds(of.ttft_p99_s), style="red" if late else "green" if objective_s is not None else ""),
            _seconds(objective_s),
            _share(of.attained_fraction),
            f"{of.tokens_per_s:.0f}",
        )
    return table


def _engines(page: GatewayPage) -> Table:
    table = Table("engine", "state", "in flight / window", "KV cache")
    for name, line in sorted(page.engines.items()):
        table.add_row(name, line.state, _loads(line), _bar(line.kv_used_fraction))
    return table


def _loads(line: EngineLine) -> str:
    names = sorted({*line.in_flight, *line.window})
    return "  ".join(f"{name} {line.in_flight.get(name, 0)}/{line.window.get(name, '-')}" for name in names)


def _bar(fraction: float | None) -> str:
    if fraction is None:
        return "unknown"
    full = round(min(1.0, fraction) * BAR_CELLS)
    return f"{'█' * full}{'░' * (BAR_CELLS - full)} {fraction:4.0%}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _share(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
