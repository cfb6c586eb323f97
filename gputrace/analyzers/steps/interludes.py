"""Validation and checkpoints: what runs between two steps and is part of neither."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps.anchors import Rows
from gputrace.analyzers.steps.windows import Interlude, StepWindows
from gputrace.traces.events import Kind
from gputrace.traces.ids import distinct_ids
from gputrace.traces.trace import Trace, Window

_FOREIGN_PART: Final = 0.05
"""More operations than usual by this part of a step, between a step's end and the next's start,"""
_LONG_PART: Final = 0.5
"""or any that last longer than usual by this part of a step, belong to neither."""
_FAR_MORE: Final = 1.2
"""A step with this many times the operations of a usual one may begin with others' work,"""
_ALIKE: Final = 0.95
"""if its end has this part of its operations in common with a usual step."""
_WRITES: Final = re.compile(r"_*(f?write|pwrite|writev|pwritev|fsync|fdatasync|fflush|sync_file)")
_SAVING_COPIES: Final = 3
"""More copies to the host than this, before anything is computed, save a checkpoint."""


def part_interludes(
    operations: GpuOperations, first: Rows, last: Rows, starts: Times, ends: Times
) -> tuple[Times, tuple[Interlude, ...]]:
    """The end of each step, where the next starts unless something foreign lies between them.

    Args:
        operations: of the rank's main GPU.
        first, last: first and last own operation of each step.
        starts, ends: moments of each window's start and of the last own operation's end.
    """
    if len(starts) < 2:
        return ends, ()
    between = first[1:] - last[:-1] - 1
    size, length = np.median(last - first + 1), np.median(np.diff(starts))
    many = between > np.median(between) + max(3.0, _FOREIGN_PART * float(size))
    pause = starts[1:] - ends[:-1]
    long = pause > np.median(pause) + _LONG_PART * float(length)
    to_host = np.cumsum(np.append(0, operations.events.kind == Kind.COPY_D2H))
    copies = to_host[first[1:]] - to_host[last[:-1] + 1]
    saved = copies > np.median(copies) + _SAVING_COPIES
    foreign = (many | long | saved) & (starts[1:] > ends[:-1])
    found: list[Interlude] = []
    for step in np.flatnonzero(foreign).tolist():
        rows = slice(int(last[step]) + 1, int(first[step + 1]))
        found += _split(operations, step, rows, int(ends[step]), int(starts[step + 1]))
    return np.append(np.where(foreign, ends[:-1], starts[1:]), ends[-1]), tuple(found)


def without_foreign(operations: GpuOperations, first: Rows, last: Rows) -> Rows:
    """Later firsts of steps that begin with work which is not theirs.

    A marker sees validation between two optimizer steps as a part of the second. Such a step has
    far more operations than usual, of which the last are those of a usual step, from its first on;
    the many that a search for algorithms adds lie among its own.
    """
    size = int(np.median(last - first + 1))
    usual = int(np.argmin(np.abs(last - first + 1 - size)))
    tokens = operations.events.name.astype(np.int64) * 64 + operations.events.kind
    model = tokens[first[usual] : last[usual] + 1]
    first = first.copy()
    for step in np.flatnonzero(last - first + 1 > _FAR_MORE * size).tolist():
        begin = int(last[step]) + 1 - len(model)
        near = range(begin - int(_FOREIGN_PART * size), begin + int(_FOREIGN_PART * size) + 1)
        like = [row for row in near if row > first[step] and tokens[row] == model[0]]
        row = min(like, key=lambda row: abs(row - begin), default=-1)
        if row >= 0 and _alike(model, tokens[row : last[step] + 1]) >= _ALIKE:
            first[step] = row
    return first


def _alike(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    """Part of the operations that two stretches have in common, whatever their order."""
    names, place = np.unique(np.concatenate([one, other]), return_inverse=True)
    counts = [np.bincount(part, minlength=len(names)) for part in np.split(place, [len(one)])]
    return float(np.minimum(*counts).sum() / max(len(one), len(other), 1))


def until_written(trace: Trace, windows: StepWindows, process: int) -> StepWindows:
    """Checkpoints with the time that the host then takes to write the file.

    The GPU shows only the copies; that they are being written, the C library's calls show.
    """
    saved = [i for i in windows.interludes if i.phase == "checkpoint"]
    if not saved or Kind.OS_RUNTIME not in trace.kinds:
        return windows
    span = Window(min(i.start for i in saved), int(windows.end[max(i.after for i in saved) + 1]))
    events = trace.events([Kind.OS_RUNTIME], ("start", "end", "name", "process"), span)
    names = trace.names(distinct_ids(events.name))
    writes = [id for id, text in names.items() if _WRITES.match(text)]
    events = events.select(np.isin(events.name, writes) & (events.process == process))
    starts, interludes = windows.start.copy(), list(windows.interludes)
    for index, checkpoint in enumerate(interludes):
        following = checkpoint.after + 1
        if checkpoint.phase != "checkpoint" or checkpoint.end != starts[following]:
            continue
        until = int(windows.busy_from[following])
        late = events.end[(events.start >= checkpoint.start) & (events.end <= until)]
        starts[following] = max(checkpoint.end, int(late.max(initial=checkpoint.end)))
        interludes[index] = replace(checkpoint, end=int(starts[following]))
    return replace(windows, start=starts, interludes=tuple(interludes))


def _split(
    operations: GpuOperations, step: int, rows: slice, start: int, end: int
) -> Iterator[Interlude]:
    """A checkpoint, which copies to the host before it computes, then a validation."""
    kinds = operations.events.kind[rows]
    computing = np.flatnonzero(operations.classes[rows] == OperationClass.COMPUTE)
    first = int(computing[0]) if len(computing) else len(kinds)
    saved = np.flatnonzero(kinds[:first] == Kind.COPY_D2H)
    if len(saved) > _SAVING_COPIES:
        until = int(operations.reach[rows][saved[-1]]) if len(computing) else end
        yield Interlude("checkpoint", start, until, step, f"{len(saved)} copies to the host")
        start = until
    if len(computing):
        told = f"kernels ({len(computing)}) and no optimizer"
    else:
        told = f"waits for other ranks in {len(kinds) - len(saved)} operations"
    if end > start:
        yield Interlude("validation", start, end, step, told)
