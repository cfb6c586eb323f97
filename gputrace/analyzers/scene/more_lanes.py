"""Lanes of parts: a stream of a GPU, a thread of the host. Read only where somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from gputrace.analyzers.causes import HostEvidence, read_evidence
from gputrace.analyzers.classes import classify
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.host import Call, HostCalls, read_calls
from gputrace.analyzers.intervals import EMPTY, Intervals, union
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.partition import build_timeline
from gputrace.analyzers.scene.cells import Layers, busy_layers
from gputrace.analyzers.scene.scene import Scene, SceneLane, index_in
from gputrace.analyzers.scene.tracks import read_gpu_tracks
from gputrace.traces.events import Kind
from gputrace.traces.trace import Trace, Window

_CALLS: Final = (
    ("host_sync", Call.SYNC),
    ("host_alloc", Call.ALLOC),
    ("host_launch", Call.ISSUE),
    ("host_call", Call.OTHER),
)
HOST_CLASSES: Final = (*(name for name, _ in _CALLS), "host_data", "host_system")
"""What a host thread does: kinds of CUDA calls, waiting for data, waiting in the system."""


def stream_lanes(trace: Trace) -> list[SceneLane]:
    """A lane for each stream of each GPU, with all its operations."""
    return [
        _stream(trace, gpu, track.name, own)
        for gpu, tracks in read_gpu_tracks(trace)
        for track in tracks
        if (own := GpuOperations(gpu, track.events, classify(trace, track.events)))
    ]


def thread_lanes(trace: Trace, scene: Scene) -> list[SceneLane]:
    """A lane for each host thread that called CUDA or waited for data, the busiest first."""
    calls, evidence, system = read_calls(trace), read_evidence(trace), _system_waits(trace)
    own = [lane.operations.gpu for lane in scene.lanes if lane.operations is not None]
    gpus = {
        index_in(trace, scene.processes[process]): gpu for gpu in own for process, _ in gpu.pairs
    }
    lanes = []
    for pair, sets in _threads(calls, evidence, system):
        gpu = gpus.get(pair[0])
        ends = [each for each in sets if len(each)]
        if gpu is None or not ends:
            continue
        span = Window(
            min(int(each.start[0]) for each in ends), max(int(each.end[-1]) for each in ends)
        )
        name = f"thread {pair[1] & 0xFFFFFFFF}"
        layers = Layers(HOST_CLASSES, tuple(sets))
        lanes.append(
            SceneLane(gpu.gpu, gpu.gpu_known, gpu.rank, gpu.host_name, span, layers, None, name)
        )
    return sorted(lanes, key=lambda lane: (lane.rank, -_calling(lane)))


def _calling(lane: SceneLane) -> int:
    """Nanoseconds of everything but waits in the system, in which idle threads are for ever."""
    return sum(each.total for each in lane.layers.sets[:-1])


def _stream(trace: Trace, gpu: Gpu, name: str, own: GpuOperations) -> SceneLane:
    timeline = build_timeline(own)
    return SceneLane(
        gpu.gpu,
        gpu.gpu_known,
        gpu.rank,
        gpu.host_name,
        timeline.window,
        busy_layers(timeline),
        own,
        name,
    )


def _system_waits(trace: Trace) -> dict[tuple[int, int], Intervals]:
    """When each thread was in a blocking call of the C library."""
    if Kind.OS_RUNTIME not in trace.kinds:
        return {}
    events = trace.events([Kind.OS_RUNTIME], ("start", "end", "process", "thread"))
    keys = events.process.astype(np.int64) << 32 | events.thread.astype(np.int64) & 0xFFFFFFFF
    found = {}
    for key in np.unique(keys):
        rows = np.flatnonzero(keys == key)
        pair = int(events.process[rows[0]]), int(events.thread[rows[0]])
        found[pair] = union(events.start[rows], events.end[rows])
    return found


def _threads(
    calls: HostCalls | None,
    evidence: HostEvidence,
    system: dict[tuple[int, int], Intervals],
) -> Iterator[tuple[tuple[int, int], Sequence[Intervals]]]:
    """Each thread with its disjoint `HOST_CLASSES`: of two at once, the first counts."""
    numbers = {} if calls is None else {pair: n for n, pair in enumerate(calls.threads)}
    for pair in sorted(numbers.keys() | evidence.data.keys()):
        sets = [
            calls.of_thread(numbers[pair], sort) if calls is not None and pair in numbers else EMPTY
            for _, sort in _CALLS
        ]
        yield pair, _disjoint([*sets, evidence.data.get(pair, EMPTY), system.get(pair, EMPTY)])


def _disjoint(sets: Sequence[Intervals]) -> list[Intervals]:
    """Each set without those before it."""
    own, given = [], EMPTY
    for each in sets:
        own.append(each.difference(given))
        given = union(
            np.concatenate([given.start, each.start]), np.concatenate([given.end, each.end])
        )
    return own
