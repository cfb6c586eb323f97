"""Reasons for which a rank is late, by replays without one of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final

import numpy as np

from gputrace.analyzers.cuda_api_calls import Call
from gputrace.analyzers.grouping import median
from gputrace.analyzers.lateness import LateGains
from gputrace.analyzers.operations import OperationClass
from gputrace.analyzers.whatif.graph import Graph, Index, before_on, measure, replay
from gputrace.model.events import Kind, Mask, distinct_ids, is_among, number_ids
from gputrace.model.intervals import Times

_LATER_HOST_RATIO: Final = 1.02
"""Ratio of host time to the median rank's above which a rank is later."""
_SAME_CALLS: Final = 0.98
"""Part of the ranks' calls that must be of one sort, in order, to be compared one by one."""
_COMPARED_CALLS_PART: Final = 0.5
"""Part of a rank's calls that must be between exchanges with as many calls on every rank."""


def attribute(graph: Graph, rank: int, mean_ns: int) -> LateGains | None:
    """Return how much shorter a step is without each reason for which a rank is late; None where
    there is one rank.

    Reasons are kernels that the median rank does not launch, or not as often; kernels of the same
    name that take longer than on the median rank; and more time of the host between the same calls.

    ``mean_ns`` is the mean step of the whole run.
    """
    ranks = distinct_ids(graph.rank[graph.rank >= 0])
    if len(ranks) < 2 or rank not in ranks:
        return None
    extra, slower = _compare_kernels(graph, ranks, rank)
    gone = graph.changed(
        ns=np.where(extra, 0, graph.ns),
        spacing=np.where(extra, np.minimum(graph.spacing, 0), graph.spacing),
        own=np.where(extra, 0, graph.own),
        gap=np.where(extra & (graph.hand < 0), graph.data, graph.gap),
    )
    edits = (
        gone if extra.any() else None,
        graph.changed(ns=slower) if (slower < graph.ns).any() else None,
        with_quick_host(graph, [rank], ~extra),
    )
    recorded = measure(graph, graph.end).mean
    gains = [0 if edit is None else recorded - measure(edit, replay(edit)).mean for edit in edits]
    return LateGains(*(max(round(gain * mean_ns / recorded), 0) for gain in gains))


def _compare_kernels(graph: Graph, ranks: Index, rank: int) -> tuple[Mask, Times]:
    """Return a mask of the kernels that a rank has beyond the median rank's number in each step,
    and all durations with its other kernels as short as the median rank's of the same name.
    """
    computes = (graph.stream >= 0) & (graph.operation == OperationClass.COMPUTE)
    rows = np.flatnonzero(computes & (graph.kind == Kind.KERNEL) & (graph.rank >= 0))
    names, name = number_ids(graph.name[rows])
    of_rank = np.searchsorted(ranks, graph.rank[rows])
    shape = len(ranks), len(names)
    cell, cells = of_rank * len(names) + name, len(ranks) * len(names)
    count = np.bincount(cell, minlength=cells).reshape(shape)
    spent = np.bincount(cell, graph.ns[rows], cells).reshape(shape)
    usual = np.round(median(count, axis=0) / max(graph.steps, 1))
    mean = np.divide(spent, count, out=np.full(shape, np.inf), where=count > 0)
    middle = np.sort(mean, axis=0)[(len(ranks) - 1) // 2]
    mine = of_rank == int(np.searchsorted(ranks, rank))
    launched, name = rows[mine], name[mine]
    order = np.lexsort((launched, graph.step[launched], name))
    key = name[order] * (graph.steps + 2) + graph.step[launched][order] + 1
    first = np.flatnonzero(np.diff(key, prepend=-1))
    nth = np.arange(len(key)) - np.repeat(first, np.diff(first, append=len(key)))
    extra = np.zeros(len(graph), np.bool_)
    extra[launched[order]] = nth >= usual[name[order]]
    here = mean[int(np.searchsorted(ranks, rank))]
    known = np.isfinite(middle) & np.isfinite(here) & (here > 0)
    factor = np.minimum(np.divide(middle, here, out=np.ones_like(here), where=known), 1.0)
    shorter = graph.ns.copy()
    shorter[launched] = np.where(
        extra[launched], graph.ns[launched], np.rint(graph.ns[launched] * factor[name])
    )
    return extra, shorter


def with_quick_host(
    graph: Graph, late: Sequence[int], compared: Mask | None = None
) -> Graph | None:
    """Return the graph with the host time of ranks cut to the median rank's, one after another,
    call by call, until their totals agree; None where the ranks make different calls, or none of
    these is later.

    ``compared`` is a mask of the calls to compare; None for all.
    """
    ranks = distinct_ids(graph.rank[graph.rank >= 0])
    if len(ranks) < 2:
        return None
    with_calls = graph.thread >= 0 if compared is None else compared & (graph.thread >= 0)
    calls = [np.flatnonzero((graph.rank == other) & with_calls) for other in ranks.tolist()]
    table = _alike(graph, calls)[:, 1:]
    if table.shape[1] <= _COMPARED_CALLS_PART * max(map(len, calls)):
        return None
    same = (graph.sort[table] == graph.sort[table[0]]) & (graph.kind[table] == graph.kind[table[0]])
    if same.mean() <= _SAME_CALLS:
        return None
    quick = graph
    for rank in np.searchsorted(ranks, late).tolist():
        quick = _quicker(quick, table, rank) or quick
    return None if quick is graph else quick


def _quicker(graph: Graph, table: Index, late: int) -> Graph | None:
    """Return the graph with the host time of a rank cut to the median rank's, or None.

    ``table`` has the calls that are compared, a row for each rank; ``late`` is the rank's.
    """
    # A call that synchronizes is a wait, also where what it waits for was not recorded.
    works = np.where(graph.sort == Call.SYNC, 0, graph.own)
    times = (np.where(graph.hand >= 0, graph.hand_lag, graph.gap) + works)[table]
    middle = (len(table) - 1) // 2
    usual = np.sort(times, axis=0)[middle]
    total = np.sort(times.sum(axis=1))[middle]
    wanted = times[late].sum() - total
    excess = np.maximum(times[late] - usual, 0)
    if wanted <= (_LATER_HOST_RATIO - 1) * total or not excess.any():
        return None
    rows = table[late]
    saved = (excess * min(wanted / excess.sum(), 1.0)).astype(np.int64)
    saved[(before_on(graph.thread)[rows] < 0) & (graph.hand[rows] < 0)] = 0
    gap, lag, handed = graph.gap.copy(), graph.hand_lag.copy(), graph.hand[rows] >= 0
    gap[rows] = np.where(handed, gap[rows], np.maximum(gap[rows] - saved, 0))
    lag[rows] = np.where(handed, np.maximum(lag[rows] - saved, 0), lag[rows])
    return graph.changed(gap=gap, hand_lag=lag)


def _alike(graph: Graph, calls: list[Index]) -> Index:
    """Return the calls of each rank, a row each, between those exchanges of all ranks between which
    every rank makes as many calls: a call more on one rank shifts none of the others. None are
    where ranks take part in exchanges with different numbers of GPUs.
    """
    groups = [graph.group[rows] for rows in calls]
    first = distinct_ids(groups[0][groups[0] >= 0])
    shared = reduce(lambda kept, ids: kept[is_among(kept, ids)], groups[1:], first)
    sections = [np.cumsum(is_among(ids, shared)) for ids in groups]
    last = {int(section.max(initial=0)) for section in sections}
    if len(last) > 1:
        return np.empty((len(calls), 0), np.int64)
    counts = np.stack([np.bincount(section, minlength=max(last) + 1) for section in sections])
    even = (counts == counts[0]).all(axis=0)
    return np.stack([rows[even[section]] for rows, section in zip(calls, sections, strict=True)])
