"""The figures of each GPU beside those of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gputrace.analyzers.balance.extra import alone, by_name, more_than_others
from gputrace.analyzers.balance.others import Others
from gputrace.analyzers.balance.work import COPIES, Work, number_kernels, sort_of, work_of
from gputrace.analyzers.breakdown import Lane
from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.grouping import StepsOf
from gputrace.analyzers.operations import ByGpu, GpuOperations
from gputrace.analyzers.results import Step
from gputrace.analyzers.results.balance import Load
from gputrace.traces.events import Kind, Mask
from gputrace.traces.nvml.model import Nvml
from gputrace.traces.trace import Trace


def compare_loads(
    trace: Trace,
    operations: Sequence[GpuOperations],
    lanes: Sequence[Lane],
    measured: Sequence[Step],
    memory: Mapping[int, int],
) -> tuple[Load, ...]:
    """Each GPU beside the others; nothing where there are not two.

    Args:
        operations: of these GPUs, and maybe of others.
        lanes: of the GPUs to compare.
        measured: the steps that count; of a GPU that has none, its whole window does.
        memory: the most bytes in use, by index of the card.
    """
    if len(lanes) < 2:
        return ()
    by_gpu = ByGpu(operations)
    numbers = number_kernels(trace, operations)
    steps_of = StepsOf(measured)
    works = [work_of(lane, by_gpu[lane.gpu], steps_of(lane.gpu), numbers) for lane in lanes]
    others = Others(works)
    return tuple(
        _load(works, place, others, by_gpu[work.lane.gpu], memory)
        for place, work in enumerate(works)
    )


def most_memory(nvml: Nvml, lanes: Sequence[Lane]) -> dict[int, int]:
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
    works: Sequence[Work],
    place: int,
    others: Others,
    operations: GpuOperations,
    memory: Mapping[int, int],
) -> Load:
    work = works[place]
    gpu, kernels = work.lane.gpu, work.kernels()
    only = [sort for sort in kernels if others.lack(sort)]
    extra = more_than_others(work, place, others)
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
        communication_ns=_communicating(work, operations),
        h2d_run_ns=int((operations.end - operations.start)[_of(operations, Kind.COPY_H2D)].sum()),
        memory_bytes=memory.get(gpu.gpu),
        extra_ns=by_name(extra),
        alone_ns=alone(work, [*works[:place], *works[place + 1 :]], extra),
        **copies,
    )


def _communicating(work: Work, operations: GpuOperations) -> int:
    """Nanoseconds of kernels that communicate, in the steps."""
    rows = _of(operations, Kind.KERNEL) & (operations.classes == OperationClass.COMMUNICATION)
    rows &= work.windows.contains(operations.start)
    return int((operations.end - operations.start)[rows].sum())


def _of(operations: GpuOperations, kind: Kind) -> Mask:
    rows: Mask = operations.events.kind == kind
    return rows
