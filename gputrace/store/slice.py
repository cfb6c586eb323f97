"""Slicing: a window of an SQLite trace as a smaller file, and windowed reading of large traces.

Rows are copied from file to file inside SQLite, in chunks of rowids, so that memory is bounded. The
slice contains the rows that overlap the window, unclipped, and the context that an analysis of the
window needs: the API calls that issued its GPU operations, at any time, and for each GPU and host
thread the last row before and the first row after the window. Times are unchanged.

An analysis normally reads all of a trace, since steps are counted from its start. For large SQLite
files, the window and its surroundings are sliced out first; long text files are decoded for the
window alone. Memory is then independent of the file size.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from gputrace.errors import UsageError
from gputrace.model.options import Window
from gputrace.model.trace import Progress, Trace
from gputrace.store import sqlite_security
from gputrace.store.merge import MergedTrace
from gputrace.store.sqlite_page_scan import quote_identifier
from gputrace.store.sqlite_reader import (
    LARGE,
    Database,
    SqliteTables,
    SqliteTrace,
    TimedTable,
    sqlite_error,
)
from gputrace.store.writer import TraceWriter
from gputrace.units import format_window

if TYPE_CHECKING:
    from gputrace.store.redact import Redaction

_TABLE: Final = "GPUTRACE_EXPORT"
_ROWS_AT_ONCE: Final = 1 << 18
_ALL: Final = Window(-(1 << 62), 1 << 62)


def slice_trace(
    tables: SqliteTables,
    target: Path,
    window: Window | None = None,
    redaction: Redaction | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the slice of a trace that overlaps a window on the trace's clock, or all of it.

    Raises UsageError if nothing overlaps the window, OSError if the slice cannot be written.
    """
    with TraceWriter(target) as writer:
        try:
            with writer.attached(tables.database.uri, "source") as output:
                if redaction is not None:
                    redaction.prepare(output)
                _Slicer(tables, writer, output, window or _ALL, redaction, progress).run()
        except sqlite_security.ERRORS as error:
            # The writer reports a full disk; other errors are due to the input.
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                raise
            raise sqlite_error(tables.database.path, error) from error
        about = {"redacted": "yes"} if redaction is not None else {}
        if window is not None:
            about |= {"start_ns": str(window.start), "end_ns": str(window.end)}
        if tables.late:
            about["gpu_late_ns"] = str(tables.late)
        # If the source was itself exported, its record has already been copied.
        writer.make(_TABLE, "name TEXT NOT NULL, value TEXT")
        writer.add_rows(_TABLE, ["name", "value"], about.items())


class _Slicer(msgspec.Struct, dict=True):
    """State of one call of `slice_trace`."""

    tables: SqliteTables
    writer: TraceWriter
    output: sqlite3.Connection
    window: Window
    redaction: Redaction | None
    progress: Progress | None

    def __post_init__(self) -> None:
        self.database, redaction = self.tables.database, self.redaction
        sql = "SELECT name, sql FROM source.sqlite_master WHERE type = 'table'"
        declared = dict(self.output.execute(sql))
        self.declared = {
            name: str(declared[self.database.names.get(name, name)]).replace(
                self.database.names.get(name, name), name, 1
            )
            for name in self.database.tables
            if not name.startswith("sqlite_") and (redaction is None or redaction.takes(name))
        }
        described = {name: self.tables.timed(self.database, name) for name in self.declared}
        timed = {name: how for name, how in described.items() if how is not None}
        # API calls are copied after the operations that they issued.
        self.timed = dict(sorted(timed.items(), key=lambda item: item[1].issued is not None))

    def run(self) -> None:
        """Copy all tables."""
        for sql in self.declared.values():
            self.writer.declare(sql)
        for name in sorted(self.declared.keys() - self.timed.keys() - {self.tables.strings}):
            self._copy(name, "1")
        self._copy_timed()
        # Annotations alone do not count.
        touched = (
            self.output.execute(
                f"SELECT 1 FROM main.{quote_identifier(table)} WHERE {self._touching(how)} LIMIT 1"
            ).fetchone()
            for table, how in self.timed.items()
            if not how.beside
        )
        if self.window != _ALL and not any(touched):
            raise UsageError(f"{self.database.path}: nothing was recorded in that window")
        if self.tables.strings in self.declared:
            self._copy_strings()

    def _copy_timed(self) -> None:
        self.output.execute(
            "CREATE TEMP TABLE issued (process INTEGER, correlation INTEGER, "
            "PRIMARY KEY (process, correlation)) WITHOUT ROWID"
        )
        ranges = {name: _rowid_ranges(self.database, name) for name in self.timed}
        total, done = sum(map(len, ranges.values())), count(1)
        for name, how in self.timed.items():
            edges: dict[tuple[object, ...], tuple[int, int]] = {}
            if how.together:  # Events of several rows, any of which may overlap the window.
                self.output.execute("DROP TABLE IF EXISTS temp.together")
                self.output.execute("CREATE TEMP TABLE together (id INTEGER PRIMARY KEY)")
                self.output.execute(
                    f"INSERT INTO temp.together SELECT {quote_identifier(how.together)} AS id "
                    f"FROM source.{self.database.quoted(name)} WHERE id NOT NULL GROUP BY id "
                    f"HAVING min({how.start}) < {self.window.end} "
                    f"AND max({how.end}) >= {self.window.start}"
                )
            for rows in ranges[name]:
                self._copy(name, f"({self._wanted(how)}) AND {rows}")
                self._find_edges(name, how, rows, edges)
                if self.progress is not None:
                    self.progress(next(done), total)
            if edges:
                rowids = json.dumps(sorted(rowid for _, rowid in edges.values()))
                listed = f"rowid IN (SELECT value FROM json_each('{rowids}'))"
                self._copy(name, f"{listed} AND ({self._wanted(how)}) IS NOT TRUE")
            if how.issues is not None:
                process, correlation = how.issues
                self.output.execute(
                    f"INSERT OR IGNORE INTO temp.issued SELECT {process}, {correlation} "
                    f"FROM main.{quote_identifier(name)} WHERE {correlation} > 0"
                )

    def _touching(self, how: TimedTable) -> str:
        return f"{how.start} < {self.window.end} AND {how.end} >= {self.window.start}"

    def _wanted(self, how: TimedTable) -> str:
        """Return the SQL condition of rows that overlap the window, or are needed at any time."""
        if how.together:
            return f"{quote_identifier(how.together)} IN temp.together"
        wanted = f"{self._touching(how)} OR {how.always}"
        if how.issued is None:
            return wanted
        process, correlation = how.issued
        return (
            f"{wanted} OR {correlation} > 0 AND EXISTS (SELECT 1 FROM temp.issued "
            f"WHERE process = {process} AND correlation = {correlation})"
        )

    def _copy(self, table: str, where: str) -> None:
        names = self.database.tables[table]
        listed = shown = ", ".join(map(quote_identifier, names))
        if self.redaction is not None:
            shown = ", ".join(self.redaction.shown(table, name) for name in names)
        self.output.execute(
            f"INSERT INTO main.{quote_identifier(table)} ({listed}) "
            f"SELECT {shown} FROM source.{self.database.quoted(table)} WHERE {where}"
        )

    def _find_edges(
        self,
        table: str,
        how: TimedTable,
        rows: str,
        edges: dict[tuple[object, ...], tuple[int, int]],
    ) -> None:
        """Find the nearest row to the window on each side, by group: its distance and rowid."""
        if not how.groups or rows == "1" or self.window == _ALL:
            return
        groups = ", ".join(map(quote_identifier, how.groups))
        others = f"AND {rows} GROUP BY {groups}"
        source = f"FROM source.{self.database.quoted(table)} WHERE"
        before = f"{source} {how.end} < {self.window.start} {others}"
        after = f"{source} {how.start} >= {self.window.end} {others}"
        for side, nearest in (
            (-1, f"SELECT -max({how.end}), rowid, {groups} {before}"),
            (1, f"SELECT min({how.start}), rowid, {groups} {after}"),
        ):
            for distance, rowid, *group in self.output.execute(nearest):
                known = edges.get((side, *group))
                if known is None or distance < known[0]:
                    edges[side, *group] = distance, rowid

    def _copy_strings(self) -> None:
        """Copy the strings referenced by the copied rows."""
        tables, known = self.tables, self.database.tables
        table, id = quote_identifier(tables.strings), quote_identifier(tables.string_id)
        named = {
            name: tables.string_columns(sql) & known[name].keys()
            for name, sql in self.declared.items()
            if name != tables.strings
        }
        kernels = {
            name: known[name].keys() & set(columns)
            for name, columns in tables.kernel_names.items()
            if name in self.declared
        }
        text = "value" if self.redaction is None else "redacted(value)"
        self.output.execute(
            f"INSERT INTO main.{table} ({id}, value) SELECT {id}, CASE WHEN {id} IN "
            f"({_ids(kernels)}) THEN value ELSE {text} END "
            f"FROM source.{table} WHERE {id} IN ({_ids(named)})"
        )


def _ids(columns: Mapping[str, Collection[str]]) -> str:
    """Return the SQL query for the ids in some columns of the copied rows."""
    selects = [
        f"SELECT {quote_identifier(name)} FROM main.{quote_identifier(table)}"
        for table, names in columns.items()
        for name in sorted(names)
    ]
    return " UNION ".join(selects) or "SELECT NULL"


def _rowid_ranges(database: Database, table: str) -> list[str]:
    """Return SQL conditions that split a table by rowid; one for all rows without usable rowids."""
    bounds = database.row_bounds(table)
    if bounds is None or bounds[1] - bounds[0] >= database.most_rows:
        return ["1"] if bounds is None else ["rowid IS NOT NULL"]
    starts = range(bounds[0], bounds[1] + 1, _ROWS_AT_ONCE)
    return [f"rowid >= {start} AND rowid < {start + _ROWS_AT_ONCE}" for start in starts]


_AROUND_NS: Final = 5_000_000_000
"""Minimum margin read around a window: surrounding steps identify those that it cuts."""


@contextmanager
def windowed(trace: Trace, window: Window, progress: Progress | None) -> Iterator[Trace]:
    """Yield the trace to read a window from: itself, or a slice, written as by `slice_trace`."""
    traces = trace.traces if isinstance(trace, MergedTrace) else [trace]
    # Large: text that is not held, or large SQLite files.
    is_large = sum(t.cut_bytes for t in traces) > LARGE or not all(t.held for t in traces)
    if not is_large:
        yield trace
        return
    around = max(_AROUND_NS, window.end - window.start)
    read = Window(window.start - around, window.end + around)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="gputrace-")))
        part = slice_window(trace, read, folder, opened, progress)
        low, high = max(read.start - trace.origin, 0), read.end - trace.origin
        part.quality.notes.append(
            f"only {format_window(low, high)} of this large trace is read: steps are counted "
            "within it"
        )
        yield part


def slice_window(
    trace: Trace, window: Window, folder: Path, opened: ExitStack, progress: Progress | None = None
) -> Trace:
    """Return a window of a trace, sliced into a folder if needed; ``opened`` closes it."""
    if isinstance(trace, MergedTrace):
        # Merge windows of the files, without those that have nothing in the window.
        parts: dict[int, Trace] = {}
        empty = UsageError(f"{trace.title}: nothing was recorded in that window")
        for number, (file, shift) in enumerate(zip(trace.traces, trace.shifts, strict=True)):
            local = Window(window.start - shift, window.end - shift)
            try:
                parts[number] = slice_window(file, local, folder, opened, progress)
            except UsageError as error:
                empty = error
        if not parts:
            raise empty
        merged = MergedTrace(list(parts.values()), [trace.shifts[number] for number in parts])
        merged.origin, merged.logged = trace.origin, trace.logged
        merged.quality.notes[:] = trace.quality.notes
        merged.quality.left_out[:] = trace.quality.left_out
        return merged
    if trace.elsewhere or not trace.held:
        part = trace.part(window)
        opened.callback(part.close)
        part.logged = trace.logged
        return part
    if not isinstance(trace, SqliteTrace):
        return trace  # It is in memory already.
    path = folder / f"{len(list(folder.iterdir()))}.sqlite"
    slice_trace(trace.tables, path, window, progress=progress)
    database = Database(path)
    opened.callback(database.close)
    part = trace.on(database)
    part.quality = replace(trace.quality, notes=list(trace.quality.notes))
    return part
