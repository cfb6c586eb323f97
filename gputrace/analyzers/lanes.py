"""A lane: one GPU, or one rank of which no GPU was seen, with all that was found about its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.causes import Causes
from gputrace.analyzers.collectives.waiting import Waiting
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.intervals import Intervals, Times
from gputrace.analyzers.partition import Shares, Timeline
from gputrace.analyzers.results import IDLE_CAUSES
from gputrace.traces.events import UNKNOWN
from gputrace.traces.trace import Window


class Place(Protocol):
    """What a row of results is about: a GPU, or a rank of which no GPU was seen (None)."""

    @property
    def gpu(self) -> int | None: ...
    @property
    def gpu_known(self) -> bool: ...
    @property
    def device(self) -> int | None: ...
    @property
    def rank(self) -> int: ...


class AnyLane(Protocol):
    """One place, with what is known about its time."""

    @property
    def gpu(self) -> Place: ...
    @property
    def window(self) -> Window: ...
    @property
    def host_data(self) -> Intervals | None: ...
    @property
    def with_calls(self) -> Intervals | None:
        """The parts of the window with all CUDA calls; None where that is all of it."""

    def split(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Shape (windows, len(CLASSES)); (windows, 0) where no class is known."""

    def idle(self, start: int, end: int) -> int | None: ...

    def waited(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Of each window, the communication spent waiting for other ranks; `UNKNOWN` if unknown."""


@dataclass(frozen=True)
class Lane:
    """One GPU with everything that has been found about its time."""

    timeline: Timeline
    causes: Causes
    host_data: Intervals | None
    """When its feeding threads were in the data loader; None where that is not known."""
    waiting: Waiting | None = None
    """When its communication waits for other ranks; None where collectives were not matched."""
    data: Mapping[tuple[int, int], Intervals] = field(default_factory=dict)
    """When threads of its process, by (process, thread), waited for data: recorded, or proven."""
    with_calls: Intervals | None = None
    """The parts of its window with all CUDA calls; None where that is all of it."""

    @property
    def gpu(self) -> Gpu:
        return self.timeline.gpu

    @property
    def window(self) -> Window:
        """The GPU's span, or the part of it that was asked for."""
        return self.timeline.window

    @property
    def operations(self) -> int:
        """How many kernels, copies and graphs ran."""
        return self.timeline.kernels + self.timeline.copies + self.timeline.opaque_graphs

    def split(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Partition of windows with idle time by cause: shape (windows, len(CLASSES)).

        A step of the rank may begin before this GPU's first operation and end after its last. That
        is no gap, so no cause is known of it.
        """
        shares, causes = self.timeline.split(starts, ends), self.causes.within(starts, ends)
        causes[:, IDLE_CAUSES.index("other_idle")] += shares[:, -1] - causes.sum(axis=1)
        return np.concatenate([shares[:, :-1], causes], axis=1)

    def idle(self, start: int, end: int) -> int:
        """Nanoseconds of a stretch in which the GPU runs nothing."""
        return int(self.timeline.split([start], [end])[0, -1])

    def waited(self, starts: Times, ends: Times) -> NDArray[np.int64]:
        """Of each window, the communication spent waiting for other ranks; `UNKNOWN` if unknown."""
        if self.waiting is None:
            return np.full(len(starts), UNKNOWN)
        return self.waiting.within(starts, ends)


class AnyLaneSummary(Protocol):
    """A lane in brief."""

    @property
    def gpu(self) -> Place: ...
    @property
    def window(self) -> Window: ...
    @property
    def with_calls(self) -> Intervals | None: ...


@dataclass(frozen=True)
class LaneSummary:
    """The lane of a GPU in brief: where it reaches, and what ran in it."""

    gpu: Gpu
    window: Window
    with_calls: Intervals | None
    """These three as of `Lane`."""
    kernels: int
    copies: int
    opaque_graphs: int
    shares: Shares
    """These four as of `Timeline`."""

    @classmethod
    def of(cls, lane: Lane) -> LaneSummary:
        """A lane in brief."""
        own = lane.timeline
        counts = own.kernels, own.copies, own.opaque_graphs
        return cls(lane.gpu, lane.window, lane.with_calls, *counts, own.shares)

    @property
    def operations(self) -> int:
        """How many kernels, copies and graphs ran."""
        return self.kernels + self.copies + self.opaque_graphs
