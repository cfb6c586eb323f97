"""An order in which every cause of an item comes before it, across the ranks."""

from __future__ import annotations

import numpy as np

from gputrace.analyzers.whatif.graph import NONE, Edges, Index


def order_items(
    process: Index, before: Index, group: Index, after: Edges, waits: Edges
) -> tuple[Index, Index]:
    """The order, and the collectives that can be kept in it.

    A process is gone through in order of issue, until an item depends on a collective to which
    another process has still to come. Where all wait so, what one waits for is taken apart.
    """
    group = group.copy()
    missing = np.bincount(group[group >= 0], minlength=1)
    edges = np.flatnonzero(np.diff(process)) + 1
    bounds = np.concatenate([[0], edges, [len(process)]]).tolist()
    cursors, ends = bounds[:-1], bounds[1:]
    order: list[int] = []
    while len(order) < len(process):
        went = len(order)
        blocked = NONE
        for one, end in enumerate(ends):
            at = cursors[one]
            while at < end:
                needed = _open(at, before, group, missing, after, waits)
                if needed != NONE:
                    blocked = needed
                    break
                if group[at] >= 0:
                    missing[group[at]] -= 1
                order.append(at)
                at += 1
            cursors[one] = at
        if len(order) == went:
            group[group == blocked] = NONE
    return np.array(order, np.int64), group


def _open(
    i: int, before: Index, group: Index, missing: Index, after: Edges, waits: Edges
) -> int:
    """A collective that an item depends on and that is not complete, or `NONE`."""
    causes = [int(before[i])] if before[i] >= 0 else []
    causes += [j for j, _ in after.get(i, ())]
    causes += [j for j, _ in waits.get(i, ())]
    for j in causes:
        if group[j] >= 0 and missing[group[j]] > 0 and (j != i or missing[group[j]] > 1):
            return int(group[j])
    return NONE
