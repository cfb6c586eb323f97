"""A trace as something to look at: lanes of exact classes, steps, gaps, names.

Built twice while a trace loads: as soon as the GPUs' operations are read (no causes yet), and when
the analysis is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.findings import Facts
from gputrace.analyzers.host_lanes import HostLane, find_host_lanes
from gputrace.analyzers.intervals import EMPTY
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.partition import build_timeline
from gputrace.analyzers.results import Analysis
from gputrace.analyzers.scene.cells import Layers, busy_layers, gpu_layers
from gputrace.analyzers.scene.curves import Curve, find_curves
from gputrace.analyzers.scene.gap_table import GapTable, join, tabulate
from gputrace.analyzers.steps import FoundSteps, StepWindows
from gputrace.traces.ids import distinct_ids
from gputrace.traces.trace import Process, Trace, Window

_NO_STEPS: Final = FoundSteps({}, 0)


@dataclass(frozen=True, eq=False)
class SceneLane:
    """One row of a timeline."""

    gpu: int | None
    """As the results name it; None where no GPU was seen."""
    gpu_known: bool
    rank: int
    host: str
    window: Window
    """From its first to its last moment."""
    layers: Layers
    operations: GpuOperations | None = None
    """Of a lane that shows all of a GPU."""
    part: str = ""
    """``stream 7`` or ``thread 977``, of a lane that shows a part."""
    curves: tuple[Curve, ...] = ()
    """What was sampled of the GPU's card."""


@dataclass(frozen=True)
class Scene:
    """One trace; moments are on its own clock."""

    title: str
    origin: int
    """The moment that people call 0."""
    span: Window
    lanes: tuple[SceneLane, ...]
    found: FoundSteps
    gaps: GapTable
    analysis: Analysis | None = None
    """None while it is not done."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Of all operations."""
    processes: tuple[Process, ...] = ()
    """What the column ``process`` of the lanes' operations counts into."""

    def steps_of(self, rank: int) -> StepWindows | None:
        """The steps of a rank, or of another where it has none."""
        own = self.found.by_rank.get(rank)
        return own or next(iter(self.found.by_rank.values()), None)


def first_scene(trace: Trace, operations: Sequence[GpuOperations]) -> Scene:
    """What is known once the GPUs' operations are read."""
    lanes = tuple(_busy_lane(own) for own in operations)
    return Scene(
        trace.title,
        trace.origin,
        _span(lanes),
        lanes,
        _NO_STEPS,
        join([]),
        names=_names(trace, operations),
        processes=tuple(trace.processes),
    )


def full_scene(facts: Facts, analysis: Analysis) -> Scene:
    """All that is known."""
    trace = facts.trace
    if not facts.lanes:
        return _host_scene(trace, analysis)
    lanes = tuple(
        SceneLane(
            lane.gpu.gpu,
            lane.gpu.gpu_known,
            lane.gpu.rank,
            lane.gpu.host_name,
            lane.window,
            gpu_layers(lane),
            own,
            curves=own_curves,
        )
        for lane, own, own_curves in zip(
            facts.lanes, facts.operations, find_curves(trace.nvml, facts.lanes), strict=True
        )
    )
    return Scene(
        trace.title,
        trace.origin,
        _span(lanes),
        lanes,
        facts.found,
        tabulate(facts.lanes, facts.found),
        analysis,
        _names(trace, facts.operations),
        tuple(trace.processes),
    )


def index_in(trace: Trace, process: Process) -> int:
    """Which of a trace's processes it is; -1 where the trace has not met it.

    A trace that is opened anew may meet its processes in another order.
    """
    return trace.processes.index(process) if process in trace.processes else -1


def operations_between(lane: SceneLane, start: int, end: int) -> NDArray[np.intp]:
    """Rows of a lane's operations that touch a stretch of time, in order of start."""
    own = lane.operations
    if own is None:
        return np.empty(0, np.intp)
    first = int(np.searchsorted(own.reach, start, "right"))
    last = int(np.searchsorted(own.start, end))
    return np.flatnonzero(own.end[first:last] > start) + first


def most_visible(lane: SceneLane, start: int, end: int) -> int | None:
    """The operation that has most of a stretch of time; of equal ones that of the first class."""
    own, rows = lane.operations, operations_between(lane, start, end)
    if own is None or not len(rows):
        return None
    inside = np.minimum(own.end[rows], end) - np.maximum(own.start[rows], start)
    return int(rows[np.lexsort((own.classes[rows], -inside))[0]])


def next_named(
    lanes: Sequence[SceneLane], ids: NDArray[np.int64], after: Sequence[int], *, forward: bool
) -> tuple[int, int] | None:
    """The lane and row of the next operation with one of some names, in any lane.

    Args:
        lanes: which to search.
        ids: of the names.
        after: for each lane, the moment to search from; it does not count itself.
        forward: whether the next one is later.
    """
    best: tuple[int, int, int] | None = None
    for number, (lane, moment) in enumerate(zip(lanes, after, strict=True)):
        own = lane.operations
        if own is None:
            continue
        rows = np.flatnonzero(np.isin(own.events.name, ids))
        place = int(np.searchsorted(own.start[rows], moment, "right" if forward else "left"))
        place -= not forward
        if 0 <= place < len(rows):
            row = int(rows[place])
            away = abs(int(own.start[row]) - moment)
            best = min(best, (away, number, row)) if best else (away, number, row)
    return None if best is None else best[1:]


def _busy_lane(own: GpuOperations) -> SceneLane:
    timeline, gpu = build_timeline(own), own.gpu
    return SceneLane(
        gpu.gpu,
        gpu.gpu_known,
        gpu.rank,
        gpu.host_name,
        timeline.window,
        busy_layers(timeline),
        own,
    )


def _host_scene(trace: Trace, analysis: Analysis) -> Scene:
    """Where no GPU was seen: when each rank waited for data."""
    found_lanes, found = find_host_lanes(trace, None)
    lanes = tuple(_host_lane(lane) for lane in found_lanes)
    return Scene(trace.title, trace.origin, _span(lanes), lanes, found, join([]), analysis)


def _host_lane(lane: HostLane) -> SceneLane:
    waits = lane.host_data or EMPTY
    layers = Layers(("host_data", "host_rest"), (waits, waits.complement(*lane.window)))
    return SceneLane(None, False, lane.gpu.rank, "", lane.window, layers)


def _span(lanes: Sequence[SceneLane]) -> Window:
    if not lanes:
        return Window(0, 1)
    return Window(min(lane.window.start for lane in lanes), max(lane.window.end for lane in lanes))


def _names(trace: Trace, operations: Sequence[GpuOperations]) -> Mapping[int, str]:
    ids = [distinct_ids(own.events.name) for own in operations]
    return trace.names(np.unique(np.concatenate(ids))) if ids else {}
