"""Communicators: which kernel moves which message in which group of ranks, and what the group does.

NCCL and RCCL describe each call in a payload (collectors, nsys), PyTorch's profiler each kernel.
What a group is for follows from its name, where the program gave one that says so, else from what
its members exchange, how often, how much and where in a step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import GpuShardView, Shard
from gputrace.analyzers.host_calls import NOBODY, CudaApiCalls
from gputrace.model.events import UNKNOWN, Events, Kind, Mask, distinct_ids
from gputrace.model.names import bounded

ALL_TO_ALL: Final = "AllToAll"
SEND_RECV: Final = "SendRecv"
_OPERATION: Final = re.compile(
    r"""
    (?P<AllReduce> all_?reduce | cross_device_reduce) | (?P<AllGather> all_?gather)
    | (?P<ReduceScatter> reduce_?scatter) | (?P<AllToAll> all_?to_?all)
    | (?P<Broadcast> broadcast | bcast) | (?P<SendRecv> send_?recv | (^|nccl)(send|recv)$)
    | (?P<Reduce> reduce)
    """,
    re.VERBOSE | re.IGNORECASE,
)


def operation_of(name: str) -> str:
    """Return ``AllReduce`` and so on by the name of a kernel; else its name without parameters."""
    base = name.partition("(")[0].partition("<")[0] or name
    match = _OPERATION.search(base)
    return match.lastgroup if match and match.lastgroup else base


@dataclass(frozen=True)
class Communicator:
    """A group of ranks that communicate, as one process sees it."""

    id: int
    size: int
    """Number of ranks; 0 if unknown."""
    place: int
    """Rank of the process in it; `UNKNOWN` if unknown."""
    name: str
    """What the program calls it; empty if it does not."""


class Messages(NamedTuple):
    """What is known of the messages of some kernels of one GPU.

    Attributes:
        communicator: id, by kernel; `UNKNOWN` if unknown.
        bytes: size in the sense of nccl-tests, by kernel; `UNKNOWN` if unknown.
        operation: operation by kernel that the host knows better than the kernel's name; else
            empty.
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


@dataclass(frozen=True)
class _Log:
    """Messages of all processes of a shard, in order of process, thread and start."""

    events: Events
    operations: NDArray[np.object_]
    """Operation of each, with ``Send`` and ``Recv`` apart."""
    sizes: dict[int, int]
    """Number of ranks by communicator."""
    communicators: dict[int, tuple[Communicator, ...]]
    """Those of each process."""


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
    names = {id: _half_of(text) for id, text in texts.items()}
    return _Log(
        messages,
        np.array([names[id] for id in messages.name.tolist()], object),
        {id: each.size for mine in known.values() for id, each in mine.items()},
        {process: tuple(mine.values()) for process, mine in known.items()},
    )


def _half_of(name: str) -> str:
    operation = operation_of(name)
    half = re.search(r"(?:^|nccl)(send|recv)$", name, re.IGNORECASE)
    return half[1].title() if half else operation


def read_messages(view: GpuShardView, kernels: Events, operations: Sequence[str]) -> Messages:
    """Return what is known of the messages of kernels, in order of start.

    Args:
        view: the GPU.
        kernels: columns ``start, end, process, stream, correlation, bytes`` of the kernels.
        operations: operation of each by its name.
    """
    count = len(kernels)
    log: _Log | None = view.once(_read_log)
    found = _Found(count, kernels.bytes)
    if log is not None and count:
        events = log.events
        for process in distinct_ids(kernels.process).tolist():
            rows = np.flatnonzero(kernels.process == process)
            mine = np.flatnonzero(events.process == process)
            on_gpu = mine[events.thread[mine] == UNKNOWN]
            if len(on_gpu):
                _match_on_gpu(found, log, kernels, rows, on_gpu)
            on_host = mine[events.thread[mine] != UNKNOWN]
            if len(on_host):
                _match_on_host(found, log, view.calls, kernels, operations, rows, on_host, process)
    halves = np.array(found.halves, np.int64).reshape(-1, 3)
    processes = distinct_ids(kernels.process).tolist() if log is not None else []
    return Messages(
        found.communicator,
        found.bytes,
        found.operation,
        halves[:, 0],
        halves[:, 1] > 0,
        halves[:, 2],
        tuple(c for p in processes if log is not None for c in log.communicators.get(p, ())),
    )


class _Found:
    """What has been found of the messages of kernels so far."""

    def __init__(self, count: int, bytes_: NDArray[np.int64]) -> None:
        self.communicator = np.full(count, UNKNOWN, np.int64)
        self.bytes = bytes_.copy()
        self.operation = np.full(count, "", object)
        self.halves: list[tuple[int, int, int]] = []

    def take(self, kernel: int, log: _Log, rows: NDArray[np.int64]) -> None:
        """Assign calls of one communicator to a kernel."""
        events = log.events
        communicator = int(events.correlation[rows[0]])
        self.communicator[kernel] = communicator if communicator not in (0, UNKNOWN) else UNKNOWN
        names = log.operations[rows].tolist()
        sizes = np.maximum(events.bytes[rows], 0)
        for name, peer in zip(names, events.device[rows].tolist(), strict=True):
            if name in ("Send", "Recv") and peer != UNKNOWN:
                self.halves.append((kernel, int(name == "Send"), peer))
        if self.bytes[kernel] <= 0 and sizes.any():
            sent = np.array([name == "Send" for name in names])
            received = np.array([name == "Recv" for name in names])
            size = int(max(sizes[~received].sum(), sizes[~sent].sum()))
            parts = log.sizes.get(communicator, 0) if names[0] in _TOTAL_IS else 1
            self.bytes[kernel] = size * parts or UNKNOWN
        if ALL_TO_ALL in names or self._is_exchange(log, communicator, names, rows):
            self.operation[kernel] = ALL_TO_ALL

    @staticmethod
    def _is_exchange(log: _Log, id: int, names: Sequence[str], rows: NDArray[np.int64]) -> bool:
        """Return whether a group of sends and receives reaches every rank, as all-to-all does."""
        peers = log.events.device[rows]
        sent = [{*peers[[n == half for n in names]].tolist()} for half in ("Send", "Recv")]
        size = log.sizes.get(id, 0)
        # A stage between two others exchanges with both; only all-to-all has parts for itself.
        return size > 1 and min(map(len, sent)) >= (size - 1 if size > _FEW else size)


def _match_on_gpu(
    found: _Found, log: _Log, kernels: Events, rows: NDArray[np.int64], on_gpu: NDArray[np.int64]
) -> None:
    """Match rows that are of the operation on the GPU itself."""
    events = log.events
    keys = zip(kernels.start[rows].tolist(), kernels.end[rows].tolist(), strict=True)
    kernel_of = dict(zip(keys, rows.tolist(), strict=True))
    spans = zip(events.start[on_gpu].tolist(), events.end[on_gpu].tolist(), strict=True)
    for span, row in zip(spans, on_gpu.tolist(), strict=True):
        if span in kernel_of:
            found.take(kernel_of[span], log, np.array([row]))


def _match_on_host(
    found: _Found,
    log: _Log,
    calls: CudaApiCalls | None,
    kernels: Events,
    operations: Sequence[str],
    rows: NDArray[np.int64],
    on_host: NDArray[np.int64],
    process: int,
) -> None:
    """Match NCCL's calls with the kernels that were launched in them, or at the end of their group.

    A kernel whose launch was not recorded gets the call of the same number, if there are equally
    many of its operation.
    """
    events = log.events
    issued = np.full(len(rows), NOBODY, np.int64)
    if calls is not None:
        issued = calls.issued_by(kernels.select(rows)).astype(np.int64)
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
        used[_assign(found, log, mine, rows[chosen[order]], at[order], operations)] = True
    left = rows[(issued == NOBODY) & (found.communicator[rows] == UNKNOWN)]
    spare = on_host[~used[on_host]]
    halves = np.isin(log.operations[spare], ("Send", "Recv"))
    for operation in {operations[row] for row in left.tolist()} - {SEND_RECV}:
        kernel_rows = [row for row in left.tolist() if operations[row] == operation]
        calls_of = spare[~halves & (log.operations[spare] == operation)]
        calls_of = calls_of[np.argsort(events.start[calls_of], kind="stable")]
        if len(kernel_rows) == len(calls_of):
            for kernel, row in zip(kernel_rows, calls_of.tolist(), strict=True):
                found.take(kernel, log, np.array([row]))


def _assign(
    found: _Found,
    log: _Log,
    mine: NDArray[np.int64],
    kernels: NDArray[np.int64],
    at: NDArray[np.int64],
    operations: Sequence[str],
) -> NDArray[np.int64]:
    """Assign the calls of one thread to the kernels it launched at some moments, both in order.

    Calls within a group (ncclGroupStart, ncclGroupEnd) are over when its kernels are launched: one
    for each communicator, in the order of their first calls. Return the calls assigned.
    """
    events, taken = log.events, []
    last = np.searchsorted(events.start[mine], at, "right") - 1
    inside = (last >= 0) & (events.end[mine[last]] >= at)
    first, index = 0, 0
    while index < len(kernels):
        if inside[index]:
            row = mine[last[index] : last[index] + 1]
            found.take(int(kernels[index]), log, row)
            taken.append(row)
            first, index = int(last[index]) + 1, index + 1
            continue
        stop = index + 1
        while stop < len(kernels) and not inside[stop] and last[stop] == last[index]:
            stop += 1
        pending = mine[first : last[index] + 1]
        ids = events.correlation[pending]
        groups = [pending[ids == id] for id in dict.fromkeys(ids.tolist())]
        together = kernels[index:stop].tolist()
        if len(groups) < len(together):  # One communicator may need several kernels.
            groups = _by_operation(log, pending, [operations[kernel] for kernel in together])
        for kernel, group in zip(together, groups, strict=False):
            if len(group):
                found.take(kernel, log, group)
        taken.append(pending)
        first, index = max(first, int(last[index]) + 1), stop
    return np.concatenate([mine[:0], *taken])


def _by_operation(
    log: _Log, pending: NDArray[np.int64], operations: Sequence[str]
) -> list[NDArray[np.int64]]:
    """Return the calls of a group by kernel: those of its operation, if only one kernel has it."""
    halves = ["Send", "Recv"]
    names = log.operations[pending]
    return [
        pending[np.isin(names, halves if operation == SEND_RECV else [operation])]
        if operations.count(operation) == 1
        else pending[:0]
        for operation in operations
    ]
