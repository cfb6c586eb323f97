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
    needs = _needs(before, group, after, waits)
    matters = np.union1d(np.flatnonzero(group >= 0), np.fromiter(needs, np.int64, len(needs)))
    missing = np.bincount(group[group >= 0], minlength=1).tolist()
    edges = np.flatnonzero(np.diff(process)) + 1
    bounds = np.concatenate([[0], edges, [len(process)]]).tolist()
    cursors, ends = bounds[:-1], bounds[1:]
    stops = [
        [*matters[(matters >= a) & (matters < b)].tolist(), b]
        for a, b in zip(cursors, ends, strict=True)
    ]
    places = [0] * len(ends)
    order: list[range] = []
    done = 0
    while done < len(process):
        went, blocked = done, NONE
        for one, end in enumerate(ends):
            first = cursors[one]
            while places[one] < len(stops[one]):
                at = stops[one][places[one]]
                cursors[one] = at
                lacking = [n for n in needs.get(at, ()) if missing[n] > 0 and group[at] != n]
                if lacking:
                    blocked = lacking[0]
                    break
                if at < end and group[at] >= 0:
                    missing[group[at]] -= 1
                places[one] += 1
            order.append(range(first, cursors[one]))
            done += cursors[one] - first
        if done == went and blocked != NONE:
            missing[blocked] = 0
            group[group == blocked] = NONE
    return np.concatenate([np.arange(part.start, part.stop) for part in order]), group


def _needs(before: Index, group: Index, after: Edges, waits: Edges) -> dict[int, list[int]]:
    """For each item that depends on collectives, which."""
    needs: dict[int, list[int]] = {}
    follows = np.flatnonzero((before >= 0) & (group[before] >= 0))
    for i, which in zip(follows.tolist(), group[before[follows]].tolist(), strict=True):
        needs.setdefault(i, []).append(which)
    for edges in (after, waits):
        for i, causes in edges.items():
            found = [int(group[j]) for j, _ in causes if group[j] >= 0]
            if found:
                needs.setdefault(i, []).extend(found)
    return needs
