"""The whole analysis of a trace: one analyzer after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Protocol

from gputrace.analyzers.breakdown import break_down, list_steps, measured, steady, summarize
from gputrace.analyzers.called import tell_calls, with_calls
from gputrace.analyzers.clocks import fit_clocks
from gputrace.analyzers.collectives.matched import Collectives
from gputrace.analyzers.collectives.matching import match_collectives
from gputrace.analyzers.collectives.totals import total_collectives
from gputrace.analyzers.findings import Facts, find
from gputrace.analyzers.gaps import find_gaps
from gputrace.analyzers.host_lanes import find_host_lanes
from gputrace.analyzers.kernels import count_kernels
from gputrace.analyzers.lanes import AnyLaneSummary, LaneSummary
from gputrace.analyzers.lines import find_lines
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.options import Options
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.phases import find_warmup_causes, list_phases
from gputrace.analyzers.plugged import find_plugged
from gputrace.analyzers.results import SCHEMA_VERSION, Analysis, GpuTotals
from gputrace.analyzers.shard import Shard
from gputrace.analyzers.steps import FoundSteps
from gputrace.analyzers.utilization import find_utilization
from gputrace.analyzers.whatif import what_if
from gputrace.errors import InputError, UsageError
from gputrace.plugins import plugins
from gputrace.traces.scratch import scratch_for
from gputrace.traces.trace import Progress, Trace, Window


class Watcher(Protocol):
    """Sees what the analysis is made of as soon as it is there, for views that draw it."""

    def operations_read(self, operations: Sequence[GpuOperations]) -> None: ...
    def facts_found(self, facts: Facts) -> None: ...


Spread = Callable[[Trace], PerGpu | None]
"""Has the rows of a trace read and kept by others; gives None where they must be here."""


def analyze(
    trace: Trace,
    options: Options | None = None,
    progress: Progress | None = None,
    watcher: Watcher | None = None,
    spread: Spread | None = None,
) -> Analysis:
    """Reads what it needs and says where the time went.

    Where nothing was recorded of a GPU, what the host's signals tell of it. Raises InputError
    where that is nothing, or no GPU operation can be used, UsageError where none lies in the window
    or none of the steps asked for is there.
    """
    far = None if spread is None or watcher is not None or plugins("analyzers") else spread(trace)
    gpus = far or PerGpu.here(Shard(trace, scratch_for(trace), progress))
    with closing(gpus):
        return _analyze(gpus, options or Options(), watcher)


def _analyze(gpus: PerGpu, options: Options, watcher: Watcher | None) -> Analysis:
    trace, window = gpus.trace, _absolute(gpus.trace, options.window)
    _put_on_one_clock(gpus)
    if watcher is not None:
        watcher.operations_read(gpus.whole.operations)
    if not gpus.operations and trace.no_gpu is None:
        raise InputError(trace.title, "no GPU operation in it has usable times; record it again")
    collectives = match_collectives(gpus)
    lanes: Sequence[AnyLaneSummary]
    if gpus.operations:
        found = gpus.find_steps(options.steps)
        gpus.build_lanes(window, found)
        gpus.add_waits({own.gpu: collectives.waiting(n) for n, own in enumerate(gpus.operations)})
        lanes = gpus.lanes
    else:
        host_lanes, found = find_host_lanes(trace, window, options.steps)
        gpus, lanes = PerGpu.of_hosts(trace, host_lanes), host_lanes
    if not lanes:
        raise UsageError(_outside(trace, gpus))
    facts = _facts(gpus, lanes, found, collectives, window, options)
    if watcher is not None:
        watcher.facts_found(facts)
    return _answer(facts, lanes, window, options.gaps)


def _put_on_one_clock(gpus: PerGpu) -> None:
    """Corrects the clocks of several hosts as far as collectives tell."""
    fit = fit_clocks(gpus) if len(gpus.trace.paths) > 1 else None
    if fit is not None:
        gpus.move(fit.shifts, str(fit))


def _facts(
    gpus: PerGpu,
    lanes: Sequence[AnyLaneSummary],
    found: FoundSteps,
    collectives: Collectives,
    window: Window | None,
    options: Options,
) -> Facts:
    """What the rules of findings look at, and the answer is made of."""
    steps = list_steps(gpus, lanes, found, window)
    timed = measured(steps, found)
    if options.steps is not None and not timed:
        raise UsageError(_no_such_steps(gpus.trace, options, found))
    chosen = with_calls(gpus, timed)
    if timed and not chosen:
        # What the steps that a person chose have of calls tells nothing of them.
        chosen = timed
        gpus.forget_calls()
    causes = find_warmup_causes(gpus, found) if gpus.lanes else None
    return Facts(
        gpus,
        found,
        steps,
        chosen,
        break_down(gpus, lanes, chosen),
        gpus.whole.once(find_lines),
        collectives,
        kernels=count_kernels(gpus, chosen) if gpus.lanes else None,
        phases=list_phases(gpus, lanes, found, steps, causes),
        timed=timed,
    )


def _answer(
    facts: Facts, lanes: Sequence[AnyLaneSummary], window: Window | None, most_gaps: int
) -> Analysis:
    gpus, chosen = facts.per_gpu, facts.measured
    trace, quality = facts.trace, facts.trace.quality
    plugged, tables = find_plugged(facts)
    findings = find(facts, plugged)
    recorded_calls = tell_calls(gpus.lanes, chosen if gpus.has_calls else (), facts.timed)
    if recorded_calls is not None:
        quality.notes.append(str(recorded_calls))
    gaps = find_gaps(gpus, facts.found, chosen, most_gaps, facts.lines)
    return Analysis(
        schema_version=SCHEMA_VERSION,
        source=trace.source,
        path=str(trace.path),
        paths=tuple(str(path) for path in trace.paths),
        origin_ns=trace.origin,
        span_ns=_span(lanes),
        gpus=tuple(map(_totals, gpus.lanes)),
        steps=summarize(facts.found, facts.timed or steady(facts.steps)),
        step_list=tuple(facts.steps),
        phases=facts.phases,
        breakdown=facts.breakdown,
        collectives=total_collectives(gpus, facts.collectives, chosen),
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
        dropped_rows=dict(sorted(quality.dropped.items())),
        warnings=(*map(str, quality.left_out), *quality.warnings, *quality.notes),
        left_out=tuple(quality.left_out),
        tables=tables,
    )


def _absolute(trace: Trace, window: Window | None) -> Window | None:
    if window is None:
        return None
    return Window(window.start + trace.origin, window.end + trace.origin)


def _span(lanes: Sequence[AnyLaneSummary]) -> int:
    windows = [lane.window for lane in lanes]
    return max(window.end for window in windows) - min(window.start for window in windows)


def _outside(trace: Trace, gpus: PerGpu) -> str:
    if gpus.operations:
        spans = [own.span for own in gpus.operations]
    else:
        spans = [lane.window for lane in find_host_lanes(trace, None)[0]]
    first = min(span.start for span in spans) - trace.origin
    last = max(span.end for span in spans) - trace.origin
    what = "GPU activity" if gpus.operations else "step and no wait"
    return (
        f"{trace.title}: no {what} in that window; "
        f"it runs from {first / 1e9:.3f}s to {last / 1e9:.3f}s"
    )


def _no_such_steps(trace: Trace, options: Options, found: FoundSteps) -> str:
    count = max((len(windows) for windows in found.by_rank.values()), default=0)
    first, end = options.steps or (0, 0)
    have = f"it has steps 0 to {count - 1}" if count else "no steps were found in it"
    where = "" if options.window is None else " in that window"
    return f"{trace.title}: no steps {first}:{end}{where}; {have}"


def _totals(lane: LaneSummary) -> GpuTotals:
    gpu, shares = lane.gpu, lane.shares
    return GpuTotals(
        gpu=gpu.gpu,
        gpu_known=gpu.gpu_known,
        device=gpu.device,
        rank=gpu.rank,
        rank_known=gpu.rank_known,
        host=gpu.host_name,
        name=gpu.name,
        kernels=lane.kernels,
        copies=lane.copies,
        start_ns=lane.window.start,
        span_ns=sum(shares),
        **{f"{name}_ns": value for name, value in shares._asdict().items()},
    )
