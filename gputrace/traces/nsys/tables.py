"""The tables of nsys exports and of gputrace's traces, as cutting must know them."""

from __future__ import annotations

import re
from typing import Final

from gputrace.traces.nsys.schema import MARK_TYPES, RANGE_TYPES
from gputrace.traces.sqlite import Database, quoted
from gputrace.traces.tables import Strings, Tables, Timed

_STRINGS: Final = re.compile(
    r"\b(demangledName|shortName|mangledName|nameId|innerNameId|textId|jsonTextId)\b"
    r'|^\s*"?(\w+)\b.*REFERENCES StringIds',
    re.MULTILINE,
)
"""Columns that name strings, in a table's declaration, where nsys says so in comments."""
_DECLARED_SYMBOLS: Final = re.compile(r"\b(symbol|module)\b(?=\s+INTEGER)")
"""Of call chains, where the declaration does not say so."""

_TIMES: Final = ("start", "timestamp", "timeNs")
_GPU: Final = ("globalPid", "deviceId", "copyKind", "srcDeviceId", "dstDeviceId")
"""Who rows on a GPU are of, as far as a table has it; a peer copy is on two GPUs."""


def string_columns(declaration: str) -> frozenset[str]:
    """The columns of a table that hold ids of StringIds, by its CREATE TABLE statement."""
    named = {found[1] or found[2] for found in _STRINGS.finditer(declaration)}
    return frozenset(named | {found[1] for found in _DECLARED_SYMBOLS.finditer(declaration)})


def _timed(database: Database, table: str) -> Timed | None:
    columns = database.tables[table]
    start = next((quoted(name) for name in _TIMES if name in columns), None)
    if start is None:
        return None
    timed = Timed(
        start,
        f'COALESCE("end", {start})' if "end" in columns else start,
        _groups(set(columns)),
        beside=start == quoted("timeNs"),
        always=_always(table, set(columns)),
    )
    if "correlationId" not in columns or not columns.keys() & {"globalPid", "globalTid"}:
        return timed
    process = "globalPid" if "globalPid" in columns else "globalTid"
    pair = f"{process} >> 24", "correlationId"
    if "deviceId" in columns:
        return Timed(timed.start, timed.end, timed.groups, issues=pair)
    return Timed(timed.start, timed.end, timed.groups, issued=pair)


def _groups(columns: set[str]) -> tuple[str, ...]:
    if "deviceId" in columns:
        return tuple(name for name in _GPU if name in columns)
    if "timeNs" in columns:
        return ("gpu",)
    if "globalTid" not in columns:
        return ()
    # What a thread last called before a wait for data is one of the names' last calls.
    return ("globalTid", "nameId") if {"correlationId", "nameId"} <= columns else ("globalTid",)


def _always(table: str, columns: set[str]) -> str:
    """NVTX keeps the names of domains and categories among its events; and without a row that tells
    when calls of a process were recorded, all of them were.
    """
    if table == "GPUTRACE_API_WINDOW":
        return "1"
    if table != "NVTX_EVENTS" or "eventType" not in columns:
        return "0"
    return f"eventType NOT IN {(*RANGE_TYPES, *MARK_TYPES)}"


STRINGS: Final = Strings(
    "StringIds",
    "id",
    string_columns,
    {"CUPTI_ACTIVITY_KIND_KERNEL": ("demangledName", "shortName", "mangledName")},
)


def nsys_tables(database: Database) -> Tables:
    """How to cut an nsys export, or a trace of ours."""
    return Tables(database, _timed, STRINGS)
