"""Rows of a viewer: GPU streams and host threads, each of slices that nest or are disjoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.cuda_api_calls import Call, read_calls, thread_keys
from gputrace.analyzers.idle_causes import intervals_by_thread, read_evidence
from gputrace.analyzers.operations import Gpu, GpuOperations, both_ends, classify, find_gpus
from gputrace.analyzers.timeline_model import Scene, SceneLane, busy_lane, index_in
from gputrace.analyzers.timeline_model.cells import Layers
from gputrace.model.events import GPU_KINDS, Events, Kind
from gputrace.model.intervals import EMPTY, Intervals, merge_touching, union
from gputrace.model.options import Window
from gputrace.model.trace import Progress, Trace

_ON_GPU: Final = (
    "start", "end", "kind", "name", "process", "device", "gpu", "stream", "correlation", "bytes"
)  # fmt: skip
_ON_HOST: Final = ("start", "end", "kind", "name", "process", "thread", "correlation")

HOST_TRACKS: Final = (
    (Kind.STEP, "steps"),
    (Kind.DATA_WAIT, "waits for data"),
    (Kind.RANGE, "ranges"),
    (Kind.API, "CUDA calls"),
    (Kind.OS_RUNTIME, "system calls"),
    (Kind.OVERHEAD, "overhead"),
    (Kind.MARK, "marks"),
    (Kind.SAMPLE, "lines"),
)
"""Kinds of tracks of a host thread and their names, in display order."""
_SYSTEM_CALLS: Final = [kind for kind, _ in HOST_TRACKS].index(Kind.OS_RUNTIME)


@dataclass(frozen=True)
class Track:
    """Slices in order of start, an enclosing one before those inside it."""

    name: str
    events: Events
    kind_index: int = 0
    """Index in `HOST_TRACKS`, for a host thread."""


def read_gpu_tracks(
    trace: Trace,
    window: Window | None = None,
    progress: Progress | None = None,
    within: Intervals | None = None,
) -> list[tuple[Gpu, list[Track]]]:
    """Return for each GPU a track per stream, and more for a stream whose operations overlap.

    With ``within``, return only what touches these intervals.
    """
    events = both_ends(trace, trace.events(GPU_KINDS, _ON_GPU, progress=progress))
    if not len(events):
        return []
    gpus, gpu_index = find_gpus(trace, events)
    wanted = np.ones(len(events), bool)
    if window is not None:
        wanted = (events.start < window.end) & (events.end > window.start)
    if within is not None:
        wanted &= _touching(events, within)
    return [
        (gpu, _streams(events.select(wanted & (gpu_index == index))))
        for index, gpu in enumerate(gpus)
    ]


def _touching(events: Events, within: Intervals) -> NDArray[np.bool_]:
    """Return which rows touch any of some intervals."""
    if not len(within):
        return np.zeros(len(events), bool)
    following = np.searchsorted(within.end, events.start, "right")
    last = np.minimum(following, len(within) - 1)
    return (following < len(within)) & (within.start[last] < events.end)


def _streams(events: Events) -> list[Track]:
    """Return the tracks of a GPU's streams, which each process numbers on its own."""
    several = len(np.unique(events.process)) > 1
    keys = events.process.astype(np.int64) << 32 | events.stream.astype(np.int64) & 0xFFFFFFFF
    tracks = []
    for key in np.unique(keys).tolist():
        rows = events.select(keys == key)
        stream, process = int(rows.stream[0]), int(rows.process[0])
        name = f"stream {stream}" if stream >= 0 else "all streams"
        tracks += _tracks(f"{name} of process {process}" if several else name, rows)
    return tracks


def read_host_tracks(
    trace: Trace, window: Window | None = None, within: Intervals | None = None
) -> Iterator[tuple[int, int, Track]]:
    """Yield process, thread and track of host activity, one kind of track after another.

    With ``within``, yield only what touches these intervals.
    """
    for index, (kind, name) in enumerate(HOST_TRACKS):
        if kind not in trace.kinds:
            continue
        events = trace.events([kind], _ON_HOST, window)
        events = events if within is None else events.select(_touching(events, within))
        keys = thread_keys(events)
        order = np.argsort(keys, kind="stable")
        edges = np.flatnonzero(np.diff(keys[order], prepend=-2, append=-2))
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            rows = events.select(order[first:last])
            for track in _tracks(name, rows, index):
                yield int(rows.process[0]), int(rows.thread[0]), track


def _tracks(name: str, events: Events, index: int = 0) -> list[Track]:
    """Return one track, or as many as it takes for the slices of each to nest."""
    events = events.select(np.lexsort((-events.end, events.start)))
    lanes = nesting_lanes(events.start, events.end)
    count = int(lanes.max()) + 1 if len(lanes) else 0
    if count == 1:
        return [Track(name, events, index)]
    return [
        Track(f"{name} ({lane + 1})" if lane else name, events.select(lanes == lane), index)
        for lane in range(count)
    ]


def nesting_lanes(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the lane of each slice, given in order of start, longest first; in a lane, any two
    nest.

    A slice goes to the first lane in which it nests in what is open there, or follows it.
    """
    lanes = np.zeros(len(start), np.int32)
    if bool((start[1:] >= np.maximum.accumulate(end)[:-1]).all()):
        return lanes
    open_ends: list[list[int]] = []
    for row, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        for lane, ends in enumerate(open_ends):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or stop <= ends[-1]:
                ends.append(stop)
                lanes[row] = lane
                break
        else:
            lanes[row] = len(open_ends)
            open_ends.append([stop])
    return lanes


@dataclass(frozen=True)
class TrackRow:
    """Track of a stream or a host thread, below the lane of the GPU that it belongs to."""

    lane: int
    group: str
    """``streams``, or ``thread 977``."""
    track: Track
    on_gpu: bool
    process: int
    """Tells processes apart; a GPU operation and its call have the same one."""
    counts: NDArray[np.int64] | None = None
    """How many slices each slice stands for; None if one each."""


def read_track_rows(
    trace: Trace, scene: Scene, windows: Sequence[Window], most: int
) -> tuple[list[TrackRow], Intervals | None]:
    """Return all streams and threads, lane by lane, the busiest thread first, and the intervals
    that they cover.

    The intervals are None if that is the whole trace. Where there are more than ``most`` GPU
    operations, they are as many of the windows as hold so many, the first ones first; of host
    threads, tracks that would take more than twice as many slices are left out.
    """
    within = _windows_that_fit(scene, windows, most)
    return _rows_within(trace, scene, within, 2 * most), within


def read_window_rows(trace: Trace, scene: Scene, window: Window, most: int) -> list[TrackRow]:
    """Return the rows of a window; with more than ``most`` slices, narrow ones are merged."""
    rows = _rows_within(trace, scene, union([window.start], [window.end]), 1 << 62)
    if sum(len(row.track.events) for row in rows) > most:
        rows = [merge_narrow(trace, row, window, _CELLS) for row in rows]
    return rows


_CELLS: Final = 3_000
"""Cells of a window in which narrow slices are merged."""


def _rows_within(trace: Trace, scene: Scene, within: Intervals | None, left: int) -> list[TrackRow]:
    """Return all rows that touch some intervals, of the host those with at most ``left`` slices."""
    lanes = {(lane.gpu, lane.rank, lane.host): n for n, lane in enumerate(scene.lanes)}
    rows, of_process = [], {}
    for gpu, tracks in read_gpu_tracks(trace, within=within):
        number = lanes.get((gpu.gpu, gpu.rank, gpu.host_name))
        if number is not None:
            of_process.update({process: number for process, _ in gpu.pairs})
            rows += [
                TrackRow(number, "streams", track, True, int(track.events.process[0]))
                for track in tracks
            ]
    of_rank = {lane.rank: n for n, lane in enumerate(scene.lanes)}
    hull = Window(int(within.start[0]), int(within.end[-1])) if within else None
    threads = []
    for process, thread, track in read_host_tracks(trace, hull, within):
        number = of_process.get(process, of_rank.get(trace.processes[process].rank, 0))
        left -= len(track.events)
        if left >= 0:
            threads.append(TrackRow(number, f"thread {thread & 0xFFFFFFFF}", track, False, process))
        else:
            left += len(track.events)
    busy = Counter[tuple[int, str]]()
    for row in threads:
        # Idle threads wait in the system, often.
        if row.track.kind_index != _SYSTEM_CALLS:
            busy[row.process, row.group] += len(row.track.events)
    threads.sort(key=lambda row: (-busy[row.process, row.group], row.group, row.track.kind_index))
    return sorted([*rows, *threads], key=lambda row: row.lane)


def merge_narrow(trace: Trace, row: TrackRow, window: Window, cells: int) -> TrackRow:
    """Return a row of which slices too narrow to tell apart are one, in each of some cells.

    It begins and ends with them, and is like the longest of the sort that has most of their time.
    """
    events = row.track.events
    lengths, size = events.end - events.start, max((window.end - window.start) // cells, 1)
    cell = (events.start - window.start) // size
    alone = lengths >= size
    begins = np.ones(len(events), bool)
    begins[1:] = (cell[1:] != cell[:-1]) | alone[1:] | alone[:-1]
    firsts, group = np.flatnonzero(begins), np.cumsum(begins) - 1
    sorts = classify(trace, events).astype(np.int64) if row.on_gpu else np.zeros(len(events), int)
    spent = np.bincount(group * 64 + sorts, lengths, minlength=64 * len(firsts))
    of_most = sorts == spent.reshape(-1, 64).argmax(axis=1)[group]
    order = np.lexsort((-lengths, ~of_most, group))
    merged = events.select(order[np.searchsorted(group[order], np.arange(len(firsts)))])
    merged.start, merged.end = events.start[firsts], np.maximum.reduceat(events.end, firsts)
    counts = np.diff(firsts, append=len(events))
    return replace(row, track=replace(row.track, events=merged), counts=counts)


def _windows_that_fit(scene: Scene, windows: Sequence[Window], most: int) -> Intervals | None:
    """Return the first windows with at most so many operations; None if the whole trace has."""
    if sum(len(lane.operations or ()) for lane in scene.lanes) <= most:
        return None
    lanes = [lane.operations for lane in scene.lanes if lane.operations is not None]
    within = EMPTY
    for window in windows:
        more = union([*within.start, window.start], [*within.end, window.end])
        # Operations that touch them; a few count twice where operations overlap.
        begun = sum(int(np.searchsorted(lane.start, more.end).sum()) for lane in lanes)
        ended = sum(int(np.searchsorted(lane.reach, more.start, "right").sum()) for lane in lanes)
        within = more if begun - ended <= most else within
    return within


_CALLS: Final = (
    ("host_sync", (Call.SYNC, Call.COPY)),
    ("host_alloc", (Call.ALLOC,)),
    ("host_launch", (Call.ISSUE,)),
    ("host_call", (Call.OTHER,)),
)
HOST_CLASSES: Final = (*(name for name, _ in _CALLS), "host_data", "host_system")
"""Classes of a host thread's time: kinds of CUDA calls, waits for data, waits in the system."""


def stream_lanes(trace: Trace) -> list[SceneLane]:
    """Return a lane for each stream of each GPU, with all its operations."""
    return [
        busy_lane(operations, track.name)
        for gpu, tracks in read_gpu_tracks(trace)
        for track in tracks
        if (operations := GpuOperations(gpu, track.events, classify(trace, track.events)))
    ]


def thread_lanes(trace: Trace, scene: Scene) -> list[SceneLane]:
    """Return a lane for each host thread that called CUDA or waited for data, the busiest first."""
    calls, evidence = read_calls(trace), read_evidence(trace)
    # Blocking calls of the C library.
    in_system = trace.events([Kind.OS_RUNTIME], ("start", "end", "process", "thread"))
    system = intervals_by_thread(in_system)
    gpus = {
        index_in(trace, scene.processes[process]): lane.operations.gpu
        for lane in scene.lanes
        if lane.operations is not None
        for process, _ in lane.operations.gpu.pairs
    }
    numbers = {} if calls is None else {pair: n for n, pair in enumerate(calls.threads)}
    lanes = []
    for pair in sorted(numbers.keys() | evidence.data.keys()):
        sets = [evidence.data.get(pair, EMPTY), system.get(pair, EMPTY)]
        if calls is not None and pair in numbers:
            sets = [*(calls.of_thread(numbers[pair], *sorts) for _, sorts in _CALLS), *sets]
        else:
            sets = [*(EMPTY for _ in _CALLS), *sets]
        covered = EMPTY
        for index, times in enumerate(sets):  # Where two overlap, the first counts.
            sets[index], covered = times.difference(covered), merge_touching(covered, times)
        known = [times for times in sets if len(times)]
        if (gpu := gpus.get(pair[0])) is None or not known:
            continue
        span = Window(min(int(s.start[0]) for s in known), max(int(s.end[-1]) for s in known))
        part, layers = f"thread {pair[1] & 0xFFFFFFFF}", Layers(HOST_CLASSES, tuple(sets))
        lanes.append(SceneLane.of_gpu(gpu, span, layers, part=part))
    # Waits in the system do not count: idle threads spend their time there.
    return sorted(
        lanes, key=lambda lane: (lane.rank, -sum(each.total for each in lane.layers.sets[:-1]))
    )
