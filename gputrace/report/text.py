"""Report for a terminal, by default in 80 columns."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from itertools import chain
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gputrace.report import TEXT_COLUMNS, Document, Limits, Line, Table
from gputrace.sanitize import sentence


def limits(width: int) -> Limits:
    """Return what lines of a width have room for."""
    return Limits(gpus_across=3, gaps=5, links=4, causes=6, width=width)


def render(document: Document, width: int = 80, color: bool = False) -> str:
    """Render a report at most ``width`` columns wide; with ANSI escape sequences if ``color``."""
    console = open_console(width, color)
    for line in document.head:
        console.print(said(line.text, line.style), *_below(line), sep="\n")
    for line in document.lead:
        # Paths are for copying: they stay in one piece.
        console.print(said(f"  {line.sentence}", line.style), soft_wrap=True)
    if document.head:
        console.print()
    for table in document.tables:
        print_table(console, table)
    for line in document.findings:
        sentence = Text.assemble((f"{line.name}: ", line.style), said(line.text))
        console.print(sentence, *_below(line), sep="\n")
    sections = list(chain.from_iterable(document.sections.values()))
    if sections and document.findings:
        console.print()
    for table in sections:
        print_table(console, table)
    for line in document.notes:
        if line.name == "note":
            console.print(said(f"note: {line.text}", line.style))
        else:
            name = f"{line.name}: " if line.name else ""
            console.print(Text.assemble((name, line.style), said(line.text)))
    return without_blanks(console).rstrip("\n") + "\n"


def _below(line: Line) -> list[Padding]:
    return [Padding(said(each.sentence), (0, 0, 0, 2)) for each in line.below]


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
