"""SQLite trace files: checked, opened without a trace of us, and read into numpy columns.

Files are opened read-only and immutable: no lock is taken and nothing is written beside them.
SQLite then ignores locks and journals, so what they would have told is checked here first; that
nothing in them is run, `guard` sees to.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
import weakref
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Final
from urllib.parse import quote

from gputrace.errors import InputError
from gputrace.traces import guard

MAGIC: Final = b"SQLite format 3\0"

LEAST_BYTES_A_ROW: Final = 4
"""A table whose rows come to less is no tree: its pages lead to one another again and again."""
_LOCK_BYTES: Final = (0x40000000, 512)
"""Offset and length of SQLite's lock bytes (sqlite.org/fileformat2.html, section 1.3)."""


class Database:
    """One SQLite file. Raises InputError for whatever is wrong with it.

    Attributes:
        path: the file.
        uri: opens it read-only and immutable.
        most_rows: what no table of a file of its size can have more of.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1"
        check_file(path)
        self.most_rows = path.stat().st_size // LEAST_BYTES_A_ROW
        self._checking = Lock()
        try:
            self._connection = guard.connect(self.uri, check_same_thread=False)
        except guard.ERRORS as error:
            raise broken(path, error) from error
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        # For programs that never close what they open: from 3.13 on, Python warns of those.
        weakref.finalize(self, self._connection.close)

    def close(self) -> None:
        self._connection.close()

    def query(self, sql: str, parameters: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows of a query, text that is not UTF-8 with replacement characters."""
        try:
            rows = self._connection.execute(sql, parameters)
            yield from islice(rows, self.most_rows)
            if next(rows, None) is not None:
                raise self.endless()
        except (*guard.ERRORS, MemoryError) as error:
            raise broken(self.path, error) from error

    def check(self, sql: str) -> None:
        """Raises InputError for a statement that is not to be run on any other connection either.

        Several threads may ask.
        """
        try:
            with self._checking:
                self._connection.execute(f"EXPLAIN {sql}").close()
        except guard.ERRORS as error:
            raise broken(self.path, error) from error

    def endless(self) -> InputError:
        """What to tell where more rows come than the file can hold."""
        return InputError(self.path, "broken SQLite file (more rows than fit into it); not read on")

    @cached_property
    def tables(self) -> dict[str, dict[str, str]]:
        """Declared column types by table and column. Views and virtual tables do not count."""
        names = self.query(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND typeof(name) = 'text' "
            "AND rootpage > 0 ORDER BY name"
        )
        return {
            name: {row[1]: row[2] for row in self.query(f"PRAGMA table_info({quoted(name)})")}
            for (name,) in list(names)
        }

    @property
    def is_dlprof(self) -> bool:
        """Whether DLProf made it, by the views that its viewer shows."""
        sql = (
            "SELECT 1 FROM sqlite_master WHERE name LIKE '%dlprof%' OR (type = 'view' AND name IN "
            "('view_op_nodes', 'view_iterations_profiled', 'view_domain_model_gpu_utilization'))"
        )
        return next(self.query(sql), None) is not None

    def has(self, table: str, *columns: str) -> bool:
        """Whether the table is there with all the columns."""
        return table in self.tables and self.tables[table].keys() >= set(columns)

    def row_bounds(self, table: str) -> tuple[int, int] | None:
        """First and last rowid, or None where there are no rows, or no rowids to go by."""
        if any(name.lower() == "rowid" for name in self.tables.get(table, ())):
            return None  # A column of that name hides them.
        sql = f"SELECT (SELECT min(rowid) FROM {quoted(table)}), max(rowid) FROM {quoted(table)}"
        try:
            first, last = self._connection.execute(sql).fetchone()
        except sqlite3.OperationalError:
            return None
        except guard.ERRORS as error:
            raise broken(self.path, error) from error
        return None if first is None or first > last else (first, last)


def quoted(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def broken(path: Path, error: Exception) -> InputError:
    """What to tell about an error of SQLite in the middle of a file.

    SQLite is out of memory where a broken record says that it is huge; what it says of a broken
    schema quotes it, which need not be UTF-8.
    """
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        text = error.object.decode("utf-8", "replace")
    reason = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_AUTH:
        told = f"has a view or code where a trace has a table ({reason}): not run, not read"
        return InputError(path, told)
    return InputError(path, f"broken SQLite file ({reason}); copy or export it again")


def check_file(path: Path) -> None:
    """Raises InputError unless this is a whole SQLite file that nobody is writing."""
    with open_input(path) as file:
        header = file.read(100)
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise InputError(path, "the file is empty; the recording or the copy failed")
        if not header.startswith(MAGIC):
            raise InputError(path, "not an SQLite file")
        if len(header) < 100:
            raise InputError(path, f"truncated: {size} bytes, less than an SQLite header")
        expected = _declared_size(header)
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
                f"{unfinished.name} beside it holds unfinished writes; let the program that "
                "writes it end, or open it once with sqlite3",
            )


def open_input(path: Path) -> Any:
    """Opens a file for reading bytes; raises InputError that says why it cannot be."""
    try:
        if path.is_dir():
            raise InputError(path, "is a directory; name the trace file in it")
        if path.exists() and not path.is_file():
            raise InputError(path, "not a regular file; save what comes out of it, and name that")
        return path.open("rb")
    except FileNotFoundError:
        raise InputError(path, "no such file") from None
    except PermissionError:
        raise InputError(path, "no permission to read it; check its owner and mode") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(path, f"cannot be opened: {reason}") from None


def _declared_size(header: bytes) -> int:
    """Bytes by the page count of the header; 0 where old writers left the count stale."""
    page, changes, pages, valid_for = struct.unpack(">16xH6xII60xI4x", header)
    page = 65536 if page == 1 else page
    return page * pages if changes == valid_for else 0


def _is_locked(descriptor: int) -> bool:
    """Whether another process holds a write lock; asks without taking one."""
    request = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, *_LOCK_BYTES, 0)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, request)
    except OSError:
        return False
    return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)
