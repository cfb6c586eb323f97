"""The cures: each changes the durations and edges of a graph as if one cause were gone.

To add one, write a function of a graph and of how far it works, and put it in `CURES`. It returns
None where there is nothing to cure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.host import Call
from gputrace.analyzers.whatif.dataparallel import one_process_each, trained_together
from gputrace.analyzers.whatif.edits import (
    Mask,
    issues,
    last_collectives,
    moved_aside,
    returning,
    runs,
    without_waits,
)
from gputrace.analyzers.whatif.graph import NONE, Graph, replay
from gputrace.analyzers.whatif.measure import measure
from gputrace.analyzers.whatif.ranks import like_the_median_host, like_the_median_kernels
from gputrace.traces.events import Kind


class Effect(Enum):
    """How far a cure works: what is predicted, and the bounds of its range."""

    LIKELY = "likely"
    MOST = "most"
    LEAST = "least"


Change = Callable[[Graph, Effect], Graph | None]


@dataclass(frozen=True, slots=True)
class Cure:
    """One entry of the list."""

    id: str
    findings: tuple[str, ...]
    """Ids of the findings that it cures; it belongs to the first of them that the analysis has."""
    change: Change
    assumption: str


_SHORT_CALL_NS: Final = 10_000
"""A copy call that need not wait."""
_PINNED_RATE: Final = 10.0
"""Bytes a nanosecond: PCIe 3.0 with 16 lanes copies 11 to 12 from pinned memory."""
_GRAPH_LAUNCH_NS: Final = 10_000


def prefetch(graph: Graph, effect: Effect) -> Graph | None:
    """The next batch is ready when it is asked for; at the most, it is on the GPU by then.

    At the least, one thread makes it beside the training, in the time that the training waited.
    """
    if not graph.data.any():
        return None
    cured = _without_data(graph, 1.0)
    if effect is Effect.MOST:
        return _copied_before(cured, _input_copies(graph))
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


def pinned(graph: Graph, effect: Effect) -> Graph | None:
    """Input copies go from pinned memory and beside the computation, as far as the host is ahead.

    At the most they are all made before they are needed; at the least they stay on their stream, as
    fast as any machine copies from pinned memory.
    """
    copies = _input_copies(graph)
    if not copies.any():
        return None
    if effect is Effect.MOST:
        return _copied_before(graph, copies)
    quick = returning(graph, copies, _SHORT_CALL_NS)
    quick = quick.changed(ns=_at_pinned_rate(quick, copies))
    return quick if effect is Effect.LEAST else moved_aside(quick, copies)


def _input_copies(graph: Graph) -> Mask:
    return runs(graph) & (graph.kind == Kind.COPY_H2D)


def _copied_before(graph: Graph, copies: Mask) -> Graph:
    quick = returning(graph, copies, _SHORT_CALL_NS)
    return quick.changed(
        ns=np.where(copies, 0, quick.ns), residual=np.where(copies, 0, quick.residual)
    )


def _at_pinned_rate(graph: Graph, copies: Mask) -> np.ndarray:
    """Pageable copies at the rate of the trace's large pinned ones; without any, at a modest one."""
    large = copies & ~graph.pageable & (graph.size > 1 << 20)
    rate = _PINNED_RATE
    if large.any():
        rate = float(graph.size[large].sum()) / max(int(graph.ns[large].sum()), 1)
    faster = np.minimum(graph.ns, graph.size / rate).astype(np.int64)
    return np.where(copies & graph.pageable, faster, graph.ns)


def straggler(graph: Graph, effect: Effect) -> Graph | None:
    """Every rank's kernels run as fast as the median rank's."""
    return like_the_median_kernels(graph)


def late_host(graph: Graph, effect: Effect) -> Graph | None:
    """Every rank's host takes no longer than the median rank's between the same calls."""
    return like_the_median_host(graph)


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


def graphs(graph: Graph, effect: Effect) -> Graph | None:
    """Kernels that are launched one after another are one launch, without host time between.

    At the most, they also follow each other without a pause; at the least, half of the host's time
    stays, as where the optimizer or the loss is launched as before.
    """
    launched = issues(graph) & np.isin(graph.kind, (Kind.KERNEL, Kind.COPY_D2D, Kind.MEMSET))
    follows = _follows(graph, launched)
    if not follows.any():
        return None
    if effect is Effect.LEAST:
        return _half_launched(graph, follows)
    first = launched & ~follows
    if effect is Effect.MOST:
        graph = graph.changed(spacing=np.where(follows, np.minimum(graph.spacing, 0), graph.spacing))
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
    follows = np.zeros(len(graph), bool)
    latest: dict[int, int] = {}
    thread, hand = graph.thread.tolist(), graph.hand.tolist()
    for i in range(len(graph)):
        if thread[i] >= 0:
            before = hand[i] if hand[i] >= 0 else latest.get(thread[i], NONE)
            follows[i] = launched[i] and before >= 0 and launched[before]
            latest[thread[i]] = i
    return follows


def sync(graph: Graph, effect: Effect) -> Graph | None:
    """The host waits for no GPU: it asks for no result in the middle of training."""
    calls = (graph.thread >= 0) & (graph.sort == Call.SYNC)
    back = issues(graph) & (graph.kind == Kind.COPY_D2H)
    if not (calls | back).any():
        return None
    return without_waits(graph, calls | back)


def alloc(graph: Graph, effect: Effect) -> Graph | None:
    """Memory is kept: no allocation and no release."""
    calls = (graph.thread >= 0) & (graph.sort == Call.ALLOC)
    if not calls.any():
        return None
    freed = without_waits(graph, calls)
    return freed.changed(own=np.where(calls, 0, freed.own))


def ddp(graph: Graph, effect: Effect) -> Graph | None:
    """One process a GPU in place of one for all; no scatter, no gather, no replicas.

    At the most, no pause of the host of over a millisecond stays, as making replicas is one; at the
    least, a part of the threads' waiting for each other was work, and communication stays.
    """
    if effect is Effect.MOST:
        return one_process_each(graph, 0.0, talks=False, longest=1_000_000)
    if effect is Effect.LEAST:
        gpus = trained_together(graph)
        return None if gpus is None else one_process_each(graph, 1 / len(gpus), talks=True)
    return one_process_each(graph, 0.0, talks=False)


CURES: Final = (
    Cure(
        "ddp",
        ("gpu0-skew", "launch-bound"),
        ddp,
        "one process trains on each GPU (DistributedDataParallel), with its own copy of the "
        "input; its threads wait for no others, and gradients are exchanged meanwhile",
    ),
    Cure(
        "prefetch",
        ("data-feeding",),
        prefetch,
        "every batch is ready when it is asked for, and at best on the GPU already; at the least, "
        "one batch at a time is made beside the training",
    ),
    Cure(
        "pinned",
        ("h2d-pageable", "h2d-exposed"),
        pinned,
        "input is copied from pinned memory on a stream of its own, as early as the host asks",
    ),
    Cure("straggler", ("straggler",), straggler, "every rank's kernels take what the median's do"),
    Cure(
        "late-host",
        ("late-host",),
        late_host,
        "every rank's host is as quick as the median's between the same calls",
    ),
    Cure(
        "overlap",
        ("communication-exposed",),
        overlap,
        "nothing waits for communication but communication, and it slows nothing down; at the "
        "least, each step's last exchange stays exposed",
    ),
    Cure(
        "graphs",
        ("launch-bound",),
        graphs,
        "consecutive launches become one, without host time between them; kernels take what "
        "they do",
    ),
    Cure(
        "sync",
        ("sync-bound",),
        sync,
        "the host never waits for a GPU, and runs ahead as far as launches can be queued",
    ),
    Cure("alloc", ("alloc-stall",), alloc, "no memory is allocated or given back in a step"),
)
