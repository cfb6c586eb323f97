"""Writer of gputrace's trace files: SQLite with the tables of nsys exports, and its own.

Tools for nsys exports can read them: names and meanings are those of export schema 3.20. They join
the ENUM_ tables for labels: `nsys stats` rejects a file without ENUM_CUDA_MEMCPY_OPER. Numbers,
names and labels in these match export schemas 3.7 to 3.25. A file is written under a temporary name
beside its target and renamed when it is complete.
"""

from __future__ import annotations

import glob
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EIO, ENOSPC
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from gputrace.store import sqlite_security

_Names = Mapping[int, tuple[str, str]]

_WORDS: Final = {"H": "Host", "D": "Device", "A": "Array", "P": "Peer"}
_WAYS: Final = "HTOD DTOH HTOA ATOH ATOA ATOD DTOA DTOD HTOH PTOP"
_COPIES: Final = (
    ("UNKNOWN", "Unknown"),
    *((way, f"{_WORDS[way[0]]}-to-{_WORDS[way[-1]]}") for way in _WAYS.split()),
    ("UVM_HTOD", "Unified Host-to-Device"),
    ("UVM_DTOH", "Unified Device-to-Host"),
    ("UVM_DTOD", "Unified Device-to-Device"),
)
_MEMORY: Final = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static",
    "Managed Static", "Unknown")  # fmt: skip
_LAUNCHES: Final = (
    ("UNKNOWN", "Unknown"),
    ("REGULAR", "Regular"),
    ("COOPERATIVE_SINGLE_DEVICE", "Coop Single Device"),
    ("COOPERATIVE_MULTI_DEVICE", "Coop Multi Device"),
)
_OVERHEADS: Final = (
    ("UNDEFINED", "Undefined"),
    ("UNKNOWN", "Unknown"),
    ("DRIVER_COMPILER", "Driver JIT compiler (CUDA)"),
    ("CUPTI_BUFFER_FLUSH", "Buffer flush (Profiler)"),
    ("CUPTI_INSTRUMENTATION", "Instrumentation (Profiler)"),
    ("CUPTI_RESOURCE", "Resource creation/destruction (Profiler)"),
    ("RUNTIME_TRIGGERED_MODULE_LOADING", "Runtime module loading (CUDA)"),
    ("LAZY_FUNCTION_LOADING", "Lazy function loading (CUDA)"),
    ("COMMAND_BUFFER_FULL", "Command buffer full (CUDA)"),
)

UNKNOWN_OVERHEAD: Final = (1, "Unknown")
OVERHEADS: Final = {
    1: (2, "Driver JIT compiler (CUDA)"),
    **{(number - 2) << 16: (number, _OVERHEADS[number][1]) for number in range(3, 9)},
    7 << 16: (1, "Activity buffer request (Profiler)"),
}
"""Numbers and names used by nsys, by CUPTI overhead kind."""

MARK: Final = 34
PUSH_POP: Final = 59
START_END: Final = 60
DOMAIN: Final = 75
"""NVTX entries of ENUM_NSYS_EVENT_TYPE."""
GRAPH_NODE: Final = 77
"""Making of a node of a CUDA graph, in ENUM_NSYS_EVENT_CLASS."""


def _numbered(prefix: str, entries: Sequence[tuple[str, str]]) -> _Names:
    return {number: (prefix + name, label) for number, (name, label) in enumerate(entries)}


ENUMS: Final[Mapping[str, _Names]] = {
    "ENUM_CUDA_MEMCPY_OPER": _numbered("CUDA_MEMCPY_KIND_", _COPIES),
    "ENUM_CUDA_MEM_KIND": _numbered(
        "CUDA_MEMOPR_MEMORY_KIND_", [(label.upper().replace(" ", "_"), label) for label in _MEMORY]
    ),
    "ENUM_CUDA_KERNEL_LAUNCH_TYPE": _numbered("CUDA_KERNEL_LAUNCH_TYPE_", _LAUNCHES),
    "ENUM_CUPTI_OVERHEAD_TYPE": _numbered("OVERHEAD_", _OVERHEADS),
    "ENUM_NSYS_EVENT_CLASS": {
        0: ("TRACE_PROCESS_EVENT_CUDA_RUNTIME", "CUDA runtime"),
        1: ("TRACE_PROCESS_EVENT_CUDA_DRIVER", "CUDA driver"),
        GRAPH_NODE: ("TRACE_PROCESS_EVENT_CUDA_GRAPH_NODE_CREATION", "CUDA graph node creation"),
    },
    "ENUM_NSYS_EVENT_TYPE": {
        MARK: ("NvtxMark", "NvtxMark"),
        PUSH_POP: ("NvtxPushPopRange", "NvtxPushPopRange"),
        START_END: ("NvtxStartEndRange", "NvtxStartEndRange"),
        DOMAIN: ("NvtxDomainCreate", "NvtxDomainCreate"),
    },
}
"""Name and label of each number, by table."""


def _declared(columns: str) -> str:
    """Return the declaration of columns as `_COLUMNS` has them."""
    parts = (re.fullmatch(r"(\w+):?(\w*)(!?)", column) for column in columns.split())
    named = ((part[1], part[2] or "INTEGER", part[3]) for part in parts if part)
    return ", ".join(f"{name} {kind}{' NOT NULL' * bool(never)}" for name, kind, never in named)


_ON_GPU: Final = (
    "start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid "
)
_SPAN: Final = "start! end! "

_COLUMNS: Final = {
    "CUPTI_ACTIVITY_KIND_KERNEL": _ON_GPU + "demangledName! shortName! mangledName launchType "
    "cacheConfig registersPerThread! gridX! gridY! gridZ! blockX! blockY! blockZ! "
    "staticSharedMemory! dynamicSharedMemory! localMemoryPerThread! localMemoryTotal! gridId! "
    "sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig graphId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": _ON_GPU + "bytes! copyKind! deprecatedSrcId srcKind dstKind "
    "srcDeviceId srcContextId dstDeviceId dstContextId migrationCause graphNodeId virtualAddress",
    "CUPTI_ACTIVITY_KIND_MEMSET": _ON_GPU + "value! bytes! graphNodeId memKind",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _ON_GPU + "graphId! graphExecId!",
    "CUPTI_ACTIVITY_KIND_RUNTIME": _SPAN + "eventClass! globalTid correlationId nameId! "
    "returnValue! callchainId",
    "CUDA_GRAPH_NODE_EVENTS": _SPAN + "eventClass! globalTid nameId! graphNodeId! "
    "originalGraphNodeId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": _ON_GPU + "syncType! eventId! deprecatedSyncType "
    "eventSyncId",
    "CUPTI_ACTIVITY_KIND_OVERHEAD": _SPAN + "eventClass! globalTid correlationId nameId! "
    "overheadType",
    "NVTX_EVENTS": "start! end eventType! rangeId category color text:TEXT globalTid endGlobalTid "
    "textId domainId uint64Value int64Value doubleValue:REAL uint32Value int32Value "
    "floatValue:REAL jsonTextId jsonText:TEXT binaryData:TEXT",
    "PROCESSES": "globalPid pid name:TEXT",
    "ThreadNames": "nameId! priority globalTid",
    "TARGET_INFO_GPU": "vmId! id! name:TEXT busLocation:TEXT isDiscrete l2CacheSize totalMemory "
    "memoryBandwidth clockRate smCount pwGpuId uuid:TEXT luid chipName:TEXT cuDevice computeMajor "
    "computeMinor",
    "TARGET_INFO_CUDA_DEVICE": "gpuId! cudaId! pid! uuid:TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime:TEXT localTime:TEXT",
    "META_DATA_EXPORT": "name:TEXT! value:TEXT",
    "GPUTRACE_PROCESS": "globalPid! pid! host:TEXT rank worldSize localRank whole! note:TEXT",
    "GPUTRACE_LIFE": "globalPid! attempt! startNs! endNs! exitCode steps! firstStepNs lastStepNs",
    "GPUTRACE_STEP": _SPAN + "globalTid! nameId! step",
    "GPUTRACE_HOST_RANGE": _SPAN + "globalTid! nameId! kind! number",
    "GPUTRACE_MESSAGE": _SPAN + "globalTid! nameId! communicator bytes peer ranks",
    "GPUTRACE_HOST_COUNTER": _SPAN + "globalTid! nameId! value!",
    "GPUTRACE_PYTHON_SAMPLE": "start! globalTid! nameId! innerNameId! waitedNs",
    "GPUTRACE_WINDOW": _SPAN + "globalPid!",
    "GPUTRACE_API_WINDOW": _SPAN + "globalPid!",
    "GPUTRACE_CONTROL": _SPAN + "globalPid! idleCupti",
    "GPUTRACE_GRAPH_NODES": _SPAN + "globalPid!",
    "GPUTRACE_CLOCK": "globalPid! realtimeNs! monotonicNs! monotonicRawNs!",
    "GPUTRACE_NOTE": "globalPid timeNs text:TEXT!",
    "GPUTRACE_LOSS": "globalPid timeNs records reason:TEXT!",
}
"""Columns by table: integers, unless a type follows; ``!`` is NOT NULL."""

TABLES: Final[Mapping[str, str]] = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    **dict.fromkeys(ENUMS, "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT"),
    "GPUTRACE_META": "name TEXT NOT NULL PRIMARY KEY, value TEXT",
    **{table: _declared(columns) for table, columns in _COLUMNS.items()},
}
"""Column declarations by table; those not named GPUTRACE_ are as in nsys exports."""


def remove_unfinished(path: Path) -> None:
    """Remove temporary files of the trace left behind by killed processes."""
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = abandoned.name.split(".")[-2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            abandoned.unlink(missing_ok=True)


class TraceWriter:
    """Writer of one trace file, which appears when the ``with`` block ends without an error.

    If SQLite cannot write, as on a full disk, the end of the block raises OSError. Tables are
    created with their first rows, since nsys exports have no empty ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._unfinished.unlink(missing_ok=True)
        os.close(os.open(self._unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        # Opened as a URI so that ATTACH accepts URIs, too.
        uri = self._unfinished.absolute().as_uri()
        self._database = sqlite3.connect(uri, isolation_level=None, uri=True)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        sqlite_security.harden(self._database)
        self._database.execute("BEGIN")
        self._strings: dict[str, int] = {}
        self._first_string = 0

    def copy(self, source: Path, tables: Mapping[str, str]) -> None:
        """Copy tables of an SQLite file with their declarations, before anything is added.

        Args:
            source: the file, which must not be written meanwhile.
            tables: SQL conditions of the rows to copy, by table; they may refer to tables of the
                file as ``source.NAME``. Excluded rows leave no traces in this file.
        """
        with self.attached(source, "source") as database:
            declared = dict(database.execute("SELECT name, sql FROM source.sqlite_master"))
            for table, condition in tables.items():
                self.declare(declared[table])
                database.execute(
                    f'INSERT INTO main."{table}" SELECT * FROM source."{table}" WHERE {condition}'
                )
        if "StringIds" in tables:
            self._first_string = self.query("SELECT coalesce(max(id), -1) + 1 FROM StringIds")[0][0]

    @contextmanager
    def attached(self, path: Path | str, name: str) -> Iterator[sqlite3.Connection]:
        """Attach another file, by path or SQLite URI, under a name; the trace itself is ``main``.

        Meant for INSERT ... SELECT into tables created by `make`, without passing rows through
        Python. Nothing declared in the other file is executed.
        """
        # SQLite cannot attach within a transaction.
        self._database.execute("COMMIT")
        self._database.execute(f"ATTACH ? AS {name}", (str(path),))
        self._database.execute("BEGIN")
        self._database.set_authorizer(sqlite_security.copying)
        try:
            yield self._database
        finally:
            self._database.set_authorizer(None)
        self._database.execute("COMMIT")
        self._database.execute(f"DETACH {name}")
        self._database.execute("BEGIN")

    def declare(self, sql: str) -> None:
        """Create a table as declared by another file; raise sqlite3.Error if that does more."""
        self._database.set_authorizer(sqlite_security.declaring)
        self._database.execute(sql)
        self._database.set_authorizer(sqlite_security.copying)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Query the rows written so far."""
        return self._database.execute(sql).fetchall()

    def string(self, text: str) -> int:
        """Return the id of a text in StringIds, adding it if it is new."""
        return self.strings([text])[0]

    def strings(self, texts: Sequence[str]) -> list[int]:
        """Return the ids of texts in StringIds, adding new ones."""
        known = len(self._strings)
        for text in texts:
            self._strings.setdefault(text, self._first_string + len(self._strings))
        if len(self._strings) > known:
            added = islice(self._strings.items(), known, None)
            self.add_rows("StringIds", ["value", "id"], added)
        return [self._strings[text] for text in texts]

    def add(self, table: str, columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> None:
        """Add rows, given as columns of equal length; missing columns are NULL."""
        names = list(columns)
        lists = [c.tolist() if isinstance(c, np.ndarray) else c for c in columns.values()]
        if lists and len(lists[0]):
            self.add_rows(table, names, zip(*lists, strict=True))

    def add_rows(self, table: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Add rows of values for the given columns; create the table if it is one of `TABLES`."""
        if table in TABLES:
            self.make(table)
        listed, marks = ", ".join(names), ", ".join("?" * len(names))
        self._database.executemany(f"INSERT INTO {table} ({listed}) VALUES ({marks})", rows)

    def make(self, table: str, columns: str = "") -> None:
        """Create a table unless it exists; without columns, one of `TABLES`."""
        self._database.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns or TABLES[table]})")

    def add_enums(self) -> None:
        """Write the ENUM_ tables, and tables that other tools require even if empty."""
        for table, names in ENUMS.items():
            self.add_rows(table, ["id", "name", "label"], ((i, *two) for i, two in names.items()))
        for table in ("StringIds", "ThreadNames"):
            self.make(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._database.execute("COMMIT")
        except sqlite3.Error as problem:
            error = problem
        self._database.close()
        if error is None:
            self._unfinished.replace(self.path)
            return
        self._unfinished.unlink(missing_ok=True)
        if isinstance(error, sqlite3.Error):
            number = ENOSPC if error.sqlite_errorcode == sqlite3.SQLITE_FULL else EIO
            raise OSError(number, str(error), str(self.path)) from error
