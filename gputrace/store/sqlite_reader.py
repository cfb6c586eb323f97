"""Validated read-only access to SQLite trace files, and parallel reading of their columns.

Files are opened read-only and immutable: no lock is taken and nothing is written beside them.
SQLite then ignores locks and journals, so these are checked here first. `sqlite_security` prevents
anything in the file from being executed.

Integer columns are read by `sqlite_page_scan` where that can be, else through SQLite, a batch of
rows at a time, and with casts where a value is no integer.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import sqlite3
import struct
import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from threading import Lock
from typing import Any, Final, Generic, Self, TypeVar
from urllib.parse import quote

import numpy as np

from gputrace.errors import InputError
from gputrace.model.events import Events, Kind, concatenate
from gputrace.model.impossible_times import find_launches, find_possible
from gputrace.model.struct import Struct
from gputrace.model.trace import Progress, Quality, Selection, Trace
from gputrace.store import sqlite_security
from gputrace.store.sqlite_page_scan import (
    Integers,
    Query,
    Rows,
    Scanner,
    TableLayout,
    count_threads,
    quote_identifier,
)

LARGE: Final = 1 << 29
"""Bytes of SQLite files above which windows are sliced; rows take 1.5 times as much memory."""
LEAST_BYTES_A_ROW: Final = 4
"""Minimum bytes per row; a table with more rows has a cycle among its pages."""
_LOCK_BYTES: Final = (0x40000000, 512)
"""Offset and length of SQLite's lock bytes (sqlite.org/fileformat2.html, section 1.3)."""


class Database:
    """An open SQLite file. Raises InputError for any problem with it."""

    def __init__(self, path: Path) -> None:
        check_file(path)
        self.path = path
        self.uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1"
        self.most_rows = path.stat().st_size // LEAST_BYTES_A_ROW
        """Upper bound of the rows of any table."""
        self._layouts: dict[str, TableLayout | None] = {}
        self.names: dict[str, str] = {}
        """Names in the file of tables that are known by another one."""
        try:
            self._connection = sqlite_security.connect(self.uri, check_same_thread=False)
        except sqlite_security.ERRORS as error:
            raise sqlite_error(path, error) from error
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        # Python 3.13 and later warn about connections that are never closed.
        weakref.finalize(self, self._connection.close)

    def close(self) -> None:
        self._connection.close()

    @cached_property
    def scanner(self) -> Scanner | None:
        """Scanner of the same file; None where SQLite alone can read it."""
        try:
            return Scanner(self.path)
        except (OSError, ValueError, struct.error):
            return None

    def layout(self, table: str) -> TableLayout | None:
        """Return the layout of a table, which must exist; None if it cannot be scanned."""
        if table not in self._layouts:
            self._layouts[table] = TableLayout.read(self.query, self.names.get(table, table))
        return self._layouts[table]

    def rename(self, table: str, name: str) -> None:
        """Know a table of the file, which stays as it is, by another name."""
        self.tables[name], self.names[name] = self.tables.pop(table), table

    def quoted(self, table: str) -> str:
        """Return the identifier of a table in SQL."""
        return quote_identifier(self.names.get(table, table))

    def has_rows(self, table: str) -> bool:
        """Return True if a table, which must exist, has any row."""
        sql = f"SELECT 1 FROM {self.quoted(table)} LIMIT 1"
        return next(self.query(sql), None) is not None

    def query(self, sql: str, parameters: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query; invalid UTF-8 becomes replacement characters."""
        try:
            rows = self._connection.execute(sql, parameters)
            yield from islice(rows, self.most_rows)
            if next(rows, None) is not None:
                raise self.endless()
        except (*sqlite_security.ERRORS, MemoryError) as error:
            raise sqlite_error(self.path, error) from error

    def select(self, table: str, *columns: str, where: str = "1") -> Iterator[tuple[Any, ...]]:
        """Yield columns of a table, nothing if it lacks one; ``where`` follows that keyword."""
        if self.has(table, *columns):
            names = ", ".join(map(quote_identifier, columns))
            yield from self.query(f"SELECT {names} FROM {self.quoted(table)} WHERE {where}")

    def texts(self, table: str, id: str, ids: Iterable[int]) -> dict[int, object]:
        """Return column ``value`` of a string table by id."""
        listed = "(SELECT value FROM json_each(?))"
        sql = f"SELECT {id}, value FROM {self.quoted(table)} WHERE {id} IN {listed}"
        return dict(self.query(sql, (json.dumps(list(ids)),)))

    def endless(self) -> InputError:
        """Return the error for a table with more rows than the file can hold."""
        return InputError(self.path, "broken SQLite file (more rows than fit into it); not read on")

    @cached_property
    def tables(self) -> dict[str, dict[str, str]]:
        """Declared column types by table and column, without views and virtual tables."""
        names = self.query(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND typeof(name) = 'text' "
            "AND rootpage > 0 ORDER BY name"
        )
        pragmas = {name: f"PRAGMA table_info({quote_identifier(name)})" for (name,) in list(names)}
        return {name: {r[1]: r[2] for r in self.query(sql)} for name, sql in pragmas.items()}

    @property
    def is_dlprof(self) -> bool:
        """True for a DLProf database, recognized by the views of its viewer."""
        sql = (
            "SELECT 1 FROM sqlite_master WHERE name LIKE '%dlprof%' OR (type = 'view' AND name IN "
            "('view_op_nodes', 'view_iterations_profiled', 'view_domain_model_gpu_utilization'))"
        )
        return next(self.query(sql), None) is not None

    def has(self, table: str, *columns: str) -> bool:
        """Return True if the table exists with all the columns."""
        return table in self.tables and self.tables[table].keys() >= set(columns)

    def row_bounds(self, table: str) -> tuple[int, int] | None:
        """Return the first and last rowid; None without rows or usable rowids."""
        if any(name.lower() == "rowid" for name in self.tables.get(table, ())):
            return None  # A column of that name shadows them.
        name = self.quoted(table)
        sql = f"SELECT (SELECT min(rowid) FROM {name}), max(rowid) FROM {name}"
        try:
            first, last = self._connection.execute(sql).fetchone()
        except sqlite3.OperationalError:
            return None
        except sqlite_security.ERRORS as error:
            raise sqlite_error(self.path, error) from error
        return None if first is None or first > last else (first, last)


def sqlite_error(path: Path, error: Exception) -> InputError:
    """Convert an SQLite error, or MemoryError for a huge record, to an InputError about a file."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError):  # Messages quote a broken schema.
        text = error.object.decode("utf-8", "replace")
    reason = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_AUTH:
        problem = f"has a view or code where a trace has a table ({reason}): not run, not read"
        return InputError(path, problem)
    return InputError(path, f"broken SQLite file ({reason}); copy or export it again")


def check_file(path: Path) -> None:
    """Raise InputError unless this is a complete SQLite file that nobody is writing."""
    with open_input(path) as file:
        header = file.read(100)
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise InputError(path, "the file is empty; the recording or the copy failed")
        if not header.startswith(sqlite_security.MAGIC):
            raise InputError(path, "not an SQLite file")
        if len(header) < 100:
            raise InputError(path, f"truncated: {size} bytes, less than an SQLite header")
        page, changes, pages, valid_for = struct.unpack(">16xH6xII60xI4x", header)
        # Old writers leave the page count stale.
        expected = (65536 if page == 1 else page) * pages if changes == valid_for else 0
        if size < expected:
            raise InputError(
                path, f"truncated: {size:,} of {expected:,} bytes; copy or export it again"
            )
        if _is_locked(file.fileno()):
            raise InputError(
                path, "another program is writing to it; wait for that to end, or read a copy"
            )
    for suffix in ("-wal", "-journal"):
        unfinished = path.with_name(path.name + suffix)
        if unfinished.exists() and unfinished.stat().st_size > 0:
            raise InputError(
                path,
                f"{unfinished.name} next to it holds unfinished writes; let the program that "
                "writes it end, or open it once with sqlite3",
            )


def open_input(path: Path) -> Any:
    """Open a regular file for reading bytes; raise InputError with the reason if impossible."""
    try:
        if path.is_dir():
            raise InputError(path, "is a directory; name the trace file in it")
        if path.exists() and not path.is_file():
            raise InputError(path, "not a regular file; save what comes out of it, and name that")
        return io.BufferedReader(_InputFile(path))
    except FileNotFoundError:
        spool = path.with_name(f"{path.name}.spool")
        hint = f", but a recording without its trace; make that: gputrace recover {spool}"
        raise InputError(path, f"no such file{hint if spool.is_dir() else ''}") from None
    except PermissionError:
        raise InputError(path, "no permission to read it; check its owner and mode") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(path, f"cannot be opened: {reason}") from None


class _InputFile(io.FileIO):
    """File that names itself where it cannot be read to its end, as on a broken disk."""

    def readinto(self, buffer: Any) -> Any:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise self._unreadable(error) from None

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: OSError) -> InputError:
        return InputError(self.name, f"cannot be read: {error.strerror}")


def _is_locked(descriptor: int) -> bool:
    """Return True if another process holds a write lock, without taking a lock."""
    request = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, *_LOCK_BYTES, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, request)
    except OSError:
        return False
    return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)


NULL: Final = -1
"""Value that represents NULL."""


def _fitting(values: Any, kind: np.dtype[Any]) -> Any:
    """Replace values out of range of the type by NULL: no real id is that large."""
    if kind.itemsize == 8 or not isinstance(values, np.ndarray) or not len(values):
        return values
    limits = np.iinfo(kind)
    if values.max() <= limits.max and values.min() >= limits.min:
        return values
    return np.where((values > limits.max) | (values < limits.min), NULL, values)


def _integer(value: object) -> int:
    """Convert what SQLite has in a column of integers; raise ValueError if that takes a cast."""
    if value is None:
        return NULL
    if isinstance(value, bytes) and len(value) == _INT32.itemsize:
        return int.from_bytes(value, "little")  # As nvprof keeps the ids of processes.
    raise ValueError(f"{type(value).__name__} in an integer column")


_INT32: Final = np.dtype(np.int32)
_BATCH_ROWS: Final = 16_384
"""Rows that SQLite hands over at once."""
ROWS_AT_ONCE: Final = 1 << 20
"""Rows of a chunk; a multiple of the rows of a zone."""


def read_integers(
    database: Database, query: Query, progress: Progress | None = None, rows: Rows = None
) -> dict[str, Integers]:
    """Read the columns of a query in order of rowid, if there is any, with -1 for NULL.

    They are scanned past SQLite where that can be done.
    """
    ids = rows
    if ids is None and (bounds := database.row_bounds(query.table)) is not None:
        ids = bounds[0], bounds[1] + 1
    total = ids[1] - ids[0] if ids is not None else 0
    scanner = database.scanner
    if scanner is not None and (layout := database.layout(query.table)) is not None:
        if ids is None and layout.select(query) and not database.has_rows(query.table):
            return {name: np.empty(0, query.types[name]) for name in query.values}
        if ids is not None and (rows is not None or total <= database.most_rows):
            scanned = scanner.read(layout, query, *ids, _counter(progress, total))
            if scanned is not None:
                return scanned
    count, table = _counter(progress, total), database.quoted(query.table)
    try:
        return _read_rows(database, query, query.sql(table, rows), count)
    except (ValueError, OverflowError):
        return _read_rows(database, query, query.sql(table, rows, cast=True), count)


def _read_rows(
    database: Database, query: Query, sql: str, count: Callable[[int], None] | None
) -> dict[str, Integers]:
    """Read rows over a connection of its own, since several threads may read at once."""
    width, left = len(query.values), database.most_rows
    batches = [np.empty((0, width), np.int64)]
    try:
        with closing(sqlite_security.connect(database.uri)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            cursor = connection.execute(sql)
            while rows := cursor.fetchmany(_BATCH_ROWS):
                left -= len(rows)
                if left < 0:
                    raise database.endless()
                values = (v if type(v) is int else _integer(v) for v in chain.from_iterable(rows))
                flat = np.fromiter(values, np.int64, width * len(rows))
                batches.append(flat.reshape(-1, width))
                if count is not None:
                    count(len(rows))
    except (sqlite3.Error, MemoryError) as error:
        raise sqlite_error(database.path, error) from error
    table = np.concatenate(batches)
    return {
        name: _fitting(table[:, i], np.dtype(query.types[name])).astype(query.types[name])
        for i, name in enumerate(query.values)
    }


def _counter(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    """Return a function that adds to the rows read so far, and reports them; thread-safe. None if
    nobody asks.
    """
    if progress is None:
        return None
    done, lock = 0, Lock()

    def count(more: int) -> None:
        nonlocal done
        with lock:
            done += more
            progress(done, max(total, done))

    return count


def row_ranges(database: Database, table: str) -> Sequence[Rows]:
    """Split the rowids of a table into about equal ranges, one per thread.

    Return ``[None]`` for all rows without rowids, or with more of them than the file can hold.
    """
    bounds = database.row_bounds(table)
    if bounds is None or bounds[1] - bounds[0] >= database.most_rows:
        return [None]
    first, end = bounds[0], bounds[1] + 1
    parts = count_threads(end - first)
    # Integer arithmetic, since rowids may exceed the precision of a float.
    return list(pairwise(first + (end - first) * at // parts for at in range(parts + 1)))


def row_chunks(database: Database, table: str) -> list[Rows]:
    """Split the rowids of a table into chunks of `ROWS_AT_ONCE`, each read by several threads."""
    ranges = row_ranges(database, table)
    if ranges[0] is None or ranges[-1] is None:
        return [None]
    first, end = ranges[0][0], ranges[-1][1]
    return [(low, min(low + ROWS_AT_ONCE, end)) for low in range(first, end, ROWS_AT_ONCE)]


class TimedTable(Struct, frozen=True):
    """A table of timed events; fields are SQL expressions unless noted."""

    start: str
    end: str
    groups: tuple[str, ...] = ()
    """Grouping columns: for each group, the last row before a window and the first one after it
    are kept, too, to classify the gaps at the edges of the window."""
    issues: tuple[str, str] | None = None
    """Process and correlation id of GPU operations."""
    issued: tuple[str, str] | None = None
    """Process and correlation id of the API calls that issue GPU operations."""
    together: str = ""
    """Column that links the start and end rows of one event, which are kept together."""
    beside: bool = False
    """True if the rows only annotate others; a window with nothing else counts as empty."""
    always: str = "0"
    """Condition for rows needed regardless of time, such as domain names."""


class SqliteTables(Struct, frozen=True):
    """Tables of one SQLite trace, with the rules to slice them."""

    database: Database
    timed: Callable[[Database, str], TimedTable | None]
    """Function that describes an event table; None for a table that is copied whole."""
    strings: str
    """String table that other tables refer to by id."""
    string_id: str
    string_columns: Callable[[str], frozenset[str]]
    """Function from a CREATE TABLE statement to the columns that hold string ids."""
    kernel_names: Mapping[str, tuple[str, ...]]
    """Columns with kernel names, by table."""
    late: int = 0
    """Nanoseconds that times on GPUs are late by."""


class EventTable(Struct, frozen=True):
    """Table of events, and the kinds of event that its rows may be."""

    name: str
    kinds: tuple[Kind, ...]


_Table = TypeVar("_Table", bound=EventTable)


class SqliteTrace(Trace, Generic[_Table]):
    """Base of traces in one SQLite file, from which a window can be sliced."""

    def __init__(self, path: Path, database: Database) -> None:
        super().__init__(path)
        self._database = database
        self._tables: Sequence[_Table] = ()

    @property
    @abstractmethod
    def tables(self) -> SqliteTables:
        """Tables of the file, described for slicing."""

    @property
    def cut_bytes(self) -> int:
        return self._database.path.stat().st_size

    def on(self, database: Database) -> Self:
        """Return this trace over a slice of its `tables`, which the caller closes."""
        part = copy(self)
        part._database, part.processes, part._once = database, list(self.processes), {}
        return part

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset().union(*map(self._kinds_of, self._tables))

    def _kinds_of(self, table: _Table) -> Collection[Kind]:
        """Return the kinds of which a table may contain rows."""
        return table.kinds

    def read(self, wanted: Selection) -> Events:
        parts = self._beside_tables(wanted)
        for table in self._tables:
            if not wanted.kinds.isdisjoint(self._kinds_of(table)):
                held = None if wanted.window is None else self._held(table, wanted)
                parts.append(self._read_table(table, wanted) if held is None else held)
        return concatenate(parts, wanted.columns)

    def _held(self, table: _Table, wanted: Selection) -> Events | None:
        """Return the rows of a table in a window, where the reader has them at hand."""
        return None

    def _beside_tables(self, wanted: Selection) -> list[Events]:
        """Return the events that are rows of none of the tables."""
        return []

    def _possible(self, events: Events, table: _Table, quality: Quality) -> Events:
        """Return the rows of a table, of kernels without those at impossible times."""
        if Kind.KERNEL not in table.kinds:
            return events
        calls = Selection(frozenset([Kind.API]), ("start", "process", "correlation"))
        possible = find_possible(
            events,
            quality,
            table.name,
            lambda operations: find_launches(self.read(calls), operations),
        )
        return events if possible is None else events.select(possible)

    @abstractmethod
    def _read_table(self, table: _Table, wanted: Selection) -> Events:
        """Read the rows of a table that are of some kinds and overlap a window."""

    def close(self) -> None:
        self._database.close()
