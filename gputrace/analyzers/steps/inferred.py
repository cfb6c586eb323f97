"""Training steps inferred from the kernel stream, by the optimizer and the input copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from gputrace.analyzers.grouping import median
from gputrace.analyzers.kernel_names import PRODUCTS, family_of, is_optimizer
from gputrace.analyzers.operations import GpuOperations, OperationClass
from gputrace.analyzers.steps.rollouts import begin_turns, generates
from gputrace.analyzers.steps.windows import Interlude, StepWindows, without_validation
from gputrace.model.events import Kind, distinct_ids, is_among, number_ids
from gputrace.model.intervals import Intervals, Times
from gputrace.model.options import Window
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace

_LEAST_STEPS: Final = 3
_LEAST_KERNELS: Final = 5
"""Fewer kernels an iteration than this are no training and no loop worth cutting."""
_WHOLE_STEP_PART: Final = 0.95
"""A first stretch with fewer operations than this part of a usual step is a step cut off."""
_MORE_THAN_STEP_RATIO: Final = 1.2
"""A stretch with this many times the operations of a usual step holds more than the step."""
_COPY_DISTANCE_SCATTER: Final = 0.1
"""Usual deviation of that distance, as a part of a step, from which the copies follow no step."""
_NEXT_STEP_COPY_PART: Final = 0.5
"""An input copy later than this part of a step after the optimizer is for the step after next."""
_BEGINNING: Final = 16
"""Operations from its first product on by which the first turn's beginning is known."""


class Runs(Struct, frozen=True, dict=True):
    """Runs of a GPU's operations, such as those of a step or of an optimizer: first and last row
    of each.
    """

    first: Rows
    last: Rows

    def __len__(self) -> int:
        return len(self.first)


def infer_training(
    trace: Trace, operations: GpuOperations, rolled: Intervals
) -> StepWindows | None:
    """Return the steps of the rank whose main GPU this is; None if nothing shows that it trains.

    ``rolled`` are the rollouts that it updates on.
    """
    bursts = find_bursts(trace, operations)
    alone = inputs_alone(operations)
    inputs = alone.starts
    if bursts is not None and _cover(operations, bursts, inputs):
        turns = _infer_turns(trace, operations, bursts, rolled)
        if turns is not None:
            return turns
        inputs = inputs_of_steps(operations, bursts)
        sure = 0.85, "an optimizer's kernels, once a step"
        if len(inputs):
            sure = 0.95, "an optimizer's kernels and an input copy of constant size, once a step"
        return _windows(operations, _cut(operations, bursts, inputs), sure)
    if len(inputs) < _LEAST_STEPS:
        return None
    # A copy late in a step, as of what its results are scaled to, is no start of the next.
    lead = lead_of(tokens_of(operations), inputs)
    if lead == inputs[-1] + int(median(np.diff(inputs))) - len(operations):
        inputs = inputs - lead
    closers = find_closers(operations, inputs, bursts)
    if len(closers) < _LEAST_STEPS or not _does_work(operations, closers):
        return None
    if lead_to_graphs(operations, int(inputs[-1])):
        return None
    cuts = _cut(operations, closers, inputs)
    if alone.once_a_batch and may_train(trace, operations):
        sure = 0.8, "an input copy of constant size, once per batch"
        return _windows(operations, cuts, sure)
    sure = 0.4, "host-to-device copies repeat, but no optimizer and no backward pass shows"
    return _windows(operations, cuts, sure, "iterations")


def _infer_turns(
    trace: Trace, operations: GpuOperations, updates: Runs, rolled: Intervals
) -> StepWindows | None:
    """Return the turns of reinforcement learning; None if nothing is generated for the updates."""
    begun = np.diff(np.searchsorted(rolled.end, operations.start[updates.last]), prepend=0) > 0
    begins = begin_turns(begun)
    if begins is None:
        begins = begin_turns(generates(trace, operations, updates.last))
    if begins is None:
        return None
    first = np.flatnonzero(begins)
    ends = np.append(first[1:] - 1, len(begins) - 1)
    if first[0]:  # Of the turn before, only updates were recorded.
        ends = np.append(first[0] - 1, ends)
    after = _first_after(operations, updates.last[ends])
    cuts = Runs(after[:-1], after[1:] - 1)
    # What else was recorded first may be whole, and then begins with the products of the others.
    products = _kernels_named(trace, operations, _is_product)
    if not first[0] and len(products):
        tokens, begin = tokens_of(operations), int(after[len(after) // 2 - 1])
        usual, start = int(products[np.searchsorted(products[:-1], begin)]), int(products[0])
        is_whole = np.array_equal(tokens[usual:][:_BEGINNING], tokens[start:][:_BEGINNING])
        while min(usual - begin, start) > 0 and tokens[start - 1] == tokens[usual - 1]:
            usual, start = usual - 1, start - 1
        if is_whole:
            cuts = Runs(np.append(start, cuts.first), after - 1)
    sure = 0.85, "an optimizer's kernels after tokens were generated, once a turn"
    return replace(_windows(operations, cuts, sure, "rl"), interludes=())


def _cover(operations: GpuOperations, bursts: Runs, inputs: Rows) -> bool:
    """Return whether the optimizer is seen throughout the run, not only before a graph's
    capture.
    """
    if len(bursts) < _LEAST_STEPS:
        return False
    first, last = operations.start[bursts.first[0]], operations.start[bursts.last[-1]]
    fed_after = np.count_nonzero(inputs > bursts.last[-1])
    seldom = fed_after < max(_LEAST_STEPS, 0.5 * len(inputs))
    return bool(seldom and operations.start[-1] - last <= last - first)


def lead_to_graphs(operations: GpuOperations, last: int) -> bool:
    """Return whether steps up to a row led to the capture of a graph that is launched ever since:
    the graphs after it work longer than all before.
    """
    lengths = operations.events.end - operations.events.start
    graphs = operations.events.kind == Kind.GRAPH
    after = lengths[last + 1 :][graphs[last + 1 :]]
    return bool(after.sum() > lengths[: last + 1].sum())


def _does_work(operations: GpuOperations, closers: Runs) -> bool:
    work = np.flatnonzero(operations.classes == OperationClass.COMPUTE)
    graphs = bool((operations.events.kind == Kind.GRAPH).any())
    each = np.diff(np.searchsorted(work, closers.last, "right"))
    return graphs or float(median(each)) >= _LEAST_KERNELS


def _cut(operations: GpuOperations, bursts: Runs, inputs: Rows) -> Runs:
    """Return the runs between the end of each step and the next step's first operation."""
    after = _first_after(operations, bursts.last)
    first = after[:-1].copy()
    place = np.searchsorted(inputs, bursts.last, "right")
    each = int(median(np.diff(place))) if len(place) > 1 else 0
    if each and _start_after_end(bursts, inputs):
        copies = place[1:] - each
        fed = copies >= place[:-1]
        first[fed] = np.maximum(inputs[copies[fed]], first[fed])
    elif not each:
        first = _of_usual_size(operations, _first_working(operations, first), bursts.last[1:])
    before = int(place[0])
    if before < each:
        return Runs(first, after[1:] - 1)
    start = int(inputs[before - each]) if each else _first_like(operations, first, bursts)
    cuts = Runs(np.append(start, first), after - 1)
    return Runs(first, after[1:] - 1) if not each and _is_cut_off(cuts) else cuts


def _first_working(operations: GpuOperations, rows: Rows) -> Rows:
    """From each row on, the first operation that is not saving (to the host) or waiting."""
    kinds = operations.events.kind
    waiting = (operations.classes == OperationClass.COMMUNICATION) & (kinds == Kind.KERNEL)
    working = np.flatnonzero(~waiting & (kinds != Kind.COPY_D2H))
    return np.append(working, len(operations) - 1)[np.searchsorted(working, rows)]


def _of_usual_size(operations: GpuOperations, first: Rows, last: Rows) -> Rows:
    """Later starts for steps with far more operations than usual: validation came before them.

    Such a step starts where an operation like the others' first is followed by as many as usual.
    Operations strange to the other steps are not validation but autotuning, and stay.
    """
    usual = int(median(last - first))
    middle = int(np.argmin(np.abs(last - first - usual)))
    names = operations.events.name
    model = names[first[middle] : last[middle] + 1]
    first = first.copy()
    for step in np.flatnonzero(last - first > _MORE_THAN_STEP_RATIO * usual).tolist():
        like = np.flatnonzero(names[first[step] : last[step]] == model[0]) + first[step]
        if not len(like):
            continue
        start = int(like[np.argmin(np.abs(last[step] - like - usual))])
        if np.isin(names[first[step] : last[step] + 1], model).mean() >= _WHOLE_STEP_PART:
            first[step] = start
    return first


def _is_cut_off(cuts: Runs) -> bool:
    """Return whether the first step is cut off at its beginning."""
    sizes = cuts.last - cuts.first + 1
    return len(cuts) > _LEAST_STEPS and bool(sizes[0] < _WHOLE_STEP_PART * median(sizes[1:]))


def _start_after_end(bursts: Runs, inputs: Rows) -> bool:
    """Return whether input copies come at one distance after the optimizer, not beside the step
    before (prefetched), nor whenever a loader is done.
    """
    place = np.searchsorted(inputs, bursts.last, "right")[:-1]
    waiting = inputs[np.minimum(place, len(inputs) - 1)] - bursts.last[:-1]
    usual, step = float(median(waiting)), float(median(np.diff(bursts.last)))
    scatter = float(median(np.abs(waiting - usual)))
    return usual <= _NEXT_STEP_COPY_PART * step and scatter <= _COPY_DISTANCE_SCATTER * step


def _first_after(operations: GpuOperations, last: Rows) -> Rows:
    """Return the operation after each optimizer run and the copies to the host that close a step.

    A loss that is read back closes every step; more such copies than usual are a checkpoint.
    """
    others = np.flatnonzero(operations.events.kind != Kind.COPY_D2H)
    next_other = np.append(others, len(operations))[np.searchsorted(others, last + 1)]
    closing = next_other - last - 1
    return last + 1 + np.minimum(closing, int(median(closing)))


def _first_like(operations: GpuOperations, first: Rows, bursts: Runs) -> int:
    """Return the first operation of the step before the first optimizer run.

    It is the one that later steps begin with; computing just before it is autotuning, and belongs
    to it.
    """
    until = int(bursts.first[0])
    begin = operations.events.name[int(first[len(first) // 2])]
    like = int(np.argmax(operations.events.name[:until] == begin)) if until else 0
    other = np.flatnonzero(operations.classes[:like] != OperationClass.COMPUTE)
    return int(other[-1]) + 1 if len(other) else 0


def _windows(
    operations: GpuOperations, cuts: Runs, sure: tuple[float, str], kind: str = "training"
) -> StepWindows:
    starts = window_starts(operations, cuts.first)
    ends = operations.reach[np.minimum(cuts.last, len(operations) - 1)]
    ends, interludes = part_interludes(operations, cuts.first, cuts.last, starts, ends)
    confidence, reason = sure
    return StepWindows(
        rank=operations.gpu.rank,
        start=starts,
        end=ends,
        busy_from=operations.start[cuts.first],
        source="inferred",
        kind=kind,
        confidence=confidence,
        reason=reason,
        interludes=interludes,
    )


def window_starts(operations: GpuOperations, first: Rows) -> Times:
    """Return the start of the gap before each operation: when all operations before it had ended.

    An operation that starts while others run has no gap before it: its own start then.
    """
    before = operations.reach[np.maximum(first - 1, 0)]
    starts = np.minimum(before, operations.start[first])
    return np.where(first > 0, starts, operations.start[first])


Rows = NDArray[np.intp]

BACKWARD: Final = r"(?i:backward|backprop|bwd|(?<!wino)grad(?!ient))"
"""Names of a backward pass's kernels. Winograd convolves forwards; gradients are of images, too."""

LEAST_INPUT_BYTES: Final = 1024
"""Smaller copies are scalars and pointers, not batches."""

_LEAST_APART: Final = 8
"""Operations from one optimizer kernel to the next that are more than one run's own."""

_IRREGULAR_PART: Final = 0.4
"""Part of the distances between input copies that may be out of the ordinary."""

_PARTS_MISSING: Final = 0.25
"""Maximum part of the batches in which one size may be missing, or come twice."""
_MOST_COPIES: Final = 4
"""More sizeable input copies than this an iteration, with no optimizer: weights, not batches."""


def find_bursts(trace: Trace, operations: GpuOperations) -> Runs | None:
    """Return the optimizer's runs on this GPU; None if names do not identify its kernels."""
    rows = _kernels_named(trace, operations, is_optimizer)
    if len(rows) < 3:
        return None
    between = np.diff(rows)
    cut = np.flatnonzero(between > _valley(between))
    # An optimizer goes on after it has cloned or filled its state, as in its first step.
    others = np.flatnonzero(is_among(operations.events.kind, (Kind.KERNEL, Kind.GRAPH)))
    cut = cut[np.searchsorted(others, rows[cut + 1]) - np.searchsorted(others, rows[cut]) > 1]
    bursts = Runs(np.concatenate([rows[:1], rows[cut + 1]]), np.concatenate([rows[cut], rows[-1:]]))
    return _one_a_batch(bursts, inputs_alone(operations).starts)


def _one_a_batch(bursts: Runs, inputs: Rows) -> Runs:
    """Return the last run for each batch, where nearly every batch that has some has several."""
    if len(inputs) < 3:
        return bursts
    batch = np.searchsorted(inputs, bursts.last)
    _, counts = np.unique(batch, return_counts=True)
    if median(counts) < 2 or np.mean(counts == median(counts)) < 0.75:
        return bursts
    final = np.append(np.diff(batch) > 0, True)
    return Runs(bursts.first[final], bursts.last[final])


def may_train(trace: Trace, operations: GpuOperations) -> bool:
    """Return whether kernels of a backward pass ran, by name, or graphs that may contain some."""
    if len(_kernels_named(trace, operations, re.compile(BACKWARD).search)):
        return True
    # What graphs hold is seen where the network ran before they were captured.
    graphs = np.flatnonzero(operations.events.kind == Kind.GRAPH)
    products = _kernels_named(trace, operations, _is_product)
    return len(graphs) > 0 and not (products < graphs[0]).any()


def _is_product(name: str) -> bool:
    return family_of(name) in PRODUCTS


def _kernels_named(
    trace: Trace, operations: GpuOperations, matches: Callable[[str], object]
) -> Rows:
    text = trace.names(operations.kernel_names)
    wanted = [id for id, name in text.items() if matches(name)]
    named = is_among(operations.events.name, wanted)
    return np.flatnonzero(named & (operations.events.kind == Kind.KERNEL))


def _valley(counts: NDArray[np.intp]) -> float:
    """Return the number that best separates small from large counts (Otsu 1979, on logarithms).

    If all are of one size, every count is large.
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
    rows, sizes = _large_copies(operations), operations.events.bytes
    rows = rows[np.argsort(sizes[rows], kind="stable")]
    sizes, first = np.unique(sizes[rows], return_index=True)
    groups = np.split(rows, first[1:])
    often = [(int(s) * len(g), g) for s, g in zip(sizes, groups, strict=False) if len(g) >= 3]
    return [group for _, group in sorted(often, key=lambda moved: -moved[0])]


def _large_copies(operations: GpuOperations) -> Rows:
    rows = np.flatnonzero(operations.events.kind == Kind.COPY_H2D)
    rows = rows[operations.events.bytes[rows] >= LEAST_INPUT_BYTES]
    return rows[~is_among(rows, find_returned(operations)[1].tolist())]


def find_returned(operations: GpuOperations) -> tuple[Rows, Rows]:
    """Return the copies to the host after which a copy of the same size comes back with no kernel
    between the two, and the latter: gradients and parameters of an optimizer on the host.

    More of them come one after another than bring a batch, with less than a model computes between.
    """
    kinds, sizes = operations.events.kind, operations.events.bytes
    gone, back = (np.flatnonzero(kinds == kind) for kind in (Kind.COPY_D2H, Kind.COPY_H2D))
    gone, back = (rows[sizes[rows] >= LEAST_INPUT_BYTES] for rows in (gone, back))
    both = set(sizes[gone].tolist()) & set(sizes[back].tolist())
    if not both:
        return gone[:0], back[:0]
    gone, back = (rows[is_among(sizes[rows], both)] for rows in (gone, back))
    back = back[back > gone[0]] if len(gone) else gone
    kernels = np.flatnonzero(is_among(kinds, (Kind.KERNEL, Kind.GRAPH)))
    gone = gone[np.searchsorted(gone, back) - 1]
    before = np.searchsorted(kernels, back)
    at_once = np.searchsorted(kernels, gone) == before
    gone, back, before = gone[at_once], back[at_once], before[at_once]
    run = np.cumsum(np.diff(before, prepend=0) >= _LEAST_KERNELS)
    several = np.bincount(run, minlength=1)[run] > _MOST_COPIES
    return gone[several], back[several]


def inputs_of_steps(operations: GpuOperations, bursts: Runs) -> Rows:
    """Return the input copies that come equally often before every optimizer run, in order."""
    chosen = [
        group
        for group in input_groups(operations)
        if _is_regular(np.diff(np.searchsorted(group, bursts.last)))
    ]
    if chosen:
        return np.sort(np.concatenate(chosen))
    rows = _large_copies(operations)
    of_any_size = _is_regular(np.diff(np.searchsorted(rows, bursts.last)))
    return rows if of_any_size else np.empty(0, np.intp)


def _is_regular(counts: NDArray[np.intp]) -> bool:
    """Return whether nearly all steps have the same number of copies, other than none."""
    if not len(counts):
        return False
    usual = int(median(counts))
    return usual > 0 and float(np.mean(counts == usual)) >= 0.75


class Inputs(Struct, frozen=True, dict=True):
    """Input copies of a GPU on which no optimizer is recognised."""

    copies: Rows
    """All copies of all batches."""
    starts: Rows
    """First copy of each batch."""
    once_a_batch: bool
    """True if few other large copies come between two batches."""


def inputs_alone(operations: GpuOperations) -> Inputs:
    """Find the input copies where no optimizer is recognised.

    Of the sizes that come at regular distances, counted in operations, and through most of the
    run, the one that moves most bytes is a part of each batch; so is every size of which one comes
    for each of those. A batch starts with whichever part comes first.
    """
    groups = input_groups(operations)
    firsts = [_first_of_batch(operations, group) for group in groups]
    regular = [r for r in firsts if len(r) >= _LEAST_STEPS and _keeps_distance(np.diff(r))]
    if not regular:
        nothing = np.empty(0, np.intp)
        return Inputs(nothing, nothing, False)
    extents = [int(operations.start[rows[-1]] - operations.start[rows[0]]) for rows in regular]
    most = next(r for r, e in zip(regular, extents, strict=True) if e >= 0.5 * max(extents))
    starts, ahead, parts = most, 0.0, []
    for group, first in zip(groups, firsts, strict=True):
        between = np.diff(np.searchsorted(first, most))
        several = abs(len(first) - len(most)) > _PARTS_MISSING * len(most)
        if several or median(between) != 1:
            continue
        parts.append(group)
        following = np.searchsorted(most, first)
        inside = (following > 0) & (following < len(most))
        row, following = first[inside], following[inside]
        before, after = most[following] - row, row - most[following - 1]
        if len(row) and ahead < median(before) < median(after):
            starts, ahead = first, float(median(before))
    each = np.diff(np.searchsorted(np.sort(np.concatenate(groups)), most))
    return Inputs(np.sort(np.concatenate(parts)), starts, float(median(each)) <= _MOST_COPIES)


def _keeps_distance(between: NDArray[np.intp]) -> bool:
    """Return whether one distance, or two (the last micro-batch of a step is longer), are
    the rule.
    """
    rest = between
    for _ in range(2):
        usual = np.bincount(rest).argmax() if len(rest) else 0
        rest = rest[np.abs(rest - usual) > 0.1 * usual + 1]
    return len(rest) <= _IRREGULAR_PART * len(between)


def _first_of_batch(operations: GpuOperations, copies: Rows) -> Rows:
    """Return the first of each run of copies with nothing computed between them."""
    computing = np.flatnonzero(operations.classes == OperationClass.COMPUTE)
    computed = np.searchsorted(computing, copies)
    first: Rows = copies[np.concatenate([[True], np.diff(computed) > 0])]
    return first


def find_closers(operations: GpuOperations, inputs: Rows, bursts: Runs | None) -> Runs:
    """Return the last operation of each step but for copies to the host, if input copies part
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
        if len(apart) < 2 or len(place) < 0.5 * len(inputs) / max(median(apart), 1):
            continue
        if median(apart) > 1 and np.mean(apart == median(apart)) >= 0.75:
            closing = place
    sizes = ends[closing] - inputs[closing]
    last = np.minimum(ends[closing], inputs[closing] + int(median(sizes)))
    if bursts is not None:
        seen = np.searchsorted(inputs, bursts.last) - 1
        last = np.union1d(last, ends[np.setdiff1d(seen[seen >= 0], closing)])
    return Runs(last, last)


def _sorts_of_stretches(operations: GpuOperations, inputs: Rows) -> NDArray[np.intp]:
    """Number the stretches from one input copy to the next; alike ones have the same number."""
    rows = slice(int(inputs[0]), len(operations))
    tokens = number_ids(tokens_of(operations)[rows])[1]
    stretch = np.searchsorted(inputs, np.arange(rows.start, rows.stop), "right") - 1
    kinds = int(tokens.max()) + 1
    pairs = distinct_ids(stretch * kinds + tokens)
    common = np.flatnonzero(np.bincount(pairs % kinds) >= 0.1 * len(inputs))
    pairs = pairs[np.isin(pairs % kinds, common)]
    has = np.zeros((len(inputs), len(common)), bool)
    has[pairs // kinds, np.searchsorted(common, pairs % kinds)] = True
    _, sorts = np.unique(has, axis=0, return_inverse=True)
    return np.asarray(sorts).reshape(-1)


ALIKE_COSINE: Final = 0.95
"""Cosine of the kernel counts of a stretch with those of the usual stretch."""


def lead_of(tokens: NDArray[np.int64], cuts: Rows) -> int:
    """Return how many operations before the first cut are those before another: of the loop."""
    back = np.arange(1, min(int(cuts[0]), int(median(np.diff(cuts)))) + 1)
    before = tokens[cuts[:, None] - back]
    return int(np.append((before[1:] == before[0]).any(axis=0), False).argmin())


FOREIGN_PART: Final = 0.05
"""More operations than usual by this part of a step, between a step's end and the next's start,"""
_LONG_PART: Final = 0.5
"""or any that last longer than usual by this part of a step, belong to neither."""


_FORWARD_KERNELS_SHARE: Final = 0.2
"""Share of a step's different kernels from which work between steps may be a forward pass."""

_WRITES: Final = r"_*(f?write|pwrite|writev|pwritev|fsync|fdatasync|fflush|sync_file)"
_SAVING_COPIES: Final = 3
"""More copies to the host than this, before anything is computed, save a checkpoint."""


def part_interludes(
    operations: GpuOperations, first: Rows, last: Rows, starts: Times, ends: Times
) -> tuple[Times, tuple[Interlude, ...]]:
    """Return the ends of steps: where the next starts, unless something foreign lies between.

    ``first`` and ``last`` are each step's own operations, ``starts`` that of its window, ``ends``
    that of the last own operation.
    """
    if len(starts) < 2:
        return ends, ()
    between = first[1:] - last[:-1] - 1
    size, length = median(last - first + 1), median(np.diff(starts))
    more = max(3.0, FOREIGN_PART * float(size))
    # A first operation that comes late in its own step leaves more between, and adds none.
    apart = np.diff(last)
    many = (between > median(between) + more) & (apart > median(apart) + more)
    pause = starts[1:] - ends[:-1]
    long = pause > median(pause) + _LONG_PART * float(length)
    to_host = np.cumsum(np.append(0, operations.events.kind == Kind.COPY_D2H))
    copies = to_host[first[1:]] - to_host[last[:-1] + 1]
    saved = copies > median(copies) + _SAVING_COPIES
    foreign = (many | long | saved) & (starts[1:] > ends[:-1])
    usual = int(np.argmin(np.abs(last - first + 1 - size)))
    model = _computed(operations, slice(int(first[usual]), int(last[usual]) + 1))
    interludes: list[Interlude] = []
    for step in np.flatnonzero(foreign).tolist():
        rows = slice(int(last[step]) + 1, int(first[step + 1]))
        names = _computed(operations, rows)
        # A loader that works on the GPU launches many of a few kernels that steps have, too.
        loads = many[step] and not saved[step]
        if loads and 0 < len(names) < _FORWARD_KERNELS_SHARE * len(model) and names <= model:
            foreign[step] = False
            continue
        interludes += _split(operations, step, rows, int(ends[step]), int(starts[step + 1]))
    return np.append(np.where(foreign, ends[:-1], starts[1:]), ends[-1]), tuple(interludes)


_PLAIN: Final = ("elementwise", "reduction", "layout", "normalisation", "optimizer")
"""Families of kernels that are no pass of a network by themselves."""


def with_averages(trace: Trace, operations: GpuOperations, windows: StepWindows) -> StepWindows:
    """Return the windows without validation shorter than a step whose kernels multiply nothing: an
    average of the weights, or a norm of them, every few steps is a part of the next step.
    """
    if not any(interlude.phase == "validation" for interlude in windows.interludes):
        return windows
    text = trace.names(operations.kernel_names)
    plain = [id for id, name in text.items() if family_of(name) in _PLAIN]
    kinds = operations.events.kind
    computing = np.flatnonzero(operations.classes == OperationClass.COMPUTE)
    passes = computing[
        ~(is_among(operations.events.name[computing], plain) & (kinds[computing] == Kind.KERNEL))
    ]
    usual = median(windows.lengths)

    def averages(interlude: Interlude) -> bool:
        if interlude.end - interlude.start > usual:
            return False
        ran, passed = (
            np.diff(np.searchsorted(operations.start[rows], (interlude.start, interlude.end)))[0]
            for rows in (computing, passes)
        )
        return bool(ran and not passed)

    return without_validation(windows, averages)


def _computed(operations: GpuOperations, rows: slice) -> set[int]:
    """Return the name ids of the kernels that compute among some operations."""
    names, classes = operations.events.name[rows], operations.classes[rows]
    return set(names[classes == OperationClass.COMPUTE].tolist())


def without_foreign(operations: GpuOperations, first: Rows, last: Rows) -> Rows:
    """Later firsts of steps that begin with work which is not theirs.

    A marker sees validation between two optimizer steps as a part of the second. Such a step has
    far more operations than usual, of which the last are those of a usual step, from its first on;
    the many that a search for algorithms adds lie among its own. Only what comes before the next
    step's first counts: collectives that nothing waits for may end steps later.
    """
    last = np.minimum(last, np.append(first[1:] - 1, last[-1]))
    size = int(median(last - first + 1))
    usual = int(np.argmin(np.abs(last - first + 1 - size)))
    tokens = tokens_of(operations)
    model = tokens[first[usual] : last[usual] + 1]
    first = first.copy()
    for step in np.flatnonzero(last - first + 1 > _MORE_THAN_STEP_RATIO * size).tolist():
        begin = int(last[step]) + 1 - len(model)
        near = range(begin - int(FOREIGN_PART * size), begin + int(FOREIGN_PART * size) + 1)
        like = [row for row in near if row > first[step] and tokens[row] == model[0]]
        row = min(like, key=lambda row: abs(row - begin), default=-1)
        if row >= 0 and alike_part(model, tokens[row : last[step] + 1]) >= ALIKE_COSINE:
            first[step] = row
    return first


def tokens_of(operations: GpuOperations) -> NDArray[np.int64]:
    """Return a number for each operation, the same for those of one name and kind."""
    return operations.events.name.astype(np.int64) * 64 + operations.events.kind


def alike_part(a: NDArray[np.int64], b: NDArray[np.int64]) -> float:
    """Return the part of the operations that two stretches have in common, whatever their order."""
    names, place = number_ids(np.concatenate([a, b]))
    counts = [np.bincount(part, minlength=len(names)) for part in np.split(place, [len(a)])]
    return float(np.minimum(*counts).sum() / max(len(a), len(b), 1))


def until_written(trace: Trace, windows: StepWindows, process: int) -> StepWindows:
    """Return the windows with checkpoints that last until the host has written the file.

    The GPU shows only the copies; that they are being written, the C library's calls show.
    """
    saved = [i for i in windows.interludes if i.phase == "checkpoint"]
    if not saved or Kind.OS_RUNTIME not in trace.kinds:
        return windows
    span = Window(min(i.start for i in saved), int(windows.end[max(i.after for i in saved) + 1]))
    events = trace.events([Kind.OS_RUNTIME], ("start", "end", "name", "process"), span)
    names = trace.names(distinct_ids(events.name))
    writes = [id for id, text in names.items() if re.match(_WRITES, text)]
    events = events.select(np.isin(events.name, writes) & (events.process == process))
    starts, interludes = windows.start.copy(), list(windows.interludes)
    for index, checkpoint in enumerate(interludes):
        following = checkpoint.after + 1
        if checkpoint.phase != "checkpoint" or checkpoint.end != starts[following]:
            continue
        until = int(windows.busy_from[following])
        late = events.end[(events.start >= checkpoint.start) & (events.end <= until)]
        starts[following] = max(checkpoint.end, int(late.max(initial=checkpoint.end)))
        interludes[index] = replace(checkpoint, end=int(starts[following]))
    return replace(windows, start=starts, interludes=tuple(interludes))


def _split(
    operations: GpuOperations, step: int, rows: slice, start: int, end: int
) -> Iterator[Interlude]:
    """Yield a checkpoint, which copies to the host before it computes, then what else there is."""
    kinds = operations.events.kind[rows]
    computing = np.flatnonzero(operations.classes[rows] == OperationClass.COMPUTE)
    first = int(computing[0]) if len(computing) else len(kinds)
    saved = np.flatnonzero(kinds[:first] == Kind.COPY_D2H)
    if len(saved) > _SAVING_COPIES:
        until = int(operations.reach[rows][saved[-1]]) if len(computing) else end
        yield Interlude("checkpoint", start, until, step, f"{len(saved)} copies to the host")
        start = until
    count, phase = len(kinds) - len(saved), "validation"
    evidence = f"waits for other ranks in {count} operations"
    if len(computing):
        evidence = f"kernels ({len(computing)}) and no optimizer"
    elif not (operations.classes[rows] == OperationClass.COMMUNICATION).any():
        phase, evidence = "between", f"operations ({count}) that compute nothing"
    if end > start:
        yield Interlude(phase, start, end, step, evidence)
