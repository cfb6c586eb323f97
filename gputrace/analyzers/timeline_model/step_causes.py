"""Explain one step: which causes have more of it than of the median step, on each GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Final

import numpy as np

from gputrace.analyzers.gpu_shards import Shard
from gputrace.analyzers.lanes import ranks_of
from gputrace.analyzers.ledger.causes import DEFAULTS
from gputrace.analyzers.python_samples import PythonLines, read_python_lines
from gputrace.analyzers.timeline_model import Scene, SceneLane
from gputrace.analyzers.timeline_model.gaps import describe_gap, operation_name
from gputrace.errors import UsageError
from gputrace.model.events import UNKNOWN, Kind
from gputrace.model.intervals import union
from gputrace.model.results import Analysis, Gap, Step
from gputrace.model.step import StepExplanation, StepKernel, StepOnGpu, StepPart
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.model.trace import Trace
from gputrace.units import format_change, format_ns

_SCHEMA_VERSION: Final = 1
_MOST_KERNELS: Final = 10
_LEAST_SHARE: Final = 0.01
"""Share of the median step by which a kernel must differ to be listed, and a step to be longer."""
_NAMED_SHARE: Final = 0.2
"""Share of the growth from which a cause is named."""
_WAITING: Final = DEFAULTS["communication"]
_UNEXPLAINED: Final = DEFAULTS["other_idle"]


def explain_step(scene: Scene, number: int | str, trace: Trace | None = None) -> StepExplanation:
    """Compare a step with the median step on every GPU that has it.

    ``slowest`` is the longest measured one. With the trace, the longest gaps have their evidence,
    and samples name lines. Raises UsageError where no such step was found, or no other one was
    measured.
    """
    analysis = scene.analysis
    assert analysis is not None
    lines = None if trace is None else read_python_lines(Shard(trace))
    steps = analysis.step_list
    if isinstance(number, str):
        steady = [step for step in steps if step.phase == "steady"]
        number = max(steady, key=_length).step if steady else 0
    here = [step for step in steps if step.step == number]
    rows = []
    for index, lane in enumerate(scene.lanes):
        mine = [step for step in steps if (step.gpu, step.rank) == (lane.gpu, lane.rank)]
        step = next((each for each in mine if each.step == number), None)
        others = [each for each in mine if each.phase == "steady" and each.step != number]
        if step is not None and others:
            usual = sorted(others, key=_length)[(len(others) - 1) // 2]
            rows.append(_on_gpu(scene, analysis, index, step, usual, trace, lines))
    if not rows:
        count = max((step.step for step in steps), default=-1)
        have = f"it has steps 0 to {count}" if count >= 0 else "no steps were found in it"
        if here:
            have = "it has no other measured step to compare it with"
        raise UsageError(f"{scene.title}: step {number} cannot be explained; {have}")
    rows.sort(key=_own_growth, reverse=True)
    message = _message(analysis, number, rows[0])
    return StepExplanation(
        _SCHEMA_VERSION, analysis.path, number, here[0].phase, message, tuple(rows)
    )


def _length(step: Step) -> int:
    return step.end_ns - step.start_ns


def _own_growth(row: StepOnGpu) -> int:
    """Return by how much a step grew by something else than waiting for others."""
    return row.more_ns - sum(part.more_ns for part in row.parts if part.cause == _WAITING)


def _on_gpu(
    scene: Scene,
    analysis: Analysis,
    index: int,
    step: Step,
    usual: Step,
    trace: Trace | None,
    lines: PythonLines | None,
) -> StepOnGpu:
    lane = scene.lanes[index]
    spent, before = (_by_cause(lane, each) for each in (step, usual))
    names = dict.fromkeys([*spent, *before])
    times = ((name, spent.get(name, 0), before.get(name, 0)) for name in names)
    parts = [StepPart(name, _label(analysis, name), ns, was, ns - was) for name, ns, was in times]
    parts.sort(key=lambda part: (-part.more_ns, -part.ns))
    gap = _longest_gap(scene, index, step, trace)
    line = None
    if lines is not None and trace is not None:
        window = (gap.start_ns, gap.end_ns) if gap else (step.start_ns, step.end_ns)
        line = _line(trace, lines, lane, *window)
    return StepOnGpu(
        lane.gpu, lane.rank, step.start_ns, step.end_ns, usual.step, _length(usual),
        _length(step) - _length(usual), tuple(parts), gap, line,
        tuple(islice(_kernels(scene, lane, step, usual), _MOST_KERNELS)),
    )  # fmt: skip


def _by_cause(lane: SceneLane, step: Step) -> dict[str, int]:
    """Return the nanoseconds of a step by cause; they sum to its length."""
    edges = (step.start_ns, step.end_ns)
    layers = lane.layers.split(edges)[0].tolist()
    spent = dict(zip(lane.layers.classes, layers, strict=True))
    if lane.gpu is None:
        return {cause: ns for cause, ns in spent.items() if ns}
    lost = dict(zip(lane.lost.classes, lane.lost.split(edges)[0].tolist(), strict=True))
    spent = {"compute": spent["compute"], **lost}
    # A step may reach beyond the first and the last operation of a GPU.
    rest = _length(step) - sum(spent.values())
    spent[_UNEXPLAINED] = spent.get(_UNEXPLAINED, 0) + rest
    return {cause: ns for cause, ns in spent.items() if ns or cause == "compute"}


def _label(analysis: Analysis, cause: str) -> str:
    words = {"compute": "compute", "host_data": "waiting for data", "host_rest": "other host time"}
    return words.get(cause) or analysis.cause_label(cause)


def _longest_gap(scene: Scene, index: int, step: Step, trace: Trace | None) -> Gap | None:
    """Return the longest gap whose middle lies in a step of a lane; the trace has its evidence."""
    table, (first, last) = scene.gaps, scene.gaps.of_lane(index)
    rows = np.flatnonzero(table.step[first:last] == step.step) + first
    if not len(rows):
        return None
    row = int(rows[np.argmax(table.length[rows])])
    if trace is not None:
        return describe_gap(trace, scene, row).gap
    cause = IDLE_CAUSES[int(table.cause[row])]
    times = int(table.start[row]), int(table.end[row])
    return Gap(scene.lanes[index].gpu or 0, step.rank, step.step, *times, cause, "")


def _line(trace: Trace, lines: PythonLines, lane: SceneLane, start: int, end: int) -> str | None:
    """Return the line with most samples of a rank's thread in some time, and how many it has."""
    work = {process: len(lines.times[thread]) for process, thread in lines.stand_ins.items()}
    processes = ranks_of(trace, work)[0]
    thread = lines.stand_ins.get(processes.get(lane.rank, UNKNOWN))
    place = None
    if thread is not None:
        place = lines.place({thread: lines.within(thread, union([start], [end]))})
    return None if place is None else f"{place.line} ({place.count} of {place.samples} samples)"


def _kernels(scene: Scene, lane: SceneLane, step: Step, usual: Step) -> Iterator[StepKernel]:
    """Yield the kernels that differ most between two steps of a GPU."""
    if (operations := lane.operations) is None:
        return
    ids = operations.events.name
    is_kernel = operations.events.kind == Kind.KERNEL
    found: list[Counter[int]] = []
    for each in (step, usual):
        first, last = np.searchsorted(operations.start, (each.start_ns, each.end_ns))
        rows = np.flatnonzero(is_kernel[first:last]) + first
        lengths = operations.end[rows] - operations.start[rows]
        count, total = Counter[int](), Counter[int]()
        for id, ns in zip(ids[rows].tolist(), lengths.tolist(), strict=True):
            count[id] += 1
            total[id] += ns
        found += [count, total]
    launches, ns, before, usual_ns = found
    least = _LEAST_SHARE * _length(usual)
    differ = {id: ns[id] - usual_ns[id] for id in {*ns, *usual_ns}}
    for id, more in sorted(differ.items(), key=lambda item: (-abs(item[1]), item[0])):
        if abs(more) >= least:
            name = operation_name(scene.names, id, Kind.KERNEL)
            yield StepKernel(name, launches[id], before[id], ns[id], usual_ns[id], more)


def _message(analysis: Analysis, number: int, row: StepOnGpu) -> str:
    where = ""
    if len(analysis.gpus) > 1:
        kind = "rank" if row.gpu is None else "gpu"
        where = f" on {kind} {row.rank if row.gpu is None else row.gpu}"
    took = f"step {number} took {format_ns(row.end_ns - row.start_ns)}{where}"
    if row.more_ns < _LEAST_SHARE * row.usual_ns:
        return (
            f"{took}, no longer than the median step ({row.usual_step}, {format_ns(row.usual_ns)})"
        )
    grown = [part for part in row.parts if part.more_ns >= _NAMED_SHARE * row.more_ns]
    why = ", ".join(f"{part.label} {format_change(part.more_ns)}" for part in grown[:2])
    at = f", at {row.line.partition(' (')[0]}" if row.line else ""
    return (
        f"{took}, {format_ns(row.more_ns)} longer than the median step ({row.usual_step})"
        f"{why and ': '}{why}{at}"
    )
