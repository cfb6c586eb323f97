"""The kernels of the measured steps by name, and what each family of them takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.classes import distinct_ids
from gputrace.analyzers.host import HostCalls
from gputrace.analyzers.intervals import Times, union
from gputrace.analyzers.kernels.families import converts_layout, family_of
from gputrace.analyzers.kernels.launches import launch_cost
from gputrace.analyzers.kernels.naming import short_name
from gputrace.analyzers.kernels.tensorcores import generation, on_tensor_cores, precision_of
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.results import Step
from gputrace.analyzers.results.kernels import (
    Family,
    KernelOnGpu,
    Kernels,
    KernelUse,
    Product,
)
from gputrace.traces.events import Kind
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
    rows: NDArray[np.intp]
    code: NDArray[np.int64]
    """Place of each one's name among all names."""
    length: Times


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
    by_gpu = {(own.gpu.gpu, own.gpu.rank): own for own in operations}
    found = [
        _launches(by_gpu[lane.gpu.gpu, lane.gpu.rank], lane, measured, place) for lane in lanes
    ]
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
        launches=launch_cost(by_gpu, [(own.lane, own.rows) for own in found], calls),
    )


def _that_count(found: Sequence[_Launches]) -> list[_Launches]:
    """Those of GPUs that have measured steps, if any has, and do more than next to nothing."""
    if any(own.steps for own in found):
        found = [own for own in found if own.steps]
    most = max((len(own.rows) for own in found), default=0)
    return [own for own in found if len(own.rows) and len(own.rows) >= _STRAY * most]


def _names(trace: Trace, operations: Sequence[GpuOperations]) -> tuple[list[str], dict[int, int]]:
    """The kernels' names, each once, and which of them each name id is."""
    kernels = [own.events.name[own.events.kind == Kind.KERNEL] for own in operations]
    text = trace.names(distinct_ids(np.concatenate(kernels)))
    names = list(dict.fromkeys(text.values()))
    place = {name: index for index, name in enumerate(names)}
    return names, {id: place[name] for id, name in text.items()}


def _launches(
    own: GpuOperations, lane: Lane, measured: Sequence[Step], place: dict[int, int]
) -> _Launches:
    steps = [s for s in measured if (s.gpu, s.rank) == (lane.gpu.gpu, lane.gpu.rank)]
    starts = [step.start_ns for step in steps] or [lane.window.start]
    ends = [step.end_ns for step in steps] or [lane.window.end]
    windows = union(starts, ends)
    rows = np.flatnonzero((own.events.kind == Kind.KERNEL) & windows.contains(own.start))
    ids = own.events.name[rows]
    distinct = distinct_ids(ids)
    codes = np.array([place[int(id)] for id in distinct], np.int64)
    code = codes[np.searchsorted(distinct, ids)] if len(rows) else np.empty(0, np.int64)
    return _Launches(lane, len(steps), windows.total, rows, code, own.end[rows] - own.start[rows])


def _uses(names: Sequence[str], found: Sequence[_Launches], span: int) -> list[KernelUse]:
    """Every kernel, by its time, most first."""
    by_gpu: dict[int, list[KernelOnGpu]] = defaultdict(list)
    for own in found:
        gpu = own.lane.gpu
        for code, count, total, median in _counted(own.code, own.length):
            by_gpu[code].append(KernelOnGpu(gpu.gpu, gpu.rank, count, total, median))
    codes = np.concatenate([own.code for own in found])
    lengths = np.concatenate([own.length for own in found])
    uses = [
        _use(names[code], count, total, median, total / max(span, 1), by_gpu[code])
        for code, count, total, median in _counted(codes, lengths)
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


def _counted(code: NDArray[np.int64], length: Times) -> Iterable[tuple[int, int, int, int]]:
    """Of each code: how often, nanoseconds in all, and the (lower) median."""
    if not len(code):
        return []
    packed = np.sort(code << _LENGTH_BITS | np.minimum(length, _LONGEST))
    codes, lengths = packed >> _LENGTH_BITS, packed & _LONGEST
    first = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
    counts = np.diff(np.append(first, len(codes)))
    totals = np.add.reduceat(lengths, first)
    medians = lengths[first + (counts - 1) // 2]
    columns = (codes[first], counts, totals, medians)
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
