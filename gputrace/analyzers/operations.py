"""GPU operations read once, classified and sorted for each GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass, classify
from gputrace.analyzers.gpus import Gpu, both_ends, find_gpus
from gputrace.analyzers.intervals import Intervals, Times, union
from gputrace.traces.events import GPU_KINDS, Events, Kind
from gputrace.traces.ids import distinct_ids
from gputrace.traces.trace import Progress, Trace, Window

COLUMNS: Final = (
    "start",
    "end",
    "kind",
    "name",
    "process",
    "device",
    "gpu",
    "correlation",
    "bytes",
)
"""What the analyzers need to know of GPU operations."""


@dataclass(frozen=True)
class GpuOperations:
    """What ran on one GPU, in order of start; at least one operation."""

    gpu: Gpu
    events: Events
    """The `COLUMNS`."""
    classes: NDArray[np.int8]
    """The `OperationClass` of each."""
    windows: tuple[Window, ...] = ()
    """When the GPU's process was recorded, in order; none where the trace does not tell."""
    calls_recorded: tuple[Window, ...] | None = None
    """When all calls of the process were, where that is not all that time."""

    @property
    def start(self) -> Times:
        return self.events.start

    @property
    def end(self) -> Times:
        return self.events.end

    @property
    def span(self) -> Window:
        """From the first start to the last end."""
        return Window(int(self.start[0]), int(self.reach[-1]))

    @cached_property
    def reach(self) -> Times:
        """By when each operation and all before it had ended."""
        return np.maximum.accumulate(self.events.end)

    @cached_property
    def recorded(self) -> Intervals:
        """From the first operation's start to the last one's end in each window.

        What a GPU does at the edges of a window was issued outside, and is not known.
        """
        begins = [window.start for window in self.windows] or [int(self.start[0])]
        place = np.maximum(np.searchsorted(begins, self.start, "right") - 1, 0)
        first = np.flatnonzero(np.diff(place, prepend=-1))
        last = np.append(first[1:], len(place)) - 1
        return union(self.start[first], self.reach[last])

    def moved(self, ns: int) -> GpuOperations:
        """The same, so many nanoseconds later."""
        if not ns:
            return self
        events = self.events
        arrays = {name: getattr(events, name) for name in events.columns}
        arrays |= {"start": events.start + ns, "end": events.end + ns}
        windows = tuple(_later(window, ns) for window in self.windows)
        calls = self.calls_recorded
        with_calls = None if calls is None else tuple(_later(window, ns) for window in calls)
        return replace(self, events=Events(arrays), windows=windows, calls_recorded=with_calls)

    def __len__(self) -> int:
        return len(self.events)


@dataclass(frozen=True)
class GpuSummary:
    """What ran on one GPU, in brief."""

    gpu: Gpu
    span: Window
    windows: tuple[Window, ...]
    calls_recorded: tuple[Window, ...] | None
    recorded: Intervals
    """These four as of `GpuOperations`."""
    kinds: frozenset[Kind]
    communicates: bool
    """Whether any operation does."""
    names: NDArray[np.int64]
    """The different ids of the names of all operations, in order."""
    kernels: NDArray[np.int64]
    """The same of kernels."""
    computing: NDArray[np.int64]
    """The same of kernels that compute."""

    @classmethod
    def of(cls, own: GpuOperations) -> GpuSummary:
        """The operations of a GPU in brief."""
        kinds, names, classes = own.events.kind, own.events.name, own.classes
        kernels = kinds == Kind.KERNEL
        return cls(
            own.gpu,
            own.span,
            own.windows,
            own.calls_recorded,
            own.recorded,
            frozenset(map(Kind, distinct_ids(kinds).tolist())),
            bool((classes == OperationClass.COMMUNICATION).any()),
            distinct_ids(names),
            distinct_ids(names[kernels]),
            distinct_ids(names[kernels & (classes == OperationClass.COMPUTE)]),
        )


def read_operations(trace: Trace, progress: Progress | None = None) -> list[GpuOperations]:
    """The operations of every GPU that did anything, in order of GPU.

    Peer copies are on both their GPUs.
    """
    events = both_ends(trace, trace.events(GPU_KINDS, COLUMNS, progress=progress))
    if not len(events):
        return []
    classes = classify(trace, events)
    gpus, place = find_gpus(trace, events)
    rows = np.argsort(events.start, kind="stable")
    rows = rows[np.argsort(place[rows], kind="stable")]  # Sixteen bits sort in two passes.
    edges = [0, *np.cumsum(np.bincount(place)).tolist()]
    return [
        GpuOperations(
            gpu,
            events.select(rows[first:end]),
            classes[rows[first:end]],
            tuple(trace.recorded(gpu.process)),
            when_calls_were(trace, gpu),
        )
        for gpu, (first, end) in zip(gpus, pairwise(edges), strict=True)
    ]


def when_calls_were(trace: Trace, gpu: Gpu) -> tuple[Window, ...] | None:
    """When all calls of a GPU's process were recorded; None where they always were."""
    windows = trace.calls_recorded(gpu.process)
    return None if windows is None else tuple(windows)


def _later(window: Window, ns: int) -> Window:
    return Window(window.start + ns, window.end + ns)
