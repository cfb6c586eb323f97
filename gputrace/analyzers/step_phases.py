"""Phases of training steps: what the thread that trains was at, and how long GPUs idled meanwhile.

Recorded are waits for data and calls that are a part of a step (`Kind.PHASE`). A forward pass is
one where a framework calls it; else it lasts from the end of what came before it to the beginning
of a backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, Shard
from gputrace.analyzers.lanes import LaneSummary
from gputrace.model.events import Events, Kind, distinct_ids
from gputrace.model.host import (
    BACKWARD,
    CLIPPING,
    DATA,
    FORWARD,
    OPTIMIZER,
    OTHER,
    PHASES,
    UNSCALING,
    StepPhase,
    StepPhases,
)
from gputrace.model.intervals import EMPTY, Intervals, Times, merge_touching, union
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace

ALL: Final = "all"
"""All idle time, beside the causes of it."""
LAUNCH: Final = "launch"

_KNOWN: Final = tuple(name for name in PHASES if name != OTHER)


class PhaseTimes(Struct, frozen=True, dict=True):
    """When the thread of a process that trains was in each phase but `OTHER`; disjoint."""

    of: Mapping[str, Intervals]

    def within(self, time: Intervals) -> NDArray[np.int64]:
        """Return the nanoseconds of some time in each of `PHASES`; they sum to all of it."""
        known = [self.of[name].intersection(time).total for name in _KNOWN]
        return np.array([*known, time.total - sum(known)], np.int64)


def read_phases(shard: Shard) -> Mapping[int, PhaseTimes]:
    """Read the phases of a shard's processes."""
    return read_phases_of(shard.trace)


def read_phases_of(trace: Trace) -> Mapping[int, PhaseTimes]:
    """Read the phases of each process in which a backward pass or an optimizer was recorded."""
    if Kind.PHASE not in trace.kinds:
        return {}
    columns = ("start", "end", "kind", "name", "process", "thread")
    events = trace.events([Kind.PHASE, Kind.DATA_WAIT, Kind.STEP], columns)
    called = events.kind == Kind.PHASE
    names = trace.names(distinct_ids(events.name[called]))
    by_process = {}
    for process in distinct_ids(events.process[called]).tolist():
        mine = events.select(events.process == process)
        mine = mine.select(mine.thread == _training_thread(mine))
        by_process[process] = _phase_times(mine, names)
    return by_process


def _training_thread(events: Events) -> int:
    """Return the thread of a process that is longest in phases: autograd's have nested ones."""
    called = events.select(events.kind == Kind.PHASE)

    def length(thread: int) -> int:
        mine = called.thread == thread
        return union(called.start[mine], called.end[mine]).total

    threads: list[int] = distinct_ids(called.thread).tolist()
    return max(threads, key=length)


def _phase_times(events: Events, names: Mapping[int, str]) -> PhaseTimes:
    """Return the phases of one thread; of calls within each other, the inner one counts.

    An optimizer may call a closure with forward and backward passes, and a backward pass an
    optimizer for each parameter.
    """
    called = events.kind == Kind.PHASE

    def calls(name: str) -> Intervals:
        ids = [id for id, text in names.items() if text == name]
        rows = called & np.isin(events.name, ids)
        return union(events.start[rows], events.end[rows])

    waits = events.kind == Kind.DATA_WAIT
    data, backward, optimizer = (
        union(events.start[waits], events.end[waits]),
        calls(BACKWARD),
        calls(OPTIMIZER),
    )
    inner = backward.contains(optimizer.start)
    inside, around = optimizer.select(inner), optimizer.select(~inner)
    between = {UNSCALING: calls(UNSCALING), CLIPPING: calls(CLIPPING)}
    ends = [data.end, backward.end, around.end, *(times.end for times in between.values())]
    ends.append(events.end[events.kind == Kind.STEP])
    forward = calls(FORWARD)
    if not len(forward):
        forward = _before(backward.start, np.sort(np.concatenate(ends)))
    # The first to have a nanosecond keeps it.
    layers = [
        (DATA, data),
        *between.items(),
        (OPTIMIZER, inside),
        (BACKWARD, backward),
        (FORWARD, forward),
        (OPTIMIZER, around),
    ]
    of, given = dict.fromkeys(_KNOWN, EMPTY), EMPTY
    for name, times in layers:
        of[name] = merge_touching(of[name], times.difference(given))
        given = merge_touching(given, times)
    return PhaseTimes(of)


def _before(starts: Times, ends: Times) -> Intervals:
    """Return the time before each start since the last end; none where nothing came before it."""
    last = np.searchsorted(ends, starts, "right") - 1
    known = last >= 0
    return union(ends[last[known]], starts[known])


def idle_by_phase(
    gpus: PerGpu, lanes: Sequence[LaneSummary], time: Sequence[Intervals], causes: Sequence[str]
) -> list[dict[str, NDArray[np.int64]]]:
    """Return for each GPU the nanoseconds that it idles while its host is in each of `PHASES`.

    Args:
        gpus: whose lanes they are.
        lanes: of the GPUs.
        time: what counts of the time of each.
        causes: some of `IDLE_CAUSES`, or `ALL`; the keys of the results, which are empty for a GPU
            of whose process no phases were recorded.
    """
    return gpus.each(_idle_of, lanes, time, same=(tuple(causes),))


def _idle_of(
    view: GpuShardView, time: Intervals, causes: Sequence[str]
) -> dict[str, NDArray[np.int64]]:
    phases = view.once(read_phases).get(view.operations.gpu.process)
    if phases is None:
        return {}
    idle = {}
    for cause in causes:
        of_cause = view.lane.causes.of
        idle[cause] = phases.within(
            _idle_time(view, time) if cause == ALL else of_cause[cause].intersection(time)
        )
    return idle


def _idle_time(view: GpuShardView, time: Intervals) -> Intervals:
    timeline = view.lane.timeline
    idle = time.difference(timeline.busy)
    return idle.intersection(timeline.recorded) if len(timeline.recorded) > 1 else idle


class IdleOfRank(Struct, frozen=True, dict=True):
    """Idle time of the GPUs of a rank in their measured steps, by phase: summed nanoseconds."""

    steps: int
    """Steps, counted once for each GPU."""
    idle: NDArray[np.int64]
    launch: NDArray[np.int64] | None
    """Part of it before launches; None where calls were not recorded."""


def measure_phases(
    times: PhaseTimes, rank: int, steps: Sequence[tuple[int, int]], gpus: IdleOfRank | None
) -> StepPhases | None:
    """Return the phases of a rank's steps; None where none was met in them.

    Args:
        times: of the rank's process.
        rank: the rank.
        steps: start and end of each measured step, in nanoseconds.
        gpus: its GPUs; None where none was seen.
    """
    starts, ends = np.array(sorted(steps), np.int64).reshape(-1, 2).T
    time = union(starts, ends)
    host = times.within(time)
    met = dict(zip(PHASES, host.tolist(), strict=True))
    if not any(met[name] for name in _KNOWN if name != DATA):
        return None
    idle, launch = (None, None) if gpus is None else (gpus.idle, gpus.launch)
    rows = zip(
        PHASES,
        _means(host, len(steps)),
        [None] * len(PHASES) if gpus is None or idle is None else _means(idle, gpus.steps),
        [None] * len(PHASES) if gpus is None or launch is None else _means(launch, gpus.steps),
        strict=True,
    )
    phases = tuple(StepPhase(*row) for row in rows)
    return StepPhases(rank, len(steps), time.total // len(steps), phases)


def _means(sums: NDArray[np.int64], count: int) -> list[int]:
    """Return means of sums that add up to the mean of all, the last of them the rest."""
    means: list[int] = (sums // count).tolist()
    means[-1] = int(sums.sum()) // count - sum(means[:-1])
    return means
