"""One run, reduced to what a comparison needs, so that its trace can be closed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gputrace.analyzers.analysis import analyze
from gputrace.analyzers.compare.kernels import KernelUse, use_kernels
from gputrace.analyzers.compare.loop import (
    Key,
    Loop,
    measure_loop,
    measured_steps,
    working_gpus,
)
from gputrace.analyzers.operations import GpuOperations, read_operations
from gputrace.analyzers.options import Options
from gputrace.analyzers.results import IDLE_CAUSES, Analysis, Step
from gputrace.analyzers.steps import find_input_copies
from gputrace.traces.trace import Progress, Trace

_BUSY: Final = ("compute", "communication", "h2d", "other_copy", "memset")


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of one run."""

    label: str
    analysis: Analysis
    """Without its list of steps."""
    keys: tuple[Key, ...]
    """The GPUs that do the work."""
    loop: Loop | None
    """The measured steps, or the iterations where there are no steps."""
    span: Mapping[str, float]
    """Classes of the whole span, mean over all GPUs; nothing where no GPU was seen."""
    kernels: tuple[KernelUse, ...]
    """Of the measured steps; of the whole span where there are none."""
    kernels_of_span: tuple[KernelUse, ...]
    input_bytes: float | None
    """A step, on all GPUs."""
    samples: float | None = None
    """A step, on all GPUs, where a person said so."""


def read_run(trace: Trace, label: str, options: Options, progress: Progress | None = None) -> Run:
    """Analyzes a trace; raises what `analyze` does."""
    analysis = analyze(trace, options, progress)
    keys = working_gpus(analysis)
    steps = measured_steps(analysis, options.steps)
    operations = [own for own in read_operations(trace) if (own.gpu.gpu, own.gpu.rank) in set(keys)]
    of_span = use_kernels(trace, operations, None)
    return Run(
        label=label,
        analysis=replace(analysis, step_list=()),
        keys=tuple(keys),
        loop=measure_loop(steps),
        span=_span(analysis),
        kernels=use_kernels(trace, operations, steps) if steps else of_span,
        kernels_of_span=of_span,
        input_bytes=_input_bytes(trace, operations, steps),
    )


def _span(analysis: Analysis) -> dict[str, float]:
    """Each class of the whole span, mean over the GPUs."""
    count = len(analysis.gpus)
    if not count:
        return {}
    busy = {name: sum(getattr(g, f"{name}_ns") for g in analysis.gpus) for name in _BUSY}
    idle = {cause: analysis.gaps.by_cause.get(cause, 0) for cause in IDLE_CAUSES}
    return {name: value / count for name, value in (busy | idle).items()}


def _input_bytes(
    trace: Trace, operations: Sequence[GpuOperations], steps: Sequence[Step]
) -> float | None:
    """Bytes of the copies that bring batches, a step, on all GPUs together."""
    numbers = {step.step for step in steps}
    total = 0
    for own in operations:
        copies = find_input_copies(trace, own)
        for step in steps:
            if (step.gpu, step.rank) == (own.gpu.gpu, own.gpu.rank):
                first, end = np.searchsorted(own.start[copies], [step.start_ns, step.end_ns])
                total += int(own.events.bytes[copies[first:end]].sum())
    return total / len(numbers) if total else None
