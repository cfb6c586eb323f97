"""Report for a terminal: verdict, tables, findings and notes, by default in 80 columns."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gputrace.model.results import Analysis
from gputrace.report.tables import TEXT_COLUMNS, ShownLimits, Table, tables_after, tables_before
from gputrace.report.wording import advice, notes, savings, verdict
from gputrace.sanitize import sentence

_STYLES: Final = {"high": "bold red", "medium": "yellow", "low": "cyan", "info": "dim"}


def render(analysis: Analysis, width: int = 80, color: bool = False) -> str:
    """Render a report at most ``width`` columns wide; with ANSI escape sequences if ``color``."""
    names = room_for_names(width, BESIDE_NAMES)
    limits = ShownLimits(
        3, gaps=5, links=4, kernels=8, kernel_name=names, longest_launches=False, causes=6
    )
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
        console.print(Text.assemble(name, said(f"{finding.message}.{savings(analysis, finding)}")))
    after = tables_after(analysis, limits)
    if after and analysis.findings[1:]:
        console.print()
    for table in after:
        print_table(console, table)
    for note in notes(analysis):
        console.print(said(f"note: {note}", "dim"))
    return without_blanks(console).rstrip("\n") + "\n"


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
    text = console.file.getvalue().replace(_NO_BREAK, " ")
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


_NO_BREAK: Final = "\ue000"
"""Stands for a space at which no line breaks; no sanitized text has it."""
_QUANTITY: Final = re.compile(r"(?<=\d) (?=([nµm]?s|[kMG]?B|GB/s|W|MHz|°C)\b)")


def said(text: str, style: str = "") -> Text:
    """Return a sanitized sentence as styled text; a number stays on a line with its unit."""
    return Text(_QUANTITY.sub(_NO_BREAK, sentence(text)), style)


_LEAST_NAME: Final = 24
BESIDE_NAMES: Final = 49
"""Terminal columns that the figures of a kernel take."""


def room_for_names(width: int, beside: int) -> int:
    """Return how long names may be: what figures leave, or a line where they leave too little."""
    return width - beside if width - beside >= _LEAST_NAME else max(width - 2, _LEAST_NAME)


_LEAST_SENTENCE: Final = 28
"""Columns that a sentence gets beside its row; where there are fewer, it stands below."""


def print_table(console: Console, table: Table) -> None:
    """Print a table under its title; no cell is ever cut.

    Where the rows are too wide, the first cell gets a line of its own if it is long, and the
    columns that do not fit follow as a further part of the table, with the first cells again.
    """
    console.print(said(table.title, "bold"))
    widths = [max(map(cell_len, column)) for column in zip(table.header, *table.rows, strict=True)]
    room = console.width - 2
    groups, sentences = _groups(table.header)
    taken = widths[0] + sum(1 + widths[index] for group in groups for index in group)
    above = taken > room and widths[0] > room // 3
    if above:
        widths[0] = 1
    parts: list[list[int]] = [[0]]
    for group in groups:
        if len(parts[-1]) > 1 and sum(1 + widths[i] for i in (*parts[-1], *group)) > room + 1:
            parts.append([0])
        parts[-1] += group
    for part in parts:
        last = sentences if part is parts[-1] else []
        for row in (table.header, *table.rows):
            _print_row(console, row, widths, part, last, is_header=row is table.header)
        console.print()


def _groups(header: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """Return the columns of figures, those without a name with the one before, and of sentences."""
    groups: list[list[int]] = []
    sentences = []
    for index, name in enumerate(header[1:], 1):
        if name in TEXT_COLUMNS:
            sentences.append(index)
        elif name or not groups:
            groups.append([index])
        else:
            groups[-1].append(index)
    return groups, sentences


def _print_row(
    console: Console,
    row: Sequence[str],
    widths: Sequence[int],
    figures: Sequence[int],
    sentences: Sequence[int],
    *,
    is_header: bool,
) -> None:
    """Print the first cell, above the others if it is wider than its column, figures, sentences."""
    line = Text("  ", "dim" if is_header else "")
    name = row[0]
    if cell_len(name) > widths[0]:
        console.print(Padding(Text(name), (0, 0, 0, 2)))
        name = ""
    line.append(name + " " * (widths[0] - cell_len(name)))
    for index in figures[1:]:
        line.append(" " * (1 + widths[index] - cell_len(row[index])) + row[index])
    left = console.width - line.cell_len - 1
    below = []
    for index in sentences:
        if left >= min(widths[index], _LEAST_SENTENCE):
            indent = Text("\n" + " " * (line.cell_len + 1))
            line.append(" ").append(indent.join(said(row[index]).wrap(console, left)))
        elif row[index] and not is_header:
            below.append(Padding(said(row[index]), (0, 0, 0, 4)))
    console.print(line, *below, sep="\n")
