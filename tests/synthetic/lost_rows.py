"""Rows taken out of traces of generated runs, in the ways that recorders lose some."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ON_GPU: Final = tuple(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
_CALLS: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"


@dataclass(frozen=True, slots=True)
class Loss:
    """A way to lose rows.

    Attributes:
        name: for the table.
        tables: that lose the share of their rows.
        at_start: whether these are the first ones; else any.
        of_one: whether one process alone loses them.
        with_calls: whether the calls of the lost operations are lost, too.
        without_calls: whether the trace has no calls at all.
    """

    name: str
    tables: tuple[str, ...]
    at_start: bool = False
    of_one: bool = False
    with_calls: bool = False
    without_calls: bool = False


LOSSES: Final = (
    Loss("operations at random", _ON_GPU),
    Loss("calls at random", (_CALLS,)),
    Loss("both at random", (*_ON_GPU, _CALLS)),
    Loss("the first operations", _ON_GPU, at_start=True),
    Loss("operations of one rank", _ON_GPU, of_one=True),
    Loss("operations with their calls at random", _ON_GPU, with_calls=True),
    Loss("operations of one rank with their calls", _ON_GPU, of_one=True, with_calls=True),
    Loss("operations at random, without calls", _ON_GPU, without_calls=True),
    Loss("operations of one rank, without calls", _ON_GPU, of_one=True, without_calls=True),
)


def lose(path: Path, loss: Loss, share: float, choose: random.Random) -> None:
    """Takes rows out of a trace."""
    with closing(sqlite3.connect(path)) as trace, trace:
        there = {name for (name,) in trace.execute("SELECT name FROM sqlite_master")}
        if loss.without_calls:
            trace.execute(f"DROP TABLE {_CALLS}")
        process = None
        for table in (table for table in loss.tables if table in there):
            column = "globalTid" if table == _CALLS else "globalPid"
            sql = f"SELECT rowid, {column} >> 24 FROM {table}"
            if loss.at_start:
                # A recording that begins within the run has operations of earlier calls.
                sql += f" WHERE correlationId IN (SELECT correlationId FROM {_CALLS})"
            sql += " ORDER BY start"
            rows = trace.execute(sql).fetchall()
            if loss.of_one and rows:
                process = process or choose.choice(sorted({of for _, of in rows}))
                rows = [row for row in rows if row[1] == process]
            count = round(share * len(rows))
            lost = rows[:count] if loss.at_start else choose.sample(rows, count)
            trace.execute("CREATE TEMP TABLE lost (id INTEGER PRIMARY KEY)")
            trace.executemany("INSERT INTO lost VALUES (?)", [(id,) for id, _ in lost])
            those = f"FROM {table} WHERE rowid IN (SELECT id FROM lost)"
            if loss.with_calls:
                trace.execute(
                    f"DELETE FROM {_CALLS} WHERE (correlationId, globalTid >> 24) IN"
                    f" (SELECT correlationId, globalPid >> 24 {those})"
                )
            trace.execute(f"DELETE {those}")
            trace.execute("DROP TABLE lost")
