"""Collectives summed up by operation and group: sizes, bandwidths, exposed and waiting time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives import Collectives, RankGroup, steps_of
from gputrace.analyzers.gpu_shards import PerGpu, compute_within
from gputrace.analyzers.grouping import median, rows_by
from gputrace.analyzers.lanes import LaneSummary
from gputrace.model.communication import CollectiveTotals
from gputrace.model.events import UNKNOWN, Mask, distinct_ids
from gputrace.model.results import Step

_CARRIED: Final = {"AllReduce": 2, "AllGather": 1, "ReduceScatter": 1, "AllToAll": 1}
"""Message volume per link among n ranks, in units of (n - 1) / n of the message; in other
operations, each link carries the whole message."""


def total_collectives(
    gpus: PerGpu, collectives: Collectives, roles: Sequence[str], measured: Sequence[Step]
) -> tuple[CollectiveTotals, ...]:
    """Sum up the collectives by operation and group, most time first.

    Without measured steps, the windows of the lanes are summed up.
    """
    of_lane = gpus.lane_of
    if measured:
        chosen = steps_of(collectives, gpus.operations, measured) != UNKNOWN
    else:
        chosen = np.zeros(len(collectives), bool)
        for index, lane in of_lane.items():
            begins = (collectives.start >= lane.window.start) & (
                collectives.start < lane.window.end
            )
            chosen |= (collectives.lane == index) & begins
    # The nanoseconds of each chosen row without a concurrent compute kernel; else 0.
    exposed = np.zeros(len(collectives), np.int64)
    count = max(of_lane, default=-1) + 1
    by_lane = rows_by(np.where(chosen, collectives.lane, count), count)
    rows = [by_lane[index] for index in of_lane]
    starts, ends = (
        [times[mine] for mine in rows] for times in (collectives.start, collectives.end)
    )
    computing_ns = gpus.each(compute_within, of_lane.values(), starts, ends)
    for mine, start, end, overlapped in zip(rows, starts, ends, computing_ns, strict=True):
        exposed[mine] = end - start - overlapped
    steps = len({step.step for step in measured})
    totals = [
        _total(of_lane, collectives, rows, steps, int(exposed[rows].sum()), roles)
        for rows in _kinds(collectives, chosen)
    ]
    return tuple(sorted(totals, key=lambda total: -total.total_ns * len(total.gpus)))


def _kinds(collectives: Collectives, chosen: Mask) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each operation of a group; copies of all pairs together."""
    for operation in range(len(collectives.operations)):
        mine = chosen & (collectives.operation == operation)
        for number in distinct_ids(collectives.group[mine]).tolist():
            yield np.flatnonzero(mine & (collectives.group == number))


def _total(
    of_lane: Mapping[int, LaneSummary],
    collectives: Collectives,
    rows: NDArray[np.int64],
    steps: int,
    exposed_ns: int,
    roles: Sequence[str],
) -> CollectiveTotals:
    gpus = [of_lane[index].gpu for index in distinct_ids(collectives.lane[rows]).tolist()]
    wait = collectives.wait[rows]
    transfer = collectives.end[rows] - collectives.start[rows] - wait
    known = bool(collectives.known[rows].all())
    name = collectives.operations[int(collectives.operation[rows[0]])]
    sizes = collectives.bytes[rows]
    sized = sizes > 0
    size = int(median(sizes[sized])) if sized.any() else None
    speed = None
    if known and sized.any():
        speed = float(median(sizes[sized] * 1e9 / np.maximum(transfer[sized], 1)))
    number = int(collectives.group[rows[0]])
    ranks = collectives.groups[number] if number != UNKNOWN else RankGroup(())
    members = max(ranks.size, len(gpus))
    carried = _CARRIED[name] * (members - 1) / members if name in _CARRIED else 1.0
    shared = max(steps, 1) * len(gpus)
    return CollectiveTotals(
        operation=name,
        gpus=tuple(gpu.gpu for gpu in gpus),
        ranks=tuple(sorted({gpu.rank for gpu in gpus})),
        one_process=len({gpu.process for gpu in gpus}) == 1 and len(gpus) > 1,
        count=len(distinct_ids(collectives.instance[rows])),
        steps=steps,
        bytes=size,
        wait_ns=int(median(wait)) if known else None,
        transfer_ns=int(median(transfer)) if known else None,
        total_ns=int((wait + transfer).sum()) // shared,
        wait_total_ns=int(wait.sum()) // shared if known else None,
        transfer_total_ns=int(transfer.sum()) // shared if known else None,
        exposed_ns=exposed_ns // shared,
        algorithm_bandwidth=None if speed is None else round(speed),
        bus_bandwidth=None if speed is None else round(speed * carried),
        role=roles[number] if roles and number != UNKNOWN else "",
        group=ranks.name,
        communicator=ranks.id,
        group_size=ranks.size or None,
        hosts=len({gpu.host if gpu.host_name else None for gpu in gpus}),
    )
