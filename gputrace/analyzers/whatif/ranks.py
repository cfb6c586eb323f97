"""One rank made like the others: its kernels, or its host."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.whatif.edits import Effect, runs
from gputrace.analyzers.whatif.graph import Graph, Index
from gputrace.analyzers.whatif.items import before_on
from gputrace.traces.ids import distinct_ids

_SLOWER: Final = 1.02
"""A rank whose kernels take this many times the median rank's is slower than that."""
_LATER: Final = 1.02


def straggler(graph: Graph, _effect: Effect) -> Graph | None:
    """The kernels of slower ranks shortened to the median rank's; None where none is slower.

    Those of one name are shortened alike, to what the median rank spends on them: to nothing, where
    the median rank has none.
    """
    ranks = distinct_ids(graph.rank[graph.rank >= 0])
    computes = runs(graph) & (graph.operation == OperationClass.COMPUTE)
    place = np.searchsorted(ranks, graph.rank)
    totals = np.bincount(place[computes], graph.ns[computes], len(ranks))
    slow = totals > _SLOWER * _median(totals)
    if len(ranks) < 2 or not slow.any():
        return None
    names, name = np.unique(graph.name, return_inverse=True)
    spent = np.zeros((len(ranks), len(names)))
    np.add.at(spent, (place[computes], name[computes]), graph.ns[computes])
    usual = np.broadcast_to(_median(spent), spent.shape)
    factor = np.minimum(np.divide(usual, spent, out=np.ones_like(spent), where=spent > 0), 1.0)
    eased = computes & slow[place]
    shorter = (graph.ns * factor[place, name]).astype(np.int64)
    return graph.changed(ns=np.where(eased, shorter, graph.ns))


def _median(values: NDArray[Any]) -> NDArray[Any]:
    """Over the ranks; of two in the middle the lower, so of two ranks the better one."""
    ordered: NDArray[Any] = np.sort(values, axis=0)
    middle: NDArray[Any] = ordered[(len(values) - 1) // 2]
    return middle


def late_host(graph: Graph, _effect: Effect) -> Graph | None:
    """The host time of later ranks cut to the median rank's, call by call.

    None where none is later, or where the ranks do not make the same calls.
    """
    ranks = distinct_ids(graph.rank[graph.rank >= 0])
    calls = [np.flatnonzero((graph.rank == rank) & (graph.thread >= 0)) for rank in ranks]
    if len(ranks) < 2:
        return None
    host = np.where(graph.hand >= 0, graph.hand_lag, graph.gap) + graph.own
    table = _by_call(graph, calls)
    if table is None:
        return None
    times = host[table]
    totals = times[:, 1:].sum(axis=1)
    late = totals > _LATER * _median(totals)
    if not late.any():
        return None
    return _cut(graph, host, table, late)


def _by_call(graph: Graph, calls: list[Index]) -> Index | None:
    """Each rank's calls in a row, the same ones in a column; None where they differ."""
    if len({len(rows) for rows in calls}) != 1 or not len(calls[0]):
        return None
    table = np.stack(calls)
    same = (graph.sort[table] == graph.sort[table[0]]) & (graph.kind[table] == graph.kind[table[0]])
    return table if bool(same.mean() > 0.98) else None


def _cut(graph: Graph, host: Index, table: Index, late: NDArray[np.bool_]) -> Graph:
    """The late ranks' time beyond the usual, call by call, cut until their totals are usual."""
    times = host[table][:, 1:]
    totals = times.sum(axis=1)
    rows = table[late][:, 1:]
    excess = np.maximum(times[late] - _median(times), 0)
    wanted = totals[late] - _median(totals)
    part = np.minimum(wanted / np.maximum(excess.sum(axis=1), 1), 1.0)[:, None]
    first = before_on(graph.thread)[rows] < 0
    saved = np.where(first & (graph.hand[rows] < 0), 0, excess * part).astype(np.int64)
    gap, lag = graph.gap.copy(), graph.hand_lag.copy()
    handed = graph.hand[rows] >= 0
    gap[rows] = np.where(handed, gap[rows], np.maximum(gap[rows] - saved, 0))
    lag[rows] = np.where(handed, np.maximum(lag[rows] - saved, 0), lag[rows])
    return graph.changed(gap=gap, hand_lag=lag)
