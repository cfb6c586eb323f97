"""What the host threads did in CUDA: which call issued which GPU operation, and of what sort."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import distinct_ids
from gputrace.analyzers.intervals import Intervals, Times, union
from gputrace.traces.events import Events, Kind
from gputrace.traces.trace import Progress, Trace, Window


class Call(IntEnum):
    """Sorts of CUDA calls that matter for what a GPU waits for."""

    OTHER = 0
    ISSUE = 1
    """Hands work to the GPU: launches, copies, memsets, graphs."""
    SYNC = 2
    """Blocks until the GPU has done something."""
    ALLOC = 3
    """Takes or gives back memory, which may stop the whole device."""


_PATTERNS: Final = (
    (Call.SYNC, re.compile(r"(cuda|cu|hip)\w*Synchronize")),
    (
        Call.ALLOC,
        re.compile(
            r"cuda(Malloc|Free|HostAlloc|HostRegister|HostUnregister)"
            r"|cuMem(Alloc|Free|Create|Map|Unmap|Release|SetAccess)"
            r"|cuMemHost(Alloc|Register|Unregister)"
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

NOBODY: Final = -1
"""Index of the thread or call that is not known."""


def call_of(name: str) -> Call:
    """The sort of a CUDA call by its name, with or without a version suffix (``_v7000``)."""
    return next((call for call, pattern in _PATTERNS if pattern.match(name)), Call.OTHER)


@dataclass(frozen=True)
class HostCalls:
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
    """Where the calls of each thread begin; one entry more than threads."""
    _by_correlation: dict[int, tuple[NDArray[np.int64], NDArray[np.intp]]]
    """For each process, its correlation ids in order, and the call of each."""

    def issued_by(self, operations: Events) -> NDArray[np.int32]:
        """The call that issued each operation, or `NOBODY`; needs ``process, correlation``."""
        found = np.full(len(operations), NOBODY, np.int32)
        for process, (ids, calls) in self._by_correlation.items():
            rows = np.flatnonzero(operations.process == process)
            wanted = operations.correlation[rows]
            place = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
            same = ids[place] == wanted
            found[rows[same]] = calls[place[same]]
        return found

    def of_thread(self, thread: int, *sorts: Call) -> Intervals:
        """When a thread was inside calls of some sorts, or of any."""
        rows = slice(int(self.first[thread]), int(self.first[thread + 1]))
        start, end = self.start[rows], self.end[rows]
        if sorts:
            keep = np.isin(self.sort[rows], sorts)
            start, end = start[keep], end[keep]
        return union(start, end, is_sorted=True)

    def overlapping(self, thread: int, start: int, end: int) -> NDArray[np.intp]:
        """Calls of a thread that touch a stretch of time; calls of a thread may nest."""
        first, stop = int(self.first[thread]), int(self.first[thread + 1])
        until = first + int(np.searchsorted(self.start[first:stop], end))
        return np.flatnonzero(self.end[first:until] > start) + first


def read_calls(
    trace: Trace, progress: Progress | None = None, window: Window | None = None
) -> HostCalls | None:
    """All CUDA calls of the trace, or those that touch a window; None where there are none."""
    if Kind.API not in trace.kinds:
        return None
    columns = ("start", "end", "name", "process", "thread", "correlation")
    events = trace.events([Kind.API], columns, window, progress)
    if not len(events):
        return None
    keys = events.process.astype(np.int64) << 32 | events.thread.astype(np.int64) & 0xFFFFFFFF
    order = _order(keys, events.start)
    events, keys = events.select(order), keys[order]
    new = np.concatenate([[True], keys[1:] != keys[:-1]])
    first = np.flatnonzero(new)
    return HostCalls(
        start=events.start,
        end=events.end,
        name=events.name,
        sort=_sorts(trace, events.name),
        thread=(np.cumsum(new) - 1).astype(np.int32),
        threads=tuple((int(events.process[i]), int(events.thread[i])) for i in first),
        first=np.append(first, len(events)),
        _by_correlation=_correlations(events),
    )


def _order(keys: NDArray[np.int64], start: Times) -> NDArray[np.intp]:
    """Rows by key, then start: sorting once by start is quick as rows mostly come that way."""
    by_start = np.argsort(start, kind="stable")
    ordered = keys[by_start]
    change = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    distinct, place = np.unique(ordered[change], return_inverse=True)
    kind = np.int16 if len(distinct) < 1 << 15 else np.int64
    threads = np.repeat(place.astype(kind), np.diff(np.append(change, len(ordered))))
    return by_start[np.argsort(threads, kind="stable")]


def _sorts(trace: Trace, names: NDArray[np.int32]) -> NDArray[np.int8]:
    ids = distinct_ids(names)
    text = trace.names(ids)
    sorts = np.array([call_of(text[int(id)]) for id in ids], np.int8)
    return sorts[np.searchsorted(ids, names)]


def _correlations(events: Events) -> dict[int, tuple[NDArray[np.int64], NDArray[np.intp]]]:
    """For each process, its correlation ids in order, and the call of each; 0 is no id."""
    tables = {}
    for process in np.unique(events.process):
        rows = np.flatnonzero((events.process == process) & (events.correlation > 0))
        if len(rows):
            rows = rows[np.argsort(events.correlation[rows], kind="stable")]
            tables[int(process)] = (events.correlation[rows], rows)
    return tables
