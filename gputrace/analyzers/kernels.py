"""Kernels of the measured steps: time by name and family, and what launching them costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.execution import GpuShardView, HasGpu, PerGpu, same_names
from gputrace.analyzers.grouping import StepsOf, stretches
from gputrace.analyzers.host_calls import NOBODY
from gputrace.analyzers.kernel_names import (
    converts_layout,
    family_of,
    generation,
    on_tensor_cores,
    precision_of,
    short_name,
)
from gputrace.analyzers.lanes import LaneSummary
from gputrace.model.events import Kind, number_ids
from gputrace.model.intervals import Intervals, Times
from gputrace.model.results import (
    Family,
    KernelOnGpu,
    Kernels,
    KernelUse,
    LaunchCost,
    Product,
    Step,
)

_MOST: Final = 50
_MOST_OF_FIRST_GPU: Final = 20
_STRAY: Final = 0.01
"""A GPU with a smaller part of the busiest one's kernels does not count."""


@dataclass(frozen=True)
class _OnGpu:
    """The kernels of one GPU that start in its measured time."""

    lane: LaneSummary
    steps: int
    measured_ns: int
    counted: Counted


def count_kernels(gpus: PerGpu, measured: Sequence[Step]) -> Kernels | None:
    """The kernels that start in the measured steps, or in the lanes' windows where there are none.

    Of the GPUs that do the work; None where no kernel does.
    """
    names, codes = same_names(gpus, [own.kernels for own in gpus.operations])
    codes_of = dict(zip((own.gpu for own in gpus.operations), codes, strict=True))
    steps_of = StepsOf(measured)
    steps = [steps_of(lane.gpu) for lane in gpus.lanes]
    windows = [stretches(own, lane.window) for lane, own in zip(gpus.lanes, steps, strict=True)]
    own_codes = [codes_of[lane.gpu] for lane in gpus.lanes]
    most = most_looked_at(len(gpus.lanes))
    counted = gpus.each(count_by_name, gpus.lanes, windows, own_codes, same=(most,), keeps=True)
    spans = [own.total for own in windows]
    rows = zip(gpus.lanes, map(len, steps), spans, counted, strict=True)
    found = _that_count([_OnGpu(*row) for row in rows])
    kernels = _table(gpus, names, found) if found else None
    gpus.each(forget_counts, gpus.lanes, keeps=True)
    return kernels


def _table(gpus: PerGpu, names: Sequence[str], found: Sequence[_OnGpu]) -> Kernels:
    span = sum(own.measured_ns for own in found)
    uses = _uses(gpus, names, found, span)
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
        launches=launch_cost(own.counted.launches for own in found),
    )


def _that_count(found: Sequence[_OnGpu]) -> list[_OnGpu]:
    """Return the lanes of GPUs that have measured steps, if any has, and do a relevant amount of
    work.
    """
    if any(own.steps for own in found):
        found = [own for own in found if own.steps]
    most = max((own.counted.kernels for own in found), default=0)
    return [own for own in found if own.counted.kernels >= max(_STRAY * most, 1)]


def _uses(
    gpus: PerGpu, names: Sequence[str], found: Sequence[_OnGpu], span: int
) -> list[KernelUse]:
    """Every kernel, by its time, most first."""
    by_gpu: dict[int, list[KernelOnGpu]] = defaultdict(list)
    for own in found:
        gpu, one = own.lane.gpu, own.counted
        columns = (one.code, one.count, one.total, one.median)
        for code, *figures in zip(*(column.tolist() for column in columns), strict=True):
            by_gpu[code].append(KernelOnGpu(gpu.gpu, gpu.rank, *figures))
    middle = medians(gpus, [own.lane for own in found], [own.counted for own in found])
    uses = [_use(names[code], own, middle[code], span) for code, own in sorted(by_gpu.items())]
    return sorted(uses, key=lambda use: (-use.total_ns, use.name))


def _use(name: str, by_gpu: Sequence[KernelOnGpu], median_ns: int, span: int) -> KernelUse:
    family, total = family_of(name), sum(own.total_ns for own in by_gpu)
    return KernelUse(
        name=name,
        short=short_name(name),
        family=family,
        tensor_cores=on_tensor_cores(name, family),
        converts_layout=converts_layout(name),
        count=sum(own.count for own in by_gpu),
        total_ns=total,
        median_ns=median_ns,
        share=round(total / max(span, 1), 6),
        by_gpu=tuple(by_gpu),
    )


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


def _of_first_gpu(uses: Sequence[KernelUse], lanes: Sequence[LaneSummary]) -> list[KernelUse]:
    """Kernels that of several GPUs only the first one runs."""
    if len(lanes) < 2:
        return []
    first = lanes[0].gpu.gpu, lanes[0].gpu.rank
    alone = [use for use in uses if {(own.gpu, own.rank) for own in use.by_gpu} == {first}]
    return alone[:_MOST_OF_FIRST_GPU]


_LENGTH_BITS: Final = 40
"""A kernel's nanoseconds fit in so many bits: 18 minutes."""
_LONGEST: Final = (1 << _LENGTH_BITS) - 1
_PACKED: Final = "packed kernels"
_ASKED: Final = 16
"""Lengths of each name that are asked about at once."""
_TOGETHER: Final = 512
"""GPUs that are asked at once."""

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Counted:
    """The kernels of one GPU that start in some stretches of time, by name; arrays of one length.

    Attributes:
        code: of each name, in order.
        count: how many there are.
        total: nanoseconds of all.
        median: nanoseconds of the (lower) middle one.
        launches: what their launching cost.
    """

    code: Codes
    count: NDArray[np.int64]
    total: Times
    median: Times
    launches: LaunchTimes

    @property
    def kernels(self) -> int:
        """Return the number of kernels over all names."""
        return int(self.count.sum())


def count_by_name(
    one: GpuShardView, windows: Intervals, codes: dict[int, int], most: int
) -> Counted:
    """Counts the kernels of a GPU.

    Args:
        one: the GPU.
        windows: in which they start.
        codes: by name id.
        most: kernels of which calls are looked up at most.
    """
    own = one.operations
    rows = np.flatnonzero((own.events.kind == Kind.KERNEL) & windows.contains(own.start))
    packed = one.keep(_PACKED, _pack(one, rows, codes))
    if not len(packed):
        nothing = np.empty(0, np.int64)
        return Counted(nothing, nothing, nothing, nothing, look_at(one, rows, most))
    edges = np.searchsorted(
        packed, np.arange((int(packed[-1]) >> _LENGTH_BITS) + 2) << _LENGTH_BITS
    )
    code = np.flatnonzero(np.diff(edges))
    first, counts = edges[code], np.diff(edges)[code]
    totals = np.add.reduceat(packed & _LONGEST, first)
    medians = packed[first + (counts - 1) // 2] & _LONGEST
    return Counted(code, counts, totals, medians, look_at(one, rows, most))


def _pack(one: GpuShardView, rows: NDArray[np.intp], codes: dict[int, int]) -> NDArray[np.int64]:
    """The code of each one's name, and in the lower bits its length; in order."""
    own = one.operations
    distinct, where = number_ids(own.events.name[rows])
    packed = np.array([codes[id] << _LENGTH_BITS for id in distinct.tolist()], np.int64).take(where)
    packed |= np.minimum(own.end[rows] - own.start[rows], _LONGEST)
    packed.sort()
    return packed


def medians(gpus: PerGpu, of: Sequence[HasGpu], counted: Sequence[Counted]) -> dict[int, int]:
    """By code, nanoseconds of the (lower) middle one of all kernels of some GPUs."""
    codes, place = np.unique(np.concatenate([own.code for own in counted]), return_inverse=True)
    known = np.concatenate([own.median for own in counted])
    low, high = np.full(len(codes), _LONGEST), np.zeros(len(codes), np.int64)
    np.minimum.at(low, place, known)
    np.maximum.at(high, place, known)
    count = np.zeros(len(codes), np.int64)
    np.add.at(count, place, np.concatenate([own.count for own in counted]))
    wanted = (count - 1) // 2 + 1
    while len(left := np.flatnonzero(low < high)):
        asked = low[left, None] + (high - low)[left, None] * np.arange(_ASKED) // _ASKED
        found = _counted_on_all(gpus, of, codes[left], asked)
        low[left], high[left] = _narrowed(asked, found >= wanted[left, None], high[left])
    return dict(zip(codes.tolist(), low.tolist(), strict=True))


def _counted_on_all(
    gpus: PerGpu, of: Sequence[HasGpu], codes: Codes, lengths: Times
) -> NDArray[np.int64]:
    """Return `_no_longer` summed over all GPUs, without holding the answers of thousands
    at once.
    """
    found = np.zeros(lengths.shape, np.int64)
    for first in range(0, len(of), _TOGETHER):
        for own in gpus.each(_no_longer, of[first : first + _TOGETHER], same=(codes, lengths)):
            found += own
    return found


def _narrowed(asked: Times, enough: NDArray[np.bool_], high: Times) -> tuple[Times, Times]:
    """Narrow down each median: above the last length of too few kernels, up to the next one."""
    first = np.where(enough.any(axis=1), enough.argmax(axis=1), _ASKED)
    rows = np.arange(len(asked))
    below = asked[rows, np.maximum(first - 1, 0)] + 1
    above = np.where(first < _ASKED, asked[rows, np.minimum(first, _ASKED - 1)], high)
    return np.where(first > 0, below, asked[:, 0]), above


def _no_longer(one: GpuShardView, codes: Codes, lengths: Times) -> NDArray[np.int64]:
    """Count the kernels of each name that are no longer than some lengths."""
    packed, names = one.kept(_PACKED), codes[:, None] << _LENGTH_BITS
    found: NDArray[np.int64] = np.searchsorted(packed, names | lengths, "right")
    return found - np.searchsorted(packed, names)


def forget_counts(one: GpuShardView) -> None:
    """Gives back what `count` keeps for `medians`."""
    one.keep(_PACKED, None)


_TINY_NS: Final = 5_000
"""A launching call takes a host about so long: shorter kernels cannot keep a GPU fed."""
_MOST_OF_ONE: Final = 20_000
_MOST_OF_ALL: Final = 160_000
"""Kernels of which calls are looked up; evenly taken from all."""

Rows = NDArray[np.intp]


@dataclass(frozen=True)
class LaunchTimes:
    """Launch times of the kernels of one GPU."""

    tiny_count: int
    tiny_total_ns: int
    """Kernels too short to keep a GPU fed."""
    calls: Times
    """Nanoseconds of the calls that launched some of them."""
    delays: Times
    """From those calls to kernels that an idle GPU started: it had done all before the call."""


def most_looked_at(gpus: int) -> int:
    """Return how many kernels of each GPU have their calls looked up."""
    return min(_MOST_OF_ONE, _MOST_OF_ALL // max(gpus, 1))


def look_at(one: GpuShardView, rows: Rows, most: int) -> LaunchTimes:
    """Measure what launching some kernels of a GPU costs; the calls of ``most`` of them are looked
    up.
    """
    lengths = one.operations.end[rows] - one.operations.start[rows]
    tiny = lengths[lengths < _TINY_NS]
    calls, delays = _calls_of(one, rows[:: len(rows) // most + 1])
    return LaunchTimes(len(tiny), int(tiny.sum()), calls, delays)


def launch_cost(launched: Iterable[LaunchTimes]) -> LaunchCost:
    """Return the launch cost of all GPUs together."""
    own = list(launched)
    return LaunchCost(
        _TINY_NS,
        sum(one.tiny_count for one in own),
        sum(one.tiny_total_ns for one in own),
        _median(np.concatenate([one.calls for one in own])),
        _median(np.concatenate([one.delays for one in own])),
    )


def _calls_of(one: GpuShardView, rows: Rows) -> tuple[Times, Times]:
    """Lengths of the calls that launched kernels, and the delays of those an idle GPU began."""
    own, calls = one.operations, one.calls
    if calls is None or not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    issued_by = calls.issued_by(own.events.having("process", "correlation").select(rows))
    known = issued_by != NOBODY
    rows, issued_by = rows[known], issued_by[known]
    began = calls.start[issued_by]
    done = np.where(rows > 0, own.reach[np.maximum(rows - 1, 0)], 0)
    delay = own.start[rows] - began
    return calls.end[issued_by] - began, delay[(done <= began) & (delay > 0)]


def _median(values: Times) -> int | None:
    return int(np.median(values)) if len(values) else None


__all__ = [
    "Family",
    "KernelOnGpu",
    "KernelUse",
    "Kernels",
    "LaunchCost",
    "Product",
    "count_kernels",
]
