"""Optimizations as edits of the dependency graph: each removes one cause of lost time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.host_calls import Call
from gputrace.analyzers.operations import OperationClass
from gputrace.analyzers.whatif.build import SHORT_NS
from gputrace.analyzers.whatif.graph import NONE, Graph, Index, before_on, measure, replay
from gputrace.model.events import Kind, distinct_ids
from gputrace.model.intervals import Times

_PINNED_RATE: Final = 10.0
"""Bytes a nanosecond: PCIe 3.0 with 16 lanes copies 11 to 12 from pinned memory."""


def pinned(graph: Graph, effect: Effect) -> Graph | None:
    """Input copies go from pinned memory and beside the computation, as far as the host is ahead.

    At the most they are all made before they are needed; at the least they stay on their stream, as
    fast as any machine copies from pinned memory.
    """
    copies = input_copies(graph)
    if not copies.any():
        return None
    if effect is Effect.MOST:
        return copied_before(graph, copies)
    quick = returning(graph, copies, SHORT_CALL_NS)
    quick = quick.changed(ns=_at_pinned_rate(quick, copies))
    return quick if effect is Effect.LEAST else moved_aside(quick, copies)


def _at_pinned_rate(graph: Graph, copies: Mask) -> Times:
    """Pageable copies at the rate of the trace's large pinned ones; without any, a modest one."""
    large = copies & ~graph.pageable & (graph.size > 1 << 20)
    rate = _PINNED_RATE
    if large.any():
        rate = float(graph.size[large].sum()) / max(int(graph.ns[large].sum()), 1)
    faster = np.minimum(graph.ns, graph.size / rate).astype(np.int64)
    return np.where(copies & graph.pageable, faster, graph.ns)


def overlap(graph: Graph, effect: Effect) -> Graph | None:
    """Computation waits for no communication; at the least, for each step's last one still."""
    talks = runs(graph) & (graph.operation == OperationClass.COMMUNICATION)
    talks &= graph.kind == Kind.KERNEL
    if not talks.any() or trained_together(graph) is not None:
        return None
    freed = talks & ~last_collectives(graph, talks) if effect is Effect.LEAST else talks
    after = {
        i: tuple(edge for edge in edges if talks[i] or not freed[edge[0]])
        for i, edges in graph.after.items()
    }
    return moved_aside(graph.changed(after=after), talks, joined=False)


_GRAPH_LAUNCH_NS: Final = 10_000


def prefetch(graph: Graph, effect: Effect) -> Graph | None:
    """The next batch is ready when it is asked for; at the most, it is on the GPU by then.

    At the least, one thread makes it beside the training, in the time that the training waited.
    """
    if not graph.data.any():
        return None
    cured = _without_data(graph, 1.0)
    if effect is Effect.MOST:
        return copied_before(cured, input_copies(graph))
    if effect is Effect.LEAST:
        waited = _longest_wait(graph)
        step = measure(cured, replay(cured)).mean
        return _without_data(graph, min(1.0, step / max(waited, 1.0)))
    return cured


def _without_data(graph: Graph, part: float) -> Graph:
    """The waits for data shortened by a part of them."""
    saved = (graph.data * part).astype(np.int64)
    return graph.changed(
        gap=graph.gap - np.where(graph.hand < 0, saved, 0),
        hand_lag=graph.hand_lag - np.where(graph.hand >= 0, saved, 0),
    )


def _longest_wait(graph: Graph) -> float:
    """Nanoseconds a step that the thread waits for data which waits longest."""
    calls = graph.thread >= 0
    return float(np.bincount(graph.thread[calls], graph.data[calls]).max()) / graph.steps


def graphs(graph: Graph, effect: Effect) -> Graph | None:
    """Kernels that are launched one after another are one launch, without host time between.

    At the most, they also follow each other without a pause; at the least, half of the host's time
    stays, as where the optimizer or the loss is launched as before.
    """
    launched = issues(graph) & np.isin(graph.kind, (Kind.KERNEL, Kind.COPY_D2D, Kind.MEMSET))
    follows = _follows(graph, launched)
    if not follows.any() or trained_together(graph) is not None:
        return None
    if effect is Effect.LEAST:
        return _half_launched(graph, follows)
    first = launched & ~follows
    if effect is Effect.MOST:
        graph = graph.changed(
            spacing=np.where(follows, np.minimum(graph.spacing, 0), graph.spacing)
        )
    return graph.changed(
        gap=np.where(follows, np.where(graph.hand < 0, graph.data, 0), graph.gap),
        hand_lag=np.where(follows, graph.data, graph.hand_lag),
        own=np.where(follows, 0, np.where(first, _GRAPH_LAUNCH_NS, graph.own)),
        residual=np.where(follows, 0, graph.residual),
        slot=np.where(launched, NONE, graph.slot),
    )


def _half_launched(graph: Graph, follows: Mask) -> Graph:
    host = (graph.gap - graph.data) // 2, (graph.hand_lag - graph.data) // 2
    return graph.changed(
        gap=np.where(follows & (graph.hand < 0), graph.gap - host[0], graph.gap),
        hand_lag=np.where(follows & (graph.hand >= 0), graph.hand_lag - host[1], graph.hand_lag),
        own=np.where(follows, graph.own // 2, graph.own),
    )


def _follows(graph: Graph, launched: Mask) -> Mask:
    """Launches whose call before, on the thread or handed over from another, is a launch too."""
    before = np.where(graph.hand >= 0, graph.hand, before_on(graph.thread))
    return launched & (graph.thread >= 0) & (before >= 0) & launched[before]


def sync(graph: Graph, _effect: Effect) -> Graph | None:
    """The host waits for no GPU: it asks for no result in the middle of training."""
    calls = (graph.thread >= 0) & (graph.sort == Call.SYNC)
    back = issues(graph) & (graph.kind == Kind.COPY_D2H)
    if not (calls | back).any():
        return None
    return without_waits(graph, calls | back)


def alloc(graph: Graph, _effect: Effect) -> Graph | None:
    """Memory is kept: no allocation and no release."""
    calls = (graph.thread >= 0) & (graph.sort == Call.ALLOC)
    if not calls.any():
        return None
    freed = without_waits(graph, calls)
    return freed.changed(own=np.where(calls, 0, freed.own))


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


Mask = NDArray[np.bool_]

SHORT_CALL_NS: Final = 10_000
"""A copy call that need not wait."""


class Effect(Enum):
    """How far a cure works: what is predicted, and the bounds of its range."""

    LIKELY = "likely"
    MOST = "most"
    LEAST = "least"


def runs(graph: Graph) -> Mask:
    """Items with an operation."""
    return graph.stream >= 0


def issues(graph: Graph) -> Mask:
    """Items with an operation whose call is known."""
    return (graph.stream >= 0) & (graph.thread >= 0)


def returning(graph: Graph, calls: Mask, ns: int) -> Graph:
    """Some calls wait for nothing, and take so long at most."""
    return without_waits(graph, calls).changed(
        own=np.where(calls, np.minimum(graph.own, ns), graph.own)
    )


def without_waits(graph: Graph, calls: Mask) -> Graph:
    """Some calls wait for no operation; what they take by themselves stays."""
    waits = {i: edges for i, edges in graph.waits.items() if not calls[i]}
    lost = np.zeros(len(graph), bool)
    lost[[i for i in graph.waits if calls[i]]] = True
    return graph.changed(
        waits=waits, own=np.where(lost, np.minimum(graph.own, SHORT_NS), graph.own)
    )


def moved_aside(graph: Graph, operations: Mask, joined: bool = True) -> Graph:
    """Some operations run on streams of their own; if ``joined``, what followed them still does."""
    before = before_on(graph.stream)
    after = dict(graph.after)
    stream = np.where(operations, graph.stream + int(graph.stream.max()) + 1, graph.stream)
    followers = np.flatnonzero(~operations & (before >= 0) & operations[before])
    for i in followers.tolist() if joined else ():
        after[i] = (*after.get(i, ()), (int(before[i]), int(graph.spacing[i])))
    return graph.changed(stream=stream, after=after)


def last_collectives(graph: Graph, talks: Mask) -> Mask:
    """Of each GPU and step, the collective that was issued last."""
    last = np.zeros(len(graph), bool)
    place = {(int(graph.gpu[i]), int(graph.step[i])): i for i in np.flatnonzero(talks).tolist()}
    last[list(place.values())] = True
    return last


def input_copies(graph: Graph) -> Mask:
    """Copies from the host to a GPU."""
    found: Mask = runs(graph) & (graph.kind == Kind.COPY_H2D)
    return found


def copied_before(graph: Graph, copies: Mask) -> Graph:
    """Some copies take no time: they were made before they were needed."""
    quick = returning(graph, copies, SHORT_CALL_NS)
    return quick.changed(
        ns=np.where(copies, 0, quick.ns), residual=np.where(copies, 0, quick.residual)
    )


__all__ = ["CURES", "Cure", "Effect"]

Change = Callable[[Graph, Effect], Graph | None]


@dataclass(frozen=True, slots=True)
class Cure:
    """One entry of the list."""

    id: str
    findings: tuple[str, ...]
    """Ids of the findings that it cures; it belongs to the first of them that the analysis has."""
    change: Change
    what: str
    """The cure in a few words, as the beginning of a sentence on what it would save."""
    assumption: str
    bounds: tuple[Effect, ...] = (Effect.MOST, Effect.LEAST)
    """How far it works else; none where it is all or nothing."""


CURES: Final = (
    Cure(
        "ddp",
        ("gpu0-skew", "launch-bound"),
        ddp,
        "DistributedDataParallel",
        "one process trains on each GPU (DistributedDataParallel), and loads and copies its own "
        "part of the batch; its threads wait for no others, and gradients are exchanged meanwhile",
    ),
    Cure(
        "prefetch",
        ("data-feeding",),
        prefetch,
        "A loader that keeps up",
        "every batch is ready when it is asked for, and at best on the GPU already; at the least, "
        "one batch at a time is made beside the training",
    ),
    Cure(
        "pinned",
        ("h2d-exposed", "h2d-pageable"),
        pinned,
        "Copying from pinned memory beside the computation",
        "input is copied from pinned memory on a stream of its own, as early as the host asks",
    ),
    Cure(
        "straggler",
        ("straggler",),
        straggler,
        "A rank as fast as the others",
        "every rank's kernels take what the median's do",
        bounds=(),
    ),
    Cure(
        "late-host",
        ("late-host",),
        late_host,
        "A host as quick as on the other ranks",
        "every rank's host is as quick as the median's between the same calls",
        bounds=(),
    ),
    Cure(
        "overlap",
        ("communication-exposed",),
        overlap,
        "Overlapping all communication",
        "nothing waits for communication but communication, and it slows nothing down; at the "
        "least, each step's last exchange stays exposed",
    ),
    Cure(
        "graphs",
        ("launch-bound",),
        graphs,
        "CUDA graphs of whole steps",
        "consecutive launches become one, without host time between them; kernels take what "
        "they do",
    ),
    Cure(
        "sync",
        ("sync-bound",),
        sync,
        "A host that waits for no GPU",
        "the host never waits for a GPU, and runs ahead as far as launches can be queued",
        bounds=(),
    ),
    Cure(
        "alloc",
        ("alloc-stall",),
        alloc,
        "Keeping memory allocated",
        "no memory is allocated or given back in a step",
        bounds=(),
    ),
)
