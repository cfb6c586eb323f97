"""Kernels that exchange data between GPUs, known by what happens around them where no name says so.

Lists of names fail at each fork of a library. These kernels are launched within a call that is
known as an exchange's, or a profiler lists them with their message. Else they show it across GPUs:
an exchange ends nowhere before it has begun everywhere, and it ends at the same time on all GPUs,
however late some of them came.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import (
    NOBODY,
    CudaApiCalls,
    by_thread,
    read_calls,
    thread_keys,
)
from gputrace.analyzers.kernel_names import family_of
from gputrace.model.events import (
    UNKNOWN,
    Events,
    Kind,
    Mask,
    distinct_ids,
    is_among,
    number_ids,
)
from gputrace.model.intervals import union
from gputrace.model.trace import Trace

_PART_OF_TIME: Final = 1 / 100
"""Part of a GPU's kernel time from which on a name is looked into."""
_LOOKED_AT: Final = 64
"""Launches of a name that are looked up."""
_BEFORE: Final = 256
"""Ranges before a launch that may be around it."""
_MOST: Final = 0.9
"""Part of the kernels of a name that must show it: a recording may begin in the midst of one."""
_FEWEST: Final = 5
"""Exchanges by which GPUs can show that they end together."""
_CLOSER: Final = 4
"""How many times closer together the ends lie than the starts. In recordings of two to four GPUs
they lie 9 to 600 times as close for NCCL's all-reduces, all-gathers and reduce-scatters, and less
than twice as close for kernels that compute. Broadcasts and sends do not end together."""
_NCCL_CALL: Final = r"^p?nccl[A-Z]"
_EXCHANGES: Final = (
    r"(?i)^p?nccl(all|broadcast|bcast|reduce|gather|scatter|send|recv|groupend)|^nccl:|^c10d::"
    r"|^record_param_comms|^mpi_i?(all|bcast|reduce|send|recv|gather|scatter)"
    r"|^(nvshmem|rocshmem)|(^|[:.])(all_?(reduce|gather|to_?all)|reduce_?scatter)(?![a-z0-9])"
    r"|[:.](dispatch|combine)(?![a-z0-9])"
)


def exchanging_names(trace: Trace, gpus: Sequence[Events]) -> list[int]:
    """Return the ids of the names of kernels that exchange data although their names do not say so.

    Only names of no known family are looked into. ``gpus`` has the operations of each GPU, with
    the columns ``start, end, kind, name, process, correlation``.
    """
    unknown = sorted({id for events in gpus for id in _unknown_names(trace, events)})
    if not unknown:
        return []
    rows = {
        id: [np.flatnonzero((gpu.name == id) & (gpu.kind == Kind.KERNEL)) for gpu in gpus]
        for id in unknown
    }
    found = {id for id in unknown if _end_together(gpus, rows[id])}
    rest = {id: rows[id] for id in unknown if id not in found}
    return sorted(found | _listed(trace, gpus, rest) | _launched_by_exchanges(trace, gpus, rest))


def exchanging_copies(trace: Trace, gpus: Sequence[Events]) -> list[Mask]:
    """Return masks of the copies that NCCL's own calls issue, in a run of several GPUs; empty if
    there are none.

    Its copy engines write into memory of other GPUs that is mapped into the process's own, which
    profilers may take for a copy within a GPU.
    """
    copied = [np.flatnonzero(events.kind == Kind.COPY_D2D) for events in gpus]
    part = [
        int((events.end - events.start)[rows].sum())
        >= _PART_OF_TIME * int((events.end - events.start)[events.kind == Kind.KERNEL].sum())
        for events, rows in zip(gpus, copied, strict=True)
        if len(rows)
    ]
    if len(gpus) < 2 or not any(part) or Kind.RANGE not in trace.kinds:
        return []
    ranges = trace.events([Kind.RANGE], ("start", "end", "name", "process", "thread"))
    ids = list(trace.search(distinct_ids(ranges.name), _NCCL_CALL))
    ranges = ranges.select(is_among(ranges.name, ids)) if ids else ranges.select(slice(0))
    calls = read_calls(trace) if len(ranges) else None
    if calls is None:
        return []
    keys = thread_keys(ranges)
    masks = [np.zeros(len(events), bool) for events in gpus]
    for events, rows, mask in zip(gpus, copied, masks, strict=True):
        issued = calls.issued_by(events.select(rows))
        rows, issued = rows[issued != NOBODY], issued[issued != NOBODY]
        for number in distinct_ids(calls.thread[issued]).tolist():
            process, thread = calls.threads[number]
            mine = ranges.select(keys == (process << 32 | thread & 0xFFFFFFFF))
            on = calls.thread[issued] == number
            mask[rows[on]] = union(mine.start, mine.end).contains(calls.start[issued[on]])
    return masks if any(mask.any() for mask in masks) else []


def _unknown_names(trace: Trace, events: Events) -> list[int]:
    kernels = events.kind == Kind.KERNEL
    if not kernels.any():
        return []
    ids, index = number_ids(events.name[kernels])
    took = np.bincount(index, (events.end - events.start)[kernels])
    long = ids[took >= _PART_OF_TIME * took.sum()]
    return [id for id, text in trace.names(long).items() if family_of(text) == "other"]


def _end_together(gpus: Sequence[Events], rows: Sequence[NDArray[np.intp]]) -> bool:
    """Return whether the kernels of a name start apart on GPUs, but end together."""
    on = [(gpu, mine) for gpu, mine in zip(gpus, rows, strict=True) if len(mine)]
    if len(on) < 2 or len({len(mine) for _, mine in on}) > 1 or len(on[0][1]) < _FEWEST:
        return False
    start = np.array([gpu.start[mine] for gpu, mine in on])
    end = np.array([gpu.end[mine] for gpu, mine in on])
    overlap = np.mean(end.min(axis=0) >= start.max(axis=0))
    apart, together = np.median(np.ptp(start, axis=0)), np.median(np.ptp(end, axis=0))
    return bool(overlap >= _MOST and together * _CLOSER < apart)


def _listed(
    trace: Trace, gpus: Sequence[Events], rows: dict[int, list[NDArray[np.intp]]]
) -> set[int]:
    """Return the names whose kernels a profiler lists as exchanges, with their times on the GPU."""
    if Kind.MESSAGE not in trace.kinds:
        return set()
    messages = trace.events([Kind.MESSAGE], ("start", "process", "thread"))
    listed = messages.select(messages.thread == UNKNOWN)
    starts = {p: listed.start[listed.process == p] for p in distinct_ids(listed.process).tolist()}
    found = set()
    for id, each in rows.items():
        among = [
            np.isin(gpu.start[mine], starts.get(int(gpu.process[mine[0]]), ()))
            for gpu, mine in zip(gpus, each, strict=True)
            if len(mine)
        ]
        if np.concatenate(among).mean() >= _MOST:
            found.add(id)
    return found


def _launched_by_exchanges(
    trace: Trace, gpus: Sequence[Events], rows: dict[int, list[NDArray[np.intp]]]
) -> set[int]:
    """Return the names of which the kernels are launched within calls and ranges of exchanges."""
    kinds = trace.kinds & {Kind.MESSAGE, Kind.RANGE}
    calls = read_calls(trace) if kinds and rows else None
    if calls is None:
        return set()
    ranges = by_thread(trace.events(kinds, ("start", "end", "kind", "name", "process", "thread")))
    keys = thread_keys(ranges)
    around: dict[int, list[set[int]]] = {}
    for id, each in rows.items():
        issued = [
            calls.issued_by(gpu.select(mine[:: max(1, len(mine) // _LOOKED_AT)]))
            for gpu, mine in zip(gpus, each, strict=True)
        ]
        known = [call for call in np.concatenate(issued).tolist() if call != NOBODY]
        around[id] = [_names_around(ranges, keys, calls, call) for call in known]
    ids = {id for each in around.values() for names in each for id in names}
    texts = trace.names(np.array(sorted(ids), np.int64))
    exchanges = {id for id, text in texts.items() if re.search(_EXCHANGES, text[:200])}
    if Kind.MESSAGE in kinds:
        exchanges |= set(distinct_ids(ranges.name[ranges.kind == Kind.MESSAGE]).tolist())
    return {
        id
        for id, each in around.items()
        if each and sum(not exchanges.isdisjoint(names) for names in each) >= _MOST * len(each)
    }


def _names_around(
    ranges: Events, keys: NDArray[np.int64], calls: CudaApiCalls, call: int
) -> set[int]:
    """Return the ids of the names of the ranges around a call, of those that began just before."""
    process, thread = calls.threads[calls.thread[call]]
    first = int(np.searchsorted(keys, process << 32 | thread & 0xFFFFFFFF))
    last = int(np.searchsorted(keys, process << 32 | thread & 0xFFFFFFFF, "right"))
    start = calls.start[call]
    last = first + int(np.searchsorted(ranges.start[first:last], start, "right"))
    first = max(first, last - _BEFORE)
    return set(ranges.name[first:last][ranges.end[first:last] >= start].tolist())
