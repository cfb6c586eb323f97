"""How SQLite files of strangers are opened: nothing that they declare is ever run.

SQLite looks at a file's own schema when a statement is prepared: views, triggers, checks, columns
that are computed. So each statement passes an authorizer (sqlite.org/c3ref/set_authorizer.html),
which costs nothing while rows are read. A connection that has no authorizer, such as ADBC's, runs
only what `Database.check` has let pass on one that has.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""What Python raises for a file that is broken: messages quote names, which need not be UTF-8."""
LONGEST_VALUE: Final = 64 << 20
"""Bytes of one text or blob that SQLite gives out or makes; what is longer is refused."""
MOST_ATTACHED: Final = 0
"""Other files that a connection to a trace may open."""

SETTINGS: Final = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0")
"""As sqlite.org/security.html says for files of strangers; pragmas that any connection takes."""

_OFF: Final = ("ENABLE_TRIGGER", "ENABLE_VIEW", "ENABLE_LOAD_EXTENSION", "ENABLE_FTS3_TOKENIZER",
    "TRUSTED_SCHEMA", "WRITABLE_SCHEMA")  # fmt: skip
_ON: Final = ("DEFENSIVE",)
"""Switches that Python lets us turn from 3.12 on; before, the authorizer does their work."""

_READING: Final = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_NO_COPYING: Final = {
    sqlite3.SQLITE_ATTACH,
    sqlite3.SQLITE_CREATE_TRIGGER,
    sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
    sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_CREATE_TEMP_VIEW,
    sqlite3.SQLITE_CREATE_VTABLE,
}
_DECLARING: Final = {
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_REINDEX,
}
"""What it takes to make a table with the indexes of its keys, and to write it into the list."""
_LISTING: Final = (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE)
_LIST: Final = "sqlite_master"
_ALSO_READING: Final = {
    (sqlite3.SQLITE_PRAGMA, "table_info"),
    (sqlite3.SQLITE_UPDATE, _LIST),
}
"""The second is what SQLite asks before it knows json_each; the file cannot be written anyway."""

Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]


def reading(
    action: int, first: str | None, second: str | None, file: str | None, within: str | None
) -> int:
    """Lets a statement read tables; not what a view or a trigger reads, nor anything else."""
    allowed = action in _READING or (action, first) in _ALSO_READING
    return _answer(allowed and within is None)


def copying(
    action: int, first: str | None, second: str | None, file: str | None, within: str | None
) -> int:
    """Lets rows be taken from one file to another, again without views and triggers."""
    return _answer(action not in _NO_COPYING and within is None)


def declaring(
    action: int, first: str | None, second: str | None, file: str | None, within: str | None
) -> int:
    """Lets a table be made, with keys but without functions: they would run for every row."""
    allowed = action in _DECLARING or (action in _LISTING and first == _LIST)
    return _answer(allowed and within is None)


def _answer(allowed: bool) -> int:
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def connect(uri: str, *, check_same_thread: bool = True) -> sqlite3.Connection:
    """Opens one file to read tables of it; ``uri`` says ``mode=ro``."""
    connection = sqlite3.connect(uri, uri=True, check_same_thread=check_same_thread)
    harden(connection)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, MOST_ATTACHED)
    connection.set_authorizer(reading)
    return connection


def harden(connection: sqlite3.Connection) -> None:
    """Settings for a connection that sees files of strangers, beside an authorizer."""
    for setting in SETTINGS:
        connection.execute(f"PRAGMA {setting}")
    switch: Any = getattr(connection, "setconfig", None)
    if switch is not None:
        for names, state in ((_OFF, False), (_ON, True)):
            for name in names:
                switch(getattr(sqlite3, f"SQLITE_DBCONFIG_{name}"), state)


@contextmanager
def under(connection: sqlite3.Connection, authorizer: Authorizer) -> Iterator[sqlite3.Connection]:
    """The connection while an authorizer looks at its statements."""
    connection.set_authorizer(authorizer)
    try:
        yield connection
    finally:
        connection.set_authorizer(None)
