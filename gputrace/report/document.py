"""Report before it is laid out: verdict, tables, findings and notes, as every format shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import force_setattr

from gputrace.model.struct import UNKNOWN, Column, Columns, Struct
from gputrace.sanitize import sentence

TEXT_COLUMNS: Final = ("evidence", "not done")
"""Columns that hold sentences."""
_SILENT: Final = frozenset(("", "?", UNKNOWN))


class Table(Struct, frozen=True):
    """Title, column names, and rows of cells.

    The first column and `TEXT_COLUMNS` hold text, all others numbers. Columns that say nothing in
    any row are left out.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: tuple[str, ...] = ()
    """Full names of the rows, whose first cells are short ones; empty where they are not."""

    def __post_init__(self) -> None:
        """Sanitize all cells: they never contain control sequences."""
        force_setattr(self, "title", sentence(self.title))
        first, *others = zip(self.header, *self.rows, strict=True)
        kept = [first, *(c for c in others if not self.rows or not _SILENT.issuperset(c[1:]))]
        header, *rows = zip(*(map(sentence, column) for column in kept), strict=True)
        force_setattr(self, "header", header)
        force_setattr(self, "rows", tuple(rows))


def tabulate(
    title: str,
    columns: Columns,
    rows: Iterable[Any],
    last: Iterable[tuple[str, ...]] = (),
    names: tuple[str, ...] = (),
) -> Table:
    """Return a table with a row for each object, and the rows ``last`` under them."""
    body = [tuple(column.cell(row) for column in columns) for row in rows]
    return Table(title, tuple(column.title for column in columns), (*body, *last), names)


def declared(title: str, rows: Sequence[Any], *first: Column) -> Table:
    """Return a table of results with the columns that they declare, after some of its own."""
    return tabulate(title, (*first, *rows[0].COLUMNS) if rows else (Column("", ""),), rows)


def present(tables: Iterable[Table | None]) -> tuple[Table, ...]:
    """Return the tables that say anything: have rows, and more columns than their names."""
    return tuple(table for table in tables if table and table.rows and len(table.header) > 1)


Records = tuple[Sequence[str], Iterable[Sequence[Any]]]
"""Names of columns, and rows of values, for CSV."""


def attributes(rows: Iterable[object], names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the named attributes of each row."""
    return (tuple(getattr(row, name) for name in names) for row in rows)


STYLES: Final = {"high": "bold red", "medium": "yellow", "low": "cyan", "info": "dim"}
"""Styles of the severities of findings in 16 colours."""


class Line(Struct, frozen=True):
    """Sentence of a report."""

    text: str
    style: str = ""
    """Style in a terminal, in rich's words."""
    name: str = ""
    """Its beginning: the id of a finding, ``What to do``, ``note``, the label of a run."""
    below: tuple[Line, ...] = ()
    """Lines below it: the evidence of a finding, the gain to expect, and advice."""

    @property
    def sentence(self) -> str:
        """Return the name and the text."""
        return f"{self.name}: {self.text}" if self.name else self.text


class Document(Struct, frozen=True):
    """Content of a report, in the order in which it is read."""

    head: tuple[Line, ...]
    """Verdict, and what else is known at once."""
    lead: tuple[Line, ...] = ()
    """The compared runs."""
    tables: tuple[Table, ...] = ()
    findings: tuple[Line, ...] = ()
    sections: Mapping[str, tuple[Table, ...]] = {}
    """Tables after the findings, by what they are about."""
    notes: tuple[Line, ...] = ()


_LEAST_NAME: Final = 24


def room_for_names(width: int, beside: int) -> int:
    """Return how long names may be: what figures leave, or a line where they leave too little."""
    return width - beside if width - beside >= _LEAST_NAME else max(width - 2, _LEAST_NAME)


class Limits(Struct, frozen=True):
    """Limits on what a format shows."""

    gpus_across: int = 4
    """Largest number of GPUs shown as columns of the first tables; more are shown as rows, or as
    their mean."""
    gaps: int = 0
    links: int = 8
    kernels: int = 8
    causes: int = 12
    """Causes of lost time with a row of their own."""
    parallel: int | None = 2
    """Pipelines, and groups of experts, with a table of their own."""
    width: int | None = None
    """Columns of a terminal, which leave no room for the columns that are needed least."""
