"""One process that feeds several GPUs made into one process a GPU."""

from __future__ import annotations

from typing import Final

import numpy as np

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.host import Call
from gputrace.analyzers.whatif.edits import Effect, Mask, runs
from gputrace.analyzers.whatif.graph import NONE, Graph, Index
from gputrace.traces.events import Kind
from gputrace.traces.ids import distinct_ids

_SHARE: Final = 0.2
"""Part of the busiest GPU's kernels that a GPU has if it trains too."""
_MANY_ALLOCS: Final = 20
"""Allocations a step and GPU that only a search for algorithms makes: it would not be repeated."""


def trained_together(graph: Graph) -> Index | None:
    """The GPUs that one process trains on, from different threads; None if no process does."""
    kernels = runs(graph) & (graph.operation == OperationClass.COMPUTE) & (graph.thread >= 0)
    if len(distinct_ids(graph.process[kernels])) != 1:
        return None
    counts = np.bincount(graph.gpu[kernels])
    gpus = np.flatnonzero(counts >= _SHARE * counts.max())
    feeders = {_feeder(graph, kernels, int(gpu)) for gpu in gpus}
    allocs = np.count_nonzero(graph.sort[graph.thread >= 0] == Call.ALLOC)
    searches = allocs > _MANY_ALLOCS * graph.steps * len(gpus)
    return gpus if len(gpus) > 1 and len(feeders) > 1 and not searches else None


def _feeder(graph: Graph, kernels: Mask, gpu: int) -> int:
    return int(np.argmax(np.bincount(graph.thread[kernels & (graph.gpu == gpu)])))


def _one_process_each(
    graph: Graph, gpus: Index, loads: float, waited: float, talks: bool, longest: int | None = None
) -> Graph:
    """The first GPU alone with what its threads do for it, one after another.

    Each process would do as much for its own GPU, with its share of the batch to load and to copy.
    What goes to other GPUs is left out, with the host's time for it, and so is what the threads
    waited for each other (for Python's lock).

    Args:
        graph: of the steps.
        loads: the part of the waiting for data which stays.
        waited: the part of that waiting which stays.
        talks: whether communication keeps its time on the GPU; else it is overlapped.
        longest: what a longer pause of the host is cut to, as making replicas is one; None for
            as long as it is.
    """
    first = int(gpus[0])
    between = graph.operation == OperationClass.COMMUNICATION
    own_op = runs(graph) & (graph.gpu == first) & (talks | ~between)
    feeds = distinct_ids(graph.thread[runs(graph) & (graph.gpu == first) & (graph.thread >= 0)])
    stays = np.isin(graph.thread, feeds) & (own_op | ~runs(graph))
    chain = int(feeds[0])
    host = np.where(graph.hand >= 0, graph.hand_lag, graph.gap) - graph.data
    kept = np.flatnonzero(stays)
    before = np.concatenate([[NONE], kept[:-1]])
    handed = graph.hand[kept]
    # A hand-over from elsewhere is a wait for the other threads.
    foreign = (handed >= 0) & (handed != before)
    gap = np.zeros(len(graph), np.int64)
    gap[kept] = np.where(foreign, host[kept] * waited, host[kept])
    if longest is not None:
        gap = np.minimum(gap, longest)
    gap[kept] += (graph.data[kept] * loads).astype(np.int64)
    gap[kept[:1]] = graph.start[kept[:1]]
    copies = own_op & (graph.kind == Kind.COPY_H2D)
    return graph.changed(
        thread=np.where(stays, chain, NONE),
        gap=gap,
        hand=np.full(len(graph), NONE),
        stream=np.where(own_op, graph.stream, NONE),
        ns=np.where(copies, graph.ns // len(gpus), graph.ns),
        group=np.full(len(graph), NONE),
        waits={i: edges for i, edges in graph.waits.items() if stays[i]},
    )


def ddp(graph: Graph, effect: Effect) -> Graph | None:
    """One process a GPU in place of one for all; no scatter, no gather, no replicas.

    At the most, no pause of the host of over a millisecond stays, as making replicas is one; at the
    least, a part of the threads' waiting for each other was work, communication stays, and the
    processes' loaders are in each other's way, so that a part of the batch takes as long as all.
    """
    gpus = trained_together(graph)
    if gpus is None:
        return None
    part = 1 / len(gpus)
    if effect is Effect.MOST:
        return _one_process_each(graph, gpus, part, 0.0, talks=False, longest=1_000_000)
    if effect is Effect.LEAST:
        return _one_process_each(graph, gpus, 1.0, part, talks=True)
    return _one_process_each(graph, gpus, part, 0.0, talks=False)
