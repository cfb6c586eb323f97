"""Choice of the steps to replay, and the operations and calls in them, as items of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives import Collectives
from gputrace.analyzers.cuda_api_calls import NOBODY, Call, CudaApiCalls
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import rows_by
from gputrace.analyzers.operations import Gpu, GpuSummary, classify
from gputrace.analyzers.parallelism import SHARDED, Groups
from gputrace.analyzers.steps import FoundSteps
from gputrace.analyzers.steps.windows import StepWindows
from gputrace.model.events import GPU_KINDS, Events, distinct_ids, is_among, number_ids
from gputrace.model.intervals import Times, search
from gputrace.model.options import Window
from gputrace.model.results import Step
from gputrace.model.struct import Struct

Index = NDArray[np.int64]

NONE: Final = -1
LONG_AGO: Final = -(1 << 60)
MOST_ITEMS: Final = 40_000
"""Maximum number of replayed GPU operations; so many take some 5 to 40 ms."""
SCENE: Final = 2
"""Steps at the beginning that only establish the state: the host's lead and the queues."""
FEWEST_STEPS: Final = 5
"""Minimum number of steps for a replay."""

_COLUMNS: Final = (
    "start", "end", "kind", "name", "process", "device", "stream", "correlation", "bytes",
    "source_memory", "destination_memory",
)  # fmt: skip


class Rows(Struct, frozen=True, dict=True):
    """GPU operations of consecutive steps, in order of start, with their calls."""

    events: Events
    classes: NDArray[np.int8]
    gpus: tuple[Gpu, ...]
    gpu: NDArray[np.int64]
    """Index into ``gpus``, by operation."""
    step: NDArray[np.int64]
    """Step of each operation, counted from the first replayed one."""
    call: NDArray[np.int64]
    """Index of the call that issued each, in the calls of the trace, or `NOBODY`."""
    collective: NDArray[np.int64]
    """Number of the matched collective that each belongs to, or -1."""
    gathers: NDArray[np.int64]
    """Numbers of the collectives that gather sharded parameters."""
    steps: range


def choose_steps(gpus: PerGpu, all_steps: FoundSteps, measured: Sequence[Step]) -> range | None:
    """Choose consecutive measured steps of all ranks whose mean is closest to the overall mean.

    None if there are too few steps, or if the minimum number has too many operations.
    """
    numbers = sorted({step.step for step in measured})
    if not all_steps.by_rank or len(numbers) < FEWEST_STEPS:
        return None
    breaks = _breaks(all_steps, gpus.operations)
    known = min(len(windows) for windows in all_steps.by_rank.values())
    runs = _runs([number for number in numbers if number < known], breaks)
    longest = max(runs, key=len, default=range(0))
    if not longest:
        return None
    having, spans = _spans(gpus, all_steps, longest)
    operations = sum(gpus.each(_starting_in, having, spans)) / len(longest)
    count = min(len(longest), int(MOST_ITEMS // max(operations, 1)))
    if count < FEWEST_STEPS:
        return None
    windows = all_steps.by_rank.values()
    lengths = np.mean([w.lengths[longest.start : longest.stop] for w in windows], axis=0)
    sums = np.concatenate([[0.0], np.cumsum(lengths)])
    means = (sums[count:] - sums[SCENE : len(sums) - count + SCENE]) / (count - SCENE)
    first = longest.start + int(np.argmin(np.abs(means - lengths.mean())))
    return range(first, first + count)


def _breaks(all_steps: FoundSteps, operations: Sequence[GpuSummary]) -> set[int]:
    """Return the steps followed by a non-training phase or a pause of the recording."""
    recorded = {summary.gpu.rank: summary.recorded.start for summary in operations}
    breaks = set[int]()
    for rank, windows in all_steps.by_rank.items():
        period = np.searchsorted(recorded[rank], windows.end)
        breaks.update(np.flatnonzero(np.diff(period)).tolist())
        breaks.update(interlude.after for interlude in windows.interludes)
    return breaks


def _runs(numbers: Sequence[int], breaks: set[int]) -> list[range]:
    """Return the ranges of consecutive numbers, split after ``breaks``."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number and number - 1 not in breaks:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def _spans(
    gpus: PerGpu, all_steps: FoundSteps, steps: range
) -> tuple[list[GpuSummary], list[Window]]:
    """Return the GPUs that have steps, and the window of some of these on each."""
    having = [summary for summary in gpus.operations if summary.gpu.rank in all_steps.by_rank]
    return having, [_span(all_steps.by_rank[summary.gpu.rank], steps) for summary in having]


def _starting_in(view: GpuShardView, span: Window) -> int:
    first, last = np.searchsorted(view.operations.start, span)
    return int(last - first)


def when_issued(gpus: PerGpu, all_steps: FoundSteps, steps: range) -> Window | None:
    """Return the window of some steps, including the calls that issued their operations.

    None without such calls.
    """
    having, spans = _spans(gpus, all_steps, steps)
    known = [summary for summary in gpus.each(_with_issuers, having, spans) if summary is not None]
    if not known:
        return None
    starts, ends = zip(*known, *spans, strict=True)
    return Window(min(starts), max(ends))


def _with_issuers(view: GpuShardView, span: Window) -> Window | None:
    operations, calls = view.operations, view.calls
    if calls is None:
        return None
    first, last = np.searchsorted(operations.start, span)
    issued = calls.issued_by(operations.events, slice(first, last))
    issued = issued[issued != NOBODY]
    if not len(issued):
        return None
    return Window(int(calls.start[issued].min()), int(calls.end[issued].max()))


def read_rows(groups: Groups, calls: CudaApiCalls, all_steps: FoundSteps, steps: range) -> Rows:
    """Read the operations of the chosen steps.

    The calls are at least those from the first to the last that issued any of these.
    """
    gpus, collectives = groups.gpus, groups.collectives
    sharded = [index for index, role in enumerate(groups.roles) if role == SHARDED]
    gathers = collectives.of("AllGather") & is_among(collectives.group, sharded)
    spans = {rank: _span(windows, steps) for rank, windows in all_steps.by_rank.items()}
    window = Window(min(s.start for s in spans.values()), max(s.end for s in spans.values()))
    events = gpus.trace.events(GPU_KINDS, _COLUMNS, window)
    known = tuple(known_gpu.gpu for known_gpu in gpus.operations)
    gpu = _gpu_of(events, known)
    step = np.full(len(events), -1, np.int64)
    for index, known_gpu in enumerate(known):
        windows = all_steps.by_rank.get(known_gpu.rank)
        if windows is not None:
            mine = gpu == index
            starts, moments = windows.start[steps.start : steps.stop], events.start[mine]
            number = np.searchsorted(starts, moments, "right") - 1
            step[mine] = np.where(moments < windows.end[steps.stop - 1], number, -1)
    rows = np.flatnonzero(step >= 0)
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    events = events.select(rows)
    issued = calls.issued_by(events)
    # A call that starts after its operation did not issue it.
    wrong = (issued != NOBODY) & (calls.start[issued] > events.start)
    issued[wrong | (calls.sort[issued] == Call.SYNC)] = NOBODY
    return Rows(
        events=events,
        classes=classify(gpus.trace, events),
        gpus=known,
        gpu=gpu[rows],
        step=step[rows],
        call=issued,
        collective=find_instances(collectives, events, gpu[rows], len(known)),
        gathers=distinct_ids(collectives.instance[gathers]).astype(np.int64),
        steps=steps,
    )


def _span(windows: StepWindows, steps: range) -> Window:
    return Window(int(windows.start[steps.start]), int(windows.end[steps.stop - 1]))


def find_instances(
    collectives: Collectives, events: Events, gpu: NDArray[np.int64], gpus: int
) -> NDArray[np.int64]:
    """Return the collective of each row, identified by GPU, start and correlation."""
    instances = np.full(len(gpu), -1, np.int64)
    by_lane = zip(rows_by(collectives.lane, gpus), rows_by(gpu, gpus), strict=True)
    for mine, rows in by_lane:
        if not len(mine) or not len(rows):
            continue
        mine = mine[np.argsort(collectives.start[mine], kind="stable")]
        starts, start = collectives.start[mine], events.start[rows]
        # Of several that start at a time, the last one of the same id.
        at = search(starts, start, "right") - 1
        sought = np.flatnonzero((at >= 0) & (starts[at] == start))
        while len(sought):
            known, row = mine[at[sought]], rows[sought]
            same = collectives.correlation[known] == events.correlation[row]
            instances[row[same]] = collectives.instance[known[same]]
            sought = sought[~same]
            at[sought] -= 1
            sought = sought[(at[sought] >= 0) & (starts[at[sought]] == start[sought])]
    return instances


def _gpu_of(events: Events, gpus: Sequence[Gpu]) -> NDArray[np.int64]:
    index_of: Mapping[tuple[int, int], int] = {
        pair: index for index, gpu in enumerate(gpus) for pair in gpu.pairs
    }
    keys = events.process.astype(np.int64) << 16 | events.device.astype(np.int64) & 0xFFFF
    distinct, where = number_ids(keys)
    indices = [
        index_of.get((key >> 16, int(np.int16(np.uint16(key & 0xFFFF)))), -1)
        for key in distinct.tolist()
    ]
    return np.array(indices or [-1], np.int64).take(where)


_THREADS_APART: Final = 1 << 40
"""Offset between threads, longer than any window, to take one running maximum over all."""


class Items(Struct, frozen=True, dict=True):
    """Items by process and time of issue; times relative to ``base``, absent indices -1."""

    call: Index
    """Index of the call in the trace."""
    operation: Index
    """Row of the operation."""
    leader: Index
    """Item that has the call, for every further operation of a call."""
    process: Index
    thread: Index
    begin: Times
    """Start of the call; `LONG_AGO` without one."""
    returned: Times
    stream: Index
    start: Times
    """Start of the operation; without one, of the call."""
    end: Times
    base: int
    """Origin of the times, on the trace's clock."""

    def __len__(self) -> int:
        return len(self.call)


def make_items(rows: Rows, calls: CudaApiCalls) -> Items:
    """Make items of the operations, their calls, and the waiting or allocating calls between."""
    outer, owner = _outermost(calls, _kept(rows, calls), rows.call)
    first = np.full(len(outer), NONE, np.int64)
    known = np.flatnonzero(owner >= 0)
    first[owner[known][::-1]] = known[::-1]  # the last write wins: the earliest of each call
    separate = np.ones(len(rows.call), bool)
    separate[first[first >= 0]] = False
    extra = np.flatnonzero(separate)
    call = np.concatenate([outer, np.full(len(extra), NONE, np.int64)])
    operation = np.concatenate([first, extra])
    leads = np.concatenate([np.full(len(outer), NONE, np.int64), owner[extra]])
    order, process = _in_order(rows, calls, call, operation, leads)
    new_index = np.empty(len(order), np.int64)
    new_index[order] = np.arange(len(order))
    leader = np.where(leads >= 0, new_index[leads], NONE)[order]
    return _with_times(rows, calls, call[order], operation[order], leader, process)


def _kept(rows: Rows, calls: CudaApiCalls) -> Index:
    """Return the issuing calls, and all waiting or allocating calls between those of a thread."""
    issuing = distinct_ids(rows.call[rows.call >= 0])
    kept = [issuing]
    for thread in distinct_ids(calls.thread[issuing]).tolist():
        of_thread = issuing[calls.thread[issuing] == thread]
        between = np.arange(of_thread[0], of_thread[-1] + 1)
        kept.append(between[is_among(calls.sort[between], (Call.SYNC, Call.ALLOC))])
    return distinct_ids(np.concatenate(kept))


def _outermost(calls: CudaApiCalls, kept: Index, issued: Index) -> tuple[Index, Index]:
    """Return the calls not nested in another, and the index among them for each operation."""
    if not len(kept):
        return kept, np.full(len(issued), NONE, np.int64)
    apart = calls.thread[kept].astype(np.int64) * _THREADS_APART - int(calls.start[kept].min())
    reach = np.maximum.accumulate(calls.end[kept] + apart)
    inside = np.concatenate([[False], (calls.start[kept] + apart)[1:] < reach[:-1]])
    index = np.cumsum(~inside) - 1
    position = np.minimum(search(kept, issued), len(kept) - 1)
    return kept[~inside], np.where(issued >= 0, index[position], NONE)


def _in_order(
    rows: Rows, calls: CudaApiCalls, call: Index, operation: Index, leads: Index
) -> tuple[Index, Index]:
    """Return the order by process and issue, and the process of each item in that order."""
    processes = np.array([process for process, _ in calls.threads])
    ran = rows.events.start[operation]
    issued = np.where(call >= 0, calls.start[call], ran)
    issued = np.where(leads >= 0, issued[leads], issued)
    process = np.where(
        call >= 0, processes[calls.thread[call]], rows.events.process[operation]
    ).astype(np.int64)
    order = np.lexsort((np.where(operation >= 0, ran, issued), leads >= 0, issued, process))
    return order, process[order]


def _with_times(
    rows: Rows, calls: CudaApiCalls, call: Index, operation: Index, leader: Index, process: Index
) -> Items:
    events = rows.events
    base = int(events.start.min())
    if (call >= 0).any():
        base = min(base, int(calls.start[call[call >= 0]].min()))
    begin = np.where(call >= 0, calls.start[call] - base, LONG_AGO)
    returned = np.where(call >= 0, calls.end[call] - base, LONG_AGO)
    some = operation >= 0
    devices, device = number_ids(events.device)
    streams, stream = number_ids(events.stream)
    device = events.process.astype(np.int64) * len(devices) + device
    _, stream = number_ids(device * len(streams) + stream)
    _, thread = number_ids(calls.thread[call])
    return Items(
        call=call,
        operation=operation,
        leader=leader,
        process=process,
        thread=np.where(call >= 0, thread, NONE),
        begin=begin,
        returned=returned,
        stream=np.where(some, stream[operation], NONE),
        start=np.where(some, events.start[operation] - base, begin),
        end=np.where(some, events.end[operation] - base, returned),
        base=base,
    )
