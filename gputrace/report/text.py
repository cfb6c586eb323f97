"""Report for a terminal: verdict, tables, findings and notes, by default in 80 columns."""

from __future__ import annotations

import io
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from gputrace.model.results import Analysis
from gputrace.report.tables import (
    Limits,
    Table,
    advice,
    notes,
    savings,
    tables_after,
    tables_before,
    verdict,
)
from gputrace.sanitize import sentence

_STYLES: Final = {"high": "bold red", "medium": "yellow", "low": "cyan", "info": "dim"}


def render(analysis: Analysis, width: int = 80, color: bool = False) -> str:
    """Render a report at most ``width`` columns wide; with ANSI escape sequences if ``color``."""
    limits = Limits(gpus_across=3, gaps=5, links=4, kernels=8, kernel_name=30)
    console = open_console(width, color)
    style = _STYLES[analysis.findings[0].severity] if analysis.findings else "green"
    console.print(said(verdict(analysis), style))
    for text in advice(analysis):
        console.print(Padding(said(text), (0, 0, 0, 2)))
    console.print()
    for table in tables_before(analysis, limits):
        print_table(console, table)
    for finding in analysis.findings[1:]:
        name = (f"{finding.id}: ", _STYLES[finding.severity])
        message = sentence(finding.message)
        console.print(Text.assemble(name, message, ".", savings(analysis, finding)))
    after = tables_after(analysis, limits)
    if after and analysis.findings[1:]:
        console.print()
    for table in after:
        print_table(console, table)
    for note in notes(analysis):
        console.print(said(f"note: {note}", "dim"))
    return without_blanks(console)


def open_console(width: int, color: bool) -> Console:
    """Open a console that writes into a buffer, with its own width instead of the terminal's."""
    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        # In a notebook rich would display the output itself and leave the buffer empty.
        force_jupyter=False,
        color_system="standard" if color else None,
        highlight=False,
        emoji=False,
        markup=False,
    )


def without_blanks(console: Console) -> str:
    """Return what was printed on `open_console`, without blanks at the ends of lines."""
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n"


def said(text: str, style: str = "") -> Text:
    """Return a sanitized sentence as styled text."""
    return Text(sentence(text), style)


def print_table(console: Console, table: Table) -> None:
    """Print a table under its title; the column ``evidence`` gets the remaining width."""
    console.print(said(table.title, "bold"))
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, name in enumerate(table.header):
        wraps = name == "evidence"
        left = index == 0 or wraps
        drawn.add_column(said(name), justify="left" if left else "right", no_wrap=not wraps)
    for row in table.rows:
        drawn.add_row(*map(said, row))
    console.print(Padding(drawn, (0, 0, 1, 2)))
