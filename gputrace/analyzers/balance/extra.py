"""The work that one GPU has and no other, and what it costs the others.

Work is compared by amount, launches of a kernel or bytes of a sort of copy, never by time: a GPU
that needs longer for the same work is slow, not skewed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from gputrace.analyzers.balance.others import Others
from gputrace.analyzers.balance.work import COPIES, Work, compared, sort_of
from gputrace.analyzers.intervals import Intervals, joined, union
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.shard import OneGpu

_MORE: Final = 1.2
"""So many times as much as any other GPU has is more than theirs."""
_LAUNCHES: Final = 0.5
"""Launches a step that a kernel must have more: what comes less often is not of every step."""
_AT_ONCE: Final = 256
"""Questions to GPUs that are asked together."""
_ALL_LAUNCHES: Final = 1.01
"""So many times the other GPUs' launches in all: else kernels took the place of others."""


def more_than_others(work: Work, place: int, others: Others) -> dict[int, int]:
    """Nanoseconds of the work, in all steps, that comes on top of any other GPU's; by sort."""
    found = {}
    for sort in work.amount:
        most, own = others.most(sort, place), work.each(sort)
        if own > _MORE * most and (sort < 0 or own - most >= _LAUNCHES):
            found[sort] = round(work.ns[sort] * (1 - most / own))
    kernels = [sort for sort in found if sort >= 0]
    room = _more_kernel_time(work, place, others)
    if kernels and sum(found[sort] for sort in kernels) > room:
        scale = room / sum(found[sort] for sort in kernels)
        found |= {sort: int(found[sort] * scale) for sort in kernels}
    return {sort: ns for sort, ns in found.items() if ns > 0}


def _more_kernel_time(work: Work, place: int, others: Others) -> int:
    """How much longer its kernels take in all than the middle one of the others' do.

    Nothing where it launches no more of them: libraries choose among kernels on each GPU for
    itself, so that one that only this GPU runs may stand for one that only the others run.
    """
    if work.launches(work.kernels()) / work.turns < _ALL_LAUNCHES * others.launches(place):
        return 0
    own = work.spent(work.kernels())
    return max(0, own - round(others.spent(place) * work.turns))


def by_name(extra: dict[int, int]) -> dict[str, int]:
    """The nanoseconds of extra work as ``kernels``, ``h2d``, ``d2h``, ``d2d``, ``peer``."""
    kernels = sum(ns for sort, ns in extra.items() if sort >= 0)
    return {"kernels": kernels} | {name: extra.get(sort_of(name), 0) for name in COPIES}


def alone(gpus: PerGpu, works: Sequence[Work], extra: Sequence[dict[int, int]]) -> list[int]:
    """Nanoseconds in all steps in which each GPU does extra work and no other does any of its own.

    A GPU that is inside a collective, or in a copy from or to another GPU, has nothing of its own.
    Waiting for its own data is no waiting for others.
    """
    found = [0] * len(works)
    having = [place for place, own in enumerate(extra) if own]
    busy = gpus.each(
        _doing,
        [works[place].lane for place in having],
        (works[place].windows for place in having),
        (works[place].numbers for place in having),
        (set(extra[place]) for place in having),
    )
    left = dict(zip(having, busy, strict=True))
    each = max(1, _AT_ONCE // max(len(having), 1))
    for first in range(1, len(works), each):
        left = {place: own for place, own in left.items() if len(own)}
        asked = [
            (place, works[(place + turn) % len(works)])
            for place in left
            for turn in range(first, min(first + each, len(works)))
        ]
        parts = gpus.each(
            _without_busy,
            [other.lane for _, other in asked],
            (other.windows for _, other in asked),
            (other.numbers for _, other in asked),
            (left[place] for place, _ in asked),
        )
        for (place, _), part in zip(asked, parts, strict=True):
            left[place] = left[place].intersection(part)
    for place, own in left.items():
        found[place] = min(own.total, sum(extra[place].values()))
    return found


def _doing(
    one: OneGpu, windows: Intervals, numbers: Mapping[int, int], sorts: Collection[int]
) -> Intervals:
    """When a GPU does work of some sorts."""
    own = one.operations
    rows, sort = compared(own, windows, numbers)
    rows = rows[np.isin(sort, list(sorts))]
    return union(own.start[rows], own.end[rows]).intersection(windows)


def _without_busy(
    one: OneGpu, windows: Intervals, numbers: Mapping[int, int], time: Intervals
) -> Intervals:
    """The time without that in which a GPU is at work of its own, or waits for its own data."""
    own = one.operations
    rows, sort = compared(own, windows, numbers)
    rows = rows[sort != sort_of("peer")]
    feeding = one.lane.causes.of["data_feeding"]
    return time.difference(joined(union(own.start[rows], own.end[rows]), feeding))
