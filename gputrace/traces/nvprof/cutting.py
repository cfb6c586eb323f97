"""The tables of nvprof's files (.nvvp, .nvprof), as cutting must know them."""

from __future__ import annotations

from functools import partial
from typing import Final

from gputrace.traces.nvprof.file import CALLS, KERNELS, ON_GPU, PREFIX
from gputrace.traces.sqlite import Database, quoted
from gputrace.traces.tables import Strings, Tables, Timed

_ONE_PROCESS: Final = "0"
"""A file is of one process."""
_NAMES: Final = frozenset({"name", "domain"})
_GPU: Final = ("deviceId", "copyKind", "srcDeviceId", "dstDeviceId")


def nvprof_tables(database: Database, origin: int = 0, late: int = 0) -> Tables:
    """How to cut a file of nvprof.

    Windows count from ``origin``, nanoseconds of the file's clock; its times on a GPU are ``late``
    by so much.
    """
    kernels = {PREFIX + table: ("name",) for table in KERNELS}
    strings = Strings("StringTable", "_id_", _string_columns, kernels)
    return Tables(database, partial(_timed, origin=origin, late=late), strings)


def _timed(database: Database, table: str, origin: int, late: int) -> Timed | None:
    columns, name = database.tables[table], table.removeprefix(PREFIX)
    shift = origin + (late if name in ON_GPU else 0)
    if {"timestamp", "id"} <= columns.keys():
        moment = _after(shift, "timestamp")  # Markers: a row for the start and one for the end.
        return Timed(moment, moment, together="id")
    if not {"start", "end"} <= columns.keys():
        return None
    start, end = _after(shift, "start"), _after(shift, "end")
    pair = _ONE_PROCESS, "correlationId"
    if name in ON_GPU and "correlationId" in columns:
        return Timed(start, end, tuple(c for c in _GPU if c in columns), issues=pair)
    if name in CALLS and {"correlationId", "threadId", "cbid"} <= columns.keys():
        return Timed(start, end, ("threadId", "cbid"), issued=pair)
    return Timed(start, end)


def _after(moment: int, column: str) -> str:
    return f"({quoted(column)} - {moment})" if moment else quoted(column)


def _string_columns(declaration: str) -> frozenset[str]:
    """Columns that hold ids of StringTable; those that a table lacks are no matter."""
    return _NAMES
