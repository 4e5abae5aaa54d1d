"""Dashboards as Grafana reads them, made from their descriptions with Grafana's Foundation SDK.

    python -m gateway.observe.grafana_json        write gateway/observe/grafana/dashboards/*.json anew

The files are data of the wheel; a test compares them with what is made here, so that the SDK is needed by developers
only (extra `dashboards`). A data source is never named: each board has a variable for it, whose default is Grafana's
own default of that kind, so that the same file is right under every provisioning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from gateway.instruments import INSTRUMENTS
from gateway.observe.boards import BOARDS, NEW_POLICY
from gateway.observe.panels import Board, Click, Draw, Panel

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
SOURCE = kinds.DataSourceRef(type_val="prometheus", uid="${ds}")
TAG = "headrace"

_HEIGHT = 8
_STAT_HEIGHT = 4


def dashboards() -> Iterator[tuple[str, str]]:
    """(file name, text) of each dashboard."""
    for board in BOARDS:
        yield f"{board.uid}.json", JSONEncoder(sort_keys=True, indent=1).encode(_dashboard(board)) + "\n"


def _dashboard(board: Board) -> models.Dashboard:
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.text)
        .tags([TAG])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Headrace")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(
            dashboard.AnnotationQuery()
            .name("Policy in force")
            .datasource(SOURCE)
            .enable(True)
            .icon_color("purple")
            .expr(NEW_POLICY)
            .title_format("policy {{version}}")
            .step("30s")
        )
        .with_variable(dashboard.DatasourceVariable("ds").label("Data source").type("prometheus"))
    )
    for label in board.variables:
        made = made.with_variable(_variable(label))
    for title, panels in board.rows:
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(_panel(panel))
    return made.build()


def _variable(label: str) -> dashboard.QueryVariable:
    """All of a label's values, as far as any metric has it; a reader chooses any number of them."""
    row = next(row for row in INSTRUMENTS if label in row.labels)
    return (
        dashboard.QueryVariable(label)
        .label(label.capitalize())
        .query(f"label_values({row.name}, {label})")
        .datasource(SOURCE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .current(models.VariableOption(text="All", value="$__all"))
    )


def _panel(panel: Panel) -> Any:  # the SDK's panel builders share no base class with these methods
    makers: dict[Draw, Any] = {Draw.STAT: _stat, Draw.HEATMAP: _heatmap, Draw.LINES: _lines, Draw.STACK: _lines}
    made = (
        makers[panel.draw](panel)
        .title(panel.title)
        .description(panel.text)
        .datasource(SOURCE)
        .unit(panel.unit)
        .height(_STAT_HEIGHT if panel.draw is Draw.STAT else _HEIGHT)
        .span(panel.width)
    )
    for number, query in enumerate(panel.queries):
        asked = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
        if panel.draw is Draw.HEATMAP:
            asked = asked.format(PromQueryFormat.HEATMAP)
        made = made.with_target(asked.range().exemplar("_bucket" in query.expr))
    if panel.steps:
        base = [models.Threshold(value=None, color=panel.steps[0][1])]
        above = [models.Threshold(value=value, color=color) for value, color in panel.steps[1:]]
        made = made.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps([*base, *above]))
    if panel.click is not None:
        made = made.data_links([_link(panel.click)])
    return made


def _lines(panel: Panel) -> timeseries.Panel:
    stacked = panel.draw is Draw.STACK
    made = (
        timeseries.Panel()
        .fill_opacity(30 if stacked else 8)
        .line_width(1)
        .show_points(kinds.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
    )
    if stacked:
        made = made.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL))
    if panel.steps:
        made = made.thresholds_style(common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED))
    if panel.low is not None:
        made = made.min(panel.low)
    return made if panel.high is None else made.max(panel.high)


def _stat(_panel_of: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(kinds.BigValueGraphMode.AREA)
        .color_mode(kinds.BigValueColorMode.VALUE)
    )


def _heatmap(_panel_of: Panel) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .exemplars_color("rgba(255,0,255,0.8)")
    )


def _link(click: Click) -> dashboard.DashboardLink:
    chosen = "".join(f"&var-{label}=${{__field.labels.{label}}}" for label in click.labels)
    title = click.title
    for label in click.labels:
        title = title.replace(f"{{{{{label}}}}}", f"${{__field.labels.{label}}}")
    return dashboard.DashboardLink(title).url(f"/d/{click.board}?${{ds:queryparam}}{chosen}&${{__url_time_range}}")


def main() -> None:
    """Write every dashboard, and take away what is none any more."""
    texts = dict(dashboards())
    for stale in {path.name for path in FOLDER.glob("*.json")} - set(texts):
        (FOLDER / stale).unlink()
    for name, text in texts.items():
        json.loads(text)
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
