"""What launching costs: tiny kernels, the calls, and the time from a call to its kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.host import NOBODY, HostCalls
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results.kernels import LaunchCost
from gputrace.traces.events import Events

TINY_NS: Final = 5_000
"""A launching call takes a host about so long: shorter kernels cannot keep a GPU fed."""
MOST_LOOKED_AT: Final = 20_000
"""Kernels of a GPU of which calls are looked up; evenly taken from all."""

Rows = NDArray[np.intp]


def launch_cost(
    launched: Iterable[tuple[GpuOperations, Times, Rows]], calls: HostCalls | None
) -> LaunchCost:
    """Of the kernels of GPUs.

    Args:
        launched: of each GPU its operations, nanoseconds of the kernels that count, and the rows of
            some of them, of which the calls are looked up.
        calls: of all threads.
    """
    tiny, looked_at = [], []
    for own, lengths, rows in launched:
        tiny.append(lengths[lengths < TINY_NS])
        if calls is not None and len(rows):
            looked_at.append(_calls_of(own, rows, calls))
    short = np.concatenate(tiny)
    call = np.concatenate([lengths for lengths, _ in looked_at] or [np.empty(0, np.int64)])
    latency = np.concatenate([delays for _, delays in looked_at] or [np.empty(0, np.int64)])
    return LaunchCost(TINY_NS, len(short), int(short.sum()), _median(call), _median(latency))


def _calls_of(own: GpuOperations, rows: Rows, calls: HostCalls) -> tuple[Times, Times]:
    """Lengths of the calls that launched some kernels, and the delays of those that an idle GPU
    started: it had done all before the call began.
    """
    launched = {name: getattr(own.events, name)[rows] for name in ("process", "correlation")}
    issued_by = calls.issued_by(Events(launched))
    known = issued_by != NOBODY
    rows, issued_by = rows[known], issued_by[known]
    began = calls.start[issued_by]
    done = np.where(rows > 0, own.reach[np.maximum(rows - 1, 0)], 0)
    delay = own.start[rows] - began
    return calls.end[issued_by] - began, delay[(done <= began) & (delay > 0)]


def _median(values: Times) -> int | None:
    return int(np.median(values)) if len(values) else None
