"""What of a trace may be shown, in SQL."""

from __future__ import annotations

import sqlite3
from typing import Protocol

from gputrace.traces.sqlite import quoted


class Filter(Protocol):
    """What of a trace may be shown; `redaction.Redaction` is one."""

    def takes(self, table: str) -> bool:
        """Whether anything of a table may be shown."""

    def prepare(self, database: sqlite3.Connection) -> None:
        """Makes the SQL functions that `shown` uses."""

    def shown(self, table: str, column: str) -> str:
        """SQL of what is shown of a column."""

    def shown_text(self) -> str:
        """SQL of what is shown of ``value``, a text that names no kernel."""


class Everything:
    """All of a trace may be shown."""

    def takes(self, table: str) -> bool:
        return True

    def prepare(self, database: sqlite3.Connection) -> None:
        pass

    def shown(self, table: str, column: str) -> str:
        return quoted(column)

    def shown_text(self) -> str:
        return '"value"'
