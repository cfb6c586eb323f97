"""The whole analysis of a trace: one analyzer after another."""

from __future__ import annotations

from dataclasses import dataclass

from gputrace.analyzers.findings import find
from gputrace.analyzers.gaps import find_gaps
from gputrace.analyzers.partition import Timeline, build_timelines, read_operations
from gputrace.analyzers.results import (
    SCHEMA_VERSION,
    Analysis,
    Breakdown,
    GpuTotals,
    Steps,
)
from gputrace.errors import InputError, UsageError
from gputrace.traces.trace import Progress, Trace, Window


@dataclass(frozen=True, slots=True)
class Options:
    """What a person may ask of an analysis."""

    window: Window | None = None
    """Nanoseconds from the trace's origin; None for all of it."""
    gaps: int = 50
    """How many of the largest gaps to list."""


def analyze(
    trace: Trace, options: Options | None = None, progress: Progress | None = None
) -> Analysis:
    """Reads what it needs and says where the time went.

    Raises InputError where no GPU operation can be used, UsageError where none lies in the window.
    """
    options = options or Options()
    operations = read_operations(trace, progress)
    if not len(operations):
        raise InputError(trace.path, "no GPU operation in it has usable times; record it again")
    timelines = build_timelines(trace, operations, _absolute(trace, options.window))
    if not timelines:
        raise UsageError(_outside(trace, operations.start.min(), operations.end.max()))
    gpus = tuple(_totals(timeline) for timeline in timelines)
    breakdown = tuple(_whole_span(total) for total in gpus)
    start = min(timeline.window.start for timeline in timelines)
    end = max(timeline.window.end for timeline in timelines)
    return Analysis(
        schema_version=SCHEMA_VERSION,
        source=trace.source,
        path=str(trace.path),
        origin_ns=trace.origin,
        span_ns=end - start,
        gpus=gpus,
        steps=Steps("none", "none", 0.0, 0, 0, 0, None, None, None, "steps are not looked for"),
        step_list=(),
        phases=(),
        breakdown=breakdown,
        gaps=find_gaps(timelines, options.gaps),
        findings=find(breakdown),
        dropped_rows=dict(trace.quality.dropped),
        warnings=tuple(trace.quality.warnings),
    )


def _absolute(trace: Trace, window: Window | None) -> Window | None:
    if window is None:
        return None
    return Window(window.start + trace.origin, window.end + trace.origin)


def _outside(trace: Trace, start: int, end: int) -> str:
    first, last = (start - trace.origin) / 1e9, (end - trace.origin) / 1e9
    return f"{trace.path}: no GPU activity in that window; it runs from {first:.3f}s to {last:.3f}s"


def _totals(timeline: Timeline) -> GpuTotals:
    gpu, shares = timeline.gpu, timeline.shares
    return GpuTotals(
        gpu=gpu.gpu,
        gpu_known=gpu.gpu_known,
        device=gpu.device,
        rank=gpu.rank,
        rank_known=gpu.rank_known,
        name=gpu.name,
        kernels=timeline.kernels,
        copies=timeline.copies,
        start_ns=timeline.window.start,
        span_ns=timeline.window.end - timeline.window.start,
        **{f"{name}_ns": value for name, value in shares._asdict().items()},
    )


def _whole_span(total: GpuTotals) -> Breakdown:
    """The breakdown where there are no steps; the causes of idle time are not looked for."""
    return Breakdown(
        gpu=total.gpu,
        gpu_known=total.gpu_known,
        device=total.device,
        rank=total.rank,
        steps=0,
        total_ns=total.span_ns,
        compute_ns=total.compute_ns,
        communication_ns=total.communication_ns,
        communication_wait_ns=None,
        h2d_ns=total.h2d_ns,
        other_copy_ns=total.other_copy_ns,
        memset_ns=total.memset_ns,
        recorder_ns=0,
        data_feeding_ns=0,
        sync_ns=0,
        alloc_ns=0,
        launch_ns=0,
        other_idle_ns=total.idle_ns,
        host_data_ns=None,
    )
