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
from itertools import chain, pairwise
from threading import Lock
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.sqlite import Database, broken, quoted
from gputrace.traces.trace import Progress

_BATCH_ROWS: Final = 65_536
_ROWS_WORTH_A_THREAD: Final = 50_000
_LEAST_BYTES_A_ROW: Final = 4
_WORD: Final = 4
"""Bytes of a 32-bit number in a BLOB."""
NULL: Final = -1
"""What NULL becomes."""

Integers = NDArray[np.signedinteger[Any]]
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
        return f"SELECT {columns} FROM {quoted(self.table)}{where}"


def read_integers(
    database: Database, query: Query, progress: Progress | None = None
) -> dict[str, Integers]:
    """The query's columns, in any row order, NULL as -1. Raises InputError on a broken file."""
    ranges = row_ranges(database, query.table)
    counter = _Counter(progress, sum(rows[1] - rows[0] for rows in ranges if rows))
    parts = in_threads(lambda rows: _read_range(database, query, rows, counter), ranges)
    return _merge(parts, query)


def row_ranges(database: Database, table: str) -> Sequence[Rows]:
    """A table's rowids in about equal parts, one a thread; or all rows, where rowids tell nothing.

    They tell nothing where there are none, or more than a file of this size can hold: holes.
    """
    bounds = database.row_bounds(table)
    if bounds is None or bounds[1] - bounds[0] >= _most_rows(database):
        return [None]
    return _split(bounds[0], bounds[1] + 1)


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


def _most_rows(database: Database) -> int:
    return database.path.stat().st_size // _LEAST_BYTES_A_ROW


def _split(first: int, end: int) -> list[tuple[int, int]]:
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = max(1, min(threads or 1, (end - first) // _ROWS_WORTH_A_THREAD, 16))
    edges = np.linspace(first, end, parts + 1).astype(np.int64).tolist()
    edges[0], edges[-1] = first, end
    return list(pairwise(edges))


def _merge(parts: Sequence[dict[str, Integers]], query: Query) -> dict[str, Integers]:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part.pop(name) for part in parts]) for name in query.expressions}


def _read_range(
    database: Database, query: Query, rows: Rows, counter: _Counter
) -> dict[str, Integers]:
    import adbc_driver_manager
    import pyarrow

    try:
        return _read_arrow(database, query, rows, counter)
    except (adbc_driver_manager.Error, pyarrow.ArrowException, OSError, ValueError):
        return _read_casting(database, query, rows)


def _read_arrow(
    database: Database, query: Query, rows: Rows, counter: _Counter
) -> dict[str, Integers]:
    growing = {name: _Growing(query.types[name], rows) for name in query.expressions}
    for batch in read_batches(database, query.sql(rows)):
        for index, column in enumerate(growing.values()):
            column.append(batch.column(index))
        counter.add(batch.num_rows)
    return {name: column.array() for name, column in growing.items()}


def read_batches(database: Database, sql: str) -> Iterator[Any]:
    """The rows of a statement as Arrow record batches, over a connection of their own."""
    import adbc_driver_manager as adbc
    import adbc_driver_sqlite
    import pyarrow

    with (
        adbc.AdbcDatabase(driver=adbc_driver_sqlite._driver_path(), uri=database.uri) as opened,
        adbc.AdbcConnection(opened) as connection,
        adbc.AdbcStatement(connection) as statement,
    ):
        statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
        statement.set_sql_query(sql)
        stream, _ = statement.execute_query()
        with pyarrow.RecordBatchReader.from_stream(stream) as reader:
            yield from reader


class _Growing:
    """A column being filled; doubles where the number of rows is not known beforehand."""

    def __init__(self, kind: type[np.signedinteger[Any]], rows: Rows) -> None:
        room = rows[1] - rows[0] if rows else _BATCH_ROWS
        self._values: Integers = np.empty(room, kind)
        self._length = 0

    def append(self, chunk: Any) -> None:
        """Adds an Arrow integer array; raises ValueError for any other type."""
        end = self._length + len(chunk)
        if end > len(self._values):
            self._values = np.resize(self._values, max(end, 2 * len(self._values)))
        self._values[self._length : end] = _fitting(_plain_values(chunk), self._values.dtype)
        self._length = end

    def array(self) -> Integers:
        return self._values[: self._length]


def _fitting(values: Any, kind: np.dtype[Any]) -> Any:
    """Values that a narrower type cannot hold as NULL: no id of that size was ever given."""
    if kind.itemsize == 8 or not isinstance(values, np.ndarray) or not len(values):
        return values
    limits = np.iinfo(kind)
    if values.max() <= limits.max and values.min() >= limits.min:
        return values
    return np.where((values > limits.max) | (values < limits.min), NULL, values)


def _plain_values(chunk: Any) -> Any:
    """What numpy can copy out of an Arrow integer array; its own ways to it import pandas."""
    import pyarrow

    if pyarrow.types.is_null(chunk.type):
        return NULL
    if pyarrow.types.is_binary(chunk.type):
        return _words(chunk)
    if not pyarrow.types.is_int64(chunk.type):
        raise ValueError(f"{chunk.type} in an integer column")
    if not len(chunk):
        return ()
    known, values = chunk.buffers()
    full = np.frombuffer(values, np.int64, len(chunk), 8 * chunk.offset)
    if not chunk.null_count:
        return full
    bits = np.unpackbits(np.frombuffer(known, np.uint8), bitorder="little")
    return np.where(bits[chunk.offset : chunk.offset + len(chunk)], full, NULL)


def _words(chunk: Any) -> NDArray[np.uint32]:
    """BLOBs of four bytes as little-endian numbers."""
    offsets = np.frombuffer(chunk.buffers()[1], np.int32, len(chunk) + 1, 4 * chunk.offset)
    if chunk.null_count or (np.diff(offsets) != _WORD).any():
        raise ValueError("BLOBs that are no 32-bit numbers in an integer column")
    if not len(chunk):
        return np.empty(0, np.uint32)
    return np.frombuffer(chunk.buffers()[2], "<u4", len(chunk), int(offsets[0]))


def _read_casting(database: Database, query: Query, rows: Rows) -> dict[str, Integers]:
    width = len(query.expressions)
    connection = sqlite3.connect(database.uri, uri=True)
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
        name: _fitting(table[:, i], np.dtype(query.types[name])).astype(query.types[name])
        for i, name in enumerate(query.expressions)
    }


def _stepped(database: Database, cursor: sqlite3.Cursor) -> Iterator[tuple[int | None, ...]]:
    """The rows of a cursor; SQLite's lack of memory is told from our own."""
    try:
        yield from cursor
    except MemoryError as error:
        raise broken(database.path, error) from error
