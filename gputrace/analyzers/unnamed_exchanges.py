"""Kernels that exchange data between GPUs, known by what happens around them where no name says so.

Lists of names fail at each fork of a library. These kernels are launched within a call that is
known as an exchange's, or a profiler lists them with their message. Else they show it across GPUs:
an exchange ends nowhere before it has begun everywhere, and it ends at the same time on all GPUs,
however late some of them came.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, read_calls, thread_keys
from gputrace.analyzers.grouping import median
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
    rows = [np.flatnonzero(events.kind == Kind.COPY_D2D) for events in gpus]
    is_long = False
    for events, mine in zip(gpus, rows, strict=True):
        took = events.end - events.start
        limit = max(_PART_OF_TIME * int(took[events.kind == Kind.KERNEL].sum()), 1)
        is_long |= int(took[mine].sum()) >= limit
    if len(gpus) < 2 or not is_long:
        return []
    within = _issued_within(trace, gpus, rows, {Kind.RANGE}, _NCCL_CALL)
    masks = [np.zeros(len(events), bool) for events in gpus]
    for mask, mine, each in zip(masks, rows, within, strict=False):
        mask[mine] = each > 0
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
    apart, together = median(np.ptp(start, axis=0)), median(np.ptp(end, axis=0))
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
    every = [np.concatenate(each) for each in zip(*rows.values(), strict=True)]
    kinds = {Kind.MESSAGE, Kind.RANGE}
    within = _issued_within(trace, gpus, every, kinds, _EXCHANGES)
    parts: dict[int, list[NDArray[np.int8]]] = {id: [] for id in rows}
    for gpu, mine, each in zip(gpus, every, within, strict=False):
        for id in rows:
            parts[id].append(each[(gpu.name[mine] == id) & (each >= 0)])
    known = {id: np.concatenate(each) for id, each in parts.items() if each}
    return {id for id, each in known.items() if len(each) and each.mean() >= _MOST}


def _issued_within(
    trace: Trace,
    gpus: Sequence[Events],
    rows: Sequence[NDArray[np.intp]],
    kinds: Collection[Kind],
    pattern: str,
) -> list[NDArray[np.int8]]:
    """Return, of rows of each GPU, 1 where the call that issued them is in a message, or in a range
    whose name a pattern matches; 0 where it is not, -1 where it is unknown. Empty without any.
    """
    kinds = trace.kinds & set(kinds)
    if not kinds or not any(map(len, rows)):
        return []
    ranges = trace.events(kinds, ("start", "end", "kind", "name", "process", "thread"))
    named = list(trace.search(distinct_ids(ranges.name), pattern))
    ranges = ranges.select(is_among(ranges.name, named) | (ranges.kind == Kind.MESSAGE))
    calls = read_calls(trace) if len(ranges) else None
    if calls is None:
        return []
    keys, found = thread_keys(ranges), []
    for events, mine in zip(gpus, rows, strict=True):
        issued = calls.issued_by(events.select(mine))
        threads = np.where(issued == NOBODY, -1, calls.thread[issued])
        within = np.where(issued == NOBODY, np.int8(-1), np.int8(0))
        for number in distinct_ids(threads[threads >= 0]).tolist():
            process, thread = calls.threads[number]
            around = ranges.select(keys == (process << 32 | thread & 0xFFFFFFFF))
            on = threads == number
            within[on] = union(around.start, around.end).contains(calls.start[issued[on]])
        found.append(within)
    return found
