"""Files as nvprof writes them, made row by row, and what a recording with nvprof makes of them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from tests.helpers import command
from tests.helpers.command import Ran

VERSIONS: Final = (8, 11, 12, 18, 22)
"""Of CUPTI's API, of which public files were seen: CUDA 7.5, 10.0, 10.1, 11.8, 12.4."""
EPOCH: Final = 1_583_975_499_000_000_000
PID: Final = 29051
THREAD: Final = 0x7FC2_4CEC_9740
"""A pthread id; nvprof keeps 32 bits of it, and writes them with a sign."""
LAUNCH, MEMCPY_ASYNC, SYNCHRONIZE, LAUNCH_DRIVER = 211, 41, 131, 307
"""What CUPTI calls cudaLaunchKernel, cudaMemcpyAsync, cudaStreamSynchronize, cuLaunchKernel."""

_ON_GPU: Final = "start end deviceId contextId streamId correlationId"
_CALL: Final = "cbid start end processId threadId correlationId returnValue"
_KERNEL: Final = (
    f"{_ON_GPU} registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory "
    "dynamicSharedMemory localMemoryPerThread localMemoryTotal gridId name launchType:11 "
    "sharedMemoryExecuted:11 graphNodeId:18 graphId:18 channelID:18 maxActiveClusters:22"
)
_COLUMNS: Final = {
    "CONCURRENT_KERNEL": _KERNEL,
    "KERNEL": _KERNEL,
    "MEMCPY": f"{_ON_GPU} copyKind srcKind dstKind flags bytes graphNodeId:18",
    "MEMCPY2": f"{_ON_GPU} copyKind srcKind dstKind flags bytes srcDeviceId srcContextId "
    "dstDeviceId dstContextId graphNodeId:18",
    "MEMSET": f"{_ON_GPU} value bytes runtimeCorrelationId:8:8 memoryKind:11 graphNodeId:18",
    "RUNTIME": _CALL,
    "DRIVER": _CALL,
    "SYNCHRONIZATION": "type start end correlationId contextId streamId cudaEventId",
    "OVERHEAD": "overheadKind objectKind objectId start end correlationId:22",
    "MARKER": "flags timestamp id objectKind objectId name domain",
    "NAME": "objectKind objectId name",
    "CONTEXT": "contextId deviceId computeApiKind nullStreamId parentContextId:22",
    "DEVICE": "id name coreClockRate globalMemoryBandwidth globalMemorySize l2CacheSize "
    "numMultiprocessors uuid:11",
    "GRAPH_TRACE": f"{_ON_GPU} graphId",
    "METRIC": "metricId value correlationId",
}
"""Of each table those columns that matter; ``:A`` came with version A, ``:A:B`` went with B."""


class Nvvp:
    """A file under way. Times are nanoseconds after `EPOCH`; columns not given are 0."""

    def __init__(self, path: Path, version: int = 22, pid: int = PID) -> None:
        self.path, self.pid, self._version = path, pid, version
        self._strings = {"-- null --": 0}
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self.correlation = 0

    def row(self, table: str, **columns: Any) -> None:
        for edge in {"start", "end", "timestamp"} & columns.keys():
            columns[edge] += EPOCH if columns[edge] is not None else 0
        self._rows.setdefault(table, []).append(columns)

    def text(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def call(self, start: int, end: int, number: int = LAUNCH, **more: Any) -> int:
        """A call of the runtime, or of the driver (``table``); its correlation."""
        self.correlation += 1
        truncated = (THREAD & 0xFFFFFFFF) - (1 << 32) * (THREAD >> 31 & 1)
        columns = {"threadId": truncated, "processId": self.pid, "cbid": number} | more
        table = columns.pop("table", "RUNTIME")
        self.row(table, start=start, end=end, correlationId=self.correlation, **columns)
        return self.correlation

    def kernel(self, start: int, end: int, name: str = "_Z4gemmIfEvPT_", **more: Any) -> None:
        """One that the last call launched."""
        table = more.pop("table", "CONCURRENT_KERNEL")
        columns = {"contextId": 1, "streamId": 7, "correlationId": self.correlation} | more
        self.row(table, start=start, end=end, name=self.text(name), **columns)

    def object(self, thread: int = THREAD) -> bytes:
        """A thread, as rows of markers name it; the rest of the union is whatever was there."""
        words = (self.pid, thread & 0xFFFFFFFF, 0xEDBADE50)
        return b"".join(word.to_bytes(4, "little") for word in words)

    def save(self) -> Path:
        with closing(sqlite3.connect(self.path)) as database, database:
            database.execute("CREATE TABLE Version (version INTEGER)")
            database.execute("INSERT INTO Version VALUES (?)", (self._version,))
            for table in _COLUMNS:
                self._save_table(database, table)
            database.execute("CREATE TABLE StringTable (_id_ INTEGER PRIMARY KEY, value TEXT)")
            rows = [(number, text) for text, number in self._strings.items()]
            database.executemany("INSERT INTO StringTable VALUES (?, ?)", rows)
        return self.path

    def _save_table(self, database: sqlite3.Connection, table: str) -> None:
        names = [name for name in _COLUMNS[table].split() if self._has(name)]
        names = [name.partition(":")[0] for name in names]
        declared = ", ".join(f"{name} INT NOT NULL" for name in names)
        full = f"CUPTI_ACTIVITY_KIND_{table}"
        database.execute(f"CREATE TABLE {full} (_id_ INTEGER PRIMARY KEY, {declared})")
        for row in self._rows.get(table, []):
            values = [row.get(name, 0) for name in names]
            marks = ", ".join("?" * len(names))
            database.execute(f"INSERT INTO {full} ({', '.join(names)}) VALUES ({marks})", values)

    def _has(self, name: str) -> bool:
        since, _, until = name.partition(":")[2].partition(":")
        return int(since or 0) <= self._version <= int(until or 999)


def spool(folder: Path) -> Path:
    """A recording's folder, to be filled."""
    made = folder / "t.sqlite.spool"
    made.mkdir()
    (made / "meta.json").write_text(json.dumps({"backend": "nvprof"}), encoding="utf-8")
    return made


def convert(folder: Path) -> tuple[Ran, Path]:
    """Run the command on a recording's folder."""
    output = folder.with_name("t.sqlite")
    return command.gputrace("recover", folder, "-o", output), output
