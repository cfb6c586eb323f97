"""Write a recording as nvprof does: a file for each process, of Version 22 (CUDA 12.4)."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from gputrace.readers.nvprof_schema import DRIVER, RUNTIME, call_names
from tests.synthetic.nsys import COPY_KINDS
from tests.synthetic.nsys_info import UTC_EPOCH_NS, visible
from tests.synthetic.recording import Ints, Kind, Process, Recording, Table

VERSION: Final = 22
PAGEABLE, PINNED, DEVICE = 1, 2, 3
"""CUpti_ActivityMemoryKind."""
MOMENT, START, END = 1, 2, 4
THREAD: Final = 2
"""Of CUpti_ActivityObjectKind."""

_CALL: Final = "cbid start end processId threadId correlationId returnValue"
_GRAPH_NODE: Final = "graphNodeId graphId channelID channelType"
_COLUMNS: Final = {
    "CONCURRENT_KERNEL": "cacheConfig:BLOB sharedMemoryConfig registersPerThread "
    "partitionedGlobalCacheRequested partitionedGlobalCacheExecuted start end completed deviceId "
    "contextId streamId gridX gridY gridZ blockX blockY blockZ staticSharedMemory "
    "dynamicSharedMemory localMemoryPerThread localMemoryTotal correlationId gridId name queued "
    "submitted launchType isSharedMemoryCarveoutRequested sharedMemoryCarveoutRequested "
    "sharedMemoryExecuted graphNodeId shmemLimitConfig graphId pAccessPolicyWindow:BLOB channelID "
    "channelType clusterX clusterY clusterZ clusterSchedulingPolicy localMemoryTotal_v2 "
    "maxPotentialClusterSize maxActiveClusters",
    "MEMCPY": "copyKind srcKind dstKind flags bytes start end deviceId contextId streamId "
    f"correlationId runtimeCorrelationId {_GRAPH_NODE}",
    "MEMCPY2": "copyKind srcKind dstKind flags bytes start end deviceId contextId streamId "
    f"srcDeviceId srcContextId dstDeviceId dstContextId correlationId {_GRAPH_NODE}",
    "MEMSET": "value bytes start end deviceId contextId streamId correlationId flags memoryKind "
    + _GRAPH_NODE,
    "GRAPH_TRACE": "correlationId start end deviceId graphId contextId streamId endDeviceId "
    "endContextId",
    "RUNTIME": _CALL,
    "DRIVER": _CALL,
    "SYNCHRONIZATION": "type start end correlationId contextId streamId cudaEventId",
    "MARKER": "flags timestamp id objectKind objectId:BLOB name domain",
    "CONTEXT": "contextId deviceId computeApiKind nullStreamId parentContextId isGreenContext",
    "DEVICE": "id uuid:BLOB name coreClockRate globalMemoryBandwidth",
}


def write_nvprof(
    recording: Recording, folder: str | Path, *, nvtx: Collection[str] = ("nccl",)
) -> list[Path]:
    """Writes the files into a folder, which is made; their paths, in order of ranks.

    ``nvtx`` says which ranges to write: "step", "data", "nccl". nvprof knows nothing of what the
    operating system does, so such rows are left out.
    """
    folder = Path(folder)
    folder.mkdir()
    paths = []
    for rank, process in enumerate(recording.processes):
        paths.append(folder / f"train.{process.pid}.nvvp")
        with closing(sqlite3.connect(paths[-1])) as connection:
            connection.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;")
            _Writer(connection, recording, rank, process).write(nvtx)
            connection.commit()
    return paths


class _Writer:
    """Of one process."""

    def __init__(
        self, connection: sqlite3.Connection, recording: Recording, rank: int, process: Process
    ) -> None:
        self.connection, self.recording = connection, recording
        self.rank, self.process = rank, process
        self.texts = ["-- null --", *recording.names]

    def write(self, nvtx: Collection[str]) -> None:
        self.kernels()
        self.copies()
        self.memsets()
        self.graphs()
        self.calls()
        self.synchronizations()
        self.ranges(nvtx)
        self.cards()
        run = self.connection
        run.execute("CREATE TABLE Version (version INTEGER)")
        run.execute("INSERT INTO Version VALUES (?)", (VERSION,))
        run.execute("CREATE TABLE StringTable (_id_ INTEGER PRIMARY KEY, value TEXT)")
        run.executemany("INSERT INTO StringTable VALUES (?, ?)", enumerate(self.texts))

    def own(self, rows: Table) -> Table:
        mine: Table = rows[rows["rank"] == self.rank]
        return mine

    def insert(self, kind: str, rows: int, /, **values: object) -> None:
        """Creates a table and fills so many rows; values are arrays or constants, the rest 0."""
        columns = [text.partition(":") for text in _COLUMNS[kind].split()]
        table = f"CUPTI_ACTIVITY_KIND_{kind}"
        declared = ", ".join(f'"{column}" {type or "INT"} NOT NULL' for column, _, type in columns)
        self.connection.execute(f"CREATE TABLE {table} (_id_ INTEGER PRIMARY KEY, {declared})")
        if "correlationId" in declared:
            self.connection.execute(f"CREATE INDEX INDEX_{table} ON {table} (correlationId)")
        slots, arrays = ["NULL"], []
        for column, _, type in columns:
            value = values.pop(column, b"" if type else 0)
            slots.append("?")
            arrays.append(value.tolist() if isinstance(value, np.ndarray) else [value] * rows)
        assert not values, f"{kind} has no {list(values)}"
        statement = f"INSERT INTO {table} VALUES ({', '.join(slots)})"
        self.connection.executemany(statement, zip(*arrays, strict=True))

    def _span(self, rows: Table) -> dict[str, object]:
        return {edge: rows[edge] + UTC_EPOCH_NS for edge in ("start", "end")}

    def _on_gpu(self, rows: Table) -> dict[str, object]:
        return {
            "deviceId": rows["device"],
            "contextId": self._contexts(rows["device"]),
            "streamId": rows["stream"],
            "correlationId": rows["correlation"],
            **self._span(rows),
        }

    @staticmethod
    def _contexts(devices: Ints) -> Ints:
        return 1 + 2 * devices

    def kernels(self) -> None:
        rows = self.own(self.recording.kernels)
        name = rows["name"]
        shape = {
            "name": 1 + name,
            "registersPerThread": 32 + 8 * (name % 24),
            "gridX": 1 + 132 * (name % 31),
            "blockX": 128 << (name % 3),
            "gridId": np.arange(1, len(rows) + 1),
            "completed": rows["end"] + UTC_EPOCH_NS,
        }
        self.insert("CONCURRENT_KERNEL", len(rows), **self._on_gpu(rows), **shape)

    def copies(self) -> None:
        both = self.own(self.recording.copies)
        peer = both["kind"] == Kind.PEER
        self._copies("MEMCPY", both[~peer])
        ordinals = {gpu: device for device, gpu in visible(self.recording, self.process)}
        rows = both[peer]
        other = np.array([ordinals[gpu] for gpu in rows["peer"].tolist()], int)
        ends = {
            "srcDeviceId": rows["device"],
            "srcContextId": self._contexts(rows["device"]),
            "dstDeviceId": other,
            "dstContextId": self._contexts(other),
        }
        self._copies("MEMCPY2", rows, **ends)

    def _copies(self, table: str, rows: Table, **more: object) -> None:
        host = np.where(rows["pageable"], PAGEABLE, PINNED)
        kinds = np.array([COPY_KINDS.get(kind, 0) for kind in Kind])
        values = {
            "copyKind": kinds[rows["kind"]],
            "srcKind": np.where(rows["kind"] == Kind.H2D, host, DEVICE),
            "dstKind": np.where(rows["kind"] == Kind.D2H, host, DEVICE),
            "bytes": rows["bytes"],
        }
        self.insert(table, len(rows), **self._on_gpu(rows), **values, **more)

    def memsets(self) -> None:
        rows = self.own(self.recording.memsets)
        values = {"bytes": rows["bytes"], "memoryKind": DEVICE}
        self.insert("MEMSET", len(rows), **self._on_gpu(rows), **values)

    def graphs(self) -> None:
        rows = self.own(self.recording.graphs)
        # What nsys calls graphExecId is what it names the graph by.
        self.insert("GRAPH_TRACE", len(rows), **self._on_gpu(rows), graphId=rows["name"] + 1)

    def calls(self) -> None:
        rows = self.own(self.recording.api)
        names = self.recording.names
        driver = np.array([int(not name.startswith("cuda")) for name in names])
        numbers = {(kind, name): number for (kind, number), name in call_names().items()}
        pairs = zip(driver.tolist(), names, strict=True)
        cbid = np.array([numbers.get(pair, 0) for pair in pairs])
        for table, event_class in (("RUNTIME", RUNTIME), ("DRIVER", DRIVER)):
            mine = rows[driver[rows["name"]] == event_class]
            self.insert(
                table,
                len(mine),
                cbid=cbid[mine["name"]],
                processId=self.process.pid,
                threadId=_pthreads(mine["thread"]).astype(np.int32),
                correlationId=mine["correlation"],
                **self._span(mine),
            )

    def synchronizations(self) -> None:
        rows = self.own(self.recording.sync)
        values = self._on_gpu(rows)
        del values["deviceId"]
        self.insert("SYNCHRONIZATION", len(rows), type=rows["kind"], cudaEventId=-1, **values)

    def ranges(self, which: Collection[str]) -> None:
        rows = self.own(self.recording.nvtx)
        text = np.array(self.recording.names, object)[rows["name"]]
        nccl = rows["domain"] == 1
        group = np.where(nccl, "nccl", np.where(text == "data", "data", "step"))
        rows = rows[np.isin(group, list(which))]
        objects = [
            b"".join(int(word).to_bytes(4, "little") for word in (self.process.pid, thread, 0))
            for thread in _pthreads(rows["thread"]).tolist()
        ]
        ids = np.arange(1, len(rows) + 1)
        # Each edge is a row, in order of time.
        moments = np.concatenate([rows["start"], rows["end"]])
        order = np.argsort(moments, kind="stable")
        nobody = np.zeros(len(rows), int)
        self.insert(
            "MARKER",
            2 * len(rows),
            flags=np.repeat([START, END], len(rows))[order],
            timestamp=moments[order] + UTC_EPOCH_NS,
            id=np.tile(ids, 2)[order],
            objectKind=THREAD,
            objectId=np.array([*objects, *objects], object)[order],
            name=np.concatenate([1 + rows["name"], nobody])[order],
        )

    def cards(self) -> None:
        pairs = visible(self.recording, self.process)
        model = len(self.texts)
        self.texts.append("NVIDIA H200")
        ordinals = np.array([device for device, _ in pairs])
        uuids = np.array([(0xA0 + gpu).to_bytes(16, "big") for _, gpu in pairs], object)
        contexts = {"contextId": self._contexts(ordinals), "deviceId": ordinals}
        self.insert("CONTEXT", len(pairs), **contexts)
        self.insert("DEVICE", len(pairs), id=ordinals, uuid=uuids, name=model)


def _pthreads(threads: Ints) -> Ints:
    """The low 32 bits of pthread ids, a stack of 8 MiB apart."""
    return 0x4CEC_9740 + 0x80_1000 * threads.astype(np.int64) & 0xFFFFFFFF
