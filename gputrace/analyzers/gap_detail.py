"""All that a trace tells of one gap: what ran before and after it, what host and others did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.findings import Facts
from gputrace.analyzers.gaps import gap_of
from gputrace.analyzers.host import NOBODY
from gputrace.analyzers.intervals import union
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results import CLASSES, IDLE_CAUSES, Finding, Gap
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
    "sync": ("autotune-repeated", "sync-bound"),
    "alloc": ("autotune-repeated", "alloc-stall"),
    "launch": ("autotune-repeated", "launch-bound"),
    "other_idle": ("idle-unexplained",),
}
"""The findings that a gap of a cause may belong to, the closest first."""


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
class Launch:
    """The call of the host that issued an operation."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
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


def describe_gap(
    facts: Facts, findings: Sequence[Finding], number: int, start: int, end: int
) -> GapDetail:
    """Reads the rows around a gap.

    Args:
        facts: of the whole trace, no window.
        findings: of its analysis.
        number: which of the lanes has the gap.
        start, end: its moments, as in the gap table.
    """
    lane, own = facts.lanes[number], facts.operations[number]
    gap = gap_of(facts.trace, lane, facts.calls, facts.found, start, end, facts.lines)
    shares = lane.causes.within([start], [end])[0].tolist()
    after = int(np.searchsorted(own.start, end))
    feeder = lane.causes.feeder_of(end)
    known = facts.calls is not None and feeder != NOBODY
    pair = facts.calls.threads[feeder] if facts.calls is not None and known else None
    return GapDetail(
        gap=gap,
        by_cause=_named(dict(zip(IDLE_CAUSES, shares, strict=True))),
        before=_last_before(facts.trace, own, start),
        after=operation_at(facts.trace, own, after) if after < len(own) else None,
        launch=launch_of(facts, own, after) if after < len(own) else None,
        thread=None if pair is None else pair[1] & 0xFFFFFFFF,
        host=() if pair is None else _host(facts.trace, pair, start, end),
        others=tuple(
            _elsewhere(other, place, start, end)
            for place, other in enumerate(facts.lanes)
            if place != number
        ),
        finding=finding_of(gap, findings),
    )


def operation_at(trace: Trace, own: GpuOperations, row: int) -> Operation:
    """One row of a GPU's operations, with its name."""
    events, kind = own.events, Kind(int(own.events.kind[row]))
    id = int(events.name[row])
    name = trace.names([id])[id] if id != -1 else kind.name.lower().replace("_", " ")
    return Operation(
        name,
        kind,
        int(own.start[row]),
        int(own.end[row]),
        int(events.bytes[row]),
        int(events.correlation[row]),
    )


def launch_of(facts: Facts, own: GpuOperations, row: int) -> Launch | None:
    """The call that issued an operation; None where the trace does not tell."""
    calls = facts.calls
    issued_by = (
        NOBODY if calls is None else int(calls.issued_by(own.events.select(np.array([row])))[0])
    )
    if calls is None or issued_by == NOBODY:
        return None
    id = int(calls.name[issued_by])
    return Launch(
        facts.trace.names([id])[id],
        int(calls.start[issued_by]),
        int(calls.end[issued_by]),
        calls.threads[int(calls.thread[issued_by])][1] & 0xFFFFFFFF,
        int(own.events.correlation[row]),
    )


def finding_of(gap: Gap, findings: Sequence[Finding]) -> Finding | None:
    """The finding that a gap is a part of, by its cause and its GPU."""
    for id in _FINDINGS[gap.cause]:
        for finding in findings:
            if finding.id == id and (not finding.gpus or gap.gpu in finding.gpus):
                return finding
    return None


def _last_before(trace: Trace, own: GpuOperations, moment: int) -> Operation | None:
    """The operation that ended last before a gap begins."""
    row = int(np.searchsorted(own.reach, moment))
    return operation_at(trace, own, row) if row < len(own) and own.end[row] == moment else None


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


def _elsewhere(lane: Lane, place: int, start: int, end: int) -> Elsewhere:
    shares = lane.split(np.array([start]), np.array([end]))[0].tolist()
    return Elsewhere(place, _named(dict(zip(CLASSES, shares, strict=True))))


def _named(shares: Mapping[str, int]) -> dict[str, int]:
    """What there is some of, the longest first."""
    return {name: shares[name] for name in sorted(shares, key=lambda n: -shares[n]) if shares[name]}
