"""Writer of gputrace's trace files: SQLite with the tables of nsys exports, and its own.

Tools for nsys exports can read them: names and meanings are those of export schema 3.20. They join
the ENUM_ tables for labels: `nsys stats` rejects a file without ENUM_CUDA_MEMCPY_OPER. Numbers,
names and labels in these match export schemas 3.7 to 3.25. A file is written under a temporary name
beside its target and renamed when it is complete.
"""

from __future__ import annotations

import glob
import os
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
    },
    "ENUM_NSYS_EVENT_TYPE": {
        MARK: ("NvtxMark", "NvtxMark"),
        PUSH_POP: ("NvtxPushPopRange", "NvtxPushPopRange"),
        START_END: ("NvtxStartEndRange", "NvtxStartEndRange"),
        DOMAIN: ("NvtxDomainCreate", "NvtxDomainCreate"),
    },
}
"""Name and label of each number, by table."""


_ON_GPU: Final = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, "
    "contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, "
    "correlationId INTEGER, globalPid INTEGER"
)

TABLES: Final[Mapping[str, str]] = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    **dict.fromkeys(ENUMS, "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT"),
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_ON_GPU}, demangledName INTEGER NOT NULL, "
    "shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER, "
    "registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, "
    "gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, "
    "blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, "
    "dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, "
    "localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, "
    "graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER, graphId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_ON_GPU}, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, "
    "deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER, "
    "srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER, migrationCause INTEGER, "
    "graphNodeId INTEGER, virtualAddress INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_ON_GPU}, value INTEGER NOT NULL, bytes INTEGER NOT NULL, "
    "graphNodeId INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_ON_GPU}, graphId INTEGER NOT NULL, "
    "graphExecId INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, "
    "nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{_ON_GPU}, syncType INTEGER NOT NULL, "
    "eventId INTEGER NOT NULL, deprecatedSyncType INTEGER, eventSyncId INTEGER",
    "CUPTI_ACTIVITY_KIND_OVERHEAD": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, "
    "nameId INTEGER NOT NULL, overheadType INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, "
    "rangeId INTEGER, category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, "
    "endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER, "
    "int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, "
    "floatValue REAL, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "ThreadNames": "nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER",
    "TARGET_INFO_GPU": "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, "
    "isDiscrete INTEGER, l2CacheSize INTEGER, totalMemory INTEGER, memoryBandwidth INTEGER, "
    "clockRate INTEGER, smCount INTEGER, pwGpuId INTEGER, uuid TEXT, luid INTEGER, chipName TEXT, "
    "cuDevice INTEGER, computeMajor INTEGER, computeMinor INTEGER",
    "TARGET_INFO_CUDA_DEVICE": "gpuId INTEGER NOT NULL, cudaId INTEGER NOT NULL, "
    "pid INTEGER NOT NULL, uuid TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "GPUTRACE_META": "name TEXT NOT NULL PRIMARY KEY, value TEXT",
    "GPUTRACE_PROCESS": "globalPid INTEGER NOT NULL, pid INTEGER NOT NULL, host TEXT, "
    "rank INTEGER, worldSize INTEGER, localRank INTEGER, whole INTEGER NOT NULL, note TEXT",
    "GPUTRACE_STEP": "start INTEGER NOT NULL, end INTEGER NOT NULL, globalTid INTEGER NOT NULL, "
    "nameId INTEGER NOT NULL, step INTEGER",
    "GPUTRACE_HOST_RANGE": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "globalTid INTEGER NOT NULL, nameId INTEGER NOT NULL, kind INTEGER NOT NULL, number INTEGER",
    "GPUTRACE_MESSAGE": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "globalTid INTEGER NOT NULL, nameId INTEGER NOT NULL, communicator INTEGER, bytes INTEGER, "
    "peer INTEGER, ranks INTEGER",
    "GPUTRACE_HOST_COUNTER": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "globalTid INTEGER NOT NULL, nameId INTEGER NOT NULL, value INTEGER NOT NULL",
    "GPUTRACE_PYTHON_SAMPLE": "start INTEGER NOT NULL, globalTid INTEGER NOT NULL, "
    "nameId INTEGER NOT NULL, innerNameId INTEGER NOT NULL, waitedNs INTEGER",
    "GPUTRACE_WINDOW": "start INTEGER NOT NULL, end INTEGER NOT NULL, globalPid INTEGER NOT NULL",
    "GPUTRACE_API_WINDOW": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "globalPid INTEGER NOT NULL",
    "GPUTRACE_CONTROL": "start INTEGER NOT NULL, end INTEGER NOT NULL, globalPid INTEGER NOT NULL, "
    "idleCupti INTEGER",
    "GPUTRACE_GRAPH_NODES": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "globalPid INTEGER NOT NULL",
    "GPUTRACE_CLOCK": "globalPid INTEGER NOT NULL, realtimeNs INTEGER NOT NULL, "
    "monotonicNs INTEGER NOT NULL, monotonicRawNs INTEGER NOT NULL",
    "GPUTRACE_NOTE": "globalPid INTEGER, timeNs INTEGER, text TEXT NOT NULL",
    "GPUTRACE_LOSS": "globalPid INTEGER, timeNs INTEGER, records INTEGER, reason TEXT NOT NULL",
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
