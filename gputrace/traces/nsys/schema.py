"""Where nsys SQLite exports keep the event columns, and their enums.

What a file has is told by the tables and columns present, never by its version: lazy exports
leave out empty tables, and people strip columns. Enum tables are not relied on either, since
``--lazy=false`` leaves them empty; the numbers are stable (ENUM_* tables of 2.9.1 to 3.25.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gputrace.traces.events import COPY_KINDS, Kind, Memory


@dataclass(frozen=True, slots=True)
class Table:
    """One table: the kinds of event its rows are, and the columns that hold each event column.

    ``columns`` names for each event column the nsys columns that may hold it, best first.
    """

    name: str
    kinds: tuple[Kind, ...]
    columns: Mapping[str, tuple[str, ...]]
    where: str = ""


_ON_GPU: Final = {
    "start": ("start",),
    "end": ("end",),
    "process": ("globalPid",),
    "device": ("deviceId",),
    "stream": ("streamId",),
    "correlation": ("correlationId",),
}
_ON_HOST: Final = {
    "start": ("start",),
    "end": ("end",),
    "process": ("globalTid",),
    "thread": ("globalTid",),
    "name": ("nameId",),
}

RANGE_TYPES: Final = (59, 60, 70, 71)
"""ENUM_NSYS_EVENT_TYPE: NVTX push/pop and start/end ranges, of programs and of text files."""
MARK_TYPES: Final = (34, 65)

TABLES: Final = (
    Table(
        "CUPTI_ACTIVITY_KIND_KERNEL",
        (Kind.KERNEL,),
        {**_ON_GPU, "name": ("demangledName", "shortName", "mangledName")},
    ),
    Table(
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        (Kind.GRAPH,),
        {**_ON_GPU, "name": ("graphExecId", "graphId")},
    ),
    Table(
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        COPY_KINDS,
        {
            **_ON_GPU,
            "kind": ("copyKind",),
            "bytes": ("bytes",),
            "source_memory": ("srcKind",),
            "destination_memory": ("dstKind",),
            "source_device": ("srcDeviceId",),
            "destination_device": ("dstDeviceId",),
        },
    ),
    Table("CUPTI_ACTIVITY_KIND_MEMSET", (Kind.MEMSET,), {**_ON_GPU, "bytes": ("bytes",)}),
    Table(
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        (Kind.API,),
        {**_ON_HOST, "correlation": ("correlationId",)},
    ),
    Table("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", (Kind.SYNC,), {**_ON_GPU, "name": ("syncType",)}),
    Table("OSRT_API", (Kind.OS_RUNTIME,), _ON_HOST),
    Table(
        "NVTX_EVENTS",
        (Kind.RANGE, Kind.MARK),
        {**_ON_HOST, "kind": ("eventType",), "name": ("textId",)},
        f"eventType IN {RANGE_TYPES + MARK_TYPES}",
    ),
    Table("PROFILER_OVERHEAD", (Kind.OVERHEAD,), _ON_HOST),
    # gputrace's own, in its traces and in exports that it has added to:
    Table("GPUTRACE_STEP", (Kind.STEP,), {**_ON_HOST, "correlation": ("step",)}),
    Table("GPUTRACE_HOST_RANGE", (Kind.DATA_WAIT, Kind.RANGE), {**_ON_HOST, "kind": ("kind",)}),
    Table("GPUTRACE_PYTHON_SAMPLE", (Kind.SAMPLE,), {**_ON_HOST, "end": ("start",)}),
    Table("CUPTI_ACTIVITY_KIND_OVERHEAD", (Kind.OVERHEAD,), _ON_HOST),
)

KIND_OF: Final[Mapping[str, Mapping[int, Kind]]] = {
    # ENUM_CUDA_MEMCPY_OPER; arrays are the device's memory, unified memory moves pages.
    "CUPTI_ACTIVITY_KIND_MEMCPY": {
        1: Kind.COPY_H2D,
        2: Kind.COPY_D2H,
        3: Kind.COPY_H2D,
        4: Kind.COPY_D2H,
        5: Kind.COPY_D2D,
        6: Kind.COPY_D2D,
        7: Kind.COPY_D2D,
        8: Kind.COPY_D2D,
        10: Kind.COPY_PEER,
        11: Kind.COPY_H2D,
        12: Kind.COPY_D2H,
        13: Kind.COPY_D2D,
    },
    "GPUTRACE_HOST_RANGE": {1: Kind.DATA_WAIT, 2: Kind.RANGE},
    "NVTX_EVENTS": {
        **dict.fromkeys(RANGE_TYPES, Kind.RANGE),
        **dict.fromkeys(MARK_TYPES, Kind.MARK),
    },
}

MEMORY_OF: Final[Mapping[int, Memory]] = {
    0: Memory.PAGEABLE,
    1: Memory.PINNED,
    2: Memory.DEVICE,
    3: Memory.ARRAY,
    4: Memory.MANAGED,
    5: Memory.DEVICE_STATIC,
    6: Memory.MANAGED_STATIC,
}
"""ENUM_CUDA_MEM_KIND, which counts from pageable where CUPTI counts from unknown."""


def process_key(global_id: int) -> int:
    """A globalPid or globalTid (hw:8 vm:8 pid:24 tid:24 bits) without its thread."""
    return global_id >> 24
