"""The kernels of the measured steps by name, and what each family of them takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.host import HostCalls
from gputrace.analyzers.intervals import Times, union
from gputrace.analyzers.kernels.families import converts_layout, family_of
from gputrace.analyzers.kernels.launches import MOST_LOOKED_AT, launch_cost
from gputrace.analyzers.kernels.naming import short_name
from gputrace.analyzers.kernels.tensorcores import generation, on_tensor_cores, precision_of
from gputrace.analyzers.operations import ByGpu, GpuOperations
from gputrace.analyzers.results import Step
from gputrace.analyzers.results.kernels import (
    Family,
    KernelOnGpu,
    Kernels,
    KernelUse,
    Product,
)
from gputrace.traces.events import Kind
from gputrace.traces.ids import distinct_ids, number_ids
from gputrace.traces.trace import Trace

_MOST: Final = 50
_MOST_OF_FIRST_GPU: Final = 20
_STRAY: Final = 0.01
"""A GPU with a smaller part of the busiest one's kernels does not count."""
_LENGTH_BITS: Final = 40
"""A kernel's nanoseconds fit in so many bits: 18 minutes."""
_LONGEST: Final = (1 << _LENGTH_BITS) - 1


@dataclass(frozen=True)
class _Launches:
    """The kernels of one GPU that start in its measured time."""

    lane: Lane
    steps: int
    measured_ns: int
    some: NDArray[np.intp]
    """Rows of the GPU's operations, of kernels evenly taken from all."""
    packed: NDArray[np.int64]
    """The place of each one's name among all names, and in the lower bits its length; in order."""

    @property
    def lengths(self) -> Times:
        """Nanoseconds of each, in no order that means anything."""
        return self.packed & _LONGEST


def count_kernels(
    trace: Trace,
    operations: Sequence[GpuOperations],
    lanes: Sequence[Lane],
    measured: Sequence[Step],
    calls: HostCalls | None,
) -> Kernels | None:
    """The kernels that start in the measured steps, or in the lanes' windows where there are none.

    Of the GPUs that do the work; None where no kernel does.
    """
    names, place = _names(trace, operations)
    by_gpu = ByGpu(operations)
    steps_of = StepsOf(measured)
    found = [_launches(by_gpu[lane.gpu], lane, steps_of(lane.gpu), place) for lane in lanes]
    found = _that_count(found)
    if not found:
        return None
    span = sum(own.measured_ns for own in found)
    uses = _uses(names, found, span)
    top, rest = uses[:_MOST], uses[_MOST:]
    cards = [generation(own.lane.gpu.name, names) for own in found]
    return Kernels(
        steps=sum(own.steps for own in found),
        total_ns=span,
        count=sum(use.count for use in uses),
        distinct=len(uses),
        top=tuple(top),
        rest_count=sum(use.count for use in rest),
        rest_ns=sum(use.total_ns for use in rest),
        families=tuple(_families(uses, span)),
        products=tuple(_products(uses, span)),
        has_tensor_cores=_all_have(cards, 7),
        has_tf32=_all_have(cards, 8),
        first_gpu_only=tuple(_of_first_gpu(uses, [own.lane for own in found])),
        launches=launch_cost(
            ((by_gpu[own.lane.gpu], own.lengths, own.some) for own in found), calls
        ),
    )


def _that_count(found: Sequence[_Launches]) -> list[_Launches]:
    """Those of GPUs that have measured steps, if any has, and do more than next to nothing."""
    if any(own.steps for own in found):
        found = [own for own in found if own.steps]
    most = max((len(own.packed) for own in found), default=0)
    return [own for own in found if len(own.packed) and len(own.packed) >= _STRAY * most]


def _names(trace: Trace, operations: Sequence[GpuOperations]) -> tuple[list[str], dict[int, int]]:
    """The kernels' names, each once, and which of them each name id is."""
    kernels = [own.events.name[own.events.kind == Kind.KERNEL] for own in operations]
    text = trace.names(distinct_ids(np.concatenate(kernels)))
    names = list(dict.fromkeys(text.values()))
    place = {name: index for index, name in enumerate(names)}
    return names, {id: place[name] for id, name in text.items()}


def _launches(
    own: GpuOperations, lane: Lane, steps: Sequence[Step], place: dict[int, int]
) -> _Launches:
    starts = [step.start_ns for step in steps] or [lane.window.start]
    ends = [step.end_ns for step in steps] or [lane.window.end]
    windows = union(starts, ends)
    rows = np.flatnonzero((own.events.kind == Kind.KERNEL) & windows.contains(own.start))
    distinct, where = number_ids(own.events.name[rows])
    packed = np.array([place[id] << _LENGTH_BITS for id in distinct.tolist()], np.int64).take(where)
    packed |= np.minimum(own.end[rows] - own.start[rows], _LONGEST)
    packed.sort()
    some = rows[:: len(rows) // MOST_LOOKED_AT + 1].copy()
    return _Launches(lane, len(steps), windows.total, some, packed)


def _uses(names: Sequence[str], found: Sequence[_Launches], span: int) -> list[KernelUse]:
    """Every kernel, by its time, most first."""
    packed = np.concatenate([own.packed for own in found])
    packed.sort()
    by_gpu: dict[int, list[KernelOnGpu]] = defaultdict(list)
    for own in found:
        gpu = own.lane.gpu
        for code, count, total, median in _counted(own.packed):
            by_gpu[code].append(KernelOnGpu(gpu.gpu, gpu.rank, count, total, median))
    uses = [
        _use(names[code], count, total, median, total / max(span, 1), by_gpu[code])
        for code, count, total, median in _counted(packed)
    ]
    return sorted(uses, key=lambda use: (-use.total_ns, use.name))


def _use(
    name: str, count: int, total: int, median: int, share: float, by_gpu: list[KernelOnGpu]
) -> KernelUse:
    family = family_of(name)
    return KernelUse(
        name=name,
        short=short_name(name),
        family=family,
        tensor_cores=on_tensor_cores(name, family),
        converts_layout=converts_layout(name),
        count=count,
        total_ns=total,
        median_ns=median,
        share=round(share, 6),
        by_gpu=tuple(by_gpu),
    )


def _counted(packed: NDArray[np.int64]) -> Iterable[tuple[int, int, int, int]]:
    """Of each place of a name: how often, nanoseconds in all, and the (lower) median.

    Overwrites what it is given with the lengths: copies of all launches would take much memory.
    """
    if not len(packed):
        return []
    last = int(packed[-1]) >> _LENGTH_BITS
    edges = np.searchsorted(packed, np.arange(last + 2) << _LENGTH_BITS)
    places = np.flatnonzero(np.diff(edges))
    first, counts = edges[places], np.diff(edges)[places]
    lengths = np.bitwise_and(packed, _LONGEST, out=packed)
    totals = np.add.reduceat(lengths, first)
    medians = lengths[first + (counts - 1) // 2]
    columns = (places, counts, totals, medians)
    return zip(*(column.tolist() for column in columns), strict=True)


def _families(uses: Sequence[KernelUse], span: int) -> list[Family]:
    return [
        Family(family, count, total, round(total / max(span, 1), 6))
        for (family,), count, total in _summed(uses, lambda use: (use.family,))
    ]


def _products(uses: Sequence[KernelUse], span: int) -> list[Product]:
    multiplying = [use for use in uses if use.tensor_cores is not None]

    def sort(use: KernelUse) -> tuple[str, ...]:
        return use.tensor_cores or "", precision_of(use.name)

    return [
        Product(cores, precision, count, total, round(total / max(span, 1), 6))
        for (cores, precision), count, total in _summed(multiplying, sort)
    ]


def _summed(
    uses: Sequence[KernelUse], key: Callable[[KernelUse], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], int, int]]:
    """Launches and nanoseconds by a key, most time first."""
    sums: dict[tuple[str, ...], list[int]] = {}
    for use in uses:
        own = sums.setdefault(key(use), [0, 0])
        own[0] += use.count
        own[1] += use.total_ns
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    return [(name, count, total) for name, (count, total) in ordered]


def _all_have(cards: Sequence[int | None], least: int) -> bool | None:
    known = [card for card in cards if card is not None]
    if any(card < least for card in known):
        return False
    return True if len(known) == len(cards) else None


def _of_first_gpu(uses: Sequence[KernelUse], lanes: Sequence[Lane]) -> list[KernelUse]:
    """Kernels that of several GPUs only the first one runs."""
    if len(lanes) < 2:
        return []
    first = lanes[0].gpu.gpu, lanes[0].gpu.rank
    alone = [use for use in uses if {(own.gpu, own.rank) for own in use.by_gpu} == {first}]
    return alone[:_MOST_OF_FIRST_GPU]
