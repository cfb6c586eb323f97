"""Collectives by operation: how many, how large, how long they wait and transfer, how fast.

Algorithm and bus bandwidth are those of nccl-tests (doc/PERFORMANCE.md there): the size of the
message by its time, and that times what the operation makes each link carry among n ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.collectives.matched import PEER_COPY, Collectives, steps_of
from gputrace.analyzers.grouping import rows_by
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results import Step
from gputrace.analyzers.results.collectives import CollectiveTotals
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import UNKNOWN, Mask
from gputrace.traces.ids import distinct_ids

_CARRIED: Final = {"AllReduce": 2, "AllGather": 1, "ReduceScatter": 1, "AllToAll": 1}
"""Among n ranks each link carries so many times (n - 1) / n of the message; in other operations,
all of it."""


def total_collectives(
    gpus: PerGpu, collectives: Collectives, measured: Sequence[Step]
) -> tuple[CollectiveTotals, ...]:
    """The operations, those that take most time first.

    Args:
        gpus: those among which the collectives were matched.
        collectives: of all GPUs.
        measured: the steps that count; the lanes' windows if none.
    """
    if measured:
        chosen = steps_of(collectives, gpus.operations, measured) != UNKNOWN
    else:
        chosen = _in_windows(gpus, collectives)
    place = {own.gpu: index for index, own in enumerate(gpus.operations)}
    of_lane = {place[lane.gpu]: lane for lane in gpus.lanes}
    exposed = _exposed(gpus, of_lane, collectives, chosen)
    steps = len({step.step for step in measured})
    found = [
        _total(of_lane, collectives, rows, steps, int(exposed[rows].sum()))
        for rows in _kinds(collectives, chosen)
        if len(rows)
    ]
    return tuple(sorted(found, key=lambda total: -total.total_ns * len(total.gpus)))


def _in_windows(gpus: PerGpu, collectives: Collectives) -> Mask:
    inside = np.zeros(len(collectives), bool)
    windows = {lane.gpu: lane.window for lane in gpus.lanes}
    for index, own in enumerate(gpus.operations):
        if own.gpu in windows:
            mine = collectives.lane == index
            start, end = windows[own.gpu]
            inside |= mine & (collectives.start >= start) & (collectives.start < end)
    return inside


def _kinds(collectives: Collectives, chosen: Mask) -> Iterator[NDArray[np.int64]]:
    """Rows of one operation among the same GPUs; copies of all pairs together."""
    if not len(collectives):
        return
    draw = Random(0)
    keys = np.array([draw.getrandbits(62) for _ in range(int(collectives.lane.max()) + 1)])
    members = np.zeros(int(collectives.instance[-1]) + 1, np.int64)
    np.add.at(members, collectives.instance, keys[collectives.lane])
    group = np.where(collectives.of(PEER_COPY), 0, members[collectives.instance])
    for operation in range(len(collectives.operations)):
        mine = chosen & (collectives.operation == operation)
        for key in distinct_ids(group[mine]).tolist():
            yield np.flatnonzero(mine & (group == key))


def _total(
    of_lane: Mapping[int, LaneSummary],
    collectives: Collectives,
    rows: NDArray[np.int64],
    steps: int,
    exposed_ns: int,
) -> CollectiveTotals:
    present = distinct_ids(collectives.lane[rows]).tolist()
    lanes = [of_lane[index] for index in present]
    length = collectives.end[rows] - collectives.start[rows]
    wait = collectives.wait[rows]
    known = bool(collectives.known[rows].all())
    name = collectives.operations[int(collectives.operation[rows[0]])]
    size, speed = _speed(collectives, rows) if known else (_size(collectives, rows), None)
    carried = _CARRIED[name] * (len(lanes) - 1) / len(lanes) if name in _CARRIED else 1.0
    shared = max(steps, 1) * len(lanes)
    return CollectiveTotals(
        operation=name,
        gpus=tuple(lane.gpu.gpu for lane in lanes),
        ranks=tuple(sorted({lane.gpu.rank for lane in lanes})),
        one_process=len({lane.gpu.process for lane in lanes}) == 1 and len(lanes) > 1,
        count=len(distinct_ids(collectives.instance[rows])),
        steps=steps,
        bytes=size,
        wait_ns=int(np.median(wait)) if known else None,
        transfer_ns=int(np.median(length - wait)) if known else None,
        total_ns=int(length.sum()) // shared,
        wait_total_ns=int(wait.sum()) // shared if known else None,
        transfer_total_ns=int((length - wait).sum()) // shared if known else None,
        exposed_ns=exposed_ns // shared,
        algorithm_bandwidth=None if speed is None else round(speed),
        bus_bandwidth=None if speed is None else round(speed * carried),
    )


def _exposed(
    gpus: PerGpu, of_lane: Mapping[int, LaneSummary], collectives: Collectives, chosen: Mask
) -> NDArray[np.int64]:
    """Of each chosen row, the nanoseconds with no kernel beside it that computes; else 0."""
    exposed = np.zeros(len(collectives), np.int64)
    count = max(of_lane, default=-1) + 1
    by_lane = rows_by(np.where(chosen, collectives.lane, count), count)
    rows = [by_lane[index] for index in of_lane]
    starts, ends = ([times[own] for own in rows] for times in (collectives.start, collectives.end))
    found = gpus.each(_computing, of_lane.values(), starts, ends)
    for own, start, end, computing in zip(rows, starts, ends, found, strict=True):
        exposed[own] = end - start - computing
    return exposed


def _computing(one: OneGpu, start: Times, end: Times) -> Times:
    return one.lane.timeline.of_class(OperationClass.COMPUTE).within(start, end)


def _size(collectives: Collectives, rows: NDArray[np.int64]) -> int | None:
    sizes = collectives.bytes[rows]
    return int(np.median(sizes[sizes > 0])) if (sizes > 0).any() else None


def _speed(collectives: Collectives, rows: NDArray[np.int64]) -> tuple[int | None, float | None]:
    """Size of the middle message, and the median bytes a second of those whose size is known."""
    mine = rows[collectives.bytes[rows] > 0]
    if not len(mine):
        return None, None
    transfer = collectives.end[mine] - collectives.start[mine] - collectives.wait[mine]
    speed = collectives.bytes[mine] * 1e9 / np.maximum(transfer, 1)
    return int(np.median(collectives.bytes[mine])), float(np.median(speed))
