"""Small nsys exports made by hand: what a test is about, and little else."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:  # the nsys that stands for NVIDIA's starts often, and needs no numpy
    from gputrace.model.trace import Trace

KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH_TRACE: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX: Final = "NVTX_EVENTS"
SAMPLE: Final = "GPUTRACE_PYTHON_SAMPLE"
STEP: Final = "GPUTRACE_STEP"

H2D, D2H, D2D, PEER, UNIFIED_H2D, UNIFIED_D2H = 1, 2, 8, 10, 11, 12
"""ENUM_CUDA_MEMCPY_OPER."""
PAGEABLE, PINNED, DEVICE = 0, 1, 2
"""ENUM_CUDA_MEM_KIND: nsys counts from 0 for pageable."""
PUSH_POP_RANGE, MARK = 59, 34
"""ENUM_NSYS_EVENT_TYPE."""

_ON_GPU: Final = "start end deviceId contextId streamId correlationId globalPid"
COLUMNS: Final = {
    KERNEL: f"{_ON_GPU} demangledName shortName",
    MEMCPY: f"{_ON_GPU} bytes copyKind srcKind dstKind srcDeviceId dstDeviceId",
    MEMSET: f"{_ON_GPU} bytes",
    GRAPH_TRACE: f"{_ON_GPU} graphId",
    RUNTIME: "start end eventClass globalTid correlationId nameId",
    NVTX: "start end eventType globalTid text textId domainId",
    SAMPLE: "start globalTid nameId innerNameId",
    STEP: "start end globalTid nameId step",
    "OSRT_API": "start end globalTid nameId",
    "StringIds": "id value",
    "TARGET_INFO_GPU": "id name busLocation cuDevice",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid",
    "META_DATA_EXPORT": "name value",
    "META_DATA_CAPTURE": "name value",
}
_TEXT: Final = {"value", "name", "text", "busLocation"}

Value = int | float | str | bytes | None


class Export:
    """An nsys export being made; as nsys does, it gets only the tables that have rows."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Value]]] = {}
        self._columns = {table: columns.split() for table, columns in COLUMNS.items()}
        self._strings: dict[str | bytes, int] = {}

    def add(self, table: str, **values: Value) -> Self:
        """A row of any table, by nsys's column names."""
        self.rows.setdefault(table, []).append(values)
        return self

    def string(self, text: str | bytes) -> int:
        """The id of a text in StringIds; bytes are written as TEXT that need not be UTF-8."""
        if text not in self._strings:
            self._strings[text] = 100 + len(self._strings)
            self.add("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def kernel(
        self, start: int, end: int, name: str | bytes = "gemm", *, pid: int = 100, **more: Value
    ) -> Self:
        text = self.string(name)
        row = _on_gpu(start, end, pid) | {"demangledName": text, "shortName": text} | more
        return self.add(KERNEL, **row)

    def copy(self, start: int, end: int, kind: int = H2D, *, pid: int = 100, **more: Value) -> Self:
        ends = {H2D: (PINNED, DEVICE), D2H: (DEVICE, PINNED)}.get(kind, (DEVICE, DEVICE))
        row: dict[str, Value] = {"bytes": 4096, "copyKind": kind}
        row |= {"srcKind": ends[0], "dstKind": ends[1]}
        return self.add(MEMCPY, **(_on_gpu(start, end, pid) | row | more))

    def memset(self, start: int, end: int, *, pid: int = 100, **more: Value) -> Self:
        return self.add(MEMSET, **(_on_gpu(start, end, pid) | {"bytes": 64} | more))

    def graph(self, start: int, end: int, *, pid: int = 100, **more: Value) -> Self:
        return self.add(GRAPH_TRACE, **(_on_gpu(start, end, pid) | {"graphId": 1} | more))

    def call(
        self, start: int, end: int, name: str, *, pid: int = 100, correlation: int = 0
    ) -> Self:
        """A call of the CUDA API."""
        return self.add(
            RUNTIME,
            start=start,
            end=end,
            eventClass=0,
            globalTid=global_id(pid, thread=pid),
            correlationId=correlation,
            nameId=self.string(name),
        )

    def card(self, id: int, bus: str | None, name: str = "NVIDIA H100") -> Self:
        """A row of TARGET_INFO_GPU."""
        return self.add("TARGET_INFO_GPU", id=id, name=name, busLocation=bus)

    def ordinal(self, pid: int, ordinal: int, card: int | None) -> Self:
        """A row of TARGET_INFO_CUDA_DEVICE: which card a process means by its CUDA ordinal."""
        return self.add("TARGET_INFO_CUDA_DEVICE", pid=pid, cudaId=ordinal, gpuId=card)

    def strip(self, table: str, *columns: str) -> Self:
        """Leaves columns out, as people do before they publish a trace."""
        self._columns[table] = [name for name in self._columns[table] if name not in columns]
        return self

    def give(self, table: str, *columns: str) -> Self:
        """Adds columns, or a table with these columns."""
        self._columns.setdefault(table, []).extend(columns)
        return self

    def write(self, path: Path) -> Path:
        """Makes the file."""
        with closing(sqlite3.connect(path)) as database, database:
            # Nobody needs the file once the machine has lost its power.
            database.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;")
            for table, rows in self.rows.items():
                columns = self._columns[table]
                declared = ", ".join(f'"{n}" {"TEXT" if n in _TEXT else ""}' for n in columns)
                database.execute(f'CREATE TABLE "{table}" ({declared})')
                insert(database, table, columns, rows)
        return path


Opened = Callable[[Export], "Trace"]
"""Writes an export and opens it: the fixture ``opened``."""


def insert(
    database: sqlite3.Connection,
    table: str,
    columns: Iterable[str],
    rows: Iterable[dict[str, Value]],
) -> None:
    """Adds rows to a table, of the columns named."""
    names = list(columns)
    # SQLite keeps what a column was given if that is no number; only TEXT may be bytes here.
    marks = ", ".join("CAST(? AS TEXT)" if name in _TEXT else "?" for name in names)
    listed = ", ".join(f'"{name}"' for name in names)
    database.executemany(
        f'INSERT INTO "{table}" ({listed}) VALUES ({marks})',
        [tuple(row.get(name) for name in names) for row in rows],
    )


def global_id(pid: int, *, host: int = 0, thread: int = 0) -> int:
    """nsys's globalPid and globalTid: 16 bits of host, 24 of process, 24 of thread."""
    return host << 48 | pid << 24 | thread


def _on_gpu(start: int, end: int, pid: int) -> dict[str, Any]:
    return {
        "start": start,
        "end": end,
        "deviceId": 0,
        "contextId": 1,
        "streamId": 7,
        "correlationId": 0,
        "globalPid": global_id(pid),
    }
