"""The breakdown: classes and causes of each step, rank and GPU, and over the steady steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.causes import Causes
from gputrace.analyzers.collectives.waiting import Waiting
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.intervals import Intervals, Times, union
from gputrace.analyzers.partition import Timeline
from gputrace.analyzers.results import CLASSES, IDLE_CAUSES, Breakdown, Step, Steps
from gputrace.analyzers.steps import FoundSteps, held_up
from gputrace.traces.events import UNKNOWN
from gputrace.traces.trace import Window


class Place(Protocol):
    """What a row of results is about: a GPU, or a rank of which no GPU was seen (None)."""

    @property
    def gpu(self) -> int | None: ...
    @property
    def gpu_known(self) -> bool: ...
    @property
    def device(self) -> int | None: ...
    @property
    def rank(self) -> int: ...


class AnyLane(Protocol):
    """One place, with what is known about its time."""

    @property
    def gpu(self) -> Place: ...
    @property
    def window(self) -> Window: ...
    @property
    def host_data(self) -> Intervals | None: ...
    @property
    def with_calls(self) -> Intervals | None:
        """The parts of the window with all CUDA calls; None where that is all of it."""

    def split(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Shape (windows, len(CLASSES)); (windows, 0) where no class is known."""

    def idle(self, start: int, end: int) -> int | None: ...

    def waited(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Of each window, the communication spent waiting for other ranks; `UNKNOWN` if unknown."""


@dataclass(frozen=True)
class Lane:
    """One GPU with everything that has been found about its time."""

    timeline: Timeline
    causes: Causes
    host_data: Intervals | None
    """When its feeding threads were in the data loader; None where that is not known."""
    waiting: Waiting | None = None
    """When its communication waits for other ranks; None where collectives were not matched."""
    data: Mapping[tuple[int, int], Intervals] = field(default_factory=dict)
    """When threads of its process, by (process, thread), waited for data: recorded, or proven."""
    with_calls: Intervals | None = None
    """The parts of its window with all CUDA calls; None where that is all of it."""

    @property
    def gpu(self) -> Gpu:
        return self.timeline.gpu

    @property
    def window(self) -> Window:
        """The GPU's span, or the part of it that was asked for."""
        return self.timeline.window

    @property
    def operations(self) -> int:
        """How many kernels, copies and graphs ran."""
        return self.timeline.kernels + self.timeline.copies + self.timeline.opaque_graphs

    def split(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Partition of windows with idle time by cause: shape (windows, len(CLASSES)).

        A step of the rank may begin before this GPU's first operation and end after its last. That
        is no gap, so no cause is known of it.
        """
        shares, causes = self.timeline.split(starts, ends), self.causes.within(starts, ends)
        causes[:, IDLE_CAUSES.index("other_idle")] += shares[:, -1] - causes.sum(axis=1)
        return np.concatenate([shares[:, :-1], causes], axis=1)

    def idle(self, start: int, end: int) -> int:
        """Nanoseconds of a stretch in which the GPU runs nothing."""
        return int(self.timeline.split([start], [end])[0, -1])

    def waited(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Of each window, the communication spent waiting for other ranks; `UNKNOWN` if unknown."""
        if self.waiting is None:
            return np.full(len(starts), UNKNOWN)
        return self.waiting.within(starts, ends)


def list_steps(
    lanes: Sequence[AnyLane], found: FoundSteps, window: Window | None
) -> tuple[Step, ...]:
    """Every step on every GPU of its rank; with a window, those that lie inside it."""
    waits = {(held.rank, held.step): held.interlude.phase for held in held_up(found.by_rank)}
    return tuple(step for lane in lanes for step in _steps_of(lane, found, window, waits))


def _steps_of(
    lane: AnyLane,
    found: FoundSteps,
    window: Window | None,
    held: Mapping[tuple[int, int], str],
) -> Iterator[Step]:
    windows = found.by_rank.get(lane.gpu.rank)
    if windows is None:
        return
    table = lane.split(windows.start, windows.end).tolist()
    in_loader = _host_data(lane, windows.start, windows.end)
    waited = lane.waited(windows.start, windows.end).tolist()
    for number, row in enumerate(table):
        start, end = int(windows.start[number]), int(windows.end[number])
        if window is None or (start >= window.start and end <= window.end):
            yield Step(
                step=number,
                rank=lane.gpu.rank,
                gpu=lane.gpu.gpu,
                start_ns=start,
                end_ns=end,
                phase="warmup"
                if number < found.warmup
                else held.get((lane.gpu.rank, number), "steady"),
                communication_wait_ns=_known(waited[number]),
                host_data_ns=in_loader[number],
                **_named(row),
            )


def _known(nanoseconds: int) -> int | None:
    return None if nanoseconds == UNKNOWN else nanoseconds


def _named(row: Sequence[int]) -> dict[str, int | None]:
    """The classes by the names of results; None each where none is known."""
    known = dict(zip(CLASSES, row, strict=bool(row)))
    return {f"{name}_ns": known.get(name) for name in CLASSES}


def _host_data(lane: AnyLane, starts: Times, ends: Times) -> list[int | None]:
    """Of each window, the host's time in the data loader."""
    if lane.host_data is None:
        return [None] * len(starts)
    waits: list[int | None] = lane.host_data.within(starts, ends).tolist()
    return waits


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


def break_down(lanes: Sequence[AnyLane], steps: Sequence[Step]) -> tuple[Breakdown, ...]:
    """Each GPU over the measured steps, or over its whole span where it has none."""
    steps_of = StepsOf(steps)
    return tuple(_break_down(lane, steps_of(lane.gpu)) for lane in lanes)


def _break_down(lane: AnyLane, own: Sequence[Step]) -> Breakdown:
    gpu, parts = lane.gpu, _whole(lane)
    starts = np.array([step.start_ns for step in own] or parts.start)
    ends = np.array([step.end_ns for step in own] or parts.end)
    totals = lane.split(starts, ends).sum(axis=0).tolist()
    known = sum(totals) if totals else int((ends - starts).sum())
    in_loader = None if lane.host_data is None else int(lane.host_data.within(starts, ends).sum())
    waited = lane.waited(starts, ends)
    return Breakdown(
        gpu=gpu.gpu,
        gpu_known=gpu.gpu_known,
        device=gpu.device,
        rank=gpu.rank,
        steps=len(own),
        total_ns=known,
        communication_wait_ns=None if (waited == UNKNOWN).any() else int(waited.sum()),
        host_data_ns=in_loader,
        **_named(totals),
    )


def _whole(lane: AnyLane) -> Intervals:
    """A lane's span; where calls were recorded in parts of it, these."""
    if lane.with_calls is not None and lane.with_calls.total:
        return lane.with_calls
    return union([lane.window.start], [lane.window.end])


def summarize(found: FoundSteps, steps: Sequence[Step]) -> Steps:
    """What was found, in one line, with the times of the measured steps."""
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
