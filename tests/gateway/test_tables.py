"""No word of a table is cut, however narrow the place for it."""

from __future__ import annotations

import pytest
from rich.table import Table

from gateway.tables import PIPED_WIDTH, table_console, uncut

NAME = "pass_least_outstanding_with_a_long_name"


def drawn() -> Table:
    table = Table()
    for head in ("policy", *map(str, range(9))):
        table.add_column(head)
    table.add_row(NAME, *["1,234.567"] * 9)
    return uncut(table)


@pytest.mark.parametrize("columns", [None, 60, 80])
def test_every_character_of_a_name_is_shown(
    columns: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if columns is not None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(columns))

    table_console().print(drawn())

    told = capsys.readouterr().out
    first = "".join(line.split("│")[1].strip() for line in told.splitlines() if line.startswith("│"))
    assert first == NAME
    assert "…" not in told
    assert max(len(line) for line in told.splitlines() if line.startswith("│")) <= (columns or PIPED_WIDTH)
