"""Changes of a graph that several cures make."""

from __future__ import annotations

from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.whatif.graph import Graph
from gputrace.analyzers.whatif.items import before_on
from gputrace.analyzers.whatif.waits import SHORT_NS
from gputrace.traces.events import Kind

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
