"""The figures of each GPU beside those of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gputrace.analyzers.balance.extra import alone, by_name, more_than_others
from gputrace.analyzers.balance.others import Others
from gputrace.analyzers.balance.work import COPIES, Work, find_works, sort_of
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results import Step
from gputrace.analyzers.results.balance import Load
from gputrace.traces.nvml.model import Nvml


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
