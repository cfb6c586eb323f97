"""Load of the GPUs side by side: what one has to do that the others have not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.execution import GpuShardView, PerGpu, same_names
from gputrace.analyzers.grouping import StepsOf, median_of_others, stretches
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import GpuOperations, OperationClass
from gputrace.model.events import Column, Kind, number_ids
from gputrace.model.intervals import Intervals, merge_touching, union
from gputrace.model.nvml import Nvml
from gputrace.model.results import Load, Step


def compare_loads(
    gpus: PerGpu,
    lanes: Sequence[LaneSummary],
    measured: Sequence[Step],
    memory: Mapping[int, int],
) -> tuple[Load, ...]:
    """Each GPU beside the others; nothing where there are not two.

    Args:
        gpus: these, and maybe others.
        lanes: of the GPUs to compare.
        measured: the steps that count; of a GPU that has none, its whole window does.
        memory: the most bytes in use, by index of the card.
    """
    if len(lanes) < 2:
        return ()
    works = find_works(gpus, lanes, measured)
    others = Others(works)
    extra = [more_than_others(work, place, others) for place, work in enumerate(works)]
    rows = zip(works, extra, alone(gpus, works, extra), strict=True)
    return tuple(_load(work, others, more, alone_ns, memory) for work, more, alone_ns in rows)


def most_memory(nvml: Nvml, lanes: Sequence[LaneSummary]) -> dict[int, int]:
    """The most bytes that were in use on each card while it worked, by its index.

    Of GPUs of several hosts nothing is said: their indices are not told apart.
    """
    if len({lane.gpu.host for lane in lanes}) > 1:
        return {}
    found = {}
    for lane in lanes:
        samples = nvml.samples.of(lane.gpu.host, lane.gpu.gpu)
        during = (samples.time >= lane.window.start) & (samples.time < lane.window.end)
        used = samples["memoryUsed"][during]
        used = used[~np.isnan(used)]
        if len(used) and lane.gpu.gpu_known:
            found[lane.gpu.gpu] = int(used.max())
    return found


def _load(
    work: Work, others: Others, extra: dict[int, int], alone_ns: int, memory: Mapping[int, int]
) -> Load:
    gpu, kernels = work.lane.gpu, work.kernels()
    only = [sort for sort in kernels if others.lack(sort)]
    copies = {f"{name}_ns": work.ns.get(sort_of(name), 0) for name in COPIES}
    copies |= {f"{name}_bytes": work.amount.get(sort_of(name), 0) for name in COPIES}
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
        extra_ns=by_name(extra),
        alone_ns=alone_ns,
        **copies,
    )


_MORE: Final = 1.2
"""So many times as much as any other GPU has is more than theirs."""
_LAUNCHES: Final = 0.5
"""Launches a step that a kernel must have more: what comes less often is not of every step."""
_AT_ONCE: Final = 256
"""Questions to GPUs that are asked together."""
_ALL_LAUNCHES: Final = 1.01
"""So many times the other GPUs' launches in all: else kernels took the place of others."""


def more_than_others(work: Work, place: int, others: Others) -> dict[int, int]:
    """Nanoseconds of the work, in all steps, that comes on top of any other GPU's; by sort."""
    found = {}
    for sort in work.amount:
        most, own = others.most(sort, place), work.each(sort)
        if own > _MORE * most and (sort < 0 or own - most >= _LAUNCHES):
            found[sort] = round(work.ns[sort] * (1 - most / own))
    kernels = [sort for sort in found if sort >= 0]
    room = _more_kernel_time(work, place, others)
    if kernels and sum(found[sort] for sort in kernels) > room:
        scale = room / sum(found[sort] for sort in kernels)
        found |= {sort: int(found[sort] * scale) for sort in kernels}
    return {sort: ns for sort, ns in found.items() if ns > 0}


def _more_kernel_time(work: Work, place: int, others: Others) -> int:
    """How much longer its kernels take in all than the middle one of the others' do.

    Nothing where it launches no more of them: libraries choose among kernels on each GPU for
    itself, so that one that only this GPU runs may stand for one that only the others run.
    """
    if work.launches(work.kernels()) / work.turns < _ALL_LAUNCHES * others.launches(place):
        return 0
    own = work.spent(work.kernels())
    return max(0, own - round(others.spent(place) * work.turns))


def by_name(extra: dict[int, int]) -> dict[str, int]:
    """The nanoseconds of extra work as ``kernels``, ``h2d``, ``d2h``, ``d2d``, ``peer``."""
    kernels = sum(ns for sort, ns in extra.items() if sort >= 0)
    return {"kernels": kernels} | {name: extra.get(sort_of(name), 0) for name in COPIES}


def alone(gpus: PerGpu, works: Sequence[Work], extra: Sequence[dict[int, int]]) -> list[int]:
    """Nanoseconds in all steps in which each GPU does extra work and no other does any of its own.

    A GPU that is inside a collective, or in a copy from or to another GPU, has nothing of its own.
    Waiting for its own data is no waiting for others.
    """
    found = [0] * len(works)
    having = [place for place, own in enumerate(extra) if own]
    busy = gpus.each(
        _doing,
        [works[place].lane for place in having],
        (works[place].windows for place in having),
        (works[place].numbers for place in having),
        (set(extra[place]) for place in having),
    )
    left = dict(zip(having, busy, strict=True))
    each = max(1, _AT_ONCE // max(len(having), 1))
    for first in range(1, len(works), each):
        left = {place: own for place, own in left.items() if len(own)}
        asked = [
            (place, works[(place + turn) % len(works)])
            for place in left
            for turn in range(first, min(first + each, len(works)))
        ]
        parts = gpus.each(
            _without_busy,
            [other.lane for _, other in asked],
            (other.windows for _, other in asked),
            (other.numbers for _, other in asked),
            (left[place] for place, _ in asked),
        )
        for (place, _), part in zip(asked, parts, strict=True):
            left[place] = left[place].intersection(part)
    for place, own in left.items():
        found[place] = min(own.total, sum(extra[place].values()))
    return found


def _doing(
    one: GpuShardView, windows: Intervals, numbers: Mapping[int, int], sorts: Collection[int]
) -> Intervals:
    """When a GPU does work of some sorts."""
    own = one.operations
    rows, sort = compared(own, windows, numbers)
    rows = rows[np.isin(sort, list(sorts))]
    return union(own.start[rows], own.end[rows]).intersection(windows)


def _without_busy(
    one: GpuShardView, windows: Intervals, numbers: Mapping[int, int], time: Intervals
) -> Intervals:
    """The time without that in which a GPU is at work of its own, or waits for its own data."""
    own = one.operations
    rows, sort = compared(own, windows, numbers)
    rows = rows[sort != sort_of("peer")]
    feeding = one.lane.causes.of["data_feeding"]
    return time.difference(merge_touching(union(own.start[rows], own.end[rows]), feeding))


class Others:
    """The largest and the middle of all GPUs but one, by that one's place among them."""

    def __init__(self, works: Sequence[Work]) -> None:
        """Takes at least two."""
        self._having = Counter(sort for work in works for sort in work.amount)
        self._first: dict[int, tuple[float, int]] = {}
        self._second: dict[int, float] = {}
        for place, work in enumerate(works):
            for sort in work.amount:
                self._note(sort, work.each(sort), place)
        kernels = [work.kernels() for work in works]
        turns = np.array([work.turns for work in works])
        counted = [work.launches(own) for work, own in zip(works, kernels, strict=True)]
        spent = [work.spent(own) for work, own in zip(works, kernels, strict=True)]
        self._launches = median_of_others(np.array(counted) / turns)
        self._spent = median_of_others(np.array(spent) / turns)

    def _note(self, sort: int, amount: float, place: int) -> None:
        most = self._first.get(sort, (0.0, -1))[0]
        if amount > most:
            self._first[sort], self._second[sort] = (amount, place), most
        else:
            self._second[sort] = max(self._second.get(sort, 0.0), amount)

    def most(self, sort: int, place: int) -> float:
        """The most of a sort that another GPU has in a step."""
        most, owner = self._first.get(sort, (0.0, -1))
        return self._second.get(sort, 0.0) if owner == place else most

    def lack(self, sort: int) -> bool:
        """Whether a sort that one GPU has is no other's."""
        return self._having[sort] == 1

    def launches(self, place: int) -> float:
        """The middle one's kernels in a step."""
        return float(self._launches[place])

    def spent(self, place: int) -> float:
        """The middle one's nanoseconds in kernels in a step."""
        return float(self._spent[place])


COPIES: Final = {
    "h2d": Kind.COPY_H2D,
    "d2h": Kind.COPY_D2H,
    "d2d": Kind.COPY_D2D,
    "peer": Kind.COPY_PEER,
}
"""Sorts of copies that are compared; a peer copy counts on both its GPUs."""


Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Work:
    """The kernels that do not communicate, and the copies, of one GPU.

    A sort of work is a kernel's number from 0 on, the same on all GPUs, or `sort_of` a copy.
    """

    lane: LaneSummary
    steps: int
    """How many steps it is of; 0 for the whole window."""
    windows: Intervals
    """These steps, or the whole window."""
    numbers: Mapping[int, int]
    """The kernels' numbers by name id."""
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
        """The number that totals are divided by for a mean."""
        return max(self.steps, 1)

    def each(self, sort: int) -> float:
        """The amount of a sort in a step."""
        return self.amount.get(sort, 0) / self.turns

    def kernels(self) -> list[int]:
        """The sorts that are kernels."""
        return [sort for sort in self.amount if sort >= 0]

    def launches(self, sorts: Iterable[int]) -> int:
        return sum(self.amount.get(sort, 0) for sort in sorts)

    def spent(self, sorts: Iterable[int]) -> int:
        """Nanoseconds in all steps."""
        return sum(self.ns.get(sort, 0) for sort in sorts)


def sort_of(copies: str) -> int:
    """The sort that one of `COPIES` is."""
    return -1 - COPIES[copies]


def find_works(gpus: PerGpu, lanes: Sequence[LaneSummary], measured: Sequence[Step]) -> list[Work]:
    """Counts the operations of some GPUs that start in their own measured steps."""
    _, numbers = same_names(gpus, [own.names for own in gpus.operations])
    numbers_of = dict(zip((own.gpu for own in gpus.operations), numbers, strict=True))
    steps_of = StepsOf(measured)
    steps = [steps_of(lane.gpu) for lane in lanes]
    windows = [stretches(own, lane.window) for lane, own in zip(lanes, steps, strict=True)]
    own_numbers = [numbers_of[lane.gpu] for lane in lanes]
    sums = gpus.each(_sum_up, lanes, windows, own_numbers)
    rows = zip(lanes, map(len, steps), windows, own_numbers, sums, strict=True)
    return [Work(lane, count, time, own, *found) for lane, count, time, own, found in rows]


_Sums = tuple[dict[int, int], dict[int, int], int, int]


def _sum_up(one: GpuShardView, windows: Intervals, numbers: Mapping[int, int]) -> _Sums:
    """The last four attributes of `Work`."""
    own, kinds = one.operations, one.operations.events.kind
    lengths = own.end - own.start
    rows, sort = compared(own, windows, numbers)
    amount = _sums(sort, np.where(sort < 0, own.events.bytes[rows], 1))
    talking = (kinds == Kind.KERNEL) & (own.classes == OperationClass.COMMUNICATION)
    talking &= windows.contains(own.start)
    from_host = lengths[kinds == Kind.COPY_H2D]
    return amount, _sums(sort, lengths[rows]), int(lengths[talking].sum()), int(from_host.sum())


def compared(
    operations: GpuOperations, windows: Intervals, numbers: Mapping[int, int]
) -> tuple[Rows, NDArray[np.int64]]:
    """The operations of a GPU that count, and the sort of each."""
    kinds = operations.events.kind
    copies = np.isin(kinds, list(COPIES.values()))
    count = copies | (operations.classes == OperationClass.COMPUTE)
    rows = np.flatnonzero(count & windows.contains(operations.start))
    copies, kinds = copies[rows], kinds[rows].astype(np.int64)
    return rows, np.where(copies, -1 - kinds, _numbered(operations.events.name[rows], numbers))


def _numbered(ids: NDArray[np.int32], numbers: Mapping[int, int]) -> NDArray[np.int64]:
    distinct, where = number_ids(ids)
    known = np.array([numbers.get(id, 0) for id in distinct.tolist()], np.int64)
    found: NDArray[np.int64] = known.take(where)
    return found


def _sums(keys: Column, values: Column) -> dict[int, int]:
    distinct, where = number_ids(keys)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, where, values)
    return dict(zip(distinct.tolist(), sums.tolist(), strict=True))


__all__ = ["compare_loads", "most_memory"]
