"""Communicators: which kernel moves which message in which group of ranks, and what the group does.

NCCL and RCCL describe each call in a payload (collectors, nsys), PyTorch's profiler each kernel.
What a group is for follows from its name, where the program gave one that says so, else from what
its members exchange, how often, how much and where in a step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, CudaApiCalls
from gputrace.analyzers.gpu_shards import GpuShardView, Shard
from gputrace.analyzers.kernel_names import function_name
from gputrace.model.events import UNKNOWN, Events, Kind, Mask, distinct_ids
from gputrace.model.struct import Struct
from gputrace.sanitize import bounded

ALL_TO_ALL: Final = "AllToAll"
SEND_RECV: Final = "SendRecv"
_OPERATION: Final = r"""(?xi)
    (?P<AllReduce> all_?reduce | cross_device_reduce) | (?P<AllGather> all_?gather)
    | (?P<ReduceScatter> reduce_?scatter) | (?P<AllToAll> all_?to_?all)
    | (?P<Broadcast> broadcast | bcast) | (?P<SendRecv> send_?recv | (^|nccl)(send|recv)$)
    | (?P<Reduce> reduce)
    """


_NAMED: Final = tuple(re.compile(_OPERATION).groupindex)
_HALVES: Final = ("Send", "Recv")


def operation_of(name: str) -> str:
    """Return ``AllReduce`` and so on by the name of a kernel; else its name without parameters."""
    base = function_name(name) or name
    match = re.search(_OPERATION, base)
    return match.lastgroup if match and match.lastgroup else base


class Communicator(Struct, frozen=True, dict=True):
    """A group of ranks that communicate, as one process sees it."""

    id: int
    size: int
    """Number of ranks; 0 if unknown."""
    place: int
    """Rank of the process in it; `UNKNOWN` if unknown."""
    name: str
    """Name that the program gives it; empty if it gives none."""


class Messages(NamedTuple):
    """Messages of some kernels of one GPU, as far as they are known.

    Attributes:
        communicator: id, by kernel; `UNKNOWN` if unknown.
        bytes: size in the sense of nccl-tests, by kernel; `UNKNOWN` if unknown.
        operation: operation by kernel that the host knows better than the kernel's name; else
            empty. A kernel of RCCL's is ``ncclDevKernel_Generic``, whatever it does.
        kernel, sends, peer: of each half of a point-to-point message, the kernel (its index),
            whether it sends, and the peer's rank in the communicator.
        communicators: those of the process.
    """

    communicator: NDArray[np.int64]
    bytes: NDArray[np.int64]
    operation: NDArray[np.object_]
    kernel: NDArray[np.int64]
    sends: Mask
    peer: NDArray[np.int64]
    communicators: tuple[Communicator, ...]


_TOTAL_IS: Final = frozenset(("AllGather", "ReduceScatter", "AllToAll"))
"""Operations whose size in nccl-tests is that of all ranks' parts, where NCCL's payload has one."""


class _Log(Struct, frozen=True, dict=True):
    """Messages of all processes of a shard, in order of process, thread and start."""

    events: Events
    operations: NDArray[np.object_]
    """Operation of each, with ``Send`` and ``Recv`` apart."""
    sizes: dict[int, int]
    """Number of ranks by communicator."""
    communicators: dict[int, tuple[Communicator, ...]]
    """Communicators by process."""


_FEW: Final = 3
_COLUMNS: Final = (
    *("start", "end", "kind", "name", "process", "device", "stream", "thread"),
    *("correlation", "bytes"),
)


def _read_log(shard: Shard) -> _Log | None:
    trace = shard.trace
    kinds = trace.kinds & {Kind.MESSAGE, Kind.COMMUNICATOR}
    if not kinds:
        return None
    events = trace.events(kinds, _COLUMNS)
    makes = events.select(events.kind == Kind.COMMUNICATOR)
    messages = events.select(events.kind == Kind.MESSAGE)
    texts = trace.names(distinct_ids(events.name))
    known: dict[int, dict[int, Communicator]] = defaultdict(dict)
    columns = (makes.process, makes.correlation, makes.bytes, makes.device, makes.name)
    for process, id, size, place, name in zip(*(c.tolist() for c in columns), strict=True):
        text = texts[name]
        given = "" if text.startswith(("nccl", "<name ")) else bounded(text)
        if id not in (0, UNKNOWN):
            known[process][id] = Communicator(id, max(size, 0), place, given)
    messages = messages.select(np.lexsort((messages.start, messages.thread, messages.process)))
    names = {}
    for id, text in texts.items():
        half = re.search(r"(?:^|nccl)(send|recv)$", text, re.IGNORECASE)
        names[id] = half[1].title() if half else operation_of(text)
    return _Log(
        messages,
        np.array([names[id] for id in messages.name.tolist()], object),
        {id: each.size for mine in known.values() for id, each in mine.items()},
        {process: tuple(mine.values()) for process, mine in known.items()},
    )


def read_messages(view: GpuShardView, kernels: Events, operations: Sequence[str]) -> Messages:
    """Return what is known of the messages of kernels, in order of start.

    ``kernels`` have the columns ``start, end, process, stream, correlation, bytes``, and
    ``operations`` those of each by its name.
    """
    log: _Log | None = view.once(_read_log)
    if log is None:
        unknown, none = np.full(len(kernels), UNKNOWN, np.int64), np.empty(0, np.int64)
        named = np.full(len(kernels), "", object)
        return Messages(unknown, kernels.bytes.copy(), named, none, none > 0, none, ())
    matching, events = _Matching(log, kernels, operations), log.events
    processes = distinct_ids(kernels.process).tolist()
    for process in processes:
        rows = np.flatnonzero(kernels.process == process)
        mine = np.flatnonzero(events.process == process)
        is_on_gpu = events.thread[mine] == UNKNOWN
        if is_on_gpu.any():
            matching.match_on_gpu(rows, mine[is_on_gpu])
        if not is_on_gpu.all():
            matching.match_on_host(view.calls, process, rows, mine[~is_on_gpu])
    halves = np.array(matching.halves, np.int64).reshape(-1, 3)
    return Messages(
        matching.communicator,
        matching.bytes,
        matching.operation,
        halves[:, 0],
        halves[:, 1] > 0,
        halves[:, 2],
        tuple(c for process in processes for c in log.communicators.get(process, ())),
    )


class _Matching:
    """Messages of the kernels of one GPU, collected while they are matched with NCCL's calls."""

    def __init__(self, log: _Log, kernels: Events, operations: Sequence[str]) -> None:
        self._log, self._kernels, self._operations = log, kernels, operations
        self.communicator = np.full(len(kernels), UNKNOWN, np.int64)
        self.bytes = kernels.bytes.copy()
        self.operation = np.full(len(kernels), "", object)
        self._unnamed = np.array([name not in _NAMED for name in operations], bool)
        self.halves: list[tuple[int, int, int]] = []

    def match_on_gpu(self, rows: NDArray[np.int64], on_gpu: NDArray[np.int64]) -> None:
        """Match kernels with the events that have their times on the GPU."""
        kernels, events = self._kernels, self._log.events
        keys = zip(kernels.start[rows].tolist(), kernels.end[rows].tolist(), strict=True)
        kernel_of = dict(zip(keys, rows.tolist(), strict=True))
        spans = zip(events.start[on_gpu].tolist(), events.end[on_gpu].tolist(), strict=True)
        pairs = [
            (kernel_of[span], row)
            for span, row in zip(spans, on_gpu.tolist(), strict=True)
            if span in kernel_of
        ]
        matched = np.array(pairs, np.int64).reshape(-1, 2)
        self._take_each(matched[:, 0], matched[:, 1])

    def match_on_host(
        self,
        calls: CudaApiCalls | None,
        process: int,
        rows: NDArray[np.int64],
        on_host: NDArray[np.int64],
    ) -> None:
        """Match NCCL's calls with the kernels launched in them, or at the end of their group.

        A kernel whose launch was not recorded gets the call of the same number, if there are
        equally many of its operation.
        """
        log, events, operations = self._log, self._log.events, self._operations
        issued = np.full(len(rows), NOBODY, np.int64)
        if calls is not None:
            issued = calls.issued_by(self._kernels, rows)
        used = np.zeros(len(events), bool)
        launched = np.flatnonzero(issued != NOBODY)
        threads = calls.thread[issued[launched]] if calls is not None else np.empty(0, np.int32)
        for number in distinct_ids(threads).tolist():
            assert calls is not None
            key = calls.threads[number]
            mine = on_host[events.thread[on_host] == key[1]] if key[0] == process else on_host[:0]
            if not len(mine):
                continue
            chosen = launched[threads == number]
            at = calls.start[issued[chosen]]
            order = np.argsort(at, kind="stable")
            used[self._assign(mine, rows[chosen[order]], at[order])] = True
        left = rows[(issued == NOBODY) & (self.communicator[rows] == UNKNOWN)]
        spare = on_host[~used[on_host]]
        halves = np.isin(log.operations[spare], _HALVES)
        for operation in {operations[row] for row in left.tolist()} - {SEND_RECV}:
            kernel_rows = [row for row in left.tolist() if operations[row] == operation]
            calls_of = spare[~halves & (log.operations[spare] == operation)]
            calls_of = calls_of[np.argsort(events.start[calls_of], kind="stable")]
            if len(kernel_rows) == len(calls_of):
                self._take_each(np.array(kernel_rows), calls_of)

    def _assign(
        self, mine: NDArray[np.int64], kernels: NDArray[np.int64], at: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Assign the calls of one thread to the kernels it launched at some moments, both in order.

        Calls within a group (ncclGroupStart, ncclGroupEnd) are over when its kernels are launched:
        one for each communicator, in the order of their first calls. Return the calls assigned.
        """
        events = self._log.events
        last = np.searchsorted(events.start[mine], at, "right") - 1
        inside = (last >= 0) & (events.end[mine[last]] >= at)
        self._take_each(kernels[inside], mine[last[inside]])
        taken = [mine[last[inside]]]
        # Kernels that were launched between the same two calls are of one group.
        begins = np.maximum.accumulate(np.append(0, np.where(inside, last + 1, 0))[:-1])
        outside = np.flatnonzero(~inside)
        previous = 0
        for together in np.split(outside, np.flatnonzero(np.diff(last[outside])) + 1):
            if not len(together):
                continue
            end = int(last[together[0]]) + 1
            pending = mine[max(previous, int(begins[together[0]])) : end]
            ids = events.correlation[pending]
            groups = [pending[ids == id] for id in dict.fromkeys(ids.tolist())]
            rows = kernels[together].tolist()
            if len(groups) < len(rows):  # One communicator may need several kernels.
                # A group's calls by kernel: those of its operation, if only one kernel has it.
                operations = [self._operations[row] for row in rows]
                names = self._log.operations[pending]
                groups = [
                    pending[np.isin(names, _HALVES if operation == SEND_RECV else [operation])]
                    if operations.count(operation) == 1
                    else pending[:0]
                    for operation in operations
                ]
            for row, calls in zip(rows, groups, strict=False):
                if len(calls):
                    self._take(row, calls)
            taken.append(pending)
            previous = end
        return np.concatenate([mine[:0], *taken])

    def _take_each(self, kernels: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Assign a call to each of some kernels."""
        log, events = self._log, self._log.events
        names = log.operations[rows]
        ids = events.correlation[rows]
        self.communicator[kernels] = np.where(ids == 0, UNKNOWN, ids)
        parts = np.ones(len(rows), np.int64)
        gathers = np.isin(names, list(_TOTAL_IS))
        parts[gathers] = [log.sizes.get(id, 0) for id in ids[gathers].tolist()]
        sizes = np.maximum(events.bytes[rows], 0) * parts
        known = np.where(sizes > 0, sizes, UNKNOWN)
        self.bytes[kernels] = np.where(self.bytes[kernels] > 0, self.bytes[kernels], known)
        halves = np.isin(names, _HALVES)
        better = (names == ALL_TO_ALL) | self._unnamed[kernels] & (halves | np.isin(names, _NAMED))
        self.operation[kernels[better]] = np.where(halves, SEND_RECV, names)[better]
        for half in np.flatnonzero(halves & (events.device[rows] >= 0)):
            sends = int(names[half] == "Send")
            self.halves.append((int(kernels[half]), sends, int(events.device[rows[half]])))

    def _take(self, kernel: int, rows: NDArray[np.int64]) -> None:
        """Assign calls of one communicator to a kernel."""
        log, events = self._log, self._log.events
        communicator = int(events.correlation[rows[0]])
        self.communicator[kernel] = communicator if communicator not in (0, UNKNOWN) else UNKNOWN
        names = log.operations[rows].tolist()
        sizes = np.maximum(events.bytes[rows], 0)
        for name, peer in zip(names, events.device[rows].tolist(), strict=True):
            if name in _HALVES and peer != UNKNOWN:
                self.halves.append((kernel, int(name == "Send"), peer))
        if self.bytes[kernel] <= 0 and sizes.any():
            sent = np.array([name == "Send" for name in names])
            received = np.array([name == "Recv" for name in names])
            size = int(max(sizes[~received].sum(), sizes[~sent].sum()))
            parts = log.sizes.get(communicator, 0) if names[0] in _TOTAL_IS else 1
            self.bytes[kernel] = size * parts or UNKNOWN
        if ALL_TO_ALL in names or self._is_exchange(communicator, names, rows):
            self.operation[kernel] = ALL_TO_ALL
        elif self._unnamed[kernel] and names[0] in (*_HALVES, *_NAMED):
            self.operation[kernel] = SEND_RECV if names[0] in _HALVES else names[0]

    def _is_exchange(self, id: int, names: Sequence[str], rows: NDArray[np.int64]) -> bool:
        """Return whether a group of sends and receives reaches every rank, as all-to-all does."""
        peers = self._log.events.device[rows]
        sent = [{*peers[[n == half for n in names]].tolist()} for half in _HALVES]
        size = self._log.sizes.get(id, 0)
        # A stage between two others exchanges with both; only all-to-all has parts for itself.
        return size > 1 and min(map(len, sent)) >= (size - 1 if size > _FEW else size)
