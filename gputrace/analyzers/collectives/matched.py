"""Collectives that were matched across GPUs: who came when, and waited for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives.waiting import Waiting
from gputrace.analyzers.grouping import rows_by, steps_by_gpu
from gputrace.analyzers.intervals import Times, union
from gputrace.analyzers.operations import GpuSummary
from gputrace.analyzers.results import Step
from gputrace.traces.events import UNKNOWN, Mask

PEER_COPY: Final = "PeerCopy"
"""The operation of a copy between two GPUs."""
JOINT: Final = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")
"""Operations that nobody leaves before all have come."""
_NEVER: Final = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Collectives:
    """A row for each collective and GPU that took part, by instance and lane; arrays of one length.

    Attributes:
        instance: number of the collective, from 0 in order of start.
        lane: index of the GPU among the `GpuOperations` that were matched.
        row: index of the kernel or peer copy in that lane's events.
        start, end: nanoseconds.
        arrival: when the last rank had come, of those that came before this one left (all, in an
            all-reduce; a broadcast's root may leave before others come); `UNKNOWN` where it cannot
            be known: a rank that took part was not seen, or no partner was found.
        operation: index into ``operations``.
        name: the kernel's name id; of a peer copy, what the recorder gave.
        correlation: the kernel's or copy's id in its process.
        bytes: of the message; `UNKNOWN` where that was not recorded.
        operations: ``AllReduce``, ``Broadcast``, ``PeerCopy`` and so on; a kernel's own name where
            it is none of NCCL's.
    """

    instance: NDArray[np.int64]
    lane: NDArray[np.int16]
    row: NDArray[np.int64]
    start: Times
    end: Times
    arrival: Times
    operation: NDArray[np.int16]
    name: NDArray[np.int32]
    correlation: NDArray[np.int64]
    bytes: NDArray[np.int64]
    operations: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.instance)

    @cached_property
    def _rows(self) -> list[NDArray[np.intp]]:
        """Of each lane, its rows."""
        return rows_by(self.lane, int(self.lane.max(initial=-1)) + 1)

    @cached_property
    def known(self) -> Mask:
        """Rows whose last arrival is known."""
        return np.not_equal(self.arrival, UNKNOWN)

    @cached_property
    def wait(self) -> Times:
        """Nanoseconds that each spent waiting for the last; 0 where that is not known."""
        return np.where(self.known, np.clip(self.arrival, self.start, self.end) - self.start, 0)

    @property
    def joint(self) -> Mask:
        """Rows of operations that nobody leaves before all have come."""
        return self.of(*JOINT)

    def of(self, *names: str) -> Mask:
        """Rows of some operations."""
        here = [self.operations.index(name) for name in names if name in self.operations]
        return np.isin(self.operation, here)

    def _of_lane(self, lane: int, *, known: bool) -> NDArray[np.intp]:
        rows = self._rows[lane] if lane < len(self._rows) else np.empty(0, np.intp)
        wanted: NDArray[np.intp] = rows[self.known[rows] == known]
        return wanted

    def waiting(self, lane: int) -> Waiting:
        """When a GPU was in a collective to which the last rank had not come, or may not have."""
        mine, lonely = self._of_lane(lane, known=True), self._of_lane(lane, known=False)
        return Waiting(
            union(self.start[mine], self.start[mine] + self.wait[mine]),
            union(self.start[lonely], self.end[lonely]),
        )


def steps_of(
    collectives: Collectives, operations: Sequence[GpuSummary], steps: Sequence[Step]
) -> NDArray[np.int64]:
    """Of each row, the number of the step in which it begins on its GPU, of those given.

    `UNKNOWN` for a row that begins in none of them.
    """
    found = np.full(len(collectives), UNKNOWN)
    by_gpu = steps_by_gpu(steps)
    for own, rows in zip(operations, rows_by(collectives.lane, len(operations)), strict=True):
        mine = by_gpu.get((own.gpu.gpu, own.gpu.rank), [])
        start = np.array([step.start_ns for step in mine] or [_NEVER])
        end = np.array([step.end_ns for step in mine] or [_NEVER])
        at = np.searchsorted(start, collectives.start[rows], "right") - 1
        inside = (at >= 0) & (collectives.start[rows] < end[at])
        found[rows[inside]] = np.array([step.step for step in mine], np.int64)[at[inside]]
    return found
