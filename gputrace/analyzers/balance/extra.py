"""The work that one GPU has and no other, and what it costs the others.

Work is compared by amount, launches of a kernel or bytes of a sort of copy, never by time: a GPU
that needs longer for the same work is slow, not skewed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final

import numpy as np

from gputrace.analyzers.balance.others import Others
from gputrace.analyzers.balance.work import COPIES, Work, sort_of
from gputrace.analyzers.intervals import Intervals, union

_MORE: Final = 1.2
"""So many times as much as any other GPU has is more than theirs."""
_LAUNCHES: Final = 0.5
"""Launches a step that a kernel must have more: what comes less often is not of every step."""
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


def alone(work: Work, others: Sequence[Work], extra: dict[int, int]) -> int:
    """Nanoseconds in all steps in which the GPU does extra work and no other does any of its own.

    A GPU that is inside a collective, or in a copy from or to another GPU, has nothing of its own.
    Waiting for its own data is no waiting for others.
    """
    if not extra:
        return 0
    rows, sort = work.compared()
    rows, done = rows[np.isin(sort, list(extra))], work.operations
    mine = union(done.start[rows], done.end[rows]).intersection(work.windows)
    waited = reduce(lambda left, other: left.difference(_busy(other)), others, mine)
    return min(waited.total, sum(extra.values()))


def _busy(work: Work) -> Intervals:
    """When a GPU is at work of its own, or waits for its own data."""
    rows, sort = work.compared()
    rows, done = rows[sort != sort_of("peer")], work.operations
    feeding = work.lane.causes.of["data_feeding"]
    return union(
        np.concatenate([done.start[rows], feeding.start]),
        np.concatenate([done.end[rows], feeding.end]),
    )
