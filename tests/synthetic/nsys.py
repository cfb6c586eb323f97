"""Write a recording as an nsys SQLite export (the columns of 2025.3, schema 3.20.3)."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.synthetic import names
from tests.synthetic.nsys_info import write_info
from tests.synthetic.recording import Ints, Kind, Recording, Table
from tests.synthetic.schema import columns, create

VM = 1 << 48
COPY_KINDS = {Kind.H2D: 1, Kind.D2H: 2, Kind.PEER: 10}
PAGEABLE, PINNED, DEVICE = 0, 1, 2
CHUNK = 100_000

Bools = npt.NDArray[np.bool_]
Objects = npt.NDArray[np.object_]


def write_nsys(
    recording: Recording,
    path: str | Path,
    *,
    osrt: bool = True,
    nvtx: Collection[str] = ("nccl",),
    with_device_table: bool = True,
    shuffle: bool = False,
) -> None:
    """Write the file, which must not exist.

    `nvtx` says which ranges to write: "step", "data", "nccl". `shuffle` mixes the rows of each
    table, as exports of 2025.6 and later may.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF;")
        writer = _Writer(connection, recording, shuffle)
        write_info(connection, recording, path.name, with_device_table)
        writer.kernels()
        writer.copies()
        writer.memsets()
        writer.graphs()
        writer.calls()
        writer.synchronizations()
        if osrt:
            writer.os_calls()
        writer.ranges(nvtx)
        writer.strings()
        connection.commit()


class _Writer:
    def __init__(self, connection: sqlite3.Connection, recording: Recording, shuffle: bool) -> None:
        self.connection, self.recording = connection, recording
        self.rng = np.random.default_rng((recording.plan.seed, 3)) if shuffle else None
        self.texts = list(recording.names)
        self.ids = {text: index for index, text in enumerate(self.texts)}
        self.pids = np.array([process.pid for process in recording.processes])
        places = [d for process in recording.processes for d in process.devices]
        self.ordinals = np.full(1 + max(gpu for _, gpu in places), -1)
        self.contexts = self.ordinals.copy()
        for process in recording.processes:
            for index, (device, gpu) in enumerate(process.devices):
                self.ordinals[gpu], self.contexts[gpu] = device, index + 1

    def insert(self, table: str, rows: Table, **values: object) -> None:
        """Create and fill a table; values are arrays, or constants for all rows; the rest NULL."""
        if not len(rows):
            return
        self.connection.execute(create(table))
        values |= {"start": rows["start"], "end": rows["end"]}
        order = slice(None) if self.rng is None else self.rng.permutation(len(rows))
        arrays = [v[order] for c in columns(table) if isinstance(v := values.get(c), np.ndarray)]
        slots = ",".join(_slot(values.get(column)) for column in columns(table))
        statement = f"INSERT INTO {table} VALUES ({slots})"
        for low in range(0, len(rows), CHUNK):
            lists = [array[low : low + CHUNK].tolist() for array in arrays]
            self.connection.executemany(statement, zip(*lists, strict=True))

    def add_text(self, text: str) -> int:
        """The id of a text, which may be new."""
        if text not in self.ids:
            self.ids[text] = len(self.texts)
            self.texts.append(text)
        return self.ids[text]

    def strings(self) -> None:
        """Last of all, when every text is known."""
        threads = [
            (self.add_text(name), VM | process.pid << 24 | thread)
            for process in self.recording.processes
            for thread, name in process.threads
        ]
        self.connection.execute(create("ThreadNames"))
        self.connection.executemany("INSERT INTO ThreadNames VALUES (?, 20, ?)", threads)
        self.connection.execute(create("StringIds"))
        self.connection.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(self.texts))

    def _on_gpu(self, rows: Table) -> dict[str, object]:
        return {
            "deviceId": rows["device"],
            "contextId": self.contexts[rows["gpu"]],
            "greenContextId": 0,
            "streamId": rows["stream"],
            "correlationId": rows["correlation"],
            "globalPid": VM | self.pids[rows["rank"]] << 24,
        }

    def _thread(self, rows: Table) -> dict[str, object]:
        return {"globalTid": VM | self.pids[rows["rank"]] << 24 | rows["thread"]}

    def kernels(self) -> None:
        rows = self.recording.kernels
        name = rows["name"]
        short, mangled = np.zeros(len(self.texts), int), np.zeros(len(self.texts), int)
        for one in np.unique(name):
            bare = names.short(self.recording.names[one])
            short[one] = self.add_text(bare)
            mangled[one] = self.add_text(f"_Z{len(bare)}{bare}{one}")
        shape: dict[str, object] = {
            "demangledName": name, "shortName": short[name], "mangledName": mangled[name],
            "registersPerThread": 32 + 8 * (name % 24), "gridX": 1 + 132 * (name % 31),
            "gridY": 1 + name % 3, "blockX": 128 << (name % 3),
            "dynamicSharedMemory": np.where(name % 4, 0, 221_420),
            "gridId": np.arange(1, len(rows) + 1), "sharedMemoryExecuted": 32_768 << (name % 3),
        }  # fmt: skip
        fixed = {
            "launchType": 1, "cacheConfig": 1, "gridZ": 1, "blockY": 1, "blockZ": 1,
            "staticSharedMemory": 0, "localMemoryPerThread": 0, "localMemoryTotal": 250_871_808,
            "sharedMemoryLimitConfig": 0,
        }  # fmt: skip
        self.insert("CUPTI_ACTIVITY_KIND_KERNEL", rows, **self._on_gpu(rows), **shape, **fixed)

    def copies(self) -> None:
        rows = self.recording.copies
        host = np.where(rows["pageable"], PAGEABLE, PINNED)
        kinds = np.zeros(len(Kind), int)
        for kind, number in COPY_KINDS.items():
            kinds[kind] = number
        peer = rows["kind"] == Kind.PEER
        values: dict[str, object] = {
            "bytes": rows["bytes"],
            "copyKind": kinds[rows["kind"]],
            "srcKind": np.where(rows["kind"] == Kind.H2D, host, DEVICE),
            "dstKind": np.where(rows["kind"] == Kind.D2H, host, DEVICE),
            "srcDeviceId": _where(peer, rows["device"]),
            "srcContextId": _where(peer, self.contexts[rows["gpu"]]),
            "dstDeviceId": _where(peer, self.ordinals[rows["peer"]]),
            "dstContextId": _where(peer, self.contexts[rows["peer"]]),
            "copyCount": _where(~peer, np.ones(len(rows), int)),
        }
        self.insert("CUPTI_ACTIVITY_KIND_MEMCPY", rows, **self._on_gpu(rows), **values)

    def memsets(self) -> None:
        rows = self.recording.memsets
        values = {"value": 0, "bytes": rows["bytes"], "memKind": DEVICE}
        self.insert("CUPTI_ACTIVITY_KIND_MEMSET", rows, **self._on_gpu(rows), **values)

    def graphs(self) -> None:
        rows = self.recording.graphs
        values = {"graphId": rows["name"], "graphExecId": rows["name"] + 1}
        self.insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", rows, **self._on_gpu(rows), **values)

    def calls(self) -> None:
        rows = self.recording.api
        driver = np.array([not name.startswith("cuda") for name in self.recording.names])
        values: dict[str, object] = {
            "eventClass": driver.astype(int)[rows["name"]],
            "correlationId": rows["correlation"],
            "nameId": rows["name"],
            "returnValue": 0,
        }
        self.insert("CUPTI_ACTIVITY_KIND_RUNTIME", rows, **self._thread(rows), **values)

    def synchronizations(self) -> None:
        rows = self.recording.sync
        values = {"syncType": rows["kind"], "eventId": 4_294_967_295, "eventSyncId": 0}
        table = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
        self.insert(table, rows, **self._on_gpu(rows), **values)

    def os_calls(self) -> None:
        rows = self.recording.osrt
        values: dict[str, object] = {"eventClass": 27, "nameId": rows["name"], "returnValue": 0}
        fixed = {"nestingLevel": 0, "callchainId": 0}
        self.insert("OSRT_API", rows, **self._thread(rows), **values, **fixed)

    def ranges(self, which: Collection[str]) -> None:
        rows = self.recording.nvtx
        text = np.array(self.recording.names, object)[rows["name"]]
        nccl = rows["domain"] == 1
        group = np.where(nccl, "nccl", np.where(text == "data", "data", "step"))
        keep = np.isin(group, list(which))
        rows, text, nccl = rows[keep], text[keep], nccl[keep]
        values: dict[str, object] = {
            "eventType": 59,
            "text": np.where(nccl, None, text),
            "textId": _where(nccl, rows["name"]),
            "domainId": nccl.astype(int),
        }
        self.insert("NVTX_EVENTS", rows, **self._thread(rows), **values)
        if nccl.any():
            self._nccl_domain(int(rows["start"].min()))

    def _nccl_domain(self, start: int) -> None:
        """Each process says what its NVTX domain 1 is."""
        self.connection.executemany(
            "INSERT INTO NVTX_EVENTS (start, eventType, text, globalTid, domainId)"
            " VALUES (?, 75, 'NCCL', ?, 1)",
            [(start - 1_000, VM | pid << 24 | pid) for pid in self.pids.tolist()],
        )


def _where(mask: Bools, values: Ints) -> Objects:
    """The values where the mask holds, else None."""
    chosen: Objects = values.astype(object)
    chosen[~mask] = None
    return chosen


def _slot(value: object) -> str:
    if isinstance(value, np.ndarray):
        return "?"
    return "NULL" if value is None else str(value)
