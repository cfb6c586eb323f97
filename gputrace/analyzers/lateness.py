"""Who comes late to the collectives, and what the others wait for it.

The step times of ranks that train together are equal, and so is their backward pass as a clock
shows it: whoever is early waits. What tells who is late is the order of arrival, and what it costs
is what the others wait with nothing else to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.collectives import JOINT, Collectives
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results import Step
from gputrace.traces.events import UNKNOWN

_ALL_MEET: Final = (*JOINT, "Broadcast", "Reduce")
"""Operations in which a rank that waits does so for one that is late; a stage of a pipeline waits
for what comes before it by nature."""
_NONE: Final = np.empty(0, np.int64)


@dataclass(frozen=True)
class Lateness:
    """What each GPU makes the others wait, by step.

    Attributes:
        lanes: the GPUs that meet in collectives.
        steps: numbers of the measured steps.
        caused: mean nanoseconds that another GPU waits, with nothing running beside, in the
            collectives to which this one came last; shape (GPUs, steps).
        last: part of the collectives to which each GPU came last, 0 to 1.
        length_ns: mean length of a step.
    """

    lanes: tuple[Lane, ...]
    steps: NDArray[np.int64]
    caused: NDArray[np.int64]
    last: NDArray[np.float64]
    length_ns: float

    @cached_property
    def excess(self) -> NDArray[np.float64]:
        """``caused`` beyond what the middle one of the other GPUs causes in the same step."""
        rows = range(len(self.lanes))
        others = [np.median(np.delete(self.caused, row, axis=0), axis=0) for row in rows]
        excess: NDArray[np.float64] = self.caused - np.array(others)
        return excess


def find_lateness(
    lanes: Sequence[Lane],
    operations: Sequence[GpuOperations],
    collectives: Collectives,
    measured: Sequence[Step],
) -> Lateness | None:
    """None where no two GPUs meet in collectives of the measured steps.

    Args:
        lanes: the GPUs with their timelines.
        operations: those among which the collectives were matched.
        collectives: of all GPUs.
        measured: the steps that count, of all GPUs.
    """
    index = {own.gpu: place for place, own in enumerate(operations)}
    row, step, waited = _rows_in_steps(lanes, index, collectives, measured)
    meeting = [lane for lane in lanes if (collectives.lane[row] == index[lane.gpu]).any()]
    if len(meeting) < 2:
        return None
    place = np.full(len(operations), UNKNOWN)
    place[[index[lane.gpu] for lane in meeting]] = np.arange(len(meeting))
    last = _last_lane(collectives)[row]
    numbers = np.array(sorted({step.step for step in measured}), np.int64)
    caused = np.zeros((len(meeting), len(numbers)), np.int64)
    waits = last != collectives.lane[row]
    np.add.at(caused, (place[last[waits]], np.searchsorted(numbers, step[waits])), waited[waits])
    came_last = np.bincount(place[last[collectives.joint[row] & ~waits]], minlength=len(meeting))
    return Lateness(
        tuple(meeting),
        numbers,
        caused // (len(meeting) - 1),
        came_last / max(int(came_last.sum()), 1),
        float(np.mean([step.end_ns - step.start_ns for step in measured])),
    )


def _rows_in_steps(
    lanes: Sequence[Lane],
    index: Mapping[Gpu, int],
    collectives: Collectives,
    measured: Sequence[Step],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows of collectives that begin in a measured step of their GPU.

    With the number of that step, and the nanoseconds of waiting with nothing running beside.
    """
    useful = collectives.of(*_ALL_MEET) & collectives.known
    found = [(_NONE, _NONE, _NONE)]
    for lane in lanes:
        steps = [s for s in measured if (s.gpu, s.rank) == (lane.gpu.gpu, lane.gpu.rank)]
        if not steps or lane.waiting is None:
            continue
        rows = np.flatnonzero(useful & (collectives.lane == index[lane.gpu]))
        start = collectives.start[rows]
        at = np.searchsorted([s.start_ns for s in steps], start, "right") - 1
        inside = (at >= 0) & (start < np.array([s.end_ns for s in steps])[at])
        rows, at, start = rows[inside], at[inside], start[inside]
        waited = lane.waiting.waits.within(start, start + collectives.wait[rows])
        found.append((rows, np.array([s.step for s in steps])[at], waited))
    row, step, waited = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return row, step, waited


def _last_lane(collectives: Collectives) -> NDArray[np.int64]:
    """Of each row, the lane that came last of those that came before it left."""
    last = collectives.lane.astype(np.int64)
    for lane in np.unique(collectives.lane).tolist():
        mine = collectives.lane == lane
        start = np.full(int(collectives.instance[-1]) + 1, UNKNOWN)
        start[collectives.instance[mine]] = collectives.start[mine]
        last[collectives.known & (start[collectives.instance] == collectives.arrival)] = lane
    return last
