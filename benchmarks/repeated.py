"""A long run made of a short one: its rows again and again, each time later."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

PAUSE_NS: Final = 10_000_000
"""Between the last row of one round and the first of the next."""
_TIMES: Final = {"start", "end"}
_IDS: Final = {"correlationId"}


def repeat(path: Path, times: int) -> None:
    """Lets an nsys export hold its rows so many times."""
    with closing(sqlite3.connect(path)) as database:
        database.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;")
        tables = _timed(database)
        rows = {table: _only(database, f"SELECT max(rowid) FROM {table}") or 0 for table in tables}
        first = min(_only(database, f"SELECT min(start) FROM {t}") for t in tables if rows[t])
        last = max(
            _only(database, f'SELECT max("{"end" if "end" in tables[t] else "start"}") FROM {t}')
            for t in tables
            if rows[t]
        )
        ids = max(
            _only(database, f"SELECT max(correlationId) FROM {t}") or 0
            for t in tables
            if _IDS & set(tables[t])
        )
        for round_ in range(1, times):
            later, more = round_ * (last - first + PAUSE_NS), round_ * (ids + 1)
            for table, columns in tables.items():
                values = ", ".join(_value(column, later, more) for column in columns)
                database.execute(
                    f"INSERT INTO {table} SELECT {values} FROM {table} WHERE rowid <= ?",
                    (rows[table],),
                )
        database.commit()


def _timed(database: sqlite3.Connection) -> dict[str, list[str]]:
    """The columns of the tables whose rows have a time."""
    names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    columns = {
        name: [row[1] for row in database.execute(f"PRAGMA table_info({name})")]
        for (name,) in names
    }
    return {name: own for name, own in columns.items() if "start" in own}


def _only(database: sqlite3.Connection, sql: str) -> int:
    value: int = database.execute(sql).fetchone()[0]
    return value


def _value(column: str, later: int, more: int) -> str:
    if column in _TIMES:
        return f'"{column}" + {later}'
    return f'"{column}" + {more}' if column in _IDS else f'"{column}"'
