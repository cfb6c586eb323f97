"""CUDA calls of the host threads: which call issued which GPU operation, and of what sort."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.model.events import (
    UNKNOWN,
    Column,
    Events,
    IdLookup,
    Kind,
    Mask,
    distinct_ids,
    is_among,
    number_ids,
    order_by_group,
)
from gputrace.model.intervals import Intervals, Times, lie_in, union
from gputrace.model.options import Window
from gputrace.model.struct import Struct
from gputrace.model.trace import Progress, Trace
from gputrace.units import format_ns


class Call(IntEnum):
    """Sorts of CUDA calls, by how they keep a GPU waiting."""

    OTHER = 0
    ISSUE = 1
    """Call that hands work to the GPU: launch, copy, memset, graph."""
    SYNC = 2
    """Call that blocks until the GPU has done something."""
    ALLOC = 3
    """Call that allocates, maps or frees memory, which may stop the whole device."""
    COPY = 4
    """Call that issues a copy and blocks until it is done (CUDA runtime API, "API synchronization
    behavior"; HIP's hipMemcpyWithStream)."""


_PATTERNS: Final = (
    (Call.SYNC, re.compile(r"(cuda|cu|hip)\w*Synchronize")),
    (
        Call.COPY,
        re.compile(
            r"hipMemcpyWithStream|(cuda|cu|hip)Memcpy(?!\w*(Async|Peer|DtoD|AtoA|AtoD|DtoA))"
        ),
    ),
    (
        Call.ALLOC,
        re.compile(
            r"cuda(Malloc|Free|HostAlloc|HostRegister|HostUnregister)"
            r"|cuMem(Alloc|Free|Create|Map|Unmap|Release|SetAccess)"
            r"|cuMemHost(Alloc|Register|Unregister)|(cuda|cu|hip)Ipc(Open|Close)MemHandle"
            r"|hip(Ext)?(Malloc|Free|Host(Malloc|Alloc|Free|Register|Unregister)|MemCreate|MemMap)"
        ),
    ),
    (
        Call.ISSUE,
        re.compile(
            r"(cuda|cu)(Launch|GraphLaunch|Memcpy|Memset|MemPrefetch)"
            r"|hip(Ext|ExtModule|Module)?(Launch|GraphLaunch|Memcpy|Memset|MemPrefetch)"
        ),
    ),
)

_OS_CALLS: Final = (
    (r"sleep", "slept"),
    (r"poll|select|wait|futex|lock|join|^sem_|pause", "waited"),
    (r"read|recv|^fgets|getline", "read"),
    (r"write|send|sync|flush", "wrote"),
)
"""Verbs for what a thread does in a system call, by parts of the call's name."""
_NAMED_OS_PART: Final = 0.05
"""Part of some time that a system call must last for to be named."""


def read_host(trace: Trace, process: int, kind: Kind, window: Window) -> Events:
    """Read what a process did of a kind; nothing where that was not recorded."""
    columns = ("start", "end", "name", "process", "thread")
    return trace.events_of(process, {kind} & trace.kinds, columns, window)


def longest_os_call(
    trace: Trace, calls: Events, thread: tuple[int, int], time: Intervals
) -> tuple[str, int]:
    """Return the system call that a thread was in for longest within some time, and for how many
    nanoseconds; nothing where that is less than 5 % of the time.
    """
    rows = np.flatnonzero((calls.process == thread[0]) & (calls.thread == thread[1]))
    within = time.within(calls.start[rows], calls.end[rows])
    if not within.any():
        return "", 0
    names, index = number_ids(calls.name[rows])
    spent = np.bincount(index, within)
    most = int(np.argmax(spent))
    if spent[most] < _NAMED_OS_PART * time.total:
        return "", 0
    return trace.names([int(names[most])])[int(names[most])], int(spent[most])


def describe_os_call(name: str, ns: float) -> str:
    """Return what a thread did in a system call, as ``slept 25.4 ms (clock_nanosleep)``."""
    did = next((did for pattern, did in _OS_CALLS if re.search(pattern, name)), "")
    return f"{did} {format_ns(ns)} ({name})" if did else f"spent {format_ns(ns)} in {name}"


CALL_COLUMNS: Final = ("start", "end", "name", "process", "thread", "correlation")
"""Columns of calls."""
NOBODY: Final = -1
"""Index of an unknown thread or call."""


class CudaApiCalls(Struct, frozen=True, dict=True):
    """CUDA calls in order of thread and start; threads are numbered from 0."""

    start: Times
    end: Times
    name: NDArray[np.int32]
    sort: NDArray[np.int8]
    """A `Call`."""
    thread: NDArray[np.int32]
    """Index into ``threads``."""
    threads: tuple[tuple[int, int], ...]
    """(process index, system thread id)."""
    first: NDArray[np.int64]
    """Index of each thread's first call; one entry more than threads."""
    _by_correlation: dict[int, IdLookup]
    """Call of each correlation id, by process."""
    _recorded: dict[int, tuple[Window, ...]]
    """Windows of recorded calls, by process of which not all calls were recorded."""

    def issued_by(
        self, operations: Events, rows: slice | NDArray[Any] = slice(None)
    ) -> NDArray[np.intp]:
        """Return the call that issued each operation, or each of some rows of them, or `NOBODY`, by
        process and correlation. Numpy gathers by these in a third of the time of smaller integers.
        """
        processes, correlations = operations.process[rows], operations.correlation[rows]
        issued = np.full(len(processes), NOBODY, np.intp)
        present = distinct_ids(processes).tolist()
        for process in self._by_correlation.keys() & present:
            calls = self._by_correlation[process]
            if len(present) == 1:
                return calls.rows(correlations).astype(np.intp)
            mine = np.flatnonzero(processes == process)
            issued[mine] = calls.rows(correlations[mine])
        return issued

    def threads_of(self, process: int) -> range:
        """Return the numbers of a process's threads, which lie side by side."""
        return range(
            bisect_left(self.threads, (process,)), bisect_left(self.threads, (process + 1,))
        )

    def of_thread(self, thread: int, *sorts: Call) -> Intervals:
        """Return when a thread was inside calls of some sorts, or of any."""
        edges = self.first[thread : thread + 2]
        rows: slice | NDArray[np.intp] = slice(*edges.tolist())
        if sorts and Call.ISSUE not in sorts:
            rows = self._no_launches[slice(*np.searchsorted(self._no_launches, edges))]
            rows = rows[is_among(self.sort[rows], sorts)]
        elif sorts:
            rows = np.flatnonzero(is_among(self.sort[rows], sorts)) + edges[0]
        return union(self.start[rows], self.end[rows], is_sorted=True)

    @cached_property
    def _no_launches(self) -> NDArray[np.intp]:
        """Calls that are not `Call.ISSUE`, few of most recordings."""
        return np.flatnonzero(self.sort != Call.ISSUE)

    def all_recorded(self, process: int, starts: Times, ends: Times) -> Mask:
        """Return for each stretch of time whether all calls of the process were recorded in it."""
        if process not in self._recorded:
            return np.ones(len(starts), np.bool_)
        return lie_in(starts, ends, self._recorded[process])

    def ranges_around(self, rows: NDArray[np.intp], ranges: Events) -> NDArray[np.int64]:
        """Return the range in which each of some calls began, or `NOBODY`.

        Args:
            rows: of calls, or `NOBODY`.
            ranges: of host threads, in the order of `by_thread`; none within another.
        """
        around = np.full(len(rows), NOBODY, np.int64)
        known = np.flatnonzero(rows != NOBODY)
        keys = np.array([process << 32 | id & 0xFFFFFFFF for process, id in self.threads], np.int64)
        around[known] = ranges_at(keys[self.thread[rows[known]]], self.start[rows[known]], ranges)
        return around

    def overlapping(self, thread: int, start: int, end: int) -> NDArray[np.intp]:
        """Return the calls of a thread that touch a window; they may nest."""
        first, stop = int(self.first[thread]), int(self.first[thread + 1])
        until = first + int(np.searchsorted(self.start[first:stop], end))
        if thread not in self._reach:
            self._reach[thread] = np.maximum.accumulate(self.end[first:stop])
        # All calls before these had ended.
        first += int(np.searchsorted(self._reach[thread], start, "right"))
        return np.flatnonzero(self.end[first:until] > start) + first

    @cached_property
    def _reach(self) -> dict[int, Times]:
        """Moments at which each call of a thread and all before it had ended, by thread."""
        return {}


def ranges_at(threads: NDArray[np.int64], moments: Times, ranges: Events) -> NDArray[np.int64]:
    """Return the range in which a thread was at each moment, or `NOBODY`.

    Args:
        threads: their `thread_keys`, one for each moment.
        moments: nanoseconds.
        ranges: of host threads, in the order of `by_thread`; none within another.
    """
    around, keys = np.full(len(moments), NOBODY, np.int64), thread_keys(ranges)
    for key in distinct_ids(threads).tolist():
        low, high = np.searchsorted(keys, (key, key + 1)).tolist()
        if low == high:
            continue
        mine = np.flatnonzero(threads == key)
        at = low + np.searchsorted(ranges.start[low:high], moments[mine], "right") - 1
        inside = (at >= low) & (moments[mine] < ranges.end[np.maximum(at, low)])
        around[mine] = np.where(inside, at, NOBODY)
    return around


_MOST_COPIES: Final = 8
"""How often a node may be copied: a child graph's, when it is added and when it is instantiated."""


def captured_in(operations: Events, made: Events, ranges: Events) -> NDArray[np.int64]:
    """Return the range in which the node of a CUDA graph was captured, or `NOBODY`.

    Args:
        operations: with ``process`` and ``node``.
        made: the rows of `Kind.GRAPH_NODE`.
        ranges: as those of `ranges_at`.
    """
    around = np.full(len(operations), NOBODY, np.int64)
    made = made.select(made.correlation != UNKNOWN)
    # A copy is reported as a node that is made, too, by the thread that instantiates the graph.
    made = made.select(np.argsort(made.bytes == UNKNOWN, kind="stable"))
    for process in distinct_ids(operations.process).tolist():
        rows = np.flatnonzero((operations.process == process) & (operations.node != UNKNOWN))
        known = made.select(made.process == process)
        if not len(rows) or not len(known):
            continue
        of_id = IdLookup(known.correlation, np.arange(len(known)))
        at = of_id.rows(operations.node[rows])
        rows, at = rows[at != UNKNOWN], at[at != UNKNOWN]
        for _ in range(_MOST_COPIES):
            original = of_id.rows(known.bytes[at])
            at = np.where(original == UNKNOWN, at, original)
        around[rows] = ranges_at(thread_keys(known)[at], known.start[at], ranges)
    return around


def are_of_hip(trace: Trace, names: Column) -> bool:
    """Return whether calls with these ids of names are HIP's, whose GPUs are AMD's."""
    return bool(trace.search(distinct_ids(names), "^hip"))


_CAPTURE: Final = r"(cuda|cu|hip)Stream(Begin|End)Capture"


def find_captures(trace: Trace, calls: CudaApiCalls) -> NDArray[np.intp]:
    """Return the calls that begin and end the capture of a stream into a graph: shape (captures,
    2). What the same thread launches between them becomes a node, and runs with the graph alone.
    """
    names = trace.search(distinct_ids(calls.name), _CAPTURE)
    begins = [id for id, name in names.items() if "Begin" in name]
    edges = np.flatnonzero(is_among(calls.name, list(names)))
    opens = is_among(calls.name[edges], begins)
    pairs = np.flatnonzero(opens[:-1] & ~opens[1:] & (np.diff(calls.thread[edges]) == 0))
    return np.stack([edges[pairs], edges[pairs + 1]], axis=-1)


def read_calls(
    trace: Trace, progress: Progress | None = None, window: Window | None = None
) -> CudaApiCalls | None:
    """Return all CUDA calls of a trace, or those that touch a window; None if there are none."""
    if Kind.API not in trace.kinds:
        return None
    events = trace.events([Kind.API], CALL_COLUMNS, window, progress)
    if not len(events):
        return None
    threads, thread = number_threads(events)
    order, edges = order_by_group(thread, len(threads), events.start)
    leading = order[edges[:-1]]
    process, ids = events.process[leading].tolist(), events.thread[leading].tolist()
    events = events.having("start", "end", "name", "correlation").take_away(order)
    return CudaApiCalls(
        start=events.start,
        end=events.end,
        name=events.name,
        sort=sorts_of(trace, events.name),
        thread=np.repeat(np.arange(len(threads), dtype=np.int32), np.diff(edges)),
        threads=tuple(zip(process, ids, strict=True)),
        first=edges,
        _by_correlation=dict(rows_by_correlation(events.correlation, process, edges.tolist())),
        _recorded=recorded_calls(trace, sorted(set(process))),
    )


def recorded_calls(trace: Trace, processes: Sequence[int]) -> dict[int, tuple[Window, ...]]:
    """Return the windows of recorded calls of the processes of which not all were recorded."""
    windows = {process: trace.coverage(process).calls for process in processes}
    return {process: tuple(parts) for process, parts in windows.items() if parts is not None}


def thread_keys(events: Events) -> NDArray[np.int64]:
    """Return a number for the process and the thread of each call, in the order of threads."""
    return events.process.astype(np.int64) << 32 | (events.thread.astype(np.int64) & 0xFFFFFFFF)


def by_thread(events: Events) -> Events:
    """Return events of host threads in order of process, thread and start."""
    return events.select(np.lexsort((events.start, thread_keys(events))))


def number_threads(events: Events) -> tuple[NDArray[np.int64], NDArray[np.signedinteger[Any]]]:
    """Return the `thread_keys` of the threads in their order, and the index of each row's."""
    thread: Column = events.thread
    if len(thread) and thread.min() < 0:
        thread = thread.astype(np.int64) & 0xFFFFFFFF
    ids, inverse = number_ids(thread)
    pairs, numbers = number_ids(events.process.astype(np.int64) * len(ids) + inverse)
    return pairs // len(ids) << 32 | ids[pairs % len(ids)], numbers


def sorts_of(trace: Trace, names: NDArray[np.int32]) -> NDArray[np.int8]:
    """Return the `Call` of each, by its name, with or without a version suffix (``_v7000``)."""
    ids, inverse = number_ids(names)
    texts = map(trace.names(ids).__getitem__, ids.tolist())
    sorts = [next((c for c, pattern in _PATTERNS if pattern.match(t)), Call.OTHER) for t in texts]
    return np.array(sorts, np.int8).take(inverse)


def rows_by_correlation(
    correlation: NDArray[np.int64], processes: Sequence[int], edges: Sequence[int]
) -> Iterator[tuple[int, IdLookup]]:
    """Yield the processes, each with the first call of each correlation id; 0 is no id.

    Args:
        correlation: of calls in order of process.
        processes: that of each thread, in order.
        edges: first call of each thread, and the number of all.
    """
    for process in dict.fromkeys(processes):
        first = bisect_left(processes, process)
        low, high = edges[first], edges[bisect_right(processes, process)]
        ids, rows = correlation[low:high], np.arange(low, high)
        if not (known := ids > 0).all():
            ids, rows = ids[known], rows[known]
        if len(rows):
            yield process, IdLookup(ids, rows)
