"""The gaps: stretches in which a GPU runs nothing, largest first, each with its cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.host import NOBODY, HostCalls
from gputrace.analyzers.intervals import Intervals, Times, union
from gputrace.analyzers.lines import Lines
from gputrace.analyzers.results import IDLE_CAUSES, Gap, Gaps, Step
from gputrace.analyzers.steps import FoundSteps
from gputrace.traces.events import Kind
from gputrace.traces.ids import distinct_ids
from gputrace.traces.trace import Trace
from gputrace.units import format_ns

_MOST_CALLS_TOLD: Final = 2
_WORTH_TELLING: Final = 0.05
"""Part of a gap that a call must fill to be named."""


def find_gaps(
    trace: Trace,
    lanes: Sequence[Lane],
    calls: HostCalls | None,
    found: FoundSteps,
    measured: Sequence[Step],
    most: int,
    lines: Lines | None,
) -> Gaps:
    """All gaps counted, and the ``most`` largest listed with their evidence."""
    steps_of = StepsOf(measured)
    anywhere, in_steps = (
        tuple(
            _gap(trace, lane, calls, found, start, end, lines)
            for lane, start, end in _longest(lanes, idle, most)
        )
        for idle in (
            [lane.timeline.gaps for lane in lanes],
            [_inside(lane, steps_of(lane.gpu)) for lane in lanes],
        )
    )
    by_cause = {
        cause: sum(int(lane.causes.of[cause].clip(*lane.timeline.window).total) for lane in lanes)
        for cause in IDLE_CAUSES
    }
    total = sum(lane.timeline.gaps.total for lane in lanes)
    count = sum(len(lane.timeline.gaps) for lane in lanes)
    return Gaps(count, total, by_cause, anywhere, in_steps)


def _longest(
    lanes: Sequence[Lane], idle: Sequence[Intervals], most: int
) -> list[tuple[Lane, int, int]]:
    """The ``most`` longest of some gaps of each GPU, longest first, of equal ones the earliest."""
    found = []
    for place, gaps in enumerate(idle):
        start, end = _longest_of(gaps, most)
        found += [(s - e, s, place, e) for s, e in zip(start.tolist(), end.tolist(), strict=True)]
    return [(lanes[place], start, end) for _, start, place, end in sorted(found)[:most]]


def _longest_of(gaps: Intervals, most: int) -> tuple[Times, Times]:
    start, end, lengths = gaps.start, gaps.end, gaps.lengths
    if 0 < most < len(lengths):
        keep = lengths >= np.partition(lengths, len(lengths) - most)[len(lengths) - most]
        start, end = start[keep], end[keep]
    order = np.lexsort((start, start - end))[:most]
    return start[order], end[order]


def _inside(lane: Lane, own: Sequence[Step]) -> Intervals:
    """The gaps of a GPU whose middle lies in a measured step of it."""
    windows = union([s.start_ns for s in own], [s.end_ns for s in own])
    gaps = lane.timeline.gaps
    keep = windows.contains((gaps.start + gaps.end) // 2)
    return Intervals(gaps.start[keep], gaps.end[keep])


def _gap(
    trace: Trace,
    lane: Lane,
    calls: HostCalls | None,
    found: FoundSteps,
    start: int,
    end: int,
    lines: Lines | None,
) -> Gap:
    shares = lane.causes.within([start], [end])[0]
    feeder = lane.causes.feeder_of(end)
    told = "" if calls is None else evidence_of(trace, calls, feeder, start, end)
    if lane.with_calls is not None and not lane.with_calls.clip(start, end).total:
        told = "CUDA calls were not recorded then"
    if Kind.DATA_WAIT in trace.kinds:
        told = _waiting(lane, start, end) + told
    if calls is not None and lines is not None and feeder != NOBODY:
        told += line_of(lines, calls.threads[feeder], start, end)
    cause = IDLE_CAUSES[int(np.argmax(shares))]
    return Gap(
        lane.gpu.gpu, lane.gpu.rank, _step_at(lane, found, start, end), start, end, cause, told
    )


def _waiting(lane: Lane, start: int, end: int) -> str:
    """How long the program was in its data loader, as recorded, if that is worth telling."""
    waited = 0 if lane.host_data is None else lane.host_data.clip(start, end).total
    return f"in the data loader {format_ns(waited)}, " if waited >= _part_of(start, end) else ""


def _part_of(start: int, end: int) -> float:
    return _WORTH_TELLING * (end - start)


def _step_at(lane: Lane, found: FoundSteps, start: int, end: int) -> int | None:
    """The step that the middle of the gap lies in."""
    windows = found.by_rank.get(lane.gpu.rank)
    if windows is None:
        return None
    middle = (start + end) // 2
    number = int(np.searchsorted(windows.start, middle, "right")) - 1
    return number if number >= 0 and middle < windows.end[number] else None


def evidence_of(trace: Trace, calls: HostCalls, feeder: int, start: int, end: int) -> str:
    """What the feeding thread's own rows say about the time of the gap."""
    if feeder == NOBODY:
        return "no row tells which thread issued the operation that ends it"
    rows = calls.overlapping(feeder, start, end)
    text = trace.names(distinct_ids(calls.name[rows]))
    spent: dict[str, int] = {}
    for row in rows.tolist():
        name = text[int(calls.name[row])].partition("_v")[0]
        length = min(int(calls.end[row]), end) - max(int(calls.start[row]), start)
        spent[name] = spent.get(name, 0) + length
    worth = _part_of(start, end)
    named = sorted((name for name in spent if spent[name] >= worth), key=lambda n: -spent[n])
    parts = [f"{name} {format_ns(spent[name])}" for name in named[:_MOST_CALLS_TOLD]]
    inside_calls = union(calls.start[rows], calls.end[rows]).clip(start, end)
    outside = end - start - inside_calls.total
    process = calls.threads[feeder][0]
    if outside >= worth and calls.all_recorded(process, np.array([start]), np.array([end]))[0]:
        parts.insert(0, f"no CUDA call {format_ns(outside)}")
    # Ids past 31 bits are negative in their column.
    return f"{', '.join(parts)} (thread {calls.threads[feeder][1] & 0xFFFFFFFF})"


def line_of(lines: Lines, feeder: tuple[int, int], start: int, end: int) -> str:
    """Where in the user's program most samples of the gap are, of the thread if it has some."""
    thread = lines.teller(feeder)
    if thread is None:
        return ""
    place = lines.place({thread: Intervals(np.array([start]), np.array([end]))})
    if place is None:
        return ""
    who = "" if thread == feeder else f"thread {thread[1]} "
    return f", {who}at {place.line} ({place.count} of {place.samples} samples)"
