"""What `read_operations` and `read_calls` give, of traces that are larger than what is held.

The rows are read some at a time and set down by what they belong to. Then those of one GPU, or of
one thread, are taken together and put in order: no more than these are in memory at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import classify
from gputrace.analyzers.gpus import Gpu, group_gpus, other_ends, pair_keys, pair_of
from gputrace.analyzers.host import CALL_COLUMNS, HostCalls, recorded_calls, sorts_of, thread_keys
from gputrace.analyzers.operations import COLUMNS, GpuOperations, when_calls_were
from gputrace.traces.events import COLUMN_TYPES, GPU_KINDS, Column, Events, Kind
from gputrace.traces.ids import Lookup, number_ids
from gputrace.traces.scratch import Scratch
from gputrace.traces.trace import Progress, Trace


def gather_operations(
    trace: Trace, scratch: Scratch, progress: Progress | None = None
) -> Sequence[GpuOperations]:
    """The operations of every GPU that did anything, in order of GPU, in ``scratch``."""
    aside = Scratch()
    parts = [_part(events, pair_keys(events), aside) for events in _with_ends(trace, progress)]
    work: Counter[int] = Counter()
    for part in parts:
        work.update({key: rows.stop - rows.start for key, rows in part.groups.items()})
    gpus = group_gpus(trace, {pair_of(key): work[key] for key in sorted(work)})
    keys = {pair_of(key): key for key in work}
    found = []
    for gpu in gpus:
        own = [keys[pair] for pair in gpu.pairs]
        found.append(_operations(trace, gpu, parts, own, scratch))
        aside.let_go()
        scratch.let_go()
    return found


def _with_ends(trace: Trace, progress: Progress | None) -> Iterator[Events]:
    """The rows of all GPUs, and after them peer copies on the GPU at their other end."""
    peers = False
    for events in trace.parts(GPU_KINDS, COLUMNS, progress):
        peers = peers or bool((events.kind == Kind.COPY_PEER).any())
        yield events
    if peers:
        yield other_ends(trace, COLUMNS)


def _operations(
    trace: Trace, gpu: Gpu, parts: Sequence[_Part], keys: Sequence[int], scratch: Scratch
) -> GpuOperations:
    order = np.argsort(_column(parts, keys, "start"), kind="stable")
    events = Events({name: scratch.keep(_column(parts, keys, name)[order]) for name in COLUMNS})
    classes = classify(trace, events)
    windows = tuple(trace.recorded(gpu.process)), when_calls_were(trace, gpu)
    return scratch.keep(GpuOperations(gpu, events, classes, *windows))


def gather_calls(
    trace: Trace, scratch: Scratch, progress: Progress | None = None
) -> HostCalls | None:
    """All CUDA calls of the trace in ``scratch``; None where there are none."""
    if Kind.API not in trace.kinds:
        return None
    aside = Scratch()
    read = trace.parts([Kind.API], CALL_COLUMNS, progress)
    parts = [_part(events, thread_keys(events), aside) for events in read]
    keys = sorted({key for part in parts for key in part.groups})
    if not keys:
        return None
    counts = [sum(part.count(key) for part in parts) for key in keys]
    types = {name: COLUMN_TYPES[name] for name in ("start", "end", "name", "correlation", "thread")}
    rooms = {name: scratch.room(kind, sum(counts)) for name, kind in types.items()}
    rooms["sort"] = scratch.room(np.int8, sum(counts))
    for number, (key, count) in enumerate(zip(keys, counts, strict=True)):
        order = np.argsort(_column(parts, [key], "start"), kind="stable")
        for name in ("start", "end", "name", "correlation"):
            rooms[name].append(_column(parts, [key], name)[order])
        rooms["thread"].append(np.full(count, number, np.int32))
        rooms["sort"].append(sorts_of(trace, _column(parts, [key], "name")[order]))
        aside.let_go()
    first = np.append(0, np.cumsum(counts))
    threads = tuple((key >> 32, int(np.int32(np.uint32(key & 0xFFFFFFFF)))) for key in keys)
    columns = {name: room.column for name, room in rooms.items()}
    correlation = columns.pop("correlation")
    by_correlation = dict(_correlations(correlation, first, threads, scratch))
    return HostCalls(
        **columns,
        threads=threads,
        first=first,
        _by_correlation=by_correlation,
        _recorded=recorded_calls(trace, sorted({process for process, _ in threads})),
    )


def _correlations(
    correlation: Column,
    first: NDArray[np.int64],
    threads: Sequence[tuple[int, int]],
    scratch: Scratch,
) -> Iterator[tuple[int, Lookup]]:
    """For each process, whose threads lie side by side, the first call of each id; 0 is no id."""
    processes = [process for process, _ in threads]
    for process in dict.fromkeys(processes):
        low = first[processes.index(process)]
        own = correlation[low : first[len(processes) - processes[::-1].index(process)]]
        rows = np.flatnonzero(own > 0)
        if len(rows):
            yield process, scratch.keep(Lookup(own[rows], rows + low))
        scratch.let_go()


@dataclass(frozen=True)
class _Part:
    """Some rows of a trace, those that belong together side by side."""

    rows: Events
    place: NDArray[np.int32]
    """Of each row among those of the part in the order of the file."""
    groups: Mapping[int, slice]

    def column(self, keys: Iterable[int], name: str) -> Column:
        """Of the rows of some groups, in the order of the file."""
        slices = [self.groups[key] for key in keys if key in self.groups]
        values = [getattr(self.rows, name)[rows] for rows in slices]
        if len(slices) < 2:
            return values[0] if values else np.empty(0, COLUMN_TYPES[name])
        order = np.argsort(np.concatenate([self.place[rows] for rows in slices]))
        joined: Column = np.concatenate(values)[order]
        return joined

    def count(self, key: int) -> int:
        rows = self.groups.get(key, slice(0, 0))
        return int(rows.stop - rows.start)


def _part(events: Events, keys: NDArray[np.signedinteger[Any]], scratch: Scratch) -> _Part:
    distinct, number = number_ids(keys)
    kind = np.int16 if len(distinct) < 1 << 15 else np.int64  # Sixteen bits sort in two passes.
    order = np.argsort(number.astype(kind), kind="stable")
    edges = [0, *np.cumsum(np.bincount(number)).tolist()]
    groups = {
        key: slice(low, high)
        for key, (low, high) in zip(distinct.tolist(), pairwise(edges), strict=True)
    }
    part = _Part(events.select(order), order.astype(np.int32), groups)
    kept = scratch.keep(part)
    scratch.let_go()
    return kept


def _column(parts: Sequence[_Part], keys: Sequence[int], name: str) -> Column:
    joined: Column = np.concatenate([part.column(keys, name) for part in parts])
    return joined
