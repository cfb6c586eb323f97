"""GPU operations, read once, classified, and sorted by GPU.

Kernels that exchange data are known by their names, or else by what happens around them, as lists
of names fail at each fork of a library: they are launched within a call that is known as an
exchange's, or a profiler lists them with their message. Or they show it across GPUs: an exchange
ends nowhere before it has begun everywhere, and it ends at the same time on all GPUs, however late
some of them came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from enum import IntEnum
from functools import cached_property
from itertools import pairwise, repeat
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, read_calls, thread_keys
from gputrace.analyzers.grouping import median
from gputrace.analyzers.kernel_names import family_of, is_communication
from gputrace.errors import InputError
from gputrace.model.events import (
    GPU_KINDS,
    UNKNOWN,
    Events,
    Kind,
    Mask,
    concatenate,
    distinct_ids,
    is_among,
    number_ids,
    order_by_group,
)
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.options import Window
from gputrace.model.struct import Struct
from gputrace.model.time_class import BUSY_CLASSES
from gputrace.model.trace import Coverage, Progress, Trace

COLUMNS: Final = ("start", "end", "kind", "name", "process", "device", "correlation", "bytes")
"""Columns of GPU operations that analyzers need."""


def columns_of(trace: Trace) -> tuple[str, ...]:
    """Return the `COLUMNS`, with ``node`` where it is known who captured nodes of CUDA graphs."""
    return (*COLUMNS, "node") if Kind.GRAPH_NODE in trace.kinds else COLUMNS


class GpuOperations(Struct, frozen=True, dict=True):
    """Operations of one GPU, in order of start; at least one."""

    gpu: Gpu
    events: Events
    """Events with the columns of `columns_of`."""
    classes: NDArray[np.int8]
    """`OperationClass` of each."""
    coverage: Coverage = Coverage()
    """When the GPU's process was recorded."""

    @property
    def start(self) -> Times:
        return self.events.start

    @property
    def end(self) -> Times:
        return self.events.end

    @property
    def span(self) -> Window:
        """Window from the first start to the last end."""
        return Window(int(self.start[0]), int(self.reach[-1]))

    @cached_property
    def kernel_names(self) -> NDArray[np.int64]:
        """Distinct ids of the names of kernels, in order."""
        return distinct_ids(self.events.name[self.events.kind == Kind.KERNEL])

    @cached_property
    def reach(self) -> Times:
        """Moments at which each operation and all before it had ended."""
        return np.maximum.accumulate(self.events.end)

    @cached_property
    def recorded(self) -> Intervals:
        """Intervals from the first operation's start to the last one's end in each window.

        What a GPU does at the edges of a window was issued outside, and is mostly not known.
        """
        if len(self.coverage.windows) < 2:
            return union([self.start[0]], [self.reach[-1]])
        if self.coverage.has_edges:
            return union(*zip(*self.coverage.windows, strict=True))
        begins = [window.start for window in self.coverage.windows]
        index = np.maximum(np.searchsorted(begins, self.start, "right") - 1, 0)
        first = np.flatnonzero(np.diff(index, prepend=-1))
        last = np.append(first[1:], len(index)) - 1
        return union(self.start[first], self.reach[last])

    def moved(self, ns: int) -> GpuOperations:
        """Return the operations, shifted by nanoseconds."""
        if not ns:
            return self
        events = self.events
        arrays = {name: getattr(events, name) for name in events.columns}
        arrays |= {"start": events.start + ns, "end": events.end + ns}
        return replace(self, events=Events(arrays), coverage=self.coverage.moved(ns))

    def __len__(self) -> int:
        return len(self.events)


class GpuSummary(Struct, frozen=True, dict=True):
    """Summary of the operations of one GPU."""

    gpu: Gpu
    span: Window
    coverage: Coverage
    recorded: Intervals
    """These three as of `GpuOperations`."""
    kinds: frozenset[Kind]
    communicates: bool
    """True if any operation does."""
    names: NDArray[np.int64]
    """Distinct ids of the names of all operations, in order."""
    kernels: NDArray[np.int64]
    """Number of kernels."""
    computing: NDArray[np.int64]
    """Number of kernels that compute."""

    @classmethod
    def of(cls, operations: GpuOperations) -> GpuSummary:
        """Summarize the operations of a GPU."""
        kinds, names, classes = operations.events.kind, operations.events.name, operations.classes
        kernels = kinds == Kind.KERNEL
        return cls(
            operations.gpu,
            operations.span,
            operations.coverage,
            operations.recorded,
            frozenset(map(Kind, distinct_ids(kinds).tolist())),
            bool((classes == OperationClass.COMMUNICATION).any()),
            distinct_ids(names),
            operations.kernel_names,
            distinct_ids(names[kernels & (classes == OperationClass.COMPUTE)]),
        )


def read_operations(trace: Trace, progress: Progress | None = None) -> list[GpuOperations]:
    """Return the operations of every active GPU, in order of GPU.

    Peer copies are on both their GPUs.
    """
    columns = columns_of(trace)
    events = both_ends(trace, trace.events(GPU_KINDS, columns, progress=progress))
    if not len(events):
        return []
    classes = classify(trace, events)
    gpus, gpu_index = find_gpus(trace, events)
    rows, edges = order_by_group(gpu_index, len(gpus), events.start)
    events, classes = events.having(*columns).take_away(rows), classes.take(rows)
    operations = [
        GpuOperations(
            gpu, events.select(slice(first, end)), classes[first:end], trace.coverage(gpu.process)
        )
        for gpu, (first, end) in zip(gpus, pairwise(edges.tolist()), strict=True)
    ]
    return with_unnamed_exchanges(trace, operations)


class OperationClass(IntEnum):
    """Classes of busy GPU time, in order of precedence: of two at a time, the first counts."""

    COMPUTE = BUSY_CLASSES.index("compute")
    COMMUNICATION = BUSY_CLASSES.index("communication")
    H2D = BUSY_CLASSES.index("h2d")
    OTHER_COPY = BUSY_CLASSES.index("other_copy")
    MEMSET = BUSY_CLASSES.index("memset")


_CLASS_OF_KIND: Final = {
    Kind.KERNEL: OperationClass.COMPUTE,
    Kind.GRAPH: OperationClass.COMPUTE,
    Kind.COPY_H2D: OperationClass.H2D,
    Kind.COPY_D2H: OperationClass.OTHER_COPY,
    Kind.COPY_D2D: OperationClass.OTHER_COPY,
    Kind.COPY_PEER: OperationClass.COMMUNICATION,
    Kind.COPY_OTHER: OperationClass.OTHER_COPY,
    Kind.MEMSET: OperationClass.MEMSET,
}


def classify(trace: Trace, events: Events) -> NDArray[np.int8]:
    """Return the `OperationClass` of each GPU operation, by its ``kind`` and ``name``."""
    of_kind = np.zeros(max(_CLASS_OF_KIND) + 1, np.int8)
    for kind, operation_class in _CLASS_OF_KIND.items():
        of_kind[kind] = operation_class
    classes = of_kind.take(events.kind)
    names = trace.names(distinct_ids(events.name[events.kind == Kind.KERNEL]))
    collectives = [id for id, text in names.items() if is_communication(text)]
    if collectives:
        communicates = is_among(events.name, collectives) & (events.kind == Kind.KERNEL)
        classes[communicates] = OperationClass.COMMUNICATION
    return classes


_PEER_COLUMNS: Final = ("source_device", "destination_device")


class Gpu(Struct, frozen=True):
    """GPU, as results name it."""

    gpu: int
    """Physical index where ``gpu_known``, else the CUDA ordinal; where another GPU of the rank has
    that number, the next free one."""
    gpu_known: bool
    device: int
    """CUDA ordinal in the process that uses the GPU most, of those that mark steps if some do."""
    process: int
    """Index of that process."""
    rank: int
    """Rank of that process: as recorded, else its position in the order of GPUs."""
    rank_known: bool
    name: str
    """Model of the card; empty if unknown."""
    host: int
    """Index of the host."""
    host_name: str
    """Name of the host; empty if unknown."""
    pairs: tuple[tuple[int, int], ...]
    """All pairs (process, device) that are this GPU."""


def both_ends(trace: Trace, events: Events) -> Events:
    """Return the events, with each peer copy also on the GPU at its other end."""
    if not (events.kind == Kind.COPY_PEER).any():
        return events
    return concatenate([events, other_ends(trace, events.columns)], events.columns)


def other_ends(trace: Trace, columns: Sequence[str]) -> Events:
    """Return the peer copies of a trace as events of the GPU at their other end."""
    peers = trace.events([Kind.COPY_PEER], [*columns, *_PEER_COLUMNS])
    arrays = {name: getattr(peers, name) for name in columns}
    source, destination = peers.source_device, peers.destination_device
    arrays["device"] = np.where(peers.device == source, destination, source)
    if "gpu" in columns:
        pairs = list(zip(arrays["process"].tolist(), arrays["device"].tolist(), strict=True))
        known = {pair: trace.device(*pair).gpu for pair in set(pairs)}
        arrays["gpu"] = np.array([known[pair] for pair in pairs], np.int16)
    return Events(arrays).select((arrays["device"] != peers.device) & (arrays["device"] >= 0))


def find_gpus(trace: Trace, events: Events) -> tuple[list[Gpu], NDArray[np.int32]]:
    """Return the active GPUs, in order of host and index, and the index of each event's GPU.

    Needs the columns ``process`` and ``device``.
    """
    distinct, where = number_ids(pair_keys(events))
    pairs = [pair_of(key) for key in distinct.tolist()]
    gpus = group_gpus(trace, dict(zip(pairs, np.bincount(where).tolist(), strict=True)))
    owner = {pair: index for index, gpu in enumerate(gpus) for pair in gpu.pairs}
    return gpus, np.array([owner[pair] for pair in pairs], np.int32).take(where)


_Pair = tuple[int, int]


def pair_keys(events: Events) -> NDArray[np.int32]:
    """Return a number for the process and the device of each event; needs these columns."""
    return events.process.astype(np.int32) << 16 | events.device.astype(np.int32) & 0xFFFF


def pair_of(key: int) -> _Pair:
    """Return the process and the device of a number of `pair_keys`."""
    return key >> 16, int(np.int16(np.uint16(key & 0xFFFF)))


MOST_GPUS: Final = 1 << 12
"""Maximum number of GPUs of a host; analysis compares each with the others."""


def group_gpus(trace: Trace, work: Mapping[_Pair, int]) -> list[Gpu]:
    """Return the GPUs in order of host and index, given counts of events by (process, device).

    No two have the same number and rank. Raises InputError if a host has more than `MOST_GPUS`.
    """
    groups = _group(trace, work)
    on_host = Counter(trace.processes[pairs[0][0]].host for pairs in groups)
    if (most := max(on_host.values(), default=0)) > MOST_GPUS:
        raise InputError(
            trace.title,
            f"operations on {most:,} GPUs of one host, of {MOST_GPUS:,} at most; the device ids "
            "look damaged: record again",
        )
    ranks, stepping = _ranks(trace, work), set[int]()
    if Kind.STEP in trace.kinds:
        stepping = set(distinct_ids(trace.events([Kind.STEP], ["process"]).process).tolist())
    by_name: dict[tuple[int, int], Gpu] = {}
    # Where the cards of some devices alone are known, an ordinal may be the index of another card.
    for gpu in sorted(
        (_gpu(trace, pairs, ranks, work, stepping) for pairs in groups),
        key=lambda gpu: not gpu.gpu_known,
    ):
        numbers = range(gpu.gpu, gpu.gpu + len(by_name) + 1)
        number = next(n for n in numbers if (n, gpu.rank) not in by_name)
        known = gpu.gpu_known and number == gpu.gpu
        by_name[number, gpu.rank] = replace(gpu, gpu=number, gpu_known=known)
    return sorted(by_name.values(), key=order_of)


def order_of(gpu: Gpu) -> tuple[int, bool, int, int]:
    """Return the sort key of a GPU: host and index."""
    return gpu.host, gpu.gpu_known, gpu.gpu, gpu.rank


def _group(trace: Trace, work: Mapping[_Pair, int]) -> list[list[_Pair]]:
    """Group the pairs of process and device that are one card.

    Where the card is not recorded, processes of a host that mostly use different ordinals see the
    same numbering, so equal ordinals are one card; processes that mostly use the same ordinal each
    see their own (CUDA_VISIBLE_DEVICES set for each), so they are different cards.
    """
    main = _main_devices(work)
    placement = {process: (trace.processes[process].host, main[process]) for process in main}
    shared = Counter(placement.values())
    hosts = {host for (host, _), processes in shared.items() if processes > 1}
    alone = {process for process, (host, _) in placement.items() if host in hosts}
    groups: dict[tuple[str, int, int, str], list[_Pair]] = {}
    for process, ordinal in work:
        device = trace.device(process, ordinal)
        host = trace.processes[process].host
        if device.gpu != UNKNOWN:
            key = ("card", host, device.gpu, device.uuid)
        elif process in alone:
            key = ("ordinal of a process", process, ordinal, "")
        else:
            key = ("ordinal of a host", host, ordinal, "")
        groups.setdefault(key, []).append((process, ordinal))
    return list(groups.values())


def _main_devices(work: Mapping[_Pair, int]) -> dict[int, int]:
    """Return the device that each process uses most."""
    main: dict[int, int] = {}
    for (process, device), count in work.items():
        if process not in main or count > work[process, main[process]]:
            main[process] = device
    return main


def _ranks(trace: Trace, work: Mapping[_Pair, int]) -> dict[int, tuple[int, bool]]:
    """Return the rank of each process, and True if recorded; if not, by host, main GPU and pid."""
    recorded = {process: trace.processes[process].rank for process, _ in work}
    if all(rank != UNKNOWN for rank in recorded.values()):
        return {process: (rank, True) for process, rank in recorded.items()}
    main = _main_devices(work)

    def sort_key(process: int) -> tuple[int, int, int]:
        device = trace.device(process, main[process])
        gpu = device.gpu if device.gpu != UNKNOWN else device.device
        return trace.processes[process].host, gpu, trace.processes[process].pid

    ordered = sorted(main, key=sort_key)
    return {process: (rank, False) for rank, process in enumerate(ordered)}


def _gpu(
    trace: Trace,
    pairs: list[_Pair],
    ranks: dict[int, tuple[int, bool]],
    work: Mapping[_Pair, int],
    stepping: Set[int],
) -> Gpu:
    # An engine beside the trainer may do more on the card.
    process, ordinal = max(pairs, key=lambda pair: (pair[0] in stepping, work[pair]))
    device = trace.device(process, ordinal)
    rank, rank_known = ranks[process]
    known = device.gpu != UNKNOWN
    return Gpu(
        gpu=device.gpu if known else ordinal,
        gpu_known=known,
        device=ordinal,
        process=process,
        rank=rank,
        rank_known=rank_known,
        name=device.name,
        host=trace.processes[process].host,
        host_name=trace.processes[process].host_name,
        pairs=tuple(sorted(pairs)),
    )


_WORTH_A_LOOK: Final = 1 / 100
"""Part of a GPU's kernel time from which on a name is looked into."""
_MOST_KERNELS: Final = 0.9
"""Part of the kernels of a name that must show it: a recording may begin in the midst of one."""
_FEWEST_EXCHANGES: Final = 5
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


def with_unnamed_exchanges(trace: Trace, operations: list[GpuOperations]) -> list[GpuOperations]:
    """Return the operations; kernels of `exchanging_names` and `exchanging_copies` communicate."""
    events = [each.events for each in operations]
    names, copies = exchanging_names(trace, events), exchanging_copies(trace, events)
    if not names and not copies:
        return operations
    marked = []
    for each, copied in zip(operations, copies or repeat(False), strict=False):
        exchanges = is_among(each.events.name, names) & (each.events.kind == Kind.KERNEL) | copied
        classes = np.where(exchanges, np.int8(OperationClass.COMMUNICATION), each.classes)
        marked.append(replace(each, classes=classes))
    return marked


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
        limit = max(_WORTH_A_LOOK * int(took[events.kind == Kind.KERNEL].sum()), 1)
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
    long = ids[took >= _WORTH_A_LOOK * took.sum()]
    return [id for id, text in trace.names(long).items() if family_of(text) == "other"]


def _end_together(gpus: Sequence[Events], rows: Sequence[NDArray[np.intp]]) -> bool:
    """Return whether the kernels of a name start apart on GPUs, but end together."""
    on = [(gpu, mine) for gpu, mine in zip(gpus, rows, strict=True) if len(mine)]
    if len(on) < 2 or len({len(mine) for _, mine in on}) > 1 or len(on[0][1]) < _FEWEST_EXCHANGES:
        return False
    start = np.array([gpu.start[mine] for gpu, mine in on])
    end = np.array([gpu.end[mine] for gpu, mine in on])
    overlap = np.mean(end.min(axis=0) >= start.max(axis=0))
    apart, together = median(np.ptp(start, axis=0)), median(np.ptp(end, axis=0))
    return bool(overlap >= _MOST_KERNELS and together * _CLOSER < apart)


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
        if np.concatenate(among).mean() >= _MOST_KERNELS:
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
    return {id for id, each in known.items() if len(each) and each.mean() >= _MOST_KERNELS}


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
    named = trace.matches(ranges.name, pattern)
    ranges = ranges.select(named | (ranges.kind == Kind.MESSAGE))
    calls = read_calls(trace) if len(ranges) else None
    if calls is None:
        return []
    keys, found = thread_keys(ranges), []
    for events, mine in zip(gpus, rows, strict=True):
        issued = calls.issued_by(events, mine)
        threads = np.where(issued == NOBODY, -1, calls.thread[issued])
        within = np.where(issued == NOBODY, np.int8(-1), np.int8(0))
        for number in distinct_ids(threads[threads >= 0]).tolist():
            process, thread = calls.threads[number]
            around = ranges.select(keys == (process << 32 | thread & 0xFFFFFFFF))
            on = threads == number
            within[on] = union(around.start, around.end).contains(calls.start[issued[on]])
        found.append(within)
    return found
