"""The one process that a file of nvprof is of: its id, its cards, its first moment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

from gputrace.traces import guard
from gputrace.traces.columns import Rows, in_threads, row_ranges
from gputrace.traces.nvprof.file import CALLS, PREFIX
from gputrace.traces.nvprof.tables import Table
from gputrace.traces.sqlite import Database, broken, quoted

_LATEST: Final = 1 << 62
"""Nanoseconds since 1970 that no clock shows."""
_MOST_DEVICES: Final = 0x7FFF
"""What the column ``device`` holds."""
_PROCESS: Final = 1
"""Of CUpti_ActivityObjectKind."""


@dataclass(frozen=True, slots=True)
class Card:
    """A row of DEVICE."""

    name: str
    uuid: str


def read_pid(database: Database) -> int:
    """The process's id; 0 where no row tells."""
    for table in CALLS:
        if database.has(PREFIX + table, "processId"):
            sql = f"SELECT processId FROM {PREFIX}{table} LIMIT 1"
            if isinstance(pid := next(database.query(sql), (None,))[0], int):
                return pid
    if database.has(f"{PREFIX}NAME", "objectKind", "objectId"):
        sql = f"SELECT objectId FROM {PREFIX}NAME WHERE objectKind = {_PROCESS}"
        raw = next(database.query(sql), (None,))[0]
        return int.from_bytes(raw[:4], "little") if isinstance(raw, bytes) else 0
    return 0


def read_cards(database: Database) -> dict[int, Card]:
    """The cards by their CUDA ordinals."""
    table = f"{PREFIX}DEVICE"
    if not database.has(table, "id", "name"):
        return {}
    uuid = "d.uuid" if database.has(table, "uuid") else "NULL"
    sql = (
        f"SELECT d.id, s.value, {uuid} FROM {table} AS d "
        "LEFT JOIN StringTable AS s ON s._id_ = d.name WHERE typeof(d.id) = 'integer'"
    )
    return {id: Card(str(name or ""), _uuid(raw)) for id, name, raw in database.query(sql)}


def _uuid(raw: object) -> str:
    return str(UUID(bytes=raw)) if isinstance(raw, bytes) and len(raw) == 16 else ""


def read_contexts(database: Database) -> dict[int, int]:
    """CUDA ordinals by the contexts on them."""
    table = f"{PREFIX}CONTEXT"
    if not database.has(table, "contextId", "deviceId"):
        return {}
    rows = database.query(
        f"SELECT contextId, deviceId FROM {table} "
        f"WHERE typeof(contextId) = 'integer' AND deviceId BETWEEN 0 AND {_MOST_DEVICES} "
        "AND typeof(deviceId) = 'integer'"
    )
    return dict(rows)


def first_moment(database: Database, tables: Sequence[Table], late: int) -> int:
    """The first moment of all tables, nanoseconds since 1970 UTC; 0 where no row has a time.

    The GPU's clock is ahead of the host's by ``late``. Raises InputError on a broken file.
    """
    found = []
    for table in tables:
        ranges = row_ranges(database, table.full_name)
        for first in in_threads(partial(_first, database, table), ranges):
            if first is not None:
                found.append(first - late if table.on_gpu else first)
    return min(found, default=0)


def _first(database: Database, table: Table, rows: Rows) -> int | None:
    """On a connection of its own, since several threads ask at once."""
    edge = quoted("start" if "start" in table.columns else "timestamp")
    sql = (
        f"SELECT min({edge}) FROM {quoted(table.full_name)} WHERE {edge} > 0 AND {edge} < {_LATEST}"
    )
    if rows is not None:
        sql += f" AND rowid >= {rows[0]} AND rowid < {rows[1]}"
    try:
        with closing(guard.connect(database.uri)) as connection:
            first = connection.execute(sql).fetchone()[0]
    except guard.ERRORS as error:
        raise broken(database.path, error) from error
    return first if isinstance(first, int) else None
