"""Breakdown: classes and causes of each step, rank and GPU, and over the steady steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.execution import GpuShardView, PerGpu
from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.lanes import AnyLaneSummary, Place
from gputrace.analyzers.steps import FoundSteps, find_blocked_steps
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.model.events import UNKNOWN
from gputrace.model.intervals import Times
from gputrace.model.results import Breakdown, Step, Steps
from gputrace.model.time_class import CLASSES
from gputrace.model.trace import Window


def list_steps(
    gpus: PerGpu, lanes: Sequence[AnyLaneSummary], found: FoundSteps, window: Window | None
) -> tuple[Step, ...]:
    """Every step on every GPU of its rank; with a window, those that lie inside it."""
    waits = {
        (held.rank, held.step): held.interlude.phase for held in find_blocked_steps(found.by_rank)
    }
    having = [lane for lane in lanes if lane.gpu.rank in found.by_rank]
    windows = [found.by_rank[lane.gpu.rank] for lane in having]
    tables = gpus.each(_table, having, (w.start for w in windows), (w.end for w in windows))
    return tuple(
        step
        for lane, own, table in zip(having, windows, tables, strict=True)
        for step in _steps_of(lane.gpu, own, table, found.warmup, window, waits)
    )


@dataclass(frozen=True)
class _Table:
    """Shares, causes and waits of the windows of one lane."""

    classes: NDArray[np.int64]
    """Nanoseconds by class, as `Lane.split` gives them."""
    host_data: Times | None
    waited: Times


def _table(one: GpuShardView, starts: Times, ends: Times) -> _Table:
    lane = one.any_lane
    in_loader = None if lane.host_data is None else lane.host_data.within(starts, ends)
    return _Table(lane.split(starts, ends), in_loader, lane.waited(starts, ends))


def _steps_of(
    gpu: Place,
    windows: StepWindows,
    table: _Table,
    warmup: int,
    window: Window | None,
    held: Mapping[tuple[int, int], str],
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
                phase="warmup" if number < warmup else held.get((gpu.rank, number), "steady"),
                communication_wait_ns=_known(waited[number]),
                host_data_ns=host_data[number],
                **_named(row),
            )


def _known(nanoseconds: int) -> int | None:
    return None if nanoseconds == UNKNOWN else nanoseconds


def _named(row: Sequence[int]) -> dict[str, int | None]:
    """The classes by the names of results; None each where none is known."""
    known = dict(zip(CLASSES, row, strict=bool(row)))
    return {f"{name}_ns": known.get(name) for name in CLASSES}


def measured(steps: Sequence[Step], found: FoundSteps) -> tuple[Step, ...]:
    """The steps that the breakdown is over: those a person chose, else the steady ones.

    Iterations that are not shown to be training are measured only where a person chose some.
    """
    if found.chosen is None:
        return steady(steps) if found.kind == "training" else ()
    first, end = found.chosen
    return tuple(step for step in steps if first <= step.step < end)


def steady(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps after warm-up, but for those in which a rank waits for others that validate."""
    return tuple(step for step in steps if step.phase == "steady")


def break_down(
    gpus: PerGpu, lanes: Sequence[AnyLaneSummary], steps: Sequence[Step]
) -> tuple[Breakdown, ...]:
    """Each GPU over the measured steps, or over its whole span where it has none."""
    steps_of = StepsOf(steps)
    own = [steps_of(lane.gpu) for lane in lanes]
    parts = [_part(lane, mine) for lane, mine in zip(lanes, own, strict=True)]
    tables = gpus.each(_table, lanes, *zip(*parts, strict=True)) if parts else []
    rows = zip(lanes, own, parts, tables, strict=True)
    return tuple(_row(lane.gpu, len(mine), part, table) for lane, mine, part, table in rows)


def _part(lane: AnyLaneSummary, own: Sequence[Step]) -> tuple[Times, Times]:
    """Starts and ends of the steps; else of a lane's span, or the parts of it that have calls."""
    if own:
        return np.array([step.start_ns for step in own]), np.array([step.end_ns for step in own])
    if lane.with_calls is not None and lane.with_calls.total:
        return lane.with_calls.start, lane.with_calls.end
    return np.array([lane.window.start]), np.array([lane.window.end])


def _row(gpu: Place, steps: int, part: tuple[Times, Times], table: _Table) -> Breakdown:
    totals = table.classes.sum(axis=0).tolist()
    waited = table.waited
    return Breakdown(
        gpu=gpu.gpu,
        gpu_known=gpu.gpu_known,
        device=gpu.device,
        rank=gpu.rank,
        steps=steps,
        total_ns=sum(totals) if totals else int((part[1] - part[0]).sum()),
        communication_wait_ns=None if (waited == UNKNOWN).any() else int(waited.sum()),
        host_data_ns=None if table.host_data is None else int(table.host_data.sum()),
        **_named(totals),
    )


def summarize(found: FoundSteps, steps: Sequence[Step]) -> Steps:
    """Summarize the detected steps, with the times of the measured steps."""
    if not found.by_rank:
        return Steps("none", "none", 0.0, 0, 0, 0, None, None, None, found.reason)
    best = max(found.by_rank.values(), key=len)
    per_rank = {(step.rank, step.step): step.end_ns - step.start_ns for step in steps}
    lengths = np.array(list(per_rank.values()), np.int64)
    known = len(lengths) > 0
    return Steps(
        source=best.source,
        kind=best.kind,
        confidence=min(windows.confidence for windows in found.by_rank.values()),
        count=len(best),
        warmup_count=found.warmup,
        steady_count=len({number for _, number in per_rank}),
        mean_ns=round(float(lengths.mean())) if known else None,
        p50_ns=round(float(np.percentile(lengths, 50))) if known else None,
        p95_ns=round(float(np.percentile(lengths, 95))) if known else None,
        reason=best.reason,
    )
