"""The GPUs of a run, and what is worked out of the rows of each, wherever these are.

An analyzer says what it makes of the rows of one GPU as a function of `OneGpu`. `PerGpu.each` has
it run where the rows are, and gives what comes of it, which is small beside them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.collectives.waiting import Waiting
from gputrace.analyzers.gpus import Gpu, order_of
from gputrace.analyzers.host import HostCalls
from gputrace.analyzers.lanes import AnyLane, LaneSummary, Place
from gputrace.analyzers.operations import GpuSummary
from gputrace.analyzers.shard import Shard
from gputrace.analyzers.steps import FoundSteps, StepWindows, agree
from gputrace.traces.ids import distinct_ids
from gputrace.traces.trace import Trace, Window

_Found = TypeVar("_Found")
_OfGpu = TypeVar("_OfGpu", GpuSummary, LaneSummary)


class Job(NamedTuple):
    """What is to be done with a shard."""

    shard: int
    work: Callable[..., Any] | str
    """A function of the module, or the name of a method of `Shard`."""
    gpu: Place | None = None
    """The GPU that the function is of; None for one of the shard."""
    given: tuple[Any, ...] = ()
    """Further arguments."""


class HasGpu(Protocol):
    """Whatever is of one GPU."""

    @property
    def gpu(self) -> Place: ...


class Shards(ABC):
    """All shards of a run, by number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def ask(self, jobs: Sequence[Job], *, changes: bool = False) -> list[Any]:
        """What comes of some jobs, in order; ``changes`` tells that they change their shards."""

    @abstractmethod
    def whole(self, trace: Trace) -> Shard:
        """One that reads all of the run here."""

    @abstractmethod
    def calls_within(self, trace: Trace, window: Window) -> HostCalls | None:
        """As of `PerGpu`."""

    @abstractmethod
    def close(self) -> None:
        """Gives them back."""


class LocalShards(Shards):
    """The one that has all of a trace, in this process."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def __len__(self) -> int:
        return 1

    def ask(self, jobs: Sequence[Job], *, changes: bool = False) -> list[Any]:
        return [self.shard.do(job.work, job.gpu, job.given) for job in jobs]

    def whole(self, trace: Trace) -> Shard:
        return self.shard

    def calls_within(self, trace: Trace, window: Window) -> HostCalls | None:
        return self.shard.calls

    def close(self) -> None:
        """Views go on with it; it ends with the last of them."""


class PerGpu:
    """The GPUs of a run.

    Attributes:
        trace: the run.
        shards: where the rows are.
        operations: what ran on each GPU, in order of GPU.
        lanes: of those that have anything in the window, once they are built.
        has_calls: whether CUDA calls of the hosts were recorded, once they are read.
    """

    def __init__(self, trace: Trace, shards: Shards, ran: Sequence[Sequence[GpuSummary]]) -> None:
        """``ran`` is what ran on each GPU, by shard."""
        self.trace, self.shards = trace, shards
        self._shard = {one.gpu: number for number, own in enumerate(ran) for one in own}
        self.operations = self._in_order(ran)
        self.lanes: Sequence[LaneSummary] = ()
        self.has_calls = False

    @classmethod
    def here(cls, shard: Shard) -> PerGpu:
        """Those of a trace that is read in this process."""
        return cls(shard.trace, LocalShards(shard), [shard.read()])

    @classmethod
    def of_hosts(cls, trace: Trace, lanes: Sequence[AnyLane]) -> PerGpu:
        """Of ranks of which no GPU was seen: there are lanes, and no GPUs."""
        return cls(trace, LocalShards(Shard.of_hosts(trace, lanes)), [])

    def each(
        self,
        work: Callable[..., _Found],
        of: Iterable[HasGpu],
        *given: Iterable[Any],
        same: Sequence[Any] = (),
        keeps: bool = False,
    ) -> list[_Found]:
        """What a function makes of each of some GPUs.

        Args:
            work: of a module, with a `OneGpu` and what is given for it.
            of: the GPUs.
            given: further arguments, by GPU.
            same: arguments after these that are the same for all.
            keeps: whether it keeps something where the rows are.
        """
        jobs = [
            Job(self._shard.get(one.gpu, 0), work, one.gpu, (*own, *same))
            for one, *own in zip(of, *given, strict=True)
        ]
        return self.shards.ask(jobs, changes=keeps)

    def in_each_place(self, work: Callable[..., _Found], *given: Any) -> list[_Found]:
        """What a function makes of each shard."""
        return self.shards.ask([Job(number, work, given=given) for number in self._numbers])

    def move(self, shifts: Mapping[int, int], how: str) -> None:
        """Adds nanoseconds to the times of each host; ``how`` says what told them."""
        self.trace.shift_hosts(shifts, how)
        own: list[dict[int, int]] = [{} for _ in self._numbers]
        for ran in self.operations:
            own[self._shard[ran.gpu]][ran.gpu.host] = shifts[ran.gpu.host]
        self.operations = self._in_order(self._change_each("move", [(mine,) for mine in own]))

    def find_steps(self, chosen: tuple[int, int] | None = None) -> FoundSteps:
        """Reads the calls, and finds everyone's steps."""
        self.has_calls = any(self._change("read_calls"))
        shown: dict[int, StepWindows] = {}
        for own in self.shards.ask([Job(number, "find_steps") for number in self._numbers]):
            shown |= own
        return agree(self.trace, dict(sorted(shown.items())), self.operations, chosen)

    def forget_calls(self) -> None:
        """Has them count as not recorded."""
        self.has_calls = False
        self._change("forget_calls")

    def build_lanes(self, window: Window | None, found: FoundSteps) -> None:
        """Timelines and causes of all GPUs with anything in the window."""
        steps: list[dict[int, StepWindows]] = [{} for _ in self._numbers]
        for own in self.operations:
            if own.gpu.rank in found.by_rank:
                steps[self._shard[own.gpu]][own.gpu.rank] = found.by_rank[own.gpu.rank]
        given = [(window, own, self.has_calls) for own in steps]
        self.lanes = self._in_order(self._change_each("build_lanes", given))

    def add_waits(self, waits: Mapping[Gpu, Waiting]) -> None:
        """Tells of each GPU when it was in collectives that waited for others."""
        own: list[dict[Gpu, Waiting]] = [{} for _ in self._numbers]
        for lane in self.lanes:
            own[self._shard[lane.gpu]][lane.gpu] = waits[lane.gpu]
        self._change_each("add_waits", [(mine,) for mine in own])

    @property
    def whole(self) -> Shard:
        """All of the run, for what needs it here."""
        return self.shards.whole(self.trace)

    def calls_within(self, window: Window) -> HostCalls | None:
        """The calls that touch a window, and maybe others; None where there are none."""
        return self.shards.calls_within(self.trace, window)

    def close(self) -> None:
        """Gives the rows back, and all that was made of them elsewhere."""
        self.shards.close()

    @property
    def _numbers(self) -> range:
        return range(len(self.shards))

    def _change(self, method: str, *given: Any) -> list[Any]:
        return self._change_each(method, [given for _ in self._numbers])

    def _change_each(self, method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        jobs = [Job(number, method, given=own) for number, own in enumerate(given)]
        return self.shards.ask(jobs, changes=True)

    def _in_order(self, by_shard: Sequence[Sequence[_OfGpu]]) -> list[_OfGpu]:
        """What is of each GPU, in order of GPU."""
        everything = [one for own in by_shard for one in own]
        return sorted(everything, key=lambda one: order_of(one.gpu))


def same_names(
    gpus: PerGpu, ids: Sequence[NDArray[np.int64]]
) -> tuple[list[str], list[dict[int, int]]]:
    """The texts of some name ids of each GPU, each once; for each GPU, which of them its ids are.

    Files of one run have ids of their own for the same text.
    """
    known = gpus.trace.names(distinct_ids(np.concatenate(ids)))
    texts = list(dict.fromkeys(known.values()))
    place = {text: number for number, text in enumerate(texts)}
    return texts, [{id: place[known[id]] for id in own.tolist()} for own in ids]
