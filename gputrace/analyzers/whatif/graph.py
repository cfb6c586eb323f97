"""The execution of some consecutive steps as a graph, and its replay.

An item is one host call with the GPU operation that it issued. It starts after the call before it
on its thread, and ends after the operations that it waits for; its operation starts after the call,
after the operation before it on its stream, and after those that it depends on elsewhere. A replay
goes through the items once, in an order in which every cause comes before its effects: the longest
path. Times are nanoseconds from the beginning of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Times

Index = NDArray[np.int64]
Edges = Mapping[int, tuple[tuple[int, int], ...]]
"""For an item, the items it waits for, each with the nanoseconds from that one's end."""

NONE: Final = -1
LONG_AGO: Final = -(1 << 60)

_OF_CALLS: Final = ("thread", "gap", "own", "stream", "latency", "spacing")
_OF_OPERATIONS: Final = ("ns", "residual", "group", "slot", "hand", "hand_lag", "order")
"""The columns that a replay reads."""


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
        made = replace(self, **columns)
        # Most columns are those of this graph: their lists are made once for all that is changed.
        kept = self._lists.items() if self.__dict__.get("_lists") else ()
        made._lists.update((name, known) for name, known in kept if name not in columns)
        return made

    def plain(self, *names: str) -> list[list[int]]:
        """Columns as lists, which a loop reads faster than arrays."""
        for name in names:
            if name not in self._lists:
                self._lists[name] = getattr(self, name).tolist()
        return [self._lists[name] for name in names]

    @cached_property
    def _lists(self) -> dict[str, list[int]]:
        return {}


def replay(graph: Graph) -> Times:  # noqa: C901 (see below)
    """When the operation of each item ends; of items without one, when the call does.

    One tight loop over plain lists, half a microsecond an item: calls in it would double that.
    """
    g = graph
    thread, gap, own, stream, latency, spacing = g.plain(*_OF_CALLS)
    ns, residual, group, slot, hand, hand_lag, order = g.plain(*_OF_OPERATIONS)
    waits, after = g.waits, g.after
    free = [LONG_AGO] * (int(g.stream.max(initial=0)) + 1)
    reached = [0] * (int(g.thread.max(initial=0)) + 1)
    began, ended, returned = [0] * len(g), [0] * len(g), [0] * len(g)
    missing = np.bincount(g.group[g.group >= 0], minlength=1).tolist()
    arrived = [LONG_AGO] * len(missing)
    members: list[list[int]] = [[] for _ in missing]
    for i in order:
        at, on = thread[i], stream[i]
        if at >= 0:
            begin = reached[at] + gap[i]
            if hand[i] >= 0 and returned[hand[i]] + hand_lag[i] > begin:
                begin = returned[hand[i]] + hand_lag[i]
            done = begin + own[i]
        else:
            begin = done = 0
        if on >= 0:
            start = begin + latency[i]
            if free[on] + spacing[i] > start:
                start = free[on] + spacing[i]
            if i in after:
                for j, lag in after[i]:
                    if ended[j] + lag > start:
                        start = ended[j] + lag
            start += residual[i]
            began[i] = start
            which = group[i]
            if which < 0:
                ended[i] = free[on] = start + ns[i]
            else:
                members[which].append(i)
                missing[which] -= 1
                if start > arrived[which]:
                    arrived[which] = start
                if not missing[which]:
                    for j in members[which]:
                        ended[j] = free[stream[j]] = arrived[which] + ns[j]
        if at >= 0:
            if i in waits:
                for j, lag in waits[i]:
                    if ended[j] + lag > done:
                        done = ended[j] + lag
            if slot[i] >= 0 and began[slot[i]] > done:
                done = began[slot[i]]
            returned[i] = reached[at] = done
            if on < 0:
                ended[i] = done
    return np.array(ended, np.int64)
