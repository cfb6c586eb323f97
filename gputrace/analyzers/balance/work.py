"""What one GPU did in its measured steps, counted by sort of work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.intervals import Intervals, union
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results import Step
from gputrace.traces.events import Column, Kind
from gputrace.traces.ids import distinct_ids, number_ids
from gputrace.traces.trace import Trace

COPIES: Final = {
    "h2d": Kind.COPY_H2D,
    "d2h": Kind.COPY_D2H,
    "d2d": Kind.COPY_D2D,
    "peer": Kind.COPY_PEER,
}
"""Sorts of copies that are compared; a peer copy counts on both its GPUs."""


Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Work:
    """The kernels that do not communicate, and the copies, of one GPU.

    A sort of work is a kernel's number from 0 on, the same on all GPUs, or `sort_of` a copy.
    """

    lane: Lane
    steps: int
    """How many steps it is of; 0 for the whole window."""
    windows: Intervals
    """These steps, or the whole window."""
    operations: GpuOperations
    """All of the GPU."""
    numbers: Mapping[int, int]
    """Of the kernels, from `number_kernels`."""
    amount: Mapping[int, int]
    """Launches, or bytes, in all steps; by sort."""
    ns: Mapping[int, int]
    """Nanoseconds in all steps; by sort."""

    @property
    def turns(self) -> int:
        """The number that totals are divided by for a mean."""
        return max(self.steps, 1)

    def compared(self) -> tuple[Rows, NDArray[np.int64]]:
        """The operations that count, and the sort of each; not kept, since few runs ask again."""
        return _compared(self.operations, self.windows, self.numbers)

    def each(self, sort: int) -> float:
        """The amount of a sort in a step."""
        return self.amount.get(sort, 0) / self.turns

    def kernels(self) -> list[int]:
        """The sorts that are kernels."""
        return [sort for sort in self.amount if sort >= 0]

    def launches(self, sorts: Iterable[int]) -> int:
        return sum(self.amount.get(sort, 0) for sort in sorts)

    def spent(self, sorts: Iterable[int]) -> int:
        """Nanoseconds in all steps."""
        return sum(self.ns.get(sort, 0) for sort in sorts)


def sort_of(copies: str) -> int:
    """The sort that one of `COPIES` is."""
    return -1 - COPIES[copies]


def number_kernels(trace: Trace, operations: Sequence[GpuOperations]) -> dict[int, int]:
    """A number for each name id; ids of several files that mean one name get the same."""
    ids = np.concatenate([own.events.name for own in operations])
    numbers: dict[str, int] = {}
    texts = trace.names(distinct_ids(ids))
    return {id: numbers.setdefault(text, len(numbers)) for id, text in texts.items()}


def work_of(
    lane: Lane, operations: GpuOperations, own: Sequence[Step], numbers: Mapping[int, int]
) -> Work:
    """Counts the operations that start in the lane's own measured steps."""
    span = lane.window
    starts, ends = [s.start_ns for s in own], [s.end_ns for s in own]
    windows = union(starts or [span.start], ends or [span.end])
    rows, sort = _compared(operations, windows, numbers)
    amount = _sums(sort, np.where(sort < 0, operations.events.bytes[rows], 1))
    ns = _sums(sort, operations.end[rows] - operations.start[rows])
    return Work(lane, len(own), windows, operations, numbers, amount, ns)


def _compared(
    operations: GpuOperations, windows: Intervals, numbers: Mapping[int, int]
) -> tuple[Rows, NDArray[np.int64]]:
    kinds = operations.events.kind
    copies = np.isin(kinds, list(COPIES.values()))
    compared = copies | (operations.classes == OperationClass.COMPUTE)
    rows = np.flatnonzero(compared & windows.contains(operations.start))
    copies, kinds = copies[rows], kinds[rows].astype(np.int64)
    return rows, np.where(copies, -1 - kinds, _numbered(operations.events.name[rows], numbers))


def _numbered(ids: NDArray[np.int32], numbers: Mapping[int, int]) -> NDArray[np.int64]:
    distinct, where = number_ids(ids)
    known = np.array([numbers.get(id, 0) for id in distinct.tolist()], np.int64)
    found: NDArray[np.int64] = known.take(where)
    return found


def _sums(keys: Column, values: Column) -> dict[int, int]:
    distinct, where = number_ids(keys)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, where, values)
    return dict(zip(distinct.tolist(), sums.tolist(), strict=True))
