"""Hardened access to untrusted SQLite files: nothing that they declare is ever executed.

SQLite consults the schema of a file when it prepares a statement: views, triggers, checks and
generated columns. Each statement therefore passes an authorizer
(sqlite.org/c3ref/set_authorizer.html), which costs nothing while rows are read. A connection
without an authorizer, such as ADBC's, runs only statements that `Database.check` has approved.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""Exceptions of sqlite3 for a broken file; messages quote names, which need not be UTF-8."""
LONGEST_VALUE: Final = 64 << 20
"""Maximum bytes of a text or blob that SQLite may return or create."""
MOST_ATTACHED: Final = 0
"""Maximum number of files that a connection to a trace may attach."""

SETTINGS: Final = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0")
"""Pragmas for untrusted files, as recommended by sqlite.org/security.html."""

_OFF: Final = ("ENABLE_TRIGGER", "ENABLE_VIEW", "ENABLE_LOAD_EXTENSION", "ENABLE_FTS3_TOKENIZER",
    "TRUSTED_SCHEMA", "WRITABLE_SCHEMA")  # fmt: skip
_ON: Final = ("DEFENSIVE",)
"""Switches available from Python 3.12 on; before, the authorizer alone protects."""

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
"""Actions of creating a table with its key indexes and entering it in the schema table."""
_LISTING: Final = (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE)
_LIST: Final = "sqlite_master"
_ALSO_READING: Final = {
    (sqlite3.SQLITE_PRAGMA, "table_info"),
    (sqlite3.SQLITE_UPDATE, _LIST),
}
"""The second is requested when SQLite registers json_each; the file is read-only anyway."""

Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]


def _authorizer(allows: Callable[[int, str | None], bool]) -> Authorizer:
    """Return an authorizer of some actions on some names, except by views and triggers."""

    def authorize(
        action: int, first: str | None, second: str | None, file: str | None, within: str | None
    ) -> int:
        allowed = within is None and allows(action, first)
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    return authorize


reading: Final = _authorizer(
    lambda action, first: action in _READING or (action, first) in _ALSO_READING
)
"""Authorizes reading of tables, and nothing else."""
copying: Final = _authorizer(lambda action, first: action not in _NO_COPYING)
"""Authorizes copying of rows from one file to another."""
declaring: Final = _authorizer(
    lambda action, first: action in _DECLARING or (action in _LISTING and first == _LIST)
)
"""Authorizes creation of a table with keys, but without functions, which run for every row."""


def connect(uri: str, *, check_same_thread: bool = True) -> sqlite3.Connection:
    """Open a file for reading its tables; ``uri`` must contain ``mode=ro``."""
    connection = sqlite3.connect(uri, uri=True, check_same_thread=check_same_thread)
    harden(connection)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, MOST_ATTACHED)
    connection.set_authorizer(reading)
    return connection


def harden(connection: sqlite3.Connection) -> None:
    """Apply the settings for untrusted files to a connection, in addition to an authorizer."""
    for setting in SETTINGS:
        connection.execute(f"PRAGMA {setting}")
    switch: Any = getattr(connection, "setconfig", None)
    if switch is not None:
        for names, state in ((_OFF, False), (_ON, True)):
            for name in names:
                switch(getattr(sqlite3, f"SQLITE_DBCONFIG_{name}"), state)


@contextmanager
def under(connection: sqlite3.Connection, authorizer: Authorizer) -> Iterator[sqlite3.Connection]:
    """Set an authorizer on a connection for the duration of a ``with`` block."""
    connection.set_authorizer(authorizer)
    try:
        yield connection
    finally:
        connection.set_authorizer(None)
