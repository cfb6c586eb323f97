"""Time between steps that the host shows: validation, and what else lies between epochs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np
from msgspec.structs import replace

from gputrace.analyzers.grouping import median
from gputrace.analyzers.steps.windows import Interlude, StepWindows
from gputrace.model.events import Kind, Mask, distinct_ids
from gputrace.model.host import CHECKPOINT
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace

_APART_PART: Final = 0.5
"""Part of a usual step that what a program does before one lasts at least to be no part of it."""


class Between(Struct, frozen=True, dict=True):
    """Calls of a process that trains, between which its steps are parted, in host time.

    Attributes:
        waits: when the thread that trains waits for batches, of any loader.
        passes: when it passes batches forward.
        starts: when the process starts a loader's workers.
        saves: when it saves checkpoints.
    """

    waits: Intervals
    passes: Intervals
    starts: Intervals
    saves: Intervals

    def begins(self, start: Times, end: Times) -> Times:
        """Return when the steps from mark to mark begin that follow something else; the others
        begin where they did.

        A step that waits for batches more often than most follows the end of an epoch, or a
        validation. It begins with the start of its loader, or its own first wait. If no step waits,
        passes tell.
        """
        begins = start.copy()
        if not len(start):
            return begins
        for calls in (self.waits, self.passes):
            first, last = np.searchsorted(calls.start, start), np.searchsorted(calls.start, end)
            usual = int(median(last - first))
            if usual and 2 * np.count_nonzero(last - first == usual) > len(start):
                more = np.flatnonzero(last - first > usual)
                begins[more] = calls.start[last[more] - usual]
                break
        for step in np.flatnonzero(begins > start).tolist():
            since = _within(self.passes, int(start[step]), int(begins[step])).end.max(initial=0)
            loads = _within(self.starts, max(int(start[step]), int(since)), int(begins[step]))
            begins[step] = loads.start.min(initial=begins[step])
        return np.where(begins - start > _APART_PART * median(end - start), begins, start)

    def interludes(self, step: int, start: int, end: int) -> Iterator[Interlude]:
        """Yield what lies between the end of a step and the begin of the next."""
        passes, until = _within(self.passes, start, end), start
        if len(passes):
            # A loader is asked once more, and says that it has no more.
            waits = _within(self.waits, start, end)
            until = min(end, max(int(passes.end[-1]), int(waits.end[-1]) if len(waits) else start))
            evidence = f"forward passes ({len(passes)}) and no optimizer"
            yield Interlude("validation", start, until, step, evidence)
        if end > until:
            phase, evidence = "between", "neither a pass nor a wait for a batch"
            if 2 * self.saves.clip(until, end).total > end - until:
                phase, evidence = "checkpoint", "the host saves it"
            yield Interlude(phase, until, end, step, evidence)


def _within(calls: Intervals, start: int, end: int) -> Intervals:
    """Return the calls that begin in some time."""
    return calls.select(slice(*np.searchsorted(calls.start, [start, end])))


def read_between(trace: Trace, process: int, threads: Collection[int]) -> Between:
    """Read what the threads of a process that mark steps do."""
    kinds = [k for k in (Kind.DATA_WAIT, Kind.PHASE, Kind.LOADER) if k in trace.kinds]
    events = trace.events(kinds, ("start", "end", "kind", "name", "process", "thread"))
    events = events.select(events.process == process)
    text = trace.names(distinct_ids(events.name))
    mine = np.isin(events.thread, [*threads])

    def called(rows: Mask, *names: str) -> Intervals:
        rows = rows & np.isin(events.name, [id for id, name in text.items() if name in names])
        return union(events.start[rows], events.end[rows])

    return Between(
        called(mine & (events.kind == Kind.DATA_WAIT), *text.values()),
        called(mine & (events.kind == Kind.PHASE), "model", "forward"),
        called(events.kind == Kind.LOADER, "start workers"),
        called(mine & (events.kind == Kind.PHASE), CHECKPOINT),
    )


def part_by_host(between: Between, marks: tuple[Times, Times], windows: StepWindows) -> StepWindows:
    """Return windows in a GPU's time without what the host does before them: given the marks of the
    steps, in host time.
    """
    known = between.begins(*marks)
    begins = np.clip(known, windows.start, windows.busy_from)
    moved = (known > marks[0]) & (begins - windows.start > _APART_PART * median(windows.lengths))
    begins = np.where(moved, begins, windows.start)
    interludes = [
        interlude
        for step in np.flatnonzero(moved[1:]).tolist()
        for interlude in between.interludes(
            step, int(windows.start[step + 1]), int(begins[step + 1])
        )
    ]
    both = sorted((*windows.interludes, *interludes), key=lambda interlude: interlude.start)
    return replace(windows, start=begins, interludes=tuple(both))
