"""Trace files: SQLite with the tables and columns of nsys exports, and gputrace's own.

Programs made for nsys exports read them: the names and meanings are those of export schema 3.20.
The file is written beside its place under another name and moved there when it is whole.
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

from gputrace.traces import guard
from gputrace.traces.enums import ENUMS

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
    "graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER",
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
    "globalTid INTEGER NOT NULL, nameId INTEGER NOT NULL, kind INTEGER NOT NULL",
    "GPUTRACE_PYTHON_SAMPLE": "start INTEGER NOT NULL, globalTid INTEGER NOT NULL, "
    "nameId INTEGER NOT NULL, innerNameId INTEGER NOT NULL",
    "GPUTRACE_WINDOW": "start INTEGER NOT NULL, end INTEGER NOT NULL, globalPid INTEGER NOT NULL",
    "GPUTRACE_API_WINDOW": "start INTEGER NOT NULL, end INTEGER NOT NULL, "
    "globalPid INTEGER NOT NULL",
    "GPUTRACE_CLOCK": "globalPid INTEGER NOT NULL, realtimeNs INTEGER NOT NULL, "
    "monotonicNs INTEGER NOT NULL, monotonicRawNs INTEGER NOT NULL",
    "GPUTRACE_NOTE": "globalPid INTEGER, timeNs INTEGER, text TEXT NOT NULL",
    "GPUTRACE_LOSS": "globalPid INTEGER, timeNs INTEGER, records INTEGER, reason TEXT NOT NULL",
}
"""Columns of each table; nsys's where the name is nsys's."""


def remove_unfinished(path: Path) -> None:
    """Removes what processes that were killed while they wrote the trace have left beside it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        pid = left.name.split(".")[-2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            left.unlink(missing_ok=True)


class TraceWriter:
    """Writes one trace file; leaving the ``with`` block without an error puts it in its place.

    What SQLite cannot write, be it that the disk is full, becomes an OSError at that point.
    Tables are made when their first rows come, as nsys exports have none that are empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._unfinished.unlink(missing_ok=True)
        os.close(os.open(self._unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        # As a URI, so that `attached` takes URIs.
        uri = self._unfinished.absolute().as_uri()
        self._database = sqlite3.connect(uri, isolation_level=None, uri=True)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        guard.harden(self._database)
        self._database.execute("BEGIN")
        self._strings: dict[str, int] = {}
        self._first_string = 0

    def copy(self, source: Path, tables: Mapping[str, str]) -> None:
        """Copies tables of an SQLite file with their declarations, before anything is added.

        Args:
            source: the file, which nobody writes.
            tables: by name, the SQL condition that rows to copy meet; it may name tables of the
                file as ``source.NAME``. Rows left out leave no trace in this file.
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
        """The database, which is ``main``, with another file, or SQLite's URI of one, under a name.

        For INSERT ... SELECT into tables that `make` has made: rows need not come through Python.
        Nothing that the other file declares is run.
        """
        # SQLite attaches nothing within a transaction.
        self._database.execute("COMMIT")
        self._database.execute(f"ATTACH ? AS {name}", (str(path),))
        self._database.execute("BEGIN")
        with guard.under(self._database, guard.copying):
            yield self._database
        self._database.execute("COMMIT")
        self._database.execute(f"DETACH {name}")
        self._database.execute("BEGIN")

    def declare(self, sql: str) -> None:
        """Makes a table as another file declares it; raises sqlite3.Error where that does more."""
        self._database.set_authorizer(guard.declaring)
        self._database.execute(sql)
        self._database.set_authorizer(guard.copying)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of what was written."""
        return self._database.execute(sql).fetchall()

    def string(self, text: str) -> int:
        """The id of a text in StringIds."""
        return self.strings([text])[0]

    def strings(self, texts: Sequence[str]) -> list[int]:
        """The ids of texts in StringIds."""
        known = len(self._strings)
        for text in texts:
            self._strings.setdefault(text, self._first_string + len(self._strings))
        if len(self._strings) > known:
            added = islice(self._strings.items(), known, None)
            self.add_rows("StringIds", ["value", "id"], added)
        return [self._strings[text] for text in texts]

    def add(self, table: str, columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> None:
        """Rows by column, all of one length; columns left out are NULL."""
        names = list(columns)
        lists = [c.tolist() if isinstance(c, np.ndarray) else c for c in columns.values()]
        if lists and len(lists[0]):
            self.add_rows(table, names, zip(*lists, strict=True))

    def add_rows(self, table: str, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Rows with values for the columns named; the table is made if it is one of ours."""
        if table in TABLES:
            self.make(table)
        listed, marks = ", ".join(names), ", ".join("?" * len(names))
        self._database.executemany(f"INSERT INTO {table} ({listed}) VALUES ({marks})", rows)

    def make(self, table: str) -> None:
        """Makes one of `TABLES`, unless it is there."""
        self.create(table, TABLES[table])

    def add_enums(self) -> None:
        """Writes the ENUM_ tables, and those that programs ask for even where they are empty."""
        for table, names in ENUMS.items():
            self.add_rows(table, ["id", "name", "label"], ((i, *two) for i, two in names.items()))
        for table in ("StringIds", "ThreadNames"):
            self.make(table)

    def create(self, table: str, columns: str) -> None:
        """Makes a table, unless it is there."""
        self._database.execute(f"CREATE TABLE IF NOT EXISTS {table} ({columns})")

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
