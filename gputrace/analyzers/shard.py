"""A shard: the GPUs whose rows are in one place, and what is made of these.

All of a trace is one in the process that analyzes it; on the workers of a cluster, each file is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from gputrace.analyzers.collectives.waiting import Waiting, find_waiting
from gputrace.analyzers.gathered import gather_calls, gather_operations
from gputrace.analyzers.gpu_lanes import find_lanes
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.host import HostCalls, read_calls
from gputrace.analyzers.lanes import AnyLane, Lane, LaneSummary, Place
from gputrace.analyzers.operations import GpuOperations, GpuSummary, read_operations
from gputrace.analyzers.steps import StepWindows, steps_by_rank
from gputrace.traces.scratch import OneByOne, Scratch
from gputrace.traces.trace import Progress, Trace, Window

_Any = TypeVar("_Any")
_Found = TypeVar("_Found")
_Kept = TypeVar("_Kept", GpuOperations, Lane)


class Shard:
    """The GPUs whose rows are in one place.

    Attributes:
        trace: whose rows they are.
        operations: of each GPU, once they are read.
        calls: of all host threads, once they are read; None where there are none.
        lanes: of the GPUs that have anything in the window, once they are built.
        kept: what analyzers keep of GPUs, by name.
    """

    def __init__(
        self, trace: Trace, scratch: Scratch | None = None, progress: Progress | None = None
    ) -> None:
        """With a ``scratch``, columns are on disk, those of one GPU in memory at a time."""
        self.trace, self._scratch, self._progress = trace, scratch, progress
        self.operations: Sequence[GpuOperations] = ()
        self.calls: HostCalls | None = None
        self.lanes: Sequence[AnyLane] = ()
        self._ran: list[GpuSummary] = []
        self._places: dict[Place, int] = {}
        self._lanes: dict[Place, int] = {}
        self.kept: dict[tuple[Place, str], Any] = {}
        self._once: dict[Callable[[Shard], Any], Any] = {}

    @classmethod
    def of_hosts(cls, trace: Trace, lanes: Sequence[AnyLane]) -> Shard:
        """The lanes of ranks of which no GPU was seen."""
        shard = cls(trace)
        shard.take_lanes(lanes)
        return shard

    def read(self) -> list[GpuSummary]:
        """Reads the GPUs' operations."""
        if self._scratch is None:
            return self.take(read_operations(self.trace, self._progress))
        return self.take(gather_operations(self.trace, self._scratch, self._progress))

    def take(self, operations: Iterable[GpuOperations]) -> list[GpuSummary]:
        """Sets the operations of all GPUs; what ran on each."""
        self.operations = self._kept(operations)
        self._ran = [GpuSummary.of(own) for own in self.operations]
        self._places = {ran.gpu: place for place, ran in enumerate(self._ran)}
        return self._ran

    def move(self, shifts: Mapping[int, int]) -> list[GpuSummary]:
        """Adds nanoseconds to the times of the operations by host; the trace has moved already."""
        if not any(shifts.values()):
            return self._ran
        return self.take(own.moved(shifts[own.gpu.host]) for own in self.operations)

    def read_calls(self) -> bool:
        """Reads the hosts' CUDA calls; whether there are any."""
        if self._scratch is None:
            self.calls = read_calls(self.trace, self._progress)
        else:
            self.calls = gather_calls(self.trace, self._scratch, self._progress)
        return self.calls is not None

    def forget_calls(self) -> None:
        """Has them count as not recorded."""
        self.calls = None

    def find_steps(self) -> dict[int, StepWindows]:
        """The steps of each rank by itself."""
        return steps_by_rank(self.trace, self.operations, self.calls)

    def build_lanes(
        self, window: Window | None, steps: Mapping[int, StepWindows], has_calls: bool
    ) -> list[LaneSummary]:
        """Timelines and causes of all GPUs with anything in the window.

        Args:
            window: the part of the time that was asked for.
            steps: of the ranks.
            has_calls: whether calls were recorded, if only in another place.
        """
        lanes = find_lanes(
            self.trace, self.operations, self.calls, steps, window, self._scratch, has_calls
        )
        self.take_lanes(self._kept(lanes))
        return [LaneSummary.of(lane) for lane in lanes]

    def take_lanes(self, lanes: Sequence[AnyLane]) -> None:
        """Sets the lanes of all GPUs."""
        self.lanes = lanes
        self._lanes = {lane.gpu: place for place, lane in enumerate(lanes)}

    def add_waits(self, waits: Mapping[Gpu, Waiting]) -> None:
        """Tells of each GPU when it was in collectives that waited for others."""
        lanes = (lane for lane in self.lanes if isinstance(lane, Lane))
        self.lanes = self._kept(
            replace(lane, waiting=find_waiting(lane.timeline, waits[lane.gpu])) for lane in lanes
        )

    def _kept(self, things: Iterable[_Kept]) -> Sequence[_Kept]:
        """What there is of each GPU, in memory or on disk."""
        if self._scratch is None:
            return list(things)
        return OneByOne([self._scratch.keep(one) for one in things], self._scratch)

    def once(self, work: Callable[[Shard], _Found]) -> _Found:
        """What a function makes of all that is here; it runs when it is first asked for."""
        if work not in self._once:
            self._once[work] = work(self)
        found: _Found = self._once[work]
        return found

    def do(self, work: Callable[..., Any] | str, gpu: Place | None, given: Sequence[Any]) -> Any:
        """What a method gives, by its name, or a function of the shard, or of one GPU of it."""
        if isinstance(work, str):
            return getattr(self, work)(*given)
        return work(self if gpu is None else OneGpu(self, gpu), *given)

    def rest(self) -> None:
        """Gives back what memory was needed for columns on disk."""
        if self._scratch is not None:
            self._scratch.let_go()

    def keep(self, key: tuple[Place, str], value: _Any) -> _Any:
        """Keeps something of a GPU, on disk if the columns are."""
        self.kept[key] = value if self._scratch is None else self._scratch.keep(value)
        found: _Any = self.kept[key]
        return found

    def operations_of(self, gpu: Place) -> GpuOperations:
        """Those of one GPU."""
        return self.operations[self._places[gpu]]

    def lane_of(self, gpu: Place) -> AnyLane:
        """The lane of one GPU, or rank."""
        return self.lanes[self._lanes[gpu]]


class OneGpu:
    """One GPU of a shard: its rows, and what was made of them."""

    def __init__(self, shard: Shard, gpu: Place) -> None:
        self._shard, self._gpu = shard, gpu

    @property
    def trace(self) -> Trace:
        """Tells the names of its rows."""
        return self._shard.trace

    @property
    def calls(self) -> HostCalls | None:
        """The calls of all processes whose rows are in the same place."""
        return self._shard.calls

    def once(self, work: Callable[[Shard], _Found]) -> _Found:
        """As of the shard."""
        return self._shard.once(work)

    def keep(self, name: str, value: _Any) -> _Any:
        """Keeps something of this GPU, to be asked for by name."""
        return self._shard.keep((self._gpu, name), value)

    def kept(self, name: str) -> Any:
        """What was kept of it."""
        return self._shard.kept[self._gpu, name]

    @property
    def operations(self) -> GpuOperations:
        return self._shard.operations_of(self._gpu)

    @property
    def lane(self) -> Lane:
        """Its lane, once that is built."""
        lane = self.any_lane
        assert isinstance(lane, Lane)
        return lane

    @property
    def any_lane(self) -> AnyLane:
        """The same where no GPU need have been seen."""
        return self._shard.lane_of(self._gpu)
