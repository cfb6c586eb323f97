"""GPU operations at times that no GPU can produce, as corrupted timestamps make them.

Kernels of one stream run one after another, but for programmatic dependent launch, by which the
next one may begin early. None begins before the call that launches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.model.events import (
    COLUMN_TYPES,
    UNKNOWN,
    Events,
    Kind,
    Mask,
    distinct_ids,
    is_among,
    number_ids,
    order_by_group,
)
from gputrace.model.trace import Quality
from gputrace.native import address, library

CHECKED: Final = ("start", "end", "kind", "process", "device", "stream", "correlation")
"""Columns of the operations to check."""

_LONGEST: Final = 3_600 * 1_000_000_000
"""Nanoseconds that no operation takes, unless the whole recording does."""
_ROUNDED: Final = 1_000
"""Nanoseconds by which recorders of AMD's GPUs and old ones round."""
_EARLY: Final = 1_000_000
"""Nanoseconds by which no clock of a GPU is ahead of its host's by accident."""
_GAP: Final = 100_000_000
"""Nanoseconds by which threads' launches on one stream do not run out of their order."""
_LONG_GAP: Final = 1_000_000_000
"""Nanoseconds between the first operations and the rest for the first ones to be suspected."""
_MOST_IDS: Final = 1 << 41
"""Correlation ids have 32 bits, and those of joined windows some more."""
_MOST_IMPOSSIBLE: Final = 0.05
"""Largest part of the operations that may be at impossible times. If more are, a stream is not what
it is taken for, or a clock is wrong."""
MISTIMED: Final = (
    f"over {_MOST_IMPOSSIBLE:.0%} of the GPUs' work starts before its launch: a clock is wrong, "
    "and when the GPUs were idle is unknown"
)
"""Note on a trace whose times say nothing of idle time."""
_EARLY_REASON: Final = "GPU work that starts before its launch"

_Ints = NDArray[np.int64]


def find_possible(
    operations: Events, quality: Quality, where: str, launched: Callable[[Events], _Ints]
) -> Mask | None:
    """Return the mask of the operations at possible times, and count the others in ``quality``
    under ``where``; None if all are.

    Args:
        operations: rows of GPUs with the columns `CHECKED`, in any order.
        quality: counts.
        where: part of the trace that they are.
        launched: returns when the calls that launched some operations began, in ns, or `UNKNOWN`.
    """
    if len(operations) < 2:
        return None
    streams, group = number_ids(operations.stream)
    device = operations.device.astype(np.int32) & 0xFFFF
    pairs, pair = number_ids(operations.process.astype(np.int32) << 16 | device)
    group = group.astype(np.int32, copy=False)
    if len(pairs) > 1:
        group = pair.astype(np.int32, copy=False) * np.int32(len(streams)) + group
    groups, paused = len(streams) * len(pairs), _before_pause(operations, launched)
    if not len(paused) and _are_in_order(operations, group, groups):
        return None
    order, edges = order_by_group(group, groups, operations.start)
    stream = np.repeat(np.arange(groups, dtype=np.int32), np.diff(edges))
    columns = (operations.start, operations.end, operations.correlation)
    rows = _Rows(order, stream, *(column.take(order) for column in columns))
    length = operations.end - operations.start
    too_long: Mask = length > _LONGEST
    if too_long.any():
        others = operations.select(~too_long)
        span = int(others.end.max() - others.start.min()) if len(others) else int(length.max())
        too_long &= length > span
    overlapping, early = np.zeros((2, len(operations)), np.bool_)
    overlapping[_overlapping(operations, rows)] = True
    suspects = distinct_ids(np.concatenate((_suspects(rows), paused)))
    if len(suspects):
        begun = launched(operations.select(suspects))
        early[suspects[(begun != UNKNOWN) & (operations.start[suspects] < begun - _EARLY)]] = True
    bad = np.zeros_like(early)
    for reason, mask in (
        ("longer than an hour and than the run", too_long),
        (_EARLY_REASON, early),
        ("kernels that run during others of their stream", overlapping),
    ):
        mask &= ~bad
        count = int(np.count_nonzero(mask))
        if count <= max(1, _MOST_IMPOSSIBLE * len(operations)):
            quality.drop(reason, count, where)
            bad |= mask
        elif reason == _EARLY_REASON and MISTIMED not in quality.notes:
            quality.notes.append(MISTIMED)
    return ~bad if bad.any() else None


def _are_in_order(operations: Events, group: NDArray[np.int32], groups: int) -> bool:
    """Return True if nothing can be wrong on any stream, by its ``group``, as of nearly all traces;
    False where it has to be looked at, which takes several times as long.
    """
    if (native := library()) is None:
        return False
    names = ("start", "end", "correlation", "kind")
    columns = [group, *(np.ascontiguousarray(getattr(operations, name)) for name in names)]
    if [column.dtype for column in columns[1:]] != [COLUMN_TYPES[name] for name in names]:
        return False
    state = np.empty(4 * groups, np.int64)
    limits = Kind.KERNEL, _LONGEST, _ROUNDED, address(state)
    return bool(
        native.gputrace_streams_in_order(*map(address, columns), len(group), groups, *limits)
    )


class _Rows(NamedTuple):
    """Operations in order of stream and start."""

    order: _Ints
    """Row of each among all operations."""
    stream: NDArray[np.int32]
    """Number of its stream among all."""
    start: _Ints
    end: _Ints
    issued: _Ints
    """Correlation id."""


def _overlapping(operations: Events, rows: _Rows) -> _Ints:
    """Return the kernels that outlast the next one on their stream, or reach the one after it.

    Kernels of one launch, as of a CUDA graph, run in any order.
    """
    kernels = operations.kind == Kind.KERNEL
    if not kernels.all():
        rows = _Rows(*(column[kernels[rows.order]] for column in rows))
    if len(rows.order) < 2:
        return rows.order[:0]
    start, end = rows.start, rows.end - _ROUNDED
    over = np.append(end[:-1] > rows.end[1:], False)
    over[:-2] |= end[:-2] > start[2:]
    # Few are left, of which those on another stream, on none, or of the same launch do not count.
    here = np.flatnonzero(over)
    wrong = np.zeros(len(here), np.bool_)
    for ahead, limit in ((1, rows.end), (2, start)):
        there = np.minimum(here + ahead, len(over) - 1)
        is_launch = (rows.issued[here] == rows.issued[there]) & (rows.issued[here] != UNKNOWN)
        is_stream = (rows.stream[here] == rows.stream[there]) & (here != there)
        wrong |= (end[here] > limit[there]) & is_stream & ~is_launch
    found = rows.order[here[wrong]]
    on_stream: _Ints = found[operations.stream[found] != UNKNOWN]
    return on_stream


def _before_pause(operations: Events, launched: Callable[[Events], _Ints]) -> _Ints:
    """Return the operations before a long pause of all GPUs, if the last of them begins long before
    its launch.
    """
    bins = (operations.start - operations.start.min()) // (_LONG_GAP // 2)
    used = distinct_ids(bins)
    before = used[:-1][np.diff(used) > 1]
    if not len(before):
        return before
    rows = np.flatnonzero(is_among(bins, before))
    rows = rows[np.lexsort((operations.start[rows], bins[rows]))]
    last = rows[np.flatnonzero(np.diff(bins[rows], append=-1))]
    begun = launched(operations.select(last)) if len(last) else last
    is_early = (begun != UNKNOWN) & (operations.start[last] < begun - _LONG_GAP)
    return np.flatnonzero(bins <= bins[last[is_early]].max(initial=-1))


def _suspects(rows: _Rows) -> _Ints:
    """Return the operations that may begin before their launch: those that begin long before others
    of their stream that were launched earlier.
    """
    suspects = []
    if rows.issued.min() == UNKNOWN:
        rows = _Rows(*(column[rows.issued != UNKNOWN] for column in rows))
    falls = np.flatnonzero(rows.issued[1:] < rows.issued[:-1])
    if (rows.stream[falls] != rows.stream[falls + 1]).all():
        return np.empty(0, np.int64)
    least_id = int(rows.issued.min(initial=0))
    ids = min(int(rows.issued.max(initial=0)) - least_id + 1, _MOST_IDS)
    # Streams are numbered in order: later ones do not lower the least id that follows.
    issued = rows.issued - least_id + rows.stream.astype(np.int64) * ids
    least = np.minimum.accumulate(issued[::-1])[::-1]
    out_of_order = np.flatnonzero(issued[:-1] > least[1:])
    for number in distinct_ids(rows.stream[out_of_order]).tolist():
        begin, end = np.searchsorted(rows.stream, [number, number + 1]).tolist()
        here = out_of_order[(out_of_order >= begin) & (out_of_order < end)]
        later = begin + np.searchsorted(rows.start[begin:end], rows.start[here] + _GAP)
        here, later = here[later < end], later[later < end]
        suspects.append(rows.order[here[issued[here] > least[later]]])
    return distinct_ids(np.concatenate([*suspects, np.empty(0, np.int64)]))


def find_launches(calls: Events, operations: Events) -> _Ints:
    """Return when the first call with the process and correlation id of each operation began, in
    ns; `UNKNOWN` where there is none.
    """
    calls = calls.select(is_among(calls.correlation, operations.correlation))
    if not len(calls):
        return np.full(len(operations), UNKNOWN)
    keys = calls.correlation << 16 | calls.process
    order = np.lexsort((calls.start, keys))
    keys, wanted = keys[order], operations.correlation << 16 | operations.process
    at = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[at] == wanted, calls.start[order][at], UNKNOWN)
