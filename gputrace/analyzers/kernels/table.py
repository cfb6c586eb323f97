"""The kernels of the measured steps by name, and what each family of them takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.grouping import StepsOf, stretches
from gputrace.analyzers.kernels.counting import Counted, count, forget, medians
from gputrace.analyzers.kernels.families import converts_layout, family_of
from gputrace.analyzers.kernels.launches import launch_cost, most_looked_at
from gputrace.analyzers.kernels.naming import short_name
from gputrace.analyzers.kernels.tensorcores import generation, on_tensor_cores, precision_of
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.per_gpu import PerGpu, same_names
from gputrace.analyzers.results import Step
from gputrace.analyzers.results.kernels import (
    Family,
    KernelOnGpu,
    Kernels,
    KernelUse,
    Product,
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
    counted = gpus.each(count, gpus.lanes, windows, own_codes, same=(most,), keeps=True)
    spans = [own.total for own in windows]
    rows = zip(gpus.lanes, map(len, steps), spans, counted, strict=True)
    found = _that_count([_OnGpu(*row) for row in rows])
    kernels = _table(gpus, names, found) if found else None
    gpus.each(forget, gpus.lanes, keeps=True)
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
    """Those of GPUs that have measured steps, if any has, and do more than next to nothing."""
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
