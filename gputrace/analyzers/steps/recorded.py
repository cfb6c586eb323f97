"""Steps of a recording in windows: those of which all was recorded, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from gputrace.analyzers.intervals import Intervals
from gputrace.analyzers.operations import GpuSummary
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.traces.events import Mask
from gputrace.traces.trace import FROM_THE_START


def within(windows: StepWindows, recorded: Intervals) -> StepWindows:
    """The steps that lie in one recorded stretch each, with the gap before their first operation.

    Of the first step of a stretch that gap is not known, but for the very first one's.
    """
    if len(recorded) < 2:
        return windows
    place = np.maximum(np.searchsorted(recorded.start, windows.busy_from, "right") - 1, 0)
    whole = (windows.start >= recorded.start[place]) & (windows.end <= recorded.end[place])
    return _select(windows, whole, recorded)


def _select(windows: StepWindows, kept: Mask, recorded: Intervals) -> StepWindows:
    """Some of the steps, and what lies between two of them that follow each other."""
    place = np.cumsum(kept) - 1
    interludes = tuple(
        replace(interlude, after=int(place[interlude.after]))
        for interlude in windows.interludes
        if kept[interlude.after : interlude.after + 2].all()
        and not recorded.complement(interlude.start, interlude.end).total
    )
    return replace(
        windows,
        start=windows.start[kept],
        end=windows.end[kept],
        busy_from=windows.busy_from[kept],
        numbers=None if windows.numbers is None else windows.numbers[kept],
        interludes=interludes,
    )


def same_steps(
    by_rank: Mapping[int, StepWindows], gpus: Sequence[GpuSummary]
) -> dict[int, StepWindows]:
    """The steps that every rank has, where ranks were not recorded from their first step on.

    Windows begin on each rank when it is there, so that one may have a step more; steps that
    nobody numbered are left as they are.
    """
    numbers = {r: own.numbers for r, own in by_rank.items() if own.numbers is not None}
    if not any(map(_is_cut, gpus)) or len(numbers) < max(len(by_rank), 2):
        return dict(by_rank)
    common = reduce(np.intersect1d, numbers.values())
    if not len(common):
        return dict(by_rank)
    stretch = {gpu.gpu.rank: gpu.recorded for gpu in reversed(gpus)}
    return {
        rank: _select(windows, np.isin(numbers[rank], common), stretch[rank])
        for rank, windows in by_rank.items()
    }


def _is_cut(gpu: GpuSummary) -> bool:
    """Whether the GPU did something that was not recorded, or steps may not have been found."""
    windows = gpu.windows
    return (
        gpu.calls_recorded is not None
        or len(windows) > 1
        or any(window.start > FROM_THE_START // 2 for window in windows)
    )


def told(windows: StepWindows, recorded: Intervals) -> str:
    """How the steps lie in the recorded windows, for a person; nothing where there is but one."""
    if len(recorded) < 2 or not len(windows):
        return ""
    place = np.searchsorted(recorded.start, windows.start, "right")
    _, counts = np.unique(place, return_counts=True)
    least, most = int(counts.min()), int(counts.max())
    steps = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"recorded in {len(counts):,} windows of {steps} steps; what lies between is not known"
