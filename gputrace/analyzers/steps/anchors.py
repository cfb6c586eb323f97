"""What marks a training step in a stream of GPU operations: the optimizer and the input copy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.operations import GpuOperations
from gputrace.traces.events import Kind
from gputrace.traces.ids import distinct_ids
from gputrace.traces.trace import Trace

Rows = NDArray[np.intp]

_OPTIMIZER: Final = re.compile(
    r"multi_tensor_apply|foreach|fused_?optim|optimizer"
    r"|ada(m|grad|delta|max|factor)|(?<![a-z])r?rmsprop|(?<![a-z])lamb(?![a-z])"
    r"|(?<![a-z])lars(?![a-z])|(?<![a-z])lion(?![a-z])|(?<![a-z])sgd"
    r"|apply_?(gradient|momentum)|momentum_?(sgd|update)",
    re.IGNORECASE,
)
"""Kernels of optimizers: PyTorch's foreach and fused ones, apex, DeepSpeed, TensorFlow's
Apply…, MXNet's …_update, Chainer's."""

_NOT_OPTIMIZER: Final = re.compile(r"CopyFunctor|ZeroFunctor|LpNorm|_copy_|zero_")
"""Of the same families of kernels: gathering shards, zeroing gradients, their norm."""

_BACKWARD: Final = re.compile(r"backward|bwd|(?<![a-z])grad|wgrad|dgrad|Grad", re.IGNORECASE)

_LEAST_INPUT_BYTES: Final = 1024
"""Smaller copies are scalars and pointers, not batches."""

_LEAST_APART: Final = 8
"""Operations from one optimizer kernel to the next that are more than one run's own."""

_IRREGULAR: Final = 0.4
"""Part of the distances between input copies that may be out of the ordinary."""

_MOST_COPIES: Final = 4
"""More sizeable input copies than this an iteration, with no optimizer: weights, not batches."""


@dataclass(frozen=True)
class Bursts:
    """Runs of an optimizer's kernels, one a step: first and last row of each."""

    first: Rows
    last: Rows

    def __len__(self) -> int:
        return len(self.first)


def find_bursts(trace: Trace, operations: GpuOperations) -> Bursts | None:
    """The optimizer's runs on this GPU; None where its kernels cannot be told by name."""
    rows = _kernels_named(trace, operations, _OPTIMIZER, _NOT_OPTIMIZER)
    if len(rows) < 3:
        return None
    between = np.diff(rows)
    cut = np.flatnonzero(between > _valley(between))
    bursts = Bursts(
        np.concatenate([rows[:1], rows[cut + 1]]), np.concatenate([rows[cut], rows[-1:]])
    )
    return _one_a_batch(bursts, inputs_alone(operations)[0])


def is_optimizer(kernel: str) -> bool:
    """Whether a kernel is an optimizer's, by its name."""
    return bool(_OPTIMIZER.search(kernel) and not _NOT_OPTIMIZER.search(kernel))


def _one_a_batch(bursts: Bursts, inputs: Rows) -> Bursts:
    """The last run for each batch, where nearly every batch that has some has several."""
    if len(inputs) < 3:
        return bursts
    batch = np.searchsorted(inputs, bursts.last)
    _, counts = np.unique(batch, return_counts=True)
    if np.median(counts) < 2 or np.mean(counts == np.median(counts)) < 0.75:
        return bursts
    final = np.append(np.diff(batch) > 0, True)
    return Bursts(bursts.first[final], bursts.last[final])


def may_train(trace: Trace, operations: GpuOperations) -> bool:
    """Whether kernels of a backward pass ran, by name, or graphs that may hold some."""
    if (operations.events.kind == Kind.GRAPH).any():
        return True
    return len(_kernels_named(trace, operations, _BACKWARD)) > 0


def _kernels_named(
    trace: Trace,
    operations: GpuOperations,
    pattern: re.Pattern[str],
    but: re.Pattern[str] | None = None,
) -> Rows:
    kernels = operations.events.kind == Kind.KERNEL
    names = operations.events.name
    text = trace.names(distinct_ids(names[kernels]))
    wanted = [
        id for id, name in text.items() if pattern.search(name) and not (but and but.search(name))
    ]
    return np.flatnonzero(kernels & np.isin(names, wanted))


def _valley(counts: NDArray[np.intp]) -> float:
    """The number that best parts small counts from large ones (Otsu 1979, on logarithms).

    Where all are of one size there is nothing to part: every count is then large.
    """
    logs = np.sort(np.log(counts.astype(float)))
    if logs[-1] - logs[0] < np.log(4) or logs[0] > np.log(_LEAST_APART):
        return 0.0 if logs[0] > np.log(_LEAST_APART) else np.inf
    sizes = np.arange(1, len(logs))
    below = np.cumsum(logs)[:-1] / sizes
    above = (logs.sum() - np.cumsum(logs)[:-1]) / (len(logs) - sizes)
    spread = sizes * (len(logs) - sizes) * (above - below) ** 2
    best = int(np.argmax(spread))
    return float(np.exp((logs[best] + logs[best + 1]) / 2))


def input_groups(operations: GpuOperations) -> list[Rows]:
    """Host-to-device copies large enough for a batch, by size, of sizes met three times or more.

    In order of bytes moved, most first.
    """
    events = operations.events
    rows = np.flatnonzero((events.kind == Kind.COPY_H2D) & (events.bytes >= _LEAST_INPUT_BYTES))
    rows = rows[np.argsort(events.bytes[rows], kind="stable")]
    sizes, first = np.unique(events.bytes[rows], return_index=True)
    groups = np.split(rows, first[1:])
    often = [(int(s) * len(g), g) for s, g in zip(sizes, groups, strict=False) if len(g) >= 3]
    return [group for _, group in sorted(often, key=lambda moved: -moved[0])]


def inputs_of_steps(operations: GpuOperations, bursts: Bursts) -> Rows:
    """The input copies that come equally often before every optimizer run, in order."""
    chosen = [
        group
        for group in input_groups(operations)
        if _is_regular(np.diff(np.searchsorted(group, bursts.last)))
    ]
    if chosen:
        return np.sort(np.concatenate(chosen))
    events = operations.events
    rows = np.flatnonzero((events.kind == Kind.COPY_H2D) & (events.bytes >= _LEAST_INPUT_BYTES))
    of_any_size = _is_regular(np.diff(np.searchsorted(rows, bursts.last)))
    return rows if of_any_size else np.empty(0, np.intp)


def _is_regular(counts: NDArray[np.intp]) -> bool:
    """Whether nearly all steps have the same number of copies, and that is not none."""
    if not len(counts):
        return False
    usual = int(np.median(counts))
    return usual > 0 and float(np.mean(counts == usual)) >= 0.75


def inputs_alone(operations: GpuOperations) -> tuple[Rows, bool]:
    """Input copies where no optimizer shows, and whether they look like batches.

    Of the sizes that come at regular distances, counted in operations, and through most of the
    run, the one that moves most bytes.
    """
    groups = input_groups(operations)
    regular = [
        starts
        for group in groups
        if len(starts := _first_of_batch(operations, group)) >= 3
        and _keeps_distance(np.diff(starts))
    ]
    if not regular:
        return np.empty(0, np.intp), False
    extents = [int(operations.start[rows[-1]] - operations.start[rows[0]]) for rows in regular]
    starts = next(r for r, e in zip(regular, extents, strict=True) if e >= 0.5 * max(extents))
    copies = np.sort(np.concatenate(groups))
    each = np.diff(np.searchsorted(copies, starts))
    return starts, float(np.median(each)) <= _MOST_COPIES


def _keeps_distance(between: NDArray[np.intp]) -> bool:
    """Whether one distance, or two (the last micro-batch of a step is longer), are the rule."""
    rest = between
    for _ in range(2):
        usual = np.bincount(rest).argmax() if len(rest) else 0
        rest = rest[np.abs(rest - usual) > 0.1 * usual + 1]
    return len(rest) <= _IRREGULAR * len(between)


def _first_of_batch(operations: GpuOperations, copies: Rows) -> Rows:
    """The first of each run of copies with nothing computed between them."""
    computed = np.cumsum(operations.classes == OperationClass.COMPUTE)[copies]
    first: Rows = copies[np.concatenate([[True], np.diff(computed) > 0])]
    return first


def find_closers(operations: GpuOperations, inputs: Rows, bursts: Bursts | None) -> Bursts:
    """The last operation of each step, but for copies to the host, where only input copies part
    the stream.

    The stretches between copies are told apart by which of the common operations they have.
    Where one sort comes at a constant distance of several, the others are micro-batches whose
    gradients it applies; else the commonest sort is a step, and the rest is validation. Stretches
    in which the optimizer's kernels show (before they are captured in a graph) end steps too.
    """
    working = np.flatnonzero(operations.events.kind != Kind.COPY_D2H)
    ends = working[np.searchsorted(working, np.append(inputs[1:], len(operations))) - 1]
    sorts = _sorts_of_stretches(operations, inputs)
    places = [np.flatnonzero(sorts == sort) for sort in range(int(sorts.max()) + 1)]
    closing = max(places, key=len)
    for place in places:
        apart = np.diff(place)
        if len(apart) < 2 or len(place) < 0.5 * len(inputs) / max(np.median(apart), 1):
            continue
        if np.median(apart) > 1 and np.mean(apart == np.median(apart)) >= 0.75:
            closing = place
    sizes = ends[closing] - inputs[closing]
    last = np.minimum(ends[closing], inputs[closing] + int(np.median(sizes)))
    if bursts is not None:
        seen = np.searchsorted(inputs, bursts.last) - 1
        last = np.union1d(last, ends[np.setdiff1d(seen[seen >= 0], closing)])
    return Bursts(last, last)


def _sorts_of_stretches(operations: GpuOperations, inputs: Rows) -> NDArray[np.intp]:
    """A number for each stretch from one input copy to the next; alike ones have the same."""
    rows = slice(int(inputs[0]), len(operations))
    tokens = operations.events.name[rows].astype(np.int64) * 64 + operations.events.kind[rows]
    _, tokens = np.unique(tokens, return_inverse=True)
    stretch = np.searchsorted(inputs, np.arange(rows.start, rows.stop), "right") - 1
    kinds = int(tokens.max()) + 1
    pairs = distinct_ids(stretch * kinds + tokens)
    common = np.flatnonzero(np.bincount(pairs % kinds) >= 0.1 * len(inputs))
    pairs = pairs[np.isin(pairs % kinds, common)]
    has = np.zeros((len(inputs), len(common)), bool)
    has[pairs // kinds, np.searchsorted(common, pairs % kinds)] = True
    _, sorts = np.unique(has, axis=0, return_inverse=True)
    return np.asarray(sorts).reshape(-1)
