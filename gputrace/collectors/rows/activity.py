"""The rows of one process's spool, in the tables of the trace file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.files.records import Records
from gputrace.collectors.files.spool import Spool
from gputrace.collectors.files.windows import call_windows_of, windows_of
from gputrace.collectors.rows.clock import global_pid, global_tids, session_time
from gputrace.collectors.rows.losses import write_losses
from gputrace.collectors.rows.nvtx import nvtx_columns
from gputrace.traces.enums import OVERHEADS, UNKNOWN_OVERHEAD
from gputrace.traces.names import demangle, short
from gputrace.traces.writer import TraceWriter

_NOT_GIVEN: Final = 0xFFFFFFFF
_UNKNOWN_MEMORY: Final = 7
"""Of nsys's ENUM_CUDA_MEM_KIND, which counts from pageable where CUPTI counts from unknown."""
_LAUNCH_TYPES: Final = 3
_CLOCKS: Final = ("realtime", "monotonic", "raw")


class ProcessRows:
    """Writes the rows of one process."""

    def __init__(self, writer: TraceWriter, spool: Spool, start: int) -> None:
        self._writer, self._spool, self._start = writer, spool, start
        self._pid = global_pid(spool.pid)
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
        names = self._writer.strings(list(spool.threads.values()))
        threads = self._threads(np.array(list(spool.threads), np.uint32))
        self._writer.add("ThreadNames", {"nameId": names, "globalTid": threads})
        devices = {int(row["ordinal"]): row for row in spool.records[b"DEVI"]}
        rows = [(cards[bytes(r["uuid"])], o, spool.pid) for o, r in devices.items()]
        if rows:
            add("TARGET_INFO_CUDA_DEVICE", ["gpuId", "cudaId", "pid"], rows)
        times = [spool.records[b"CLOK"][name].astype(np.int64).tolist() for name in _CLOCKS]
        clocks = [(self._pid, *row) for row in zip(*times, strict=True)]
        columns = ["globalPid", "realtimeNs", "monotonicNs", "monotonicRawNs"]
        if clocks:
            add("GPUTRACE_CLOCK", columns, clocks)
        self._windows("GPUTRACE_WINDOW", windows_of(spool))
        self._windows("GPUTRACE_API_WINDOW", call_windows_of(spool) or [])
        if spool.losses:
            write_losses(self._writer, self._pid, spool.losses, self._start)

    def _windows(self, table: str, stretches: Sequence[tuple[int, int]]) -> None:
        windows = np.array(stretches, np.uint64).reshape(-1, 2)
        span = {"start": self._time(windows[:, 0]), "end": self._time(windows[:, 1])}
        self._writer.add(table, {**span, "globalPid": [self._pid] * len(windows)})

    def _span(self, rows: Records) -> dict[str, Any]:
        return {"start": self._time(rows["start"]), "end": self._time(rows["end"])}

    def _time(self, moments: NDArray[np.uint64]) -> NDArray[np.int64]:
        return session_time(moments, self._start)

    def _on_gpu(self, rows: Records) -> dict[str, Any]:
        # Of what the GPU was still at when CUPTI had to hand it over, one time or both are 0.
        timed = (rows["start"] != 0) & (rows["end"] != 0)
        span = {name: np.where(timed, times, 0) for name, times in self._span(rows).items()}
        return span | {
            "deviceId": rows["device"],
            "contextId": rows["context"],
            "streamId": rows["stream"],
            "correlationId": rows["correlation"],
            "globalPid": [self._pid] * len(rows),
        }

    def _strings(self, ids: NDArray[np.uint32], form: str = "") -> list[int]:
        """StringIds of spool names; ``form`` demangles or shortens."""
        new = [id for id in np.unique(ids).tolist() if (id, form) not in self._texts]
        # All at once: a program may name each of its ranges anew.
        added = self._writer.strings([self._text(id, form) for id in new])
        self._texts.update(((id, form), text) for id, text in zip(new, added, strict=True))
        return [self._texts[id, form] for id in ids.tolist()]

    def _text(self, id: int, form: str) -> str:
        text = self._spool.name(id)
        if form:
            text = demangle(text)
        return short(text) if form == "short" else text

    def _kernels(self, rows: Records) -> None:
        columns = self._on_gpu(rows) | {
            "demangledName": self._strings(rows["name"], "demangled"),
            "shortName": self._strings(rows["name"], "short"),
            "mangledName": self._strings(rows["name"]),
            "registersPerThread": rows["registers"],
            "staticSharedMemory": rows["static_shared"],
            "dynamicSharedMemory": rows["dynamic_shared"],
            "localMemoryPerThread": rows["local_per_thread"],
            "localMemoryTotal": rows["local_total"],
            "launchType": _nsys_launch(rows["launch_type"]),
            "gridId": rows["grid_id"],
        }
        for axis, name in enumerate("XYZ"):
            columns |= {
                f"grid{name}": rows["grid"][:, axis],
                f"block{name}": rows["block"][:, axis],
            }
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
        texts = self._strings(rows["name"])
        columns = nvtx_columns(self._spool, rows, self._span(rows), texts)
        self._writer.add("NVTX_EVENTS", columns)

    def _overheads(self, rows: Records) -> None:
        kinds = [OVERHEADS.get(kind, UNKNOWN_OVERHEAD) for kind in rows["kind"].tolist()]
        columns = self._span(rows) | {
            "eventClass": [0] * len(rows),
            "globalTid": self._threads(rows["thread"]),
            "nameId": self._writer.strings([name for _, name in kinds]),
            "overheadType": [number for number, _ in kinds],
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_OVERHEAD", columns)

    def _threads(self, threads: NDArray[np.uint32]) -> NDArray[np.int64]:
        return global_tids(self._spool.pid, threads)


def _nsys_memory(kinds: NDArray[Any]) -> NDArray[np.int64]:
    numbers = kinds.astype(np.int64)
    return np.where((numbers >= 1) & (numbers <= _UNKNOWN_MEMORY), numbers - 1, _UNKNOWN_MEMORY)


def _nsys_launch(types: NDArray[np.uint32]) -> NDArray[np.int64]:
    """CUPTI counts from regular, nsys from unknown."""
    return np.where(types < _LAUNCH_TYPES, types.astype(np.int64) + 1, 0)


def _given(devices: NDArray[np.uint32]) -> list[int | None]:
    return [None if device == _NOT_GIVEN else device for device in devices.tolist()]
