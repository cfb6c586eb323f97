"""The partition: every nanosecond of a window of a GPU belongs to exactly one class.

Level k is the union of all operations of the classes up to k; what class k has for itself is
level k less level k - 1. Levels are nested, so the classes and the idle rest sum to the window
by construction, for any window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.intervals import Intervals, Times, union
from gputrace.analyzers.operations import GpuOperations
from gputrace.traces.events import COPY_KINDS, Kind
from gputrace.traces.trace import Window


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

    @cached_property
    def gaps(self) -> Intervals:
        """Stretches of the window in which the GPU runs nothing."""
        return self.busy.complement(*self.window)


def build_timeline(operations: GpuOperations, window: Window | None = None) -> Timeline:
    """The timeline of one GPU; a window narrows the GPU's own span and never widens it."""
    start, end, kind = operations.start, operations.end, operations.events.kind
    span = Window(int(start[0]), int(end.max()))
    if window is not None:
        first, last = max(span.start, window.start), min(span.end, window.end)
        span = Window(first, max(first, last))
        kind = kind[(start < last) & (end > first)]
    return Timeline(
        operations.gpu,
        span,
        levels=_levels(start, end, operations.classes),
        kernels=int(np.count_nonzero(kind == Kind.KERNEL)),
        copies=int(np.isin(kind, COPY_KINDS).sum()),
        opaque_graphs=int(np.count_nonzero(kind == Kind.GRAPH)),
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
