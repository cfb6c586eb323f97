"""A trace as tracks: what a viewer draws in a row, each row of slices that nest or are disjoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpus import Gpu, both_ends, find_gpus
from gputrace.traces.events import GPU_KINDS, Events, Kind
from gputrace.traces.trace import Progress, Trace, Window

_ON_GPU: Final = (
    "start", "end", "kind", "name", "process", "device", "gpu", "stream", "correlation", "bytes"
)  # fmt: skip
_ON_HOST: Final = ("start", "end", "kind", "name", "process", "thread")

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
"""What a host thread has, in the order shown."""


@dataclass(frozen=True)
class Track:
    """Slices in order of start, an enclosing one before what it encloses."""

    name: str
    events: Events
    place: int = 0
    """Of a host thread, which of `HOST_TRACKS` it is."""


def read_gpu_tracks(
    trace: Trace, window: Window | None = None, progress: Progress | None = None
) -> list[tuple[Gpu, list[Track]]]:
    """For each GPU, a track a stream, and more for a stream whose operations overlap."""
    events = both_ends(trace, trace.events(GPU_KINDS, _ON_GPU, progress=progress))
    if not len(events):
        return []
    gpus, place = find_gpus(trace, events)
    wanted = np.ones(len(events), bool)
    if window is not None:
        wanted = (events.start < window.end) & (events.end > window.start)
    return [
        (gpu, _streams(events.select(wanted & (place == index)))) for index, gpu in enumerate(gpus)
    ]


def _streams(events: Events) -> list[Track]:
    """Streams are numbered in each process for itself."""
    several = len(np.unique(events.process)) > 1
    keys = events.process.astype(np.int64) << 32 | events.stream.astype(np.int64) & 0xFFFFFFFF
    tracks = []
    for key in np.unique(keys).tolist():
        own = events.select(keys == key)
        stream, process = int(own.stream[0]), int(own.process[0])
        name = f"stream {stream}" if stream >= 0 else "all streams"
        tracks += _tracks(f"{name} of process {process}" if several else name, own)
    return tracks


def read_host_tracks(
    trace: Trace, window: Window | None = None
) -> Iterator[tuple[int, int, Track]]:
    """Process, thread and track of what host threads did, a kind of row after another."""
    for place, (kind, name) in enumerate(HOST_TRACKS):
        if kind not in trace.kinds:
            continue
        events = trace.events([kind], _ON_HOST, window)
        keys = events.process.astype(np.int64) << 32 | events.thread.astype(np.int64) & 0xFFFFFFFF
        order = np.argsort(keys, kind="stable")
        edges = np.flatnonzero(np.diff(keys[order], prepend=-2, append=-2))
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            own = events.select(order[first:last])
            for track in _tracks(name, own, place):
                yield int(own.process[0]), int(own.thread[0]), track


def _tracks(name: str, events: Events, place: int = 0) -> list[Track]:
    """One track, or as many as it takes for slices of each to nest."""
    events = events.select(np.lexsort((-events.end, events.start)))
    lanes = nesting_lanes(events.start, events.end)
    count = int(lanes.max()) + 1 if len(lanes) else 0
    if count == 1:
        return [Track(name, events, place)]
    return [
        Track(f"{name} ({lane + 1})" if lane else name, events.select(lanes == lane), place)
        for lane in range(count)
    ]


def nesting_lanes(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int32]:
    """The lane of each of slices in order of start, longest first; in a lane, any two nest.

    Each goes to the first lane in which it nests in what is open there, or follows it.
    """
    lanes = np.zeros(len(start), np.int32)
    if bool((start[1:] >= np.maximum.accumulate(end)[:-1]).all()):
        return lanes
    open_ends: list[list[int]] = []
    for row, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        lanes[row] = _place(open_ends, begin, stop)
    return lanes


def _place(open_ends: list[list[int]], begin: int, stop: int) -> int:
    for lane, ends in enumerate(open_ends):
        while ends and ends[-1] <= begin:
            ends.pop()
        if not ends or stop <= ends[-1]:
            ends.append(stop)
            return lane
    open_ends.append([stop])
    return len(open_ends) - 1
