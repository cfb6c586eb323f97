"""What operations waited for on other streams, and which are one collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.whatif.graph import NONE, Index
from gputrace.analyzers.whatif.items import Items
from gputrace.traces.events import Kind

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
    items: Items, operation: Index, kind: Index, gpu: Index, step: Index, after: After
) -> None:
    """Adds what data flow demands though the recorded times need not show it.

    A collective comes after what its process had given the main stream of its GPU before; the
    step's last collective, and an input copied on a stream of its own, come before what the main
    stream is given next. Only where the recorded times agree.
    """
    for one in np.unique(gpu[gpu >= 0]).tolist():
        rows = np.flatnonzero((gpu == one) & (items.stream >= 0))
        main = _main_stream(items, operation, rows)
        for i, j in _joins(items, operation, kind, step, rows.tolist(), main):
            lag = int(items.start[i] - items.end[j])
            if lag >= 0 and all(j != known for known, _ in after.get(i, ())):
                after[i] = (*after.get(i, ()), (j, min(lag, 2_000)))


def _main_stream(items: Items, operation: Index, rows: Index) -> int:
    compute = rows[operation[rows] == OperationClass.COMPUTE]
    busy = np.bincount(items.stream[compute], (items.end - items.start)[compute], 1)
    return int(np.argmax(busy))


def _joins(
    items: Items, operation: Index, kind: Index, step: Index, rows: list[int], main: int
) -> Iterator[tuple[int, int]]:
    last_collective = {
        int(step[i]): i for i in rows if operation[i] == OperationClass.COMMUNICATION
    }
    pending: list[int] = []
    given = NONE
    for i in rows:
        if items.stream[i] == main:
            ready = [j for j in pending if items.end[j] <= items.start[i]]
            yield from ((i, j) for j in ready)
            pending = [j for j in pending if j not in ready]
            given = i
        elif operation[i] == OperationClass.COMMUNICATION:
            if given != NONE:
                yield i, given
            if last_collective.get(int(step[i])) == i:
                pending.append(i)
        elif kind[i] == Kind.COPY_H2D:
            pending.append(i)


def match_collectives(
    items: Items, operation: Index, rank: Index, step: Index, name: Index
) -> Index:
    """The collective that each operation is a part of, or `NONE`.

    Those of a step are matched by their order on each rank, where all ranks have as many of equal
    names. A part that ends before the last rank comes waits for nobody, and is none.
    """
    group = np.full(len(items), NONE, np.int64)
    ranks = np.unique(rank[rank >= 0]).tolist()
    if len(ranks) < 2:
        return group
    count = 0
    parts = np.flatnonzero((operation == OperationClass.COMMUNICATION) & (items.stream >= 0))
    for number in np.unique(step[parts]).tolist():
        own = [parts[(step[parts] == number) & (rank[parts] == r)] for r in ranks]
        lists = [rows[np.argsort(items.start[rows], kind="stable")] for rows in own]
        if len({len(rows) for rows in lists}) != 1 or not len(lists[0]):
            continue
        table = np.stack(lists)
        if (name[table] != name[table[0]]).any():
            continue
        for column in table.T:
            together = column[items.end[column] >= items.start[column].max()]
            if len(together) > 1:
                group[together] = count
                count += 1
    return group
