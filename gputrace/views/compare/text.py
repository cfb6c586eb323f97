"""The comparison for a terminal, in 80 columns."""

from __future__ import annotations

import io
from typing import Final

from rich.text import Text

from gputrace.analyzers.compare.results import Comparison
from gputrace.cleaning import sentence
from gputrace.views.compare.scaling import scaling_tables
from gputrace.views.compare.tables import notes, tables, verdict
from gputrace.views.text import open_console, print_table, said

_STYLES: Final = {"faster": "bold green", "slower": "bold red", "same": "green"}
_NOTES: Final = {"appeared": "red", "gone": "green", "stayed": "yellow"}
_BESIDE_NAMES: Final = 56
"""Columns that the figures of a kernel take."""


def render(comparison: Comparison, width: int = 80, color: bool = False) -> str:
    """The comparison, at most ``width`` columns wide; with ``color``, escape sequences in it."""
    out = io.StringIO()
    console = open_console(out, width, color)
    console.print(said(verdict(comparison), _STYLES.get(comparison.verdict, "bold")))
    for run in comparison.runs:
        more = f" and {len(run.paths) - 1} more" if len(run.paths) > 1 else ""
        console.print(said(f"  {run.label}: {run.paths[0]}{more}", "dim"), soft_wrap=True)
    console.print()
    for table in (*tables(comparison, max(width - _BESIDE_NAMES, 16)), *scaling_tables(comparison)):
        print_table(console, table)
    for heading, note in notes(comparison):
        console.print(Text.assemble((f"{heading}: ", _NOTES.get(heading, "dim")), sentence(note)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
