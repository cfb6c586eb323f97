"""What the host's signals alone tell: steps as they were marked, and the program's waits for data.

For traces that hold no GPU activity. A step goes from one mark to the next in host time; what a GPU
did in it is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.causes import read_evidence
from gputrace.analyzers.intervals import Intervals, Times
from gputrace.analyzers.lanes import Place
from gputrace.analyzers.steps import FoundSteps, StepWindows
from gputrace.analyzers.steps.warmup import count_warmup
from gputrace.errors import InputError
from gputrace.traces.events import UNKNOWN, Kind
from gputrace.traces.trace import Trace, Window


@dataclass(frozen=True, slots=True)
class Unseen:
    """The GPU of a rank of which no GPU was seen."""

    rank: int
    gpu: None = None
    gpu_known: bool = False
    device: None = None


@dataclass(frozen=True)
class HostLane:
    """One rank, with what its host threads tell of its time."""

    gpu: Place
    window: Window
    """From the first start to the last end of its steps and waits, or the part asked for."""
    host_data: Intervals | None
    """When the thread that trains waited for data; None where no wait of it was recorded."""
    with_calls: None = None

    def split(self, starts: Times, _ends: Times) -> NDArray[np.int64]:
        """No class of a GPU's time is known: no columns."""
        return np.empty((len(starts), 0), np.int64)

    def idle(self, _start: int, _end: int) -> None:
        """Whether a GPU ran nothing is not known."""

    def waited(self, starts: Times, _ends: Times) -> NDArray[np.int64]:
        """Nor is whether it waited for other ranks."""
        return np.full(len(starts), UNKNOWN)


@dataclass(frozen=True)
class _Marked:
    """The steps of one process, in order and disjoint, and the threads that marked them."""

    start: Times
    end: Times
    threads: frozenset[int]
    name: str


_Waits = Mapping[tuple[int, int], Intervals]
"""By process and thread."""


def find_host_lanes(
    trace: Trace, window: Window | None, chosen: tuple[int, int] | None = None
) -> tuple[list[HostLane], FoundSteps]:
    """A lane for every rank that has anything in the window, and everyone's steps.

    Where some process marks steps, only those that do are ranks; else those that wait for data.
    Raises InputError where there is neither.
    """
    waits = {thread: found for thread, found in read_evidence(trace).data.items() if len(found)}
    marked = _read_marked(trace, waits)
    work = {process: len(steps.start) for process, steps in marked.items()}
    ranks, known = _ranks(trace, work or {process: 0 for process, _ in waits})
    lanes, found = [], {}
    for rank, process in sorted(ranks.items()):
        steps = marked.get(process)
        own = _waits_of(process, waits, steps.threads if steps else None)
        span = _span(steps, own, window)
        if span.start < span.end:
            lanes.append(HostLane(Unseen(rank), span, own))
        if steps is not None:
            found[rank] = _windows(rank, steps, known or len(ranks) == 1)
    if not lanes and window is None:
        raise InputError(trace.path, _nothing_told(trace))
    warmup = max((count_warmup(w.lengths) for w in found.values()), default=0)
    return lanes, FoundSteps(found, warmup, chosen, "no step was marked")


def _nothing_told(trace: Trace) -> str:
    assert trace.no_gpu is not None
    why, remedy = trace.no_gpu
    return f"no GPU activity ({why}), and neither steps nor waits for data; {remedy}"


def _read_marked(trace: Trace, waits: _Waits) -> dict[int, _Marked]:
    """By process, its steps; those that a broken file makes begin within another are left out."""
    events = trace.events([Kind.STEP], ("start", "end", "name", "process", "thread"))
    found = {}
    for process in np.unique(events.process).tolist():
        rows = np.flatnonzero(events.process == process)
        rows = rows[np.argsort(events.start[rows], kind="stable")]
        before = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, events.end[rows][:-1]))
        own = events.select(rows[events.start[rows] >= before])
        threads = frozenset(own.thread.tolist())
        start = _with_known_start(own.start, own.end, _waits_of(process, waits, threads))
        if len(start):
            name = int(own.name[0])
            end = own.end[-len(start) :]
            found[process] = _Marked(start, end, threads, trace.names([name])[name])
    return found


def _with_known_start(start: Times, end: Times, waits: Intervals | None) -> Times:
    """The starts of steps, of which the first begins with its first wait for data.

    Nothing marks it: without a wait its length is not known, and it is left out.
    """
    if waits is None or waits.start[0] >= end[0]:
        return start[1:]
    return np.append(np.minimum(start[:1], waits.start[0]), start[1:])


def _ranks(trace: Trace, work: Mapping[int, int]) -> tuple[dict[int, int], bool]:
    """The process of each rank, and whether ranks were recorded; else by machine and process id.

    Of several processes of a rank, as loaders' workers are, the one with most steps.
    """
    recorded = {process: trace.processes[process].rank for process in work}
    if UNKNOWN not in recorded.values():
        ordered = sorted(work, key=lambda process: work[process])
        return {recorded[process]: process for process in ordered}, True

    def place(process: int) -> tuple[int, int]:
        return trace.processes[process].host, trace.processes[process].pid

    return dict(enumerate(sorted(work, key=place))), False


def _waits_of(process: int, waits: _Waits, threads: Collection[int] | None) -> Intervals | None:
    """The waits of the threads that mark the steps, or of all; of several, the one that waits most.

    What another thread waits for, the training does not wait for.
    """
    own = (
        found
        for (of, thread), found in waits.items()
        if of == process and (threads is None or thread in threads)
    )
    return max(own, key=lambda found: found.total, default=None)


def _span(steps: _Marked | None, waits: Intervals | None, window: Window | None) -> Window:
    known = [some for some in (steps, waits) if some is not None]
    span = Window(min(int(s.start[0]) for s in known), max(int(s.end[-1]) for s in known))
    if window is None:
        return span
    return Window(max(span.start, window.start), min(span.end, window.end))


def _windows(rank: int, steps: _Marked, rank_known: bool) -> StepWindows:
    unknown = "" if rank_known else " (ranks were not recorded: processes in order of their ids)"
    return StepWindows(
        rank=rank,
        start=steps.start,
        end=steps.end,
        busy_from=steps.start,
        source="markers",
        kind="training",
        confidence=1.0,
        reason=f"from mark to mark of {steps.name!r}, in host time{unknown}",
    )
