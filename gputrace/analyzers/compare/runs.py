"""Runs reduced to the inputs of a comparison: step series, kernels by name, errors of means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.grouping import median
from gputrace.analyzers.kernel_names import is_communication
from gputrace.analyzers.operations import GpuOperations, read_operations
from gputrace.analyzers.pipeline import analyze
from gputrace.analyzers.steps import find_input_copies
from gputrace.model.events import Kind
from gputrace.model.intervals import number_windows
from gputrace.model.options import Options
from gputrace.model.results import Analysis, RecorderCost, Step
from gputrace.model.time_class import BUSY_CLASSES, CLASSES, IDLE_CAUSES
from gputrace.model.trace import Progress, Trace

CONFIDENCE: Final = 0.95
"""Confidence level of bounds; those of the rows of one table hold jointly."""

SLOW_RATIO: Final = 1.3
"""Ratio to the median step from which a step is slow."""
FEWEST: Final = 3
"""Minimum number of steps for bounds."""

_MOST_FREEDOM: Final = 1000
"""Maximum degrees of freedom used; more change the bounds hardly at all."""
_LEAST_FREEDOM: Final = 4
"""Minimum degrees of freedom, given as many steps, at any autocorrelation: fewer widen bounds
without making them hold more often."""
_MOST_MEMORY: Final = 0.9
"""Maximum autocorrelation of consecutive steps; more is indistinguishable from a drift."""

Series = NDArray[np.number[Any]]


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean over steps and its standard error, in the same unit."""

    value: float
    error: float | None
    """Standard error; None where there are too few steps."""
    freedom: float
    """Degrees of freedom of the error: independent steps minus one."""


ABSENT: Final = Mean(0.0, 0.0, _MOST_FREEDOM)
"""Mean of what does not occur at all."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a difference or a ratio."""

    low: float
    high: float


def means_of(table: Series) -> list[Mean]:
    """Return the mean of each column of a table of shape (steps, columns)."""
    count = len(table)
    values = table.mean(axis=0, dtype=float) if count else np.zeros(table.shape[1])
    if count < FEWEST:
        return [Mean(value, None, 0.0) for value in values.tolist()]
    rest = table - values
    alone = (rest**2).sum(axis=0) / (count - 1)
    inflation = _inflation(rest)
    errors = np.sqrt(alone * inflation / count)
    freedom = np.maximum(count / inflation - 1, min(_LEAST_FREEDOM, count - 1))
    return [
        Mean(*row) for row in zip(values.tolist(), errors.tolist(), freedom.tolist(), strict=True)
    ]


def _inflation(rest: Series) -> NDArray[np.float64]:
    """Return the variance of the mean relative to that of independent steps; at least 1.

    The larger of two estimates: one from the autocorrelation up to a maximum lag, which is too low
    for long correlations, and, where neighbours correlate more than by chance, that of a
    first-order autoregressive series.
    """
    count, squares = len(rest), (rest**2).sum(axis=0)
    squares = np.where(squares > 0, squares, 1)
    reach = int(count**0.5)
    total = np.ones(rest.shape[1])
    for lag in range(1, reach + 1):
        alike = (rest[lag:] * rest[:-lag]).sum(axis=0) / squares
        total += 2 * (1 - lag / (reach + 1)) * alike
    memory = (rest[1:] * rest[:-1]).sum(axis=0) / squares
    beyond_chance = memory > count**-0.5
    memory = np.clip((count * memory + 1) / max(count - 3, 1), 0, _MOST_MEMORY) * beyond_chance
    inflation: NDArray[np.float64] = np.maximum(total, (1 + memory) / (1 - memory))
    return np.maximum(inflation, 1)


def difference(a: Mean, b: Mean, rows: int = 1) -> Bounds | None:
    """Return bounds of ``b - a`` that hold jointly over ``rows`` rows; None if unknown."""
    if a.error is None or b.error is None:
        return None
    middle = b.value - a.value
    reach = _reach((a.error, a.freedom), (b.error, b.freedom), rows)
    return Bounds(middle - reach, middle + reach)


def ratio(a: Mean, b: Mean) -> Bounds | None:
    """Return bounds of ``a / b`` of positive means, by the difference of their logarithms."""
    if a.error is None or b.error is None or min(a.value, b.value) <= 0:
        return None
    reach = _reach((a.error / a.value, a.freedom), (b.error / b.value, b.freedom), 1)
    return Bounds(a.value / b.value * exp(-reach), a.value / b.value * exp(reach))


def _reach(a: tuple[float, float], b: tuple[float, float], rows: int) -> float:
    """Return the half-width of the bounds, given two pairs of error and degrees of freedom."""
    squares = a[0] ** 2, b[0] ** 2
    if not sum(squares):
        return 0.0
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / a[1] + squares[1] ** 2 / b[1])
    return float(sum(squares) ** 0.5 * student(rows, min(int(freedom), _MOST_FREEDOM)))


@lru_cache(maxsize=4096)
def student(rows: float, freedom: int) -> float:
    """Return the half-width, in standard errors, that holds for all rows jointly (Bonferroni).

    This is the quantile of Student's distribution, integrated over
    ``t = sqrt(freedom) tan(angle)``.
    """
    freedom = max(freedom, 1)
    angles = np.linspace(0, np.pi / 2, 20_001)
    middles = (angles[1:] + angles[:-1]) / 2
    area = np.concatenate([[0.0], np.cumsum(np.cos(middles) ** (freedom - 1))])
    wanted = 1 - (1 - CONFIDENCE) / rows
    return float(np.sqrt(freedom) * np.tan(np.interp(wanted, area / area[-1], angles)))


NAMES: Final = (*CLASSES, "communication_wait", "host_data")
"""Classes of time, the waiting part of communication, and the host's time in the data loader."""

_STRAY_BUSY_PART: Final = 0.01
"""Fraction of the busy time of its rank's busiest GPU below which a GPU is ignored."""

Key = tuple[int | None, int]
"""Index and rank of a GPU."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Measured steps, or iterations.

    The `CLASSES` among `classes` sum to `length`, each a mean over steps and GPUs.
    """

    numbers: NDArray[np.int64]
    length: Mean
    classes: Mapping[str, Mean]
    """Means of those of `NAMES` that are known."""
    of_gpu: Mapping[Key, Mapping[str, float]]
    """Means of each GPU."""
    slow_share: float = 0.0
    """Share of the steps that are longer than `SLOW_RATIO` times the median."""


def main_gpus(analysis: Analysis) -> list[Key]:
    """Return the GPUs that do the work, without those on which a process has little but a context.

    Where no GPU was recorded, return the ranks.
    """
    busy = {(row.gpu, row.rank): row.span_ns - row.idle_ns for row in analysis.gpus}
    most: dict[int, int] = {}
    for (_, rank), amount in busy.items():
        most[rank] = max(most.get(rank, 0), amount)
    if not busy:
        return [(row.gpu, row.rank) for row in analysis.breakdown]
    return [key for key, amount in busy.items() if amount >= _STRAY_BUSY_PART * most[key[1]]]


def measured_steps(analysis: Analysis, chosen: tuple[int, int] | None) -> list[Step]:
    """Return the steps chosen by the user, else the steady ones, on the GPUs that do the work."""
    working = set(main_gpus(analysis))
    first, end = chosen or (0, 1 << 62)
    return [
        step
        for step in analysis.step_list
        if (step.gpu, step.rank) in working
        and (first <= step.step < end if chosen else step.phase == "steady")
    ]


def measure_loop(steps: Sequence[Step], cost: RecorderCost | None = None) -> Loop | None:
    """Return means over the steps; None where there are none.

    Where the cost of recording was measured, idle time that the recorder caused is left out.
    """
    if not steps:
        return None
    numbers, group = np.unique([step.step for step in steps], return_inverse=True)
    lengths = np.array([step.end_ns - step.start_ns for step in steps], float)
    columns = {name: [getattr(step, f"{name}_ns") for step in steps] for name in NAMES}
    known = [name for name in NAMES if None not in columns[name]]
    if cost is not None and "recorder" in known:
        lengths -= columns["recorder"]
        columns["recorder"] = [0] * len(steps)
    table = np.column_stack([lengths, *(np.array(columns[name], float) for name in known)])
    total = np.zeros((len(numbers), table.shape[1]))
    np.add.at(total, group, table)
    per_step = total / np.bincount(group)[:, None]
    length, *classes = means_of(per_step)
    rows: dict[Key, list[int]] = {}
    for row, step in enumerate(steps):
        rows.setdefault((step.gpu, step.rank), []).append(row)
    names = ("total", *known)
    return Loop(
        numbers=numbers,
        length=length,
        classes=dict(zip(known, classes, strict=True)),
        of_gpu={
            key: dict(zip(names, table[of_gpu].mean(axis=0).tolist(), strict=True))
            for key, of_gpu in rows.items()
        },
        slow_share=float((per_step[:, 0] > SLOW_RATIO * median(per_step[:, 0])).mean()),
    )


_Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class MeanKernel:
    """Use of all kernels of one name per GPU, in ns; a kernel belongs to the step of its start."""

    name: str
    communication: bool
    total: Mean
    """Time per step; in the whole span, with unknown error, where there are no steps."""
    count: float
    """Number per step, or in the whole span."""
    median_ns: float
    """Median duration of one kernel."""


def use_kernels(
    trace: Trace, operations: Sequence[GpuOperations], steps: Sequence[Step] | None
) -> tuple[MeanKernel, ...]:
    """Summarize the kernels of some GPUs in some steps; with None, in the whole span."""
    numbers = sorted({step.step for step in steps}) if steps is not None else [0]
    parts = [_placed(gpu, steps, numbers) for gpu in operations]
    if not parts:
        return ()
    ids, ns, step_index = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not len(ids):
        return ()
    distinct, inverse = np.unique(ids, return_inverse=True)
    text_of = trace.names(distinct)  # Several ids may share a text.
    texts = sorted(set(text_of.values()))
    number_of = {text: number for number, text in enumerate(texts)}
    ids = np.array([number_of[text_of[id]] for id in distinct.tolist()], np.intp)[inverse]
    totals = np.bincount(
        step_index * len(texts) + ids, weights=ns, minlength=len(numbers) * len(texts)
    ).reshape(len(numbers), len(texts))
    counts = np.bincount(ids, minlength=len(texts)) / (len(numbers) * len(operations))
    means = means_of(totals / len(operations))
    order = np.argsort(ids, kind="stable")
    parts_of = np.split(ns[order], np.searchsorted(ids[order], np.arange(1, len(texts))))
    medians = [float(median(part)) for part in parts_of]
    return tuple(
        MeanKernel(text, is_communication(text), mean, count, median)
        for text, mean, count, median in zip(texts, means, counts.tolist(), medians, strict=True)
    )


def _placed(
    gpu: GpuOperations, steps: Sequence[Step] | None, numbers: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.int64], _Rows]:
    """Return name id, duration and index of the step, for each kernel in a step."""
    kernels = np.flatnonzero(gpu.events.kind == Kind.KERNEL)
    ids, ns = gpu.events.name[kernels], gpu.end[kernels] - gpu.start[kernels]
    if steps is None:
        return ids, ns, np.zeros(len(kernels), np.intp)
    key: Key = gpu.gpu.gpu, gpu.gpu.rank
    mine = sorted((s.start_ns, s.end_ns, s.step) for s in steps if (s.gpu, s.rank) == key)
    if not mine:
        return ids[:0], ns[:0], np.zeros(0, np.intp)
    starts, ends, which = np.array(mine, np.int64).T
    index = number_windows(gpu.start[kernels], starts, ends)
    inside = index >= 0
    return ids[inside], ns[inside], np.searchsorted(numbers, which[index[inside]])


@dataclass(frozen=True, slots=True)
class Run:
    """Run, reduced to the inputs of a comparison."""

    label: str
    analysis: Analysis
    """Analysis without its list of steps."""
    keys: tuple[Key, ...]
    """GPUs that do the work."""
    loop: Loop | None
    """Measured steps, or iterations where there are no steps."""
    span: Mapping[str, float]
    """Classes of the whole span, mean over the measured GPUs; empty where none was recorded."""
    kernels: tuple[MeanKernel, ...]
    """Kernels of the measured steps; of the whole span where there are none."""
    kernels_of_span: tuple[MeanKernel, ...]
    input_bytes: float | None
    """Bytes of the input copies per step, on all GPUs."""
    samples: float | None = None
    """Samples per step, on all GPUs, if given by the user."""


def lost_ns(run: Run) -> dict[str, float]:
    """Return the time lost in a step, mean over the GPUs, by cause and by each more general one.

    What the recorder causes is left out where its cost was measured, as in `measure_loop`.
    """
    analysis, lost = run.analysis, dict[str, float]()
    steps = {(row.gpu, row.rank): max(row.steps, 1) for row in analysis.breakdown}
    left_out = "compute" if analysis.recorder is None else "recorder-overhead"
    for row in analysis.ledger:
        key = row.gpu, row.paid_by
        if key in run.keys and left_out not in (row.of, row.cause):
            for cause in dict.fromkeys((*row.path, row.cause)):
                lost[cause] = lost.get(cause, 0) + row.ns / steps[key] / len(run.keys)
    return lost


def waits_for_others(run: Run) -> float:
    """Return the share of a step in which a host without GPUs waits for a core that another program
    has.
    """
    found = [finding for finding in run.analysis.findings if finding.id == "cpu-starved"]
    if not found or not found[0].evidence.get("others_are_why") or run.analysis.gpus:
        return 0.0
    queued, step = found[0].evidence.get("queued_ns"), run.analysis.steps.mean_ns
    return min(float(queued or 0) / (step or 1), 0.99)


def read_run(trace: Trace, label: str, options: Options, progress: Progress | None = None) -> Run:
    """Analyze a trace and reduce it; raises the errors of `analyze`."""
    analysis = analyze(trace, options, progress)
    if analysis.steps.kind == "pass":
        # How long one takes says nothing of another, which may be a part, or of another network.
        rows = tuple(replace(row, steps=0) for row in analysis.breakdown)
        analysis = replace(analysis, step_list=(), breakdown=rows)
    keys = main_gpus(analysis)
    steps = measured_steps(analysis, options.steps)
    operations = [gpu for gpu in read_operations(trace) if (gpu.gpu.gpu, gpu.gpu.rank) in set(keys)]
    of_span = use_kernels(trace, operations, None)
    measured = {(row.gpu, row.rank) for row in analysis.breakdown}
    span, gpus = {}, [gpu for gpu in analysis.gpus if (gpu.gpu, gpu.rank) in measured]
    if gpus:
        span = {name: sum(getattr(gpu, f"{name}_ns") for gpu in gpus) for name in BUSY_CLASSES}
        span |= {cause: analysis.gaps.by_cause.get(cause, 0) for cause in IDLE_CAUSES}
    # The bytes of input copies per step, on all GPUs together; None if there are none.
    numbers = {step.step for step in steps}
    total = 0
    for gpu in operations:
        copies = find_input_copies(trace, gpu)
        for step in steps:
            if (step.gpu, step.rank) == (gpu.gpu.gpu, gpu.gpu.rank):
                first, end = np.searchsorted(gpu.start[copies], [step.start_ns, step.end_ns])
                total += int(gpu.events.bytes[copies[first:end]].sum())
    return Run(
        label=label,
        analysis=replace(analysis, step_list=()),
        keys=tuple(keys),
        loop=measure_loop(steps, analysis.recorder),
        span={name: ns / len(gpus) for name, ns in span.items()},
        kernels=use_kernels(trace, operations, steps) if steps else of_span,
        kernels_of_span=of_span,
        input_bytes=total / len(numbers) if total else None,
    )
