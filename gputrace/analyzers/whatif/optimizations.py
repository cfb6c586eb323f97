"""Optimizations that are predicted: edits of the dependency graph that take one cause away.

To add one, see `CURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import Call
from gputrace.analyzers.device_metrics import peak_of
from gputrace.analyzers.findings.kernels import launched_again
from gputrace.analyzers.operations import OperationClass
from gputrace.analyzers.whatif.build import SHORT_NS
from gputrace.analyzers.whatif.graph import Graph, before_on, measure, replay, with_quick_host
from gputrace.analyzers.whatif.step_rows import NONE, Index
from gputrace.model.events import Kind, Mask, distinct_ids
from gputrace.model.struct import Struct

_PINNED_RATE: Final = 10.0
"""Bytes per nanosecond: PCIe 3.0 x16 copies 11 to 12 from pinned memory."""


def pinned(graph: Graph, effect: Effect) -> Graph | None:
    """Copy input from pinned memory, overlapped with computation as far as the host is ahead.

    At most, all copies finish before they are needed; at least, they stay on their stream, at the
    pinned rate.
    """
    copies = graph.input_copies
    if not copies.any():
        return None
    if effect is Effect.MOST:
        return copied_before(graph, copies)
    quick = returning(graph, copies, SHORT_CALL_NS)
    # Durations with pageable copies at the rate of the large pinned ones in the trace. Without such
    # copies, at `_PINNED_RATE`.
    large = copies & ~quick.pageable & (quick.size > 1 << 20)
    rate = _PINNED_RATE
    if large.any():
        rate = float(quick.size[large].sum()) / max(int(quick.ns[large].sum()), 1)
    faster = np.minimum(quick.ns, quick.size / rate).astype(np.int64)
    quick = quick.changed(ns=np.where(copies & quick.pageable, faster, quick.ns))
    return quick if effect is Effect.LEAST else moved_aside(quick, copies)


def overlap(graph: Graph, effect: Effect) -> Graph | None:
    """Let computation wait for no communication; at least, only for the last one of each step."""
    talks = graph.runs & (graph.operation == OperationClass.COMMUNICATION)
    talks &= graph.kind == Kind.KERNEL
    if not talks.any() or trained_together(graph) is not None:
        return None
    freed = talks.copy()
    if effect is Effect.LEAST:
        rows = np.flatnonzero(talks).tolist()
        last_of = {(int(graph.gpu[i]), int(graph.step[i])): i for i in rows}
        freed[list(last_of.values())] = False
    after = {
        i: tuple(edge for edge in edges if talks[i] or not freed[edge[0]])
        for i, edges in graph.after.items()
    }
    return moved_aside(graph.changed(after=after), talks, joined=False)


def gathers(graph: Graph, effect: Effect) -> Graph | None:
    """Gather parameters as early as the gather before them; at most, as the one before that.

    At least, every second time. Nothing is gathered before the step begins, which needs what the
    optimizer has written.
    """
    rows = np.flatnonzero(graph.gathers)
    if not len(rows):
        return None
    rows = rows[np.lexsort((graph.start[rows], graph.step[rows], graph.gpu[rows]))]
    turn = graph.gpu[rows] * (graph.steps + 1) + graph.step[rows]
    first = np.searchsorted(turn, turn)
    number = np.arange(len(rows)) - first
    earlier = number % 2 if effect is Effect.LEAST else 1 + (effect is Effect.MOST)
    cause = rows[first + np.maximum(number - earlier, 0)]
    moved = rows[cause != rows]
    after, gap, thread = dict(graph.after), graph.gap.copy(), graph.thread.copy()
    following = {int(i): n for n, i in enumerate(before_on(graph.thread)) if i >= 0}
    for item, before in zip(moved.tolist(), cause[cause != rows].tolist(), strict=True):
        after[item] = graph.after.get(before, ())
        # The host's time stays, but for when it asks for the gather.
        if item in following:
            gap[following[item]] += gap[item] + graph.own[item]
        thread[item] = NONE
    return moved_aside(graph.changed(after=after, gap=gap, thread=thread), graph.gathers)


def peer_access(graph: Graph, effect: Effect) -> Graph | None:
    """Let GPUs exchange over their own links, in a part of the time.

    NCCL all-reduces at 10 to 20 GB/s through the host's memory, at 20 to 50 over PCIe and at 150 to
    450 over NVLink (nccl-tests).
    """
    part = {Effect.MOST: 1 / 40, Effect.LIKELY: 1 / 20, Effect.LEAST: 1 / 3}[effect]
    talks = graph.runs & (graph.operation == OperationClass.COMMUNICATION)
    if not talks.any():
        return None
    return graph.changed(ns=np.where(talks, (graph.ns * part).astype(np.int64), graph.ns))


_GRAPH_LAUNCH_NS: Final = 10_000
"""Duration of the launch of a CUDA graph."""


def prefetch(graph: Graph, effect: Effect) -> Graph | None:
    """Have the next batch ready when it is requested; at most, already on the GPU.

    At least, one thread makes it in parallel to training, in the time that training waited.
    """
    if not graph.data.any():
        return None
    cured = _without_data(graph, 1.0)
    if effect is Effect.MOST:
        return copied_before(cured, graph.input_copies)
    if effect is Effect.LEAST:
        waited = longest_wait(graph)
        step = measure(cured, replay(cured)).mean
        return _without_data(graph, min(1.0, step / max(waited, 1.0)))
    return cured


def _without_data(graph: Graph, part: float) -> Graph:
    """Shorten the waits for data by a fraction of them."""
    saved = (graph.data * part).astype(np.int64)
    return graph.changed(
        gap=graph.gap - np.where(graph.hand < 0, saved, 0),
        hand_lag=graph.hand_lag - np.where(graph.hand >= 0, saved, 0),
    )


def longest_wait(graph: Graph) -> float:
    """Return the nanoseconds a step that the longest-waiting thread waits for data."""
    calls = graph.thread >= 0
    waits = np.bincount(graph.thread[calls], graph.data[calls])
    return float(waits.max(initial=0.0)) / max(graph.steps, 1)


_HOST_TIME_STAYS: Final = 0.01
"""Part of a host's time that stays at the most, as its edges are known to so much."""


def without_host_time(
    cause: str, copies: tuple[Kind, ...], graph: Graph, effect: Effect
) -> Graph | None:
    """Take away what a cause of the host explains: the time before calls, the calls in it, and the
    copies of some kinds that they issue. What else they issued stays.

    With other work of the host go the collections in the same pauses, where they take less time
    than the work: they are of the objects that it made.
    """
    held = graph.held.get(cause)
    if held is None:
        return None
    freed = without_waits(graph, held.inside)
    gone = held.before
    if cause == "host-work" and (collected := graph.held.get("garbage-collection")) is not None:
        meanwhile = np.where(gone > 0, collected.before, 0)
        gone = gone + meanwhile if meanwhile.sum() < gone.sum() else gone
    if effect is not Effect.LIKELY:
        gone = (gone * (1 - _HOST_TIME_STAYS)).astype(np.int64)
    copied = graph.issues & held.inside & np.isin(graph.kind, copies)
    return freed.changed(
        gap=freed.gap - np.where(graph.hand < 0, gone, 0),
        hand_lag=freed.hand_lag - np.where(graph.hand >= 0, gone, 0),
        own=np.where(held.inside, 0, freed.own),
        ns=np.where(copied, 0, freed.ns),
        residual=np.where(copied, 0, freed.residual),
    )


def graphs(graph: Graph, effect: Effect) -> Graph | None:
    """Combine consecutive launches into one, without the host's time of launching between.

    At most, the kernels also follow each other without a pause; at least, half of the host time
    remains, as where the optimizer or the loss is still launched separately.
    """
    launched = graph.issues & np.isin(graph.kind, (Kind.KERNEL, Kind.COPY_D2D, Kind.MEMSET))
    # Directly after another launch, on the same thread or by hand-over.
    before = np.where(graph.hand >= 0, graph.hand, before_on(graph.thread))
    follows = launched & (graph.thread >= 0) & (before >= 0) & launched[before]
    if not follows.any() or trained_together(graph) is not None:
        return None
    if effect is Effect.LEAST:
        halves = (graph.gap - graph.kept) // 2, (graph.hand_lag - graph.kept) // 2
        handed = graph.hand >= 0
        return graph.changed(
            gap=graph.gap - np.where(follows & ~handed, halves[0], 0),
            hand_lag=graph.hand_lag - np.where(follows & handed, halves[1], 0),
            own=np.where(follows, graph.own // 2, graph.own),
        )
    first = launched & ~follows
    if effect is Effect.MOST:
        graph = graph.changed(
            spacing=np.where(follows, np.minimum(graph.spacing, 0), graph.spacing)
        )
    return graph.changed(
        gap=np.where(follows, np.where(graph.hand < 0, graph.kept, 0), graph.gap),
        hand_lag=np.where(follows, graph.kept, graph.hand_lag),
        own=np.where(follows, 0, np.where(first, _GRAPH_LAUNCH_NS, graph.own)),
        residual=np.where(follows, 0, graph.residual),
        slot=np.where(launched, NONE, graph.slot),
    )


def sync(graph: Graph, _effect: Effect) -> Graph | None:
    """Let the host never wait for a GPU: no results are read in the middle of training."""
    calls = (graph.thread >= 0) & (graph.sort == Call.SYNC)
    back = graph.issues & (graph.kind == Kind.COPY_D2H)
    if not (calls | back).any():
        return None
    return without_waits(graph, calls | back)


def alloc(graph: Graph, _effect: Effect) -> Graph | None:
    """Keep memory: no allocation and no release."""
    calls = (graph.thread >= 0) & (graph.sort == Call.ALLOC)
    if not calls.any():
        return None
    freed = without_waits(graph, calls)
    return freed.changed(own=np.where(calls, 0, freed.own))


_SLOWER_RANK_RATIO: Final = 1.02
"""Ratio of kernel time to the median rank's above which a rank is slower."""


def straggler(graph: Graph, _effect: Effect) -> Graph | None:
    """Shorten the kernels of slower ranks to the median rank's; None where none is slower.

    Kernels of one name are scaled alike, to the total of the median rank: to zero if it has none.
    """
    ranks = distinct_ids(graph.rank[graph.rank >= 0])
    computes = graph.computes
    row = np.searchsorted(ranks, graph.rank)
    totals = np.bincount(row[computes], graph.ns[computes], len(ranks))
    slow = totals > _SLOWER_RANK_RATIO * _median(totals)
    if len(ranks) < 2 or not slow.any():
        return None
    names, name = np.unique(graph.name, return_inverse=True)
    spent = np.zeros((len(ranks), len(names)))
    np.add.at(spent, (row[computes], name[computes]), graph.ns[computes])
    usual = np.broadcast_to(_median(spent), spent.shape)
    factor = np.minimum(np.divide(usual, spent, out=np.ones_like(spent), where=spent > 0), 1.0)
    eased = computes & slow[row]
    shorter = np.rint(graph.ns * factor[row, name]).astype(np.int64)
    return graph.changed(ns=np.where(eased, shorter, graph.ns))


def _median(values: NDArray[Any]) -> NDArray[Any]:
    """Return the median over ranks (axis 0); the lower of two middle values, so the faster rank."""
    return np.asarray(np.sort(values, axis=0)[(len(values) - 1) // 2])


def even_stages(graph: Graph, effect: Effect) -> Graph | None:
    """Give every stage of a pipeline the mean work, with its launches; at least, half the way."""
    ranks = distinct_ids(graph.rank[graph.rank >= 0])
    computes = graph.computes
    row = np.searchsorted(ranks, graph.rank)
    totals = np.bincount(row[computes], graph.ns[computes], len(ranks))
    if len(ranks) < 2 or totals.max() <= _SLOWER_RANK_RATIO * totals.mean():
        return None
    factor = (totals.mean() / np.maximum(totals, 1))[row]
    if effect is Effect.LEAST:
        factor = (1 + factor) / 2
    scaled = np.where(graph.rank >= 0, factor, 1.0)
    launching = graph.issues & computes
    return graph.changed(
        ns=np.where(computes, graph.ns * scaled, graph.ns).astype(np.int64),
        own=np.where(launching, graph.own * scaled, graph.own).astype(np.int64),
        gap=np.where(launching & (graph.hand < 0), graph.gap * scaled, graph.gap).astype(np.int64),
    )


def late_host(graph: Graph, _effect: Effect) -> Graph | None:
    """Cut the host time of later ranks to the median rank's, call by call.

    None where no rank is later, or where the ranks make different calls.
    """
    return with_quick_host(graph, distinct_ids(graph.rank[graph.rank >= 0]).tolist())


_TRAINING_GPU_PART: Final = 0.2
"""Minimum fraction of the busiest GPU's kernels on a GPU that trains."""
_SEARCH_ALLOCATIONS: Final = 20
"""Allocations per step and GPU above which they belong to a one-time algorithm search."""


def trained_together(graph: Graph) -> Index | None:
    """Return the GPUs that one process trains on from different threads; None if there are none."""
    kernels = graph.computes & (graph.thread >= 0)
    if len(distinct_ids(graph.process[kernels])) != 1:
        return None
    counts = np.bincount(graph.gpu[kernels])
    gpus = np.flatnonzero(counts >= _TRAINING_GPU_PART * counts.max())
    launches = [np.bincount(graph.thread[kernels & (graph.gpu == gpu)]) for gpu in gpus]
    feeders = {int(np.argmax(by_thread)) for by_thread in launches}
    allocs = np.count_nonzero(graph.sort[graph.thread >= 0] == Call.ALLOC)
    searches = allocs > _SEARCH_ALLOCATIONS * graph.steps * len(gpus)
    return gpus if len(gpus) > 1 and len(feeders) > 1 and not searches else None


def _one_process_each(
    graph: Graph, gpus: Index, loads: float, waited: float, talks: bool, longest: int | None = None
) -> Graph:
    """Keep only the first GPU and the work of its threads for it, in sequence.

    This is the load of each process if every GPU had one, with its share of the batch to load and
    copy. Work for other GPUs is dropped with its host time, and so is the time that threads waited
    for each other (for Python's global interpreter lock).

    Args:
        graph: graph of the steps.
        gpus: GPUs that the process trains on.
        loads: fraction of the waiting for data that remains.
        waited: fraction of the threads' waiting for each other that remains.
        talks: True if communication keeps its time on the GPU, False if it is overlapped.
        longest: upper limit of a host pause in nanoseconds, which removes such as the making of
            replicas; None for no limit.
    """
    first = int(gpus[0])
    between = graph.operation == OperationClass.COMMUNICATION
    runs_here = graph.runs & (graph.gpu == first) & (talks | ~between)
    feeds = distinct_ids(graph.thread[graph.issues & (graph.gpu == first)])
    stays = np.isin(graph.thread, feeds) & (runs_here | ~graph.runs)
    chain = int(feeds[0])
    host = np.where(graph.hand >= 0, graph.hand_lag, graph.gap) - graph.data
    kept = np.flatnonzero(stays)
    before = np.concatenate([[NONE], kept[:-1]])
    handed = graph.hand[kept]
    # A hand-over by a call that is dropped is a wait for another thread.
    foreign = (handed >= 0) & (handed != before)
    gap = np.zeros(len(graph), np.int64)
    gap[kept] = np.where(foreign, host[kept] * waited, host[kept])
    if longest is not None:
        gap = np.minimum(gap, longest)
    gap[kept] += (graph.data[kept] * loads).astype(np.int64)
    gap[kept[:1]] = graph.start[kept[:1]]
    copies = runs_here & (graph.kind == Kind.COPY_H2D)
    return graph.changed(
        thread=np.where(stays, chain, NONE),
        gap=gap,
        hand=np.full(len(graph), NONE),
        stream=np.where(runs_here, graph.stream, NONE),
        ns=np.where(copies, graph.ns // len(gpus), graph.ns),
        group=np.full(len(graph), NONE),
        waits={i: edges for i, edges in graph.waits.items() if stays[i]},
    )


def ddp(graph: Graph, effect: Effect) -> Graph | None:
    """Use one process per GPU instead of one for all: no scatter, gather or replicas.

    At most, no host pause over a millisecond (as for making replicas) remains, and the GPU computes
    no more than the one with least to do; at least, part of the threads' waiting for each other was
    work, communication remains, and the data loaders of the processes compete, so that a share of
    the batch takes as long as the whole.
    """
    gpus = trained_together(graph)
    if gpus is None:
        return None
    part = 1 / len(gpus)
    if effect is Effect.MOST:
        # The kernels of each GPU take no longer than those of the one that computes least.
        computes = graph.computes
        totals = np.bincount(graph.gpu[computes], graph.ns[computes])
        factor = np.ones(len(totals))
        factor[gpus] = totals[gpus].min() / totals[gpus]
        shorter = np.rint(graph.ns * factor[graph.gpu]).astype(np.int64)
        even = graph.changed(ns=np.where(computes, shorter, graph.ns))
        return _one_process_each(even, gpus, part, 0.0, talks=False, longest=1_000_000)
    if effect is Effect.LEAST:
        return _one_process_each(graph, gpus, 1.0, part, talks=True)
    return _one_process_each(graph, gpus, part, 0.0, talks=False)


_LIKELY_PART_OF_PEAKS: Final = 3 / 4
_LEAST_OF_PEAKS: Final = 1 / 4
"""Part of the ratio of a card's peaks by which products get faster: an H100 has 7.4 and 14.8 times
its FP32 in TF32 and bf16, large products of cuBLAS take a sixth and an eleventh of the time
(docs/studies/cures.md). Small ones, and those bound by memory, gain less."""
_LEAST_SPEED_UP: Final = 2.0
"""Ratio that the finding assumes; products that are bound by memory reach it with 16 bits."""
_SHORTEST_PRODUCT_NS: Final = 5_000
"""Duration of a small product in any precision."""


def products(precision: str, graph: Graph, effect: Effect) -> Graph | None:
    """Multiply FP32 matrices in another precision, faster by a part of the ratio of the peaks.

    At most by all of it, and with 16 bits other kernels move half of the bytes, which otherwise the
    casts between the types make up for; at least by a quarter of it, or twice.
    """
    if not graph.single.any():
        return None
    part = {Effect.MOST: 1.0, Effect.LIKELY: _LIKELY_PART_OF_PEAKS, Effect.LEAST: _LEAST_OF_PEAKS}[
        effect
    ]
    peaks = [(peak_of(card, precision), peak_of(card, "fp32")) for card in graph.cards]
    ratios = np.array([part * new / old if new and old else 1.0 for new, old in peaks])
    faster = np.clip(ratios, 1.0, _LEAST_SPEED_UP if effect is Effect.LEAST else None)
    quick = np.maximum(graph.ns / faster[graph.gpu], _SHORTEST_PRODUCT_NS)
    ns = np.where(graph.single, np.minimum(quick.astype(np.int64), graph.ns), graph.ns)
    if precision == "bf16" and effect is Effect.MOST:
        others = graph.computes & ~graph.single
        ns = np.where(others & (graph.kind == Kind.KERNEL), graph.ns // 2, ns)
    # The unexplained delays of operations if operations take other times. Kernels of several
    # streams share a GPU: one that is held up by others, as no row says, is held up for less time
    # if these take less.
    computes = graph.computes
    residual = graph.residual
    for gpu in distinct_ids(graph.gpu[computes]).tolist():
        mine = computes & (graph.gpu == gpu)
        if len(distinct_ids(graph.stream[mine])) > 1:
            part = ns[mine].sum() / max(graph.ns[mine].sum(), 1)
            residual = np.where(mine, (residual * part).astype(np.int64), residual)
    return graph.changed(ns=ns, residual=residual)


def keep_activations(graph: Graph, _effect: Effect) -> Graph | None:
    """Leave out what the backward pass launches of the forward pass again, with its launches."""
    rows = np.flatnonzero(graph.issues & (graph.kind == Kind.KERNEL))
    again = np.zeros(len(graph), np.bool_)
    for process in distinct_ids(graph.process[rows]).tolist():
        mine = rows[graph.process[rows] == process]
        order = mine[np.argsort(graph.thread[mine], kind="stable")]
        first = int(graph.thread[mine[0]])
        again[order] = launched_again(graph.name[order], graph.thread[order], first)
    if not again.any():
        return None
    return graph.changed(
        ns=np.where(again, 0, graph.ns),
        own=np.where(again, 0, graph.own),
        gap=np.where(again & (graph.hand < 0), graph.kept, graph.gap),
        residual=np.where(again, 0, graph.residual),
    )


SHORT_CALL_NS: Final = 10_000
"""Duration of a copy call that need not wait."""


class Effect(Enum):
    """Extent to which an optimization works: the prediction and the bounds of its range."""

    LIKELY = "likely"
    MOST = "most"
    LEAST = "least"


def returning(graph: Graph, calls: Mask, ns: int) -> Graph:
    """Let some calls wait for nothing and take at most ``ns``."""
    return without_waits(graph, calls).changed(
        own=np.where(calls, np.minimum(graph.own, ns), graph.own)
    )


def without_waits(graph: Graph, calls: Mask) -> Graph:
    """Let some calls wait for no operation; their duration without waiting remains."""
    waits = {i: edges for i, edges in graph.waits.items() if not calls[i]}
    lost = np.zeros(len(graph), bool)
    lost[[i for i in graph.waits if calls[i]]] = True
    return graph.changed(
        waits=waits, own=np.where(lost, np.minimum(graph.own, SHORT_NS), graph.own)
    )


def moved_aside(graph: Graph, operations: Mask, joined: bool = True) -> Graph:
    """Move operations to separate streams; if ``joined``, their followers still wait for them."""
    before = before_on(graph.stream)
    after = dict(graph.after)
    stream = np.where(operations, graph.stream + int(graph.stream.max()) + 1, graph.stream)
    followers = np.flatnonzero(~operations & (before >= 0) & operations[before])
    for i in followers.tolist() if joined else ():
        after[i] = (*after.get(i, ()), (int(before[i]), int(graph.spacing[i])))
    return graph.changed(stream=stream, after=after)


def copied_before(graph: Graph, copies: Mask) -> Graph:
    """Let some copies take no time, as if made before they were needed."""
    quick = returning(graph, copies, SHORT_CALL_NS)
    return quick.changed(
        ns=np.where(copies, 0, quick.ns), residual=np.where(copies, 0, quick.residual)
    )


Change = Callable[[Graph, Effect], Graph | None]


class Cure(Struct, frozen=True):
    """An optimization that can be predicted."""

    id: str
    findings: tuple[str, ...]
    """Ids of the findings that it removes; it belongs to the costliest that the analysis has."""
    change: Change
    """Edit of the graph; returns None where there is nothing to improve."""
    what: str
    """Name of the optimization, as the subject of a sentence on what it would save."""
    assumption: str
    beyond: str
    """Further gains that may come with it, beyond the finding's cost."""
    bounds: tuple[Effect, ...] = (Effect.MOST, Effect.LEAST)
    """Effects that bound the prediction; none where it is all or nothing."""
    only_as_cure: bool = False
    """True if it makes sense only where one of the findings is there."""
    takes: tuple[str, ...] = ()
    """Causes whose charged time it can take, beside what follows from that; empty for any."""
    evens: bool = False
    """True if it makes every rank's host as quick as the median one's, and none quicker."""
    rare_cause: str | None = None
    """Cause that it takes away, of time that may be in few steps."""


_EXCHANGES: Final = (
    *("communication-exposed", "topology", "host-staged-comm", "copies-exposed", "h2d-exposed"),
    *("pipeline-bubble", "expert-imbalance"),
)
_ON_TIME: Final = "an earlier start of what follows"


CURES: Final = (
    # Id, findings, edit, name; assumption; what may come with it, and the rest.
    Cure("ddp", ("gpu0-skew", "launch-bound"), ddp, "DistributedDataParallel",
         "one process trains on each GPU (DistributedDataParallel), and loads and copies its own "
         "part of the batch; its threads wait for no others, and gradients are exchanged meanwhile",
         "exchanges and copies hidden by compute"),
    Cure("prefetch", ("data-feeding",), prefetch, "A loader that keeps up",
         "every batch is ready when requested, at best already on the GPU; at the least, one batch "
         "at a time is loaded during training",
         "the copy of the batch",
         takes=("data-feeding", "loader-restart", "h2d-exposed", "h2d-pageable")),
    Cure("pinned", ("h2d-exposed", "h2d-pageable"), pinned,
         "Copying the input beside the computation",
         "input is copied from pinned memory on a separate stream, as early as the host asks",
         "launches that no longer wait for the copy",
         takes=("h2d-exposed", "h2d-pageable", "weights")),
    Cure("straggler", ("straggler",), straggler, "A rank as fast as the others",
         "every rank's kernels take as long as the median rank's",
         _ON_TIME, bounds=(), takes=("straggler", "uneven-arrival")),
    Cure("even-stages", ("pipeline-bubble",), even_stages, "Stages of equal work",
         "every stage of the pipeline has the mean work, and launches it as quickly as now; at the "
         "least, half the difference stays",
         "less waiting for messages between stages", bounds=(Effect.LEAST,), only_as_cure=True,
         takes=("pipeline-bubble", "communication-exposed")),
    Cure("late-host", ("late-host",), late_host, "A host as quick as on the other ranks",
         "every rank's host is as fast as the median rank's between the same calls",
         _ON_TIME, bounds=(), takes=("late-host",), evens=True),
    Cure("peer-access", ("host-staged-comm",), peer_access, "Exchange over the GPUs' own links",
         "an exchange takes a twentieth of what it takes through the host's memory, as over "
         "NVLink; over PCIe a third",
         _ON_TIME, only_as_cure=True, takes=_EXCHANGES),
    Cure("overlap", ("communication-exposed",), overlap, "Overlapping all communication",
         "nothing waits for communication but communication, and it slows nothing down; at the "
         "least, each step's last exchange stays exposed",
         _ON_TIME),
    Cure("gathers", ("communication-exposed",), gathers, "Prefetching the next layer's parameters",
         "the parameters of a layer are gathered while the one before it computes, which slows "
         "nothing down and holds one layer more in memory; at the least, those of every second "
         "layer, at the most two layers ahead",
         "less waiting of later gathers", takes=_EXCHANGES),
    Cure("graphs", ("launch-bound",), graphs, "CUDA graphs of whole steps",
         "consecutive launches become one, without host time between them; kernels take as long as "
         "before",
         "less synchronisation and time between kernels",
         takes=("launch-bound", "kernel-gaps", "sync-bound", "alloc-stall")),
    Cure("keep-activations", ("recomputation",), keep_activations,
         "Keeping the activations that are computed again",
         "the backward pass launches nothing of the forward pass again; memory suffices",
         "the launches of that part", bounds=(), only_as_cure=True),
    Cure("tf32", ("no-tensor-cores",), partial(products, "tf32"), "TF32 for FP32 matrix products",
         "products get faster by three quarters of the ratio of the card's peaks in TF32 and FP32, "
         "at most by all of it, at least by a quarter, or twice; numbers change a little",
         "a speed-up beyond two", only_as_cure=True),
    Cure("bf16", ("no-tensor-cores",), partial(products, "bf16"), "bf16 for FP32 matrix products",
         "products get faster by three quarters of the ratio of the card's peaks in bf16 and FP32, "
         "at most by all of it, with half of the bytes to move elsewhere, at least by a quarter, "
         "or twice; numbers change",
         "a speed-up beyond two, half the bytes in other kernels", only_as_cure=True),
    Cure("sync", ("sync-bound",), sync, "A host that waits for no GPU",
         "the host never waits for a GPU, and runs ahead as far as launches can be queued",
         _ON_TIME, bounds=()),
    Cure("alloc", ("alloc-stall",), alloc, "Keeping memory allocated",
         "no memory is allocated or released in a step",
         "calls and launches that no longer wait", bounds=(),
         takes=("alloc-stall", "autotune-repeated")),
    Cure("gc", ("garbage-collection",), partial(without_host_time, "garbage-collection", ()),
         "No garbage collection in the steps",
         "Python collects garbage outside of the steps",
         _ON_TIME, bounds=(Effect.LEAST,), takes=("garbage-collection",),
         rare_cause="garbage-collection"),
    Cure("compile-once", ("recompilation",), partial(without_host_time, "recompilation", ()),
         "Compiling nothing again",
         "nothing is traced or compiled in the steps",
         _ON_TIME, bounds=(Effect.LEAST,), takes=("recompilation",), rare_cause="recompilation"),
    Cure("save-aside", ("checkpoint-stall",), partial(without_host_time, "checkpoint-stall", ()),
         "Checkpoints saved in the background",
         "the threads that train save nothing in the steps; their copies to the host stay",
         _ON_TIME, bounds=(Effect.LEAST,), only_as_cure=True, takes=("checkpoint-stall",),
         rare_cause="checkpoint-stall"),
    Cure("gpu-optimizer", ("host-optimizer",),
         partial(without_host_time, "host-optimizer", (Kind.COPY_H2D, Kind.COPY_D2H)),
         "The optimizer on the GPU",
         "the host computes and copies nothing for the optimizer, whose time on the GPU is not "
         "counted",
         _ON_TIME, bounds=(Effect.LEAST,),
         takes=("host-optimizer", "h2d-exposed", "copies-exposed"), rare_cause="host-optimizer"),
    Cure("host-work", ("host-work",), partial(without_host_time, "host-work", (Kind.COPY_D2H,)),
         "The steps without that work of the host",
         "the host does nothing but to load batches and to issue the passes",
         _ON_TIME, bounds=(Effect.LEAST,),
         takes=("host-work", "copies-exposed", "garbage-collection"), rare_cause="host-work"),
)  # fmt: skip
CURABLE: Final = frozenset(id for cure in CURES for id in cure.findings if not cure.only_as_cure)
"""Ids of the findings whose cures are predicted wherever they gain anything."""
