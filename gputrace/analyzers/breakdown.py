"""Breakdown of steps, ranks and GPUs by class and cause, and the largest gaps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import (
    NOBODY,
    CudaApiCalls,
    are_of_hip,
    describe_os_call,
    longest_os_call,
    read_host,
)
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import StepsOf, edges_of, quantile, time_of
from gputrace.analyzers.host_state import read_host_state
from gputrace.analyzers.lanes import AnyGpu, AnyLaneSummary, LaneSummary
from gputrace.analyzers.ledger import charges_within
from gputrace.analyzers.operations import OperationClass
from gputrace.analyzers.python_samples import PythonLines
from gputrace.analyzers.steps import FoundSteps, find_blocked_steps
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.model.events import UNKNOWN, Events, Kind
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.options import Window
from gputrace.model.results import Breakdown, Gap, Gaps, Step, Steps
from gputrace.model.struct import Struct
from gputrace.model.time_class import CLASSES, IDLE_CAUSES
from gputrace.model.trace import Trace
from gputrace.sanitize import clean
from gputrace.units import format_ns


def list_steps(
    gpus: PerGpu, lanes: Sequence[AnyLaneSummary], all_steps: FoundSteps, window: Window | None
) -> tuple[Step, ...]:
    """Return every step on every GPU of its rank; with a window, only the steps inside it."""
    by_rank = all_steps.by_rank
    blocked = {(held.rank, held.step): held.interlude.phase for held in find_blocked_steps(by_rank)}
    having = [lane for lane in lanes if lane.gpu.rank in by_rank]
    windows = [by_rank[lane.gpu.rank] for lane in having]
    tables = gpus.each(_table, having, (w.start for w in windows), (w.end for w in windows))
    return tuple(
        step
        for lane, of_rank, table in zip(having, windows, tables, strict=True)
        for step in _steps_of(lane.gpu, of_rank, table, all_steps.warmup, window, blocked)
    )


class _Table(Struct, frozen=True, dict=True):
    """Shares, causes and waits of the windows of one lane."""

    classes: NDArray[np.int64]
    """Nanoseconds by class, as `Lane.split` gives them."""
    host_data: Times | None
    waited: Times


def _table(view: GpuShardView, starts: Times, ends: Times) -> _Table:
    lane = view.any_lane
    in_loader = None if lane.host_data is None else lane.host_data.within(starts, ends)
    return _Table(lane.split(starts, ends), in_loader, lane.waited(starts, ends))


def _steps_of(
    gpu: AnyGpu,
    windows: StepWindows,
    table: _Table,
    warmup: int,
    window: Window | None,
    blocked: Mapping[tuple[int, int], str],
) -> Iterator[Step]:
    host_data = [None] * len(windows) if table.host_data is None else table.host_data.tolist()
    waited = table.waited.tolist()
    for number, row in enumerate(table.classes.tolist()):
        start, end = int(windows.start[number]), int(windows.end[number])
        if window is None or (start >= window.start and end <= window.end):
            yield Step(
                step=number,
                rank=gpu.rank,
                gpu=gpu.gpu,
                start_ns=start,
                end_ns=end,
                phase="warmup" if number < warmup else blocked.get((gpu.rank, number), "steady"),
                host_data_ns=host_data[number],
                number=None if windows.numbers is None else int(windows.numbers[number]),
                **_class_times(row, None if waited[number] == UNKNOWN else waited[number]),
            )


def _class_times(row: Sequence[int], waited: int | None) -> dict[str, int | None]:
    """Return the fields of the classes of time; all None if unknown."""
    known: Sequence[int | None] = row or [None] * len(CLASSES)
    return dict(zip(_FIELDS, (*known, waited), strict=True))


_FIELDS: Final = (*(f"{name}_ns" for name in CLASSES), "communication_wait_ns")


_FEWEST_ITERATIONS: Final = 10
_MOST_OF_THE_RUN: Final = 0.5
"""Minimum number of steady iterations of each GPU, and part that they have of its time since its
first kernel that computes, or since the first of them, to be measured like steps of training."""
_START_UP: Final = 0.1
"""Minimum part of a GPU's time before that kernel, or of little computation: without a start-up
to leave out, iterations may as well be layers, and the whole span is the better measure."""


def measured(
    gpus: PerGpu, lanes: Sequence[AnyLaneSummary], steps: Sequence[Step], all_steps: FoundSteps
) -> tuple[Step, ...]:
    """Return the steps that the breakdown covers: those that were asked for, else the steady ones.

    Iterations that are not known to be training are measured if they are most of the run after a
    long start-up.
    """
    if all_steps.chosen is not None:
        first, end = all_steps.chosen
        return tuple(step for step in steps if first <= step.step < end)
    chosen = steady(steps)
    if all_steps.kind != "iterations" or not gpus.lanes:
        return chosen
    steps_of = StepsOf(chosen)
    starts = [[step.start_ns for step in steps_of(lane.gpu)] for lane in gpus.lanes]
    for lane, running in zip(lanes, gpus.each(_running, gpus.lanes, starts), strict=True):
        mine = steps_of(lane.gpu)
        covered = sum(step.end_ns - step.start_ns for step in mine)
        window = lane.window.end - lane.window.start
        if running > (1 - _START_UP) * window or covered < _MOST_OF_THE_RUN * running:
            return ()
        if len(mine) < _FEWEST_ITERATIONS:
            return ()
    return chosen


def _running(gpu: GpuShardView, iterations: Sequence[int]) -> int:
    """Return the nanoseconds from the first kernel that computes to the end; 0 without any.

    Count from the first of the iterations, given by their starts, if hardly anything computes
    before, and the host feeds each of them: layers are not fed.
    """
    computing = gpu.operations.classes == OperationClass.COMPUTE
    first = int(np.argmax(computing))
    start, (_, end) = int(gpu.operations.start[first]), gpu.lane.window
    begin = min(iterations, default=0)
    copies = gpu.operations.start[gpu.operations.events.kind == Kind.COPY_H2D]
    is_fed = np.count_nonzero(copies >= begin) >= len(iterations)
    computes = gpu.lane.timeline.of_class(OperationClass.COMPUTE)
    if is_fed and begin > start and computes.clip(start, begin).total < _START_UP * (begin - start):
        start = begin
    return max(0, end - start) * bool(computing[first])


def steady(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps after warm-up in which no rank waits for others that validate."""
    return tuple(step for step in steps if step.phase == "steady")


def break_down(
    gpus: PerGpu, lanes: Sequence[AnyLaneSummary], steps: Sequence[Step]
) -> tuple[Breakdown, ...]:
    """Break down each GPU over the measured steps, or over its whole span if it has none."""
    steps_of = StepsOf(steps)
    by_lane = [steps_of(lane.gpu) for lane in lanes]
    parts = [_part(lane, mine) for lane, mine in zip(lanes, by_lane, strict=True)]
    tables = gpus.each(_table, lanes, *zip(*parts, strict=True)) if parts else []
    rows = zip(lanes, by_lane, parts, tables, strict=True)
    return tuple(_row(lane.gpu, len(mine), part, table) for lane, mine, part, table in rows)


def _part(lane: AnyLaneSummary, steps: Sequence[Step]) -> tuple[Times, Times]:
    """Return starts and ends of the steps; else of a lane's span, or its parts that have calls."""
    if steps:
        starts, ends = edges_of(steps)
        return starts, ends
    if lane.with_calls is not None and lane.with_calls.total:
        return lane.with_calls.start, lane.with_calls.end
    return np.array([lane.window.start]), np.array([lane.window.end])


def _row(gpu: AnyGpu, steps: int, part: tuple[Times, Times], table: _Table) -> Breakdown:
    totals = table.classes.sum(axis=0).tolist()
    waited = table.waited
    return Breakdown(
        gpu=gpu.gpu,
        gpu_known=gpu.gpu_known,
        device=gpu.device,
        rank=gpu.rank,
        steps=steps,
        total_ns=sum(totals) if totals else int((part[1] - part[0]).sum()),
        host_data_ns=None if table.host_data is None else int(table.host_data.sum()),
        **_class_times(totals, None if (waited == UNKNOWN).any() else int(waited.sum())),
    )


def summarize(all_steps: FoundSteps, steps: Sequence[Step], start_up: float = 0.0) -> Steps:
    """Summarize the detected steps, with the times of the measured steps, and the share of the time
    that a start takes where there are none.
    """
    if not all_steps.by_rank:
        kind, reason = "none", all_steps.reason
        if start_up >= _MOST_OF_THE_RUN:
            kind, reason = (
                "start-up",
                f"GPUs idle {start_up:.0%} of it for what a process does once",
            )
        return Steps("none", kind, 0.0, 0, 0, 0, None, None, None, reason)
    best = max(all_steps.by_rank.values(), key=len)
    per_rank = {(step.rank, step.step): step.end_ns - step.start_ns for step in steps}
    lengths = np.array(list(per_rank.values()), np.int64)
    known = len(lengths) > 0
    rate = ""
    if best.tokens and known:
        every = "" if best.tokens > 1 else " of each sequence"
        rate = f"; {best.tokens * 1e9 / float(lengths.mean()):,.1f} tokens a second{every}"
    control = 0 if best.marked is None else max(0, len(best.marked.number) - len(best))
    return Steps(
        source=best.source,
        kind=best.kind,
        confidence=min(windows.confidence for windows in all_steps.by_rank.values()),
        count=len(best) + control,
        warmup_count=all_steps.warmup,
        steady_count=len({number for _, number in per_rank}),
        mean_ns=round(float(lengths.mean())) if known else None,
        p50_ns=round(quantile(per_rank.values(), 0.50)) if known else None,
        p95_ns=round(quantile(per_rank.values(), 0.95)) if known else None,
        reason=best.reason + rate,
        control_count=control,
    )


_CALLS_NAMED: Final = 2
_NAMED_CALL_PART: Final = 0.05
"""Part of a gap that a call must fill to be named."""
_LONGEST_RANGE: Final = 60
_GAPS_AT_ONCE: Final = 32
"""Gaps of a stretch of which the longest is looked at first."""
_OUTSIDE: Final = "^thread |(no|without a) CUDA call"
"""Pattern of the evidence of a thread that was outside CUDA calls."""
_NAME_LINES: Final = (
    "record again with `gputrace record --python` to name the lines of gaps without CUDA calls"
)
NO_ISSUER: Final = "the trace does not show which thread issued the operation that ends it"


def find_gaps(
    gpus: PerGpu,
    lanes: Sequence[LaneSummary],
    all_steps: FoundSteps,
    measured: Sequence[Step],
    most: int,
    lines: PythonLines | None,
    *,
    is_python: bool,
) -> Gaps:
    """Count all gaps of some lanes, and list the ``most`` largest with their evidence."""
    steps_of = StepsOf(measured)
    steps = [time_of(steps_of(lane.gpu)) for lane in lanes]
    by_gpu = gpus.each(_gaps_of, lanes, steps, same=(most,))
    longest = [_longest([gaps.anywhere for gaps in by_gpu], most)]
    longest.append(_longest([gaps.in_steps for gaps in by_gpu], most))
    by_lane: dict[int, list[tuple[int, int]]] = {}
    for index, start, end in dict.fromkeys([*longest[0], *longest[1]]):
        by_lane.setdefault(index, []).append((start, end))
    having = [lanes[index] for index in by_lane]
    explained = gpus.each(_explain, having, by_lane.values(), same=(gpus.has_calls,))
    rows: dict[tuple[int, int, int], Gap] = {}
    for (index, mine), lane, answers in zip(by_lane.items(), having, explained, strict=True):
        gpu, windows = lane.gpu, all_steps.by_rank.get(lane.gpu.rank)
        for (start, end), known in zip(mine, answers, strict=True):
            evidence = known.evidence
            if lines is not None and known.feeder is not None:
                evidence += line_of(lines, known.feeder, start, end)
            at = None if windows is None else windows.at((start + end) // 2)
            gap = Gap(gpu.gpu, gpu.rank, at, start, end, known.cause, evidence, known.charges)
            rows[index, start, end] = gap
    anywhere, in_steps = (tuple(rows[gap] for gap in some) for some in longest)
    by_cause = {cause: sum(gaps.by_cause[cause] for gaps in by_gpu) for cause in IDLE_CAUSES}
    total, count = sum(gaps.total for gaps in by_gpu), sum(gaps.count for gaps in by_gpu)
    listed = in_steps or anywhere
    texts = [gap.evidence for gap in listed]
    outside = any(re.search(_OUTSIDE, text) for text in texts)
    could_name = is_python and lines is None and outside
    return Gaps(count, total, by_cause, anywhere, in_steps, _NAME_LINES if could_name else "")


_Edges = tuple[Times, Times]


class _GpuGaps(Struct, frozen=True, dict=True):
    """Gaps of one GPU."""

    count: int
    total: int
    by_cause: dict[str, int]
    anywhere: _Edges
    """The longest, longest first."""
    in_steps: _Edges
    """The longest whose middle lies in a measured step."""


def _gaps_of(view: GpuShardView, steps: Intervals, most: int) -> _GpuGaps:
    lane, gaps = view.lane, view.lane.timeline.gaps
    keep = steps.contains((gaps.start + gaps.end) // 2)
    return _GpuGaps(
        len(gaps),
        gaps.total,
        {cause: int(lane.causes.of[cause].clip(*lane.window).total) for cause in IDLE_CAUSES},
        _longest_of(gaps, most),
        _longest_of(Intervals(gaps.start[keep], gaps.end[keep]), most),
    )


def _longest_of(gaps: Intervals, most: int) -> _Edges:
    start, end, lengths = gaps.start, gaps.end, gaps.lengths
    if 0 < most < len(lengths) // _GAPS_AT_ONCE:
        # So many stretches have a gap of at least this length, so that no shorter one is listed.
        longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), _GAPS_AT_ONCE))
        keep = lengths >= np.partition(longest, len(longest) - most)[len(longest) - most]
        start, end = start[keep], end[keep]
    order = np.lexsort((start, start - end))[:most]
    return start[order], end[order]


def _longest(of_each: Sequence[_Edges], most: int) -> list[tuple[int, int, int]]:
    """Return GPU, start and end of the longest gaps over all GPUs; of equal ones the earliest."""
    keys = [
        (s - e, s, index, e)
        for index, (start, end) in enumerate(of_each)
        for s, e in zip(start.tolist(), end.tolist(), strict=True)
    ]
    return [(index, start, end) for _, start, index, end in sorted(keys)[:most]]


class _Explained(Struct, frozen=True, dict=True):
    """Gap as the rows of its host explain it."""

    cause: str
    evidence: str
    feeder: tuple[int, int] | None
    """Process and thread that ended it; None if unknown."""
    charges: dict[str, int]


def _explain(
    view: GpuShardView, gaps: Sequence[tuple[int, int]], has_calls: bool
) -> list[_Explained]:
    """Explain some gaps of a GPU by the rows of its host, each process's ranges read once."""
    lane, calls = view.lane, view.calls
    edges = [edge for gap in gaps for edge in gap]
    around = Window(min(edges), max(edges))
    read: dict[tuple[int, Kind], Events] = {}
    causes = lane.causes.within(edges[::2], edges[1::2]).argmax(1).tolist()
    charges = charges_within(view, edges[::2], edges[1::2])
    explained = []
    for (start, end), cause, charged in zip(gaps, causes, charges, strict=True):
        feeder = lane.causes.feeder_of(end)
        pair = calls.threads[feeder] if calls is not None and feeder != NOBODY else None
        evidence = NO_ISSUER if has_calls else ""
        waited = lane.loader.clip(start, end).total
        if calls is not None and pair is not None:
            os_calls, ranges = (pair[0], Kind.OS_RUNTIME), (pair[0], Kind.RANGE)
            for key in {os_calls, ranges} - read.keys():
                read[key] = read_host(view.trace, *key, around)
            evidence = evidence_of(view.trace, calls, read[os_calls], feeder, start, end, waited)
            evidence += range_of(view.trace, read[ranges], pair, start, end)
        if lane.with_calls is not None and not lane.with_calls.clip(start, end).total:
            evidence = "CUDA calls were not recorded at that time"
        evidence = f"{in_loader(waited, start, end)}{evidence}"
        if pair is not None:
            state = view.once(read_host_state)
            evidence = ", ".join([evidence, *state.during(pair, start, end)])
        explained.append(_Explained(IDLE_CAUSES[cause], evidence, pair, charged))
    return explained


def in_loader(waited: int, start: int, end: int) -> str:
    """Return how long the program waited for its loader in a gap, if it did, with a comma."""
    if waited < _NAMED_CALL_PART * (end - start):
        return ""
    length = format_ns(waited)
    every = "for all " if length == format_ns(end - start) else ""
    return f"in the data loader {every}{length}, "


def evidence_of(
    trace: Trace,
    calls: CudaApiCalls,
    os_calls: Events,
    feeder: int,
    start: int,
    end: int,
    waited: int,
) -> str:
    """Return what the feeding thread did in a gap: in no CUDA call, or in which; or what the
    operating system did for it. ``waited`` is the time in the loader, said before it.
    """
    rows = calls.overlapping(feeder, start, end)
    ids, begins, ends = (column[rows].tolist() for column in (calls.name, calls.start, calls.end))
    text = trace.names(set(ids))
    spent: dict[str, int] = {}
    for id, began, ended in zip(ids, begins, ends, strict=True):
        name = text[id].partition("_v")[0]
        spent[name] = spent.get(name, 0) + min(ended, end) - max(began, start)
    worth = _NAMED_CALL_PART * (end - start)
    named = sorted((name for name in spent if spent[name] >= worth), key=lambda n: -spent[n])
    parts = [f"{name} {format_ns(spent[name])}" for name in named[:_CALLS_NAMED]]
    inside_calls = union(calls.start[rows], calls.end[rows]).clip(start, end)
    outside = inside_calls.complement(start, end)
    process, number = calls.threads[feeder]
    # Ids past 31 bits are negative in their column.
    thread = f"thread {number & 0xFFFFFFFF}"
    name, took = longest_os_call(trace, os_calls, (process, number), outside)
    if 2 * took > outside.total:
        return ", ".join([f"{thread} {describe_os_call(name, took)}", *parts])
    is_known = calls.all_recorded(process, np.array([start]), np.array([end]))[0]
    if outside.total >= worth and is_known:
        maker = "HIP" if are_of_hip(trace, calls.name[:1]) else "CUDA"
        are_same = min(waited, outside.total) >= (1 - _NAMED_CALL_PART) * (end - start)
        no_call = f"no {maker} call {format_ns(outside.total)}"
        parts.insert(0, f"without a {maker} call" if are_same else no_call)
    return f"{', '.join(parts)} ({thread})"


def range_of(trace: Trace, ranges: Events, feeder: tuple[int, int], start: int, end: int) -> str:
    """Return the innermost range that the feeding thread was in for most of a gap."""
    inside = np.minimum(ranges.end, end) - np.maximum(ranges.start, start)
    mine = (ranges.process == feeder[0]) & (ranges.thread == feeder[1])
    rows = np.flatnonzero(mine & (2 * inside > end - start))
    if not len(rows):
        return ""
    name = int(ranges.name[rows[np.argmin((ranges.end - ranges.start)[rows])]])
    return f", in the range {clean(trace.names([name])[name], _LONGEST_RANGE)}"


def line_of(lines: PythonLines, feeder: tuple[int, int], start: int, end: int) -> str:
    """Return the line of the user's program with most samples of the gap, preferring the
    thread's.
    """
    thread = lines.teller(feeder)
    if thread is None:
        return ""
    place = lines.place({thread: lines.within(thread, union([start], [end]))})
    if place is None:
        return ""
    who = "" if thread == feeder else f"thread {thread[1]} "
    return f", {who}at {place.line} ({place.count} of {place.samples} samples)"
