"""Time of the host that feeds one GPU, as evidence for the causes of lost time."""

from __future__ import annotations

from functools import cached_property, reduce
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, Call
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.host_state import HostState, read_host_state
from gputrace.analyzers.idle_causes import calls_held_by_copies
from gputrace.analyzers.step_phases import PhaseTimes
from gputrace.model.events import GPU_KINDS, Kind, distinct_ids, is_among
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, search, union
from gputrace.model.options import Window

PAUSE_NS: Final = 1_000_000
"""Stretch without a CUDA call from which the host does something else than issue work: eager
frameworks spend 5 to 50 µs between two launches, and some hundreds to prepare a fused one."""


class Host:
    """Host threads that feed one GPU, and the time for which it waits.

    Attributes:
        view: rows of the GPU.
        window: time that is accounted for.
        feeds: number of GPUs that its process feeds, whose threads hold each other up.
        steps: starts and ends of the measured steps.
        left: time that is not yet charged, by class.
        repeats: True if what a process does once is before the measured steps.
    """

    def __init__(
        self,
        view: GpuShardView,
        feeds: int = 1,
        steps: tuple[Times, Times] = (EMPTY.start, EMPTY.end),
        left: dict[str, Intervals] | None = None,
        *,
        repeats: bool = True,
    ) -> None:
        self.view, self.feeds, self.steps, self.left = view, feeds, steps, left or {}
        self.repeats = repeats
        self.window: Window = view.lane.window

    @property
    def process(self) -> int:
        return self.view.operations.gpu.process

    @cached_property
    def state(self) -> HostState:
        """Recorded state of the hosts."""
        return self.view.once(read_host_state)

    @property
    def phases(self) -> PhaseTimes | None:
        """Phases of the process's steps; None where none were recorded."""
        return self.state.phases.get(self.process)

    @cached_property
    def issuers(self) -> list[int]:
        """Threads that launch kernels or graphs on the GPU, or copy to and from it."""
        calls, events = self.view.calls, self.view.operations.events
        if calls is None:
            return []
        launched = events.having("kind", "process", "correlation")
        launched = launched.select(is_among(launched.kind, GPU_KINDS))
        issued_by = calls.issued_by(launched)
        threads: list[int] = distinct_ids(calls.thread[issued_by[issued_by != NOBODY]]).tolist()
        return threads

    @cached_property
    def pauses(self) -> Intervals:
        """Stretches of at least `PAUSE_NS` in which none of its threads is in a CUDA call."""
        calls = self.view.calls
        if calls is None or not self.issuers:
            return EMPTY
        inside = reduce(merge_touching, map(calls.of_thread, self.issuers), EMPTY)
        between = inside.complement(*self.window)
        return between.select(between.lengths >= PAUSE_NS)

    @cached_property
    def blocked(self) -> Intervals:
        """Time of its threads in calls that wait for a GPU, copies that block among them."""
        calls = self.view.calls
        if calls is None:
            return EMPTY
        waits = [calls.of_thread(thread, Call.SYNC, Call.COPY) for thread in self.issuers]
        waits += calls_held_by_copies(self.view.operations, calls).values()
        return reduce(merge_touching, waits, EMPTY)

    @property
    def waits_for_data(self) -> Intervals:
        """Time in which one of the threads that issue work waits for data."""
        data, threads = self.view.lane.data, self.view.calls
        issuing = {threads.threads[thread] for thread in self.issuers} if threads else set()
        waits = (time for thread, time in data.items() if thread in issuing or not issuing)
        return reduce(merge_touching, waits, EMPTY)

    def feeders(self, idle: Intervals) -> NDArray[np.int64]:
        """Return the thread that fed the GPU at the end of each of some gaps, or `NOBODY`."""
        causes = self.view.lane.causes
        at = search(causes.ends, idle.end)
        known = at < len(causes.ends)
        feeder = np.full(len(idle), NOBODY, np.int64)
        feeder[known] = causes.feeder[at[known]]
        return feeder

    def ending_operations(self, idle: Intervals) -> NDArray[np.intp]:
        """Return the operation whose start ends each of some gaps."""
        starts = self.view.operations.start
        return np.minimum(search(starts, idle.end), len(starts) - 1)

    def with_calls(self, time: Intervals) -> Intervals:
        """Return the intervals in which all calls of the process were recorded."""
        calls = self.view.calls
        if calls is None or not self.issuers:
            return EMPTY
        return time.select(calls.all_recorded(self.process, time.start, time.end))

    def count_issues(self, time: Intervals) -> int:
        """Return how often the process hands work to a GPU in some time."""
        calls = self.view.calls
        if calls is None:
            return 0
        issues = 0
        for thread in calls.threads_of(self.process):
            rows = slice(*calls.first[thread : thread + 2].tolist())
            issuing = calls.sort[rows] == Call.ISSUE
            issues += int(np.count_nonzero(time.contains(calls.start[rows][issuing])))
        return issues

    def copied_by_calls_in(self, time: Intervals) -> Intervals:
        """Return when the GPU copies to or from its host what calls in some time asked for."""
        calls, operations = self.view.calls, self.view.operations
        if calls is None:
            return EMPTY
        rows = np.flatnonzero(is_among(operations.events.kind, (Kind.COPY_H2D, Kind.COPY_D2H)))
        issued_by = calls.issued_by(operations.events.having("process", "correlation").select(rows))
        inside = (issued_by != NOBODY) & time.contains(calls.start[issued_by])
        return union(operations.start[rows[inside]], operations.end[rows[inside]])

    def in_ranges(self, pattern: str) -> Intervals:
        """Return when the process is in named ranges whose names match a regular expression."""
        trace = self.view.trace
        if Kind.RANGE not in trace.kinds:
            return EMPTY
        columns = ("start", "end", "name", "process")
        events = trace.events_of(self.process, [Kind.RANGE], columns, self.window)
        named = list(trace.search(distinct_ids(events.name), pattern))
        events = events.select(is_among(events.name, named) & (events.process == self.process))
        return union(events.start, events.end)


def take_amount(idle: Intervals, amounts: Times) -> Intervals:
    """Return the last part of each interval, as long as an amount, at most all of it."""
    taken = np.minimum(amounts, idle.lengths)
    keep = taken > 0
    return Intervals((idle.end - taken)[keep], idle.end[keep])
