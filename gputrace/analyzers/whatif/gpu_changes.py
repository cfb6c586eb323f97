"""Changes of what the GPUs do beside computing: copies and communication."""

from __future__ import annotations

from typing import Final

import numpy as np

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.whatif.dataparallel import trained_together
from gputrace.analyzers.whatif.edits import (
    SHORT_CALL_NS,
    Effect,
    Mask,
    copied_before,
    input_copies,
    last_collectives,
    moved_aside,
    returning,
    runs,
)
from gputrace.analyzers.whatif.graph import Graph
from gputrace.traces.events import Kind

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
