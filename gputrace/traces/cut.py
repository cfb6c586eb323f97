"""A part of an SQLite trace as a smaller file of the same kind, whose tables hold less.

Rows go from file to file inside SQLite, a stretch of row numbers at a time, so that memory does not
grow with the file. Taken are the rows that touch the window, whole, and what the analysis of the
window needs beside them: the calls that issued its GPU operations, wherever they are, and of each
GPU and host thread the last row before it and the first after it. Times stay what they are.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Final

from gputrace.errors import UsageError
from gputrace.traces import guard
from gputrace.traces.exported import write_about
from gputrace.traces.filters import Everything, Filter
from gputrace.traces.sqlite import Database, broken, quoted
from gputrace.traces.tables import Tables, Timed
from gputrace.traces.trace import Progress, Window
from gputrace.traces.writer import TraceWriter

_ROWS_AT_ONCE: Final = 1 << 18
_ALL: Final = Window(-(1 << 62), 1 << 62)


def cut(
    tables: Tables,
    target: Path,
    window: Window | None = None,
    only: Filter | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the part of a trace that touches a window, of the trace's own clock; or all of it.

    Raises InputError where the trace is broken, UsageError where nothing touches the window,
    OSError where the part cannot be written.
    """
    with TraceWriter(target) as writer, _told_apart(tables.database):
        only = only or Everything()
        with writer.attached(tables.database.uri, "source") as output:
            only.prepare(output)
            _Cut(tables, writer, output, window or _ALL, only, progress).run()
        write_about(writer, window, not isinstance(only, Everything))


@contextmanager
def _told_apart(database: Database) -> Iterator[None]:
    """A full disk is the output's, as the writer tells; anything else is the input's."""
    try:
        yield
    except guard.ERRORS as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise
        raise broken(database.path, error) from error


class _Cut:
    """One run of `cut`."""

    def __init__(
        self,
        tables: Tables,
        writer: TraceWriter,
        output: sqlite3.Connection,
        window: Window,
        only: Filter,
        progress: Progress | None,
    ) -> None:
        self._database, self._strings = tables.database, tables.strings
        self._writer, self._output, self._window, self._only = writer, output, window, only
        self._progress = progress
        declared = dict(
            output.execute("SELECT name, sql FROM source.sqlite_master WHERE type = 'table'")
        )
        self._declared = {
            name: str(declared[name])
            for name in tables.database.tables
            if not name.startswith("sqlite_") and only.takes(name)
        }
        found = {name: tables.timed(tables.database, name) for name in self._declared}
        timed = {name: how for name, how in found.items() if how is not None}
        # The calls come after what they have issued.
        self._timed = dict(sorted(timed.items(), key=lambda item: item[1].issued is not None))
        self._columns = {n: list(self._database.tables[n]) for n in self._declared}

    def run(self) -> None:
        for sql in self._declared.values():
            self._writer.declare(sql)
        for name in sorted(self._declared.keys() - self._timed.keys() - {self._strings.table}):
            self._copy(name, "1")
        self._copy_timed()
        if self._window != _ALL and not self._has_any():
            raise UsageError(f"{self._database.path}: nothing was recorded in that window")
        if self._strings.table in self._declared:
            self._copy_strings()

    def _has_any(self) -> bool:
        """Whether something was recorded in the window, beside what tells of the cards."""
        return any(self._touches(name) for name, how in self._timed.items() if not how.beside)

    def _copy_timed(self) -> None:
        self._output.execute(
            "CREATE TEMP TABLE issued (process INTEGER, correlation INTEGER, "
            "PRIMARY KEY (process, correlation)) WITHOUT ROWID"
        )
        stretches = {name: _stretches(self._database, name) for name in self._timed}
        total, done = sum(map(len, stretches.values())), count(1)
        for name, how in self._timed.items():
            edges = _Edges()
            self._find_together(name, how)
            for rows in stretches[name]:
                self._copy(name, f"({self._wanted(how)}) AND {rows}")
                self._find_edges(name, how, rows, edges)
                if self._progress is not None:
                    self._progress(next(done), total)
            self._copy_edges(name, how, edges)
            if how.issues is not None:
                self._note_issued(name, how.issues)

    def _find_together(self, table: str, how: Timed) -> None:
        """Notes which things of several rows touch the window."""
        if how.together:
            self._output.execute("DROP TABLE IF EXISTS temp.together")
            self._output.execute("CREATE TEMP TABLE together (id INTEGER PRIMARY KEY)")
            self._output.execute(
                f"INSERT INTO temp.together SELECT {quoted(how.together)} AS id "
                f"FROM source.{quoted(table)} WHERE id NOT NULL GROUP BY id "
                f"HAVING min({how.start}) < {self._window.end} "
                f"AND max({how.end}) >= {self._window.start}"
            )

    def _touches(self, table: str) -> bool:
        """Whether any row taken is of the window itself."""
        how, window = self._timed[table], self._window
        sql = f"{how.start} < {window.end} AND {how.end} >= {window.start}"
        found = self._output.execute(f"SELECT 1 FROM main.{quoted(table)} WHERE {sql} LIMIT 1")
        return found.fetchone() is not None

    def _wanted(self, how: Timed) -> str:
        """SQL of the rows that touch the window, or are needed wherever they are."""
        touching = f"{how.start} < {self._window.end} AND {how.end} >= {self._window.start}"
        if how.together:
            return f"{quoted(how.together)} IN temp.together"
        if how.issued is None:
            return f"{touching} OR {how.always}"
        process, correlation = how.issued
        issued = (
            f"{correlation} > 0 AND EXISTS (SELECT 1 FROM temp.issued "
            f"WHERE process = {process} AND correlation = {correlation})"
        )
        return f"{touching} OR {how.always} OR {issued}"

    def _copy(self, table: str, where: str) -> None:
        names = self._columns[table]
        listed = ", ".join(map(quoted, names))
        shown = ", ".join(self._only.shown(table, name) for name in names)
        self._output.execute(
            f"INSERT INTO main.{quoted(table)} ({listed}) "
            f"SELECT {shown} FROM source.{quoted(table)} WHERE {where}"
        )

    def _find_edges(self, table: str, how: Timed, rows: str, edges: _Edges) -> None:
        if not how.groups or rows == "1" or self._window == _ALL:
            return
        groups = ", ".join(map(quoted, how.groups))
        others = f"AND {rows} GROUP BY {groups}"
        source = f"FROM source.{quoted(table)} WHERE"
        before = f"{source} {how.end} < {self._window.start} {others}"
        after = f"{source} {how.start} >= {self._window.end} {others}"
        edges.take(-1, self._output.execute(f"SELECT -max({how.end}), rowid, {groups} {before}"))
        edges.take(1, self._output.execute(f"SELECT min({how.start}), rowid, {groups} {after}"))

    def _copy_edges(self, table: str, how: Timed, edges: _Edges) -> None:
        listed = f"SELECT value FROM json_each('{json.dumps(edges.rowids())}')"
        if edges.rowids():
            self._copy(table, f"rowid IN ({listed}) AND ({self._wanted(how)}) IS NOT TRUE")

    def _note_issued(self, table: str, pair: tuple[str, str]) -> None:
        self._output.execute(
            f"INSERT OR IGNORE INTO temp.issued SELECT {pair[0]}, {pair[1]} "
            f"FROM main.{quoted(table)} WHERE {pair[1]} > 0"
        )

    def _copy_strings(self) -> None:
        """The texts that the rows taken name."""
        strings = self._strings
        table, id = quoted(strings.table), quoted(strings.id)
        named = {
            name: strings.columns(sql) & set(self._columns[name])
            for name, sql in self._declared.items()
            if name != strings.table
        }
        kernels = {
            name: [column for column in columns if column in self._columns[name]]
            for name, columns in strings.kernels.items()
            if name in self._columns
        }
        self._output.execute(
            f"INSERT INTO main.{table} ({id}, value) SELECT {id}, CASE WHEN {id} IN "
            f"({_ids(kernels)}) THEN value ELSE {self._only.shown_text()} END "
            f"FROM source.{table} WHERE {id} IN ({_ids(named)})"
        )


class _Edges:
    """For each group of rows, the one nearest to the window on each side."""

    def __init__(self) -> None:
        self._nearest: dict[tuple[object, ...], tuple[int, int]] = {}

    def take(self, side: int, rows: Iterable[tuple[int, ...]]) -> None:
        """Rows of distance, rowid and what makes the group."""
        for distance, rowid, *group in rows:
            key = (side, *group)
            known = self._nearest.get(key)
            if known is None or distance < known[0]:
                self._nearest[key] = distance, rowid

    def rowids(self) -> list[int]:
        return sorted(rowid for _, rowid in self._nearest.values())


def _ids(columns: Mapping[str, Collection[str]]) -> str:
    """SQL of the ids in some columns of the rows taken."""
    selects = chain.from_iterable(
        (f"SELECT {quoted(c)} FROM main.{quoted(table)}" for c in sorted(names))
        for table, names in columns.items()
    )
    return " UNION ".join(selects) or "SELECT NULL"


def _stretches(database: Database, table: str) -> list[str]:
    """SQL of a table's row numbers, in parts; all rows, where the numbers tell nothing."""
    bounds = database.row_bounds(table)
    if bounds is None or bounds[1] - bounds[0] >= database.most_rows:
        return ["1"] if bounds is None else ["rowid IS NOT NULL"]
    first, last = bounds
    starts = range(first, last + 1, _ROWS_AT_ONCE)
    return [f"rowid >= {start} AND rowid < {start + _ROWS_AT_ONCE}" for start in starts]
