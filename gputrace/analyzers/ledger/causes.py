"""Causes of lost time, as one tree from the general to the specific, and the host's time in which
GPUs wait for it, of which causes claim parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import NOBODY, Call, read_host
from gputrace.analyzers.gpu_shards import GpuShardView
from gputrace.analyzers.host_state import HostState, read_host_state
from gputrace.analyzers.idle_causes import calls_held_by_copies
from gputrace.analyzers.step_phases import PhaseTimes
from gputrace.errors import PluginError
from gputrace.model.events import COPY_KINDS, GPU_KINDS, Events, Kind, distinct_ids, is_among
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, search, union
from gputrace.model.options import Window
from gputrace.model.results import CauseNode
from gputrace.plugins import Plugin, call, expect, load, plugins, warn

PAUSE_NS: Final = 1_000_000
"""Stretch without a CUDA call from which the host does something else than issue work: eager
frameworks spend 5 to 50 µs between two launches, and some hundreds to prepare a fused one."""

_STREAM_CALLS: Final = 20
_STREAM_NS: Final = 100_000
"""Number of launches in a row, and the longest time between two of them, from which a thread does
nothing but launch."""


def _issuers(view: GpuShardView) -> list[int]:
    """Return the threads that launch kernels or graphs on a GPU, or copy to and from it."""
    calls, events = view.calls, view.operations.events
    if calls is None:
        return []
    of_gpu = is_among(events.kind, GPU_KINDS)
    issued_by = calls.issued_by(events, slice(None) if of_gpu.all() else of_gpu)
    threads: list[int] = distinct_ids(calls.thread[issued_by[issued_by != NOBODY]]).tolist()
    return threads


def _bursts(view: GpuShardView) -> Intervals:
    """Return when the threads that feed a GPU make calls less than `PAUSE_NS` apart."""
    calls = view.calls
    assert calls is not None
    inside = reduce(merge_touching, map(calls.of_thread, view.once_here(_issuers)), EMPTY)
    if not len(inside):
        return EMPTY
    pauses = np.flatnonzero(inside.start[1:] - inside.end[:-1] >= PAUSE_NS)
    return Intervals(inside.start[np.append(0, pauses + 1)], inside.end[np.append(pauses, -1)])


class Host:
    """Host threads that feed one GPU, and the time for which it waits.

    Attributes:
        view: rows of the GPU.
        window: time that is accounted for; by default, that of the GPU's operations.
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
        window: Window | None = None,
    ) -> None:
        self.view, self.feeds, self.steps, self.left = view, feeds, steps, left or {}
        self.repeats = repeats
        self.window: Window = window or view.lane.window
        self._os_calls: dict[int, Events] = {}

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

    @property
    def issuers(self) -> list[int]:
        """Threads that launch kernels or graphs on the GPU, or copy to and from it."""
        return self.view.once_here(_issuers)

    @cached_property
    def pauses(self) -> Intervals:
        """Stretches of at least `PAUSE_NS` in which none of its threads is in a CUDA call."""
        if not self.issuers:
            return EMPTY
        between = self.view.once_here(_bursts).complement(*self.window)
        return between.select(between.lengths >= PAUSE_NS)

    @cached_property
    def streams(self) -> Intervals:
        """Stretches in which one of its threads issues `_STREAM_CALLS` and more, each at most
        `_STREAM_NS` after the one before, and waits for no GPU in between.
        """
        calls, found = self.view.calls, EMPTY
        if calls is None:
            return EMPTY
        for thread in self.issuers:
            rows = np.arange(*calls.first[thread : thread + 2])
            rows = rows[is_among(calls.sort[rows], (Call.ISSUE, Call.SYNC, Call.COPY))]
            issues = calls.sort[rows] == Call.ISSUE
            soon = calls.start[rows[1:]] - calls.end[rows[:-1]] <= _STREAM_NS
            breaks = np.flatnonzero(~(issues[1:] & issues[:-1] & soon))
            first, last = np.append(0, breaks + 1), np.append(breaks, len(rows) - 1)
            long = last - first + 1 >= _STREAM_CALLS
            found = merge_touching(
                found, union(calls.start[rows[first[long]]], calls.end[rows[last[long]]])
            )
        return found

    @cached_property
    def blocked(self) -> Intervals:
        """Time of its threads in calls that wait for a GPU, copies that block among them."""
        calls = self.view.calls
        if calls is None:
            return EMPTY
        waits = [calls.of_thread(thread, Call.SYNC, Call.COPY) for thread in self.issuers]
        waits += calls_held_by_copies(self.view.operations, calls).values()
        return reduce(merge_touching, waits, EMPTY)

    @cached_property
    def copying(self) -> Intervals:
        """Time of its process in calls that issue copies: from pageable memory, nearly all of the
        copy.
        """
        calls, operations = self.view.calls, self.view.operations
        if calls is None:
            return EMPTY
        copies = np.flatnonzero(is_among(operations.events.kind, COPY_KINDS))
        issued = calls.issued_by(operations.events, copies)
        rows = distinct_ids(issued[issued != NOBODY])
        return union(calls.start[rows], calls.end[rows])

    def os_calls(self, process: int) -> Events:
        """Return the system calls of a process, which are read once."""
        if process not in self._os_calls:
            window = self.view.lane.window
            calls = read_host(self.view.trace, process, Kind.OS_RUNTIME, window)
            self._os_calls[process] = calls
        return self._os_calls[process]

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
        issued_by = calls.issued_by(operations.events, rows)
        inside = (issued_by != NOBODY) & time.contains(calls.start[issued_by])
        return union(operations.start[rows[inside]], operations.end[rows[inside]])

    def in_ranges(self, pattern: str) -> Intervals:
        """Return when the process is in named ranges whose names match a regular expression."""
        trace = self.view.trace
        if Kind.RANGE not in trace.kinds:
            return EMPTY
        columns = ("start", "end", "name", "process")
        events = trace.events_of(self.process, [Kind.RANGE], columns, self.window)
        named = trace.matches(events.name, pattern)
        events = events.select(named & (events.process == self.process))
        return union(events.start, events.end)


def take_amount(idle: Intervals, amounts: Times) -> Intervals:
    """Return the last part of each interval, as long as an amount, at most all of it."""
    taken = np.minimum(amounts, idle.lengths)
    keep = taken > 0
    return Intervals((idle.end - taken)[keep], idle.end[keep])


Claim = Callable[[Host], Intervals]
"""Proves from the rows of one GPU and its host when a cause applies."""
Amount = Callable[[Any], Mapping[int | None, int]]
"""Gives the nanoseconds of a step that a cause takes from others, by rank, or, of None, for each
GPU; for causes that are known by how long they last, but not when."""

IDLE: Final = ("data_feeding", "sync", "alloc", "launch", "other_idle")
WAITS: Final = ("data_feeding", "sync", "alloc", "launch")
"""Classes of idle time from which causes of the host are taken."""


class Cause(CauseNode, frozen=True):
    """One node of the tree, and what proves it."""

    takes: tuple[str, ...] = ()
    """Classes of time, or causes that come before, of which it may be a part."""
    claim: Claim | None = None
    amount: Amount | None = None
    work: Callable[[Any], Mapping[tuple[int, int], int]] | None = None
    """Gives the nanoseconds of computation that need not be, in all measured steps, by GPU and its
    rank; for causes that are charged against computation."""
    rule: Callable[[Any], Any] | None = None
    """Makes its finding."""
    certain: float = 1.0
    """Part of its time that its cure gains for certain, where no replay shows what it gains."""
    in_all: bool = False
    """True if it explains the host's time whether or not a GPU waits, so that a replay can take it
    away."""
    least: float = 0.0
    """Part of the time that must be charged to it for its rule to be called; 0 for a rule that
    looks at more than what is charged."""
    needs: tuple[Kind, ...] = ()
    """Kinds of events of which some prove it; a trace without any is not searched for it."""

    def may_be_in(self, kinds: Collection[Kind]) -> bool:
        """Return False if a trace with events of some kinds has none that prove it."""
        return not self.needs or not {*self.needs}.isdisjoint(kinds)


ROOTS: Final = (
    Cause("data", "", "input"),
    Cause("host", "", "host"),
    Cause("communication", "", "communication"),
    Cause("waiting", "communication", "waiting for another rank"),
    Cause("copies", "", "copies"),
    Cause("neighbours", "", "other programs"),
    Cause("work", "", "work that need not be"),
    Cause("unexplained", "", "unexplained"),
)
"""General causes, which group the others."""

IDLING: Final = ("launch-bound", "host-work", "sync-bound", "late-host", "idle-unexplained")
"""Causes of which a cause may be a part that is known by its length alone."""
DEFAULTS: Final[Mapping[str, str]] = {
    "communication": "communication-exposed",
    "h2d": "h2d-exposed",
    "other_copy": "copies-exposed",
    "memset": "memset",
    "recorder": "recorder-overhead",
    "data_feeding": "data-feeding",
    "sync": "sync-bound",
    "alloc": "alloc-stall",
    "launch": "launch-bound",
    "other_idle": "idle-unexplained",
}
"""Cause of what no more specific one is proven for, by class of time."""


def tree_of(causes: Sequence[Cause], *, waits_known: bool = True) -> tuple[CauseNode, ...]:
    """Return the tree of some causes for reports, without what proves them.

    Unless it is known when ranks wait for each other, communication may be waiting for others.
    """
    labels = {} if waits_known else {"communication-exposed": "transfer, or waiting for ranks"}
    return tuple(
        CauseNode(each.id, each.parent, labels.get(each.id, each.label))
        for each in (*ROOTS, *causes)
    )


def with_plugins(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """Return the causes of plugins, which are claimed first, and then the given ones.

    A plugin that does not work is reported, and claims nothing.
    """
    plugged: list[Cause] = []
    for plugin in plugins("causes"):
        try:
            cause: Cause = load(plugin, Cause)
            if problem := _problem(cause, plugin.name, (*ROOTS, *causes, *plugged)):
                raise PluginError(f"{plugin} does not work: {problem}")
            plugged.append(replace(cause, claim=partial(_claim, plugin, cause.claim)))
        except PluginError as error:
            warn(error)
    return (*plugged, *causes)


def sought_in(causes: Sequence[Cause], kinds: Collection[Kind]) -> tuple[Cause, ...]:
    """Return some causes; of those that events of some kinds cannot prove, the node alone."""
    return tuple(
        cause if cause.may_be_in(kinds) else Cause(cause.id, cause.parent, cause.label)
        for cause in causes
    )


def _problem(cause: Cause, name: str, known: Sequence[Cause]) -> str:
    """Return what is wrong with the cause of a plugin; empty if all is well."""
    ids = [each.id for each in known]
    if cause.id != name or name in ids:
        return f"its id is {cause.id!r}; it must be the entry point's name, and one of its own"
    if cause.parent not in ids:
        return f"its parent {cause.parent!r} is none of {', '.join(ids)}"
    wrong = set(cause.takes) - set(DEFAULTS)
    return f"it takes {', '.join(sorted(wrong))}; there are {', '.join(DEFAULTS)}" if wrong else ""


def _claim(plugin: Plugin, claim: Any, host: Host) -> Intervals:
    """Call the function of a plugin; return no time if it fails."""
    try:
        return expect(plugin, call(plugin, claim, host), Intervals)  # type: ignore[no-any-return]
    except PluginError as error:
        warn(error)
        return EMPTY


def path_of(cause: str, causes: Sequence[Cause]) -> tuple[str, ...]:
    """Return the ids from the root of the tree to a cause."""
    parents = {each.id: each.parent for each in (*ROOTS, *causes)}
    path = [cause]
    while parents.get(path[0]):
        path.insert(0, parents[path[0]])
    return tuple(path)
