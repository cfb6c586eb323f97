"""Copies between GPUs: straight from one to another, and by way of the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.intervals import Intervals, Times, union
from gputrace.analyzers.operations import GpuSummary
from gputrace.traces.events import Events, Kind, Mask
from gputrace.traces.trace import Trace

_STAGED: Final = 1 << 16
"""Bytes from which two copies of one size are no chance."""
_SOON_NS: Final = 2_000_000
_SOON: Final = 4
"""The second half of a staged copy starts so soon after the end of the first, or within so many
times its length: a CPU may add up in between."""
_RECENT: Final = 8
"""Copies to the host of a GPU that are looked back at."""
_MOST: Final = 50_000
"""Copies that are looked at, the first ones: more tell nothing more."""
_NOBODY: Final = -1


@dataclass(frozen=True)
class Traffic:
    """Copies from one GPU to another; arrays of one length, nanoseconds.

    A copy by way of the host has two halves, one on each GPU; any other is on both all the time.
    """

    source: NDArray[np.int64]
    """Index of the GPU among the `GpuOperations`."""
    target: NDArray[np.int64]
    bytes: NDArray[np.int64]
    start: Times
    first_end: Times
    """When the source GPU is through with it."""
    second_start: Times
    """When the target GPU begins with it."""
    end: Times

    def __len__(self) -> int:
        return len(self.start)

    def select(self, rows: Mask) -> Traffic:
        return Traffic(*(getattr(self, field.name)[rows] for field in fields(self)))

    def of_pair(self, source: int, target: int) -> Traffic:
        return self.select((self.source == source) & (self.target == target))

    def on(self, gpu: int) -> Intervals:
        """When one GPU is busy with them."""
        out, into = self.source == gpu, self.target == gpu
        starts = np.concatenate([self.start[out], self.second_start[into]])
        return union(starts, np.concatenate([self.first_end[out], self.end[into]]))


_NO_TRAFFIC: Final = Traffic(*(np.empty(0, np.int64) for _ in fields(Traffic)))


def read_peer_copies(trace: Trace, operations: Sequence[GpuSummary]) -> Traffic:
    """The copies straight from one GPU to another, of which both ends are known."""
    if not any(Kind.COPY_PEER in own.kinds for own in operations):
        return _NO_TRAFFIC
    columns = ("start", "end", "bytes", "process", "source_device", "destination_device")
    copies = trace.events([Kind.COPY_PEER], columns)
    source = _places(operations, copies.process, copies.source_device)
    target = _places(operations, copies.process, copies.destination_device)
    start, end = copies.start, copies.end
    found = Traffic(source, target, copies.bytes, start, end, start, end)
    return found.select((source != _NOBODY) & (target != _NOBODY) & (source != target))


def find_staged(trace: Trace, operations: Sequence[GpuSummary], talks: bool) -> Traffic:
    """Copies to the host that were followed by one of the same size from it to another GPU.

    Args:
        talks: whether the GPUs communicate in another way too. Then only copies of one process
            count, and none of a GPU that itself has just copied as much to the host: it may get
            back its own, as offloaded optimizers do.
    """
    kinds = frozenset[Kind]().union(*(own.kinds for own in operations))
    if not {Kind.COPY_D2H, Kind.COPY_H2D} <= kinds:
        return _NO_TRAFFIC
    columns = ("start", "end", "kind", "bytes", "process", "device")
    copies = trace.events([Kind.COPY_D2H, Kind.COPY_H2D], columns)
    copies = copies.select(copies.bytes >= _STAGED)
    copies = copies.select(np.argsort(copies.start, kind="stable")[:_MOST])
    place = _places(operations, copies.process, copies.device)
    down = copies.kind == Kind.COPY_D2H
    hosts = [own.gpu.host for own in operations]
    pairs = [
        pair
        for size in np.intersect1d(copies.bytes[down], copies.bytes[~down]).tolist()
        for pair in _of_size(copies, place, np.flatnonzero(copies.bytes == size), talks)
        if hosts[place[pair[0]]] == hosts[place[pair[1]]]
    ]
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return Traffic(
        place[first], place[second], copies.bytes[first],
        copies.start[first], copies.end[first], copies.start[second], copies.end[second],
    )  # fmt: skip


def _of_size(
    copies: Events, place: NDArray[np.int64], rows: NDArray[np.int64], talks: bool
) -> list[tuple[int, int]]:
    """First and second halves among copies of one size, in order of start.

    A copy to the host counts once for each GPU that it may be for.
    """
    recent: dict[int, deque[int]] = {}
    taken: set[tuple[int, int]] = set()
    found = []
    for row in rows.tolist():
        gpu = int(place[row])
        if gpu == _NOBODY:
            continue
        if copies.kind[row] == Kind.COPY_D2H:
            recent.setdefault(gpu, deque(maxlen=_RECENT)).append(row)
            continue
        near = _near(copies, row, recent)
        if talks and gpu in near:
            continue
        of_others = [first for at, rows in near.items() if at != gpu for first in rows]
        if talks:
            of_others = [f for f in of_others if copies.process[f] == copies.process[row]]
        free = [first for first in of_others if (first, gpu) not in taken]
        if free:
            first = max(free, key=lambda first: int(copies.end[first]))
            taken.add((first, gpu))
            found.append((first, row))
    return found


def _near(copies: Events, row: int, recent: Mapping[int, deque[int]]) -> dict[int, list[int]]:
    """By GPU, the copies to the host that one from it may continue."""
    start = int(copies.start[row])
    near = {gpu: [f for f in rows if _is_soon(copies, f, start)] for gpu, rows in recent.items()}
    return {gpu: rows for gpu, rows in near.items() if rows}


def _is_soon(copies: Events, first: int, start: int) -> bool:
    begin, end = int(copies.start[first]), int(copies.end[first])
    return end <= start <= end + max(_SOON_NS, _SOON * (end - begin))


def _places(
    operations: Sequence[GpuSummary], process: NDArray[np.int16], device: NDArray[np.int16]
) -> NDArray[np.int64]:
    """The index of the GPU that a process means by each ordinal."""
    known = {pair: index for index, own in enumerate(operations) for pair in own.gpu.pairs}
    pairs = zip(process.tolist(), device.tolist(), strict=True)
    return np.array([known.get(pair, _NOBODY) for pair in pairs], np.int64)
