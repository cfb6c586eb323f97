"""SQLite files: other values, rows, columns, tables and schemas in a valid one; broken pages."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from random import Random
from typing import Any, Final

from tests.fuzz import values
from tests.fuzz.mutators import raw

_ALWAYS: Final = ("KERNEL", "StringIds", "StringTable", "GPUTRACE_META", "Version", "DEVICE")
"""Endings of tables without which a file is no trace."""
_MOST_STEPS: Final = 1_000_000
"""Of SQLite's machine: a view that is put in a table's place may be endless."""
_PAGES: Final = ("1", "2", "0", "-1", "99999")


def mutate(rng: Random, data: bytes) -> bytes:
    """One to eight changes by SQL; or to the bytes of a file's pages."""
    if rng.random() < 0.15:
        return raw.mutate(rng, data)
    try:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
            database.deserialize(data)
            database.set_progress_handler(lambda: 1, _MOST_STEPS)
            tables = _tables(database)
            for _ in range(rng.choice((1, 1, 2, 3, 8))):
                if tables:
                    with suppress(sqlite3.Error, UnicodeDecodeError, OverflowError):
                        rng.choice(_CHANGES)(rng, database, rng.choice(tables))
            return database.serialize()
    except (sqlite3.Error, UnicodeDecodeError, MemoryError):
        return raw.mutate(rng, data)


def parts(data: bytes) -> list[bytes]:
    """The file with few of its tables: those that tell what it is, and one of the others each."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.deserialize(data)
        others = [table for table in _tables(database) if not table.endswith(_ALWAYS)]
    found = []
    for kept in others:
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
            database.deserialize(data)
            for table in others:
                if table != kept:
                    database.execute(f"DROP TABLE {_quoted(table)}")
            database.execute("VACUUM")
            found.append(database.serialize())
    return found


def _tables(database: sqlite3.Connection) -> list[str]:
    sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    sql += " AND typeof(name) = 'text'"
    return [name for (name,) in database.execute(sql)]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _columns(database: sqlite3.Connection, table: str) -> list[str]:
    found = [row[1] for row in database.execute(f"PRAGMA table_info({_quoted(table)})")]
    return found or ["rowid"]


def _value(rng: Random) -> tuple[str, Any]:
    """SQL for a value, and what it takes."""
    kind = rng.randrange(8)
    if kind < 3:
        return "?", values.stored(rng)
    if kind == 3:
        return "?", rng.choice(values.FLOATS)
    if kind == 4:
        return "CAST(? AS TEXT)", rng.choice((b"\xff\xfe", b"\xed\xa0\x80", b"a\0b"))
    if kind == 5:
        return "?", rng.choice((None, b"", b"\0\xff", b"\1" * 40))
    return "?", values.text(rng).encode("utf-8", "replace").decode()


def _set(rng: Random, database: sqlite3.Connection, table: str) -> None:
    column = _quoted(rng.choice(_columns(database, table)))
    mark, value = _value(rng)
    if rng.random() < 0.4:
        mark, value = f"CAST({column} * ? AS INTEGER)", rng.choice((-1, 2, 1000, 0.001))
    elif rng.random() < 0.2:
        mark, value = f"{column} + ?", rng.choice((1, -1, 1 << 31, 1 << 48, 10**9))
    sql = f"UPDATE {_quoted(table)} SET {column} = {mark}"
    if rng.random() < 0.7:
        sql += f" WHERE rowid % {rng.choice((2, 3, 5))} = {rng.randrange(2)}"
    database.execute(sql, (value,))


def _exchange(rng: Random, database: sqlite3.Connection, table: str) -> None:
    columns = _columns(database, table)
    one, other = _quoted(rng.choice(columns)), _quoted(rng.choice(columns))
    database.execute(f"UPDATE {_quoted(table)} SET {one} = {other}, {other} = {one}")


def _delete(rng: Random, database: sqlite3.Connection, table: str) -> None:
    where = f" WHERE rowid % 3 = {rng.randrange(3)}" if rng.random() < 0.7 else ""
    database.execute(f"DELETE FROM {_quoted(table)}{where}")


def _double(rng: Random, database: sqlite3.Connection, table: str) -> None:
    columns = ", ".join(_quoted(name) for name in _columns(database, table))
    rows = rng.choice((1, 3, 40))
    database.execute(
        f"INSERT INTO {_quoted(table)} ({columns}) SELECT {columns} FROM {_quoted(table)}, "
        f"(WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < {rows}) "
        "SELECT x FROM c) LIMIT 60"
    )


def _spread(rng: Random, database: sqlite3.Connection, table: str) -> None:
    """Add thousands of rows, one of whose columns counts up: devices, processes, streams."""
    columns = _columns(database, table)
    counted = rng.choice(columns)
    step = rng.choice((1, 1 << 24))
    given = ", ".join(f"x * {step}" if n == counted else _quoted(n) for n in columns)
    listed = ", ".join(map(_quoted, columns))
    database.execute(
        f"INSERT INTO {_quoted(table)} ({listed}) SELECT {given} FROM "
        "(WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 5000) "
        f"SELECT x FROM c), (SELECT * FROM {_quoted(table)} LIMIT 1)"
    )


def _renumber(rng: Random, database: sqlite3.Connection, table: str) -> None:
    far = rng.choice((1 << 31, 1 << 40, -5, (1 << 63) - 1000))
    database.execute(f"UPDATE {_quoted(table)} SET rowid = rowid + ?", (far,))


def _drop(rng: Random, database: sqlite3.Connection, table: str) -> None:
    database.execute(f"DROP TABLE {_quoted(table)}")


def _drop_column(rng: Random, database: sqlite3.Connection, table: str) -> None:
    column = _quoted(rng.choice(_columns(database, table)))
    database.execute(f"ALTER TABLE {_quoted(table)} DROP COLUMN {column}")


def _rename_column(rng: Random, database: sqlite3.Connection, table: str) -> None:
    column = _quoted(rng.choice(_columns(database, table)))
    name = rng.choice(("START", "e d", 'a"b', "rowid", "x" * 200, "globalPid", "value", "é"))
    database.execute(f"ALTER TABLE {_quoted(table)} RENAME COLUMN {column} TO {_quoted(name)}")


def _add_column(rng: Random, database: sqlite3.Connection, table: str) -> None:
    made = ("1", "zeroblob(100000)", "'x'", "1/0", "abs(-9223372036854775808)", "hex(zeroblob(9))")
    names = ("start", "end", "rank", "deviceId", "textId", "text", "globalPid", "bytes")
    column = rng.choice(names)
    if column in _columns(database, table):
        database.execute(f'ALTER TABLE {_quoted(table)} RENAME COLUMN "{column}" TO "old{column}"')
    database.execute(f'ALTER TABLE {_quoted(table)} ADD COLUMN "{column}" AS ({rng.choice(made)})')


def _view(rng: Random, database: sqlite3.Connection, table: str) -> None:
    """A view in the place of a table; one that never ends at times."""
    quoted = _quoted(table)
    endless = (
        "WITH RECURSIVE c(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM c) "
        "SELECT start, start AS end, start AS id, 'x' AS value, 'x' AS name FROM c"
    )
    database.execute(f'ALTER TABLE {quoted} RENAME TO "was {table}"')
    made = endless if rng.random() < 0.5 else f'SELECT * FROM "was {table}"'
    database.execute(f"CREATE VIEW {quoted} AS {made}")


def _rebuild(rng: Random, database: sqlite3.Connection, table: str) -> None:
    """Give the columns other types, keys and order."""
    columns = _columns(database, table)
    rng.shuffle(columns)
    kinds = ("", "TEXT", "INTEGER", "REAL", "BLOB", "INT COLLATE NOCASE", "NUMERIC", "ANY")
    declared = ", ".join(f"{_quoted(name)} {rng.choice(kinds)}" for name in columns)
    key = f", PRIMARY KEY ({_quoted(columns[0])})) WITHOUT ROWID" if rng.random() < 0.5 else ")"
    listed = ", ".join(map(_quoted, columns))
    database.execute(f'CREATE TABLE "new" ({declared}{key}')
    database.execute(f'INSERT OR IGNORE INTO "new" SELECT {listed} FROM {_quoted(table)}')
    database.execute(f"DROP TABLE {_quoted(table)}")
    database.execute(f'ALTER TABLE "new" RENAME TO {_quoted(table)}')


def _trigger(rng: Random, database: sqlite3.Connection, table: str) -> None:
    database.execute(
        f'CREATE TRIGGER "t{rng.randrange(99)}" AFTER INSERT ON {_quoted(table)} BEGIN '
        f"DELETE FROM {_quoted(table)}; END"
    )


def _schema(rng: Random, database: sqlite3.Connection, table: str) -> None:
    """Change what the file declares about its tables."""
    database.execute("PRAGMA writable_schema = ON")
    column, value = rng.choice(
        (
            ("rootpage", rng.choice(_PAGES)),
            ("sql", "'CREATE TABLE x (start, end'"),
            ("sql", "replace(sql, ',', ' ')"),
            ("sql", "NULL"),
            ("sql", "'CREATE VIRTUAL TABLE x USING fts5(a)'"),
            ("name", "'sqlite_x'"),
            ("name", "upper(name)"),
            ("type", "'index'"),
            ("rootpage", "(SELECT max(rootpage) FROM sqlite_master)"),
        )
    )
    database.execute(f"UPDATE sqlite_master SET {column} = {value} WHERE name = ?", (table,))


_Change = Callable[[Random, sqlite3.Connection, str], None]
_CHANGES: Final[tuple[_Change, ...]] = (
    *[_set] * 14, _exchange, _delete, _delete, _double, _double, _spread, _renumber, _drop,
    _drop_column, _drop_column, _rename_column, _add_column, _view, _rebuild, _trigger, _schema,
)  # fmt: skip
