"""What one GPU did in its measured steps, counted by sort of work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.grouping import StepsOf, stretches
from gputrace.analyzers.intervals import Intervals
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.per_gpu import PerGpu, same_names
from gputrace.analyzers.results import Step
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import Column, Kind
from gputrace.traces.ids import number_ids

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

    lane: LaneSummary
    steps: int
    """How many steps it is of; 0 for the whole window."""
    windows: Intervals
    """These steps, or the whole window."""
    numbers: Mapping[int, int]
    """The kernels' numbers by name id."""
    amount: Mapping[int, int]
    """Launches, or bytes, in all steps; by sort."""
    ns: Mapping[int, int]
    """Nanoseconds in all steps; by sort."""
    communication_ns: int
    """Nanoseconds of kernels that communicate, in all steps."""
    h2d_run_ns: int
    """Nanoseconds of copies from the host in the whole trace."""

    @property
    def turns(self) -> int:
        """The number that totals are divided by for a mean."""
        return max(self.steps, 1)

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


def find_works(gpus: PerGpu, lanes: Sequence[LaneSummary], measured: Sequence[Step]) -> list[Work]:
    """Counts the operations of some GPUs that start in their own measured steps."""
    _, numbers = same_names(gpus, [own.names for own in gpus.operations])
    numbers_of = dict(zip((own.gpu for own in gpus.operations), numbers, strict=True))
    steps_of = StepsOf(measured)
    steps = [steps_of(lane.gpu) for lane in lanes]
    windows = [stretches(own, lane.window) for lane, own in zip(lanes, steps, strict=True)]
    own_numbers = [numbers_of[lane.gpu] for lane in lanes]
    sums = gpus.each(_sum_up, lanes, windows, own_numbers)
    rows = zip(lanes, map(len, steps), windows, own_numbers, sums, strict=True)
    return [Work(lane, count, time, own, *found) for lane, count, time, own, found in rows]


_Sums = tuple[dict[int, int], dict[int, int], int, int]


def _sum_up(one: OneGpu, windows: Intervals, numbers: Mapping[int, int]) -> _Sums:
    """The last four attributes of `Work`."""
    own, kinds = one.operations, one.operations.events.kind
    lengths = own.end - own.start
    rows, sort = compared(own, windows, numbers)
    amount = _sums(sort, np.where(sort < 0, own.events.bytes[rows], 1))
    talking = (kinds == Kind.KERNEL) & (own.classes == OperationClass.COMMUNICATION)
    talking &= windows.contains(own.start)
    from_host = lengths[kinds == Kind.COPY_H2D]
    return amount, _sums(sort, lengths[rows]), int(lengths[talking].sum()), int(from_host.sum())


def compared(
    operations: GpuOperations, windows: Intervals, numbers: Mapping[int, int]
) -> tuple[Rows, NDArray[np.int64]]:
    """The operations of a GPU that count, and the sort of each."""
    kinds = operations.events.kind
    copies = np.isin(kinds, list(COPIES.values()))
    count = copies | (operations.classes == OperationClass.COMPUTE)
    rows = np.flatnonzero(count & windows.contains(operations.start))
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
