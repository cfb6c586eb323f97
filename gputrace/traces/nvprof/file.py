"""What a file of nvprof holds, found by looking: its columns differ from version to version."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.errors import InputError
from gputrace.traces import guard

PREFIX: Final = "CUPTI_ACTIVITY_KIND_"
KERNELS: Final = ("CONCURRENT_KERNEL", "KERNEL", "CDP_KERNEL")
"""Tables of kernels: nearly all, those that ran one at a time, those that kernels launched."""
COPIES: Final = ("MEMCPY", "MEMCPY2")
ON_GPU: Final = (*KERNELS, *COPIES, "MEMSET", "GRAPH_TRACE")
CALLS: Final = ("RUNTIME", "DRIVER")
_TIMED: Final = (*ON_GPU, *CALLS, "SYNCHRONIZATION", "OVERHEAD")
_MAGIC: Final = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class NvprofFile:
    """One process, as nvprof wrote it down.

    Attributes:
        version: CUPTI's API version (12 is CUDA 10.1, 18 is 11.8, 22 is 12.4); 0 where it is not
            said.
        pid: of the process, 0 where no row tells.
        columns: by table that holds rows; names without `PREFIX`.
        start: the first moment in it, nanoseconds of CLOCK_REALTIME; None where it holds none.
        kernels: rows of kernels, those without times among them.
    """

    path: Path
    version: int
    pid: int
    columns: Mapping[str, frozenset[str]]
    start: int | None
    kernels: int


def read_file(path: Path) -> NvprofFile:
    """Looks through a file; raises InputError where it is none of nvprof's, or broken."""
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise InputError(path, "not a file of nvprof, or cut short")
    except OSError as error:
        raise InputError(path, error.strerror or str(error)) from None
    with opened(path) as database:
        return _look(path, database)


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The file, to read; what SQLite finds wrong with it meanwhile is an InputError."""
    try:
        with closing(guard.connect(f"{path.absolute().as_uri()}?mode=ro")) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            yield database
    except guard.ERRORS as error:
        raise InputError(path, f"broken ({error})") from None


def _look(path: Path, database: sqlite3.Connection) -> NvprofFile:
    columns = {
        table: _columns(database, PREFIX + table)
        for (table,) in database.execute(
            "SELECT substr(name, ?) FROM sqlite_master WHERE type = 'table' AND substr(name, 1, ?) "
            "= ?",
            (len(PREFIX) + 1, len(PREFIX), PREFIX),
        ).fetchall()
    }
    if not columns or not _columns(database, "StringTable"):
        raise InputError(path, "an SQLite file, but not of nvprof")
    columns = {table: names for table, names in columns.items() if _holds_rows(database, table)}
    version = database.execute("SELECT CAST(max(version) AS INTEGER) FROM Version").fetchone()[0]
    counts = [_count(database, table) for table in KERNELS if table in columns]
    return NvprofFile(
        path=path,
        version=version or 0,
        pid=_pid(database, columns),
        columns=columns,
        start=min(_starts(database, columns), default=None),
        kernels=sum(counts),
    )


def _columns(database: sqlite3.Connection, table: str) -> frozenset[str]:
    return frozenset(row[1] for row in database.execute(f"PRAGMA table_info({table})"))


def _holds_rows(database: sqlite3.Connection, table: str) -> bool:
    return database.execute(f"SELECT 1 FROM {PREFIX}{table} LIMIT 1").fetchone() is not None


def _count(database: sqlite3.Connection, table: str) -> int:
    return int(database.execute(f"SELECT count(*) FROM {PREFIX}{table}").fetchone()[0])


def _starts(database: sqlite3.Connection, columns: Mapping[str, frozenset[str]]) -> Iterator[int]:
    """The first moment of each table; a row without times has 0 for one."""
    named = [(table, "start") for table in _TIMED] + [("MARKER", "timestamp")]
    for table, column in named:
        if column in columns.get(table, ()):
            sql = f"SELECT CAST(min({column}) AS INTEGER) FROM {PREFIX}{table} WHERE {column} > 0"
            first = database.execute(sql).fetchone()[0]
            if first is not None:
                yield first


def _pid(database: sqlite3.Connection, columns: Mapping[str, frozenset[str]]) -> int:
    for table in CALLS:
        if "processId" in columns.get(table, ()):
            sql = f"SELECT CAST(processId AS INTEGER) FROM {PREFIX}{table} LIMIT 1"
            return database.execute(sql).fetchone()[0] or 0
    return 0
