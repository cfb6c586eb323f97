"""The SQL that reads event columns from an nsys export, of the columns that it has."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np

from gputrace.traces.columns import Query
from gputrace.traces.events import COLUMN_TYPES, Kind
from gputrace.traces.nsys.schema import Table
from gputrace.traces.sqlite import Database, quoted
from gputrace.traces.trace import Window

INLINE_TEXT: Final = -2
"""Names from here down stand for NVTX text that is not in StringIds.

In what a query reads, this minus the rowid; in event columns, this minus the number of the text.
"""
GRAPHS: Final = -(1 << 30)
"""Name ids from here down stand for CUDA graphs: this minus the graph's id."""

_WITHIN_DEVICE, _PEER = 8, 10
"""Of ENUM_CUDA_MEMCPY_OPER."""


def build_query(
    database: Database, table: Table, columns: Collection[str], window: Window | None
) -> Query:
    """What to select for some event columns, of the nsys columns that are there."""
    expressions = _columns_there(database, table, columns)
    if table.name == "NVTX_EVENTS":
        _read_nvtx(database, expressions)
    if table.name == "CUPTI_ACTIVITY_KIND_MEMCPY":
        _read_peers(database, expressions)
    if table.kinds == (Kind.GRAPH,) and "name" in expressions:
        expressions["name"] = f"{GRAPHS} - {expressions['name']}"
    if expressions.pop("thread", None):  # globalTid holds both
        expressions["process"] = quoted("globalTid")
    types = {name: _raw_type(name) for name in expressions}
    conditions = [table.where] if table.where else []
    if window is not None:
        end = expressions.get("end", '"end"')
        conditions.append(f'"start" < {window.end} AND {end} >= {window.start}')
    return Query(table.name, expressions, types, " AND ".join(conditions))


def _columns_there(database: Database, table: Table, columns: Collection[str]) -> dict[str, str]:
    """For each event column, the first of the nsys columns for it that the table has."""
    found = {}
    for column in columns:
        there = (c for c in table.columns.get(column, ()) if database.has(table.name, c))
        if (candidate := next(there, None)) is not None:
            found[column] = quoted(candidate)
    return found


def _read_nvtx(database: Database, expressions: dict[str, str]) -> None:
    """Marks have no end; texts that were not registered have no id and stand for themselves."""
    start = expressions["start"]
    end = expressions.get("end")
    expressions["end"] = f"COALESCE({end}, {start})" if end else start
    if "name" in expressions and database.has("NVTX_EVENTS", "text"):
        expressions["name"] = f"COALESCE({expressions['name']}, {INLINE_TEXT} - rowid)"


def _read_peers(database: Database, expressions: dict[str, str]) -> None:
    """A device-to-device copy whose ends are two devices is a peer copy."""
    devices = ("srcDeviceId", "dstDeviceId")
    if "kind" in expressions and database.has("CUPTI_ACTIVITY_KIND_MEMCPY", *devices):
        kind = expressions["kind"]
        expressions["kind"] = (
            f"CASE WHEN {kind} = {_WITHIN_DEVICE} AND srcDeviceId <> dstDeviceId "
            f"THEN {_PEER} ELSE {kind} END"
        )


def _raw_type(column: str) -> type[np.signedinteger[Any]]:
    """Ids that are packed or translated are read whole, the rest in the contract's type."""
    return np.int64 if column in ("process", "thread", "kind") else COLUMN_TYPES[column]
