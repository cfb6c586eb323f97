"""Copies from pageable memory: what they take, and what they would from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gputrace.analyzers.classes import OperationClass
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.grouping import StepsOf, stretches
from gputrace.analyzers.intervals import Intervals, union
from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.links.hardware import pcie_rate
from gputrace.analyzers.per_gpu import PerGpu
from gputrace.analyzers.results import Step
from gputrace.analyzers.shard import OneGpu
from gputrace.traces.events import Events, Kind, Mask, Memory
from gputrace.traces.trace import Trace

_LARGE: Final = 1 << 20
_FEWEST: Final = 3
"""Bytes and number of pinned copies that tell how fast such copies are on this machine."""


@dataclass(frozen=True)
class Pageable:
    """Input copies from pageable memory in the measured steps of all GPUs, or in their spans."""

    copies: int
    bytes: int
    copy_ns: int
    """Their durations together."""
    exposed_ns: int
    """The part of these with nothing of a higher class beside it on its GPU."""
    pinned_rate: float | None
    """Bytes per second of copies from pinned memory; None where nothing tells."""

    @property
    def saving_ns(self) -> int:
        """The exposed time less what as many bytes take from pinned memory."""
        if not self.pinned_rate or not self.copy_ns:
            return self.exposed_ns
        pinned = self.bytes * 1e9 / self.pinned_rate
        return round(self.exposed_ns * max(0.0, 1 - pinned / self.copy_ns))


def find_pageable(gpus: PerGpu, lanes: Sequence[LaneSummary], measured: Sequence[Step]) -> Pageable:
    """Adds the copies of some of the GPUs up."""
    columns = ("start", "end", "bytes", "source_memory", "process", "device")
    every = gpus.trace.events([Kind.COPY_H2D], columns)
    copies = every.select(every.source_memory == Memory.PAGEABLE)
    steps_of = StepsOf(measured)
    windows = [stretches(steps_of(lane.gpu), lane.window) for lane in lanes if len(copies)]
    mine = [
        copies.select(_inside(copies, time) & _on(copies, lane.gpu))
        for lane, time in zip(lanes, windows, strict=False)
    ]
    busy = [union(own.start, own.end) for own in mine]
    return Pageable(
        sum(map(len, mine)),
        sum(int(own.bytes.sum()) for own in mine),
        sum(int((own.end - own.start).sum()) for own in mine),
        sum(gpus.each(_alone, lanes, busy)) if busy else 0,
        _pinned_rate(gpus.trace, every, lanes),
    )


def _inside(copies: Events, time: Intervals) -> Mask:
    inside: Mask = time.contains(copies.start) & time.contains(copies.end - 1)
    return inside


def _alone(one: OneGpu, copies: Intervals) -> int:
    """Nanoseconds of copies with nothing of a higher class beside them."""
    return copies.intersection(one.lane.timeline.of_class(OperationClass.H2D)).total


def _on(copies: Events, gpu: Gpu) -> Mask:
    found = np.zeros(len(copies), bool)
    for process, device in gpu.pairs:
        found |= (copies.process == process) & (copies.device == device)
    return found


def _pinned_rate(trace: Trace, copies: Events, lanes: Sequence[LaneSummary]) -> float | None:
    """The middle of the trace's own large copies from pinned memory, else what the slots carry."""
    large = (copies.bytes >= _LARGE) & (copies.end > copies.start)
    pinned = copies.select(large & (copies.source_memory == Memory.PINNED))
    if len(pinned) >= _FEWEST:
        return float(np.median(pinned.bytes * 1e9 / (pinned.end - pinned.start)))
    nvml = trace.nvml
    cards = [nvml.card(lane.gpu.host, lane.gpu.gpu) for lane in lanes if lane.gpu.gpu_known]
    rates = [rate for card in cards if card is not None and (rate := pcie_rate(card))]
    return float(min(rates)) if rates else None
