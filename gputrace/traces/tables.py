"""What cutting a part out of an SQLite trace must know of its tables, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gputrace.traces.sqlite import Database


@dataclass(frozen=True, slots=True)
class Timed:
    """A table of events, mostly in SQL expressions."""

    start: str
    end: str
    groups: tuple[str, ...] = ()
    """Columns: of each group of rows that agree in them, the last one before a window and the first
    one after it are needed too, to tell what the gaps at the window's edges are."""
    issues: tuple[str, str] | None = None
    """Process and correlation id of rows on a GPU."""
    issued: tuple[str, str] | None = None
    """The same of calls that issue them."""
    together: str = ""
    """A column: rows that agree in it are the start and the end of one thing, and stay together."""
    beside: bool = False
    """Whether the rows tell something of others alone, so that a window needs others."""
    always: str = "0"
    """Rows that are needed whenever they were written, such as those that name a domain."""


@dataclass(frozen=True, slots=True)
class Strings:
    """The table of texts that the others name by number."""

    table: str
    id: str
    columns: Callable[[str], frozenset[str]]
    """From a table's declaration, its columns that name texts."""
    kernels: Mapping[str, tuple[str, ...]]
    """By table, those that name kernels."""


@dataclass(frozen=True, slots=True)
class Tables:
    """One SQLite trace, as it can be cut."""

    database: Database
    timed: Callable[[Database, str], Timed | None]
    """How a table of events is cut; None for one that is taken whole."""
    strings: Strings
