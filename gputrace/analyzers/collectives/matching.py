"""Collectives matched across GPUs: which kernels of which ranks are one all-reduce."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.collectives.matched import JOINT, PEER_COPY, Collectives
from gputrace.analyzers.collectives.pairing import ALONE, Joined, Part, group, join
from gputrace.analyzers.grouping import rows_by
from gputrace.analyzers.intervals import Times
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import COLUMN_TYPES, UNKNOWN, Column, Events, Kind
from gputrace.traces.ids import distinct_ids

_OPERATION: Final = re.compile(
    r"""
    (?P<AllReduce> all_?reduce | cross_device_reduce) | (?P<AllGather> all_?gather)
    | (?P<ReduceScatter> reduce_?scatter) | (?P<AllToAll> all_?to_?all)
    | (?P<Broadcast> broadcast) | (?P<SendRecv> send_?recv) | (?P<Reduce> reduce)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_COLUMNS: Final = ("start", "end", "kind", "name", "process", "correlation", "bytes")
_NONE: Final = np.empty(0, np.int64)


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
