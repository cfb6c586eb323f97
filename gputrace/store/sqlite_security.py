"""Hardened access to untrusted SQLite files: nothing that they declare is ever executed.

SQLite consults the schema of a file when it prepares a statement: views, triggers, checks and
generated columns. Each statement therefore passes an authorizer
(sqlite.org/c3ref/set_authorizer.html), which costs nothing while rows are read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sqlite_utils import Database

MAGIC: Final = b"SQLite format 3\0"
"""Beginning of an SQLite database (sqlite.org/fileformat2.html, section 1.3)."""
ERRORS: Final = (sqlite3.Error, UnicodeDecodeError)
"""Exceptions of sqlite3 for a broken file; messages quote names, which need not be UTF-8."""
LONGEST_VALUE: Final = 64 << 20
"""Maximum bytes of a text or blob that SQLite may return or create."""
MOST_SCHEMA: Final = 10_000
"""Maximum tables, indices, views and triggers of a trace; SQLite reads them before anything else,
for longer and longer the more there are."""
_STEPS_AN_ENTRY: Final = 7
"""Instructions of SQLite's virtual machine to read one of them, as sqlite3_progress_handler counts
(measured with SQLite 3.40)."""
MOST_ATTACHED: Final = 0
"""Maximum number of files that a connection to a trace may attach."""

SETTINGS: Final = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0")
"""Pragmas for untrusted files, as recommended by sqlite.org/security.html."""

_SWITCHES: Final = {
    **dict.fromkeys(("ENABLE_TRIGGER", "ENABLE_VIEW", "ENABLE_LOAD_EXTENSION"), False),
    **dict.fromkeys(("ENABLE_FTS3_TOKENIZER", "TRUSTED_SCHEMA", "WRITABLE_SCHEMA"), False),
    "DEFENSIVE": True,
}
"""Switches available from Python 3.12 on; before, the authorizer alone protects."""

Authorizer = Callable[[int, str | None, str | None, str | None, str | None], int]


def _authorizer(
    actions: set[int], named: Collection[tuple[int, str]] = (), *, deny: bool = False
) -> Authorizer:
    """Return an authorizer that allows, or denies, actions, or actions on named things only.

    Views and triggers may do nothing.
    """

    def authorize(
        action: int, first: str | None, second: str | None, file: str | None, within: str | None
    ) -> int:
        listed = action in actions or (action, first) in named
        return sqlite3.SQLITE_OK if within is None and listed != deny else sqlite3.SQLITE_DENY

    return authorize


_UPDATE_SCHEMA: Final = (sqlite3.SQLITE_UPDATE, "sqlite_master")

reading: Final = _authorizer(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE},
    # SQLite updates the schema to register json_each; the file is read-only anyway.
    {*((sqlite3.SQLITE_PRAGMA, f"table_{pragma}") for pragma in ("info", "xinfo")), _UPDATE_SCHEMA},
)
"""Authorizes reading of tables, and nothing else."""
copying: Final = _authorizer(
    {
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_CREATE_TRIGGER,
        sqlite3.SQLITE_CREATE_TEMP_TRIGGER,
        sqlite3.SQLITE_CREATE_VIEW,
        sqlite3.SQLITE_CREATE_TEMP_VIEW,
        sqlite3.SQLITE_CREATE_VTABLE,
    },
    deny=True,
)
"""Authorizes copying of rows from one file to another."""
declaring: Final = _authorizer(
    {
        sqlite3.SQLITE_CREATE_TABLE,
        sqlite3.SQLITE_CREATE_INDEX,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_REINDEX,
    },
    {(sqlite3.SQLITE_INSERT, "sqlite_master"), _UPDATE_SCHEMA},
)
"""Authorizes creation of a table with keys, but without functions, which run for every row."""


def is_database(path: Path) -> bool:
    """Return True for a file that begins as an SQLite database; a pipe is not waited for."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
    return False


def connect(uri: str, *, check_same_thread: bool = True) -> sqlite3.Connection:
    """Open a file for reading its tables; ``uri`` must contain ``mode=ro``."""
    connection = sqlite3.connect(uri, uri=True, check_same_thread=check_same_thread)
    connection.set_progress_handler(lambda: 1, MOST_SCHEMA * _STEPS_AN_ENTRY)
    try:
        harden(connection)
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 0")
    except sqlite3.OperationalError as error:
        connection.close()
        if "interrupted" not in str(error):
            raise
        raise sqlite3.DatabaseError(f"more than {MOST_SCHEMA:,} tables and views") from error
    connection.set_progress_handler(None, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, MOST_ATTACHED)
    connection.set_authorizer(reading)
    return connection


def open_own(path: Path) -> tuple[Database, int, int]:
    """Open a file of our own for reading and writing; it may have been replaced by any other.

    Returns it with its application id and version, both 0 in a new file.
    """
    # A third of a second, more with pandas: only for commands that need such a file.
    from sqlite_utils import Database

    connection = sqlite3.connect(path)
    try:
        harden(connection)
        connection.set_authorizer(copying)
        application, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version")
        )
    except BaseException:
        connection.close()
        raise
    return Database(connection, execute_plugins=False), application, version


def harden(connection: sqlite3.Connection) -> None:
    """Apply the settings for untrusted files to a connection, in addition to an authorizer."""
    for setting in SETTINGS:
        connection.execute(f"PRAGMA {setting}")
    if switch := getattr(connection, "setconfig", None):
        for name, state in _SWITCHES.items():
            switch(getattr(sqlite3, f"SQLITE_DBCONFIG_{name}"), state)
