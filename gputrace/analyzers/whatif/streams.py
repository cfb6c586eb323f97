"""What operations waited for on other streams, and which are one collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.whatif.graph import NONE, Index
from gputrace.analyzers.whatif.items import Items
from gputrace.traces.events import Column, Kind
from gputrace.traces.ids import distinct_ids

_JUST_ENDED_NS: Final = 12_000
"""An operation that starts this soon after one elsewhere ended had waited for it."""
_FARTHEST: Final = 64

After = dict[int, tuple[tuple[int, int], ...]]


def find_causes(items: Items, late: Times, bound: Times) -> tuple[After, Times]:
    """For operations that start late, the one on another stream that they started right after.

    Gives also the lateness that is left unexplained.
    """
    after: After = {}
    left = late.copy()
    runs = np.flatnonzero(items.stream >= 0)
    runs = runs[np.argsort(items.end[runs], kind="stable")]
    ends = items.end[runs]
    for i in np.flatnonzero(late > 0).tolist():
        start = int(items.start[i])
        low, high = np.searchsorted(ends, (start - _JUST_ENDED_NS, start), "right").tolist()
        low = max(low, high - _FARTHEST)
        for j in reversed(runs[low:high].tolist()):
            if _may_cause(items, i, j) and items.end[j] > bound[i]:
                after[i] = ((j, start - int(items.end[j])),)
                left[i] = 0
                break
    return after, left


def _may_cause(items: Items, i: int, j: int) -> bool:
    return bool(
        j < i and items.process[j] == items.process[i] and items.stream[j] != items.stream[i]
    )


def join_streams(
    items: Items, operation: Column, kind: Column, gpu: Index, step: Index, after: After
) -> None:
    """Adds what data flow demands though the recorded times need not show it.

    A collective comes after what its process had given the main stream of its GPU before; the
    step's last collective, and an input copied on a stream of its own, come before what the main
    stream is given next. Only where the recorded times agree.
    """
    for one in distinct_ids(gpu[gpu >= 0]).tolist():
        rows = np.flatnonzero((gpu == one) & (items.stream >= 0))
        main = _main_stream(items, operation, rows)
        for i, j in _joins(items, operation, kind, step, rows, main):
            lag = int(items.start[i] - items.end[j])
            if lag >= 0 and all(j != known for known, _ in after.get(i, ())):
                after[i] = (*after.get(i, ()), (j, min(lag, 2_000)))


def _main_stream(items: Items, operation: Column, rows: Index) -> int:
    compute = rows[operation[rows] == OperationClass.COMPUTE]
    busy = np.bincount(items.stream[compute], (items.end - items.start)[compute], 1)
    return int(np.argmax(busy))


def _joins(
    items: Items, operation: Column, kind: Column, step: Index, rows: Index, main: int
) -> Iterator[tuple[int, int]]:
    """Pairs of an operation and one that it comes after, if the recorded times agree."""
    talks = operation[rows] == OperationClass.COMMUNICATION
    on_main = items.stream[rows] == main
    aside = np.flatnonzero(~on_main & (talks | (kind[rows] == Kind.COPY_H2D)))
    mains = rows[on_main]
    place = np.searchsorted(np.flatnonzero(on_main), aside)
    last = {int(step[i]): i for i in rows[talks & ~on_main].tolist()}
    for at, row in zip(place.tolist(), rows[aside].tolist(), strict=True):
        collective = operation[row] == OperationClass.COMMUNICATION
        if collective and at:
            yield row, int(mains[at - 1])
        if not collective or last[int(step[row])] == row:
            later = np.flatnonzero(items.start[mains[at:]] >= items.end[row])
            if len(later):
                yield int(mains[at + later[0]]), row


def keep_together(items: Items, instance: Index) -> Index:
    """The collective that each operation is a part of, or `NONE`.

    A part that ends before the last one comes waits for nobody, and is none.

    Args:
        items: of the graph.
        instance: the number of the matched collective of each item, or `NONE`.
    """
    numbers, group = np.unique(instance, return_inverse=True)
    arrived = np.full(len(numbers), np.iinfo(np.int64).min)
    np.maximum.at(arrived, group, items.start)
    together = (instance >= 0) & (items.end >= arrived[group])
    counts = np.bincount(group[together], minlength=len(numbers))
    return np.where(together & (counts[group] > 1), group, NONE)
