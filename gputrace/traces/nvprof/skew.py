"""A GPU whose clock nvprof got wrong: its work began before it was launched, or long after."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Final

from gputrace.traces.nvprof.file import CALLS, ON_GPU, PREFIX
from gputrace.traces.nvprof.rows import HAS_TIMES

_SAMPLE: Final = 20_000
"""Operations that are looked at, of each table: a wrong clock is wrong for all of them."""
_EARLIEST_NS: Final = -1_000_000
_LATEST_NS: Final = 60_000_000_000
"""The soonest of many operations begins with its launch; no queue on a GPU is a minute long."""


def find_skew(database: sqlite3.Connection, columns: Mapping[str, frozenset[str]]) -> int:
    """By how many nanoseconds the GPU's clock is ahead of the host's; 0 where it is right.

    Takes a database with the file attached as ``nvprof``, and the columns of its tables. With the
    answer taken off, the operation that began soonest after its launch began with it.
    """
    database.execute("CREATE TEMP TABLE launched (correlation INTEGER PRIMARY KEY, start INTEGER)")
    for table in ON_GPU:
        if table in columns:
            database.execute(
                "INSERT OR IGNORE INTO temp.launched SELECT r.correlationId, r.start "
                f"FROM nvprof.{PREFIX}{table} AS r WHERE {HAS_TIMES} LIMIT {_SAMPLE}"
            )
    delays = [
        database.execute(
            "SELECT min(l.start - r.start), count(*) "
            f"FROM nvprof.{PREFIX}{table} AS r JOIN temp.launched AS l "
            f"ON l.correlation = r.correlationId WHERE {HAS_TIMES}"
        ).fetchone()
        for table in CALLS
        if table in columns
    ]
    database.execute("DROP TABLE temp.launched")
    soonest = min((delay for delay, count in delays if count), default=0)
    return 0 if _EARLIEST_NS <= soonest <= _LATEST_NS else int(soonest)
