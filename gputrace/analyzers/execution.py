"""Functions of the rows of one GPU, run wherever these rows are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.host_calls import (
    CALL_COLUMNS,
    CudaApiCalls,
    read_calls,
    recorded_calls,
    sorts_of,
    thread_keys,
)
from gputrace.analyzers.lanes import (
    AnyLane,
    Lane,
    LaneSummary,
    Place,
    Waiting,
    find_lanes,
)
from gputrace.analyzers.operations import (
    COLUMNS,
    Gpu,
    GpuOperations,
    GpuSummary,
    OperationClass,
    call_windows,
    classify,
    group_gpus,
    order_of,
    other_ends,
    pair_keys,
    pair_of,
    read_operations,
)
from gputrace.analyzers.steps import FoundSteps, agree, steps_by_rank
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.model.events import (
    COLUMN_TYPES,
    GPU_KINDS,
    Column,
    Events,
    IdLookup,
    Kind,
    distinct_ids,
    number_ids,
)
from gputrace.model.results import RecorderCost
from gputrace.model.trace import Progress, Trace, Window
from gputrace.store.spill_file import LazySequence, SpillFile

_Found = TypeVar("_Found")
_OfGpu = TypeVar("_OfGpu", GpuSummary, LaneSummary)


class ShardTask(NamedTuple):
    """Task for a shard."""

    shard: int
    work: Callable[..., Any]
    """A function of a `Shard`, or of a `GpuShardView` where ``gpu`` is given."""
    gpu: Place | None = None
    """The GPU that the function is of; None for one of the shard."""
    given: tuple[Any, ...] = ()
    """Further arguments."""


class HasGpu(Protocol):
    """Whatever is of one GPU."""

    @property
    def gpu(self) -> Place: ...


class Shards(ABC):
    """All shards of a run, by number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def ask(self, tasks: Sequence[ShardTask], *, changes: bool = False) -> list[Any]:
        """Run tasks and return their results in order; ``changes`` marks tasks that change their
        shards.
        """

    @abstractmethod
    def whole(self, trace: Trace) -> Shard:
        """One that reads all of the run here."""

    @abstractmethod
    def calls_within(self, trace: Trace, window: Window) -> CudaApiCalls | None:
        """Return the calls that touch a window, as `PerGpu.calls_within` does."""

    @abstractmethod
    def close(self) -> None:
        """Gives them back."""


class LocalShards(Shards):
    """The one that has all of a trace, in this process."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def __len__(self) -> int:
        return 1

    def ask(self, tasks: Sequence[ShardTask], *, changes: bool = False) -> list[Any]:
        results = []
        for task in tasks:
            view = self.shard if task.gpu is None else GpuShardView(self.shard, task.gpu)
            results.append(task.work(view, *task.given))
        return results

    def whole(self, trace: Trace) -> Shard:
        return self.shard

    def calls_within(self, trace: Trace, window: Window) -> CudaApiCalls | None:
        return self.shard.calls

    def close(self) -> None:
        """Views go on with it; it ends with the last of them."""


class PerGpu:
    """The GPUs of a run.

    Attributes:
        trace: the run.
        shards: where the rows are.
        operations: what ran on each GPU, in order of GPU.
        lanes: of those that have anything in the window, once they are built.
        has_calls: whether CUDA calls of the hosts were recorded, once they are read.
    """

    def __init__(self, trace: Trace, shards: Shards, ran: Sequence[Sequence[GpuSummary]]) -> None:
        """``ran`` is what ran on each GPU, by shard."""
        self.trace, self.shards = trace, shards
        self._shard = {one.gpu: number for number, own in enumerate(ran) for one in own}
        self.operations = self._in_order(ran)
        self.lanes: Sequence[LaneSummary] = ()
        self.has_calls = False

    @classmethod
    def here(cls, shard: Shard) -> PerGpu:
        """Create the GPUs of a trace that is read in this process."""
        return cls(shard.trace, LocalShards(shard), [shard.read()])

    @classmethod
    def of_hosts(cls, trace: Trace, lanes: Sequence[AnyLane]) -> PerGpu:
        """Create host-only ranks: lanes without GPUs."""
        return cls(trace, LocalShards(Shard.of_hosts(trace, lanes)), [])

    def each(
        self,
        work: Callable[..., _Found],
        of: Iterable[HasGpu],
        *given: Iterable[Any],
        same: Sequence[Any] = (),
        keeps: bool = False,
    ) -> list[_Found]:
        """Run a function for each of some GPUs and return the results.

        Args:
            work: of a module, with a `OneGpu` and what is given for it.
            of: the GPUs.
            given: further arguments, by GPU.
            same: arguments after these that are the same for all.
            keeps: whether it keeps something where the rows are.
        """
        jobs = [
            ShardTask(self._shard.get(one.gpu, 0), work, one.gpu, (*own, *same))
            for one, *own in zip(of, *given, strict=True)
        ]
        return self.shards.ask(jobs, changes=keeps)

    def in_each_place(self, work: Callable[..., _Found], *given: Any) -> list[_Found]:
        """Run a function for each shard and return the results."""
        tasks = [ShardTask(number, work, given=given) for number in range(len(self.shards))]
        return self.shards.ask(tasks)

    def move(self, shifts: Mapping[int, int], how: str) -> None:
        """Adds nanoseconds to the times of each host; ``how`` says what told them."""
        self.trace.shift_hosts(shifts, how)
        own: list[dict[int, int]] = [{} for _ in range(len(self.shards))]
        for ran in self.operations:
            own[self._shard[ran.gpu]][ran.gpu.host] = shifts[ran.gpu.host]
        self.operations = self._in_order(self._change_each(_move, [(mine,) for mine in own]))

    def find_steps(self, chosen: tuple[int, int] | None = None) -> FoundSteps:
        """Reads the calls, and finds everyone's steps."""
        self.has_calls = any(self._change_each(Shard.read_calls))
        shown: dict[int, StepWindows] = {}
        for own in self.in_each_place(Shard.find_steps):
            shown |= own
        return agree(self.trace, dict(sorted(shown.items())), self.operations, chosen)

    def forget_calls(self) -> None:
        """Has them count as not recorded."""
        self.has_calls = False
        self._change_each(Shard.forget_calls)

    def build_lanes(self, window: Window | None, found: FoundSteps) -> None:
        """Timelines and causes of all GPUs with anything in the window."""
        steps: list[dict[int, StepWindows]] = [{} for _ in range(len(self.shards))]
        for own in self.operations:
            if own.gpu.rank in found.by_rank:
                steps[self._shard[own.gpu]][own.gpu.rank] = found.by_rank[own.gpu.rank]
        given = [(window, own, self.has_calls, found.cost) for own in steps]
        self.lanes = self._in_order(self._change_each(Shard.build_lanes, given))

    def add_waits(self, waits: Mapping[Gpu, Waiting]) -> None:
        """Tells of each GPU when it was in collectives that waited for others."""
        own: list[dict[Gpu, Waiting]] = [{} for _ in range(len(self.shards))]
        for lane in self.lanes:
            own[self._shard[lane.gpu]][lane.gpu] = waits[lane.gpu]
        self._change_each(Shard.add_waits, [(mine,) for mine in own])

    @property
    def whole(self) -> Shard:
        """All of the run, for what needs it here."""
        return self.shards.whole(self.trace)

    def calls_within(self, window: Window) -> CudaApiCalls | None:
        """The calls that touch a window, and maybe others; None where there are none."""
        return self.shards.calls_within(self.trace, window)

    def close(self) -> None:
        """Gives the rows back, and all that was made of them elsewhere."""
        self.shards.close()

    def _change_each(
        self, work: Callable[..., Any], given: Sequence[tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """Run a function that changes its shard on each, with arguments by shard."""
        arguments = given or [() for _ in range(len(self.shards))]
        tasks = [ShardTask(number, work, given=own) for number, own in enumerate(arguments)]
        return self.shards.ask(tasks, changes=True)

    def _in_order(self, by_shard: Sequence[Sequence[_OfGpu]]) -> list[_OfGpu]:
        """Return the items of all shards in order of GPU."""
        everything = [one for own in by_shard for one in own]
        return sorted(everything, key=lambda one: order_of(one.gpu))


def same_names(
    gpus: PerGpu, ids: Sequence[NDArray[np.int64]]
) -> tuple[list[str], list[dict[int, int]]]:
    """The texts of some name ids of each GPU, each once; for each GPU, which of them its ids are.

    Files of one run have ids of their own for the same text.
    """
    known = gpus.trace.names(distinct_ids(np.concatenate(ids)))
    texts = list(dict.fromkeys(known.values()))
    place = {text: number for number, text in enumerate(texts)}
    return texts, [{id: place[known[id]] for id in own.tolist()} for own in ids]


_Any = TypeVar("_Any")

_Kept = TypeVar("_Kept", GpuOperations, Lane)


class Shard:
    """The GPUs whose rows are in one place.

    Attributes:
        trace: whose rows they are.
        operations: of each GPU, once they are read.
        calls: of all host threads, once they are read; None where there are none.
        lanes: of the GPUs that have anything in the window, once they are built.
        kept: what analyzers keep of GPUs, by name.
    """

    def __init__(
        self, trace: Trace, scratch: SpillFile | None = None, progress: Progress | None = None
    ) -> None:
        """With a ``scratch``, columns are on disk, those of one GPU in memory at a time."""
        self.trace, self._scratch, self._progress = trace, scratch, progress
        self.operations: Sequence[GpuOperations] = ()
        self.calls: CudaApiCalls | None = None
        self.lanes: Sequence[AnyLane] = ()
        self._ran: list[GpuSummary] = []
        self._places: dict[Place, int] = {}
        self._lanes: dict[Place, int] = {}
        self.kept: dict[tuple[Place, str], Any] = {}
        self._once: dict[Callable[[Shard], Any], Any] = {}

    @classmethod
    def of_hosts(cls, trace: Trace, lanes: Sequence[AnyLane]) -> Shard:
        """The lanes of ranks of which no GPU was seen."""
        shard = cls(trace)
        shard.take_lanes(lanes)
        return shard

    def read(self) -> list[GpuSummary]:
        """Reads the GPUs' operations."""
        if self._scratch is None:
            return self.take(read_operations(self.trace, self._progress))
        return self.take(spill_operations(self.trace, self._scratch, self._progress))

    def take(self, operations: Iterable[GpuOperations]) -> list[GpuSummary]:
        """Sets the operations of all GPUs; what ran on each."""
        self.operations = self._kept(operations)
        self._ran = [GpuSummary.of(own) for own in self.operations]
        self._places = {ran.gpu: place for place, ran in enumerate(self._ran)}
        return self._ran

    def move(self, shifts: Mapping[int, int]) -> list[GpuSummary]:
        """Adds nanoseconds to the times of the operations by host; the trace has moved already."""
        if not any(shifts.values()):
            return self._ran
        return self.take(own.moved(shifts[own.gpu.host]) for own in self.operations)

    def read_calls(self) -> bool:
        """Reads the hosts' CUDA calls; whether there are any."""
        if self._scratch is None:
            self.calls = read_calls(self.trace, self._progress)
        else:
            self.calls = spill_calls(self.trace, self._scratch, self._progress)
        return self.calls is not None

    def forget_calls(self) -> None:
        """Has them count as not recorded."""
        self.calls = None

    def find_steps(self) -> dict[int, StepWindows]:
        """The steps of each rank by itself."""
        return steps_by_rank(self.trace, self.operations, self.calls)

    def build_lanes(
        self,
        window: Window | None,
        steps: Mapping[int, StepWindows],
        has_calls: bool,
        cost: RecorderCost | None,
    ) -> list[LaneSummary]:
        """Timelines and causes of all GPUs with anything in the window.

        Args:
            window: the part of the time that was asked for.
            steps: of the ranks.
            has_calls: whether calls were recorded, if only in another place.
            cost: of recording the steps.
        """
        lanes = find_lanes(
            self.trace, self.operations, self.calls, steps, window, self._scratch, has_calls, cost
        )
        self.take_lanes(self._kept(lanes))
        return [LaneSummary.of(lane) for lane in lanes]

    def take_lanes(self, lanes: Sequence[AnyLane]) -> None:
        """Sets the lanes of all GPUs."""
        self.lanes = lanes
        self._lanes = {lane.gpu: place for place, lane in enumerate(lanes)}

    def add_waits(self, waits: Mapping[Gpu, Waiting]) -> None:
        """Tells of each GPU when it was in collectives that waited for others."""
        which = OperationClass.COMMUNICATION
        self.lanes = self._kept(
            replace(lane, waiting=waits[lane.gpu].intersection(lane.timeline.classes[which]))
            for lane in self.lanes
            if isinstance(lane, Lane)
        )

    def _kept(self, things: Iterable[_Kept]) -> Sequence[_Kept]:
        """Return the items, in memory or on disk."""
        if self._scratch is None:
            return list(things)
        return LazySequence([self._scratch.keep(one) for one in things], self._scratch)

    def once(self, work: Callable[[Shard], _Found]) -> _Found:
        """Return a function's result for the whole shard, computed once."""
        if work not in self._once:
            self._once[work] = work(self)
        found: _Found = self._once[work]
        return found

    def rest(self) -> None:
        """Gives back what memory was needed for columns on disk."""
        if self._scratch is not None:
            self._scratch.let_go()

    def keep(self, key: tuple[Place, str], value: _Any) -> _Any:
        """Keeps something of a GPU, on disk if the columns are."""
        self.kept[key] = value if self._scratch is None else self._scratch.keep(value)
        found: _Any = self.kept[key]
        return found

    def operations_of(self, gpu: Place) -> GpuOperations:
        """Return the operations of one GPU."""
        return self.operations[self._places[gpu]]

    def lane_of(self, gpu: Place) -> AnyLane:
        """The lane of one GPU, or rank."""
        return self.lanes[self._lanes[gpu]]


def _move(shard: Shard, shifts: Mapping[int, int]) -> list[GpuSummary]:
    """Call the method of the shard's own class."""
    return shard.move(shifts)


class GpuShardView:
    """One GPU of a shard: its rows, and what was made of them."""

    def __init__(self, shard: Shard, gpu: Place) -> None:
        self._shard, self._gpu = shard, gpu
        self.once = shard.once

    @property
    def trace(self) -> Trace:
        """Tells the names of its rows."""
        return self._shard.trace

    @property
    def calls(self) -> CudaApiCalls | None:
        """The calls of all processes whose rows are in the same place."""
        return self._shard.calls

    def keep(self, name: str, value: _Any) -> _Any:
        """Keeps something of this GPU, to be asked for by name."""
        return self._shard.keep((self._gpu, name), value)

    def kept(self, name: str) -> Any:
        """Return what was stored for this GPU under a name."""
        return self._shard.kept[self._gpu, name]

    @property
    def operations(self) -> GpuOperations:
        return self._shard.operations_of(self._gpu)

    @property
    def lane(self) -> Lane:
        """Its lane, once that is built."""
        lane = self.any_lane
        assert isinstance(lane, Lane)
        return lane

    @property
    def any_lane(self) -> AnyLane:
        """Return the lane of the GPU or of a host-only rank."""
        return self._shard.lane_of(self._gpu)


def spill_operations(
    trace: Trace, scratch: SpillFile, progress: Progress | None = None
) -> Sequence[GpuOperations]:
    """The operations of every GPU that did anything, in order of GPU, in ``scratch``."""
    aside, parts, peers = SpillFile(), [], False
    for events in trace.parts(GPU_KINDS, COLUMNS, progress):
        peers = peers or bool((events.kind == Kind.COPY_PEER).any())
        parts.append(_part(events, pair_keys(events), aside))
    if peers:  # Peer copies are also rows of the GPU at their other end.
        events = other_ends(trace, COLUMNS)
        parts.append(_part(events, pair_keys(events), aside))
    work: Counter[int] = Counter()
    for part in parts:
        work.update({key: rows.stop - rows.start for key, rows in part.groups.items()})
    keys = {pair_of(key): key for key in work}
    spilled = []
    for gpu in group_gpus(trace, {pair_of(key): work[key] for key in sorted(work)}):
        own = [keys[pair] for pair in gpu.pairs]
        order = np.argsort(_column(parts, own, "start"), kind="stable")
        events = Events({name: scratch.keep(_column(parts, own, name)[order]) for name in COLUMNS})
        windows = tuple(trace.recorded(gpu.process)), call_windows(trace, gpu)
        spilled.append(scratch.keep(GpuOperations(gpu, events, classify(trace, events), *windows)))
        aside.let_go()
        scratch.let_go()
    return spilled


def _column(parts: Sequence[_Part], keys: Sequence[int], name: str) -> Column:
    joined: Column = np.concatenate([part.column(keys, name) for part in parts])
    return joined


def spill_calls(
    trace: Trace, scratch: SpillFile, progress: Progress | None = None
) -> CudaApiCalls | None:
    """All CUDA calls of the trace in ``scratch``; None where there are none."""
    if Kind.API not in trace.kinds:
        return None
    aside = SpillFile()
    read = trace.parts([Kind.API], CALL_COLUMNS, progress)
    parts = [_part(events, thread_keys(events), aside) for events in read]
    keys = sorted({key for part in parts for key in part.groups})
    if not keys:
        return None
    counts = [sum(part.count(key) for part in parts) for key in keys]
    types = {name: COLUMN_TYPES[name] for name in ("start", "end", "name", "correlation", "thread")}
    rooms = {name: scratch.room(kind, sum(counts)) for name, kind in types.items()}
    rooms["sort"] = scratch.room(np.int8, sum(counts))
    for number, (key, count) in enumerate(zip(keys, counts, strict=True)):
        order = np.argsort(_column(parts, [key], "start"), kind="stable")
        for name in ("start", "end", "name", "correlation"):
            rooms[name].append(_column(parts, [key], name)[order])
        rooms["thread"].append(np.full(count, number, np.int32))
        rooms["sort"].append(sorts_of(trace, _column(parts, [key], "name")[order]))
        aside.let_go()
    first = np.append(0, np.cumsum(counts))
    threads = tuple((key >> 32, int(np.int32(np.uint32(key & 0xFFFFFFFF)))) for key in keys)
    columns = {name: room.column for name, room in rooms.items()}
    correlation = columns.pop("correlation")
    by_correlation = {}  # By process, whose threads lie side by side; 0 is no id.
    processes = [process for process, _ in threads]
    for process in sorted(set(processes)):
        low = int(first[processes.index(process)])
        high = int(first[len(processes) - processes[::-1].index(process)])
        rows = np.flatnonzero(correlation[low:high] > 0) + low
        if len(rows):
            by_correlation[process] = scratch.keep(IdLookup(correlation[rows], rows))
        scratch.let_go()
    return CudaApiCalls(
        **columns,
        threads=threads,
        first=first,
        _by_correlation=by_correlation,
        _recorded=recorded_calls(trace, sorted(set(processes))),
    )


@dataclass(frozen=True)
class _Part:
    """Some rows of a trace, those that belong together side by side."""

    rows: Events
    place: NDArray[np.int32]
    """Row numbers of the part, in the order of the file."""
    groups: Mapping[int, slice]

    def column(self, keys: Iterable[int], name: str) -> Column:
        """Return a column of the rows of some groups, in the order of the file."""
        slices = [self.groups[key] for key in keys if key in self.groups]
        values = [getattr(self.rows, name)[rows] for rows in slices]
        if len(slices) < 2:
            return values[0] if values else np.empty(0, COLUMN_TYPES[name])
        order = np.argsort(np.concatenate([self.place[rows] for rows in slices]))
        joined: Column = np.concatenate(values)[order]
        return joined

    def count(self, key: int) -> int:
        rows = self.groups.get(key, slice(0, 0))
        return int(rows.stop - rows.start)


def _part(events: Events, keys: NDArray[np.signedinteger[Any]], scratch: SpillFile) -> _Part:
    distinct, number = number_ids(keys)
    kind = np.int16 if len(distinct) < 1 << 15 else np.int64  # Sixteen bits sort in two passes.
    order = np.argsort(number.astype(kind), kind="stable")
    edges = [0, *np.cumsum(np.bincount(number)).tolist()]
    groups = {
        key: slice(low, high)
        for key, (low, high) in zip(distinct.tolist(), pairwise(edges), strict=True)
    }
    part = _Part(events.select(order), order.astype(np.int32), groups)
    kept = scratch.keep(part)
    scratch.let_go()
    return kept
