"""docs/settings.md names every setting with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from gateway import settings_file
from tests.field_tables import declared, documented

PAGE = (Path(__file__).parents[2] / "docs/settings.md").read_text(encoding="utf-8")
SECTIONS: dict[str, type] = {
    "The file": settings_file.SettingsDocument,
    "engines[]": settings_file.EngineEntry,
    "engines[].gpu": settings_file.GpuEntry,
    "timeouts": settings_file.TimeoutsSection,
    "limits": settings_file.LimitsSection,
    "health": settings_file.HealthSection,
    "recorder": settings_file.RecorderSection,
    "traces": settings_file.TracesSection,
}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_setting_is_documented_with_its_default(title: str) -> None:
    assert documented(PAGE, title) == declared(SECTIONS[title])


def test_every_part_of_the_settings_file_has_its_section() -> None:
    parts = {
        one
        for one in vars(settings_file).values()
        if isinstance(one, type) and issubclass(one, BaseModel) and one.__module__ == settings_file.__name__
    }

    assert parts == set(SECTIONS.values())


def test_every_setting_says_what_it_does_and_what_it_costs() -> None:
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| *([^|]*)\|$", PAGE, flags=re.MULTILINE)

    assert [field for field, default, said in rows if not said and default.strip() != "below"] == []
