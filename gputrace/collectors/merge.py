"""Spool files of all processes into one trace file, on one clock."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace import __version__
from gputrace.collectors.names import demangle, short
from gputrace.collectors.spool import Records, Spool, read_spool
from gputrace.errors import InputError
from gputrace.traces.writer import TraceWriter

_NOT_GIVEN: Final = 0xFFFFFFFF
_UNKNOWN_MEMORY: Final = 7
"""Of nsys's ENUM_CUDA_MEM_KIND, which counts from pageable where CUPTI counts from unknown."""
_STEADY_CLOCK_NS: Final = 100_000
"""A wall clock that wanders less than this against the monotonic one is left as it is."""

_OVERHEADS: Final = {
    0: "Unknown",
    1: "Driver JIT compiler (CUDA)",
    1 << 16: "Buffer flush (Profiler)",
    2 << 16: "Instrumentation (Profiler)",
    3 << 16: "Resource creation/destruction (Profiler)",
    4 << 16: "Runtime module loading (CUDA)",
    5 << 16: "Lazy function loading (CUDA)",
    6 << 16: "Command buffer full (CUDA)",
    7 << 16: "Activity buffer request (Profiler)",
}
"""Names that nsys gives to CUPTI's kinds of overhead."""

_RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES: Final = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "HOROVOD_SIZE",
    "PMI_SIZE",
    "SLURM_NTASKS",
)
_LOCAL: Final = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


@dataclass(frozen=True, slots=True)
class Merged:
    """What went into a trace."""

    processes: int
    kernels: int
    steps: int
    """Markers of training steps, over all processes."""
    cut: int
    """Processes that were ended before they could write down that they ended."""
    notes: tuple[str, ...]
    """Why processes have no GPU activity, each once."""


def merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Writes the trace of a recording's folder.

    Raises InputError where nothing in the folder can be read, OSError where the file cannot be
    written.
    """
    spools = _read_all(folder)
    start = min((spool.started for spool in spools), default=time.time_ns())
    with TraceWriter(output) as writer:
        _write_session(writer, start, meta)
        cards = _write_cards(writer, spools)
        for spool in spools:
            _Process(writer, spool, start).write(cards)
    notes = {spool.info["no_gpu_activity"] for spool in spools if "no_gpu_activity" in spool.info}
    return Merged(
        processes=len(spools),
        kernels=sum(len(spool.records[b"KERN"]) for spool in spools),
        steps=0,
        cut=sum(not spool.whole for spool in spools),
        notes=tuple(sorted(notes)),
    )


def _read_all(folder: Path) -> list[Spool]:
    paths = sorted(folder.glob("*.spool"))
    spools, problems = [], []
    for path in paths:
        try:
            spools.append(read_spool(path))
        except InputError as error:
            problems.append(error)
    if problems and not spools:
        raise problems[0]
    return spools


def _write_session(writer: TraceWriter, start: int, meta: Mapping[str, str]) -> None:
    seconds = start / 1e9
    form = "%Y-%m-%dT%H:%M:%S"
    utc, local = (time.strftime(form, t(seconds)) for t in (time.gmtime, time.localtime))
    writer.add_rows(
        "TARGET_INFO_SESSION_START_TIME",
        ["utcEpochNs", "utcTime", "localTime"],
        [(start, utc, local)],
    )
    exported = {"EXPORT_PRODUCT_NAME": "gputrace", "EXPORT_SCHEMA_VERSION": "3.20.3"}
    writer.add_rows("META_DATA_EXPORT", ["name", "value"], exported.items())
    own = {"format": "1", "version": __version__, "start_realtime_ns": str(start), **meta}
    writer.add_rows("GPUTRACE_META", ["name", "value"], own.items())


def _write_cards(writer: TraceWriter, spools: Sequence[Spool]) -> dict[bytes, int]:
    """The cards that any process saw, numbered by PCI address; their numbers by uuid."""
    seen: dict[bytes, Any] = {}
    for spool in spools:
        for row in spool.records[b"DEVI"]:
            seen.setdefault(bytes(row["uuid"]), row)
    ordered = sorted(seen.values(), key=lambda row: row["bus"].lower())
    rows = [
        (0, i, _text(row["name"]), _text(row["bus"]).lower(), 1, bytes(row["uuid"]).hex())
        for i, row in enumerate(ordered)
    ]
    columns = ["vmId", "id", "name", "busLocation", "isDiscrete", "uuid"]
    if rows:
        writer.add_rows("TARGET_INFO_GPU", columns, rows)
    return {bytes(row["uuid"]): i for i, row in enumerate(ordered)}


class _Process:
    """Writes the rows of one process."""

    def __init__(self, writer: TraceWriter, spool: Spool, start: int) -> None:
        self._writer, self._spool, self._start = writer, spool, start
        self._pid = (1 << 48) | (spool.pid & 0xFFFFFF) << 24
        self._texts: dict[tuple[int, str], int] = {}

    def write(self, cards: Mapping[bytes, int]) -> None:
        self._process(cards)
        self._kernels(self._spool.records[b"KERN"])
        self._copies(self._spool.records[b"COPY"])
        self._memsets(self._spool.records[b"MSET"])
        self._graphs(self._spool.records[b"GRPH"])
        self._calls(self._spool.records[b"API "])
        self._ranges(self._spool.records[b"NVTX"])
        self._overheads(self._spool.records[b"OVER"])

    def _process(self, cards: Mapping[bytes, int]) -> None:
        spool, add = self._spool, self._writer.add_rows
        add("PROCESSES", ["globalPid", "pid", "name"], [(self._pid, spool.pid, spool.host)])
        rank, size, local = (_number(spool.info, keys) for keys in (_RANKS, _SIZES, _LOCAL))
        add(
            "GPUTRACE_PROCESS",
            ["globalPid", "pid", "host", "rank", "worldSize", "localRank", "whole", "note"],
            [
                (
                    self._pid,
                    spool.pid,
                    spool.host,
                    rank,
                    size,
                    local,
                    int(spool.whole),
                    spool.info.get("no_gpu_activity"),
                )
            ],
        )
        devices = {int(row["ordinal"]): row for row in spool.records[b"DEVI"]}
        rows = [(cards[bytes(r["uuid"])], o, spool.pid) for o, r in devices.items()]
        if rows:
            add("TARGET_INFO_CUDA_DEVICE", ["gpuId", "cudaId", "pid"], rows)
        clocks = [(self._pid, *row) for row in spool.records[b"CLOK"].tolist()]
        columns = ["globalPid", "realtimeNs", "monotonicNs", "monotonicRawNs"]
        if clocks:
            add("GPUTRACE_CLOCK", columns, clocks)
        losses = [(self._pid, at - self._start, count, why) for at, count, why in spool.losses]
        if losses:
            add("GPUTRACE_LOSS", ["globalPid", "timeNs", "records", "reason"], losses)

    def _span(self, rows: Records) -> dict[str, Any]:
        return {"start": self._time(rows["start"]), "end": self._time(rows["end"])}

    def _time(self, moments: NDArray[np.uint64]) -> NDArray[np.int64]:
        """On the session's clock; what the wall clock was set by meanwhile is taken out.

        A time of 0 means that there was none, and stays.
        """
        clock = self._spool.records[b"CLOK"]
        signed = moments.astype(np.int64)
        shift = np.zeros(len(signed), np.int64)
        if len(clock) > 1:
            ahead = clock["realtime"].astype(np.int64) - clock["monotonic"].astype(np.int64)
            wander = ahead - ahead[0]
            if np.abs(wander).max() > _STEADY_CLOCK_NS:
                at = np.searchsorted(clock["realtime"].astype(np.int64), signed, "right") - 1
                shift = wander[np.maximum(at, 0)]
        return np.where(signed == 0, 0, signed - self._start - shift)

    def _on_gpu(self, rows: Records) -> dict[str, Any]:
        return self._span(rows) | {
            "deviceId": rows["device"],
            "contextId": rows["context"],
            "streamId": rows["stream"],
            "correlationId": rows["correlation"],
            "globalPid": [self._pid] * len(rows),
        }

    def _strings(self, ids: NDArray[np.uint32], form: str = "") -> list[int]:
        """StringIds of spool names; ``form`` demangles or shortens."""
        found = {int(id): self._string(int(id), form) for id in np.unique(ids)}
        return [found[id] for id in ids.tolist()]

    def _string(self, id: int, form: str) -> int:
        if (id, form) not in self._texts:
            text = self._spool.names.get(id, b"").decode("utf-8", "replace")
            if form:
                text = demangle(text)
            if form == "short":
                text = short(text)
            self._texts[id, form] = self._writer.string(text)
        return self._texts[id, form]

    def _kernels(self, rows: Records) -> None:
        columns = self._on_gpu(rows) | {
            "demangledName": self._strings(rows["name"], "demangled"),
            "shortName": self._strings(rows["name"], "short"),
            "mangledName": self._strings(rows["name"]),
            "registersPerThread": rows["registers"],
            "staticSharedMemory": rows["static_shared"],
            "dynamicSharedMemory": rows["dynamic_shared"],
        }
        for axis, name in enumerate("XYZ"):
            columns |= {
                f"grid{name}": rows["grid"][:, axis],
                f"block{name}": rows["block"][:, axis],
            }
        zeros = [0] * len(rows)
        columns |= dict.fromkeys(("localMemoryPerThread", "localMemoryTotal", "gridId"), zeros)
        self._writer.add("CUPTI_ACTIVITY_KIND_KERNEL", columns)

    def _copies(self, rows: Records) -> None:
        columns = self._on_gpu(rows) | {
            "bytes": rows["bytes"].astype(np.int64),
            "copyKind": rows["copy_kind"],
            "srcKind": _nsys_memory(rows["source_kind"]),
            "dstKind": _nsys_memory(rows["destination_kind"]),
            "srcDeviceId": _given(rows["source_device"]),
            "dstDeviceId": _given(rows["destination_device"]),
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_MEMCPY", columns)

    def _memsets(self, rows: Records) -> None:
        columns = self._on_gpu(rows) | {
            "value": rows["value"],
            "bytes": rows["bytes"].astype(np.int64),
            "memKind": _nsys_memory(rows["memory_kind"]),
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_MEMSET", columns)

    def _graphs(self, rows: Records) -> None:
        columns = self._on_gpu(rows) | {"graphId": rows["graph"], "graphExecId": rows["graph"]}
        self._writer.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", columns)

    def _calls(self, rows: Records) -> None:
        columns = self._span(rows) | {
            "eventClass": rows["driver"],
            "globalTid": self._threads(rows["thread"]),
            "correlationId": rows["correlation"],
            "nameId": self._strings(rows["name"]),
            "returnValue": rows["result"],
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_RUNTIME", columns)

    def _ranges(self, rows: Records) -> None:
        columns = self._span(rows) | {
            "eventType": np.where(rows["mark"] == 1, 34, 59),
            "globalTid": self._threads(rows["thread"]),
            "textId": self._strings(rows["name"]),
            "domainId": rows["domain"],
        }
        self._writer.add("NVTX_EVENTS", columns)

    def _overheads(self, rows: Records) -> None:
        names = {
            int(k): self._writer.string(_OVERHEADS.get(int(k), "Unknown")) for k in rows["kind"]
        }
        columns = self._span(rows) | {
            "eventClass": [0] * len(rows),
            "globalTid": self._threads(rows["thread"]),
            "nameId": [names[kind] for kind in rows["kind"].tolist()],
            "overheadType": rows["kind"],
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_OVERHEAD", columns)

    def _threads(self, threads: NDArray[np.uint32]) -> NDArray[np.int64]:
        return threads.astype(np.int64) & 0xFFFFFF | self._pid


def _nsys_memory(kinds: NDArray[Any]) -> NDArray[np.int64]:
    numbers = kinds.astype(np.int64)
    return np.where((numbers >= 1) & (numbers <= _UNKNOWN_MEMORY), numbers - 1, _UNKNOWN_MEMORY)


def _given(devices: NDArray[np.uint32]) -> list[int | None]:
    return [None if device == _NOT_GIVEN else device for device in devices.tolist()]


def _number(info: Mapping[str, str], keys: Sequence[str]) -> int | None:
    found = (info[key] for key in keys if info.get(key, "").isdecimal())
    return next((int(text) for text in found), None)


def _text(value: bytes) -> str:
    return value.split(b"\0")[0].decode("utf-8", "replace")
