"""Collectives matched across ranks: who waits for whom, what they carry, how fast, and hosts'
clocks aligned by them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.execution import GpuShardView, PerGpu
from gputrace.analyzers.grouping import rows_by, steps_by_gpu
from gputrace.analyzers.lanes import LaneSummary, Waiting
from gputrace.analyzers.operations import GpuSummary, OperationClass
from gputrace.model.events import COLUMN_TYPES, UNKNOWN, Column, Events, Kind, Mask, distinct_ids
from gputrace.model.intervals import Times, union
from gputrace.model.results import CollectiveTotals, Step
from gputrace.model.trace import Window
from gputrace.units import format_ns

PEER_COPY: Final = "PeerCopy"
"""The operation of a copy between two GPUs."""
JOINT: Final = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")
"""Operations that nobody leaves before all have come."""
_NEVER: Final = np.iinfo(np.int64).max


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


_SLACK_NS: Final = 20_000
"""Two clocks of GPUs on one machine may disagree by this much."""
_SCATTER: Final = 0.2
"""Ends of one all-reduce differ by no more of its length than this, in the middle case."""
_FIT: Final = 0.95
"""Part of the pairs that must overlap for an order to be believed."""
_FEWEST: Final = 5
"""So many kernels at least have ends that tell: the first of a communicator end far apart."""
ALONE: Final = 0
"""How many GPUs take part where nobody has to come."""
_SHARED: Final = 0.5
"""Part of the shorter sequence that must find partners where the order does not tell."""


@dataclass(frozen=True)
class Part:
    """Kernels of one name on one GPU, in order of start."""

    lane: int
    row: NDArray[np.int64]
    start: Times
    end: Times

    def __len__(self) -> int:
        return len(self.row)

    def select(self, rows: Mask | NDArray[np.int64]) -> Part:
        return Part(self.lane, self.row[rows], self.start[rows], self.end[rows])


Group = list[tuple[Part, NDArray[np.int64]]]
"""Parts that share collectives: of each, the number of the collective of every row."""


def group(parts: Sequence[Part], *, joint: bool) -> list[Group]:
    """Parts put together that ran the same collectives.

    The longest part numbers them; rows of others that find no partner there are tried again.

    Args:
        parts: not empty, at most one a GPU.
        joint: whether nobody leaves such a collective before all have come.
    """
    left, groups = list(parts), []
    while left:
        first = max(left, key=len)
        members: Group = [(first, np.arange(len(first)))]
        lonely = []
        for part in left:
            if part is not first:
                place = _pair(first, part, joint)
                found = place != UNKNOWN
                members += [(part.select(found), place[found])] if found.any() else []
                lonely += [part.select(~found)] if not found.all() else []
        groups.append(members)
        left = lonely
    return groups


def _pair(first: Part, other: Part, joint: bool) -> NDArray[np.int64]:
    """For each row of a part, the row of the first that is the same collective, or `UNKNOWN`."""
    if len(first) == len(other):
        place = np.arange(len(first))
        if not joint or _in_order(first, other):
            return place
    place = _nearest_ends(first, other)
    place[(place != UNKNOWN) & ~_overlap(first, other, place)] = UNKNOWN
    found = place != UNKNOWN
    few = np.count_nonzero(found) < _SHARED * min(len(first), len(other))
    if few or not _end_together(first.select(place[found]), other.select(found), joint):
        place[:] = UNKNOWN
    return place


def _in_order(first: Part, other: Part) -> bool:
    """Whether equally many kernels, taken one after the other, are the same collectives."""
    overlap = _overlap(first, other, np.arange(len(first))).mean() >= _FIT
    return bool(overlap) and (len(first) < _FEWEST or _end_together(first, other, True))


def _overlap(first: Part, other: Part, place: NDArray[np.int64]) -> Mask:
    latest = np.maximum(first.start[place], other.start)
    return latest <= np.minimum(first.end[place], other.end) + _SLACK_NS


def _end_together(first: Part, other: Part, joint: bool) -> bool:
    """Whether pairs of rows end together, as those of one communicator must."""
    if not joint:
        return True
    apart = np.median(np.abs(first.end - other.end))
    length = np.median(np.minimum(first.end - first.start, other.end - other.start))
    return bool(apart <= _SLACK_NS + _SCATTER * length)


def _nearest_ends(first: Part, other: Part) -> NDArray[np.int64]:
    """Rows of the first whose ends are nearest to those of the other, where both ways agree."""
    there, back = _nearest(first.end, other.end), _nearest(other.end, first.end)
    return np.where(back[there] == np.arange(len(other)), there, UNKNOWN)


def _nearest(among: Times, moments: Times) -> NDArray[np.int64]:
    """Index of the nearest of some times, for each moment."""
    order = np.argsort(among, kind="stable")
    ordered = among[order]
    after = np.clip(np.searchsorted(ordered, moments), 1, max(len(ordered) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(ordered) - 1)
    nearer = moments - ordered[before] <= ordered[after] - moments
    return order[np.where(nearer, before, after)]


@dataclass(frozen=True)
class Joined:
    """The rows of one group; ``instance`` counts within it."""

    operation: str
    lane: NDArray[np.int16]
    row: NDArray[np.int64]
    instance: NDArray[np.int64]
    lanes: NDArray[np.int64]
    """How many GPUs take part in the collective of each; `ALONE` where nobody has to come."""


def join(spans: Sequence[Window], own: Group, groups: Sequence[Group], operation: str) -> Joined:
    """The rows of one of the groups that a kernel's name has; ``spans`` are of all GPUs."""
    place = np.concatenate([place for _, place in own])
    starts, ends = (np.concatenate([getattr(part, n) for part, _ in own]) for n in ("start", "end"))
    missed = np.zeros(int(place.max()) + 1, np.int64)
    for lane in _relatives(own, groups):
        gone = (starts < spans[lane].start) | (ends > spans[lane].end)
        missed[place[gone]] += 1
    return Joined(
        operation,
        np.concatenate([np.full(len(part), part.lane, np.int16) for part, _ in own]),
        np.concatenate([part.row for part, _ in own]),
        place,
        len(own) + missed[place],
    )


def _relatives(own: Group, groups: Sequence[Group]) -> set[int]:
    """GPUs that share other collectives with those of a group: there, if they were recorded."""
    mine = {part.lane for part, _ in own}
    others = [{part.lane for part, _ in other} for other in groups]
    return set[int]().union(*(lanes for lanes in others if lanes & mine)) - mine


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


def _talk(one: GpuShardView) -> _Talk:
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


_CARRIED: Final = {"AllReduce": 2, "AllGather": 1, "ReduceScatter": 1, "AllToAll": 1}
"""Among n ranks each link carries so many times (n - 1) / n of the message; in other operations,
all of it."""


def total_collectives(
    gpus: PerGpu, collectives: Collectives, measured: Sequence[Step]
) -> tuple[CollectiveTotals, ...]:
    """The operations, those that take most time first.

    Args:
        gpus: those among which the collectives were matched.
        collectives: of all GPUs.
        measured: the steps that count; the lanes' windows if none.
    """
    if measured:
        chosen = steps_of(collectives, gpus.operations, measured) != UNKNOWN
    else:
        chosen = _in_windows(gpus, collectives)
    place = {own.gpu: index for index, own in enumerate(gpus.operations)}
    of_lane = {place[lane.gpu]: lane for lane in gpus.lanes}
    exposed = _exposed(gpus, of_lane, collectives, chosen)
    steps = len({step.step for step in measured})
    found = [
        _total(of_lane, collectives, rows, steps, int(exposed[rows].sum()))
        for rows in _kinds(collectives, chosen)
        if len(rows)
    ]
    return tuple(sorted(found, key=lambda total: -total.total_ns * len(total.gpus)))


def _in_windows(gpus: PerGpu, collectives: Collectives) -> Mask:
    inside = np.zeros(len(collectives), bool)
    windows = {lane.gpu: lane.window for lane in gpus.lanes}
    for index, own in enumerate(gpus.operations):
        if own.gpu in windows:
            mine = collectives.lane == index
            start, end = windows[own.gpu]
            inside |= mine & (collectives.start >= start) & (collectives.start < end)
    return inside


def _kinds(collectives: Collectives, chosen: Mask) -> Iterator[NDArray[np.int64]]:
    """Rows of one operation among the same GPUs; copies of all pairs together."""
    if not len(collectives):
        return
    draw = Random(0)
    keys = np.array([draw.getrandbits(62) for _ in range(int(collectives.lane.max()) + 1)])
    members = np.zeros(int(collectives.instance[-1]) + 1, np.int64)
    np.add.at(members, collectives.instance, keys[collectives.lane])
    group = np.where(collectives.of(PEER_COPY), 0, members[collectives.instance])
    for operation in range(len(collectives.operations)):
        mine = chosen & (collectives.operation == operation)
        for key in distinct_ids(group[mine]).tolist():
            yield np.flatnonzero(mine & (group == key))


def _total(
    of_lane: Mapping[int, LaneSummary],
    collectives: Collectives,
    rows: NDArray[np.int64],
    steps: int,
    exposed_ns: int,
) -> CollectiveTotals:
    present = distinct_ids(collectives.lane[rows]).tolist()
    lanes = [of_lane[index] for index in present]
    length = collectives.end[rows] - collectives.start[rows]
    wait = collectives.wait[rows]
    known = bool(collectives.known[rows].all())
    name = collectives.operations[int(collectives.operation[rows[0]])]
    size, speed = _speed(collectives, rows) if known else (_size(collectives, rows), None)
    carried = _CARRIED[name] * (len(lanes) - 1) / len(lanes) if name in _CARRIED else 1.0
    shared = max(steps, 1) * len(lanes)
    return CollectiveTotals(
        operation=name,
        gpus=tuple(lane.gpu.gpu for lane in lanes),
        ranks=tuple(sorted({lane.gpu.rank for lane in lanes})),
        one_process=len({lane.gpu.process for lane in lanes}) == 1 and len(lanes) > 1,
        count=len(distinct_ids(collectives.instance[rows])),
        steps=steps,
        bytes=size,
        wait_ns=int(np.median(wait)) if known else None,
        transfer_ns=int(np.median(length - wait)) if known else None,
        total_ns=int(length.sum()) // shared,
        wait_total_ns=int(wait.sum()) // shared if known else None,
        transfer_total_ns=int((length - wait).sum()) // shared if known else None,
        exposed_ns=exposed_ns // shared,
        algorithm_bandwidth=None if speed is None else round(speed),
        bus_bandwidth=None if speed is None else round(speed * carried),
    )


def _exposed(
    gpus: PerGpu, of_lane: Mapping[int, LaneSummary], collectives: Collectives, chosen: Mask
) -> NDArray[np.int64]:
    """Of each chosen row, the nanoseconds with no kernel beside it that computes; else 0."""
    exposed = np.zeros(len(collectives), np.int64)
    count = max(of_lane, default=-1) + 1
    by_lane = rows_by(np.where(chosen, collectives.lane, count), count)
    rows = [by_lane[index] for index in of_lane]
    starts, ends = ([times[own] for own in rows] for times in (collectives.start, collectives.end))
    found = gpus.each(_computing, of_lane.values(), starts, ends)
    for own, start, end, computing in zip(rows, starts, ends, found, strict=True):
        exposed[own] = end - start - computing
    return exposed


def _computing(one: GpuShardView, start: Times, end: Times) -> Times:
    return one.lane.timeline.of_class(OperationClass.COMPUTE).within(start, end)


def _size(collectives: Collectives, rows: NDArray[np.int64]) -> int | None:
    sizes = collectives.bytes[rows]
    return int(np.median(sizes[sizes > 0])) if (sizes > 0).any() else None


def _speed(collectives: Collectives, rows: NDArray[np.int64]) -> tuple[int | None, float | None]:
    """Size of the middle message, and the median bytes a second of those whose size is known."""
    mine = rows[collectives.bytes[rows] > 0]
    if not len(mine):
        return None, None
    transfer = collectives.end[mine] - collectives.start[mine] - collectives.wait[mine]
    speed = collectives.bytes[mine] * 1e9 / np.maximum(transfer, 1)
    return int(np.median(collectives.bytes[mine])), float(np.median(speed))


_ENDS_AT_ONCE: Final = re.compile(r"all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)

_WIDEST_NS: Final = 500_000
"""Ends that scatter more than this around a shift are not of the same collectives."""


@dataclass(frozen=True, slots=True)
class ClockFit:
    """How the clocks of hosts are brought onto that of the first.

    Attributes:
        shifts: nanoseconds to add to the times of each host.
        pairs: how many ends of one collective on two ranks were compared.
        residual_ns: 95 of 100 of these differ by less once the shifts are added.
    """

    shifts: Mapping[int, int]
    pairs: int
    residual_ns: int

    def __str__(self) -> str:
        return (
            f"the clocks of hosts are aligned by {self.pairs:,} ends of collectives, to within "
            f"{format_ns(self.residual_ns)} (95 % of them)"
        )


def fit_clocks(gpus: PerGpu) -> ClockFit | None:
    """The shifts of hosts; None where there is one host, or collectives do not tell."""
    first = min(gpus.operations, key=lambda own: own.gpu.rank, default=None)
    if first is None or len({own.gpu.host for own in gpus.operations}) < 2:
        return None
    found = gpus.each(_collectives, gpus.operations)
    ends = [(own.gpu.host, each) for own, each in zip(gpus.operations, found, strict=True)]
    shifts, residuals = {first.gpu.host: 0}, []
    for host in {host for host, _ in ends} - shifts.keys():
        apart = _apart(ends, first.gpu.host, host)
        if len(apart) < _FEWEST:
            return None
        shifts[host] = int(np.median(apart))
        residuals.append(np.abs(apart - shifts[host]))
    scatter = np.concatenate(residuals)
    residual = int(np.percentile(scatter, 95))
    return ClockFit(shifts, len(scatter), residual) if residual <= _WIDEST_NS else None


def _collectives(one: GpuShardView) -> dict[str, Times]:
    """The ends of the collectives of each name, in the order in which they began."""
    own, events = one.operations, one.operations.events
    rows = (own.classes == OperationClass.COMMUNICATION) & (events.kind == Kind.KERNEL)
    names = one.trace.search(distinct_ids(events.name[rows]), _ENDS_AT_ONCE)
    return {text: events.end[rows & (events.name == id)] for id, text in names.items()}


def _apart(ends: Sequence[tuple[int, dict[str, Times]]], a: int, b: int) -> NDArray[np.int64]:
    """How much earlier collectives end on ranks of host b than on those of host a, by their clocks.

    Ranks that ran a collective equally often ran the same ones, one after the other.
    """
    found = [np.empty(0, np.int64)]
    found += (
        ours[name] - theirs[name]
        for ours in _of(ends, a)
        for theirs in _of(ends, b)
        for name in ours.keys() & theirs.keys()
        if len(ours[name]) == len(theirs[name])
    )
    return np.concatenate(found)


def _of(ends: Sequence[tuple[int, dict[str, Times]]], host: int) -> Iterator[dict[str, Times]]:
    return (collectives for at, collectives in ends if at == host)
