"""The results for a terminal, as wide as that is."""

from __future__ import annotations

import io
from typing import Final

from rich.cells import cell_len
from rich.text import Text

from gputrace.bench.answer import Summary
from gputrace.bench.views.tables import headline, same, tables
from gputrace.cleaning import clean
from gputrace.views.tables import Table
from gputrace.views.text import open_console, print_table

_WRAPPED: Final = 16
"""What a column needs that `print_table` wraps."""


def render(summary: Summary, width: int = 80, color: bool = False) -> str:
    """The results, at most ``width`` columns wide; with ``color``, escape sequences in it."""
    out = io.StringIO()
    console = open_console(out, width, color)
    console.print(Text(clean(summary.title), style="bold"))
    if summary.question:
        console.print(Text(clean(summary.question, 1000)))
    console.print(Text(headline(summary), style="green" if _all_well(summary) else "yellow"))
    if summary.same:
        console.print(Text(f"The same in all runs: {clean(same(summary))}.", style="dim"))
    console.print()
    for table in tables(summary):
        print_table(console, fitted(table, width - 2))
    for note in summary.notes:
        console.print(Text(f"note: {clean(note, 1000)}", style="dim"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _all_well(summary: Summary) -> bool:
    done = all(row.done and not row.failed for row in summary.rows)
    return done and all(check.ok is not False for check in summary.checks)


def fitted(table: Table, width: int) -> Table:
    """The table with its longest column cut, if need be its last ones left out, until it fits."""
    while (over := sum(widths := _widths(table)) - width) > 0 and len(table.header) > 2:
        longest = max(range(len(widths)), key=widths.__getitem__)
        least = max(width // 3, 12)
        if widths[longest] > least:
            table = _cut(table, longest, max(widths[longest] - over, least) - 1)
        else:
            table = Table(table.title, table.header[:-1], tuple(row[:-1] for row in table.rows))
    return table


def _widths(table: Table) -> list[int]:
    """Columns that each column of the table takes, with the space beside it; some wrap."""
    return [
        1 + min(max(map(cell_len, column)), _WRAPPED if column[0] == "evidence" else 1 << 16)
        for column in zip(table.header, *table.rows, strict=True)
    ]


def _cut(table: Table, place: int, most: int) -> Table:
    """One column with no cell longer than that."""
    rows = (
        tuple(clean(cell, most) if at == place else cell for at, cell in enumerate(row))
        for row in table.rows
    )
    header = tuple(
        clean(cell, most) if at == place else cell for at, cell in enumerate(table.header)
    )
    return Table(table.title, header, tuple(rows))
