"""Every panel of every dashboard shows something on a real Prometheus that scrapes a real gateway under load."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import pytest_asyncio

from gateway.observe.boards import BOARDS, NEW_POLICY
from gateway.observe.panels import Board
from tests.end_to_end.engine_process import eventually
from tests.observability.prometheus import Prometheus, Server, monitoring
from tests.observability.stage import Stage, loaded, stage

pytestmark = [pytest.mark.observability, pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

LOAD_S = 14.0
WITHIN_S = 60.0
RANGE = "20s"
SLOW = {"Joules of a prompt token and of a generated one": "a regression over minutes"}
"""Panels that a test cannot wait for, and why."""


@dataclass
class Watched:
    """What was scraped while everything happened."""

    stage: Stage
    prometheus: Prometheus
    alertmanager: Server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    async with (
        stage(folder) as on,
        monitoring(folder / "monitoring", on.gateway.admin_url) as (prometheus, alertmanager),
        AsyncExitStack() as stack,
    ):
        await eventually(lambda: prometheus.points("headrace_gpu_idle_power_watts"), WITHIN_S)
        await stack.enter_async_context(loaded(on))
        await asyncio.sleep(LOAD_S / 2)
        on.new_policy(bulk_queue=9)
        await asyncio.sleep(LOAD_S / 2)
        yield Watched(on, prometheus, alertmanager)


def asked(expr: str, board: Board) -> str:
    """An expression as Grafana sends it when a reader has chosen All."""
    for name in board.variables:
        expr = expr.replace(f"${name}", ".*")
    expr = expr.replace("$__rate_interval", RANGE)
    assert not re.findall(r"\$\w+", expr), expr
    return expr


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
async def test_every_panel_shows_something(watched: Watched, board: Board) -> None:
    wanted = {(panel.title, query.expr) for panel in board.panels for query in panel.queries if panel.title not in SLOW}

    try:
        async with asyncio.timeout(WITHIN_S):
            while wanted:
                wanted = {
                    (title, expr) for title, expr in wanted if not await watched.prometheus.points(asked(expr, board))
                }
                await asyncio.sleep(0.5 if wanted else 0)
    except TimeoutError:
        pass

    assert sorted(wanted) == [], watched.stage.gateway.log[-3000:]


async def test_a_new_policy_is_marked_on_every_time_panel(watched: Watched) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await watched.prometheus.points(NEW_POLICY, last_s=60):
            await asyncio.sleep(0.5)


async def test_an_engine_that_falls_again_and_again_is_told_as_found_once(watched: Watched) -> None:
    """It drops every request, and is looked at again after each fall."""
    found = [line for line in watched.stage.gateway.log.splitlines() if "engine found" in line and '"e2"' in line]

    assert len(found) == 1


async def test_every_recorded_series_is_there(watched: Watched) -> None:
    rules = await watched.prometheus.get("/api/v1/rules", type="record")
    names = [rule["name"] for group in rules["data"]["groups"] for rule in group["rules"]]
    assert names

    async with asyncio.timeout(WITHIN_S):
        while [name for name in names if not await watched.prometheus.points(name)]:
            await asyncio.sleep(0.5)


async def test_an_engine_that_goes_away_is_on_the_alertmanagers_page(watched: Watched) -> None:
    watched.stage.broken.health = 503

    async with asyncio.timeout(WITHIN_S):
        while True:
            alerts = await watched.alertmanager.get("/api/v2/alerts")
            down = [alert for alert in alerts if alert["labels"]["alertname"] == "HeadraceEngineDown"]
            if down:
                break
            await asyncio.sleep(0.5)
    assert down[0]["labels"]["engine"] == "e2"
    assert down[0]["annotations"]["runbook_url"] == "docs/operations.md#headraceenginedown"


async def test_nothing_was_wrong_with_the_rules(watched: Watched) -> None:
    rules = await watched.prometheus.get("/api/v1/rules")

    assert [
        rule["lastError"] for group in rules["data"]["groups"] for rule in group["rules"] if rule.get("lastError")
    ] == []
