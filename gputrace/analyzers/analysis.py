"""The whole analysis of a trace: one analyzer after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from gputrace.analyzers.breakdown import (
    AnyLane,
    Lane,
    break_down,
    list_steps,
    measured,
    steady,
    summarize,
)
from gputrace.analyzers.called import tell_calls, with_calls
from gputrace.analyzers.clocks import fit_clocks, shifted
from gputrace.analyzers.collectives.matching import Collectives, match_collectives
from gputrace.analyzers.collectives.totals import total_collectives
from gputrace.analyzers.collectives.waiting import find_waiting
from gputrace.analyzers.findings import Facts, find
from gputrace.analyzers.gaps import find_gaps
from gputrace.analyzers.gathered import gather_operations
from gputrace.analyzers.gpu_lanes import find_lanes
from gputrace.analyzers.host import HostCalls
from gputrace.analyzers.host_lanes import find_host_lanes
from gputrace.analyzers.kernels import count_kernels
from gputrace.analyzers.lines import read_lines
from gputrace.analyzers.operations import GpuOperations, read_operations
from gputrace.analyzers.options import Options
from gputrace.analyzers.partition import Timeline
from gputrace.analyzers.phases import find_warmup_causes, list_phases
from gputrace.analyzers.plugged import find_plugged
from gputrace.analyzers.results import SCHEMA_VERSION, Analysis, GpuTotals, Step
from gputrace.analyzers.steps import FoundSteps
from gputrace.analyzers.utilization import find_utilization
from gputrace.analyzers.whatif import what_if
from gputrace.errors import InputError, UsageError
from gputrace.traces.scratch import OneByOne, Scratch, scratch_for
from gputrace.traces.trace import Progress, Trace, Window


class Watcher(Protocol):
    """Sees what the analysis is made of as soon as it is there, for views that draw it."""

    def operations_read(self, operations: Sequence[GpuOperations]) -> None: ...
    def facts_found(self, facts: Facts) -> None: ...


def analyze(
    trace: Trace,
    options: Options | None = None,
    progress: Progress | None = None,
    watcher: Watcher | None = None,
) -> Analysis:
    """Reads what it needs and says where the time went.

    Where nothing was recorded of a GPU, what the host's signals tell of it. Raises InputError
    where that is nothing, or no GPU operation can be used, UsageError where none lies in the window
    or none of the steps asked for is there.
    """
    options = options or Options()
    scratch = scratch_for(trace)
    operations = _operations(trace, scratch, progress)
    window = _absolute(trace, options.window)
    if watcher is not None:
        watcher.operations_read(operations)
    if not operations and trace.no_gpu is None:
        raise InputError(trace.title, "no GPU operation in it has usable times; record it again")
    gpus: Sequence[Lane] = ()
    lanes: Sequence[AnyLane]
    calls = None
    collectives = match_collectives(trace, operations)
    if operations:
        asked = options.steps
        gpus, calls, found = find_lanes(trace, operations, window, asked, progress, scratch)
        lanes = gpus = _with_waiting(gpus, operations, collectives, scratch)
    else:
        lanes, found = find_host_lanes(trace, window, options.steps)
    if not lanes:
        raise UsageError(_outside(trace, operations))
    steps = list_steps(lanes, found, window)
    timed = measured(steps, found)
    if options.steps is not None and not timed:
        raise UsageError(_no_such_steps(trace, options, found))
    chosen = with_calls(operations, calls, timed)
    if timed and not chosen:
        # What the steps that a person chose have of calls tells nothing of them.
        chosen, calls = timed, None
    facts = _facts(trace, operations, calls, lanes, gpus, found, steps, chosen, collectives)
    facts = replace(facts, timed=timed)
    if watcher is not None:
        watcher.facts_found(facts)
    return _answer(facts, lanes, window, options.gaps)


def _facts(
    trace: Trace,
    operations: Sequence[GpuOperations],
    calls: HostCalls | None,
    lanes: Sequence[AnyLane],
    gpus: Sequence[Lane],
    found: FoundSteps,
    steps: tuple[Step, ...],
    chosen: tuple[Step, ...],
    collectives: Collectives,
) -> Facts:
    """What the rules of findings look at, and the answer is made of."""
    causes = find_warmup_causes(trace, operations, gpus, calls, found) if gpus else None
    return Facts(
        trace,
        operations,
        calls,
        gpus,
        found,
        steps,
        chosen,
        break_down(lanes, chosen),
        read_lines(trace),
        collectives,
        kernels=count_kernels(trace, operations, gpus, chosen, calls) if gpus else None,
        phases=list_phases(lanes, found, steps, causes),
    )


def _answer(
    facts: Facts, lanes: Sequence[AnyLane], window: Window | None, most_gaps: int
) -> Analysis:
    trace, gpus, chosen, quality = facts.trace, facts.lanes, facts.measured, facts.trace.quality
    plugged, tables = find_plugged(facts)
    findings = find(facts, plugged)
    recorded_calls = tell_calls(gpus, chosen if facts.calls is not None else (), facts.timed)
    if recorded_calls is not None:
        quality.notes.append(str(recorded_calls))
    gaps = find_gaps(trace, gpus, facts.calls, facts.found, chosen, most_gaps, facts.lines)
    return Analysis(
        schema_version=SCHEMA_VERSION,
        source=trace.source,
        path=str(trace.path),
        paths=tuple(str(path) for path in trace.paths),
        origin_ns=trace.origin,
        span_ns=_span(lanes),
        gpus=tuple(_totals(lane.timeline) for lane in gpus),
        steps=summarize(facts.found, facts.timed or steady(facts.steps)),
        step_list=tuple(facts.steps),
        phases=facts.phases,
        breakdown=facts.breakdown,
        collectives=total_collectives(gpus, facts.operations, facts.collectives, chosen),
        gaps=gaps,
        balance=facts.balance,
        links=facts.links.rows if facts.links is not None else (),
        findings=findings,
        what_if=what_if(facts, {finding.id for finding in findings}),
        kernels=facts.kernels,
        cards=facts.cards,
        utilization=find_utilization(facts.nvml, gpus, window),
        recorded_calls=recorded_calls,
        # Last: all that reads the trace may have something to say of it.
        dropped_rows=dict(quality.dropped),
        warnings=(*map(str, quality.left_out), *quality.warnings, *quality.notes),
        left_out=tuple(quality.left_out),
        tables=tables,
    )


def _operations(
    trace: Trace, scratch: Scratch | None, progress: Progress | None
) -> Sequence[GpuOperations]:
    """The operations, in memory or not, on one clock."""
    if scratch is None:
        return list(_on_one_clock(trace, read_operations(trace, progress)))
    found = gather_operations(trace, scratch, progress)
    return OneByOne([scratch.keep(own) for own in _on_one_clock(trace, found)], scratch)


def _on_one_clock(trace: Trace, operations: Sequence[GpuOperations]) -> Iterator[GpuOperations]:
    """The operations, with the clocks of several hosts corrected as far as collectives tell."""
    fit = fit_clocks(trace, operations) if len(trace.paths) > 1 else None
    if fit is None:
        yield from operations
        return
    trace.shift_hosts(fit.shifts, str(fit))
    for own in operations:
        yield shifted(own, fit.shifts[own.gpu.host])


def _with_waiting(
    lanes: Sequence[Lane],
    operations: Sequence[GpuOperations],
    collectives: Collectives,
    scratch: Scratch | None,
) -> Sequence[Lane]:
    place = {own.gpu: index for index, own in enumerate(operations)}
    found = []
    for lane in lanes:
        waiting = find_waiting(lane.timeline, collectives, place[lane.gpu])
        found.append(replace(lane, waiting=scratch.keep(waiting) if scratch else waiting))
    return OneByOne(found, scratch) if scratch else found


def _absolute(trace: Trace, window: Window | None) -> Window | None:
    if window is None:
        return None
    return Window(window.start + trace.origin, window.end + trace.origin)


def _span(lanes: Sequence[AnyLane]) -> int:
    windows = [lane.window for lane in lanes]
    return max(window.end for window in windows) - min(window.start for window in windows)


def _outside(trace: Trace, operations: Sequence[GpuOperations]) -> str:
    if operations:
        spans = [Window(int(own.start[0]), int(own.reach[-1])) for own in operations]
    else:
        spans = [lane.window for lane in find_host_lanes(trace, None)[0]]
    first = min(span.start for span in spans) - trace.origin
    last = max(span.end for span in spans) - trace.origin
    return (
        f"{trace.title}: no {'GPU activity' if operations else 'step and no wait'} in that window; "
        f"it runs from {first / 1e9:.3f}s to {last / 1e9:.3f}s"
    )


def _no_such_steps(trace: Trace, options: Options, found: FoundSteps) -> str:
    count = max((len(windows) for windows in found.by_rank.values()), default=0)
    first, end = options.steps or (0, 0)
    have = f"it has steps 0 to {count - 1}" if count else "no steps were found in it"
    where = "" if options.window is None else " in that window"
    return f"{trace.title}: no steps {first}:{end}{where}; {have}"


def _totals(timeline: Timeline) -> GpuTotals:
    gpu, shares = timeline.gpu, timeline.shares
    return GpuTotals(
        gpu=gpu.gpu,
        gpu_known=gpu.gpu_known,
        device=gpu.device,
        rank=gpu.rank,
        rank_known=gpu.rank_known,
        host=gpu.host_name,
        name=gpu.name,
        kernels=timeline.kernels,
        copies=timeline.copies,
        start_ns=timeline.window.start,
        span_ns=sum(shares),
        **{f"{name}_ns": value for name, value in shares._asdict().items()},
    )
