"""The tables of nvprof's files (.nvvp, .nvprof), as cutting must know them."""

from __future__ import annotations

from typing import Final

from gputrace.traces.nvprof.file import CALLS, KERNELS, ON_GPU, PREFIX
from gputrace.traces.sqlite import Database, quoted
from gputrace.traces.tables import Strings, Tables, Timed

_ONE_PROCESS: Final = "0"
"""A file is of one process."""
_NAMES: Final = frozenset({"name", "domain"})
_GPU: Final = ("deviceId", "copyKind", "srcDeviceId", "dstDeviceId")


def nvprof_tables(database: Database) -> Tables:
    """How to cut a file of nvprof."""
    kernels = {PREFIX + table: ("name",) for table in KERNELS}
    return Tables(database, _timed, Strings("StringTable", "_id_", _string_columns, kernels))


def _timed(database: Database, table: str) -> Timed | None:
    columns, name = database.tables[table], table.removeprefix(PREFIX)
    if {"timestamp", "id"} <= columns.keys():
        moment = quoted("timestamp")  # Markers: a row for the start and one for the end.
        return Timed(moment, moment, together="id")
    if not {"start", "end"} <= columns.keys():
        return None
    start, end = quoted("start"), quoted("end")
    pair = _ONE_PROCESS, "correlationId"
    if name in ON_GPU and "correlationId" in columns:
        return Timed(start, end, tuple(c for c in _GPU if c in columns), issues=pair)
    if name in CALLS and {"correlationId", "threadId", "cbid"} <= columns.keys():
        return Timed(start, end, ("threadId", "cbid"), issued=pair)
    return Timed(start, end)


def _string_columns(declaration: str) -> frozenset[str]:
    """Columns that hold ids of StringTable; those that a table lacks are no matter."""
    return _NAMES
