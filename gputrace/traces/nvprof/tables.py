"""Where nvprof's files keep the event columns, and the ids that stand for names in them.

Columns came and went with the versions, so what a file has is told by looking. Kinds of copies and
of memory are CUPTI's own numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.arrow import Integers
from gputrace.traces.enums import OVERHEADS, UNKNOWN_OVERHEAD
from gputrace.traces.events import COPY_KINDS, UNKNOWN, Kind
from gputrace.traces.nvprof.calls import DRIVER, RUNTIME, call_name
from gputrace.traces.nvprof.file import COPIES, KERNELS, PREFIX
from gputrace.traces.nvprof.rows import OBJECT_THREAD

OVERHEAD: Final = 2
"""Beside `RUNTIME` and `DRIVER`, a family of names."""
_FAMILIES: Final = 4
_FIRST: Final = -2
"""Ids from here down are numbers of families; others are of StringTable."""
_MOST: Final = 1 << 27
_GRAPHS: Final = -(1 << 30)
"""Ids from here down are graphs: this minus the graph's id."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table: the kinds of event its rows are, and an SQL expression for each event column."""

    name: str
    kinds: tuple[Kind, ...]
    columns: Mapping[str, str]
    family: int | None = None
    """Of its names, where they are numbers; else they are ids of strings."""
    on_gpu: bool = True
    """Whether its times are of the GPU's clock."""
    required: tuple[str, ...] = ("start", "end")
    """The event columns without which its rows tell nothing."""

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


_SPAN: Final = {"start": '"start"', "end": '"end"'}
_ON_GPU: Final = {
    **_SPAN,
    "device": "deviceId",
    "stream": "streamId",
    "correlation": "correlationId",
}
_COPY: Final = {
    **_ON_GPU,
    "kind": "copyKind",
    "bytes": "bytes",
    "source_memory": "srcKind",
    "destination_memory": "dstKind",
    "source_device": "srcDeviceId",
    "destination_device": "dstDeviceId",
}
_CALL: Final = {**_SPAN, "thread": "threadId", "correlation": "correlationId", "name": "cbid"}
_OBJECT_THREAD: Final = OBJECT_THREAD.replace("r.", "")
OBJECT_COLUMNS: Final = ("objectKind", "objectId")
"""What the expression for the thread of an object needs."""
_EDGES: Final = ("flags", "id", "timestamp")

TABLES: Final = (
    *(Table(name, (Kind.KERNEL,), {**_ON_GPU, "name": "name"}) for name in KERNELS),
    Table("GRAPH_TRACE", (Kind.GRAPH,), {**_ON_GPU, "name": "graphId"}),
    *(Table(name, COPY_KINDS, _COPY) for name in COPIES),
    Table("MEMSET", (Kind.MEMSET,), {**_ON_GPU, "bytes": "bytes"}),
    Table("RUNTIME", (Kind.API,), _CALL, RUNTIME, on_gpu=False),
    Table("DRIVER", (Kind.API,), _CALL, DRIVER, on_gpu=False),
    Table(
        "SYNCHRONIZATION",
        (Kind.SYNC,),
        {**_SPAN, "device": "contextId", "stream": "streamId", "correlation": "correlationId"},
        on_gpu=False,
    ),
    Table(
        "OVERHEAD",
        (Kind.OVERHEAD,),
        {**_SPAN, "thread": _OBJECT_THREAD, "name": "overheadKind"},
        OVERHEAD,
        on_gpu=False,
    ),
)
MARKERS: Final = Table(
    "MARKER",
    (Kind.RANGE, Kind.MARK),
    {**dict(zip(_EDGES, _EDGES, strict=True)), "name": "name", "thread": _OBJECT_THREAD},
    on_gpu=False,
    required=_EDGES,
)
"""Its rows are not events, but the edges of some."""

_COPY_KINDS: Final = np.array(
    [
        Kind.COPY_OTHER,
        Kind.COPY_H2D,
        Kind.COPY_D2H,
        Kind.COPY_H2D,  # arrays are the device's memory
        Kind.COPY_D2H,
        *[Kind.COPY_D2D] * 4,
        Kind.COPY_OTHER,
        Kind.COPY_PEER,
        Kind.COPY_OTHER,
    ],
    np.int8,
)
"""By CUpti_ActivityMemcpyKind; the last stands for numbers that are none."""
_MEMORY_KINDS: Final = 8


def copy_kinds(numbers: Integers, source: Integers, destination: Integers) -> NDArray[np.int8]:
    """Kinds of copies; one within a device whose ends are two devices is a peer copy."""
    last = len(_COPY_KINDS) - 1
    kinds: NDArray[np.int8] = _COPY_KINDS[np.where((numbers < 0) | (numbers > last), last, numbers)]
    apart = (source != destination) & (source != UNKNOWN) & (destination != UNKNOWN)
    return np.where((kinds == Kind.COPY_D2D) & apart, np.int8(Kind.COPY_PEER), kinds)


def memory_kinds(numbers: Integers) -> NDArray[np.signedinteger[Any]]:
    """Kinds of memory: a `Memory` each."""
    return np.where((numbers < 0) | (numbers >= _MEMORY_KINDS), 0, numbers)


def name_ids(table: Table, numbers: Integers) -> Integers:
    """Name ids of what a table names its rows by; a number that CUPTI cannot have given is none."""
    if table.kinds == (Kind.GRAPH,):
        return _where_known(numbers, _GRAPHS - numbers)
    if table.family is None:
        return numbers
    if table.family == OVERHEAD:
        numbers = _overhead_number(numbers)
    return _where_known(numbers, _FIRST - _FAMILIES * numbers - table.family)


def _where_known(numbers: Integers, ids: Integers) -> Integers:
    return np.where((numbers < 0) | (numbers > _MOST), UNKNOWN, ids)


def fixed_name(id: int) -> str:
    """The text of an id below 0, which no string of the file explains."""
    if id <= _GRAPHS:
        return f"CUDA graph {_GRAPHS - id}"
    number, family = divmod(_FIRST - id, _FAMILIES)
    if family in (RUNTIME, DRIVER):
        return call_name(family, number)
    if family != OVERHEAD:
        return f"<name {id}>"
    return _OVERHEAD_NAMES.get(number, UNKNOWN_OVERHEAD[1])


def _overhead_number(kinds: Any) -> Any:
    """Small numbers for kinds of overhead: 1, and multiples of 65536."""
    return kinds >> 15 | kinds & 1


_OVERHEAD_NAMES: Final = {_overhead_number(kind): name for kind, (_, name) in OVERHEADS.items()}
