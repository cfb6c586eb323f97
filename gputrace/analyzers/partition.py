"""The partition: every nanosecond of a window of a GPU belongs to exactly one class.

Level k is the union of all operations of the classes up to k; what class k has for itself is
level k less level k - 1. Levels are nested, so the classes and the idle rest sum to the window
by construction, for any window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.classes import OperationClass, classify
from gputrace.analyzers.gpus import Gpu, both_ends, find_gpus
from gputrace.analyzers.intervals import Intervals, Times, union
from gputrace.traces.events import COPY_KINDS, GPU_KINDS, Events, Kind
from gputrace.traces.trace import Progress, Trace, Window

COLUMNS = ("start", "end", "kind", "name", "process", "device", "gpu")
"""What the partition needs to know of GPU operations."""


class Shares(NamedTuple):
    """Nanoseconds of one window by class; they sum to its length."""

    compute: int
    communication: int
    h2d: int
    other_copy: int
    memset: int
    idle: int


@dataclass(frozen=True)
class Timeline:
    """What one GPU did, as nested unions of intervals."""

    gpu: Gpu
    window: Window
    """From the first start to the last end of an operation, or the part of that asked for."""
    levels: tuple[Intervals, ...]
    """For each `OperationClass`, the union of it and of all before it, not clipped."""
    kernels: int
    copies: int
    opaque_graphs: int
    """CUDA graphs recorded as a whole; they count as compute."""

    @property
    def busy(self) -> Intervals:
        """When anything ran on the GPU."""
        return self.levels[-1]

    def of_class(self, which: OperationClass) -> Intervals:
        """When the class ran and none of higher precedence."""
        if which == 0:
            return self.levels[0]
        return self.levels[which].difference(self.levels[which - 1])

    def split(self, starts: ArrayLike, ends: ArrayLike) -> NDArray[np.int64]:
        """Partition of many windows: shape (windows, 6), columns as in `Shares`."""
        starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        covered = [level.within(starts, ends) for level in self.levels]
        edges = np.stack([np.zeros_like(starts), *covered, ends - starts], axis=-1)
        return np.diff(edges, axis=-1)

    @property
    def shares(self) -> Shares:
        """Partition of the whole window."""
        return Shares(*self.split([self.window.start], [self.window.end])[0].tolist())

    @property
    def gaps(self) -> Intervals:
        """Stretches of the window in which the GPU runs nothing."""
        return self.busy.complement(*self.window)


def read_operations(trace: Trace, progress: Progress | None = None) -> Events:
    """All GPU operations with `COLUMNS`, peer copies once for each of their GPUs."""
    return both_ends(trace, trace.events(GPU_KINDS, COLUMNS, progress=progress))


def build_timelines(trace: Trace, operations: Events, window: Window | None) -> list[Timeline]:
    """One timeline per GPU, in order of GPU.

    A window narrows each GPU's own span and never widens it; GPUs with nothing in it are left out.
    """
    classes = classify(trace, operations)
    gpus, place = find_gpus(trace, operations)
    timelines = []
    for index, gpu in enumerate(gpus):
        rows = np.flatnonzero(place == index)
        timeline = _timeline(gpu, operations.select(rows), classes[rows], window)
        if timeline.window.end > timeline.window.start or window is None:
            timelines.append(timeline)
    return timelines


def _timeline(
    gpu: Gpu, operations: Events, classes: NDArray[np.int8], window: Window | None
) -> Timeline:
    order = np.argsort(operations.start, kind="stable")
    start, end, classes = operations.start[order], operations.end[order], classes[order]
    span = Window(int(start[0]), int(end.max()))
    if window is not None:
        span = Window(max(span.start, window.start), min(span.end, window.end))
    counted = operations.kind[(operations.start < span.end) & (operations.end > span.start)]
    return Timeline(
        gpu,
        span,
        levels=_levels(start, end, classes),
        kernels=int(np.count_nonzero(counted == Kind.KERNEL)),
        copies=int(np.isin(counted, COPY_KINDS).sum()),
        opaque_graphs=int(np.count_nonzero(counted == Kind.GRAPH)),
    )


def _levels(start: Times, end: Times, classes: NDArray[np.int8]) -> tuple[Intervals, ...]:
    """Nested unions; each class's own union is small beside its operations."""
    levels: list[Intervals] = []
    for which in OperationClass:
        rows = classes == which
        own = union(start[rows], end[rows], is_sorted=True)
        levels.append(_joined(levels[-1], own) if levels else own)
    return tuple(levels)


def _joined(first: Intervals, second: Intervals) -> Intervals:
    if not len(second):
        return first
    return union(
        np.concatenate([first.start, second.start]), np.concatenate([first.end, second.end])
    )
