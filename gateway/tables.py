"""Tables for people, on a terminal as wide as it is and in a pipe as wide as they read well; no word of them is ever cut."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 130


def table_console() -> Console:
    """Standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPED_WIDTH)


def uncut(table: Table) -> Table:
    """The table, with words that are wider than their column on several lines."""
    for column in table.columns:
        column.overflow = "fold"
    return table
