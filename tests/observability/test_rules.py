"""Rules and alerts: promtool has tried each of them, they ask for what there is, and each alert has its run-book."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gateway.instruments import INSTRUMENTS
from tests.observability.test_dashboards import METRIC, exposed

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "gateway" / "observe" / "prometheus"
TRIED = [Path(__file__).parent / name for name in ("alerts_test.yml", "alerts_days_test.yml")]
OPERATIONS = ROOT / "docs" / "operations.md"
SECTION = re.compile(r"(?m)^### (Headrace\w+)$")


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path.read_text())


RULES = [
    rule
    for name in ("headrace-rules.yml", "headrace-alerts.yml")
    for group in read(FOLDER / name)["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]


@pytest.mark.observability
@pytest.mark.parametrize(
    "command",
    [
        ["promtool", "check", "config", str(FOLDER / "prometheus.yml")],
        ["promtool", "check", "rules", str(FOLDER / "headrace-rules.yml"), str(FOLDER / "headrace-alerts.yml")],
        ["promtool", "test", "rules", *map(str, TRIED)],
        ["amtool", "check-config", str(FOLDER / "alertmanager.yml")],
    ],
    ids=lambda command: " ".join(command[:3]),
)
def test_the_tools_of_prometheus_find_nothing_wrong(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_only_for_metrics_of_the_table(rule: dict[str, Any]) -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    plain = re.sub("|".join(sorted(map(re.escape, recorded), key=len, reverse=True)), "", rule["expr"])

    assert set(METRIC.findall(plain)) - exposed() == set()


def test_a_recorded_series_is_named_by_level_metric_and_operation() -> None:
    names = {row.name for row in INSTRUMENTS}

    for rule in RULES:
        if "record" in rule:
            assert re.fullmatch(r"(class|engine):headrace_[a-z_]+:[a-z0-9_]+", rule["record"])
            assert rule["record"] not in names


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_was_seen_to_fire_and_to_stay_silent(alert: dict[str, Any]) -> None:
    tried = [
        one
        for file in TRIED
        for test in read(file)["tests"]
        for one in test["alert_rule_test"]
        if one["alertname"] == alert["alert"]
    ]

    assert [one for one in tried if one["exp_alerts"]], "no case in which it fires"
    assert [one for one in tried if not one["exp_alerts"]], "no case in which it stays silent"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_leads_to_its_section_of_the_run_book(alert: dict[str, Any]) -> None:
    name = alert["alert"]

    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert alert["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
    assert name in SECTION.findall(OPERATIONS.read_text())


def test_the_run_book_has_no_section_for_an_alert_that_is_none() -> None:
    assert SECTION.findall(OPERATIONS.read_text()) == [alert["alert"] for alert in ALERTS]
