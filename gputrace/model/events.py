"""Event columns: the contract between readers and analyzers, and lookups of the ids in them.

A reader converts its file format into these columns; analyzers consume them and know no file
format. A row is one event on a GPU or on a host thread. Row order is not significant. Dense ids,
the usual case, are counted and not sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.native import address, library

Column = NDArray[np.signedinteger[Any]]
Mask = NDArray[np.bool_]


class Kind(IntEnum):
    """Kind of an event. GPU operations come first, as one contiguous block."""

    KERNEL = 0
    GRAPH = 1
    """A CUDA graph recorded as a whole: busy, with unknown contents."""
    COPY_H2D = 2
    COPY_D2H = 3
    COPY_D2D = 4
    """A copy within one GPU's memory."""
    COPY_PEER = 5
    """A copy between two GPUs, which occupies both."""
    COPY_OTHER = 6
    """A copy of unrecorded direction, or from host to host."""
    MEMSET = 7

    API = 16
    """A CUDA runtime or driver API call on a host thread."""
    SYNC = 17
    """A wait for the GPU, as the recorder measured it."""
    OS_RUNTIME = 18
    """A blocking C library call on a host thread (poll, read, futex, sleep…)."""
    RANGE = 19
    """A named range on a host thread (NVTX push/pop, start/end)."""
    MARK = 20
    """A named instant on a host thread; start equals end."""
    OVERHEAD = 21
    """Overhead of the recorder itself."""
    DATA_WAIT = 22
    """A host thread's wait for the next batch, recorded by a hook in the data loader."""
    STEP = 23
    """A training step, marked on the host by a hook or a profiler."""
    SAMPLE = 24
    """A stack sample: the name of the user code that a host thread was in; start equals end, and
    ``bytes`` is for how many nanoseconds it was still there, in one call of a C function mostly.
    The id of the innermost frame's name is in ``correlation``, on the file's own numbers."""
    LOADER = 27
    """A part of a batch in a data loader's worker or main process, or a moment of a loader."""
    PHASE = 28
    """A call that is a part of a training step; the name says which: backward, optimizer."""
    COLLECTION = 29
    """A garbage collection in a host thread; the name says which generation."""
    COUNTER = 30
    """A count of the kernel's for a thread from start to end; the value is in ``bytes``."""
    COMPILATION = 31
    """A compilation of a part of the program; the name says of what, and why again."""
    MESSAGE = 32
    """A call of NCCL's on a host thread, with what it says of its message; without a thread, the
    operation on the GPU itself. The communicator's id is in ``correlation``, the message's size in
    ``bytes``, the peer's or root's rank in the communicator in ``device``."""
    COMMUNICATOR = 33
    """A communicator, in each process that takes part; the name says what the program calls it. Its
    id is in ``correlation``, its number of ranks in ``bytes``, the process's rank in ``device``."""
    OPERATOR = 34
    """A call of a framework's operator on a host thread, of known shapes: its floating-point
    operations in ``correlation``, the least bytes that it moves in ``bytes``, 0 if unknown. None
    lies within another."""
    MODULE = 35
    """A stretch of a host thread within a module of a network and none of its parts; the name has
    the modules around it, parted by slashes. 1 in ``correlation`` is a stretch of the backward
    pass."""
    GRAPH_NODE = 36
    """The moment at which a host thread captured or copied a node of a CUDA graph, whose id is in
    ``correlation``; that of the node it copies in ``bytes``."""
    SOURCE = 37
    """A line of the program's source: the name says of what (the path of a module: where it is
    called; a Triton kernel: where it is defined), `AT`, and the line as of a sample."""

    MEMORY = 38
    """The moment from which a process holds as many bytes of a GPU, ``bytes``, for its tensors."""


AT: Final = " at "
"""Separator of the name of a `Kind.SOURCE` and the line."""

GPU_KINDS: Final = tuple(kind for kind in Kind if kind < Kind.API)
COPY_KINDS: Final = (Kind.COPY_H2D, Kind.COPY_D2H, Kind.COPY_D2D, Kind.COPY_PEER, Kind.COPY_OTHER)


class Memory(IntEnum):
    """Memory kind of either end of a copy, numbered as in ``CUpti_ActivityMemoryKind``.

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
    "node": np.int64,
}

UNKNOWN: Final = -1
"""Placeholder, in any column but the times, for a value that was not recorded."""


class Events:
    """Event columns of equal length; only the requested columns are present.

    Attributes:
        columns: names of the columns present, in the order of `COLUMN_TYPES`.
        start, end: integer nanoseconds on the trace clock, ``start <= end``.
        kind: a `Kind`.
        name: name id; `Trace.names` resolves ids to text.
        rank: rank of the process in a distributed run, where recorded.
        process: index into `Trace.processes`.
        device: the CUDA ordinal in that process.
        gpu: NVML index of the physical card.
        stream: CUDA stream id, unique per process and device.
        thread: operating-system thread id of the host thread.
        correlation: links a GPU operation to the API call that issued it, per process; for a
            step, its number as counted by the program; for a loader's event, owner << 32 | number
            (docs/recording-details.md).
        bytes: bytes copied or set.
        source_memory, destination_memory: a `Memory`, for copies.
        source_device, destination_device: CUDA ordinals, for peer copies.
        node: id of the CUDA graph's node that a kernel is a run of, unique per process.
    """

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
    node: NDArray[np.int64]

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """Create from columns by name; raise ValueError on unknown names or unequal lengths."""
        if len(set(map(len, columns.values()))) > 1:
            raise ValueError("event columns differ in length")
        self.columns = tuple(filter(columns.__contains__, COLUMN_TYPES))
        for name, column in columns.items():
            if name not in COLUMN_TYPES:
                raise ValueError(f"no event column is called {name!r}")
            setattr(self, name, column.astype(COLUMN_TYPES[name], copy=False))

    @classmethod
    def fitting(cls, columns: Mapping[str, Column]) -> Events:
        """Create from columns by name; values that do not fit their column are `UNKNOWN`."""
        fitting = {}
        for name, values in columns.items():
            limits = np.iinfo(COLUMN_TYPES[name])
            fitting[name] = np.where((values < limits.min) | (values > limits.max), UNKNOWN, values)
        return cls(fitting)

    def __getattr__(self, name: str) -> Any:
        """Raise LookupError for a column that was not read."""
        if name in COLUMN_TYPES:
            raise LookupError(f"the event column {name!r} was not asked for")
        raise AttributeError(name)

    def __len__(self) -> int:
        return len(getattr(self, self.columns[0])) if self.columns else 0

    def having(self, *names: str) -> Events:
        """Return all rows with only the given columns."""
        return Events({name: getattr(self, name) for name in names})

    def select(self, rows: Mask | Column | slice) -> Events:
        """Return the rows selected by a mask, indices or a slice, with all columns."""
        if isinstance(rows, slice):
            return Events({name: getattr(self, name)[rows] for name in self.columns})
        indices = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Events({name: getattr(self, name).take(indices) for name in self.columns})

    def take_away(self, rows: Column) -> Events:
        """Return the rows with all columns, which are freed here, each before the next is made."""
        names, self.columns = self.columns, ()
        return Events({name: self.__dict__.pop(name).take(rows) for name in names})


def concatenate(parts: list[Events], columns: Sequence[str]) -> Events:
    """Concatenate the rows of all parts; without parts, return empty columns.

    The list is emptied, so that the columns of each part make room for the next ones.
    """
    if len(parts) == 1:
        return parts[0]
    pieces = {name: [getattr(part, name) for part in parts] for name in columns}
    parts.clear()
    return Events(
        {
            name: np.concatenate(pieces.pop(name) or [np.empty(0, COLUMN_TYPES[name])])
            for name in columns
        }
    )


_DENSE: Final = 4
"""Ids are dense if their value range is at most this many times the number of rows."""
_SORTED_BY_DIGITS: Final = 1 << 12
"""Numbers that are sooner sorted by their digits than by comparing them."""
_COMPARED_EACH: Final = 8
"""Ids that are compared with each other one by one."""


def distinct_ids(ids: Column) -> NDArray[np.int64]:
    """Return the sorted distinct ids."""
    if (limits := _limits(ids, _DENSE)) is not None:
        return _counted(ids, *limits)
    ordered = np.sort(ids).astype(np.int64, copy=False)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    distinct: NDArray[np.int64] = ordered[first]
    return distinct


def sort_numbers(numbers: NDArray[np.int64]) -> None:
    """Sort a column in place."""
    if (
        len(numbers) < _SORTED_BY_DIGITS
        or (native := library()) is None
        or not numbers.flags.c_contiguous
    ):
        numbers.sort()
    else:
        scratch = np.empty_like(numbers)
        native.gputrace_sort_numbers(address(numbers), address(scratch), len(numbers))


def is_among(ids: Column, wanted: Column | Iterable[int]) -> Mask:
    """Return whether each id is one of those wanted."""
    if not isinstance(wanted, np.ndarray):
        wanted = np.array([*wanted], np.int64)
    if wanted.size <= _COMPARED_EACH:
        among = np.zeros(ids.shape, np.bool_)
        for id in wanted.tolist():
            among |= ids == id
        return among
    distinct = distinct_ids(wanted)
    if _limits(distinct, _DENSE) is None:
        return np.asarray(distinct.take(distinct.searchsorted(ids), mode="clip") == ids)
    low, high = int(distinct[0]), int(distinct[-1])
    known = np.zeros(high - low + 1, np.int32)
    known[distinct - low] = 1
    return np.asarray(_look_up(ids, low, known) > 0)


def number_ids(ids: Column) -> tuple[NDArray[np.int64], NDArray[np.signedinteger[Any]]]:
    """Return the sorted distinct ids, and the index into them for each row."""
    limits = _limits(ids, 4 * _DENSE)
    if limits is None:
        distinct, indices = np.unique(ids, return_inverse=True)
        return distinct.astype(np.int64), indices
    low, high = limits
    distinct = _counted(ids, low, high)
    if len(distinct) == 1:
        return distinct, np.zeros(ids.size, np.int32)
    index_of = np.empty(high - low + 1, np.int32)
    index_of[distinct - low] = np.arange(len(distinct), dtype=np.int32)
    return distinct, _look_up(ids, low, index_of)


def order_by_group(
    group: Column, groups: int, start: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the rows in order of group and start, equal ones as they are, and where in them each
    group begins, with the end of the last one.

    Args:
        group: numbers from 0 to below ``groups``.
        groups: number of groups.
        start: nanoseconds, by row. Sorted within a group they cost next to nothing.
    """
    edges = np.zeros(groups + 1, np.int64)
    if len(group) and not 0 <= group.min() <= group.max() < groups:
        raise ValueError(f"a group beyond {groups}")
    if (native := library()) is None:
        np.cumsum(np.bincount(group, minlength=groups), out=edges[1:])
        return np.lexsort((start, group)), edges
    group, start = np.ascontiguousarray(group, np.int32), np.ascontiguousarray(start)
    order, falls = np.empty(len(group), np.intp), np.empty((2, groups), np.int64)
    room = address(order), address(edges[1:]), address(falls)
    native.gputrace_order_by_group(address(group), address(start), len(group), groups, *room)
    for number in np.flatnonzero(falls[0]).tolist():
        rows = order[edges[number] : edges[number + 1]]
        rows[:] = rows[np.argsort(start[rows], kind="stable")]
    return order, edges


class IdLookup:
    """Index of the first row of each id: a direct table for dense ids, else a binary search."""

    def __init__(self, ids: Column, rows: NDArray[np.signedinteger[Any]]) -> None:
        """Index at least one id; ``rows`` are in the order that decides which row is first."""
        limits = _limits(ids, _DENSE)
        self._dense = limits is not None
        if limits is not None:
            self._low, high = limits
            self._rows = np.full(high - self._low + 1, UNKNOWN, np.int32)
            if (native := library()) is not None:
                ids, rows = np.ascontiguousarray(ids), np.ascontiguousarray(rows, np.int64)
                given = address(ids), ids.itemsize, ids.size, self._low, len(self._rows)
                native.gputrace_index_ids(*given, address(self._rows), UNKNOWN, address(rows))
            else:
                self._rows[ids[::-1] - self._low] = rows[::-1]
        else:
            order = np.argsort(ids, kind="stable")
            self._ids, self._rows = ids[order], rows[order].astype(np.int32)

    def rows(self, ids: Column) -> NDArray[np.int32]:
        """Return the row of each id, or `UNKNOWN`."""
        if self._dense:
            return _look_up(ids, self._low, self._rows)
        positions = np.searchsorted(self._ids, ids)
        known = self._ids.take(positions, mode="clip") == ids
        rows = self._rows.take(positions, mode="clip")
        return rows if known.all() else np.where(known, rows, np.int32(UNKNOWN))


def _look_up(ids: Column, low: int, table: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the entry of each id in a table that begins at id ``low``; `UNKNOWN` beyond it."""
    if (native := library()) is not None:
        ids, entries = np.ascontiguousarray(ids), np.empty(ids.shape, np.int32)
        given = address(ids), ids.itemsize, ids.size, low, len(table), address(table)
        native.gputrace_look_up_ids(*given, UNKNOWN, address(entries))
        return entries
    positions = ids.astype(np.int64) - low
    known = (positions >= 0) & (positions < len(table))
    return np.where(known, table.take(positions, mode="clip"), np.int32(UNKNOWN))


def _limits(ids: Column, times: int) -> tuple[int, int] | None:
    """Return the least and the largest id; None unless they are ``times`` as far apart as there are
    rows at most.
    """
    if not ids.size:
        return None
    low, high = int(ids.min()), int(ids.max())
    return (low, high) if high - low <= times * ids.size else None


def _counted(ids: Column, low: int, high: int) -> NDArray[np.int64]:
    if low == high:
        return np.array([low])
    seen = np.zeros(high - low + 1, bool)
    if (native := library()) is not None:
        ids = np.ascontiguousarray(ids)
        given = address(ids), ids.itemsize, ids.size, low, len(seen), address(seen)
        native.gputrace_mark_ids(*given)
    else:
        seen[ids.astype(np.intp) - low] = True
    return np.flatnonzero(seen) + low
