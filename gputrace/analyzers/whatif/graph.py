"""The execution of some consecutive steps as a graph, which `replay` goes through.

An item is one host call with the GPU operation that it issued. It starts after the call before it
on its thread, and ends after the operations that it waits for; its operation starts after the call,
after the operation before it on its stream, and after those that it depends on elsewhere. A replay
goes through the items once, in an order in which every cause comes before its effects: the longest
path. Times are nanoseconds from the beginning of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Times

Index = NDArray[np.int64]
Edges = Mapping[int, tuple[tuple[int, int], ...]]
"""For an item, the items it waits for, each with the nanoseconds from that one's end."""

NONE: Final = -1
LONG_AGO: Final = -(1 << 60)


@dataclass(frozen=True)
class Graph:
    """Items by process, then in order of issue; every column has one entry an item."""

    order: Index
    """In which to replay the items."""
    # The call.
    thread: Index
    """A number for each host thread; `NONE` for an operation whose call is not known."""
    sort: NDArray[np.int8]
    """A `Call`."""
    gap: Times
    """The thread's own time before the call; of the first one of a thread, when it began."""
    data: Times
    """The part of ``gap``, or of ``hand_lag``, in which the thread waited for data."""
    hand: Index
    """The call of another thread that this one had to wait for, or `NONE`."""
    hand_lag: Times
    own: Times
    """How long the call takes when it need not wait."""
    waits: Edges
    """Operations that must have ended before the call returns."""
    slot: Index
    """The operation whose start frees the place in the queue that this call needs, or `NONE`."""
    # The operation.
    stream: Index
    """A number for each stream; `NONE` where the call issued nothing."""
    latency: Times
    """From the start of the call to the earliest start."""
    spacing: Times
    """From the end of the operation before on the stream to the earliest start."""
    after: Edges
    """Operations of other streams that must have ended before it starts."""
    residual: Times
    """By how much it started later than all this explains."""
    ns: Times
    """How long it runs; of a collective, from the last arrival on."""
    group: Index
    """The collective that it is a part of, or `NONE`."""
    # What it is.
    operation: NDArray[np.int8]
    """Its `OperationClass`, or `NONE`."""
    kind: NDArray[np.int8]
    """Its `Kind`, or `NONE`."""
    pageable: NDArray[np.bool_]
    size: Times
    """Bytes copied."""
    name: Index
    rank: Index
    gpu: Index
    """A number for each GPU."""
    process: Index
    step: Index
    """The step, counted from 0, that the operation runs in, or `NONE`."""
    start: Times
    """When the operation started, or the call where there is none, as recorded."""
    end: Times

    def __len__(self) -> int:
        return len(self.thread)

    @property
    def steps(self) -> int:
        return int(self.step.max(initial=-1)) + 1

    def changed(self, **columns: Any) -> Graph:
        """A graph with some columns exchanged."""
        return replace(self, **columns)
