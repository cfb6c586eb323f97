"""How much faster the host of a GPU could go: what its waiting for the GPU leaves it.

A GPU that waits for another one loses nothing by it where its own host is no faster: had the other
come sooner, the GPU would wait for its host instead. Hosts run ahead, so a rank that fell behind
once may come last for ever after, and cost nothing.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.host import NOBODY, Call, HostCalls
from gputrace.analyzers.intervals import Intervals, Times, union
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.shard import OneGpu, Shard
from gputrace.traces.events import Kind, Mask
from gputrace.traces.ids import distinct_ids

_FULL: Final = 900
"""With so many operations queued, a launch waits for room: CUDA holds about 1,000."""

_FREE: Final = re.compile(r"(cuda|cu|hip)(Mem)?(Host)?Free(?!\w*Async)")
_WITH_HOST: Final = (Kind.COPY_H2D, Kind.COPY_D2H)
"""Copies that a call may stay in until they are done."""


def find_slack(one: OneGpu, steps: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Of each step, its time on the GPU less what the host needs without waiting for the GPU.

    Negative where the host was ahead and lost some of that. None where it is not known who issues
    the steps.

    Args:
        one: the GPU.
        steps: of it, in order: shape (steps, 3), number, start and end.
    """
    own, calls = one.operations, one.calls
    if calls is None or not len(steps):
        return None
    numbers, starts, ends = steps.T
    issued_by = calls.issued_by(own.events)
    first = np.minimum(np.searchsorted(own.start, starts), len(own) - 1)
    if (issued_by[first] == NOBODY).any():
        return None
    begin = calls.start[issued_by[first]]
    length, follows = ends - starts, np.diff(numbers) == 1
    waits = _blocked(own, calls, one.once(_waiting_calls), issued_by).within(
        begin[:-1], np.maximum(begin[1:], begin[:-1])
    )
    slack = length[:-1] - (np.diff(begin) - waits)
    if not follows.any():
        return None
    usual = int(np.median(slack[follows]))
    return np.append(np.where(follows, slack, usual), usual)


def _blocked(
    own: GpuOperations, calls: HostCalls, waiting: Mask, issued_by: NDArray[np.int32]
) -> Intervals:
    """When a thread that feeds the GPU could not go on before the GPU had."""
    known = issued_by != NOBODY
    issue = issued_by[known]
    held = _held(own.events.kind[known], own.start[known], own.end[known], issue, calls)
    usual = int(np.median(calls.end[issue] - calls.start[issue])) if len(issue) else 0
    spans = [(calls.start[issue[held]] + usual, calls.end[issue[held]])]
    for thread in distinct_ids(calls.thread[issue]).tolist():
        rows = slice(int(calls.first[thread]), int(calls.first[thread + 1]))
        spans.append((calls.start[rows][waiting[rows]], calls.end[rows][waiting[rows]]))
    starts, ends = (np.concatenate(column) for column in zip(*spans, strict=True))
    return union(starts, ends)


def _waiting_calls(shard: Shard) -> Mask:
    """Calls that wait for the GPU: those that say so, and those that give memory back, for which it
    must have done all that uses it.
    """
    calls = shard.calls
    assert calls is not None
    freeing = shard.trace.search(distinct_ids(calls.name[calls.sort == Call.ALLOC]), _FREE)
    drains = np.isin(calls.name, list(freeing)) & (calls.sort == Call.ALLOC)
    waiting: Mask = drains | (calls.sort == Call.SYNC)
    return waiting


def _held(
    kind: NDArray[np.int8], start: Times, end: Times, issue: NDArray[np.int32], calls: HostCalls
) -> Mask:
    """Which operations held the call that issued them: copies that it saw done, a full queue.

    The operations are in order of start.
    """
    called = calls.start[issue]
    done = np.isin(kind, _WITH_HOST) & (calls.end[issue] >= end)
    order = np.argsort(called, kind="stable")
    queued = np.empty(len(order), np.int64)
    queued[order] = np.arange(len(order)) - np.searchsorted(start, called[order])
    held: Mask = done | (queued > _FULL)
    return held
