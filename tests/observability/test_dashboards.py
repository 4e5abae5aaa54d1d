"""What the dashboards promise without a Prometheus: they are what the code makes, ask only for what there is, and link."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.instruments import INSTRUMENTS
from gateway.observe import grafana_json, shipped
from gateway.observe.boards import BOARDS, NEW_POLICY, UNUSED
from gateway.observe.panels import Board, Panel
from gateway.series import Kind

METRIC = re.compile(r"headrace_[a-z0-9_]+")
TIME_PANELS = {"timeseries", "heatmap"}
SHIPPED = shipped.dashboards()


def exposed() -> set[str]:
    """Every name that a page of metrics can have."""
    names = {row.name for row in INSTRUMENTS}
    for row in INSTRUMENTS:
        if row.kind is Kind.HISTOGRAM:
            names |= {f"{row.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def asked(board: Board) -> set[str]:
    return {name for panel in board.panels for query in panel.queries for name in METRIC.findall(query.expr)}


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def test_the_dashboards_that_are_shipped_are_those_that_are_described() -> None:
    made = dict(grafana_json.dashboards())
    there = {path.name: path.read_text() for path in grafana_json.FOLDER.glob("*.json")}

    assert there == made, "python -m gateway.observe.grafana_json"


def test_every_metric_is_shown_somewhere_or_says_why_not() -> None:
    used = set().union(*map(asked, BOARDS))
    unseen = {row.name for row in INSTRUMENTS if not any(name.startswith(row.name) for name in used)}

    assert unseen == set(UNUSED)
    assert all(UNUSED.values())


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_no_panel_asks_for_a_metric_that_is_not_in_the_table(board: Board) -> None:
    assert asked(board) - exposed() == set()


@pytest.mark.parametrize("panel", [panel for board in BOARDS for panel in board.panels], ids=lambda panel: panel.title)
def test_every_panel_says_what_it_shows(panel: Panel) -> None:
    assert panel.text.endswith(".")
    assert panel.width in range(4, 25)
    assert len(panel.queries) == len({query.expr for query in panel.queries})


@pytest.mark.parametrize("name", SHIPPED)
def test_no_data_source_is_named(name: str) -> None:
    """OBS-06: a dashboard is right in a Grafana whose Prometheus has any uid, and asks nobody for an import."""
    sources: list[object] = []

    def look(value: object) -> None:
        if isinstance(value, dict):
            sources.extend(inner for key, inner in value.items() if key == "datasource")
            list(map(look, value.values()))
        elif isinstance(value, list):
            list(map(look, value))

    look(SHIPPED[name])

    assert sources
    assert all(source == {"type": "prometheus", "uid": "${ds}"} for source in sources)
    assert "__inputs" not in SHIPPED[name]


@pytest.mark.parametrize("name", SHIPPED)
def test_no_variable_is_pinned_to_a_value_of_ours(name: str) -> None:
    source, *others = SHIPPED[name]["templating"]["list"]

    assert source["type"] == "datasource"
    assert "current" not in source
    assert all(one["current"] == {"text": "All", "value": "$__all"} for one in others)


@pytest.mark.parametrize("name", SHIPPED)
def test_policies_are_marked_on_every_time_panel(name: str) -> None:
    (marks,) = SHIPPED[name]["annotations"]["list"]

    assert marks["enable"]
    assert marks["expr"] == NEW_POLICY
    assert "filter" not in marks, "a filter would leave panels out"
    assert any(panel["type"] in TIME_PANELS for panel in panels(SHIPPED[name]))


def links(board: Board) -> dict[str, set[str]]:
    """The boards that a click leads to, with the labels that it takes along."""
    found: dict[str, set[str]] = {}
    for panel in board.panels:
        if panel.click is not None:
            found.setdefault(panel.click.board, set()).update(panel.click.labels)
    return found


def test_a_click_leads_to_a_board_that_knows_the_labels_it_takes_along() -> None:
    by_uid = {board.uid: board for board in BOARDS}

    for board in BOARDS:
        for uid, labels in links(board).items():
            assert labels <= set(by_uid[uid].variables), (board.uid, uid)


def test_why_was_this_slow_takes_two_clicks() -> None:
    overview, queues = BOARDS[0], BOARDS[1]
    (latency,) = [panel for panel in overview.panels if panel.title == "Token latency"]
    assert latency.click is not None
    assert latency.click.board == queues.uid

    onward = {panel.click.board for panel in queues.panels if panel.click is not None}
    assert onward == {"headrace-engines"}


def test_the_overview_begins_with_memory_queue_and_token_latency() -> None:
    assert [panel.title for panel in BOARDS[0].rows[0][1]] == ["VRAM headroom", "Queue depth", "Token latency"]


@pytest.mark.parametrize("name", SHIPPED)
def test_panels_lie_beside_each_other_and_not_over_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in SHIPPED[name]["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
