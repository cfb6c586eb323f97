"""Stragglers: ranks that the others wait for, what that costs, and how fast their kernels are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives import JOINT, Collectives, steps_of
from gputrace.analyzers.execution import GpuShardView, PerGpu, Shard, same_names
from gputrace.analyzers.grouping import StepsOf, median_of_others, rows_by, steps_by_gpu
from gputrace.analyzers.host_calls import NOBODY, Call, CudaApiCalls
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import Gpu, GpuOperations, OperationClass
from gputrace.model.events import UNKNOWN, Kind, Mask, distinct_ids
from gputrace.model.intervals import Intervals, Times, union
from gputrace.model.results import Step
from gputrace.model.time_class import CLASSES

_FEWEST: Final = 4
"""Steps that are needed to tell a habit from an accident."""
_SURE: Final = 4.0
"""Standard errors by which a constant lag must exceed nothing."""
_CONSTANT: Final = 0.03
"""Part of a step from which a constant lag is worth a word."""
_SPIKE: Final = 0.15
_DEVIATIONS: Final = 5.0
"""A step in which a GPU is late beyond its usual lag by so much of a step, and so many robust
standard deviations, stands out."""
_WORTH: Final = 0.025
"""Part of the whole time that steps which stand out must cost."""

_OWN: Final = tuple(name for name in CLASSES if name != "communication")
_WORK: Final = ("compute", "h2d", "other_copy", "memset")


@dataclass(frozen=True)
class Straggler:
    """A GPU for which others wait.

    Attributes:
        lane: the GPU.
        pattern: ``constant``; ``one-step``, ``burst`` (steps in a row) or ``scattered``.
        steps: numbers of the steps in which it is late.
        cost_ns: what another GPU loses by waiting for it, a step, spread over all measured steps.
        last: part of the collectives to which it came last, 0 to 1.
        more: nanoseconds of each class but communication that it has in such a step beyond the
            middle one of the others; negative where it has less.
    """

    lane: LaneSummary
    pattern: str
    steps: tuple[int, ...]
    cost_ns: int
    last: float
    more: Mapping[str, int]

    @property
    def by_work(self) -> bool:
        """Whether it is late with work of the GPU rather than idle."""
        gains = {name: max(ns, 0) for name, ns in self.more.items()}
        return 2 * sum(gains[name] for name in _WORK) > sum(gains.values())

    @property
    def cause(self) -> str:
        """The class that it has most more of: work, or idle time, as `by_work` says."""
        names = [name for name in self.more if (name in _WORK) == self.by_work]
        return max(names, key=lambda name: self.more[name])


def find_stragglers(lateness: Lateness, measured: Sequence[Step]) -> tuple[Straggler, ...]:
    """The GPUs that are late, the costliest first; none in a balanced run."""
    found = sorted(_found(lateness, measured), key=lambda late: -late.cost_ns)
    return tuple(found)


def _found(lateness: Lateness, measured: Sequence[Step]) -> Iterator[Straggler]:
    table = _table(lateness, measured)
    for row, lane in enumerate(lateness.lanes):
        bad = straggling_steps(lateness.excess[row], lateness.length_ns)
        if bad.any():
            yield Straggler(
                lane,
                _pattern(bad),
                tuple(lateness.steps[bad].tolist()),
                int(lateness.caused[row, bad].sum()) // len(bad),
                float(lateness.last[row]),
                _more(table[:, bad], row),
            )


def straggling_steps(excess: NDArray[np.float64], length_ns: float) -> Mask:
    """In which steps one GPU is late beyond chance: all, some that stand out, or none.

    Args:
        excess: what others wait for it beyond what the middle GPU makes them wait, by step.
        length_ns: of a step.
    """
    if len(excess) < _FEWEST:
        return np.zeros(len(excess), bool)
    middle = float(np.median(excess))
    scatter = 1.4826 * float(np.median(np.abs(excess - middle)))
    spikes: Mask = excess > middle + max(_DEVIATIONS * scatter, _SPIKE * length_ns)
    usual = excess[~spikes]
    error = float(usual.std(ddof=1)) / len(usual) ** 0.5 if len(usual) > 1 else np.inf
    if usual.mean() >= max(_CONSTANT * length_ns, _SURE * error):
        return np.ones(len(excess), bool)
    worth = excess[spikes].sum() >= _WORTH * length_ns * len(excess)
    chosen: Mask = spikes & worth
    return chosen


def _pattern(bad: Mask) -> str:
    where = np.flatnonzero(bad)
    if bad.all():
        return "constant"
    if len(where) == 1:
        return "one-step"
    return "burst" if where[-1] - where[0] < 2 * len(where) else "scattered"


def _table(lateness: Lateness, measured: Sequence[Step]) -> NDArray[np.float64]:
    """Nanoseconds by GPU, step and class but communication; nan where a GPU lacks the step."""
    rows = {(lane.gpu.gpu, lane.gpu.rank): row for row, lane in enumerate(lateness.lanes)}
    column = {int(number): place for place, number in enumerate(lateness.steps)}
    table = np.full((len(rows), len(column), len(_OWN)), np.nan)
    for step in measured:
        row = rows.get((step.gpu, step.rank)) if step.gpu is not None else None
        if row is not None:
            table[row, column[step.step]] = [getattr(step, f"{name}_ns") for name in _OWN]
    return table


def _more(table: NDArray[np.float64], row: int) -> dict[str, int]:
    """By class, how much more a GPU has than the middle one of the others, in the mean step."""
    others = np.nanmedian(np.delete(table, row, axis=0), axis=0)
    more = np.nanmean(table[row] - others, axis=0)
    return {name: int(ns) for name, ns in zip(_OWN, np.nan_to_num(more), strict=True)}


_ALL_MEET: Final = (*JOINT, "Broadcast", "Reduce")
"""Operations in which a rank that waits does so for one that is late; a stage of a pipeline waits
for what comes before it by nature."""
_NEXT_NS: Final = 20_000
"""A collective that begins so soon after another was waiting for it."""


@dataclass(frozen=True)
class Lateness:
    """What each GPU makes the others wait, by step.

    Attributes:
        lanes: the GPUs that meet in collectives.
        steps: numbers of the measured steps.
        caused: mean nanoseconds that another GPU loses by waiting in the collectives to which this
            one came last; shape (GPUs, steps).
        last: part of the collectives to which each GPU came last, 0 to 1.
        length_ns: mean length of a step.
    """

    lanes: tuple[LaneSummary, ...]
    steps: NDArray[np.int64]
    caused: NDArray[np.int64]
    last: NDArray[np.float64]
    length_ns: float

    @cached_property
    def excess(self) -> NDArray[np.float64]:
        """``caused`` beyond what the middle one of the other GPUs causes in the same step."""
        excess: NDArray[np.float64] = self.caused - median_of_others(self.caused)
        return excess


def find_lateness(
    gpus: PerGpu, collectives: Collectives, measured: Sequence[Step]
) -> Lateness | None:
    """None where no two GPUs meet in collectives of the measured steps.

    Args:
        gpus: those among which the collectives were matched.
        collectives: of all GPUs.
        measured: the steps that count, of all GPUs.
    """
    step = steps_of(collectives, gpus.operations, measured)
    useful = collectives.of(*_ALL_MEET) & collectives.known & (step != UNKNOWN)
    row = np.flatnonzero(useful)
    index = {own.gpu: place for place, own in enumerate(gpus.operations)}
    meet = set(distinct_ids(collectives.lane[row]).tolist())
    meeting = [lane for lane in gpus.lanes if index[lane.gpu] in meet]
    if len(meeting) < 2:
        return None
    place = np.full(len(gpus.operations), UNKNOWN)
    place[[index[lane.gpu] for lane in meeting]] = np.arange(len(meeting))
    own, last = place[collectives.lane[row]], place[_last_lane(collectives)[row]]
    numbers = np.array(sorted({step.step for step in measured}), np.int64)
    lost = np.where(own != last, _losses(gpus, meeting, own, collectives, row), 0)
    caused = np.zeros((len(meeting), len(numbers)), np.int64)
    steps, at = steps_by_gpu(measured), np.searchsorted(numbers, step[row])
    own_steps = [steps.get((lane.gpu.gpu, lane.gpu.rank), []) for lane in meeting]
    slacks = gpus.each(find_slack, meeting, map(_edges, own_steps))
    for mine, ran, found in zip(rows_by(own, len(meeting)), own_steps, slacks, strict=True):
        losses = np.zeros_like(caused)
        np.add.at(losses, (last[mine], at[mine]), lost[mine])
        _bound(losses, _by_step(ran, found), numbers)
        caused += losses
    came_last = np.bincount(last[collectives.joint[row] & (own == last)], minlength=len(meeting))
    return Lateness(
        tuple(meeting),
        numbers,
        caused // (len(meeting) - 1),
        came_last / max(int(came_last.sum()), 1),
        float(np.mean([step.end_ns - step.start_ns for step in measured])),
    )


Slack = Mapping[int, int]
"""By step, what the host of a GPU could have gained in it."""


def _edges(steps: Sequence[Step]) -> NDArray[np.int64]:
    """Number, start and end of each."""
    rows = [(step.step, step.start_ns, step.end_ns) for step in steps]
    return np.array(rows, np.int64).reshape(-1, 3)


def _by_step(steps: Sequence[Step], slack: NDArray[np.int64] | None) -> Slack | None:
    """None where it is not known."""
    if slack is None:
        return None
    return dict(zip([step.step for step in steps], slack.tolist(), strict=True))


def _bound(losses: NDArray[np.int64], known: Slack | None, numbers: NDArray[np.int64]) -> None:
    """Takes from what a GPU loses, by who and step, what its host could not have gained.

    In each step, and over all of them: a host that is ahead in one step may lose that in another.
    """
    if known is None:
        return
    slack = np.array([known.get(number, 0) for number in numbers.tolist()])
    whole = losses.sum(axis=0)
    losses[:] = losses * (np.clip(slack, 0, whole) / np.maximum(whole, 1))
    total = int(losses.sum())
    losses[:] = losses * (np.clip(slack.sum(), 0, total) / max(total, 1))


def _losses(
    gpus: PerGpu,
    lanes: Sequence[LaneSummary],
    own: NDArray[np.int64],
    collectives: Collectives,
    row: NDArray[np.int64],
) -> Times:
    """What each of some rows of collectives costs the GPU that it is of, by the index of that."""
    lost = np.zeros(len(row), np.int64)
    by_lane = [
        mine[np.argsort(collectives.start[row[mine]], kind="stable")]
        for mine in rows_by(own, len(lanes))
    ]
    columns = (collectives.start, collectives.end, collectives.wait)
    times = ([column[row[mine]] for mine in by_lane] for column in columns)
    for mine, found in zip(by_lane, gpus.each(_lost, lanes, *times), strict=True):
        lost[mine] = found
    return lost


def _lost(one: GpuShardView, start: Times, end: Times, wait: Times) -> Times:
    """Of the wait in each collective, in order of start, what costs its GPU time.

    Collectives run one after the other as they become ready. A wait that hides under kernels delays
    the ones that follow at once, and may bring their transfer to light: so of each chain of them
    the waits count as far as communication with nothing beside it does, but for the last one's
    transfer, which is at its own time anyhow.
    """
    first = np.concatenate([[True], start[1:] > np.maximum.accumulate(end)[:-1] + _NEXT_NS])
    begin = np.flatnonzero(first)
    chain = np.cumsum(first) - 1
    waits, last = np.add.reduceat(wait, begin), np.append(begin[1:], len(start)) - 1
    alone = one.lane.timeline.of_class(OperationClass.COMMUNICATION)
    shown = alone.within(start[begin], start[last] + wait[last])
    part = np.minimum(waits, shown) / np.maximum(waits, 1)
    lost: Times = (wait * part[chain]).astype(np.int64)
    return lost


def _last_lane(collectives: Collectives) -> NDArray[np.int64]:
    """Of each row, the lane that came last of those that came before it left."""
    moments, begin = np.unique(collectives.start, return_inverse=True)
    keys = collectives.instance * len(moments) + begin
    order = np.lexsort((collectives.lane, keys))
    arrival = np.minimum(np.searchsorted(moments, collectives.arrival), len(moments) - 1)
    wanted = collectives.instance * len(moments) + arrival
    at = order[np.searchsorted(keys[order], wanted, "right") - 1]
    found = collectives.known & (keys[at] == wanted)
    return np.where(found, collectives.lane[at], collectives.lane).astype(np.int64)


_FULL: Final = 900
"""With so many operations queued, a launch waits for room: CUDA holds about 1,000."""

_FREE: Final = re.compile(r"(cuda|cu|hip)(Mem)?(Host)?Free(?!\w*Async)")
_WITH_HOST: Final = (Kind.COPY_H2D, Kind.COPY_D2H)
"""Copies that a call may stay in until they are done."""


def find_slack(one: GpuShardView, steps: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Of each step, its time on the GPU less what the host needs without waiting for the GPU.

    Negative where the host was ahead and lost some of that. None where it is not known who issues
    the steps.

    Args:
        one: the GPU.
        steps: of it, in order: shape (steps, 3), number, start and end.
    """
    own, calls = one.operations, one.calls
    if calls is None or not len(steps):
        return None
    numbers, starts, ends = steps.T
    issued_by = calls.issued_by(own.events)
    first = np.minimum(np.searchsorted(own.start, starts), len(own) - 1)
    if (issued_by[first] == NOBODY).any():
        return None
    begin = calls.start[issued_by[first]]
    length, follows = ends - starts, np.diff(numbers) == 1
    waits = _blocked(own, calls, one.once(_waiting_calls), issued_by).within(
        begin[:-1], np.maximum(begin[1:], begin[:-1])
    )
    slack = length[:-1] - (np.diff(begin) - waits)
    if not follows.any():
        return None
    usual = int(np.median(slack[follows]))
    return np.append(np.where(follows, slack, usual), usual)


def _blocked(
    own: GpuOperations, calls: CudaApiCalls, waiting: Mask, issued_by: NDArray[np.int32]
) -> Intervals:
    """When a thread that feeds the GPU could not go on before the GPU had."""
    known = issued_by != NOBODY
    issue = issued_by[known]
    held = _held(own.events.kind[known], own.start[known], own.end[known], issue, calls)
    usual = int(np.median(calls.end[issue] - calls.start[issue])) if len(issue) else 0
    spans = [(calls.start[issue[held]] + usual, calls.end[issue[held]])]
    for thread in distinct_ids(calls.thread[issue]).tolist():
        rows = slice(int(calls.first[thread]), int(calls.first[thread + 1]))
        spans.append((calls.start[rows][waiting[rows]], calls.end[rows][waiting[rows]]))
    starts, ends = (np.concatenate(column) for column in zip(*spans, strict=True))
    return union(starts, ends)


def _waiting_calls(shard: Shard) -> Mask:
    """Calls that wait for the GPU: those that say so, and those that give memory back, for which it
    must have done all that uses it.
    """
    calls = shard.calls
    assert calls is not None
    freeing = shard.trace.search(distinct_ids(calls.name[calls.sort == Call.ALLOC]), _FREE)
    drains = np.isin(calls.name, list(freeing)) & (calls.sort == Call.ALLOC)
    waiting: Mask = drains | (calls.sort == Call.SYNC)
    return waiting


def _held(
    kind: NDArray[np.int8], start: Times, end: Times, issue: NDArray[np.int32], calls: CudaApiCalls
) -> Mask:
    """Which operations held the call that issued them: copies that it saw done, a full queue.

    The operations are in order of start.
    """
    called = calls.start[issue]
    done = np.isin(kind, _WITH_HOST) & (calls.end[issue] >= end)
    order = np.argsort(called, kind="stable")
    queued = np.empty(len(order), np.int64)
    queued[order] = np.arange(len(order)) - np.searchsorted(start, called[order])
    held: Mask = done | (queued > _FULL)
    return held


_MOST_KERNELS: Final = 40_000
"""Of one GPU; as many steps are compared as have so many."""
_LEAST_SHARE: Final = 0.5
"""Part of a GPU's time in kernels that must be in kernels that others run too."""
_ALONE: Final = 0.1
"""Part of the compared time that must be in launches without communication beside them, for these
alone to tell the ratio."""
_QUARTILES: Final = (0.25, 0.5, 0.75)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KernelRatio:
    """One GPU against the fastest; kernels that communicate do not count, they wait for others."""

    gpu: Gpu
    ratio: float
    """How many times as long it takes for the same kernels as the fastest GPU; 1.0 is that one.

    The median over launches, weighted by their time.
    """
    low: float
    high: float
    """Quartiles of the same: a lower clock slows all kernels alike, larger batches only some."""
    launches: int
    """Of a step, that were compared."""
    compared_ns: int
    """Time of these in a step."""
    own_ns: int
    """Time of a step in kernels that no other GPU runs, or not as often."""

    @property
    def excess_ns(self) -> int:
        """Time of a step that the GPU would save at the speed of the fastest."""
        return round(self.compared_ns * (1 - 1 / self.ratio))


@dataclass(frozen=True)
class _Launches:
    """What one GPU runs in a typical step: a launch of a name, and its median time."""

    keys: NDArray[np.int64]
    lengths: Floats
    alone: Floats
    """The median of those with no communication beside them; NaN where most have some."""


def kernel_ratios(gpus: PerGpu, steps: Sequence[Step]) -> tuple[KernelRatio, ...]:
    """For each GPU whose kernels mostly run on others too; nothing where fewer than two do.

    Args:
        gpus: all of them.
        steps: the steps to compare, in which each GPU's own count; the whole of the trace if none.
    """
    operations = gpus.operations
    if len(operations) < 2:
        return ()
    steps_of = StepsOf(steps)
    edges = [_ratio_edges(steps_of(own.gpu)) for own in operations]
    _, names = same_names(gpus, [own.computing for own in operations])
    launches = gpus.each(_typical, operations, edges, names)
    keys = distinct_ids(np.concatenate([own.keys for own in launches]))
    table = _ratio_table(keys, [(own.keys, own.lengths) for own in launches])
    shared = _shared(table)
    whole = np.nansum(table, axis=1)
    compared = np.nansum(shared, axis=1)
    alone = _shared(_ratio_table(keys, [(own.keys, own.alone) for own in launches]))
    enough = compared > _LEAST_SHARE * np.maximum(whole, 1)
    if enough.sum() < 2:
        return ()
    often = np.nansum(alone, axis=1) > _ALONE * compared
    told = alone if often[enough].all() else shared
    usual = np.nanmedian(told, axis=0)
    quartiles = np.stack([_quartiles(row, usual) for row in told[enough]])
    fastest = quartiles[:, 1].min()
    return tuple(
        KernelRatio(
            gpu=operations[index].gpu,
            ratio=float(middle / fastest),
            low=float(low / fastest),
            high=float(high / fastest),
            launches=int(np.isfinite(shared[index]).sum()),
            compared_ns=round(float(compared[index])),
            own_ns=round(float(whole[index] - compared[index])),
        )
        for index, (low, middle, high) in zip(
            np.flatnonzero(enough).tolist(), quartiles.tolist(), strict=True
        )
    )


def _ratio_table(
    keys: NDArray[np.int64], rows: Sequence[tuple[NDArray[np.int64], Floats]]
) -> NDArray[np.float64]:
    """A row a GPU and a column a key; NaN where the GPU has no such launch."""
    table = np.full((len(rows), len(keys)), np.nan)
    for row, (own, lengths) in zip(table, rows, strict=True):
        row[np.searchsorted(keys, own)] = lengths
    return table


def _shared(table: Floats) -> Floats:
    """The columns of which several GPUs have something."""
    found: Floats = table[:, np.isfinite(table).sum(axis=0) > 1]
    return found


def _kernels(own: GpuOperations) -> Mask:
    """The rows of kernels that compute."""
    compute = own.classes == OperationClass.COMPUTE
    found: Mask = compute & (own.events.kind == Kind.KERNEL)
    return found


def _ratio_edges(steps: Sequence[Step]) -> tuple[Times, Times]:
    """Starts and ends."""
    edges = np.array([(step.start_ns, step.end_ns) for step in steps], np.int64).reshape(-1, 2)
    return edges[:, 0], edges[:, 1]


def _typical(one: GpuShardView, steps: tuple[Times, Times], names: dict[int, int]) -> _Launches:
    """The median length of each launch over the steps that have it, if that is most of them."""
    own = one.operations
    rows = np.flatnonzero(_kernels(own))
    rows, step, count = _in_steps(own, rows, *steps)
    texts = _renumbered(own.events.name[rows], names)
    order = np.argsort(step << 32 | texts, kind="stable")  # The rows are in order of start.
    rows, step, texts = rows[order], step[order], texts[order]
    keys = texts << 32 | _places(step, texts)
    lengths = own.end[rows] - own.start[rows]
    free = _communication(own).within(own.start[rows], own.end[rows]) == 0
    order = np.lexsort((lengths, keys))
    keys, lengths, free = keys[order], lengths[order], free[order]
    distinct, medians = _medians(keys, lengths, count)
    some, unmixed = _medians(keys[free], lengths[free], count)
    alone = np.full(len(distinct), np.nan)
    alone[np.searchsorted(distinct, some)] = unmixed
    return _Launches(distinct, medians, alone)


def _communication(own: GpuOperations) -> Intervals:
    rows = own.classes == OperationClass.COMMUNICATION
    return union(own.start[rows], own.end[rows], is_sorted=True)


def _in_steps(
    own: GpuOperations, rows: NDArray[np.intp], start: Times, end: Times
) -> tuple[NDArray[np.intp], NDArray[np.intp], int]:
    """Rows that start within some of the steps, spread over all; the step of each; how many."""
    if not len(start):
        return rows, np.zeros(len(rows), np.intp), 1
    step = np.maximum(np.searchsorted(start, own.start[rows], "right") - 1, 0)
    inside = (own.start[rows] >= start[step]) & (own.start[rows] < end[step])
    rows, step = rows[inside], step[inside]
    apart = -(-len(rows) // _MOST_KERNELS)
    if apart > 1:
        chosen = step % apart == 0
        rows, step = rows[chosen], step[chosen]
    return rows, step, len(distinct_ids(step))


def _renumbered(ids: NDArray[np.int32], names: dict[int, int]) -> NDArray[np.int64]:
    known = np.array(sorted(names), np.int64)
    numbers = np.array([names[id] for id in known.tolist()], np.int64)
    found: NDArray[np.int64] = numbers[np.searchsorted(known, ids)] if len(ids) else numbers[:0]
    return found


def _places(step: NDArray[np.intp], texts: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many rows of the same step and text come before each, where equal ones are together."""
    count = len(step)
    first = np.ones(count, bool)
    first[1:] = (step[1:] != step[:-1]) | (texts[1:] != texts[:-1])
    begins = np.maximum.accumulate(np.where(first, np.arange(count), 0))
    return np.arange(count) - begins


def _medians(
    keys: NDArray[np.int64], lengths: Times, steps: int
) -> tuple[NDArray[np.int64], Floats]:
    """The keys of most steps, and the median length of each; both come in order of both."""
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    count = np.diff(first, append=len(keys))
    low, high = first + (count - 1) // 2, first + count // 2
    middle = lengths[low] / 2 + lengths[high] / 2
    often = 2 * count > steps
    return keys[first[often]], np.maximum(middle[often], 1.0)


def _quartiles(lengths: Floats, usual: Floats) -> Floats:
    """The quartiles of length by usual length, each launch as weighty as it usually is long."""
    known = np.isfinite(lengths)
    ratios, weights = lengths[known] / usual[known], usual[known]
    order = np.argsort(ratios)
    passed = np.cumsum(weights[order])
    at = np.searchsorted(passed, np.array(_QUARTILES) * passed[-1])
    found: Floats = ratios[order][np.minimum(at, len(order) - 1)]
    return found
