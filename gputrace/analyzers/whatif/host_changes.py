"""Changes of what the host threads do: their waits, their launches, their allocations."""

from __future__ import annotations

from typing import Final

import numpy as np

from gputrace.analyzers.host import Call
from gputrace.analyzers.whatif.dataparallel import trained_together
from gputrace.analyzers.whatif.edits import (
    Effect,
    Mask,
    copied_before,
    input_copies,
    issues,
    without_waits,
)
from gputrace.analyzers.whatif.graph import NONE, Graph
from gputrace.analyzers.whatif.items import before_on
from gputrace.analyzers.whatif.measure import measure
from gputrace.analyzers.whatif.replay import replay
from gputrace.traces.events import Kind

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
