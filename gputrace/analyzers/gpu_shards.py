"""Functions of the rows of one GPU, run wherever these rows are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import (
    CALL_COLUMNS,
    CudaApiCalls,
    number_threads,
    read_calls,
    recorded_calls,
    rows_by_correlation,
    sorts_of,
)
from gputrace.analyzers.lanes import (
    AnyGpu,
    AnyLane,
    AnyLaneSummary,
    Lane,
    LaneSummary,
    Waiting,
    find_lanes,
    read_host_side,
)
from gputrace.analyzers.operations import (
    Gpu,
    GpuOperations,
    GpuSummary,
    OperationClass,
    classify,
    columns_of,
    group_gpus,
    order_of,
    other_ends,
    pair_keys,
    pair_of,
    read_operations,
    with_unnamed_exchanges,
)
from gputrace.analyzers.steps import FoundSteps, agree, steps_by_rank
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.model.events import (
    COLUMN_TYPES,
    GPU_KINDS,
    Column,
    Events,
    Kind,
    distinct_ids,
    number_ids,
)
from gputrace.model.intervals import Times
from gputrace.model.options import Window
from gputrace.model.results import RecorderCost
from gputrace.model.struct import Struct
from gputrace.model.trace import Progress, Trace
from gputrace.store.spill_file import LazySequence, SpillFile

_Result = TypeVar("_Result")
_Kept = TypeVar("_Kept", GpuOperations, Lane)
_OfGpu = TypeVar("_OfGpu", GpuSummary, LaneSummary)


HasGpu = GpuSummary | AnyLaneSummary


class PerGpu:
    """GPUs of a run whose rows are in one shard of this process; a subclass has them elsewhere.

    Attributes:
        trace: the run.
        whole: the shard that reads all of the run here.
        shards: number of shards.
        operations: summary of each GPU's operations, in order of GPU.
        lanes: those of GPUs with anything in the window, once they are built.
        has_calls: True if CUDA calls of the hosts were recorded, once they are read.
        clocks_apart_ns: maximum disagreement of the clocks of two GPUs.
    """

    shards = 1
    clocks_apart_ns = 20_000

    def __init__(self, whole: Shard, ran: Sequence[Sequence[GpuSummary]] = ()) -> None:
        """``ran`` has the summaries of operations, by shard."""
        self.trace, self.whole = whole.trace, whole
        self.lanes: Sequence[LaneSummary] = ()
        self.has_calls = False
        self.take(ran)

    @classmethod
    def here(cls, shard: Shard) -> PerGpu:
        """Create the GPUs of a trace that is read in this process."""
        return cls(shard, [shard.read()])

    @classmethod
    def of_hosts(cls, trace: Trace, lanes: Sequence[AnyLane]) -> PerGpu:
        """Create host-only ranks: lanes without GPUs."""
        shard = Shard(trace)
        shard.take_lanes(lanes)
        return cls(shard)

    def take(self, ran: Sequence[Sequence[GpuSummary]]) -> None:
        """Set the summaries of operations, by shard."""
        self._shard: dict[AnyGpu, int] = {
            each.gpu: number for number, part in enumerate(ran) for each in part
        }
        self.operations = _in_order(ran)

    @property
    def lane_of(self) -> dict[int, LaneSummary]:
        """Lanes by the index of their GPU in ``operations``."""
        index_of = {summary.gpu: index for index, summary in enumerate(self.operations)}
        return {index_of[lane.gpu]: lane for lane in self.lanes}

    def each(
        self,
        work: Callable[..., _Result],
        of: Iterable[HasGpu],
        *given: Iterable[Any],
        same: Sequence[Any] = (),
        keeps: bool = False,
    ) -> list[_Result]:
        """Run a function for each of some GPUs and return the results.

        Args:
            work: function of a module; takes a `GpuShardView` and the arguments.
            of: the GPUs.
            given: further arguments, by GPU.
            same: arguments after these that are equal for all.
            keeps: True if it keeps something where the rows are.
        """
        results = []
        for item, *arguments in zip(of, *given, strict=True):
            results.append(work(GpuShardView(self.whole, item.gpu), *arguments, *same))
        return results

    def each_shard(
        self,
        work: Callable[..., _Result],
        given: Iterable[tuple[Any, ...]] | None = None,
        *,
        changes: bool = False,
    ) -> list[_Result]:
        """Run a function for each shard, with its arguments if there are any; return the results.

        ``changes`` is True if it changes the shards.
        """
        results = []
        for arguments in ((),) if given is None else given:
            results.append(work(self.whole, *arguments))
        return results

    def move(self, shifts: Mapping[int, int], how: str) -> None:
        """Add nanoseconds to the times of each clock; ``how`` says where they come from."""
        self.trace.shift_clocks(shifts, how)
        processes = [(ran.gpu, ran.gpu.process) for ran in self.operations]
        moved = ((*pair, shifts[self.trace.clock_of(pair[1])]) for pair in processes)
        parts = [(part,) for part in self._by_shard(moved)]
        self.take(self.each_shard(_move, parts, changes=True))

    def find_steps(self, chosen: tuple[int, int] | None = None) -> FoundSteps:
        """Read the calls, and find the steps of all ranks."""
        self.has_calls = any(self.each_shard(Shard.read_calls, changes=True))
        by_rank = [pair for part in self.each_shard(Shard.find_steps) for pair in part.items()]
        by_rank.sort(key=lambda pair: pair[0])
        return agree(self.trace, dict(by_rank), self.operations, chosen)

    def forget_calls(self) -> None:
        """Treat the calls as not recorded."""
        self.has_calls = False
        self.each_shard(Shard.forget_calls, changes=True)

    def build_lanes(self, window: Window | None, all_steps: FoundSteps) -> None:
        """Build the timelines and causes of all GPUs with anything in the window."""
        by_rank, ranks = all_steps.by_rank, [(ran.gpu, ran.gpu.rank) for ran in self.operations]
        steps = self._by_shard((gpu, rank, by_rank[rank]) for gpu, rank in ranks if rank in by_rank)
        arguments = [(window, part, self.has_calls, all_steps.cost) for part in steps]
        self.lanes = _in_order(self.each_shard(Shard.build_lanes, arguments, changes=True))

    def add_waits(self, waits: Mapping[Gpu, Waiting]) -> None:
        """Add to each lane when its GPU was in collectives that waited for others."""
        parts = self._by_shard((lane.gpu, lane.gpu, waits[lane.gpu]) for lane in self.lanes)
        self.each_shard(Shard.add_waits, [(part,) for part in parts], changes=True)

    def calls_within(self, window: Window) -> CudaApiCalls | None:
        """Return the calls that touch a window, and maybe others; None if there are none."""
        return self.whole.calls

    def close(self) -> None:
        """Release what was computed elsewhere."""

    def _by_shard(self, items: Iterable[tuple[AnyGpu, Any, Any]]) -> list[dict[Any, Any]]:
        """Collect the key and value of each GPU in a mapping for its shard."""
        parts: list[dict[Any, Any]] = [{} for _ in range(self.shards)]
        for gpu, key, value in items:
            parts[self._shard[gpu]][key] = value
        return parts


def _in_order(by_shard: Iterable[Sequence[_OfGpu]]) -> list[_OfGpu]:
    """Return the items of all shards in order of GPU."""
    return sorted((each for part in by_shard for each in part), key=lambda each: order_of(each.gpu))


def same_names(
    gpus: PerGpu, ids: Sequence[NDArray[np.int64]]
) -> tuple[list[str], list[dict[int, int]]]:
    """Return the distinct texts of some name ids of each GPU, and for each GPU the text of each id.

    Files of one run have different ids for the same text.
    """
    known = gpus.trace.names(distinct_ids(np.concatenate(ids)))
    texts = list(dict.fromkeys(known.values()))
    number_of = {text: number for number, text in enumerate(texts)}
    return texts, [{id: number_of[known[id]] for id in of_gpu.tolist()} for of_gpu in ids]


class Shard:
    """GPUs whose rows are in one process.

    Attributes:
        trace: trace of the rows.
        operations: those of each GPU, once they are read.
        calls: calls of all host threads, once they are read; None if there are none.
        lanes: those of GPUs with anything in the window, once they are built.
        index_of, lane_index_of: index of each GPU in these.
        kept: values that analyzers keep of GPUs, by GPU and name or function.
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
        self.index_of: dict[AnyGpu, int] = {}
        self.lane_index_of: dict[AnyGpu, int] = {}
        self.kept: dict[tuple[AnyGpu, Any], Any] = {}
        self._once: dict[Callable[[Shard], Any], Any] = {}

    def read(self) -> list[GpuSummary]:
        """Read the GPUs' operations."""
        if self._scratch is None:
            return self.take(read_operations(self.trace, self._progress))
        return self.take(spill_operations(self.trace, self._scratch, self._progress))

    def take(self, operations: Iterable[GpuOperations]) -> list[GpuSummary]:
        """Set the operations of all GPUs; return their summaries."""
        self.operations = self._stored(operations)
        self._ran = [GpuSummary.of(each) for each in self.operations]
        self.index_of = {ran.gpu: index for index, ran in enumerate(self._ran)}
        return self._ran

    def move(self, shifts: Mapping[int, int]) -> list[GpuSummary]:
        """Add nanoseconds to the operations' times by process; the trace has moved already."""
        if not any(shifts.values()):
            return self._ran
        return self.take(each.moved(shifts[each.gpu.process]) for each in self.operations)

    def read_calls(self) -> bool:
        """Read the hosts' CUDA calls; return whether there are any."""
        if self._scratch is None:
            self.calls = read_calls(self.trace, self._progress)
        else:
            self.calls = spill_calls(self.trace, self._scratch, self._progress)
        return self.calls is not None

    def forget_calls(self) -> None:
        """Treat the calls as not recorded."""
        self.calls = None

    def find_steps(self) -> dict[int, StepWindows]:
        """Find the steps of each rank by itself."""
        return steps_by_rank(self.trace, self.operations, self.calls)

    def build_lanes(
        self,
        window: Window | None,
        steps: Mapping[int, StepWindows],
        has_calls: bool,
        cost: RecorderCost | None,
    ) -> list[LaneSummary]:
        """Build the timelines and causes of all GPUs with anything in the window.

        ``has_calls`` is True if calls were recorded, if only in another shard; ``cost`` is that of
        recording the steps.
        """
        host = None
        if has_calls or self.calls is not None:
            host = read_host_side(self.trace, self.operations, self.calls, self._scratch)
        lanes = self._stored(find_lanes(self.operations, host, steps, window, cost, self._scratch))
        self.take_lanes(lanes)
        return [LaneSummary.of(lane) for lane in lanes]

    def take_lanes(self, lanes: Sequence[AnyLane]) -> None:
        """Set the lanes of all GPUs."""
        self.lanes = lanes
        self.lane_index_of = {lane.gpu: index for index, lane in enumerate(lanes)}

    def add_waits(self, waits: Mapping[Gpu, Waiting]) -> None:
        """Add to each lane when its GPU was in collectives that waited for others."""
        which = OperationClass.COMMUNICATION
        self.lanes = self._stored(
            replace(lane, waiting=waits[lane.gpu].intersection(lane.timeline.classes[which]))
            for lane in self.lanes
            if isinstance(lane, Lane)
        )

    def _stored(self, items: Iterable[_Kept]) -> Sequence[_Kept]:
        """Return the items, in memory or on disk."""
        if self._scratch is None:
            return list(items)
        return LazySequence([self._scratch.spill(item) for item in items], self._scratch)

    def once(self, work: Callable[[Shard], _Result]) -> _Result:
        """Return a function's result for the whole shard, computed once."""
        if work not in self._once:
            self._once[work] = work(self)
        result: _Result = self._once[work]
        return result

    def assume(self, work: Callable[[Shard], _Result], result: _Result) -> None:
        """Have `once` return a result that is known without calling the function."""
        self._once[work] = result

    def rest(self) -> None:
        """Release the memory of columns on disk."""
        if self._scratch is not None:
            self._scratch.let_go()

    def keep(self, key: tuple[AnyGpu, str], value: _Result) -> _Result:
        """Keep a value of a GPU, on disk if the columns are."""
        kept = value if self._scratch is None else self._scratch.spill(value)
        self.kept[key] = kept
        return kept


def _move(shard: Shard, shifts: Mapping[int, int]) -> list[GpuSummary]:
    """Call the method of the shard's class, which may be a subclass."""
    return shard.move(shifts)


class GpuShardView:
    """One GPU of a shard: its rows, and what was computed from them.

    ``calls`` are those of all processes of the shard.
    """

    def __init__(self, shard: Shard, gpu: AnyGpu) -> None:
        self._shard, self._gpu = shard, gpu
        self.trace, self.calls, self.once = shard.trace, shard.calls, shard.once

    def keep(self, name: str, value: _Result) -> _Result:
        """Keep a value of this GPU under a name."""
        return self._shard.keep((self._gpu, name), value)

    def kept(self, name: str) -> Any:
        """Return what was stored for this GPU under a name."""
        return self._shard.kept[self._gpu, name]

    def once_here(self, work: Callable[[GpuShardView], _Result]) -> _Result:
        """Return a function's result for this GPU, computed once; small, as it stays in memory."""
        kept, key = self._shard.kept, (self._gpu, work)
        if key not in kept:
            kept[key] = work(self)
        result: _Result = kept[key]
        return result

    @property
    def operations(self) -> GpuOperations:
        return self._shard.operations[self._shard.index_of[self._gpu]]

    @property
    def lane(self) -> Lane:
        """Return the lane of the GPU, once it is built."""
        lane = self.any_lane
        assert isinstance(lane, Lane)
        return lane

    @property
    def any_lane(self) -> AnyLane:
        """Return the lane of the GPU or of a host-only rank."""
        return self._shard.lanes[self._shard.lane_index_of[self._gpu]]


def compute_within(view: GpuShardView, starts: Times, ends: Times) -> Times:
    """Return for how long a GPU computes in each of some windows."""
    return view.lane.timeline.of_class(OperationClass.COMPUTE).within(starts, ends)


def spill_operations(
    trace: Trace, scratch: SpillFile, progress: Progress | None = None
) -> Sequence[GpuOperations]:
    """Return the operations of each active GPU, in order of GPU, with columns in ``scratch``."""
    aside, parts, peers = SpillFile(), [], False
    columns = columns_of(trace)
    for events in trace.parts(GPU_KINDS, columns, progress):
        peers = peers or bool((events.kind == Kind.COPY_PEER).any())
        parts.append(_part(events, number_ids(pair_keys(events)), aside))
    if peers:  # Peer copies are also rows of the GPU at their other end.
        events = other_ends(trace, columns)
        parts.append(_part(events, number_ids(pair_keys(events)), aside))
    work: Counter[int] = Counter()
    for part in parts:
        work.update({key: rows.stop - rows.start for key, rows in part.groups.items()})
    keys = {pair_of(key): key for key in work}
    holding = _holding(parts)
    spilled = []
    for gpu in group_gpus(trace, {pair_of(key): work[key] for key in sorted(work)}):
        mine = [keys[pair] for pair in gpu.pairs]
        at = [parts[index] for index in sorted({i for key in mine for i in holding[key]})]
        order = np.argsort(_column(at, mine, "start"), kind="stable")
        events = Events({name: scratch.spill(_column(at, mine, name)[order]) for name in columns})
        classes, coverage = classify(trace, events), trace.coverage(gpu.process)
        spilled.append(scratch.spill(GpuOperations(gpu, events, classes, coverage)))
        aside.let_go()
        scratch.let_go()
    marked = with_unnamed_exchanges(trace, spilled)
    return spilled if marked is spilled else [scratch.spill(each) for each in marked]


def _holding(parts: Sequence[_Part]) -> dict[int, list[int]]:
    """Return the indices of the parts that have rows of each group: a file a rank has few."""
    holding: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        for key in part.groups:
            holding.setdefault(key, []).append(index)
    return holding


def _column(parts: Sequence[_Part], keys: Sequence[int], name: str) -> Column:
    """Return a column of some groups, joined of the parts that have rows of them."""
    values = [part.column(keys, name) for part in parts]
    return np.concatenate(values, dtype=COLUMN_TYPES[name])


def spill_calls(
    trace: Trace, scratch: SpillFile, progress: Progress | None = None
) -> CudaApiCalls | None:
    """Return all CUDA calls of the trace, with columns in ``scratch``; None if there are none."""
    if Kind.API not in trace.kinds:
        return None
    aside = SpillFile()
    read = trace.parts([Kind.API], CALL_COLUMNS, progress)
    parts = [_part(events, number_threads(events), aside) for events in read]
    holding = _holding(parts)
    keys = sorted(holding)
    if not keys:
        return None
    rows_of = [[parts[index].groups[key] for index in holding[key]] for key in keys]
    counts = [sum(rows.stop - rows.start for rows in each) for each in rows_of]
    types = {name: COLUMN_TYPES[name] for name in ("start", "end", "name", "correlation", "thread")}
    rooms = {
        name: (aside if name == "correlation" else scratch).room(kind, sum(counts))
        for name, kind in types.items()
    }
    rooms["sort"] = scratch.room(np.int8, sum(counts))
    for number, (key, count) in enumerate(zip(keys, counts, strict=True)):
        at = [parts[index] for index in holding[key]]
        order = np.argsort(_column(at, [key], "start"), kind="stable")
        for name in ("start", "end", "name", "correlation"):
            rooms[name].append(_column(at, [key], name)[order])
        rooms["thread"].append(np.full(count, number, np.int32))
        rooms["sort"].append(sorts_of(trace, _column(at, [key], "name")[order]))
        aside.let_go()
    first = np.append(0, np.cumsum(counts))
    threads = tuple((key >> 32, int(np.int32(np.uint32(key & 0xFFFFFFFF)))) for key in keys)
    columns = {name: room.column for name, room in rooms.items()}
    correlation = columns.pop("correlation")
    by_correlation = {}
    processes = [process for process, _ in threads]
    for process, rows in rows_by_correlation(correlation, processes, first.tolist()):
        by_correlation[process] = scratch.spill(rows)
        aside.let_go()
        scratch.let_go()
    return CudaApiCalls(
        **columns,
        threads=threads,
        first=first,
        _by_correlation=by_correlation,
        _recorded=recorded_calls(trace, sorted(set(processes))),
    )


class _Part(Struct, frozen=True, dict=True):
    """Rows of a part of a trace, sorted by group."""

    rows: Mapping[str, Column]
    """Columns, in the narrowest type that holds them."""
    row: NDArray[np.int32]
    """Row numbers of the part, in the order of the file."""
    groups: Mapping[int, slice]

    def column(self, keys: Iterable[int], name: str) -> Column:
        """Return a column of the rows of some groups, in the order of the file."""
        slices = [self.groups[key] for key in keys if key in self.groups]
        values = [self.rows[name][rows] for rows in slices]
        if len(slices) < 2:
            return values[0] if values else np.empty(0, COLUMN_TYPES[name])
        order = np.argsort(np.concatenate([self.row[rows] for rows in slices]))
        return np.concatenate(values)[order]


def _part(
    events: Events,
    numbered: tuple[NDArray[np.int64], NDArray[np.signedinteger[Any]]],
    scratch: SpillFile,
) -> _Part:
    """Sort rows by group; ``numbered`` has the keys of the groups, and the index of each row's."""
    distinct, number = numbered
    kind = np.int16 if len(distinct) < 1 << 15 else np.int64  # Sixteen bits sort in two passes.
    order = np.argsort(number.astype(kind), kind="stable")
    edges = [0, *np.cumsum(np.bincount(number)).tolist()]
    groups = {
        key: slice(low, high)
        for key, (low, high) in zip(distinct.tolist(), pairwise(edges), strict=True)
    }
    rows = {name: _narrow(getattr(events, name), order) for name in events.columns}
    part = _Part(rows, order.astype(np.int32), groups)
    kept = scratch.spill(part)
    scratch.let_go()
    return kept


def _narrow(column: Column, order: NDArray[np.intp]) -> Column:
    """Return a column in an order, in the narrowest type; a constant one is a single element."""
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    if low == high:
        return np.broadcast_to(column[:1].copy(), column.shape)
    types: Sequence[type[np.signedinteger[Any]]] = (np.int8, np.int16, np.int32, np.int64)
    fits = next(t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max)
    return column.astype(fits, copy=False).take(order)
