"""Cuts a small trace out of a large nsys export, for the tests and the demo.

    python tests/data/cut.py big.sqlite small.sqlite.xz 28.10s:28.65s

Kept are the rows that touch the window, whole; of each table the columns that gputrace reads; of
the strings those that are referred to. Environment, output and names of other processes stay out.
"""

from __future__ import annotations

import lzma
import sqlite3
import sys
import tempfile
from pathlib import Path

from gputrace.units import parse_window

_TIMED = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "start end deviceId contextId streamId correlationId globalPid "
    "demangledName shortName",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start end deviceId contextId streamId correlationId "
    "globalPid graphId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start end deviceId contextId streamId correlationId globalPid "
    "bytes copyKind srcKind dstKind srcDeviceId dstDeviceId",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start end deviceId contextId streamId correlationId globalPid "
    "bytes",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end globalTid correlationId nameId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start end deviceId contextId streamId correlationId "
    "globalPid syncType",
    "OSRT_API": "start end globalTid nameId",
    "NVTX_EVENTS": "start end eventType globalTid text textId domainId",
    "PROFILER_OVERHEAD": "start end globalTid nameId",
    "CUPTI_ACTIVITY_KIND_OVERHEAD": "start end globalTid nameId overheadType",
}
_WHOLE = {
    "TARGET_INFO_GPU": "id name busLocation cuDevice",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid",
    "META_DATA_EXPORT": "name value",
}
_NAME_COLUMNS = ("demangledName", "shortName", "nameId", "textId")


def cut(source: Path, target: Path, start: int, end: int) -> None:
    """Writes the cut as an xz-compressed export."""
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "cut.sqlite"
        database = sqlite3.connect(small)
        database.execute("ATTACH ? AS big", (f"file:{source}?mode=ro&immutable=1",))
        used: set[int] = set()
        for table, columns in (_TIMED | _WHOLE).items():
            used |= _copy(database, table, columns.split(), start, end)
        _copy_processes(database)
        database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT)")
        for name in sorted(used):
            database.execute(
                "INSERT INTO StringIds SELECT id, value FROM big.StringIds WHERE id = ?", (name,)
            )
        database.commit()
        database.execute("DETACH big")
        database.execute("VACUUM")
        database.close()
        target.write_bytes(lzma.compress(small.read_bytes(), preset=9 | lzma.PRESET_EXTREME))


def _copy(
    database: sqlite3.Connection, table: str, wanted: list[str], start: int, end: int
) -> set[int]:
    """Copies a table's rows and gives back the string ids they use."""
    info = database.execute(f"PRAGMA big.table_info({table})").fetchall()
    columns = [(row[1], row[2]) for row in info if row[1] in wanted]
    if not columns:
        return set()
    declared = ", ".join(f"{name} {kind}" for name, kind in columns)
    names = ", ".join(name for name, _ in columns)
    database.execute(f"CREATE TABLE {table} ({declared})")
    where = ""
    if table in _TIMED:
        where = f"WHERE start < {end} AND COALESCE(end, start) >= {start} ORDER BY start"
    if table == "META_DATA_EXPORT":
        where = "WHERE name LIKE 'EXPORT_SCHEMA%' OR name LIKE 'EXPORT_PRODUCT%'"
    database.execute(f"INSERT INTO {table} SELECT {names} FROM big.{table} {where}")
    ids: set[int] = set()
    for name in _NAME_COLUMNS:
        if name in dict(columns):
            rows = database.execute(f"SELECT DISTINCT {name} FROM {table}")
            ids |= {row[0] for row in rows if row[0] is not None}
    return ids


def _copy_processes(database: sqlite3.Connection) -> None:
    """Only processes that used CUDA."""
    database.execute("CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT)")
    if database.execute("SELECT 1 FROM big.sqlite_master WHERE name = 'PROCESSES'").fetchone():
        database.execute(
            "INSERT INTO PROCESSES SELECT globalPid, pid, name FROM big.PROCESSES WHERE globalPid "
            "IN (SELECT DISTINCT globalPid FROM CUPTI_ACTIVITY_KIND_KERNEL)"
        )


if __name__ == "__main__":
    cut(Path(sys.argv[1]), Path(sys.argv[2]), *parse_window(sys.argv[3]))
