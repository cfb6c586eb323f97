"""Tables of plugins' analyzers."""

from __future__ import annotations

from gputrace.analyzers.results import ExtraTable
from gputrace.views.tables import Table


def extra_table(table: ExtraTable) -> Table:
    """A plugin's table; numbers with four digits, what is not known as a dash."""
    rows = tuple(tuple(map(_cell, row)) for row in table.rows)
    return Table(table.title, table.header, rows)


def _cell(value: str | int | float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
