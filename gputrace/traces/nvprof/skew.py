"""A GPU whose clock nvprof got wrong: its work began before it was launched, or long after."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Final

from gputrace.traces import guard
from gputrace.traces.nvprof.file import CALLS, ON_GPU, PREFIX
from gputrace.traces.nvprof.rows import HAS_TIMES
from gputrace.traces.sqlite import Database, broken

_SAMPLE: Final = 20_000
"""Operations that are looked at, of each table: a wrong clock is wrong for all of them."""
_ALL: Final = -1
_FEW: Final = 500
_MANY: Final = 8
_ENOUGH: Final = 100
"""What is looked at first: so many operations, so many times as many calls; pairs that will do."""
_JOINED: Final = {"correlationId", "start", "end"}
_FARTHEST: Final = 1 << 61
"""Nanoseconds by which no clock is wrong: such rows have lost their times."""
_EARLIEST_NS: Final = -1_000_000
_LATEST_NS: Final = 60_000_000_000
"""The soonest of many operations begins with its launch; no queue on a GPU is a minute long."""


def find_skew(
    database: sqlite3.Connection, columns: Mapping[str, frozenset[str]], file: str = "nvprof"
) -> int:
    """By how many nanoseconds the GPU's clock is ahead of the host's; 0 where it is right.

    Takes a connection, what it calls the file, and the columns of its tables. With the answer taken
    off, the operation that began soonest after its launch began with it.
    """
    soonest, count = _soonest(database, columns, file, _SAMPLE, _ALL)
    return 0 if not count or _plausible(soonest) or abs(soonest) > _FARTHEST else soonest


def measure_skew(file: Database, columns: Mapping[str, frozenset[str]]) -> int:
    """The same of a file that is open for reading; quick where the clock is right.

    The first operations and the first calls mostly belong together: what they say of a clock that
    is right need not be asked of all calls. Raises InputError where the file is broken.
    """
    try:
        with closing(guard.connect(file.uri)) as database, guard.under(database, guard.copying):
            soonest, count = _soonest(database, columns, "main", _FEW, _MANY * _FEW)
            if count >= _ENOUGH and _plausible(soonest):
                return 0
            return find_skew(database, columns, "main")
    except guard.ERRORS as error:
        raise broken(file.path, error) from error


def _plausible(delay: int) -> bool:
    return _EARLIEST_NS <= delay <= _LATEST_NS


def _soonest(
    database: sqlite3.Connection,
    columns: Mapping[str, frozenset[str]],
    file: str,
    operations: int,
    calls: int,
) -> tuple[int, int]:
    """The shortest delay between a call and what it launched, and how many of both were found.

    Looks at so many operations and calls of each table; calls may be `_ALL`.
    """
    database.execute("CREATE TEMP TABLE launched (correlation INTEGER PRIMARY KEY, start INTEGER)")
    for table in ON_GPU:
        if columns.get(table, frozenset()) >= _JOINED:
            database.execute(
                f"INSERT OR IGNORE INTO temp.launched "
                "SELECT CAST(r.correlationId AS INTEGER), r.start "
                f"FROM {file}.{PREFIX}{table} AS r WHERE {HAS_TIMES} LIMIT {operations}"
            )
    source = "{}" if calls == _ALL else f"(SELECT * FROM {{}} LIMIT {calls})"
    delays = [
        database.execute(
            "SELECT CAST(min(l.start - r.start) AS INTEGER), count(*) FROM "
            f"{source.format(f'{file}.{PREFIX}{table}')} AS r "
            f"JOIN temp.launched AS l ON l.correlation = r.correlationId WHERE {HAS_TIMES}"
        ).fetchone()
        for table in CALLS
        if columns.get(table, frozenset()) >= _JOINED
    ]
    database.execute("DROP TABLE temp.launched")
    found = [(int(delay), int(count)) for delay, count in delays if count]
    return min(found, default=(0, 0))[0], sum(count for _, count in found)
