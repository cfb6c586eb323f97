"""Skew of GPUs' clocks against their host's in an nsys export.

Reports of nsys 2021 exist whose times on the GPU are all hundreds of milliseconds before or after
those of the calls. Work that begins before its launch shows it, and so do copies to pageable memory
that end after their call: cudaMemcpyAsync returns when such a copy is done.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.model.events import distinct_ids, number_ids
from gputrace.store.sqlite_page_scan import Query, Value
from gputrace.store.sqlite_reader import Database, read_integers
from gputrace.units import format_ns

RIGHT_NS: Final = 1_000_000
"""Nanoseconds by which a clock may be wrong: no recorder's is that wrong by accident."""
_SUFFICIENT_PAIRS: Final = 3
"""Minimum number of operations of a GPU that show its skew: one may have a time that is wrong."""
_LOOKS: Final = (100, 4_000)
"""Operations of a table to inspect at first, and then: a wrong clock is wrong for all."""
_CALLS_EACH: Final = 20
"""Calls to inspect for each."""
_MOST_SKEW: Final = 1 << 61
"""Nanoseconds that no clock is wrong by."""
_COPIES: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
_ON_GPU: Final = ("CUPTI_ACTIVITY_KIND_KERNEL", _COPIES, "CUPTI_ACTIVITY_KIND_MEMSET")
_TO_HOST: Final = 2
_PAGEABLE: Final = 0

Ints = NDArray[np.int64]


def measure_skew(database: Database) -> int:
    """Return the nanoseconds to take off the GPUs' times for them to be just possible, or 0.

    A slice may have too few operations to show its skew: it says that of the whole.
    """
    skews: list[int] = []
    if database.has("GPUTRACE_EXPORT", "name", "value"):
        sql = "SELECT CAST(value AS INTEGER) FROM GPUTRACE_EXPORT WHERE name = 'gpu_late_ns'"
        skews = [int(skew) for (skew,) in database.query(sql)]
    skew = skews[-1] if skews else _shown(database)
    return skew if abs(skew) <= _MOST_SKEW else 0


def _shown(database: Database) -> int:
    """Return the skew that operations show; 0 where the clocks of GPUs differ.

    A GPU without copies that its calls wait for says nothing against a skew that others show: its
    work may be that far back in a queue.
    """
    soonest: dict[int, int] = {}
    latest: dict[int, int] = {}
    for operations in _LOOKS:
        delays = [_delays(database, table, operations) for table in _ON_GPU]
        gpu, began, waited, ended = np.concatenate([np.empty((4, 0), np.int64), *delays], axis=1)
        for key in distinct_ids(gpu).tolist():
            mine = gpu == key
            waits = mine & (waited > 0)
            if np.count_nonzero(mine) >= _SUFFICIENT_PAIRS:
                soonest[key] = int(np.sort(began[mine])[_SUFFICIENT_PAIRS - 1])
            if np.count_nonzero(waits) >= _SUFFICIENT_PAIRS:
                latest[key] = int(np.sort(ended[waits])[-_SUFFICIENT_PAIRS])
        if soonest and all(abs(delay) <= RIGHT_NS for delay in soonest.values()):
            return 0
    # GPUs' times are late by `least` or more, but by `most` or less.
    least = max(latest.values(), default=-_MOST_SKEW)
    most = min(soonest.values(), default=0)
    if least > RIGHT_NS:
        return least if least <= most + RIGHT_NS else 0
    is_early = all(delay < -RIGHT_NS for delay in soonest.values())
    return most if is_early and least <= most + RIGHT_NS else 0


def moved(skew: int) -> str:
    """Return a note that the GPUs' times were moved by a skew."""
    way = "ahead of" if skew > 0 else "behind"
    return (
        f"the GPU's clock was {format_ns(abs(skew))} {way} its host's: the times of its "
        "operations were shifted by that"
    )


def _delays(database: Database, table: str, count: int) -> Ints:
    """Return rows of the first operations of a table whose calls are among the first ones: the GPU,
    how long after its call it began, whether the call waits for it, and how long after the call it
    ended.
    """
    times = ("correlationId", "start", "end")
    calls = _first(
        database, "CUPTI_ACTIVITY_KIND_RUNTIME", count * _CALLS_EACH, "globalTid", *times
    )
    ends = ("copyKind", "dstKind") if table == _COPIES else ()
    rows = _first(database, table, count, "globalPid", *times, "deviceId", *ends)
    if not len(calls) or not len(rows):
        return np.empty((4, 0), np.int64)
    threads, ids, call_start, call_end = calls
    pids, wanted, start, end, device, *kinds = rows
    _, process = number_ids(np.append(threads, pids) >> 24)
    keys = process.astype(np.int64) << 40 | np.append(ids, wanted) & (1 << 40) - 1
    keys, wanted = np.split(keys, [len(ids)])
    order = np.argsort(keys, kind="stable")
    at = order[np.searchsorted(keys[order], wanted).clip(max=len(keys) - 1)]
    timed = (keys[at] == wanted) & (start != 0) & (start != -1)
    waits = (kinds[0] == _TO_HOST) & (kinds[1] == _PAGEABLE) if kinds else np.zeros_like(timed)
    gpu = process[len(ids) :].astype(np.int64) << 16 | device & 0xFFFF
    rows = np.stack([gpu, start - call_start[at], waits, end - call_end[at]])
    return rows[:, timed]


def _first(database: Database, table: str, count: int, *columns: str) -> Ints:
    """Return columns of the first rows of a table; none where any is missing."""
    bounds = database.row_bounds(table) if database.has(table, *columns) else None
    if bounds is None:
        return np.empty((0, 0), np.int64)
    query = Query(table, {n: Value.of(n) for n in columns}, dict.fromkeys(columns, np.int64))
    read = read_integers(database, query, None, (bounds[0], min(bounds[0] + count, bounds[1] + 1)))
    return np.stack([read[name] for name in columns])
