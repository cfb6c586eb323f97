"""Copies of each GPU: by direction and memory of the host, and inputs from pageable memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from gputrace.analyzers.device_metrics import memory_peak_of
from gputrace.analyzers.gpu_links import bandwidth, slot_rate
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.grouping import StepsOf, stretches
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.operations import Gpu, OperationClass
from gputrace.analyzers.steps.kinds import runs_network
from gputrace.model.events import Events, Kind, Mask, Memory, distinct_ids
from gputrace.model.intervals import Intervals, union
from gputrace.model.results import CopyUse, Step
from gputrace.model.struct import Struct
from gputrace.model.trace import Trace


class Pageable(Struct, frozen=True, dict=True):
    """Input copies from pageable memory in the measured steps of all GPUs, or in their spans."""

    copies: int
    bytes: int
    copy_ns: int
    """Sum of their durations."""
    exposed_ns: int
    """Part of these durations without a concurrent operation of a higher class on the GPU."""
    pinned_rate: float | None
    """Bytes per second of copies from pinned memory; None if unknown."""

    @property
    def saving_ns(self) -> int:
        """Return the exposed time that pinned memory would save."""
        if not self.pinned_rate or not self.copy_ns:
            return self.exposed_ns
        pinned = self.bytes * 1e9 / self.pinned_rate
        return round(self.exposed_ns * max(0.0, 1 - pinned / self.copy_ns))


_MOST_INPUTS: Final = 4
"""More copies than this before the first kernel: weights, which are copied once, not an input."""


def weights_until(view: GpuShardView) -> int:
    """Return when a network's weights have been copied to a GPU: when its first kernel starts, if
    copies other than of an input precede it, else when its first operation does.
    """
    operations = view.operations
    if not runs_network(view.trace, operations):
        return view.lane.window.start
    computing = np.flatnonzero(operations.classes == OperationClass.COMPUTE)
    first = int(operations.start[computing[0]]) if len(computing) else view.lane.window.start
    copies = operations.start[operations.events.kind == Kind.COPY_H2D]
    weights = np.count_nonzero(copies < first) > _MOST_INPUTS
    return first if weights else view.lane.window.start


def find_pageable(gpus: PerGpu, lanes: Sequence[LaneSummary], measured: Sequence[Step]) -> Pageable:
    """Sum up the pageable input copies of some of the GPUs; without steps, none of weights."""
    copies = gpus.trace.once(read_copies)
    every = copies.select(copies.kind == Kind.COPY_H2D)
    copies = every.select(every.source_memory == Memory.PAGEABLE)
    steps_of = StepsOf(measured)
    windows = [stretches(steps_of(lane.gpu), lane.window) for lane in lanes if len(copies)]
    if windows and not measured:
        begins = gpus.each(weights_until, lanes)
        windows = [
            w.clip(start, lane.window.end)
            for w, start, lane in zip(windows, begins, lanes, strict=True)
        ]
    mine = [
        copies.select(
            window.contains(copies.start)
            & window.contains(copies.end - 1)
            & is_on(copies, lane.gpu)
        )
        for lane, window in zip(lanes, windows, strict=False)
    ]
    busy = [union(copied.start, copied.end) for copied in mine]
    return Pageable(
        sum(map(len, mine)),
        sum(int(copied.bytes.sum()) for copied in mine),
        sum(int((copied.end - copied.start).sum()) for copied in mine),
        sum(gpus.each(_alone, lanes, busy)) if busy else 0,
        _pinned_rate(gpus.trace, every, lanes),
    )


def _alone(view: GpuShardView, copies: Intervals) -> int:
    """Return the nanoseconds of copies without a concurrent operation of a higher class."""
    return copies.intersection(view.lane.timeline.of_class(OperationClass.H2D)).total


_DIRECTIONS: Final = {
    Kind.COPY_H2D: "h2d",
    Kind.COPY_D2H: "d2h",
    Kind.COPY_D2D: "d2d",
    Kind.COPY_PEER: "peer",
}
_OF_HOST: Final[Mapping[int, str]] = {
    Memory.PAGEABLE: "pageable",
    Memory.PINNED: "pinned",
    Memory.MANAGED: "managed",
}


def read_copies(trace: Trace) -> Events:
    """Read the copies of all GPUs with a known direction."""
    memory = ("source_memory", "destination_memory")
    columns = ("start", "end", "kind", "bytes", *memory, "process", "device")
    return trace.events(list(_DIRECTIONS), columns)


def find_copies(gpus: PerGpu, measured: Sequence[Step]) -> tuple[CopyUse, ...]:
    """Return the copies of each GPU, by direction and the host's memory, most time first."""
    copies = gpus.trace.once(read_copies)
    copies = copies.select((copies.bytes > 0) & (copies.end > copies.start))
    memory = np.where(copies.kind == Kind.COPY_H2D, copies.source_memory, copies.destination_memory)
    memory = np.where(copies.kind <= Kind.COPY_D2H, memory, Memory.UNKNOWN)
    sort = copies.kind.astype(np.int64) << 8 | (memory & 0xFF)
    steps_of, rows, nvml = StepsOf(measured), [], gpus.trace.nvml
    for lane in gpus.lanes if len(copies) else ():
        steps, gpu = steps_of(lane.gpu), lane.gpu
        inside = is_on(copies, gpu) & stretches(steps, lane.window).contains(copies.start)
        card = nvml.card(gpu.host, gpu.gpu) if gpu.gpu_known else None
        slot, peak = None if card is None else slot_rate(card), memory_peak_of(gpu.name)
        for number in distinct_ids(sort[inside]).tolist():
            mine = copies.select(inside & (sort == number))
            kind, total = Kind(number >> 8), int((mine.end - mine.start).sum())
            within = None if peak is None else peak / 2
            limit = {Kind.COPY_D2D: within, Kind.COPY_PEER: None}.get(kind, slot)
            rows.append(
                CopyUse(
                    gpu.gpu,
                    gpu.rank,
                    _DIRECTIONS[kind],
                    _OF_HOST.get(number & 0xFF, ""),
                    len(steps),
                    count=len(mine),
                    bytes=int(mine.bytes.sum()),
                    total_ns=total,
                    bytes_per_s=round(int(mine.bytes.sum()) * 1e9 / total),
                    limit_bytes_per_s=round(limit) if limit else None,
                )
            )
    return tuple(sorted(rows, key=lambda row: -row.total_ns))


def is_on(copies: Events, gpu: Gpu) -> Mask:
    """Return a mask of the rows on a GPU."""
    on_gpu = np.zeros(len(copies), bool)
    for process, device in gpu.pairs:
        on_gpu |= (copies.process == process) & (copies.device == device)
    return on_gpu


def _pinned_rate(trace: Trace, copies: Events, lanes: Sequence[LaneSummary]) -> float | None:
    """Return the median rate of large copies from pinned memory, else the capacity of the slots."""
    pinned = copies.select(copies.source_memory == Memory.PINNED)
    if (rate := bandwidth(pinned)) is not None:
        return rate
    nvml = trace.nvml
    cards = [nvml.card(lane.gpu.host, lane.gpu.gpu) for lane in lanes if lane.gpu.gpu_known]
    rates = [rate for card in cards if card is not None and (rate := slot_rate(card))]
    return float(min(rates)) if rates else None
