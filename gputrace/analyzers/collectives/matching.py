"""Collectives matched across GPUs: which kernels of which ranks are one all-reduce."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.collectives.pairing import ALONE, Joined, Part, group, join
from gputrace.analyzers.collectives.waiting import Waiting
from gputrace.analyzers.grouping import rows_by, steps_by_gpu
from gputrace.analyzers.intervals import Times, union
from gputrace.analyzers.operations import GpuSummary
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results import Step
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import COLUMN_TYPES, UNKNOWN, Column, Events, Kind, Mask
from gputrace.traces.ids import distinct_ids

PEER_COPY: Final = "PeerCopy"
"""The operation of a copy between two GPUs."""

_OPERATION: Final = re.compile(
    r"""
    (?P<AllReduce> all_?reduce | cross_device_reduce) | (?P<AllGather> all_?gather)
    | (?P<ReduceScatter> reduce_?scatter) | (?P<AllToAll> all_?to_?all)
    | (?P<Broadcast> broadcast) | (?P<SendRecv> send_?recv) | (?P<Reduce> reduce)
    """,
    re.VERBOSE | re.IGNORECASE,
)
JOINT: Final = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")
"""Operations that nobody leaves before all have come."""
_COLUMNS: Final = ("start", "end", "kind", "name", "process", "correlation", "bytes")
_NEVER: Final = np.iinfo(np.int64).max
_NONE: Final = np.empty(0, np.int64)


@dataclass(frozen=True)
class Collectives:
    """A row for each collective and GPU that took part, by instance and lane; arrays of one length.

    Attributes:
        instance: number of the collective, from 0 in order of start.
        lane: index of the GPU among the `GpuOperations` that were matched.
        row: index of the kernel or peer copy in that lane's events.
        start, end: nanoseconds.
        arrival: when the last rank had come, of those that came before this one left (all, in an
            all-reduce; a broadcast's root may leave before others come); `UNKNOWN` where it cannot
            be known: a rank that took part was not seen, or no partner was found.
        operation: index into ``operations``.
        name: the kernel's name id; of a peer copy, what the recorder gave.
        correlation: the kernel's or copy's id in its process.
        bytes: of the message; `UNKNOWN` where that was not recorded.
        operations: ``AllReduce``, ``Broadcast``, ``PeerCopy`` and so on; a kernel's own name where
            it is none of NCCL's.
    """

    instance: NDArray[np.int64]
    lane: NDArray[np.int16]
    row: NDArray[np.int64]
    start: Times
    end: Times
    arrival: Times
    operation: NDArray[np.int16]
    name: NDArray[np.int32]
    correlation: NDArray[np.int64]
    bytes: NDArray[np.int64]
    operations: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.instance)

    @cached_property
    def _rows(self) -> list[NDArray[np.intp]]:
        """Of each lane, its rows."""
        return rows_by(self.lane, int(self.lane.max(initial=-1)) + 1)

    @cached_property
    def known(self) -> Mask:
        """Rows whose last arrival is known."""
        return np.not_equal(self.arrival, UNKNOWN)

    @cached_property
    def wait(self) -> Times:
        """Nanoseconds that each spent waiting for the last; 0 where that is not known."""
        return np.where(self.known, np.clip(self.arrival, self.start, self.end) - self.start, 0)

    @property
    def joint(self) -> Mask:
        """Rows of operations that nobody leaves before all have come."""
        return self.of(*JOINT)

    def of(self, *names: str) -> Mask:
        """Rows of some operations."""
        here = [self.operations.index(name) for name in names if name in self.operations]
        return np.isin(self.operation, here)

    def _of_lane(self, lane: int, *, known: bool) -> NDArray[np.intp]:
        rows = self._rows[lane] if lane < len(self._rows) else np.empty(0, np.intp)
        wanted: NDArray[np.intp] = rows[self.known[rows] == known]
        return wanted

    def waiting(self, lane: int) -> Waiting:
        """When a GPU was in a collective to which the last rank had not come, or may not have."""
        mine, lonely = self._of_lane(lane, known=True), self._of_lane(lane, known=False)
        return Waiting(
            union(self.start[mine], self.start[mine] + self.wait[mine]),
            union(self.start[lonely], self.end[lonely]),
        )


def match_collectives(gpus: PerGpu) -> Collectives:
    """Matches the communication of all GPUs; an operation without partners stands alone."""
    talks = gpus.each(_talk, gpus.operations)
    kernels = [_Kernels.of(lane, own) for lane, own in enumerate(talks)]
    names = np.concatenate([_NONE.astype(np.int32), *(rows.name for rows in kernels)])
    texts = gpus.trace.names(distinct_ids(names))
    spans = [own.span for own in gpus.operations]
    joined: list[Joined] = []
    for text in sorted(set(texts.values())):
        operation = operation_of(text)
        ids = [id for id, own in texts.items() if own == text]
        parts = [part for rows in kernels if len(part := rows.named(ids))]
        found = group(parts, joint=operation in JOINT)
        joined += [join(spans, own, found, operation) for own in found]
    joined += _peer_copies(talks)
    return _collect(talks, joined, all_seen=_all_seen(gpus))


def steps_of(
    collectives: Collectives, operations: Sequence[GpuSummary], steps: Sequence[Step]
) -> NDArray[np.int64]:
    """Of each row, the number of the step in which it begins on its GPU, of those given.

    `UNKNOWN` for a row that begins in none of them.
    """
    found = np.full(len(collectives), UNKNOWN)
    by_gpu = steps_by_gpu(steps)
    for own, rows in zip(operations, rows_by(collectives.lane, len(operations)), strict=True):
        mine = by_gpu.get((own.gpu.gpu, own.gpu.rank), [])
        start = np.array([step.start_ns for step in mine] or [_NEVER])
        end = np.array([step.end_ns for step in mine] or [_NEVER])
        at = np.searchsorted(start, collectives.start[rows], "right") - 1
        inside = (at >= 0) & (collectives.start[rows] < end[at])
        found[rows[inside]] = np.array([step.step for step in mine], np.int64)[at[inside]]
    return found


def operation_of(name: str) -> str:
    """``AllReduce`` and so on by a kernel's name; the name itself where it tells nothing."""
    own = name.partition("(")[0].partition("<")[0] or name
    found = _OPERATION.search(own)
    return found.lastgroup if found and found.lastgroup else own


@dataclass(frozen=True)
class _Talk:
    """The kernels of one GPU that communicate, and its peer copies."""

    row: NDArray[np.int64]
    """Of each, among all operations of the GPU."""
    events: Events

    def column(self, name: str, rows: NDArray[np.int64]) -> Column:
        """A column, of some of the operations."""
        found: Column = getattr(self.events, name)[np.searchsorted(self.row, rows)]
        return found


def _talk(one: OneGpu) -> _Talk:
    own = one.operations
    kernels = (own.classes == OperationClass.COMMUNICATION) & (own.events.kind == Kind.KERNEL)
    rows = np.flatnonzero(kernels | (own.events.kind == Kind.COPY_PEER))
    return _Talk(rows, own.events.having(*_COLUMNS).select(rows))


@dataclass(frozen=True)
class _Kernels:
    """The kernels of one GPU that communicate."""

    lane: int
    row: NDArray[np.int64]
    events: Events

    @classmethod
    def of(cls, lane: int, own: _Talk) -> _Kernels:
        rows = own.events.kind == Kind.KERNEL
        return cls(lane, own.row[rows], own.events.select(rows))

    @property
    def name(self) -> NDArray[np.int32]:
        return self.events.name

    def named(self, ids: Sequence[int]) -> Part:
        mine = np.isin(self.name, ids)
        return Part(self.lane, self.row[mine], self.events.start[mine], self.events.end[mine])


def _peer_copies(talks: Sequence[_Talk]) -> list[Joined]:
    """Copies between two GPUs: each is a row of both, with the same times."""
    found = [np.flatnonzero(own.events.kind == Kind.COPY_PEER) for own in talks]
    lane = np.repeat(np.arange(len(found)), [len(rows) for rows in found]).astype(np.int16)
    if not len(lane):
        return []
    parts = [own.events.select(rows) for own, rows in zip(talks, found, strict=True)]
    keys = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("correlation", "process", "end", "start")
    ]
    order = np.lexsort(keys)
    new = np.any([np.diff(key[order], prepend=-1) != 0 for key in keys], axis=0)
    new[0] = True
    rows = np.concatenate([own.row[mine] for own, mine in zip(talks, found, strict=True)])
    return [
        Joined(PEER_COPY, lane[order], rows[order], np.cumsum(new) - 1, np.full(len(rows), ALONE))
    ]


def _collect(talks: Sequence[_Talk], joined: Sequence[Joined], *, all_seen: bool) -> Collectives:
    names = tuple(sorted({one.operation for one in joined}))
    first = np.cumsum([0, *(int(one.instance.max()) + 1 for one in joined)])
    numbered = [one.instance + start for one, start in zip(joined, first[:-1], strict=True)]
    columns = _columns(talks, joined)
    columns["instance"] = np.concatenate([_NONE, *numbered])
    of = [np.full(len(one.row), names.index(one.operation)) for one in joined]
    columns["operation"] = np.concatenate([_NONE, *of]).astype(np.int16)
    columns["instance"] = _by_start(columns["instance"], columns["start"])
    order = np.lexsort((columns["lane"], columns["instance"]))
    columns = {name: column[order] for name, column in columns.items()}
    arrival = _arrivals(columns, columns.pop("lanes"), all_seen)
    return Collectives(**columns, arrival=arrival, operations=names)


def _columns(talks: Sequence[_Talk], joined: Sequence[Joined]) -> dict[str, NDArray[Any]]:
    """What is known of each row: from the events of its GPU."""
    lane = np.concatenate([_NONE.astype(np.int16), *(one.lane for one in joined)])
    row = np.concatenate([_NONE, *(one.row for one in joined)])
    lanes = np.concatenate([_NONE, *(one.lanes for one in joined)])
    columns: dict[str, NDArray[Any]] = {"lane": lane, "row": row, "lanes": lanes}
    told = ("start", "end", "name", "correlation", "bytes")
    for name in told:
        columns[name] = np.full(len(row), UNKNOWN, COLUMN_TYPES[name])
    for own, mine in zip(talks, rows_by(lane, len(talks)), strict=True):
        for name in told:
            columns[name][mine] = own.column(name, row[mine])
    return columns


def _by_start(instance: NDArray[np.int64], start: Times) -> NDArray[np.int64]:
    """Instances numbered anew, in order of their first start."""
    if not len(instance):
        return instance
    begins = np.full(int(instance.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begins, instance, start)
    places = np.empty(len(begins), np.int64)
    places[np.argsort(begins, kind="stable")] = np.arange(len(begins))
    return places[instance]


def _all_seen(gpus: PerGpu) -> bool:
    """Whether every rank of the run was recorded, as far as the trace says how many there are."""
    seen = len({own.gpu.rank for own in gpus.operations})
    return (gpus.trace.session.world_size or 0) <= seen


def _arrivals(
    columns: Mapping[str, NDArray[Any]], lanes: NDArray[np.int64], all_seen: bool
) -> Times:
    """Of each row, the last start in its instance before its own end."""
    instance, start, end = columns["instance"], columns["start"], columns["end"]
    if not len(instance):
        return _NONE
    count = np.bincount(instance)[instance]
    moments, begin = np.unique(start, return_inverse=True)
    came = np.sort(instance * len(moments) + begin)
    by_own_end = instance * len(moments) + np.searchsorted(moments, end, "right") - 1
    arrival = moments[came[np.searchsorted(came, by_own_end, "right") - 1] % len(moments)]
    whole = (count == lanes) & (lanes > 1) & all_seen
    return np.where(whole | (lanes == ALONE), arrival, UNKNOWN)
