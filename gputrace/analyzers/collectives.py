"""Collectives matched across ranks: waits, sizes and bandwidths, and alignment of host clocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.communicators import (
    SEND_RECV,
    Communicator,
    Messages,
    operation_of,
    read_messages,
)
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import StepsOf, median, rows_by
from gputrace.analyzers.lanes import Waiting
from gputrace.analyzers.operations import GpuSummary, OperationClass
from gputrace.model.events import COLUMN_TYPES, UNKNOWN, Events, Kind, Mask, distinct_ids, is_among
from gputrace.model.intervals import Times, union
from gputrace.model.options import Window
from gputrace.model.results import Step
from gputrace.model.struct import Struct

PEER_COPY: Final = "PeerCopy"
"""Operation name of a copy between two GPUs."""
JOINT: Final = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")
"""Operations that no rank leaves before all have arrived."""
_NEVER: Final = np.iinfo(np.int64).max


class RankGroup(Struct, frozen=True, dict=True):
    """GPUs that communicate: members of a communicator, or matched by their times."""

    lanes: tuple[int, ...]
    """Indices of its GPUs among the matched `GpuOperations`."""
    communicator: int = UNKNOWN
    size: int = 0
    """Number of ranks; 0 if unknown."""
    name: str = ""
    """Name that the program gives it; empty if unknown."""
    places: tuple[int, ...] = ()
    """Rank of each GPU in the communicator; empty if unknown."""

    @property
    def id(self) -> str | None:
        """Id of the communicator in hexadecimal, as NCCL's log has it; None if unknown."""
        return None if self.communicator == UNKNOWN else f"{self.communicator % (1 << 64):#x}"


class Collectives(Struct, frozen=True, dict=True):
    """Table of one row per collective and participating GPU, sorted by instance and lane.

    Attributes:
        instance: number of the collective, from 0 in order of start.
        lane: index of the GPU among the matched `GpuOperations`.
        row: index of the kernel or peer copy in that lane's events.
        start, end: nanoseconds.
        arrival: arrival of the last of the ranks that arrived before this one left (all of them in
            an all-reduce; the root of a broadcast may leave before others arrive); `UNKNOWN` if a
            participating rank was not recorded, or no partner was found.
        operation: index into ``operations``.
        name: name id of the kernel; for a peer copy, as recorded.
        correlation: id of the kernel or copy in its process.
        bytes: message size; `UNKNOWN` where it was not recorded.
        group: index into ``groups``; `UNKNOWN` for peer copies.
        operations: ``AllReduce``, ``Broadcast``, ``PeerCopy`` and so on; the kernel's name where it
            is none of NCCL's.
        groups: the groups of GPUs that communicate.
        sends: rows of the sending and of the receiving kernel of each point-to-point message whose
            ends are both known, shape (messages, 2).
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
    group: NDArray[np.int32]
    operations: tuple[str, ...]
    groups: tuple[RankGroup, ...]
    sends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.instance)

    @cached_property
    def _rows(self) -> list[NDArray[np.intp]]:
        """Return the rows of each lane."""
        return rows_by(self.lane, int(self.lane.max(initial=-1)) + 1)

    @cached_property
    def known(self) -> Mask:
        """Return a mask of rows whose last arrival is known."""
        return np.not_equal(self.arrival, UNKNOWN)

    @cached_property
    def wait(self) -> Times:
        """Return the nanoseconds that each row waits for the last rank; 0 where unknown."""
        return np.where(self.known, np.clip(self.arrival, self.start, self.end) - self.start, 0)

    @cached_property
    def last_lane(self) -> NDArray[np.int64]:
        """Return, for each row, the lane that arrived last of those that arrived before it left."""
        moments, begin = np.unique(self.start, return_inverse=True)
        keys = self.instance * len(moments) + begin
        order = np.lexsort((self.lane, keys))
        arrival = np.minimum(np.searchsorted(moments, self.arrival), len(moments) - 1)
        wanted = self.instance * len(moments) + arrival
        at = order[np.searchsorted(keys[order], wanted, "right") - 1]
        is_known = self.known & (keys[at] == wanted)
        return np.where(is_known, self.lane[at], self.lane).astype(np.int64)

    @property
    def joint(self) -> Mask:
        """Return a mask of rows of operations that no rank leaves before all have arrived."""
        return self.of(*JOINT)

    def of(self, *names: str) -> Mask:
        """Return a mask of rows of some operations."""
        here = [self.operations.index(name) for name in names if name in self.operations]
        return is_among(self.operation, here)

    def _of_lane(self, lane: int, *, known: bool) -> NDArray[np.intp]:
        rows = self._rows[lane] if lane < len(self._rows) else np.empty(0, np.intp)
        wanted: NDArray[np.intp] = rows[self.known[rows] == known]
        return wanted

    def waiting(self, lane: int) -> Waiting:
        """Return when a GPU waited, or may have waited, in a collective for the last rank."""
        mine, lonely = self._of_lane(lane, known=True), self._of_lane(lane, known=False)
        return Waiting(
            union(self.start[mine], self.start[mine] + self.wait[mine]),
            union(self.start[lonely], self.end[lonely]),
        )


def steps_of(
    collectives: Collectives, operations: Sequence[GpuSummary], steps: Sequence[Step]
) -> NDArray[np.int64]:
    """Return, for each row, the number of the given step in which it begins on its GPU.

    `UNKNOWN` for a row that begins in none of them.
    """
    numbers = np.full(len(collectives), UNKNOWN)
    steps_on = StepsOf(steps)
    for summary, rows in zip(operations, rows_by(collectives.lane, len(operations)), strict=True):
        mine = steps_on(summary.gpu)
        start = np.array([step.start_ns for step in mine] or [_NEVER])
        end = np.array([step.end_ns for step in mine] or [_NEVER])
        at = np.searchsorted(start, collectives.start[rows], "right") - 1
        inside = (at >= 0) & (collectives.start[rows] < end[at])
        numbers[rows[inside]] = np.array([step.step for step in mine], np.int64)[at[inside]]
    return numbers


_ENDS_APART_PART: Final = 0.2
"""Maximum median difference of the ends of an all-reduce, as a fraction of its length."""
_OVERLAPPING_PART: Final = 0.95
"""Minimum fraction of overlapping pairs for kernels to be matched by order."""
_FEWEST_COMPARED: Final = 5
"""Minimum kernels for their ends to be compared: the first of a communicator end far apart."""
ALONE: Final = 0
"""Number of participants of an operation that waits for no other GPU."""
_MATCHED_PART: Final = 0.5
"""Minimum matched fraction of the shorter sequence where matching by order fails."""


class Part(Struct, frozen=True, dict=True):
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
"""Parts that share collectives, each with the number of the collective by row."""


def group(parts: Sequence[Part], apart_ns: int, *, joint: bool, known: bool = False) -> list[Group]:
    """Group parts that ran the same collectives.

    The longest part numbers them; rows of others without a partner in it are grouped again.

    Args:
        parts: parts that are not empty, at most one per GPU.
        apart_ns: maximum disagreement of their clocks.
        joint: True if no rank leaves such a collective before all have arrived.
        known: True if they are known to be of one communicator.
    """
    left, groups = list(parts), []
    while left:
        first = max(left, key=len)
        members: Group = [(first, np.arange(len(first)))]
        lonely = []
        for part in left:
            if part is not first:
                partner = _pair(first, part, apart_ns, joint, known)
                matched = partner != UNKNOWN
                members += [(part.select(matched), partner[matched])] if matched.any() else []
                lonely += [part.select(~matched)] if not matched.all() else []
        groups.append(members)
        left = lonely
    return groups


def _pair(first: Part, other: Part, apart_ns: int, joint: bool, known: bool) -> NDArray[np.int64]:
    """Return the row of ``first`` with the same collective, or `UNKNOWN`, for each of ``other``."""
    if len(first) == len(other):
        partner = np.arange(len(first))
        if not joint or (
            _overlap(first, other, partner, apart_ns).mean() >= _OVERLAPPING_PART
            and (known or len(first) < _FEWEST_COMPARED or _end_together(first, other, apart_ns))
        ):
            return partner
    there, back = _nearest(first.end, other.end), _nearest(other.end, first.end)
    mutual = back[there] == np.arange(len(other))
    matched = mutual & _overlap(first, other, there, apart_ns)
    few = np.count_nonzero(matched) < _MATCHED_PART * min(len(first), len(other))
    if few or (
        joint
        and not known
        and not _end_together(first.select(there[matched]), other.select(matched), apart_ns)
    ):
        matched[:] = False
    return np.where(matched, there, UNKNOWN)


def _overlap(first: Part, other: Part, partner: NDArray[np.int64], apart_ns: int) -> Mask:
    latest = np.maximum(first.start[partner], other.start)
    return latest <= np.minimum(first.end[partner], other.end) + apart_ns


def _end_together(first: Part, other: Part, apart_ns: int) -> bool:
    """Return True if pairs of rows end together, as those of one communicator must."""
    apart = median(np.abs(first.end - other.end))
    length = median(np.minimum(first.end - first.start, other.end - other.start))
    return bool(apart <= apart_ns + _ENDS_APART_PART * length)


def _nearest(among: Times, moments: Times) -> NDArray[np.int64]:
    """Return the index of the nearest of some times, for each moment."""
    order = np.argsort(among, kind="stable")
    ordered = among[order]
    after = np.clip(np.searchsorted(ordered, moments), 1, max(len(ordered) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(ordered) - 1)
    nearer = moments - ordered[before] <= ordered[after] - moments
    return order[np.where(nearer, before, after)]


class Joined(Struct, frozen=True, dict=True):
    """Rows of one group; ``instance`` counts within it."""

    operation: str
    lane: NDArray[np.int16]
    row: NDArray[np.int64]
    instance: NDArray[np.int64]
    lanes: NDArray[np.int64]
    """Number of participating GPUs by row; `ALONE` for operations that wait for no other GPU."""
    communicator: int = UNKNOWN
    complete: bool = False
    """True if ``lanes`` includes GPUs of ranks that were not recorded."""


def join(
    spans: Sequence[Window],
    members: Group,
    groups: Sequence[Group],
    operation: str,
    known: RankGroup,
) -> Joined:
    """Join the rows of one of the groups of a kernel name.

    ``spans`` are those of all GPUs, ``known`` is the communicator.
    """
    instance = np.concatenate([instance for _, instance in members])
    starts, ends = (
        np.concatenate([getattr(part, n) for part, _ in members]) for n in ("start", "end")
    )
    # GPUs that share other collectives with the group would take part in these if recorded.
    mine = {part.lane for part, _ in members}
    others = [{part.lane for part, _ in other} for other in groups]
    relatives = set[int]().union(*(lanes for lanes in others if lanes & mine)) - mine
    missed = np.zeros(int(instance.max()) + 1, np.int64)
    for lane in relatives:
        outside = (starts < spans[lane].start) | (ends > spans[lane].end)
        missed[instance[outside]] += 1
    return Joined(
        operation,
        np.concatenate([np.full(len(part), part.lane, np.int16) for part, _ in members]),
        np.concatenate([part.row for part, _ in members]),
        instance,
        np.maximum(len(members) + missed[instance], known.size),
        known.communicator,
        known.size > 0,
    )


_COLUMNS: Final = ("start", "end", "kind", "name", "process", "correlation", "bytes")
_NONE: Final = np.empty(0, np.int64)
_NO_NAMES: Final = np.empty(0, np.int32)


def match_collectives(gpus: PerGpu) -> Collectives:
    """Match the communication of all GPUs; an operation without partners stands alone."""
    talks = gpus.each(_talk, gpus.operations)
    named = [talk.events.name[talk.events.kind == Kind.KERNEL] for talk in talks]
    ids_of: dict[str, list[int]] = defaultdict(list)
    for id, text in gpus.trace.names(distinct_ids(np.concatenate([_NO_NAMES, *named]))).items():
        ids_of[text].append(id)
    spans = [item.span for item in gpus.operations]
    communicators = _communicators(talks)
    joined: list[Joined] = []
    for (id, operation), parts in _sequences(talks, ids_of):
        known = communicators.get(id, RankGroup(()))
        if operation == SEND_RECV and known.places:
            # The kernels whose peers are unknown; `_point_to_point` has the others.
            left = []
            for part in parts:
                talk = talks[part.lane]
                left.append(part.select(~is_among(part.row, talk.row[_are_exchanges(talk)])))
            parts = [part for part in left if len(part)]
        groups = group(parts, gpus.clocks_apart_ns, joint=operation in JOINT, known=id != UNKNOWN)
        joined += [join(spans, item, groups, operation, known) for item in groups]
    sends: list[tuple[_Kernel, _Kernel]] = []
    for known in communicators.values():
        if known.places:
            exchanged, pairs = _point_to_point(talks, known, gpus.clocks_apart_ns)
            joined += exchanged
            sends += pairs
    joined += _peer_copies(talks)
    # A trace that does not state the number of ranks counts as one of all of them.
    seen = len({summary.gpu.rank for summary in gpus.operations})
    all_seen = (gpus.trace.session.world_size or 0) <= seen
    return _collect(talks, joined, sends, communicators, all_seen=all_seen)


def _sequences(
    talks: Sequence[_Talk], ids_of: Mapping[str, Sequence[int]]
) -> Iterator[tuple[tuple[int, str], list[Part]]]:
    """Yield the kernels of one name, communicator and operation, a part for each GPU with any."""
    for text in sorted(ids_of):
        parts: dict[tuple[int, str], list[Part]] = defaultdict(list)
        for lane, talk in enumerate(talks):
            events = talk.events
            mine = (events.kind == Kind.KERNEL) & is_among(events.name, ids_of[text])
            for (id, operation), rows in _by_communicator(talk.messages, np.flatnonzero(mine)):
                part = Part(lane, talk.row[rows], events.start[rows], events.end[rows])
                parts[id, operation or operation_of(text)].append(part)
        yield from parts.items()


class _Talk(Struct, frozen=True):
    """Communication kernels and peer copies of one GPU."""

    row: NDArray[np.int64]
    """Row of each among all operations of the GPU."""
    events: Events
    messages: Messages


_Kernel = tuple[int, int]
"""Lane of a kernel, and its row there."""


def _communicators(talks: Sequence[_Talk]) -> dict[int, RankGroup]:
    """Return the communicators that kernels are known to be of, by id."""
    lanes: dict[int, list[int]] = defaultdict(list)
    entries: dict[int, dict[int, Communicator]] = defaultdict(dict)
    for lane, talk in enumerate(talks):
        for id in distinct_ids(talk.messages.communicator).tolist():
            if id != UNKNOWN:
                lanes[id].append(lane)
        for entry in talk.messages.communicators:
            entries[entry.id][lane] = entry
    known = {}
    for id, members in lanes.items():
        by_lane = entries[id]
        size = max((entry.size for entry in by_lane.values()), default=0)
        places = [by_lane[lane].place if lane in by_lane else UNKNOWN for lane in members]
        if UNKNOWN in places or len(set(places)) < len(places):
            # Ranks of a communicator are mostly in the order of those of the run.
            places = list(range(size)) if size == len(members) else []
        name = next((entry.name for entry in by_lane.values() if entry.name), "")
        known[id] = RankGroup(tuple(members), id, size, name, tuple(places))
    return known


def _by_communicator(
    messages: Messages, rows: NDArray[np.int64]
) -> Iterator[tuple[tuple[int, str], NDArray[np.int64]]]:
    """Yield the rows of each communicator and operation that is known of messages."""
    ids, names = messages.communicator[rows], messages.operation[rows]
    for id in distinct_ids(ids).tolist():
        for name in dict.fromkeys(names[ids == id].tolist()):
            yield (id, name), rows[(ids == id) & (names == name)]


def _point_to_point(
    talks: Sequence[_Talk], known: RankGroup, apart_ns: int
) -> tuple[list[Joined], list[tuple[_Kernel, _Kernel]]]:
    """Match sends with receives in a communicator of which the rank of each GPU is known.

    Return the kernels that exchange something, and the pairs that send and receive. From one rank
    to another, messages arrive in the order in which they are sent.
    """
    lane_of = dict(zip(known.places, known.lanes, strict=True))
    halves: dict[tuple[int, int], list[list[int]]] = defaultdict(lambda: [[], []])
    kernels: list[_Kernel] = []
    missing: dict[_Kernel, int] = {}
    for place, lane in lane_of.items():
        messages = talks[lane].messages
        mine = messages.communicator == known.communicator
        mine &= np.isin(messages.operation, ("", SEND_RECV))
        mine &= _are_exchanges(talks[lane])
        kernels += [(lane, row) for row in np.flatnonzero(mine).tolist()]
        for kernel, sends, peer in zip(*(c.tolist() for c in messages[3:6]), strict=True):
            if mine[kernel] and peer != place:
                halves[(place, peer) if sends else (peer, place)][0 if sends else 1].append(kernel)
    pairs: list[tuple[_Kernel, _Kernel]] = []
    for (source, target), (sent, received) in halves.items():
        matched: list[tuple[int, int]] = []
        if sent and received:
            sender, receiver = (
                Part(lane, at, talks[lane].events.start[at], talks[lane].events.end[at])
                for lane, at in (
                    (lane_of[source], np.array(sent, np.int64)),
                    (lane_of[target], np.array(received, np.int64)),
                )
            )
            partner = _pair(sender, receiver, apart_ns, joint=False, known=True)
            matched = [(int(p), n) for n, p in enumerate(partner.tolist()) if p != UNKNOWN]
            pairs += [
                ((lane_of[source], sent[p]), (lane_of[target], received[n])) for p, n in matched
            ]
        for place, rows, side in ((source, sent, 0), (target, received, 1)):
            for number in set(range(len(rows))) - {pair[side] for pair in matched}:
                missing[lane_of[place], rows[number]] = 1
    return _exchanges(talks, kernels, pairs, missing, known.communicator), [
        tuple((lane, int(talks[lane].row[row])) for lane, row in pair)  # type: ignore[misc]
        for pair in pairs
    ]


def _are_exchanges(talk: _Talk) -> Mask:
    exchanges = np.zeros(len(talk.row), bool)
    exchanges[talk.messages.kernel] = True
    return exchanges


def _exchanges(
    talks: Sequence[_Talk],
    kernels: Sequence[_Kernel],
    pairs: Sequence[tuple[_Kernel, _Kernel]],
    missing: Mapping[_Kernel, int],
    communicator: int,
) -> list[Joined]:
    """Join the kernels that exchange something; no GPU has two kernels in one exchange."""
    if not kernels:
        return []
    exchange = {kernel: {kernel} for kernel in kernels}
    starts = {kernel: talks[kernel[0]].events.start[kernel[1]] for kernel in kernels}
    for sender, receiver in sorted(pairs, key=lambda pair: starts[pair[0]]):
        a, b = exchange[sender], exchange[receiver]
        if a is not b and {lane for lane, _ in a}.isdisjoint(lane for lane, _ in b):
            a |= b
            exchange |= dict.fromkeys(b, a)
    distinct = list({id(each): each for each in exchange.values()}.values())
    members = [(lane, row, number) for number, each in enumerate(distinct) for lane, row in each]
    lane, _, instance = np.array(members, np.int64).T
    sizes = [len(each) + any(kernel in missing for kernel in each) for each in distinct]
    return [
        Joined(
            SEND_RECV,
            lane.astype(np.int16),
            np.array([talks[at].row[index] for at, index, _ in members], np.int64),
            instance,
            np.array([max(sizes[number], 2) for number in instance.tolist()], np.int64),
            communicator,
            complete=True,
        )
    ]


def _talk(view: GpuShardView) -> _Talk:
    operations = view.operations
    kernels = (operations.classes == OperationClass.COMMUNICATION) & (
        operations.events.kind == Kind.KERNEL
    )
    rows = np.flatnonzero(kernels | (operations.events.kind == Kind.COPY_PEER))
    events = operations.events.having(*_COLUMNS).select(rows)
    names = view.trace.names(distinct_ids(events.name))
    by_name = {id: operation_of(text) for id, text in names.items()}
    messages = read_messages(view, events, [by_name[id] for id in events.name.tolist()])
    return _Talk(rows, events, messages)


def _peer_copies(talks: Sequence[_Talk]) -> list[Joined]:
    """Return the copies between two GPUs: each is a row of both, with equal times."""
    copies = [np.flatnonzero(talk.events.kind == Kind.COPY_PEER) for talk in talks]
    lane = np.repeat(np.arange(len(copies)), [len(rows) for rows in copies]).astype(np.int16)
    if not len(lane):
        return []
    parts = [talk.events.select(rows) for talk, rows in zip(talks, copies, strict=True)]
    keys = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("correlation", "process", "end", "start")
    ]
    order = np.lexsort(keys)
    new = np.any([np.diff(key[order], prepend=-1) != 0 for key in keys], axis=0)
    new[0] = True
    rows = np.concatenate([talk.row[mine] for talk, mine in zip(talks, copies, strict=True)])
    return [
        Joined(PEER_COPY, lane[order], rows[order], np.cumsum(new) - 1, np.full(len(rows), ALONE))
    ]


def _collect(
    talks: Sequence[_Talk],
    joined: Sequence[Joined],
    sends: Sequence[tuple[_Kernel, _Kernel]],
    communicators: Mapping[int, RankGroup],
    *,
    all_seen: bool,
) -> Collectives:
    """Return the table of all rows, with the columns of the events of their GPUs."""
    names = tuple(sorted({part.operation for part in joined}))
    columns = _joined_columns(joined, names)
    lane, row = columns["lane"], columns["row"]
    rows_of = rows_by(lane, len(talks))
    for name in ("start", "end", "name", "correlation", "bytes"):
        columns[name] = np.full(len(row), UNKNOWN, COLUMN_TYPES[name])
        for talk, mine in zip(talks, rows_of, strict=True):
            values = talk.messages.bytes if name == "bytes" else getattr(talk.events, name)
            columns[name][mine] = values[np.searchsorted(talk.row, row[mine])]
    if len(row):  # Instances are numbered in order of their first start.
        begins = np.full(int(columns["instance"].max()) + 1, _NEVER)
        np.minimum.at(begins, columns["instance"], columns["start"])
        places = np.empty(len(begins), np.int64)
        places[np.argsort(begins, kind="stable")] = np.arange(len(begins))
        columns["instance"] = places[columns["instance"]]
    order = np.lexsort((lane, columns["instance"]))
    columns = {name: column[order] for name, column in columns.items()}
    complete = columns.pop("complete") | all_seen
    arrival = _arrivals(columns, columns.pop("lanes"), complete)
    group, groups = _rank_groups(columns, columns.pop("communicator"), names, communicators)
    kernels = zip(columns["lane"].tolist(), columns["row"].tolist(), strict=True)
    place = {kernel: at for at, kernel in enumerate(kernels)}
    return Collectives(
        **columns,
        arrival=arrival,
        group=group,
        operations=names,
        groups=groups,
        sends=np.array([[place[a], place[b]] for a, b in sends], np.int64).reshape(-1, 2),
    )


_ROW_COLUMNS: Final = {"lane": np.int16, "row": np.int64, "lanes": np.int64, "instance": np.int64}


def _joined_columns(joined: Sequence[Joined], names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return the rows of all groups one after another, with instances that count over all."""
    columns: dict[str, NDArray[Any]] = {
        name: np.concatenate([_NONE, *(getattr(part, name) for part in joined)], dtype=kind)
        for name, kind in _ROW_COLUMNS.items()
    }
    rows = np.array([len(part.row) for part in joined], np.int64)
    instances = np.array([int(part.instance.max()) + 1 for part in joined], np.int64)
    columns["instance"] += np.repeat(np.cumsum(instances) - instances, rows)
    of_groups = {
        "complete": np.array([part.complete for part in joined], np.bool_),
        "communicator": np.array([part.communicator for part in joined], np.int64),
        "operation": np.array([names.index(part.operation) for part in joined], np.int16),
    }
    return columns | {name: np.repeat(values, rows) for name, values in of_groups.items()}


def _rank_groups(
    columns: Mapping[str, NDArray[Any]],
    communicator: NDArray[np.int64],
    names: Sequence[str],
    communicators: Mapping[int, RankGroup],
) -> tuple[NDArray[np.int32], tuple[RankGroup, ...]]:
    """Return the group of each row, and the groups: communicators, else sets of GPUs."""
    lane, instance = columns["lane"], columns["instance"]
    group = np.full(len(lane), UNKNOWN, np.int32)
    if not len(lane):
        return group, ()
    from random import Random

    draw = Random(0)
    keys = np.array([draw.getrandbits(62) for _ in range(int(lane.max()) + 1)])
    members = np.zeros(int(instance[-1]) + 1, np.int64)
    np.add.at(members, instance, keys[lane])
    copies = is_among(columns["operation"], [names.index(n) for n in names if n == PEER_COPY])
    groups: list[RankGroup] = []
    for id in distinct_ids(communicator).tolist():
        rows = (communicator == id) & ~copies
        if id != UNKNOWN:
            group[rows] = len(groups)
            groups.append(communicators[id])
            continue
        for key in distinct_ids(members[instance[rows]]).tolist():
            alike = rows & (members[instance] == key)
            group[alike] = len(groups)
            first = instance[np.argmax(alike)]
            groups.append(RankGroup(tuple(lane[instance == first].tolist())))
    return group, tuple(groups)


def _arrivals(
    columns: Mapping[str, NDArray[Any]], lanes: NDArray[np.int64], complete: Mask
) -> Times:
    """Return, for each row, the last start in its instance before its end."""
    instance, start, end = columns["instance"], columns["start"], columns["end"]
    if not len(instance):
        return _NONE
    count = np.bincount(instance)[instance]
    moments, begin = np.unique(start, return_inverse=True)
    came = np.sort(instance * len(moments) + begin)
    by_own_end = instance * len(moments) + np.searchsorted(moments, end, "right") - 1
    arrival = moments[came[np.searchsorted(came, by_own_end, "right") - 1] % len(moments)]
    whole = (count == lanes) & (lanes > 1) & complete
    return np.where(whole | (lanes == ALONE), arrival, UNKNOWN)
