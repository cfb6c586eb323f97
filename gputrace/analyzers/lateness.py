"""Lateness at collectives: GPUs that the others wait for, and the cost of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives import JOINT, Collectives, steps_of
from gputrace.analyzers.cuda_api_calls import NOBODY, Call, CudaApiCalls
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, Shard
from gputrace.analyzers.grouping import (
    StepsOf,
    median,
    median_of_known,
    median_of_others,
    rows_by,
)
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import GpuOperations, OperationClass
from gputrace.model.events import UNKNOWN, Kind, Mask, distinct_ids, is_among
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.results import Step
from gputrace.model.struct import Struct
from gputrace.model.time_class import BUSY_CLASSES, CLASSES

_FEWEST_STEPS: Final = 4
"""Minimum steps for statistical significance."""
_CONSTANT_ERRORS: Final = 4.0
"""Minimum constant delay, in standard errors."""
_CONSTANT_DELAY: Final = 0.03
"""Minimum constant delay to be reported, as a fraction of a step."""
_OUTLIER_DELAY: Final = 0.15
"""Minimum delay beyond the usual in an outlier step, as a fraction of a step."""
_OUTLIER_DEVIATIONS: Final = 5.0
"""Minimum delay beyond the usual in an outlier step, in robust standard deviations."""
_OUTLIERS_COST: Final = 0.025
"""Minimum cost of the outlier steps to be reported, as a fraction of the total time."""

_OWN: Final = tuple(name for name in CLASSES if name != "communication")
_WORK: Final = tuple(name for name in BUSY_CLASSES if name != "communication")


class Straggler(Struct, frozen=True, dict=True):
    """GPU for which others wait.

    Attributes:
        lane: lane of the GPU.
        pattern: ``constant``; ``one-step``, ``burst`` (steps in a row) or ``scattered``.
        steps: numbers of the steps in which it is late.
        cost_ns: nanoseconds per step that another GPU loses by waiting for it, averaged over all
            measured steps.
        last: fraction of the collectives in which it arrived last, 0 to 1.
        more: nanoseconds of each class but communication in such a step beyond the median of the
            other GPUs; negative where it has less.
    """

    lane: LaneSummary
    pattern: str
    steps: tuple[int, ...]
    cost_ns: int
    last: float
    more: Mapping[str, int]

    @property
    def by_work(self) -> bool:
        """Return True if it is late because of GPU work rather than idle time."""
        gains = {name: max(ns, 0) for name, ns in self.more.items()}
        return 2 * sum(gains[name] for name in _WORK) > sum(gains.values())

    @property
    def cause(self) -> str:
        """Return the class with the largest excess, among work or idle time as in `by_work`."""
        names = [name for name in self.more if (name in _WORK) == self.by_work]
        return max(names, key=lambda name: self.more[name])


class LateGains(NamedTuple):
    """Nanoseconds by which a step is shorter without each reason for which a rank is late."""

    extra_ns: int
    """Without the kernels that the median rank does not launch, or not as often."""
    slower_ns: int
    """With kernels as quick as on the median rank."""
    host_ns: int
    """With a host as quick as the median rank's."""


def find_stragglers(lateness: Lateness, measured: Sequence[Step]) -> tuple[Straggler, ...]:
    """Return the stragglers, costliest first; none in a balanced run."""
    # Nanoseconds of shape (GPUs, steps, `_OWN`); NaN where a GPU lacks the step.
    rows = {(lane.gpu.gpu, lane.gpu.rank): row for row, lane in enumerate(lateness.lanes)}
    column = {int(number): index for index, number in enumerate(lateness.steps)}
    table = np.full((len(rows), len(column), len(_OWN)), np.nan)
    times_of = attrgetter(*(f"{name}_ns" for name in _OWN))
    for step in measured:
        row = rows.get((step.gpu, step.rank)) if step.gpu is not None else None
        if row is not None:
            table[row, column[step.step]] = times_of(step)
    stragglers = [
        Straggler(
            lane,
            _pattern(bad),
            tuple(lateness.steps[bad].tolist()),
            int(lateness.caused[row, bad].sum()) // len(bad),
            float(lateness.last[row]),
            _more(table[:, bad], row),
        )
        for row, lane in enumerate(lateness.lanes)
        if (bad := straggling_steps(lateness.excess[row], lateness.length_ns)).any()
    ]
    return tuple(sorted(stragglers, key=lambda straggler: -straggler.cost_ns))


def straggling_steps(excess: NDArray[np.float64], length_ns: float) -> Mask:
    """Return a mask of the steps in which a GPU is significantly late: all, outliers, or none.

    ``excess`` is the nanoseconds that others wait for it beyond the median GPU, by step, and
    ``length_ns`` the mean length of a step.
    """
    if len(excess) < _FEWEST_STEPS:
        return np.zeros(len(excess), bool)
    middle = float(median(excess))
    scatter = 1.4826 * float(median(np.abs(excess - middle)))
    spikes: Mask = excess > middle + max(_OUTLIER_DEVIATIONS * scatter, _OUTLIER_DELAY * length_ns)
    usual = excess[~spikes]
    error = float(usual.std(ddof=1)) / len(usual) ** 0.5 if len(usual) > 1 else np.inf
    if usual.mean() >= max(_CONSTANT_DELAY * length_ns, _CONSTANT_ERRORS * error):
        return np.ones(len(excess), bool)
    worth = excess[spikes].sum() >= _OUTLIERS_COST * length_ns * len(excess)
    chosen: Mask = spikes & worth
    return chosen


def _pattern(bad: Mask) -> str:
    where = np.flatnonzero(bad)
    if bad.all():
        return "constant"
    if len(where) == 1:
        return "one-step"
    return "burst" if where[-1] - where[0] < 2 * len(where) else "scattered"


def _more(table: NDArray[np.float64], row: int) -> dict[str, int]:
    """Return the mean excess of a GPU over the median of the others, by class."""
    others = np.delete(table, row, axis=0)
    compared = ~np.isnan(table[row]).any(axis=-1) & ~np.isnan(others).any(axis=-1).all(axis=0)
    if not compared.any():
        return dict.fromkeys(_OWN, 0)
    usual = median_of_known(others[:, compared])
    more = (table[row][compared] - usual).mean(axis=0)
    return {name: int(ns) for name, ns in zip(_OWN, more, strict=True)}


_ALL_MEET: Final = (*JOINT, "Broadcast", "Reduce")
"""Operations in which waiting implies a late rank; a pipeline stage waits for earlier ones by
design."""
_NEXT_NS: Final = 20_000
"""Maximum pause between two collectives of one chain, the second of which waited for the first."""


class Lateness(Struct, frozen=True, dict=True):
    """Waiting that each GPU causes on the others, by step.

    Attributes:
        lanes: lanes of the GPUs that meet in collectives.
        steps: numbers of the measured steps.
        caused: mean nanoseconds that another GPU loses by waiting in the collectives in which this
            one arrived last; shape (GPUs, steps).
        last: fraction of the collectives in which each GPU arrived last, 0 to 1.
        length_ns: mean length of a step.
    """

    lanes: tuple[LaneSummary, ...]
    steps: NDArray[np.int64]
    caused: NDArray[np.int64]
    last: NDArray[np.float64]
    length_ns: float

    @cached_property
    def excess(self) -> NDArray[np.float64]:
        """Return ``caused`` minus the median of the other GPUs in the same step."""
        return self.caused - median_of_others(self.caused)


def find_lateness(
    gpus: PerGpu, collectives: Collectives, measured: Sequence[Step]
) -> Lateness | None:
    """Measure the waiting that each GPU causes.

    None where no two GPUs meet in collectives of the measured steps.
    """
    step = steps_of(collectives, gpus.operations, measured)
    useful = collectives.of(*_ALL_MEET) & collectives.known & (step != UNKNOWN)
    row = np.flatnonzero(useful)
    index = {summary.gpu: at for at, summary in enumerate(gpus.operations)}
    meet = set(distinct_ids(collectives.lane[row]).tolist())
    meeting = [lane for lane in gpus.lanes if index[lane.gpu] in meet]
    if len(meeting) < 2:
        return None
    place = np.full(len(gpus.operations), UNKNOWN)
    place[[index[lane.gpu] for lane in meeting]] = np.arange(len(meeting))
    waiter, last = place[collectives.lane[row]], place[collectives.last_lane[row]]
    numbers = np.array(sorted({step.step for step in measured}), np.int64)
    caused = np.zeros((len(meeting), len(numbers)), np.int64)
    measured_of, at = StepsOf(measured), np.searchsorted(numbers, step[row])
    lane_steps = [measured_of(lane.gpu) for lane in meeting]
    edges = (
        np.array([(s.step, s.start_ns, s.end_ns) for s in steps], np.int64).reshape(-1, 3)
        for steps in lane_steps
    )
    rows = [
        mine[np.argsort(collectives.start[row[mine]], kind="stable")]
        for mine in rows_by(waiter, len(meeting))
    ]
    columns = (collectives.start, collectives.end, collectives.wait)
    times = ([column[row[mine]] for mine in rows] for column in columns)
    each = gpus.each(_lost_and_slack, meeting, *times, edges)
    for mine, steps_run, (lost_ns, slack_ns) in zip(rows, lane_steps, each, strict=True):
        losses = np.zeros_like(caused)
        by_others = np.where(waiter[mine] != last[mine], lost_ns, 0)
        np.add.at(losses, (last[mine], at[mine]), by_others)
        if slack_ns is not None:
            of_step = np.zeros(len(numbers), np.int64)
            of_step[np.searchsorted(numbers, [step.step for step in steps_run])] = slack_ns
            _bound(losses, of_step)
        caused += losses
    joint = collectives.joint[row] & (waiter == last)
    came_last = np.bincount(last[joint], minlength=len(meeting))
    return Lateness(
        tuple(meeting),
        numbers,
        caused // (len(meeting) - 1),
        came_last / max(int(came_last.sum()), 1),
        float(np.mean([step.end_ns - step.start_ns for step in measured])),
    )


def _bound(losses: NDArray[np.int64], slack: NDArray[np.int64]) -> None:
    """Limit the losses of a GPU, in place, to what its host could have gained.

    The limit holds per step and over all steps: a host may lose in one step the lead of another.

    ``losses`` are nanoseconds by causing GPU and step, and ``slack`` those that the host could have
    gained, by step.
    """
    whole = losses.sum(axis=0)
    losses[:] = losses * (np.clip(slack, 0, whole) / np.maximum(whole, 1))
    total = int(losses.sum())
    losses[:] = losses * (np.clip(slack.sum(), 0, total) / max(total, 1))


def _lost_and_slack(
    view: GpuShardView, start: Times, end: Times, wait: Times, steps: NDArray[np.int64]
) -> tuple[Times, NDArray[np.int64] | None]:
    """Return the nanoseconds that each of a GPU's collectives costs it, and its slack by step."""
    return _lost(view, start, end, wait), find_slack(view, steps)


def _lost(view: GpuShardView, start: Times, end: Times, wait: Times) -> Times:
    """Return the part of the wait in each collective, in order of start, that costs GPU time.

    Collectives run in sequence as they become ready. A wait overlapped by kernels delays the
    collectives that follow immediately, and may expose their transfer. So the waits of such a chain
    count up to its exposed communication, without the transfer of the last collective, which
    happens anyway.
    """
    first = np.concatenate([[True], start[1:] > np.maximum.accumulate(end)[:-1] + _NEXT_NS])
    begin = np.flatnonzero(first)
    chain = np.cumsum(first) - 1
    waits, last = np.add.reduceat(wait, begin), np.append(begin[1:], len(start)) - 1
    alone = view.lane.timeline.of_class(OperationClass.COMMUNICATION)
    shown = alone.within(start[begin], start[last] + wait[last])
    part = np.minimum(waits, shown) / np.maximum(waits, 1)
    lost: Times = (wait * part[chain]).astype(np.int64)
    return lost


_FULL_QUEUE: Final = 900
"""Queued operations above which a launch waits for a slot: CUDA queues about 1,000."""

_FREE: Final = r"(cuda|cu|hip)(Mem)?(Host)?Free(?!\w*Async)"
_WITH_HOST: Final = (Kind.COPY_H2D, Kind.COPY_D2H)
"""Copies whose call may block until they are done."""


def find_slack(view: GpuShardView, steps: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return GPU time minus host time without waiting for the GPU, by step, in nanoseconds.

    Negative where the host lost some of its lead. None where the calls that issue the steps are
    unknown.

    ``steps`` has number, start and end of the GPU's steps in order, of shape (steps, 3).
    """
    operations, calls = view.operations, view.calls
    if calls is None or not len(steps):
        return None
    numbers, starts, ends = steps.T
    issued_by = calls.issued_by(operations.events)
    first = np.minimum(np.searchsorted(operations.start, starts), len(operations) - 1)
    if (issued_by[first] == NOBODY).any():
        return None
    begin = calls.start[issued_by[first]]
    length, follows = ends - starts, np.diff(numbers) == 1
    waits = _blocked(operations, calls, view.once(_waiting_calls), issued_by).within(
        begin[:-1], np.maximum(begin[1:], begin[:-1])
    )
    slack = length[:-1] - (np.diff(begin) - waits)
    if not follows.any():
        return None
    usual = int(median(slack[follows]))
    return np.append(np.where(follows, slack, usual), usual)


def _blocked(
    operations: GpuOperations, calls: CudaApiCalls, waiting: Mask, issued_by: NDArray[np.intp]
) -> Intervals:
    """Return when a thread that feeds the GPU was blocked by the GPU."""
    has_call = issued_by != NOBODY
    known = slice(None) if has_call.all() else has_call
    issue = issued_by[known]
    called, returned = calls.start.take(issue), calls.end.take(issue)
    # A mask of operations that blocked their call: finished copies, and full queues. The operations
    # are in order of start.
    held = is_among(operations.events.kind[known], _WITH_HOST) & (returned >= operations.end[known])
    # The queue is full where, of the operations called before,
    # the last `_FULL_QUEUE` had not started.
    late = np.argsort(called, kind="stable")[_FULL_QUEUE + 1 :]
    held[late[operations.start[known][: len(late)] >= called.take(late)]] = True
    usual = int(median(returned - called)) if len(issue) else 0
    spans = [(called[held] + usual, returned[held])]
    for thread in distinct_ids(calls.thread.take(issue)).tolist():
        rows = slice(int(calls.first[thread]), int(calls.first[thread + 1]))
        spans.append((calls.start[rows][waiting[rows]], calls.end[rows][waiting[rows]]))
    starts, ends = (np.concatenate(column) for column in zip(*spans, strict=True))
    return union(starts, ends)


def _waiting_calls(shard: Shard) -> Mask:
    """Return a mask of calls that wait for the GPU: synchronising ones, and those freeing memory.

    Freeing waits for all operations that use the memory.
    """
    calls = shard.calls
    assert calls is not None
    drains = calls.sort == Call.ALLOC
    drains[drains] = shard.trace.matches(calls.name[drains], _FREE)
    waiting: Mask = drains | (calls.sort == Call.SYNC)
    return waiting
