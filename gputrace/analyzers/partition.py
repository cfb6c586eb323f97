"""The partition: every nanosecond of a window of a GPU belongs to exactly one class.

A class has what the union of its operations has and no class before it. So the classes lie apart,
and with the idle rest they sum to the window by construction, for any window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.intervals import EMPTY, Intervals, Times, union
from gputrace.analyzers.operations import GpuOperations
from gputrace.traces.events import COPY_KINDS, Kind, Mask
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
    """What one GPU did, as intervals that lie apart."""

    gpu: Gpu
    window: Window
    """From the first start to the last end of an operation, or the part of that asked for."""
    classes: tuple[Intervals, ...]
    """For each `OperationClass`, when it ran and none of higher precedence, not clipped."""
    busy: Intervals
    """When anything ran on the GPU."""
    kernels: int
    copies: int
    opaque_graphs: int
    """CUDA graphs recorded as a whole; they count as compute."""
    recorded: Intervals
    """What of the window was recorded, not clipped; nothing is known of the rest."""

    def of_class(self, which: OperationClass) -> Intervals:
        """When the class ran and none of higher precedence."""
        return self.classes[which]

    def split(self, starts: ArrayLike, ends: ArrayLike) -> NDArray[np.int64]:
        """Partition of many windows: shape (windows, 6), columns as in `Shares`.

        What was not recorded of a window is in none of them.
        """
        starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        own = np.stack([times.within(starts, ends) for times in self.classes], axis=-1)
        known = self.recorded.within(starts, ends) if len(self.recorded) > 1 else ends - starts
        idle = known - own.sum(axis=-1)
        return np.concatenate([own, idle[..., None]], axis=-1)

    @property
    def shares(self) -> Shares:
        """Partition of the whole window."""
        return Shares(*self.split([self.window.start], [self.window.end])[0].tolist())

    @cached_property
    def gaps(self) -> Intervals:
        """Stretches of the window in which the GPU runs nothing."""
        gaps = self.busy.complement(*self.window)
        return gaps.intersection(self.recorded) if len(self.recorded) > 1 else gaps


def build_timeline(operations: GpuOperations, window: Window | None = None) -> Timeline:
    """The timeline of one GPU; a window narrows the GPU's own span and never widens it."""
    start, end, kind = operations.start, operations.end, operations.events.kind
    span = Window(int(start[0]), int(end.max()))
    if window is not None:
        first, last = max(span.start, window.start), min(span.end, window.end)
        span = Window(first, max(first, last))
        kind = kind[(start < last) & (end > first)]
    classes, busy = _classes(start, end, operations.classes)
    return Timeline(
        operations.gpu,
        span,
        classes,
        busy,
        kernels=int(np.count_nonzero(kind == Kind.KERNEL)),
        copies=int(np.isin(kind, COPY_KINDS).sum()),
        opaque_graphs=int(np.count_nonzero(kind == Kind.GRAPH)),
        recorded=operations.recorded,
    )


def _classes(
    start: Times, end: Times, classes: NDArray[np.int8]
) -> tuple[tuple[Intervals, ...], Intervals]:
    """When each class has the GPU, and when any has."""
    found: list[Intervals] = []
    busy = EMPTY
    for which in OperationClass:
        own = _union(start, end, classes == which)
        found.append(own.difference(busy))
        if len(own):
            # At once, of all rows so far: to put the new ones among the others takes longer.
            busy = _union(start, end, classes <= which) if len(busy) else own
    return tuple(found), busy


def _union(start: Times, end: Times, rows: Mask) -> Intervals:
    return union(start[rows], end[rows], is_sorted=True)
