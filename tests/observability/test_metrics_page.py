"""The metrics page of the documents is what the table says."""

from __future__ import annotations

from pathlib import Path

from gateway.observe.metrics_page import page

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_metrics_page_is_written_from_the_table() -> None:
    assert DOCUMENT.read_text() == page(), "python -m gateway.observe.metrics_page > docs/metrics.md"
