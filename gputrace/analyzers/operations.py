"""GPU operations read once, classified and sorted for each GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import classify
from gputrace.analyzers.gpus import Gpu, both_ends, find_gpus
from gputrace.analyzers.intervals import Times
from gputrace.traces.events import GPU_KINDS, Events
from gputrace.traces.trace import Progress, Trace

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

    @property
    def start(self) -> Times:
        return self.events.start

    @property
    def end(self) -> Times:
        return self.events.end

    @cached_property
    def reach(self) -> Times:
        """By when each operation and all before it had ended."""
        return np.maximum.accumulate(self.events.end)

    def __len__(self) -> int:
        return len(self.events)


def read_operations(trace: Trace, progress: Progress | None = None) -> list[GpuOperations]:
    """The operations of every GPU that did anything, in order of GPU.

    Peer copies are on both their GPUs.
    """
    events = both_ends(trace, trace.events(GPU_KINDS, COLUMNS, progress=progress))
    if not len(events):
        return []
    classes = classify(trace, events)
    gpus, place = find_gpus(trace, events)
    return [_of_gpu(gpu, events, classes, place == index) for index, gpu in enumerate(gpus)]


def _of_gpu(
    gpu: Gpu, events: Events, classes: NDArray[np.int8], mine: NDArray[np.bool_]
) -> GpuOperations:
    rows = np.flatnonzero(mine)
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    return GpuOperations(gpu, events.select(rows), classes[rows])
