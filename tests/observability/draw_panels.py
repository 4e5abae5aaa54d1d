"""Draw dashboards as SVG from a real Prometheus that scrapes a real gateway under load.

    PYTHONPATH=. python tests/observability/draw_panels.py docs/observability 120

draws the seconds given. No Grafana is needed: titles and queries are those of the board, drawn by our own hand for charts.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from pathlib import Path

from gateway.observe.boards import engines, overview, queues
from gateway.observe.panels import Board, Draw
from gateway.replay.chart import Line, Panel, svg
from tests.observability.prometheus import Prometheus, monitoring
from tests.observability.stage import loaded, stage
from tests.observability.test_live_panels import asked

DRAWN = (overview.BOARD, queues.BOARD, engines.BOARD)
"""The way from a slow answer to its reason."""
SHORT = {"percentunit": "", "reqps": "/s", "cps": "/s", "watt": "W"}
UNNAMED = re.compile(r"\{\{\w+\}\}")
"""A label that a series does not have: nothing in a legend, as in Grafana."""
LINES_MAX = 6
"""A panel with more series would be unreadable at this size: those with the highest values are drawn."""


async def drawn(prometheus: Prometheus, board: Board, from_s: float) -> str:
    """The board's panels over time, one below another."""
    panels = []
    for panel in board.panels:
        if panel.draw in {Draw.STAT, Draw.HEATMAP}:
            continue
        lines = []
        for query in panel.queries:
            answer = await prometheus.get(
                "/api/v1/query_range", query=asked(query.expr, board), start=from_s, end=time.time(), step=1
            )
            for series in answer["data"]["result"]:
                name = query.legend
                for label, value in series["metric"].items():
                    name = name.replace(f"{{{{{label}}}}}", value)
                name = UNNAMED.sub("", name).strip()
                points = [(at_s - from_s, float(value)) for at_s, value in series["values"] if value != "NaN"]
                lines.append(Line(name or panel.title, points))
        lines.sort(key=lambda line: -max((value for _, value in line.points), default=0.0))
        panels.append(
            Panel(panel.title, lines[:LINES_MAX], SHORT.get(panel.unit, panel.unit if panel.unit == "s" else ""))
        )
    return svg(board.title, panels)


async def main(folder: Path, seconds: float) -> None:
    """Run everything, wait, draw."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        async with (
            stage(Path(scratch)) as on,
            monitoring(Path(scratch) / "monitoring", on.gateway.admin_url) as (prometheus, _),
        ):
            from_s = time.time()
            async with loaded(on):
                await asyncio.sleep(seconds / 2)
                on.new_policy(bulk_queue=9)
                await asyncio.sleep(seconds / 2)
                for board in DRAWN:
                    picture = await drawn(prometheus, board, from_s)
                    (folder / f"{board.uid}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
