"""A lane for each GPU: its timeline, the causes of its gaps, and the steps of its rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.causes import (
    HostEvidence,
    all_waits,
    find_causes,
    read_evidence,
    waits_for_data,
    without_calls,
)
from gputrace.analyzers.gathered import gather_calls
from gputrace.analyzers.host import HostCalls, read_calls
from gputrace.analyzers.intervals import Intervals, union
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.partition import build_timeline
from gputrace.analyzers.steps import FoundSteps, StepWindows, find_input_copies, find_steps
from gputrace.traces.scratch import Scratch
from gputrace.traces.trace import Progress, Trace, Window


def find_lanes(
    trace: Trace,
    operations: Sequence[GpuOperations],
    window: Window | None,
    asked: tuple[int, int] | None = None,
    progress: Progress | None = None,
    scratch: Scratch | None = None,
) -> tuple[list[Lane], HostCalls | None, FoundSteps]:
    """Timelines and causes of all GPUs with anything in the window, and everyone's steps."""
    calls = gather_calls(trace, scratch, progress) if scratch else read_calls(trace, progress)
    found = find_steps(trace, operations, calls, asked)
    evidence = read_evidence(trace) if calls is not None else HostEvidence({}, {})
    waits = _waits(trace, operations, calls, scratch) if calls is not None else {}
    lanes = []
    for own in operations:
        timeline = build_timeline(own, window)
        if window is not None and timeline.window.start >= timeline.window.end:
            continue
        gaps = build_timeline(own).gaps if window is not None else timeline.gaps
        gaps = _with_edges(gaps, own, found.by_rank.get(own.gpu.rank))
        lane = Lane(timeline, without_calls(gaps), None)
        if calls is not None:
            mine = waits[own.gpu.process]
            causes = find_causes(own, gaps, calls, evidence, mine)
            host_data = _host_data(mine, evidence, own)
            data = all_waits(own.gpu.process, calls, evidence, mine)
            lane = Lane(
                timeline, causes, host_data, data=data, with_calls=_with_calls(own, timeline.window)
            )
        lanes.append(scratch.keep(lane) if scratch else lane)
    return lanes, calls, found


def _with_calls(own: GpuOperations, window: Window) -> Intervals | None:
    if own.calls_recorded is None:
        return None
    starts, ends = np.array(own.calls_recorded, np.int64).reshape(-1, 2).T
    return union(starts, ends).clip(window.start, window.end)


def _waits(
    trace: Trace, operations: Sequence[GpuOperations], calls: HostCalls, scratch: Scratch | None
) -> dict[int, dict[int, Intervals]]:
    """For each process, when its threads were on their way to an input copy."""
    copies: dict[int, list[GpuOperations]] = {}
    for own in operations:
        copies.setdefault(own.gpu.process, []).append(own)
    found = {}
    for process, gpus in copies.items():
        inputs = [own.events.select(find_input_copies(trace, own)) for own in gpus]
        found[process] = waits_for_data(calls, inputs)
        if scratch:
            scratch.let_go()
    return found


def _with_edges(gaps: Intervals, operations: GpuOperations, steps: StepWindows | None) -> Intervals:
    """The gaps, and where a profiler's steps reach beyond the GPU's operations, those stretches."""
    if steps is None or steps.source != "profiler":
        return gaps
    first, last = int(operations.start[0]), int(operations.reach[-1])
    before, after = min(int(steps.start[0]), first), max(int(steps.end[-1]), last)
    starts = np.concatenate([[before], gaps.start, [last]])
    ends = np.concatenate([[first], gaps.end, [after]])
    real = starts < ends
    return Intervals(starts[real], ends[real])


def _host_data(
    waits: dict[int, Intervals], evidence: HostEvidence, own: GpuOperations
) -> Intervals | None:
    """The feeding thread's time in the data loader; of several threads, the busiest one's.

    What was recorded of it counts, and what the calls show only where nothing was; while the GPU
    was not recorded, neither.
    """
    process = own.gpu.process
    recorded = [intervals for pair, intervals in evidence.data.items() if pair[0] == process]
    known = recorded or list(waits.values())
    if not known:
        return None
    most = max(known, key=lambda intervals: intervals.total)
    return most.intersection(own.recorded) if len(own.recorded) > 1 else most
