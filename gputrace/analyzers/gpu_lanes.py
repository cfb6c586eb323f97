"""A lane for each GPU: its timeline, the causes of its gaps, and the steps of its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gputrace.analyzers.causes import (
    HostEvidence,
    all_waits,
    find_causes,
    read_evidence,
    waits_for_data,
    without_calls,
)
from gputrace.analyzers.host import HostCalls
from gputrace.analyzers.intervals import Intervals, union
from gputrace.analyzers.lanes import Lane
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.partition import build_timeline
from gputrace.analyzers.steps import StepWindows, find_input_copies
from gputrace.traces.scratch import Scratch
from gputrace.traces.trace import Trace, Window


def find_lanes(
    trace: Trace,
    operations: Sequence[GpuOperations],
    calls: HostCalls | None,
    steps: Mapping[int, StepWindows],
    window: Window | None = None,
    scratch: Scratch | None = None,
    has_calls: bool = True,
) -> list[Lane]:
    """Timelines and causes of all GPUs with anything in the window.

    Args:
        trace: whose rows they are.
        operations: of the GPUs.
        calls: of the host threads that feed them.
        steps: of the GPUs' ranks.
        window: the part of the time that was asked for.
        scratch: for what is not held in memory.
        has_calls: whether there are calls of other ranks where there are none of these.
    """
    has_calls = has_calls or calls is not None
    evidence = read_evidence(trace) if has_calls else HostEvidence({}, {})
    waits = _waits(trace, operations, calls, scratch) if calls is not None else {}
    lanes = []
    for own in operations:
        timeline = build_timeline(own, window)
        if window is not None and timeline.window.start >= timeline.window.end:
            continue
        gaps = build_timeline(own).gaps if window is not None else timeline.gaps
        gaps = _with_edges(gaps, own, steps.get(own.gpu.rank))
        lane = Lane(timeline, without_calls(gaps), None)
        if has_calls:
            mine = waits.get(own.gpu.process, {})
            lane = replace(
                lane,
                host_data=_host_data(mine, evidence, own),
                data=all_waits(own.gpu.process, calls, evidence, mine),
                with_calls=_with_calls(own, timeline.window),
            )
        if calls is not None:
            lane = replace(lane, causes=find_causes(own, gaps, calls, evidence, mine))
        lanes.append(scratch.keep(lane) if scratch else lane)
    return lanes


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
