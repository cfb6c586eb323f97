"""The whole analysis of a trace: one analyzer after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Final, Protocol

import numpy as np

from gputrace.analyzers.breakdown import (
    break_down,
    find_gaps,
    list_steps,
    measured,
    steady,
    summarize,
)
from gputrace.analyzers.clocks import put_on_one_clock
from gputrace.analyzers.collectives import Collectives, match_collectives
from gputrace.analyzers.cuda_api_calls import NOBODY
from gputrace.analyzers.device_metrics import add_use, find_energy, find_utilization, flop_of_step
from gputrace.analyzers.findings import CAUSES, find, order
from gputrace.analyzers.findings.copies import find_copies
from gputrace.analyzers.findings.data_feeding import find_input_pipelines, find_loaders
from gputrace.analyzers.findings.facts import SEVERITIES, Facts
from gputrace.analyzers.findings.hardware import find_card_use, note_neighbours
from gputrace.analyzers.findings.host_work import read_host_optimizers
from gputrace.analyzers.findings.idle import find_allocators
from gputrace.analyzers.findings.stragglers import find_balance, late_causes
from gputrace.analyzers.findings.whole_run import missing_rows
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, Shard
from gputrace.analyzers.grouping import StepsOf, edges_of
from gputrace.analyzers.host_state import (
    measure_throughput,
    read_counters,
    read_host_state,
    read_work,
)
from gputrace.analyzers.kernels import count_kernels
from gputrace.analyzers.lanes import AnyLaneSummary, HostLane, LaneSummary, find_host_lanes
from gputrace.analyzers.ledger.causes import sought_in, tree_of, with_plugins
from gputrace.analyzers.loader import read_loaders
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.parallelism import (
    EXPERT,
    PIPELINE,
    SHARDED,
    TENSOR,
    find_experts,
    find_sharded,
    find_tensor,
    total_collectives,
)
from gputrace.analyzers.pipelines import find_pipelines
from gputrace.analyzers.python_samples import read_python_lines, read_sources
from gputrace.analyzers.run_phases import find_warmup_causes, list_phases
from gputrace.analyzers.step_phases import find_modules, read_phases
from gputrace.analyzers.steps import FoundSteps
from gputrace.analyzers.whatif import late_gains, prepare_replay, what_if
from gputrace.errors import InputError, PluginError, UsageError
from gputrace.model.attempts import choose_attempt, describe_lives
from gputrace.model.events import Kind, Mask
from gputrace.model.intervals import Times
from gputrace.model.memory import DeviceMemory
from gputrace.model.options import Options, Window
from gputrace.model.results import (
    SCHEMA_VERSION,
    Analysis,
    ExtraTable,
    Finding,
    Gaps,
    GpuTotals,
    RecordedCalls,
    Step,
    Throughput,
)
from gputrace.model.trace import Progress, Trace
from gputrace.plugins import Plugin, call, expect, load_function, plugins, warn
from gputrace.store.spill_file import LARGE, SpillFile
from gputrace.units import format_steps


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
    """Read what is needed and say where the time went.

    Without GPU activity, the answer is what the host's signals show. Raises InputError where that
    is nothing, or no GPU operation can be used, UsageError where none lies in the window or none of
    the steps asked for is there.
    """
    options = options or Options()
    window = trace.cut
    if options.window is not None:
        window = Window(*(moment + trace.origin for moment in options.window))
    trace.cover(choose_attempt(trace.lives, None if window is None else window.end))
    # Read the operations here, or where the files are; watchers and plugins want them here.
    here = watcher is not None or plugins("analyzers") or plugins("causes")
    far = None if spread is None or here else spread(trace)
    aside = SpillFile() if trace.cut_bytes > LARGE else None
    opened = far or PerGpu.here(Shard(trace, aside, progress))
    if not opened.operations and trace.no_gpu is None:
        opened.close()
        raise InputError(trace.title, "no GPU operation in it has usable times; record it again")
    with closing(opened):
        if len(trace.paths) > 1 or not trace.has_one_clock:
            put_on_one_clock(opened)
        if watcher is not None:
            watcher.operations_read(opened.whole.operations)
        gpus, lanes, all_steps, collectives = _build_lanes(opened, window, options)
        gpus.each_shard(_read_hosts)
        facts = _facts(gpus, lanes, all_steps, collectives, window, options)
        if watcher is not None:
            watcher.facts_found(facts)
        return _answer(facts, lanes, window, options)


_OF_HOSTS: Final[tuple[Callable[[Shard], Any], ...]] = (
    *(read_phases, read_host_state, read_loaders, read_python_lines, read_host_optimizers),
)
_NEEDS: Final[dict[Callable[[Shard], Any], tuple[Kind, Any]]] = {
    read_loaders: (Kind.LOADER, None),
    read_python_lines: (Kind.SAMPLE, None),
    read_host_optimizers: (Kind.RANGE, {}),
    read_counters: (Kind.COUNTER, {}),
    read_work: (Kind.COUNTER, {}),
    read_sources: (Kind.SOURCE, {}),
}
"""Kind of the events that a reader needs, and its result without any."""


def _read_hosts(shard: Shard) -> None:
    """Read what causes are proven by, before one GPU after the other asks for it."""
    if not shard.operations:
        return
    for read, (kind, nothing) in _NEEDS.items():
        if kind not in shard.trace.kinds:
            shard.assume(read, nothing)
    for read in _OF_HOSTS:
        shard.once(read)


def _answer(
    facts: Facts, lanes: Sequence[AnyLaneSummary], window: Window | None, options: Options
) -> Analysis:
    """Find what costs time and what would save some, and collect the answer."""
    trace, gpus, all_steps = facts.trace, facts.per_gpu, facts.all_steps
    quality, chosen = trace.quality, facts.measured
    plugged, tables = run_plugins(facts)
    run = prepare_replay(facts)
    facts.late_gains.update(late_gains(facts, run))
    facts.late_causes.update(late_causes(facts))
    ledger = facts.ledger
    findings = find(facts, plugged)
    predictions = what_if(facts, findings, run)
    start_up = 0.0 if facts.repeats else facts.share_of(ledger.mean("warmup"))
    recorded_calls = api_coverage(gpus.lanes, chosen if gpus.has_calls else (), facts.timed)
    quality.notes += _notes(facts, recorded_calls)
    return Analysis(
        schema_version=SCHEMA_VERSION,
        source=trace.source,
        path=str(trace.path),
        paths=tuple(str(path) for path in trace.paths),
        origin_ns=trace.origin,
        span_ns=_span(trace, lanes),
        gpus=tuple(map(_totals, gpus.lanes)),
        steps=summarize(all_steps, facts.timed or steady(facts.steps), start_up),
        step_list=tuple(facts.steps),
        phases=facts.phases,
        breakdown=facts.listed,
        collectives=facts.by_group(total_collectives),
        gaps=_longest_gaps(facts, options.gaps),
        balance=facts.once(find_balance),
        links=facts.links.rows if facts.links is not None else (),
        findings=order(findings, predictions, facts.mean_ns, run.curable if run else ()),
        what_if=predictions,
        kernels=facts.kernels,
        cards=facts.once(find_card_use),
        utilization=find_utilization(trace.nvml, gpus, window),
        recorded_calls=recorded_calls,
        recorder=all_steps.cost,
        missing=facts.once(missing_rows),
        host_load=facts.host_load,
        host_lines=facts.host_lines,
        allocators=facts.once(find_allocators),
        memory=_memory(trace),
        loader=facts.once(find_loaders),
        input_pipelines=facts.once(find_input_pipelines),
        step_phases=facts.step_phases,
        framework=facts.framework,
        pipelines=facts.by_group(find_pipelines, PIPELINE),
        experts=facts.by_group(find_experts, EXPERT),
        sharded=facts.by_group(find_sharded, SHARDED),
        tensor=facts.by_group(find_tensor, TENSOR),
        # Last: all that reads the trace may have something to say of it.
        dropped_rows=dict(sorted(quality.dropped.items())),
        warnings=(*map(str, quality.left_out), *quality.warnings, *quality.notes),
        left_out=tuple(quality.left_out),
        tables=tables,
        throughput=facts.once(_throughput),
        energy=find_energy(trace.nvml, gpus, chosen, facts.once(_throughput)),
        modules=find_modules(gpus, chosen),
        copies=facts.once(find_copies),
        ledger=ledger.rows,
        causes=tree_of(facts.causes, waits_known=facts.waits_known),
    )


def _memory(trace: Trace) -> tuple[DeviceMemory, ...]:
    """Return who holds the memory of each GPU by the events of memory in a profiler's files."""
    if trace.elsewhere or Kind.MEMORY not in trace.kinds:
        return ()
    from gputrace.analyzers.memory_holders import report_memory
    from gputrace.readers.kineto_memory import read_kineto_memory

    return report_memory((str(path), read_kineto_memory(path)) for path in trace.paths).devices


def _throughput(facts: Facts) -> tuple[Throughput, ...]:
    """Return samples, tokens and FLOPs of each rank; empty where nothing tells them."""
    work, steps = facts.read(read_work), facts.timed or facts.steps
    flop = flop_of_step(facts.kernels)
    rows = measure_throughput(work, flop, facts.processes, steps, facts.unrecorded)
    return add_use(rows, facts.per_gpu.lanes, facts.kernels)


def _longest_gaps(facts: Facts, most: int) -> Gaps:
    """Return all gaps of the GPUs in the breakdown, and the ``most`` longest with evidence."""
    is_python = bool(facts.framework) and not facts.is_hip
    steps, measured, lines = facts.all_steps, facts.measured, facts.lines
    lanes = facts.lanes_of(facts.listed)
    return find_gaps(facts.per_gpu, lanes, steps, measured, most, lines, is_python=is_python)


_OVERLAPPING_RATIO: Final = 1.05
"""Ratio of the kernels' time to the time in which any runs, from which they are said to overlap."""


def _notes(facts: Facts, recorded_calls: RecordedCalls | None) -> Iterator[str]:
    """Yield what limits the figures: calls that were not recorded, shares of kernels that sum to
    more than the time in which the GPUs are busy, what recording cost if it added nothing, stacks
    that were recorded with it, what lacks because processes ended early, and neighbours whose cost
    is small or not known.
    """
    yield from describe_lives(facts.trace.lives, facts.trace.attempt, facts.trace.origin)
    if recorded_calls is not None:
        yield str(recorded_calls)
    busy = sum(row.of("compute") + row.of("communication") for row in facts.rows)
    kernels, cost = facts.kernels, facts.all_steps.cost
    spent = 0 if kernels is None else sum(use.total_ns for use in kernels.top) + kernels.rest_ns
    if busy and spent > _OVERLAPPING_RATIO * busy:
        yield (
            "kernels overlap, on several streams or as dependent launches: their times sum to "
            f"{spent / busy:.0%} of the time in which any of them runs"
        )
    if cost is not None and not cost.added_ns:
        yield f"{cost} ({cost.basis})"
    if facts.lines is not None and "kineto" in facts.trace.source:
        yield (
            "the profiler followed each call of Python (with_stack=True), which slows the host: "
            "without it, waits for launches are shorter"
        )
    yield from note_neighbours(facts)


def _span(trace: Trace, lanes: Sequence[AnyLaneSummary]) -> int:
    """Return the nanoseconds from the first to the last moment of all lanes, or of all samples."""
    if not lanes:
        times = trace.nvml.samples.time
        return int(times[-1] - times[0]) if len(times) else 0
    return max(lane.window.end for lane in lanes) - min(lane.window.start for lane in lanes)


def _build_lanes(
    gpus: PerGpu, window: Window | None, options: Options
) -> tuple[PerGpu, Sequence[AnyLaneSummary], FoundSteps, Collectives]:
    """Build the lanes of all GPUs, of the hosts where there are none; return whose they are, the
    lanes, the steps, and the collectives.
    """
    trace = gpus.trace
    lanes: Sequence[AnyLaneSummary] = ()
    if gpus.operations:
        all_steps = gpus.find_steps(options.steps)
        # Which message a kernel moves is known by the call that launched it.
        collectives = match_collectives(gpus)
        gpus.build_lanes(window, all_steps)
        gpus.add_waits({ran.gpu: collectives.waiting(n) for n, ran in enumerate(gpus.operations)})
        lanes = gpus.lanes
    else:
        host_lanes: Sequence[HostLane] = ()
        all_steps = FoundSteps({}, 0)
        if not trace.is_card_log:
            host_lanes, all_steps = find_host_lanes(trace, window, options.steps)
        gpus, lanes = PerGpu.of_hosts(trace, host_lanes), host_lanes
        collectives = match_collectives(gpus)
    if not lanes and not trace.is_card_log:
        if gpus.operations:
            spans = [operations.span for operations in gpus.operations]
        else:
            spans = [lane.window for lane in find_host_lanes(trace, None)[0]]
        first = min(span.start for span in spans) - trace.origin
        last = max(span.end for span in spans) - trace.origin
        what = "GPU activity" if gpus.operations else "step and no wait"
        raise UsageError(
            f"{trace.title}: no {what} in that window; "
            f"it runs from {first / 1e9:.3f}s to {last / 1e9:.3f}s"
        )
    return gpus, lanes, all_steps, collectives


def _facts(
    gpus: PerGpu,
    lanes: Sequence[AnyLaneSummary],
    all_steps: FoundSteps,
    collectives: Collectives,
    window: Window | None,
    options: Options,
) -> Facts:
    """Collect the facts that the rules of findings and the answer are made of."""
    steps = list_steps(gpus, lanes, all_steps, window)
    timed = measured(gpus, lanes, steps, all_steps)
    if options.steps is not None and not timed:
        most = max(all_steps.by_rank.values(), key=len, default=None)
        first, end = options.steps
        have = "no steps were found in it"
        if most is not None and len(most):
            have = f"it has steps 0 to {len(most) - 1}"
            if most.numbers is not None and most.numbers[-1] != len(most) - 1:
                have += f", which are the program's {format_steps(most.numbers.tolist())}"
        where = "" if options.window is None else " in that window"
        raise UsageError(f"{gpus.trace.title}: no steps {first}:{end}{where}; {have}")
    chosen = steps_with_api_records(gpus, timed)
    if timed and not chosen:
        # What the steps that a person chose have of calls tells nothing of them.
        chosen = timed
        gpus.forget_calls()
    causes = find_warmup_causes(gpus, all_steps)
    return Facts(
        gpus,
        all_steps,
        steps,
        chosen,
        break_down(gpus, lanes, chosen),
        gpus.whole.once(read_python_lines),
        collectives,
        kernels=count_kernels(gpus, chosen) if gpus.lanes else None,
        phases=list_phases(gpus, lanes, all_steps, steps, causes),
        timed=timed,
        causes=sought_in(with_plugins(CAUSES), gpus.trace.kinds),
    )


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
        span_ns=sum(shares.values()),
        **{f"{name}_ns": value for name, value in shares.items()},
    )


_PLAIN: Final = frozenset((bool, int, float, str, type(None)))
PluginResults = tuple[tuple[Finding, ...], tuple[ExtraTable, ...]]


def run_plugins(facts: Facts) -> PluginResults:
    """Return the findings and tables of plugins' analyzers; none of one that does not work."""
    results: list[Finding | ExtraTable] = []
    for plugin in plugins("analyzers"):
        try:
            results += _run(plugin, facts)
        except PluginError as error:
            warn(error)
    findings = tuple(result for result in results if isinstance(result, Finding))
    return findings, tuple(result for result in results if isinstance(result, ExtraTable))


def _run(plugin: Plugin, facts: Facts) -> list[Finding | ExtraTable]:
    analyzer = load_function(plugin)

    def run() -> list[Any]:
        given = analyzer(facts)
        return list(given) if isinstance(given, Iterable) else [given]

    results = call(plugin, run)
    for result in results:
        expect(plugin, result, Finding, ExtraTable)
        if problem := _problem(plugin, result):
            raise PluginError(f"{plugin} does not work: {problem}")
    return results  # type: ignore[no-any-return]


def _problem(plugin: Plugin, result: Finding | ExtraTable) -> str:
    """Return what reports and JSON could not show; empty if all is well."""
    values: tuple[Any, ...]
    texts: tuple[Any, ...]
    if isinstance(result, ExtraTable):
        values = tuple(cell for row in result.rows for cell in row)
        texts = (result.title, *result.header)
        if any(len(row) != len(result.header) for row in result.rows):
            return f"a row of its table {result.title!r} has not as many cells as the header"
    else:
        if result.id != plugin.name:
            return f"its finding is called {result.id!r}; it must have the analyzer's name"
        if result.severity not in SEVERITIES:
            return f"its severity {result.severity!r} is none of {', '.join(SEVERITIES)}"
        values = (*result.evidence.values(), *result.gpus, *result.ranks)
        texts = (result.message, result.advice, *result.evidence)
    strange = [value for value in values if type(value) not in _PLAIN]
    strange += [text for text in texts if type(text) is not str]
    if isinstance(result, Finding) and type(result.impact_ns) is not int:
        strange.append(result.impact_ns)
    kinds = sorted({type(value).__name__ for value in strange})
    return f"{', '.join(kinds)} where Python's own text and numbers belong" if kinds else ""


def steps_with_api_records(gpus: PerGpu, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Select the steps of which every rank has all API calls; all steps if calls were never left
    out.
    """
    steps_of = StepsOf(steps)
    sampled = [summary for summary in gpus.operations if summary.coverage.calls is not None]
    sampled = [summary for summary in sampled if steps_of(summary.gpu)]
    if not gpus.has_calls or not sampled:
        return steps
    of_gpu = [steps_of(summary.gpu) for summary in sampled]
    complete = gpus.each(_are_whole, sampled, *zip(*map(edges_of, of_gpu), strict=True))
    lacking = {
        step.step
        for mine, whole in zip(of_gpu, complete, strict=True)
        for step, has in zip(mine, whole.tolist(), strict=True)
        if not has
    }
    return tuple(step for step in steps if step.step not in lacking)


def _are_whole(view: GpuShardView, starts: Times, ends: Times) -> Mask:
    """Return whether each step, and what was issued for it, lies in a recorded stretch.

    That begins where the operation before a step was issued: from there on its host is seen.
    """
    operations, calls = view.operations, view.calls
    first = np.minimum(np.searchsorted(operations.start, starts), len(operations) - 1)
    # A GPU that has nothing to do in a step.
    idle = operations.start[first] >= ends
    if calls is None:
        return idle
    begins, known = starts, np.ones(len(starts), np.bool_)
    for row in (first, np.maximum(first - 1, 0)):
        issued_by = calls.issued_by(operations.events, row)
        known &= issued_by != NOBODY
        begins = np.minimum(begins, calls.start[issued_by])
    begins = np.where(idle, starts, begins)
    return (known | idle) & calls.all_recorded(operations.gpu.process, begins, ends)


def api_coverage(
    lanes: Sequence[LaneSummary], measured: Sequence[Step], steps: Sequence[Step]
) -> RecordedCalls | None:
    """Return how much of the calls was recorded; None if all were.

    ``measured`` are the steps that have all calls, of ``steps``, which would be measured if calls
    had been recorded throughout.
    """
    sampled = [lane for lane in lanes if lane.with_calls is not None]
    if not sampled:
        return None
    recorded = sum(lane.with_calls.total for lane in sampled if lane.with_calls is not None)
    span = sum(lane.window.end - lane.window.start for lane in sampled)
    have = len({step.step for step in measured})
    return RecordedCalls(round(recorded / max(span, 1), 4), have, len({s.step for s in steps}))
