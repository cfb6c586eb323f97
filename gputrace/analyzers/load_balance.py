"""Comparison of GPUs: kernels and copies that one has and the others lack, and the speed of the
same kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, same_names
from gputrace.analyzers.grouping import (
    StepsOf,
    edges_of,
    median_of_known,
    median_of_others,
    overlap,
)
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import Gpu, GpuOperations, OperationClass
from gputrace.model.events import (
    Kind,
    Mask,
    distinct_ids,
    is_among,
    number_ids,
    sort_numbers,
)
from gputrace.model.intervals import Intervals, Times, merge_touching, number_windows, union
from gputrace.model.nvml import Nvml
from gputrace.model.options import Window
from gputrace.model.results import Load, Step
from gputrace.model.struct import Struct


def compare_loads(
    gpus: PerGpu, lanes: Sequence[LaneSummary], measured: Sequence[Step]
) -> tuple[Load, ...]:
    """Compare each GPU with the others; empty with fewer than two GPUs.

    Compares the measured steps; for a GPU without any, the time that all GPUs have in common.
    """
    if len(lanes) < 2:
        return ()
    memory = _most_memory(gpus.trace.nvml, lanes)
    works = find_works(gpus, lanes, measured)
    others = Others(works)
    extra = [more_than_others(work, index, others) for index, work in enumerate(works)]
    rows = zip(works, extra, alone(gpus, works, extra), strict=True)
    return tuple(_load(work, others, more, alone_ns, memory) for work, more, alone_ns in rows)


def _most_memory(nvml: Nvml, lanes: Sequence[LaneSummary]) -> dict[int, int]:
    """Return the peak bytes in use on each card while it worked, by its index.

    Empty for GPUs of several hosts, whose indices are ambiguous.
    """
    if len({lane.gpu.host for lane in lanes}) > 1:
        return {}
    most = {}
    for lane in lanes:
        samples = nvml.samples.of(lane.gpu.host, lane.gpu.gpu)
        during = (samples.time >= lane.window.start) & (samples.time < lane.window.end)
        used = samples["memoryUsed"][during]
        used = used[~np.isnan(used)]
        if len(used) and lane.gpu.gpu_known:
            most[lane.gpu.gpu] = int(used.max())
    return most


def _load(
    work: GpuWork, others: Others, extra: dict[int, int], alone_ns: int, memory: Mapping[int, int]
) -> Load:
    gpu, kernels = work.lane.gpu, work.kernels()
    only = [sort for sort in kernels if others.lack(sort)]
    copies = {f"{name}_ns": work.ns.get(sort_of(name), 0) for name in COPIES}
    copies |= {f"{name}_bytes": work.amount.get(sort_of(name), 0) for name in COPIES}
    extra_ns = {"kernels": sum(ns for sort, ns in extra.items() if sort >= 0)}
    extra_ns |= {name: extra.get(sort_of(name), 0) for name in COPIES}
    return Load(
        gpu=gpu.gpu,
        rank=gpu.rank,
        steps=work.steps,
        kernels=work.launches(kernels),
        kernel_ns=work.spent(kernels),
        own_kernels=work.launches(only),
        own_kernel_ns=work.spent(only),
        communication_ns=work.communication_ns,
        h2d_run_ns=work.h2d_run_ns,
        memory_bytes=memory.get(gpu.gpu),
        extra_ns=extra_ns,
        alone_ns=alone_ns,
        **copies,
    )


_MORE_WORK_RATIO: Final = 1.2
"""Minimum ratio to the amount of any other GPU that counts as more."""
_EXTRA_LAUNCHES: Final = 0.5
"""Minimum surplus of launches of a kernel per step: rarer ones are not part of every step."""
_GPUS_AT_ONCE: Final = 256
"""Maximum number of queries to GPUs in one batch."""
_ALL_LAUNCHES_RATIO: Final = 1.01
"""Minimum ratio of all launches to the other GPUs': below, kernels only replace others."""


def more_than_others(work: GpuWork, index: int, others: Others) -> dict[int, int]:
    """Return the nanoseconds of work, in all steps, beyond that of any other GPU; by sort.

    Kernels count only as far as all kernels together take longer than the median of the other
    GPUs, and not at all where a GPU launches no more of them: libraries select kernels on each GPU
    separately, so one that only this GPU runs may replace one that only the others run.
    """
    extra = {}
    for sort in work.amount:
        highest, amount = others.most(sort, index), work.each(sort)
        if amount > _MORE_WORK_RATIO * highest and (
            sort < 0 or amount - highest >= _EXTRA_LAUNCHES
        ):
            extra[sort] = round(work.ns[sort] * (1 - highest / amount))
    kernels, of_extra = work.kernels(), [sort for sort in extra if sort >= 0]
    room, total = 0, sum(extra[sort] for sort in of_extra)
    if work.launches(kernels) / work.turns >= _ALL_LAUNCHES_RATIO * others.launches[index]:
        room = max(0, work.spent(kernels) - round(others.spent[index] * work.turns))
    if total > room:
        scale = room / total
        extra |= {sort: int(extra[sort] * scale) for sort in of_extra}
    return {sort: ns for sort, ns in extra.items() if ns > 0}


def alone(gpus: PerGpu, works: Sequence[GpuWork], extra: Sequence[dict[int, int]]) -> list[int]:
    """Return the nanoseconds, in all steps, of extra work of each GPU while all others do no work.

    Collectives and copies from or to another GPU do not count as work of a GPU; waiting for its
    input data does, unless that mostly ends as the GPU with the extra work stops: ranks that meet
    on their hosts, as with MPI, wait for the busiest of them.
    """
    alone_ns = [0] * len(works)
    with_extra = [index for index, time in enumerate(extra) if time]
    busy = gpus.each(
        _doing,
        [works[index].lane for index in with_extra],
        (works[index].windows for index in with_extra),
        (works[index].numbers for index in with_extra),
        (set(extra[index]) for index in with_extra),
    )
    left = dict(zip(with_extra, busy, strict=True))
    lanes = [works[index].lane for index in with_extra]
    stops = dict(zip(with_extra, gpus.each(_stops, lanes), strict=True))
    batch = max(1, _GPUS_AT_ONCE // max(len(with_extra), 1))
    for first in range(1, len(works), batch):
        left = {index: time for index, time in left.items() if len(time)}
        queries = [
            (index, works[(index + distance) % len(works)])
            for index in left
            for distance in range(first, min(first + batch, len(works)))
        ]
        parts = gpus.each(
            _without_busy,
            [other.lane for _, other in queries],
            (other.windows for _, other in queries),
            (other.numbers for _, other in queries),
            (left[index] for index, _ in queries),
            (stops[index] for index, _ in queries),
        )
        for (index, _), part in zip(queries, parts, strict=True):
            left[index] = left[index].intersection(part)
    for index, time in left.items():
        alone_ns[index] = min(time.total, sum(extra[index].values()))
    return alone_ns


def _doing(
    view: GpuShardView, windows: Intervals, numbers: Mapping[int, int], sorts: Collection[int]
) -> Intervals:
    """Return when a GPU does work of some sorts."""
    operations = view.operations
    rows, sort = compared(operations, windows, numbers)
    rows = rows[np.isin(sort, list(sorts))]
    return union(operations.start[rows], operations.end[rows]).intersection(windows)


_PAUSE_NS: Final = 10_000
"""Minimum idle time of a GPU that has stopped."""
_STOPS_A_WAIT: Final = 4
"""Maximum number of stops for each wait: more come before any moment by chance."""
_ENDING_WAITS_PART: Final = 0.8
"""Part of the waits that must end as another GPU stops to be waits for that."""
_FEWEST_ENDING_WAITS: Final = 5
"""Minimum number of such waits."""
_LAG: Final = 0.1
_LAG_NS: Final = 100_000
"""Maximum time from then to their end, as a fraction of them, or in nanoseconds if that is more."""


def _stops(view: GpuShardView) -> Times:
    """Return the moments from which a GPU does nothing for a while."""
    operations = view.operations
    busy = union(operations.start, operations.end + _PAUSE_NS)
    return busy.end - _PAUSE_NS


def _feeding(view: GpuShardView, time: Intervals, stops: Times) -> Intervals:
    """Return when a GPU waits for its input data, and not for another one that stops then."""
    feeding = view.lane.causes.of["data_feeding"]
    touched = (time.within(feeding.start, feeding.end) > 0) & (feeding.lengths >= _LAG_NS)
    if touched.sum() < _FEWEST_ENDING_WAITS or not 0 < len(stops) <= _STOPS_A_WAIT * touched.sum():
        return feeding
    last = stops[np.maximum(np.searchsorted(stops, feeding.end, "right") - 1, 0)]
    lag = feeding.end - last
    follows = touched & (lag >= 0) & (lag <= np.maximum(_LAG * feeding.lengths, _LAG_NS))
    if follows.sum() < _ENDING_WAITS_PART * touched.sum():
        return feeding
    return union(feeding.start[~follows], feeding.end[~follows])


def _without_busy(
    view: GpuShardView,
    windows: Intervals,
    numbers: Mapping[int, int],
    time: Intervals,
    stops: Times,
) -> Intervals:
    """Return ``time`` without that in which a GPU works, or waits for its input data."""
    operations = view.operations
    rows, sort = compared(operations, windows, numbers)
    rows = rows[sort != sort_of("peer")]
    feeding = _feeding(view, time, stops)
    return time.difference(
        merge_touching(union(operations.start[rows], operations.end[rows]), feeding)
    )


class Others:
    """Maximum and median over all GPUs but one, by the index of that one."""

    def __init__(self, works: Sequence[GpuWork]) -> None:
        """Summarize the work of at least two GPUs."""
        of_sort = defaultdict[int, list[tuple[float, int]]](list)
        for index, work in enumerate(works):
            for sort in work.amount:
                of_sort[sort].append((work.each(sort), index))
        self._two_most = {sort: nlargest(2, amounts) for sort, amounts in of_sort.items()}
        turns = np.array([work.turns for work in works])
        launches = np.array([work.launches(work.kernels()) for work in works])
        spent = np.array([work.spent(work.kernels()) for work in works])
        self.launches: list[float] = median_of_others(launches / turns).tolist()
        """Median number of kernels per step."""
        self.spent: list[float] = median_of_others(spent / turns).tolist()
        """Median nanoseconds of kernels per step."""

    def most(self, sort: int, index: int) -> float:
        """Return the maximum of a sort per step on another GPU."""
        two = self._two_most.get(sort, ())
        return next((amount for amount, owner in two if owner != index), 0.0)

    def lack(self, sort: int) -> bool:
        """Return True if only one GPU has a sort."""
        return len(self._two_most.get(sort, ())) == 1


COPIES: Final = {
    "h2d": Kind.COPY_H2D,
    "d2h": Kind.COPY_D2H,
    "d2d": Kind.COPY_D2D,
    "peer": Kind.COPY_PEER,
}
"""Kinds of copies that are compared; a peer copy counts on both its GPUs."""


Rows = NDArray[np.intp]


class GpuWork(Struct, frozen=True, dict=True):
    """Compute kernels and copies of one GPU.

    A sort of work is the number of a kernel, from 0 and the same on all GPUs, or `sort_of` a copy.
    """

    lane: LaneSummary
    steps: int
    """Number of steps; 0 for the time that all GPUs have in common."""
    windows: Intervals
    """Windows of these steps, or that time."""
    numbers: Mapping[int, int]
    """Numbers of the kernels by name id."""
    amount: Mapping[int, int]
    """Launches, or bytes, in all steps; by sort."""
    ns: Mapping[int, int]
    """Nanoseconds in all steps; by sort."""
    communication_ns: int
    """Nanoseconds of kernels that communicate, in all steps."""
    h2d_run_ns: int
    """Nanoseconds of copies from the host in the whole trace."""

    @property
    def turns(self) -> int:
        """Return the divisor of totals for the mean per step."""
        return max(self.steps, 1)

    def each(self, sort: int) -> float:
        """Return the amount of a sort per step."""
        return self.amount.get(sort, 0) / self.turns

    def kernels(self) -> list[int]:
        """Return the sorts that are kernels."""
        return [sort for sort in self.amount if sort >= 0]

    def launches(self, sorts: Iterable[int]) -> int:
        return sum(self.amount.get(sort, 0) for sort in sorts)

    def spent(self, sorts: Iterable[int]) -> int:
        """Return the nanoseconds of some sorts in all steps."""
        return sum(self.ns.get(sort, 0) for sort in sorts)


def sort_of(copies: str) -> int:
    """Return the sort of one of `COPIES`."""
    return -1 - COPIES[copies]


def find_works(
    gpus: PerGpu, lanes: Sequence[LaneSummary], measured: Sequence[Step]
) -> list[GpuWork]:
    """Count the operations of some GPUs that start in their measured steps."""
    _, numbers = same_names(gpus, [summary.names for summary in gpus.operations])
    numbers_of = dict(zip((summary.gpu for summary in gpus.operations), numbers, strict=True))
    steps_of = StepsOf(measured)
    shared = overlap([lane.window for lane in lanes])
    windows = [steps_of.time(lane.gpu, shared) for lane in lanes]
    by_lane = [numbers_of[lane.gpu] for lane in lanes]
    sums = gpus.each(_sum_up, lanes, windows, by_lane)
    rows = zip(lanes, windows, by_lane, sums, strict=True)
    return [
        GpuWork(lane, len(steps_of(lane.gpu)), window, ids, *totals)
        for lane, window, ids, totals in rows
    ]


_Sums = tuple[dict[int, int], dict[int, int], int, int]


def _sum_up(view: GpuShardView, windows: Intervals, numbers: Mapping[int, int]) -> _Sums:
    """Return the last four attributes of `GpuWork`."""
    operations, kinds = view.operations, view.operations.events.kind
    lengths = operations.end - operations.start
    rows, sort = compared(operations, windows, numbers)
    ids, number = number_ids(sort)
    amounts = np.where(sort < 0, operations.events.bytes[rows], 1)
    talks = (kinds == Kind.KERNEL) & (operations.classes == OperationClass.COMMUNICATION)
    talking = np.flatnonzero(talks)
    talking = talking[windows.contains(operations.start[talking])]
    from_host = lengths[kinds == Kind.COPY_H2D]
    totals = np.zeros((2, len(ids)), np.int64)
    for total, each in zip(totals, (amounts, lengths[rows]), strict=True):
        np.add.at(total, number, each)
    amount, ns = (dict(zip(ids.tolist(), total.tolist(), strict=True)) for total in totals)
    return amount, ns, int(lengths[talking].sum()), int(from_host.sum())


def compared(
    operations: GpuOperations, windows: Intervals, numbers: Mapping[int, int]
) -> tuple[Rows, NDArray[np.int64]]:
    """Return the rows of the operations of a GPU that are compared, and the sort of each."""
    kinds = operations.events.kind
    copies = is_among(kinds, COPIES.values())
    count = copies | (operations.classes == OperationClass.COMPUTE)
    rows = np.flatnonzero(count & windows.contains(operations.start))
    ids, inverse = number_ids(operations.events.name[rows])
    known = np.array([numbers.get(id, 0) for id in ids.tolist()], np.int64)
    return rows, np.where(copies[rows], -1 - kinds[rows].astype(np.int64), known.take(inverse))


_MOST_KERNELS: Final = 40_000
"""Maximum number of compared kernels of one GPU, which limits the number of compared steps."""
_COMPARED_PART: Final = 0.5
"""Minimum fraction of a GPU's kernel time in kernels that others run too."""
_ALONE_PART: Final = 0.1
"""Minimum fraction of the compared time in launches without concurrent communication, for the ratio
to be based on these only."""
_QUARTILES: Final = (0.25, 0.5, 0.75)

_Floats = NDArray[np.float64]


class KernelRatio(Struct, frozen=True):
    """Kernel time of one GPU relative to the fastest, without communication kernels, which wait."""

    gpu: Gpu
    ratio: float
    """Median time ratio to the fastest GPU over equal launches, weighted by their time; 1.0 is the
    fastest."""
    low: float
    high: float
    """Quartiles of that ratio: a lower clock slows all kernels alike, larger batches only some."""
    mean: float
    """Ratio of the times of all equal launches; 1.0 is the fastest. Of a GPU that is slow in bursts
    it is larger than the median."""
    launches: int
    """Number of compared launches per step."""
    compared_ns: int
    """Time of the compared launches per step."""
    own_ns: int
    """Time per step of kernels that no other GPU runs, or not as often."""


class _Launches(Struct, frozen=True, dict=True):
    """Launches of one GPU in a typical step, with median durations."""

    keys: NDArray[np.int64]
    """Number of the name (upper 32 bits), and of the launch of that name in the step (lower)."""
    lengths: _Floats
    alone: _Floats
    """Median of the launches without concurrent communication; NaN where these are the minority."""


def kernel_ratios(gpus: PerGpu, steps: Sequence[Step]) -> tuple[KernelRatio, ...]:
    """Compare the kernel speed of the GPUs whose kernels mostly run on others; none of only one.

    Without steps, the whole trace is compared.
    """
    operations = gpus.operations
    if len(operations) < 2:
        return ()
    steps_of = StepsOf(steps)
    together = overlap([summary.span for summary in operations])
    edges = [
        edges_of(steps_of(summary.gpu)) if steps else _compared_time(summary.span, together)
        for summary in operations
    ]
    _, names = same_names(gpus, [summary.computing for summary in operations])
    launches = gpus.each(_typical_launches, operations, edges, names)
    keys = distinct_ids(np.concatenate([typical.keys for typical in launches]))
    table = _ratio_table(keys, [(typical.keys, typical.lengths) for typical in launches])
    shared = _shared(table)
    whole = np.nansum(table, axis=1)
    compared = np.nansum(shared, axis=1)
    unmixed = _shared(_ratio_table(keys, [(typical.keys, typical.alone) for typical in launches]))
    enough = compared > _COMPARED_PART * np.maximum(whole, 1)
    if enough.sum() < 2:
        return ()
    often_alone = np.nansum(unmixed, axis=1) > _ALONE_PART * compared
    lengths = unmixed if often_alone[enough].all() else shared
    rows, usual = lengths[enough], median_of_known(lengths)
    quartiles = np.stack([_quartiles(row, usual) for row in rows])
    fastest = quartiles[:, 1].min()
    means = np.nansum(rows, axis=1) / np.where(np.isfinite(rows), usual, 0).sum(axis=1)
    return tuple(
        KernelRatio(
            gpu=operations[index].gpu,
            ratio=float(middle / fastest),
            low=float(low / fastest),
            high=float(high / fastest),
            mean=float(mean / means.min()),
            launches=int(np.isfinite(shared[index]).sum()),
            compared_ns=round(float(compared[index])),
            own_ns=round(float(whole[index] - compared[index])),
        )
        for index, (low, middle, high), mean in zip(
            np.flatnonzero(enough).tolist(), quartiles.tolist(), means.tolist(), strict=True
        )
    )


def _ratio_table(
    keys: NDArray[np.int64], rows: Sequence[tuple[NDArray[np.int64], _Floats]]
) -> NDArray[np.float64]:
    """Return durations of shape (GPUs, keys); NaN where the GPU has no such launch."""
    table = np.full((len(rows), len(keys)), np.nan)
    for row, (row_keys, lengths) in zip(table, rows, strict=True):
        row[np.searchsorted(keys, row_keys)] = lengths
    return table


def _shared(table: _Floats) -> _Floats:
    """Return the columns that several GPUs have."""
    return table[:, np.isfinite(table).sum(axis=0) > 1]


_UNEVEN_SPAN_PART: Final = 0.1
"""Part by which a GPU's span must exceed the time that all have in common to be cut to it."""


def _compared_time(span: Window, together: Window) -> NDArray[np.int64]:
    """Return the time of a GPU that is compared without steps: shape (2, 1).

    That is all of it, unless another GPU began much later or ended much earlier.
    """
    uneven = span.end - span.start > (1 + _UNEVEN_SPAN_PART) * (together.end - together.start)
    return np.array([together if uneven else span], np.int64).T


def _typical_launches(
    view: GpuShardView, steps: NDArray[np.int64], names: dict[int, int]
) -> _Launches:
    """Return the median duration of each launch that most steps have."""
    operations = view.operations
    computes = operations.classes == OperationClass.COMPUTE
    rows = np.flatnonzero(computes & (operations.events.kind == Kind.KERNEL))
    rows, step, count = _in_steps(operations, rows, *steps)
    ids, where = number_ids(operations.events.name[rows])
    texts = np.array([names[id] for id in ids.tolist()], np.int64).take(where)
    order, places = number_launches(step, texts)
    rows, texts = rows[order], texts[order]
    lengths = operations.end[rows] - operations.start[rows]
    talks = operations.classes == OperationClass.COMMUNICATION
    busy = union(operations.start[talks], operations.end[talks], is_sorted=True)
    free = busy.within(operations.start[rows], operations.end[rows]) == 0
    keys, lengths, free = _sorted(texts, places, lengths, free)
    distinct, medians = _medians(keys, lengths, count)
    some, unmixed = _medians(keys[free], lengths[free], count)
    alone = np.full(len(distinct), np.nan)
    alone[np.searchsorted(distinct, some)] = unmixed
    return _Launches(distinct, medians, alone)


def number_launches(
    step: NDArray[np.intp], names: NDArray[np.int64]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the order of launches by step and name, and the number of each, in that order, among
    those of its step and name, from 0; the rows are in order of start.
    """
    order = np.argsort(step << 32 | names, kind="stable")
    step, names = step[order], names[order]
    first = np.ones(len(order), np.bool_)
    first[1:] = (step[1:] != step[:-1]) | (names[1:] != names[:-1])
    number = np.arange(len(order))
    return order, number - np.maximum.accumulate(np.where(first, number, 0))


def _sorted(
    texts: NDArray[np.int64], places: NDArray[np.int64], lengths: Times, free: Mask
) -> tuple[NDArray[np.int64], Times, Mask]:
    """Return the keys of launches, their lengths, and which are free, in order of key and length.

    Numbers that hold all three are sorted at once, which takes a tenth of sorting by two.
    """
    most, bits = int(places.max(initial=0)) + 1, int(lengths.max(initial=0)).bit_length() + 1
    if (int(texts.max(initial=0)) + 1) * most << bits > np.iinfo(np.int64).max:
        keys = texts << 32 | places
        order = np.lexsort((lengths, keys))
        return keys[order], lengths[order], free[order]
    packed = (texts * most + places) << bits | lengths << 1 | free
    sort_numbers(packed)
    text, place = np.divmod(packed >> bits, most)
    return text << 32 | place, packed >> 1 & (1 << bits - 1) - 1, packed & 1 == 1


def _in_steps(
    operations: GpuOperations, rows: NDArray[np.intp], start: Times, end: Times
) -> tuple[NDArray[np.intp], NDArray[np.intp], int]:
    """Sample rows in evenly spread steps; return them, their steps, and the number of steps."""
    if not len(start):
        return rows, np.zeros(len(rows), np.intp), 1
    step = number_windows(operations.start, start, end)[rows]
    inside = step >= 0
    rows, step = rows[inside], step[inside]
    stride = -(-len(rows) // _MOST_KERNELS)
    if stride > 1:
        chosen = step % stride == 0
        rows, step = rows[chosen], step[chosen]
    return rows, step, len(distinct_ids(step))


def _medians(
    keys: NDArray[np.int64], lengths: Times, steps: int
) -> tuple[NDArray[np.int64], _Floats]:
    """Return the keys that most steps have, and their median lengths; input sorted by both."""
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    count = np.diff(first, append=len(keys))
    low, high = first + (count - 1) // 2, first + count // 2
    middle = lengths[low] / 2 + lengths[high] / 2
    often = 2 * count > steps
    return keys[first[often]], np.maximum(middle[often], 1.0)


def _quartiles(lengths: _Floats, usual: _Floats) -> _Floats:
    """Return the quartiles of length by usual length, weighted by usual length."""
    known = np.isfinite(lengths)
    ratios, weights = lengths[known] / usual[known], usual[known]
    order = np.argsort(ratios)
    passed = np.cumsum(weights[order])
    at = np.searchsorted(passed, np.array(_QUARTILES) * passed[-1])
    quartiles: _Floats = ratios[order][np.minimum(at, len(order) - 1)]
    return quartiles
