"""Timeline model for views: lanes of exact classes, steps, gaps and names of a trace.

A scene is built twice while a trace loads: once the GPUs' operations are read (no causes yet), and
when the analysis is done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.findings.facts import Facts
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.lanes import Lane, build_timeline, find_host_lanes
from gputrace.analyzers.ledger import lost_time
from gputrace.analyzers.operations import Gpu, GpuOperations
from gputrace.analyzers.pipeline import analyze
from gputrace.analyzers.steps import FoundSteps
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.analyzers.timeline_model.cells import (
    NOTHING,
    Curve,
    Layers,
    busy_layers,
    find_curves,
    gpu_layers,
)
from gputrace.model.events import distinct_ids
from gputrace.model.intervals import EMPTY, Intervals, Times, number_windows
from gputrace.model.options import Options, Window
from gputrace.model.results import Analysis
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.model.trace import Process, Progress, Trace


@dataclass(frozen=True, eq=False)
class SceneLane:
    """Row of a timeline."""

    gpu: int | None
    """Index as in the results; None where no GPU was seen."""
    gpu_known: bool
    rank: int
    host: str
    window: Window
    """Time from its first to its last moment."""
    layers: Layers
    operations: GpuOperations | None = None
    """Operations, if the lane shows all of a GPU."""
    part: str = ""
    """``stream 7`` or ``thread 977``, if the lane shows a part."""
    curves: tuple[Curve, ...] = ()
    """Samples of the GPU's card."""
    lost: Layers = NOTHING
    """Time in which the GPU does not compute, by cause of the ledger."""
    loader: Intervals = EMPTY
    """When hooks saw the program in its data loader."""

    @classmethod
    def of_gpu(cls, gpu: Gpu, window: Window, layers: Layers, **more: Any) -> SceneLane:
        """Return a lane of one GPU, with more fields."""
        return cls(gpu.gpu, gpu.gpu_known, gpu.rank, gpu.host_name, window, layers, **more)


@dataclass(frozen=True)
class Scene:
    """Timeline of one trace; moments are on its own clock."""

    title: str
    origin: int
    """Moment displayed as 0."""
    span: Window
    lanes: tuple[SceneLane, ...]
    all_steps: FoundSteps
    gaps: GapTable
    analysis: Analysis | None = None
    """None until it is done."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of all operations, by id."""
    processes: tuple[Process, ...] = ()
    """Processes that the column ``process`` of the lanes' operations indexes."""

    def steps_of(self, rank: int) -> StepWindows | None:
        """Return the steps of a rank, or of another one where it has none."""
        windows = self.all_steps.by_rank.get(rank)
        return windows or next(iter(self.all_steps.by_rank.values()), None)


def read_scene(
    trace: Trace,
    options: Options | None = None,
    progress: Progress | None = None,
    early: Callable[[Scene], None] | None = None,
) -> Scene:
    """Analyze a trace for its timeline; raise what `analyze` raises.

    ``early`` gets the scene without causes and steps that is known before the analysis.
    """
    watcher = _Watcher(trace, early)
    analysis = analyze(trace, options, progress, watcher)
    return full_scene(watcher.facts, analysis)


@dataclass
class _Watcher:
    trace: Trace
    early: Callable[[Scene], None] | None
    facts: Facts = field(init=False)

    def operations_read(self, operations: Sequence[GpuOperations]) -> None:
        if operations and self.early is not None:
            lanes = [busy_lane(of_gpu) for of_gpu in operations]
            self.early(_scene(self.trace, lanes, FoundSteps({}, 0), join([]), operations))

    def facts_found(self, facts: Facts) -> None:
        self.facts = facts


def busy_lane(operations: GpuOperations, part: str = "") -> SceneLane:
    """Return a lane of operations while the causes of idle time are unknown."""
    timeline = build_timeline(operations)
    return SceneLane.of_gpu(
        operations.gpu, timeline.window, busy_layers(timeline), operations=operations, part=part
    )


def _scene(
    trace: Trace,
    lanes: Sequence[SceneLane],
    all_steps: FoundSteps,
    gaps: GapTable,
    operations: Sequence[GpuOperations] = (),
    analysis: Analysis | None = None,
) -> Scene:
    spans = [lane.window for lane in lanes] or [Window(0, 1)]
    ids = [distinct_ids(of_gpu.events.name) for of_gpu in operations]
    return Scene(
        trace.title,
        trace.origin,
        Window(min(span.start for span in spans), max(span.end for span in spans)),
        tuple(lanes),
        all_steps,
        gaps,
        analysis,
        trace.names(np.unique(np.concatenate(ids))) if ids else {},
        tuple(trace.processes) if operations else (),
    )


def full_scene(facts: Facts, analysis: Analysis) -> Scene:
    """Build the complete scene of an analyzed trace; for host-only ranks, from waits for data."""
    trace, lanes = facts.trace, []
    if not facts.lanes:
        host_lanes, steps = find_host_lanes(trace, None)
        for host in host_lanes:
            waits = host.host_data or EMPTY
            layers = Layers(("host_data", "host_rest"), (waits, waits.complement(*host.window)))
            lanes.append(SceneLane(None, False, host.gpu.rank, "", host.window, layers))
        return _scene(trace, lanes, steps, join([]), analysis=analysis)
    curves = find_curves(trace, facts.lanes)
    for lane, operations, of_card in zip(facts.lanes, facts.operations, curves, strict=True):
        lost = lost_time(GpuShardView(facts.per_gpu.whole, lane.gpu))
        by_cause = Layers(tuple(lost), tuple(lost.values()))
        more: dict[str, Any] = {"operations": operations, "curves": of_card, "lost": by_cause}
        more["loader"] = lane.loader
        lanes.append(SceneLane.of_gpu(lane.gpu, lane.window, gpu_layers(lane), **more))
    gaps = tabulate(facts.lanes, facts.all_steps)
    return _scene(trace, lanes, facts.all_steps, gaps, facts.operations, analysis)


def index_in(trace: Trace, process: Process) -> int:
    """Return the index of a process in a trace; -1 where the trace does not have it yet.

    A trace that is reopened may meet its processes in another order.
    """
    return trace.processes.index(process) if process in trace.processes else -1


def most_visible(lane: SceneLane, start: int, end: int) -> int | None:
    """Return the operation that has most of a window; ties go to the first class."""
    operations = lane.operations
    if operations is None:
        return None
    first = int(np.searchsorted(operations.reach, start, "right"))
    last = int(np.searchsorted(operations.start, end))
    rows = np.flatnonzero(operations.end[first:last] > start) + first
    if not len(rows):
        return None
    inside = np.minimum(operations.end[rows], end) - np.maximum(operations.start[rows], start)
    return int(rows[np.lexsort((operations.classes[rows], -inside))[0]])


def next_named(
    lane: SceneLane, ids: NDArray[np.int64], moment: int, *, forward: bool
) -> int | None:
    """Return the next operation with one of some names after a moment, or before it."""
    operations = lane.operations
    if operations is None:
        return None
    rows = np.flatnonzero(np.isin(operations.events.name, ids))
    index = int(np.searchsorted(operations.start[rows], moment, "right" if forward else "left"))
    index -= not forward
    return int(rows[index]) if 0 <= index < len(rows) else None


NO_STEP: Final = -1

SORTS: Final = ("length", "start", "lane", "cause", "step")
"""Columns that gaps can be sorted by."""


@dataclass(frozen=True)
class GapTable:
    """Table with a row for each gap: lane after lane, each in order of time."""

    lane: NDArray[np.int16]
    """Index of the lane among those that the table was made of."""
    start: Times
    end: Times
    cause: NDArray[np.int8]
    """Index in `IDLE_CAUSES` of the cause that covers most of it."""
    step: NDArray[np.int32]
    """Step that contains its middle, or `NO_STEP`."""
    steady: NDArray[np.bool_]
    """True if that step is after warm-up."""
    between: NDArray[np.bool_]
    """True if a step begins in it, so that it lies between two batches."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length(self) -> Times:
        """Durations in nanoseconds."""
        return self.end - self.start

    @cached_property
    def _firsts(self) -> list[int]:
        lanes = int(self.lane[-1]) + 1 if len(self) else 0
        firsts: list[int] = np.searchsorted(
            self.lane, np.arange(lanes + 1, dtype=np.int16)
        ).tolist()
        return firsts

    def of_lane(self, lane: int) -> tuple[int, int]:
        """Return the first row of a lane, and the first row after it."""
        if lane + 1 >= len(self._firsts):
            return 0, 0
        return self._firsts[lane], self._firsts[lane + 1]

    def find(self, lane: int, moment: int) -> int | None:
        """Return the gap of a lane that contains a moment; None if there is none."""
        first, last = self.of_lane(lane)
        row = first + int(np.searchsorted(self.start[first:last], moment, "right")) - 1
        return row if row >= first and moment < self.end[row] else None


@dataclass(frozen=True)
class GapFilter:
    """Conditions on the gaps to list, all of which they must meet."""

    lanes: Collection[int] | None = None
    causes: Collection[str] | None = None
    charged: Collection[str] | None = None
    """Causes of the ledger, one of which most of the gap is charged to."""
    steps: tuple[int, int] | None = None
    """First step, and the step after the last."""
    shortest_ns: int = 0
    steady: bool = False
    between: bool = False

    def rows(
        self, table: GapTable, lanes: Sequence[tuple[SceneLane, int]] = ()
    ) -> NDArray[np.intp]:
        """Return the rows of the gaps that pass the filter.

        ``lanes`` are those that the table was made of, each with the time on its trace's clock that
        is 0 in the table; only `charged` needs them.
        """
        keep = table.length >= self.shortest_ns
        if self.lanes is not None:
            keep &= np.isin(table.lane, list(self.lanes))
        if self.causes is not None:
            keep &= np.isin(table.cause, [IDLE_CAUSES.index(cause) for cause in self.causes])
        if self.steps is not None:
            keep &= (table.step >= self.steps[0]) & (table.step < self.steps[1])
        if self.charged is not None:
            for number, (lane, zero) in enumerate(lanes):
                rows = slice(*table.of_lane(number))
                times = table.start[rows] + zero, table.end[rows] + zero
                spent = [np.zeros(rows.stop - rows.start, np.int64)]
                spent += [intervals.within(*times) for intervals in lane.lost.sets]
                named = [False, *(cause in self.charged for cause in lane.lost.classes)]
                keep[rows] &= np.array(named)[np.argmax(spent, axis=0)]
        if self.steady:
            keep &= table.steady
        if self.between:
            keep &= table.between
        return np.flatnonzero(keep)


def tabulate(lanes: Sequence[Lane], all_steps: FoundSteps) -> GapTable:
    """Return the gaps of all lanes; a lane is numbered by its index among them."""
    parts = []
    for number, lane in enumerate(lanes):
        start, end = lane.timeline.gaps.start, lane.timeline.gaps.end
        windows = all_steps.by_rank.get(lane.gpu.rank)
        step, between = np.full(len(start), NO_STEP, np.int32), np.zeros(len(start), bool)
        if windows is not None:
            step = number_windows((start + end) // 2, windows.start, windows.end).astype(np.int32)
            between = np.searchsorted(windows.start, start) < np.searchsorted(windows.start, end)
        parts.append(
            GapTable(
                lane=np.full(len(start), number, np.int16),
                start=start,
                end=end,
                cause=lane.causes.within(start, end).argmax(axis=-1).astype(np.int8),
                step=step,
                steady=(step >= all_steps.warmup) & (step != NO_STEP),
                between=between,
            )
        )
    return join(parts)


def join(parts: Sequence[GapTable]) -> GapTable:
    """Concatenate the rows of several tables."""
    if not parts:
        nothing = np.empty(0, np.int64)
        return GapTable(
            *(nothing.astype(kind) for kind in ("i2", "i8", "i8", "i1", "i4", "?", "?"))
        )
    if len(parts) == 1:
        return parts[0]
    return GapTable(
        *(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(GapTable))
    )


def order(
    table: GapTable, rows: NDArray[np.intp], by: str = "length", *, descending: bool = True
) -> NDArray[np.intp]:
    """Sort some rows by one of `SORTS`; ties by their length, the longest first."""
    key = getattr(table, by)[rows].astype(np.int64)
    return rows[np.lexsort((rows, -table.length[rows], -key if descending else key))]
