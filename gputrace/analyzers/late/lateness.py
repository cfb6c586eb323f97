"""Who comes late to the collectives, and what the others wait for it.

The step times of ranks that train together are equal, and so is their backward pass as a clock
shows it: whoever is early waits. What tells who is late is the order of arrival, and what it costs
is what the others lose by waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.collectives.matched import JOINT, Collectives, steps_of
from gputrace.analyzers.grouping import rows_by, steps_by_gpu
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.late.pace import find_slack
from gputrace.analyzers.medians import of_others
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results import Step
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import UNKNOWN
from gputrace.traces.ids import distinct_ids

_ALL_MEET: Final = (*JOINT, "Broadcast", "Reduce")
"""Operations in which a rank that waits does so for one that is late; a stage of a pipeline waits
for what comes before it by nature."""
_NEXT_NS: Final = 20_000
"""A collective that begins so soon after another was waiting for it."""


@dataclass(frozen=True)
class Lateness:
    """What each GPU makes the others wait, by step.

    Attributes:
        lanes: the GPUs that meet in collectives.
        steps: numbers of the measured steps.
        caused: mean nanoseconds that another GPU loses by waiting in the collectives to which this
            one came last; shape (GPUs, steps).
        last: part of the collectives to which each GPU came last, 0 to 1.
        length_ns: mean length of a step.
    """

    lanes: tuple[LaneSummary, ...]
    steps: NDArray[np.int64]
    caused: NDArray[np.int64]
    last: NDArray[np.float64]
    length_ns: float

    @cached_property
    def excess(self) -> NDArray[np.float64]:
        """``caused`` beyond what the middle one of the other GPUs causes in the same step."""
        excess: NDArray[np.float64] = self.caused - of_others(self.caused)
        return excess


def find_lateness(
    gpus: PerGpu, collectives: Collectives, measured: Sequence[Step]
) -> Lateness | None:
    """None where no two GPUs meet in collectives of the measured steps.

    Args:
        gpus: those among which the collectives were matched.
        collectives: of all GPUs.
        measured: the steps that count, of all GPUs.
    """
    step = steps_of(collectives, gpus.operations, measured)
    useful = collectives.of(*_ALL_MEET) & collectives.known & (step != UNKNOWN)
    row = np.flatnonzero(useful)
    index = {own.gpu: place for place, own in enumerate(gpus.operations)}
    meet = set(distinct_ids(collectives.lane[row]).tolist())
    meeting = [lane for lane in gpus.lanes if index[lane.gpu] in meet]
    if len(meeting) < 2:
        return None
    place = np.full(len(gpus.operations), UNKNOWN)
    place[[index[lane.gpu] for lane in meeting]] = np.arange(len(meeting))
    own, last = place[collectives.lane[row]], place[_last_lane(collectives)[row]]
    numbers = np.array(sorted({step.step for step in measured}), np.int64)
    lost = np.where(own != last, _losses(gpus, meeting, own, collectives, row), 0)
    caused = np.zeros((len(meeting), len(numbers)), np.int64)
    steps, at = steps_by_gpu(measured), np.searchsorted(numbers, step[row])
    own_steps = [steps.get((lane.gpu.gpu, lane.gpu.rank), []) for lane in meeting]
    slacks = gpus.each(find_slack, meeting, map(_edges, own_steps))
    for mine, ran, found in zip(rows_by(own, len(meeting)), own_steps, slacks, strict=True):
        losses = np.zeros_like(caused)
        np.add.at(losses, (last[mine], at[mine]), lost[mine])
        _bound(losses, _by_step(ran, found), numbers)
        caused += losses
    came_last = np.bincount(last[collectives.joint[row] & (own == last)], minlength=len(meeting))
    return Lateness(
        tuple(meeting),
        numbers,
        caused // (len(meeting) - 1),
        came_last / max(int(came_last.sum()), 1),
        float(np.mean([step.end_ns - step.start_ns for step in measured])),
    )


Slack = Mapping[int, int]
"""By step, what the host of a GPU could have gained in it."""


def _edges(steps: Sequence[Step]) -> NDArray[np.int64]:
    """Number, start and end of each."""
    rows = [(step.step, step.start_ns, step.end_ns) for step in steps]
    return np.array(rows, np.int64).reshape(-1, 3)


def _by_step(steps: Sequence[Step], slack: NDArray[np.int64] | None) -> Slack | None:
    """None where it is not known."""
    if slack is None:
        return None
    return dict(zip([step.step for step in steps], slack.tolist(), strict=True))


def _bound(losses: NDArray[np.int64], known: Slack | None, numbers: NDArray[np.int64]) -> None:
    """Takes from what a GPU loses, by who and step, what its host could not have gained.

    In each step, and over all of them: a host that is ahead in one step may lose that in another.
    """
    if known is None:
        return
    slack = np.array([known.get(number, 0) for number in numbers.tolist()])
    whole = losses.sum(axis=0)
    losses[:] = losses * (np.clip(slack, 0, whole) / np.maximum(whole, 1))
    total = int(losses.sum())
    losses[:] = losses * (np.clip(slack.sum(), 0, total) / max(total, 1))


def _losses(
    gpus: PerGpu,
    lanes: Sequence[LaneSummary],
    own: NDArray[np.int64],
    collectives: Collectives,
    row: NDArray[np.int64],
) -> Times:
    """What each of some rows of collectives costs the GPU that it is of, by the index of that."""
    lost = np.zeros(len(row), np.int64)
    by_lane = [
        mine[np.argsort(collectives.start[row[mine]], kind="stable")]
        for mine in rows_by(own, len(lanes))
    ]
    columns = (collectives.start, collectives.end, collectives.wait)
    times = ([column[row[mine]] for mine in by_lane] for column in columns)
    for mine, found in zip(by_lane, gpus.each(_lost, lanes, *times), strict=True):
        lost[mine] = found
    return lost


def _lost(one: OneGpu, start: Times, end: Times, wait: Times) -> Times:
    """Of the wait in each collective, in order of start, what costs its GPU time.

    Collectives run one after the other as they become ready. A wait that hides under kernels delays
    the ones that follow at once, and may bring their transfer to light: so of each chain of them
    the waits count as far as communication with nothing beside it does, but for the last one's
    transfer, which is at its own time anyhow.
    """
    first = np.concatenate([[True], start[1:] > np.maximum.accumulate(end)[:-1] + _NEXT_NS])
    begin = np.flatnonzero(first)
    chain = np.cumsum(first) - 1
    waits, last = np.add.reduceat(wait, begin), np.append(begin[1:], len(start)) - 1
    alone = one.lane.timeline.of_class(OperationClass.COMMUNICATION)
    shown = alone.within(start[begin], start[last] + wait[last])
    part = np.minimum(waits, shown) / np.maximum(waits, 1)
    lost: Times = (wait * part[chain]).astype(np.int64)
    return lost


def _last_lane(collectives: Collectives) -> NDArray[np.int64]:
    """Of each row, the lane that came last of those that came before it left."""
    moments, begin = np.unique(collectives.start, return_inverse=True)
    keys = collectives.instance * len(moments) + begin
    order = np.lexsort((collectives.lane, keys))
    arrival = np.minimum(np.searchsorted(moments, collectives.arrival), len(moments) - 1)
    wanted = collectives.instance * len(moments) + arrival
    at = order[np.searchsorted(keys[order], wanted, "right") - 1]
    found = collectives.known & (keys[at] == wanted)
    return np.where(found, collectives.lane[at], collectives.lane).astype(np.int64)
