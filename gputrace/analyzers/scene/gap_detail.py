"""All that a trace tells of one gap: what ran before and after it, what host and others did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.gaps import evidence_of, line_of
from gputrace.analyzers.intervals import union
from gputrace.analyzers.lines import read_lines
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results import IDLE_CAUSES, Analysis, Finding, Gap
from gputrace.analyzers.scene.gap_table import NO_STEP
from gputrace.analyzers.scene.launches import Issued, Launch, find_issuer
from gputrace.analyzers.scene.scene import Scene, SceneLane
from gputrace.traces.events import Kind
from gputrace.traces.trace import Trace, Window

_HOST_KINDS: Final = (
    Kind.DATA_WAIT,
    Kind.OS_RUNTIME,
    Kind.API,
    Kind.RANGE,
    Kind.OVERHEAD,
    Kind.STEP,
)
"""What a host thread does, the most telling first."""

_FINDINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "recorder": ("recorder-overhead",),
    "data_feeding": ("data-feeding",),
    "sync": ("autotune-repeated", "sync-bound", "late-host"),
    "alloc": ("autotune-repeated", "alloc-stall", "late-host"),
    "launch": ("autotune-repeated", "launch-bound", "late-host"),
    "other_idle": ("idle-unexplained",),
}
"""The findings that a gap of a cause may belong to, the closest first."""

_PHASES: Final[Mapping[str, tuple[str, ...]]] = {
    "warmup": ("warmup",),
    "validation": ("validation-downtime",),
    "checkpoint": ("checkpoint-stall",),
}
"""The same of gaps in a phase, which come before those of the cause."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a GPU."""

    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    bytes: int
    """Negative where it moves none, or it is not known."""
    correlation: int


@dataclass(frozen=True, slots=True)
class HostTime:
    """What a host thread did under one name during a gap."""

    kind: Kind
    name: str
    count: int
    ns: int
    """Of the gap; nested rows of one name count once."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What another GPU did during a gap."""

    lane: int
    shares: Mapping[str, int]
    """Nanoseconds by those classes that it has some of, the longest first."""


@dataclass(frozen=True, slots=True)
class GapDetail:
    """A gap and all around it."""

    gap: Gap
    by_cause: Mapping[str, int]
    """Nanoseconds of the gap; the longest first."""
    before: Operation | None
    after: Operation | None
    launch: Launch | None
    """What issued the operation after it."""
    thread: int | None
    """The feeding thread, by the number of the operating system."""
    host: tuple[HostTime, ...]
    """What the feeding thread did meanwhile; the longest of each kind first."""
    others: tuple[Elsewhere, ...]
    finding: Finding | None


def describe_gap(trace: Trace, scene: Scene, row: int) -> GapDetail:
    """Reads the rows around a gap: a row of the scene's table."""
    table = scene.gaps
    start, end = int(table.start[row]), int(table.end[row])
    number = int(table.lane[row])
    lane = scene.lanes[number]
    own = lane.operations
    assert own is not None
    shares = _shares(lane, start, end)
    after = int(np.searchsorted(own.start, end))
    after_row = after if after < len(own) else None
    issued = None if after_row is None else find_issuer(trace, scene, own, after_row, start)
    step = int(table.step[row])
    gap = Gap(
        own.gpu.gpu,
        own.gpu.rank,
        None if step == NO_STEP else step,
        start,
        end,
        IDLE_CAUSES[int(table.cause[row])],
        _evidence(trace, issued, start, end),
    )
    return GapDetail(
        gap=gap,
        by_cause={cause: ns for cause, ns in shares.items() if cause in IDLE_CAUSES},
        before=_last_before(scene, own, start),
        after=None if after_row is None else operation_at(scene, own, after_row),
        launch=issued.launch if issued else None,
        thread=issued.launch.thread if issued else None,
        host=_host(trace, issued.pair, start, end) if issued else (),
        others=tuple(
            Elsewhere(place, _shares(other, start, end))
            for place, other in enumerate(scene.lanes)
            if place != number
        ),
        finding=finding_of(gap, scene.analysis) if scene.analysis else None,
    )


def operation_at(scene: Scene, own: GpuOperations, row: int) -> Operation:
    """One row of a GPU's operations, with its name."""
    events, kind = own.events, Kind(int(own.events.kind[row]))
    id = int(events.name[row])
    name = scene.names.get(id, "") if id != -1 else kind.name.lower().replace("_", " ")
    return Operation(
        name,
        kind,
        int(own.start[row]),
        int(own.end[row]),
        int(events.bytes[row]),
        int(events.correlation[row]),
    )


def finding_of(gap: Gap, analysis: Analysis) -> Finding | None:
    """The finding that a gap is a part of, by its phase, its cause, its GPU and its rank."""
    middle = (gap.start_ns + gap.end_ns) // 2
    phases = [
        phase.phase
        for phase in analysis.phases
        if phase.rank == gap.rank and phase.start_ns <= middle < phase.end_ns
    ]
    ids = [id for phase in phases for id in _PHASES.get(phase, ())]
    for id in (*ids, *_FINDINGS[gap.cause]):
        for finding in analysis.findings:
            if finding.id == id and _concerns(finding, gap):
                return finding
    return None


def _concerns(finding: Finding, gap: Gap) -> bool:
    """Findings of no GPU and no rank in particular concern all."""
    gpus, ranks = finding.gpus, finding.ranks
    return (not gpus or gap.gpu in gpus) and (not ranks or gap.rank in ranks)


def _evidence(trace: Trace, issued: Issued | None, start: int, end: int) -> str:
    """As the list of the largest gaps has it."""
    if issued is None:
        known = Kind.API in trace.kinds
        return "no row tells which thread issued the operation that ends it" if known else ""
    told = evidence_of(trace, issued.calls, int(issued.calls.thread[issued.call]), start, end)
    lines = read_lines(trace)
    return told if lines is None else told + line_of(lines, issued.pair, start, end)


def _last_before(scene: Scene, own: GpuOperations, moment: int) -> Operation | None:
    """The operation that ended last before a gap begins."""
    row = int(np.searchsorted(own.reach, moment))
    return operation_at(scene, own, row) if row < len(own) and own.end[row] == moment else None


def _host(trace: Trace, pair: tuple[int, int], start: int, end: int) -> tuple[HostTime, ...]:
    process, thread = pair
    columns = ("start", "end", "kind", "name", "process", "thread")
    events = trace.events(set(_HOST_KINDS) & trace.kinds, columns, Window(start, end))
    events = events.select((events.process == process) & (events.thread == thread))
    keys = events.kind.astype(np.int64) << 32 | events.name.astype(np.int64) & 0xFFFFFFFF
    names = trace.names(np.unique(events.name))
    found = []
    for key in np.unique(keys):
        rows = keys == key
        kind, id = Kind(int(events.kind[rows][0])), int(events.name[rows][0])
        inside = union(events.start[rows], events.end[rows]).clip(start, end)
        if inside.total:
            found.append(HostTime(kind, names[id], int(rows.sum()), inside.total))
    return tuple(sorted(found, key=lambda one: (_HOST_KINDS.index(one.kind), -one.ns)))


def _shares(lane: SceneLane, start: int, end: int) -> dict[str, int]:
    """What a lane did in a stretch of time, the longest first."""
    shares = dict(
        zip(lane.layers.classes, lane.layers.split([start, end])[0].tolist(), strict=True)
    )
    return {name: shares[name] for name in sorted(shares, key=lambda n: -shares[n]) if shares[name]}
