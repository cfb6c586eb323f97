"""Audit of a recording: launches without their operation, operations without their call, steps
without work, collectives that a rank lacks, and steps that each lack some of their kernels.

Whole recordings have next to none of these: of 40 recordings of nsys, nvprof, Kineto and gputrace,
all but cut ones have the operation of each launch and the call of each operation, to 0.1 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives import Collectives
from gputrace.analyzers.cuda_api_calls import NOBODY, Call, CudaApiCalls, find_captures
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, Shard
from gputrace.analyzers.grouping import median
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps import FoundSteps
from gputrace.model.events import Kind, Mask, distinct_ids, number_ids
from gputrace.model.intervals import Times, number_windows
from gputrace.model.results import Missing

WORTH: Final = 0.01
"""Share of the rows that must be missing to be reported."""
_FEWEST_ROWS: Final = 100
"""Minimum number of rows, and of steps times names, by which a share is estimated."""
_FEWEST_LACKING: Final = 10
"""Minimum number of kernels that all steps together must lack."""
_FEWEST_STEPS: Final = 10
_FEWEST_WHOLE: Final = 3
"""Minimum number of steps that have a number of kernels of a name for it to be the usual one."""
_MOST_CELLS: Final = 1 << 24
"""Maximum number of steps times names to count."""
_EXPECTED_SHARE: Final = 0.8
"""Share of the steps that a kernel must be in to be expected in each."""
_USUAL_SIZE: Final = 0.4
"""Maximum deviation of a step's number of kernels from the median, as a fraction of it."""
_RANDOM_SCATTER_RATIO: Final = 3.0
"""Maximum ratio of the scatter over steps, and over names, to what removal at random causes."""
_EMPTY_CALL_PART: Final = 0.5
"""Fraction of the shortest call with an operation below which a call without one did nothing."""
_FEWEST_COLLECTIVES: Final = 3
"""Minimum number of collectives that a rank must lack."""
_OWN_GROUP: Final = 1 / 3
"""Number of collectives of some GPUs, as a fraction of those of more GPUs, from which these GPUs
are a group of the program's own."""
_MOST_LACK: Final = 0.25
"""Maximum share of the GPUs of a collective that may lack it, if more than one does."""
_MOST_GROUPS: Final = 1024
"""Maximum number of different groups of GPUs to look at."""


def find_missing(
    gpus: PerGpu, all_steps: FoundSteps, collectives: Collectives
) -> tuple[Missing, ...]:
    """Return the rows that a recording lacks, the largest share first.

    A rank's other steps tell only of ranks of which calls and marks show nothing, and other ranks'
    collectives, which are few to estimate a share by, of those whose steps show nothing, either.
    """
    if not gpus.operations:
        return ()
    missing = [row for part in gpus.each_shard(_unmatched) for row in part]
    missing += list(_steps_without_work(gpus, all_steps))
    known = {row.rank for row in missing}
    silent = [lane for lane in gpus.lanes if lane.gpu.rank in all_steps.by_rank.keys() - known]
    windows = [all_steps.by_rank[lane.gpu.rank] for lane in silent]
    edges = (
        zip(*((of_rank.start, of_rank.end) for of_rank in windows), strict=True)
        if windows
        else ((), ())
    )
    shares = gpus.each(_thinned, silent, *edges)
    for lane, (share, count) in zip(silent, shares, strict=True):
        if share >= WORTH:
            where = lane.gpu.rank, share, count, *lane.window
            missing.append(Missing("kernels", *where, "steps are thinned", lane.gpu.gpu))
            known.add(lane.gpu.rank)
    missing += [row for row in _lone_collectives(gpus, collectives) if row.rank not in known]
    return tuple(sorted(missing, key=lambda row: -row.share))


def _unmatched(shard: Shard) -> list[Missing]:
    """Return the calls and operations of each process of a shard that lack the other."""
    calls = shard.calls
    if calls is None:
        return []
    has = np.zeros(len(calls.start), np.bool_)
    for begin, end in find_captures(shard.trace, calls).tolist():
        # What other threads launch meanwhile, as the backward pass, may be captured too.
        for thread in calls.threads_of(calls.threads[calls.thread[begin]][0]):
            first, last = calls.first[thread : thread + 2]
            edges = calls.start[begin], calls.end[end]
            meanwhile = first + np.searchsorted(calls.start[first:last], edges)
            has[slice(*meanwhile)] = True
    missing: list[Missing] = []
    by_process: dict[int, list[GpuOperations]] = {}
    for operations in shard.operations:
        by_process.setdefault(operations.gpu.process, []).append(operations)
    for process, gpus in by_process.items():
        longest, last = 0, 0
        for operations in gpus:
            issued_by = calls.issued_by(operations.events)
            known = issued_by != NOBODY
            some = slice(None) if known.all() else known
            has[issued_by[some]] = True
            # How far the host runs ahead.
            ahead = int((operations.start[some] - calls.start[issued_by[some]]).max(initial=0))
            longest, last = max(longest, ahead), max(last, operations.span.end)
            missing += _without_call(operations, known)
        if shard.trace.cut is not None:
            last = min(last, shard.trace.cut.end)  # Of the operations after it, few came along.
        missing += _without_operation(calls, has, process, gpus, last - longest)
    return missing


def _without_operation(
    calls: CudaApiCalls, has: Mask, process: int, gpus: Sequence[GpuOperations], until: int
) -> Iterator[Missing]:
    """Yield the launches of a process that lack their operation.

    What is issued at the end may not have run when the recording ended, what is issued before the
    first one with an operation may have run before GPUs were recorded, and some calls never have an
    operation: those that another one makes, and copies of nothing, which return at once.
    """
    operations = gpus[0]
    hands_over = np.zeros(len(Call), np.bool_)
    hands_over[[Call.ISSUE, Call.COPY]] = True
    threads = calls.threads_of(process)
    mine = slice(calls.first[threads.start], calls.first[threads.stop])
    rows = mine.start + np.flatnonzero(hands_over[calls.sort[mine]] & (calls.start[mine] < until))
    if has[rows].all():
        return
    rows = rows[calls.start[rows] >= calls.start[rows[has[rows]]].min(initial=until)]
    if operations.coverage.windows:
        rows = rows[operations.recorded.contains(calls.start[rows])]
    if not len(rows):
        return
    names, name = number_ids(calls.name[rows])
    length = calls.end[rows] - calls.start[rows]
    shortest = np.full(len(names), np.iinfo(np.int64).max)
    np.minimum.at(shortest, name[has[rows]], length[has[rows]])
    # No call is as long as that of a name that never has an operation.
    expected = has[rows] | (length >= _EMPTY_CALL_PART * shortest[name])
    rows = rows[expected]
    lacking = rows[~has[rows]]
    by = distinct_ids(calls.thread[lacking]).tolist() if len(lacking) else []
    yield from _report(
        "operations",
        operations,
        len(rows),
        calls.start[lacking],
        "launches without one",
        gpu=operations.gpu.gpu if len(gpus) == 1 else None,
        thread=calls.threads[by[0]][1] if len(by) == 1 else None,
    )


def _without_call(operations: GpuOperations, known: Mask) -> Iterator[Missing]:
    """Yield the operations of a GPU that lack their call.

    What a recording finds under way was issued before: its correlation ids come before all others.
    Some recorders lack all calls of a kind, which is no loss: Kineto those of the driver.
    """
    # Calls of operations that start in a part with calls may lie before it.
    if known.all() or not known.any() or operations.coverage.calls is not None:
        return
    _, name = number_ids(operations.events.name)
    issued = operations.events.correlation
    expected = (np.bincount(name, known) > 0)[name] & (issued >= issued[known].min())
    lacking = expected & ~known
    total = int(np.count_nonzero(expected))
    moments = operations.start[lacking]
    yield from _report(
        "calls", operations, total, moments, "operations without one", gpu=operations.gpu.gpu
    )


def _report(
    rows: str,
    operations: GpuOperations,
    total: int,
    moments: Times,
    evidence: str,
    *,
    gpu: int | None,
    thread: int | None = None,
) -> Iterator[Missing]:
    if total >= _FEWEST_ROWS and len(moments) >= WORTH * total:
        share = len(moments) / total
        edges = int(moments.min()), int(moments.max())
        yield Missing(rows, operations.gpu.rank, share, len(moments), *edges, evidence, gpu, thread)


def _steps_without_work(gpus: PerGpu, all_steps: FoundSteps) -> Iterator[Missing]:
    """Yield the steps that a rank marked in a recorded stretch, and of which nothing is there."""
    for rank, windows in all_steps.by_rank.items():
        operations = next(gpu for gpu in gpus.operations if gpu.gpu.rank == rank)
        numbers = windows.numbers
        if numbers is None or not len(numbers) or not operations.coverage.is_whole:
            continue
        # A cut may leave the mark of a step, and none of its work.
        marked = int(numbers[-1]) + 1 - (int(numbers[0]) if windows.is_part else 0)
        lacking = marked - len(numbers) - windows.with_nodes
        if marked >= _FEWEST_STEPS and lacking >= WORTH * marked:
            edges = int(windows.start[0]), int(windows.end[-1])
            text = "steps without any work"
            yield Missing("operations", rank, lacking / marked, lacking, *edges, text)


def _lone_collectives(gpus: PerGpu, collectives: Collectives) -> Iterator[Missing]:
    """Yield the GPUs that lack collectives which no rank leaves before all have arrived.

    A GPU that is in another collective meanwhile lacks none: the two were not matched. Neither does
    one that was not recorded then.
    """
    rows = np.flatnonzero(collectives.joint)
    if not len(rows) or len(gpus.operations) < 2:
        return
    # Rows are sorted by instance.
    instance, lane = collectives.instance[rows], collectives.lane[rows]
    start, end = collectives.start[rows], collectives.end[rows]
    first = np.flatnonzero(np.diff(instance, prepend=-1))
    begins, ends = np.minimum.reduceat(start, first), np.maximum.reduceat(end, first)
    for gpu, at in _lacking_instances(lane, first, begins, len(gpus.operations)).items():
        operations = gpus.operations[gpu]
        mine = np.flatnonzero(lane == gpu)
        mine = mine[np.argsort(start[mine], kind="stable")]
        last = np.searchsorted(start[mine], ends[at]) - 1
        is_elsewhere = (last >= 0) & (end[mine][last] > begins[at])
        lost = begins[at[~is_elsewhere]]
        lost = lost[operations.recorded.contains(lost)]
        share = len(lost) / (len(lost) + len(mine))
        if len(lost) >= _FEWEST_COLLECTIVES and share >= WORTH:
            where = operations.gpu.rank, share, len(lost), int(lost.min()), int(lost.max())
            yield Missing("collectives", *where, "other ranks have them", operations.gpu.gpu)


def _lacking_instances(
    lane: NDArray[np.int16], first: NDArray[np.int64], begins: Times, gpus: int
) -> dict[int, NDArray[np.int64]]:
    """Return the collectives that each GPU seems to lack, by GPU.

    The GPUs of most collectives are communicators; a collective that few of these lack has lost
    rows, unless the others meet so often that they are a communicator of their own.

    Args:
        lane: of each row, by collective.
        first: first row of each collective.
        begins: first start of each.
        gpus: number of GPUs.
    """
    from random import Random

    draw = Random(0)
    keys = np.array([draw.getrandbits(62) for _ in range(gpus)])
    members = np.add.reduceat(keys[lane], first)
    groups, example, group, sizes = np.unique(
        members, return_index=True, return_inverse=True, return_counts=True
    )
    if not 1 < len(groups) <= _MOST_GROUPS:
        return {}
    stops = np.append(first[1:], len(lane))
    lanes_of = [frozenset(lane[first[at] : stops[at]].tolist()) for at in example.tolist()]
    lacking: dict[int, list[NDArray[np.int64]]] = {}
    for number, lanes in enumerate(lanes_of):
        larger = [n for n, other in enumerate(lanes_of) if lanes < other]
        whole = max(larger, key=lambda n: int(sizes[n]), default=number)
        absent = lanes_of[whole] - lanes
        is_group = sizes[number] >= _OWN_GROUP * sizes[whole]
        if is_group or len(absent) > max(1, _MOST_LACK * len(lanes_of[whole])):
            continue
        among = begins[group == whole]
        at = np.flatnonzero((group == number) & (begins > among[0]) & (begins < among[-1]))
        for absentee in absent:
            lacking.setdefault(absentee, []).append(at)
    return {absentee: np.concatenate(parts) for absentee, parts in lacking.items()}


def _thinned(view: GpuShardView, starts: Times, ends: Times) -> tuple[float, int]:
    """Return the share of kernels that steps lack at random, and how many; (0, 0) for none.

    Steps of one program repeat their kernels. Where rows are missing at random, each step lacks
    some, of all names alike; nothing that a program does looks so.
    """
    counts = _count_kernels(view.operations, starts, ends)
    steps = len(counts)
    if steps < max(_EXPECTED_SHARE * len(starts), _FEWEST_STEPS) or not counts.size:
        return 0.0, 0
    # A few steps may have more kernels, and a few far less, as the first ones.
    whole = np.sort(counts, axis=0)[-max(_FEWEST_WHOLE, steps // 10)]
    lacks = np.maximum(whole - counts, 0)
    by_step = lacks.sum(axis=1)
    lacks = lacks[_are_chance(by_step, float(median(by_step)))]
    if len(lacks) < max(_EXPECTED_SHARE * steps, _FEWEST_STEPS):
        return 0.0, 0
    expected, by_name, by_step = whole * len(lacks), lacks.sum(axis=0), lacks.sum(axis=1)
    share, count = float(by_name.sum() / max(expected.sum(), 1)), int(by_name.sum())
    is_loss = WORTH <= share < 0.5 and count >= _FEWEST_LACKING
    return (share, count) if is_loss and _is_random(by_name, by_step, expected) else (0.0, 0)


def _count_kernels(operations: GpuOperations, starts: Times, ends: Times) -> NDArray[np.int64]:
    """Return the kernels of each step of usual size, by names that are in most of them."""
    nothing = np.empty((0, 0), np.int64)
    step, steps = number_windows(operations.start, starts, ends), len(starts)
    rows = np.flatnonzero((step >= 0) & (operations.events.kind == Kind.KERNEL))
    if steps < _FEWEST_STEPS or not len(rows):
        return nothing
    names, name = number_ids(operations.events.name[rows])
    if steps * len(names) > _MOST_CELLS:
        return nothing
    cells = np.bincount(step[rows] * len(names) + name, minlength=steps * len(names))
    counts: NDArray[np.int64] = cells.reshape(steps, len(names))
    # A step that lacks the row that begins it is taken for a part of the one before.
    sizes = counts.sum(axis=1)
    counts = counts[np.abs(sizes - median(sizes)) <= _USUAL_SIZE * median(sizes)]
    return counts[:, np.count_nonzero(counts, axis=0) >= _EXPECTED_SHARE * len(counts)]


def _is_random(
    by_name: NDArray[np.int64], by_step: NDArray[np.int64], expected: NDArray[np.int64]
) -> bool:
    """Return True if what lacks scatters as removal at random does: a binomial distribution.

    Args:
        by_name: number of kernels that all steps lack.
        by_step: number that each step lacks, of all names.
        expected: number that all steps should have, by name.
    """
    share = float(by_name.sum() / expected.sum())
    usual = share * (1 - share)
    often = expected >= _FEWEST_ROWS
    of_names = (by_name[often] - share * expected[often]) ** 2 / expected[often]
    scatters_alike = (
        np.var(by_step) * len(by_step) / expected.sum() <= _RANDOM_SCATTER_RATIO * usual
    )
    if not scatters_alike or (often.any() and of_names.mean() > _RANDOM_SCATTER_RATIO * usual):
        return False
    by_chance = _are_chance(by_name, share * expected).all()
    return bool(by_chance and _are_chance(by_step, float(by_step.mean())).all())


def _are_chance(counts: NDArray[np.int64], means: NDArray[np.floating[Any]] | float) -> Mask:
    """Return False for counts that are more than chance makes them: of a Poisson distribution."""
    return counts <= means + 5 * np.sqrt(means) + 2
