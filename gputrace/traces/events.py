"""The contract between readers and analyzers: the event columns.

A reader turns whatever file it knows into these columns; an analyzer takes them and knows no
file format. A row is one thing that happened, on a GPU or on a host thread. Row order means
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.signedinteger[Any]]
Mask = NDArray[np.bool_]


class Kind(IntEnum):
    """What happened. GPU operations come first, in one block."""

    KERNEL = 0
    GRAPH = 1
    """A CUDA graph recorded as a whole: busy, and what ran inside is not known."""
    COPY_H2D = 2
    COPY_D2H = 3
    COPY_D2D = 4
    """A copy within one GPU's memory."""
    COPY_PEER = 5
    """A copy between two GPUs: occupies both."""
    COPY_OTHER = 6
    """A copy whose direction the recorder did not tell, or host to host."""
    MEMSET = 7

    API = 16
    """A call of the CUDA runtime or driver on a host thread."""
    SYNC = 17
    """A wait for the GPU, as the recorder saw it."""
    OS_RUNTIME = 18
    """A blocking call of the C library on a host thread (poll, read, futex, sleep…)."""
    RANGE = 19
    """A named range of a host thread (NVTX push/pop, start/end)."""
    MARK = 20
    """A named moment on a host thread; start equals end."""
    OVERHEAD = 21
    """The recorder's own work."""
    DATA_WAIT = 22
    """A host thread waiting for the next batch, as a hook in the data loader recorded it."""
    STEP = 23
    """A training step, as a hook or a profiler marked it on the host."""
    SAMPLE = 24
    """Where a host thread was in the user's program at a moment, by name; start equals end."""


GPU_KINDS: Final = tuple(kind for kind in Kind if kind < Kind.API)
COPY_KINDS: Final = (Kind.COPY_H2D, Kind.COPY_D2H, Kind.COPY_D2D, Kind.COPY_PEER, Kind.COPY_OTHER)


class Memory(IntEnum):
    """Kinds of memory at the ends of a copy, numbered as ``CUpti_ActivityMemoryKind`` is.

    nsys exports count from 0 for pageable and must be mapped; nvprof and CUPTI need not.
    """

    UNKNOWN = 0
    PAGEABLE = 1
    PINNED = 2
    DEVICE = 3
    ARRAY = 4
    MANAGED = 5
    DEVICE_STATIC = 6
    MANAGED_STATIC = 7


COLUMN_TYPES: Final[Mapping[str, type[np.signedinteger[Any]]]] = {
    "start": np.int64,
    "end": np.int64,
    "kind": np.int8,
    "name": np.int32,
    "rank": np.int16,
    "process": np.int16,
    "device": np.int16,
    "gpu": np.int16,
    "stream": np.int32,
    "thread": np.int32,
    "correlation": np.int64,
    "bytes": np.int64,
    "source_memory": np.int8,
    "destination_memory": np.int8,
    "source_device": np.int16,
    "destination_device": np.int16,
}

UNKNOWN: Final = -1
"""Stands in any column but the times for a value that the recorder did not give."""


class Events:
    """Rows of the event columns, all of one length; only the columns asked for are there.

    Attributes:
        start, end: integer nanoseconds on the trace's clock, ``start <= end``.
        kind: a `Kind`.
        name: id of the name; `Trace.names` turns ids into text.
        rank: rank of the process in a distributed run, where the recorder wrote it down.
        process: index into `Trace.processes`.
        device: the CUDA ordinal in that process.
        gpu: index of the physical card, as NVML counts.
        stream: CUDA stream id, unique per process and device.
        thread: operating-system id of the host thread.
        correlation: joins a GPU operation with the API call that issued it, per process; of a step
            its number, as the program counted.
        bytes: bytes copied or set.
        source_memory, destination_memory: a `Memory`, of copies.
        source_device, destination_device: CUDA ordinals, of peer copies.
    """

    __slots__ = (*COLUMN_TYPES, "__weakref__")

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    kind: NDArray[np.int8]
    name: NDArray[np.int32]
    rank: NDArray[np.int16]
    process: NDArray[np.int16]
    device: NDArray[np.int16]
    gpu: NDArray[np.int16]
    stream: NDArray[np.int32]
    thread: NDArray[np.int32]
    correlation: NDArray[np.int64]
    bytes: NDArray[np.int64]
    source_memory: NDArray[np.int8]
    destination_memory: NDArray[np.int8]
    source_device: NDArray[np.int16]
    destination_device: NDArray[np.int16]

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """Takes the columns by name; raises ValueError for an unknown name or unequal lengths."""
        if len({len(column) for column in columns.values()}) > 1:
            raise ValueError("event columns differ in length")
        for name, column in columns.items():
            if name not in COLUMN_TYPES:
                raise ValueError(f"no event column is called {name!r}")
            object.__setattr__(self, name, column.astype(COLUMN_TYPES[name], copy=False))

    def __getattr__(self, name: str) -> Any:
        """Reached only for a column that was not read."""
        if name in COLUMN_TYPES:
            raise LookupError(f"the event column {name!r} was not asked for")
        raise AttributeError(name)

    def __reduce__(self) -> tuple[type[Events], tuple[dict[str, Column]]]:
        return Events, ({name: getattr(self, name) for name in self.columns},)

    def __len__(self) -> int:
        return next((len(getattr(self, name)) for name in self.columns), 0)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are here, in the contract's order."""
        return tuple(name for name in COLUMN_TYPES if _is_set(self, name))

    def having(self, *names: str) -> Events:
        """All rows, with these columns alone."""
        return Events({name: getattr(self, name) for name in names})

    def select(self, rows: Mask | Column | slice) -> Events:
        """The rows that a mask, indices or a slice name, with the same columns."""
        return Events({name: getattr(self, name)[rows] for name in self.columns})


def _is_set(events: Events, name: str) -> bool:
    try:
        object.__getattribute__(events, name)
    except AttributeError:
        return False
    return True


def concatenate(parts: Sequence[Events], columns: Sequence[str]) -> Events:
    """The rows of all parts, one after another; no parts give no rows of the named columns."""
    if len(parts) == 1:
        return parts[0]
    return Events(
        {
            name: np.concatenate([getattr(part, name) for part in parts])
            if parts
            else np.empty(0, COLUMN_TYPES[name])
            for name in columns
        }
    )
