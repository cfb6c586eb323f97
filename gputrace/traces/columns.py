"""Integer columns of SQLite tables, read at the speed of SQLite itself.

The rows are read as Arrow batches over ADBC, several row ranges at once on a connection each
(SQLite's own C code holds no lock that would serialise read-only connections, and ADBC releases
Python's), and copied into numpy arrays allocated once. Where a column defeats ADBC (text among
integers, floats), the row range is read again through the standard library, which casts.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np

from gputrace.traces import guard
from gputrace.traces.arrow import NULL, Growing, Integers, fitting
from gputrace.traces.sqlite import Database, broken, quoted
from gputrace.traces.trace import Progress

_BATCH_ROWS: Final = 16_384
"""So that malloc gives each batch the memory of the one before: 128 KiB a column."""
_ROWS_WORTH_A_THREAD: Final = 50_000
ROWS_AT_ONCE: Final = 1 << 21
"""Rows of a stretch; a multiple of those of a zone."""

Rows = tuple[int, int] | None
"""Rowids ``first <= rowid < end``, or all rows."""
_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class Query:
    """Which columns of which rows: SQL expressions by result name, and their numpy types."""

    table: str
    expressions: Mapping[str, str]
    types: Mapping[str, type[np.signedinteger[Any]]]
    where: str = ""
    """An SQL condition, or nothing."""

    def sql(self, rows: Rows = None, cast: bool = False) -> str:
        """The statement for rowids ``first <= rowid < end``; cast makes every value an integer."""
        pattern = "CAST({} AS INTEGER)" if cast else "{}"
        columns = ", ".join(pattern.format(text) for text in self.expressions.values())
        conditions = [f"({self.where})"] if self.where else []
        if rows is not None:
            conditions.append(f"rowid >= {rows[0]} AND rowid < {rows[1]}")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        order = " ORDER BY rowid" if rows is not None else ""  # As they come anyway.
        return f"SELECT {columns} FROM {quoted(self.table)}{where}{order}"


def read_integers(
    database: Database, query: Query, progress: Progress | None = None, rows: Rows = None
) -> dict[str, Integers]:
    """The query's columns, NULL as -1, of all rows or of those with some rowids.

    In order of rowid, where the table has rowids. Raises InputError on a broken file.
    """
    ranges = _split(*rows) if rows else row_ranges(database, query.table)
    counter = _Counter(progress, sum(rows[1] - rows[0] for rows in ranges if rows))
    room = _Room(query, ranges)
    return room.whole(
        in_threads(lambda rows: _read_range(database, query, rows, counter, room), ranges)
    )


def row_ranges(database: Database, table: str) -> Sequence[Rows]:
    """A table's rowids in about equal parts, one a thread; or all rows, where rowids tell nothing.

    They tell nothing where there are none, or more than a file of this size can hold: holes.
    """
    bounds = database.row_bounds(table)
    if bounds is None or bounds[1] - bounds[0] >= database.most_rows:
        return [None]
    return _split(bounds[0], bounds[1] + 1)


def stretches(database: Database, table: str) -> list[Rows]:
    """The same in stretches that are read one after the other, each by several threads."""
    ranges = row_ranges(database, table)
    if ranges[0] is None or ranges[-1] is None:
        return [None]
    first, end = ranges[0][0], ranges[-1][1]
    return [(low, min(low + ROWS_AT_ONCE, end)) for low in range(first, end, ROWS_AT_ONCE)]


def in_threads(read: Callable[[Rows], _Part], ranges: Sequence[Rows]) -> list[_Part]:
    """What is read of each range, in order, all at once."""
    if len(ranges) == 1:
        return [read(ranges[0])]
    with ThreadPoolExecutor(len(ranges)) as pool:
        return list(pool.map(read, ranges))


class _Counter:
    """Adds up the rows of several threads for a progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._done, self._lock = 0, Lock()

    def add(self, rows: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += rows
                self._progress(self._done, max(self._total, self._done))


def _split(first: int, end: int) -> list[tuple[int, int]]:
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = max(1, min(threads or 1, (end - first) // _ROWS_WORTH_A_THREAD, 16))
    # Rows may have any number, so that a float could not tell their edges.
    return list(pairwise(first + (end - first) * at // parts for at in range(parts + 1)))


class _Room:
    """Memory for the columns of a query, in which row ranges lie side by side: one copy less."""

    def __init__(self, query: Query, ranges: Sequence[Rows]) -> None:
        self._first = ranges[0][0] if ranges[0] else 0
        room = ranges[-1][1] - self._first if ranges[-1] else _BATCH_ROWS
        self._columns: dict[str, Integers] = {
            name: np.empty(room, query.types[name]) for name in query.expressions
        }

    def of(self, rows: Rows) -> dict[str, Integers]:
        """The place of a range."""
        place = slice(rows[0] - self._first, rows[1] - self._first) if rows else slice(None)
        return {name: column[place] for name, column in self._columns.items()}

    def whole(self, parts: Sequence[dict[str, Integers]]) -> dict[str, Integers]:
        """The columns, where every range filled its place; else what there is of each range."""
        if len(parts) == 1:
            return parts[0]
        found = {}
        for name, column in self._columns.items():
            own = [part.pop(name) for part in parts]
            inside = all(values.base is column for values in own)
            filled = inside and sum(map(len, own)) == len(column)
            found[name] = column if filled else np.concatenate(own)
        return found


def _read_range(
    database: Database, query: Query, rows: Rows, counter: _Counter, room: _Room
) -> dict[str, Integers]:
    import adbc_driver_manager
    import pyarrow

    try:
        return _read_arrow(database, query.sql(rows), room.of(rows), counter)
    except (adbc_driver_manager.Error, pyarrow.ArrowException, OSError, ValueError):
        return _read_casting(database, query, rows)


def _read_arrow(
    database: Database, sql: str, room: dict[str, Integers], counter: _Counter
) -> dict[str, Integers]:
    growing = {name: Growing(values) for name, values in room.items()}
    for batch in read_batches(database, sql):
        for index, column in enumerate(growing.values()):
            column.append(batch.column(index))
        counter.add(batch.num_rows)
    return {name: column.array() for name, column in growing.items()}


def read_batches(database: Database, sql: str) -> Iterator[Any]:
    """The rows of a statement as Arrow record batches, over a connection of their own.

    Raises InputError for a statement that would run what the file declares.
    """
    import adbc_driver_manager as adbc
    import adbc_driver_sqlite
    import pyarrow

    database.check(sql)
    with (
        adbc.AdbcDatabase(driver=adbc_driver_sqlite._driver_path(), uri=database.uri) as opened,
        adbc.AdbcConnection(opened) as connection,
        adbc.AdbcStatement(connection) as statement,
    ):
        for setting in guard.SETTINGS:
            statement.set_sql_query(f"PRAGMA {setting}")
            statement.execute_update()
        left = database.most_rows
        statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
        statement.set_sql_query(sql)
        stream, _ = statement.execute_query()
        with pyarrow.RecordBatchReader.from_stream(stream) as reader:
            for batch in reader:
                left -= batch.num_rows
                if left < 0:
                    raise database.endless()
                yield batch


def _read_casting(database: Database, query: Query, rows: Rows) -> dict[str, Integers]:
    width = len(query.expressions)
    connection = guard.connect(database.uri)
    try:
        cursor = connection.execute(query.sql(rows, cast=True))
        values = chain.from_iterable(_stepped(database, cursor))
        flat = np.fromiter((NULL if v is None else v for v in values), np.int64)
    except (sqlite3.Error, OverflowError) as error:
        raise broken(database.path, error) from error
    finally:
        connection.close()
    table = flat.reshape(-1, width)
    return {
        name: fitting(table[:, i], np.dtype(query.types[name])).astype(query.types[name])
        for i, name in enumerate(query.expressions)
    }


def _stepped(database: Database, cursor: sqlite3.Cursor) -> Iterator[tuple[int | None, ...]]:
    """The rows of a cursor; SQLite's lack of memory is told from our own."""
    try:
        yield from islice(cursor, database.most_rows)
        if next(cursor, None) is not None:
            raise database.endless()
    except MemoryError as error:
        raise broken(database.path, error) from error
