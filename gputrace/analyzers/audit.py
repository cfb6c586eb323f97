"""Audit of a recording: launches without their operation, operations without their call, steps
without work, and steps that each lack some of their kernels.

Whole recordings have next to none of these: of 40 recordings of nsys, nvprof, Kineto and gputrace,
all but cut ones have the operation of each launch and the call of each operation, to 0.1 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu, Shard
from gputrace.analyzers.host_calls import NOBODY, Call, CudaApiCalls
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps import FoundSteps
from gputrace.model.events import Kind, Mask
from gputrace.model.intervals import Times
from gputrace.model.results import Missing
from gputrace.model.trace import FROM_THE_START

WORTH: Final = 0.01
"""Share of the rows that must be missing to be reported."""
_FEWEST: Final = 100
"""Minimum number of rows, and of steps times names, by which a share is estimated."""
_FEWEST_LACKING: Final = 20
"""Minimum number of kernels that all steps together must lack."""
_FEWEST_STEPS: Final = 10
_MOST_CELLS: Final = 1 << 24
"""Maximum number of steps times names to count."""
_IN_MOST: Final = 0.8
"""Share of the steps that a kernel must be in to be expected in each."""
_ALIKE: Final = 3.0
"""Maximum ratio of the scatter over steps, and over names, to what removal at random causes."""


def find_missing(gpus: PerGpu, found: FoundSteps) -> tuple[Missing, ...]:
    """Return the rows that a recording lacks, the largest share first.

    Args:
        gpus: of the run.
        found: steps of all ranks.
    """
    missing = [one for part in gpus.in_each_place(_unmatched) for one in part]
    missing += list(_steps_without_work(gpus, found))
    silent = [lane for lane in gpus.lanes if not gpus.has_calls]
    silent = [lane for lane in silent if lane.gpu.rank in found.by_rank]
    windows = [found.by_rank[lane.gpu.rank] for lane in silent]
    edges = zip(*((own.start, own.end) for own in windows), strict=True) if windows else ((), ())
    shares = gpus.each(_thinned, silent, *edges)
    for lane, (share, count) in zip(silent, shares, strict=True):
        if share >= WORTH:
            missing.append(
                Missing("kernels", lane.gpu.rank, share, count, *lane.window, "steps are thinned")
            )
    return tuple(sorted(missing, key=lambda one: -one.share))


def _unmatched(shard: Shard) -> list[Missing]:
    """Return the calls and operations of each process of a shard that lack the other."""
    calls = shard.calls
    if calls is None:
        return []
    has = np.zeros(len(calls.start), np.bool_)
    found: list[Missing] = []
    by_process: dict[int, list[GpuOperations]] = {}
    for own in shard.operations:
        by_process.setdefault(own.gpu.process, []).append(own)
    for process, gpus in by_process.items():
        longest, last = 0, 0
        for own in gpus:
            issued_by = calls.issued_by(own.events)
            known = issued_by != NOBODY
            has[issued_by[known]] = True
            # How far the host runs ahead.
            ahead = int((own.start[known] - calls.start[issued_by[known]]).max(initial=0))
            longest, last = max(longest, ahead), max(last, own.span.end)
            found += _without_call(own, known)
        found += _without_operation(calls, has, process, gpus[0], last - longest)
    return found


def _without_operation(
    calls: CudaApiCalls, has: Mask, process: int, gpu: GpuOperations, until: int
) -> Iterator[Missing]:
    """Yield the launches of a process that lack their operation.

    What is issued at the end may not have run when the recording ended, and some calls never have
    an operation: those that another one makes, copies of nothing.
    """
    threads = [number for number, (of, _) in enumerate(calls.threads) if of == process]
    mine = np.isin(calls.thread, threads) & np.isin(calls.sort, (Call.ISSUE, Call.COPY))
    rows = np.flatnonzero(mine & (calls.start < until))
    if gpu.windows:
        rows = rows[_lies_in(calls.start[rows], gpu.recorded.start, gpu.recorded.end)]
    _, name = np.unique(calls.name[rows], return_inverse=True)
    usual = np.bincount(name, has[rows]) > 0
    rows = rows[usual[name]]
    lacking = rows[~has[rows]]
    yield from _report("operations", gpu, len(rows), calls.start[lacking], "launches without one")


def _without_call(own: GpuOperations, known: Mask) -> Iterator[Missing]:
    """Yield the operations of a GPU that lack their call.

    What a recording finds under way was issued before: its correlation ids come before all others.
    Some recorders lack all calls of a kind, which is no loss: Kineto those of the driver.
    """
    # Calls of operations that start in a part with calls may lie before it.
    if not known.any() or own.calls_recorded is not None:
        return
    _, name = np.unique(own.events.name, return_inverse=True)
    issued = own.events.correlation
    expected = (np.bincount(name, known) > 0)[name] & (issued >= issued[known].min())
    lacking = expected & ~known
    total = int(np.count_nonzero(expected))
    yield from _report("calls", own, total, own.start[lacking], "operations without one")


def _lies_in(moments: Times, starts: Times, ends: Times) -> Mask:
    place = np.searchsorted(starts, moments, "right") - 1
    inside: Mask = (place >= 0) & (moments < ends[np.maximum(place, 0)])
    return inside


def _report(
    rows: str, own: GpuOperations, total: int, moments: Times, evidence: str
) -> Iterator[Missing]:
    if total >= _FEWEST and len(moments) >= WORTH * total:
        share = len(moments) / total
        edges = int(moments.min()), int(moments.max())
        yield Missing(rows, own.gpu.rank, share, len(moments), *edges, evidence)


def _steps_without_work(gpus: PerGpu, found: FoundSteps) -> Iterator[Missing]:
    """Yield the steps that a rank marked in a recorded stretch, and of which nothing is there."""
    for rank, windows in found.by_rank.items():
        own = next(gpu for gpu in gpus.operations if gpu.gpu.rank == rank)
        from_start = not own.windows or own.windows[0].start <= FROM_THE_START
        numbers = windows.numbers
        if numbers is None or not from_start or len(own.windows) > 1 or not len(numbers):
            continue
        if own.calls_recorded is not None:
            continue
        marked = int(numbers[-1]) + 1
        lacking = marked - len(numbers)
        if marked >= _FEWEST_STEPS and lacking >= WORTH * marked:
            edges = int(windows.start[0]), int(windows.end[-1])
            text = "steps without any work"
            yield Missing("operations", rank, lacking / marked, lacking, *edges, text)


def _thinned(view: GpuShardView, starts: Times, ends: Times) -> tuple[float, int]:
    """Return the share of kernels that steps lack at random, and how many; (0, 0) for none.

    Steps of one program repeat their kernels. Where rows are missing at random, each step lacks
    some, of all names alike; nothing that a program does looks so.
    """
    own = view.operations
    rows = np.flatnonzero(own.events.kind == Kind.KERNEL)
    step = np.searchsorted(starts, own.start[rows], "right") - 1
    inside = (step >= 0) & (own.start[rows] < ends[np.maximum(step, 0)])
    names, name = np.unique(own.events.name[rows[inside]], return_inverse=True)
    steps = len(starts)
    if steps < _FEWEST_STEPS or not len(names) or steps * len(names) > _MOST_CELLS:
        return 0.0, 0
    cells = np.bincount(step[inside] * len(names) + name, minlength=steps * len(names))
    counts: NDArray[np.int64] = cells.reshape(steps, len(names))
    counts = counts[:, np.count_nonzero(counts, axis=0) >= _IN_MOST * steps]
    if not counts.size:
        return 0.0, 0
    whole = counts.max(axis=0)
    expected = whole * steps
    lacking = expected - counts.sum(axis=0)
    share = float(lacking.sum() / expected.sum())
    if not WORTH <= share < 0.5 or lacking.sum() < _FEWEST_LACKING:
        return 0.0, 0
    # Binomial: of names that often occur, and of steps.
    often = expected >= _FEWEST
    by_name = (lacking[often] - share * expected[often]) ** 2 / expected[often]
    by_step = np.var((whole - counts).sum(axis=1)) / whole.sum()
    usual = share * (1 - share)
    if by_step > _ALIKE * usual or (often.any() and by_name.mean() > _ALIKE * usual):
        return 0.0, 0
    return share, int(lacking.sum())
