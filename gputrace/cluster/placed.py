"""One file of a run on a worker, with the numbers and the clock that all of the run has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpus import Gpu, pair_keys, pair_of
from gputrace.analyzers.operations import GpuOperations, GpuSummary, when_calls_were
from gputrace.analyzers.shard import Shard
from gputrace.traces.events import UNKNOWN, Column, Events, Kind
from gputrace.traces.ids import distinct_ids, number_ids
from gputrace.traces.trace import Device, Process, Progress, Trace, Window

Pair = tuple[Process, int]
"""A process, which files number as they meet them, and what it calls a GPU by."""
_FREE: Final = 1 << 30
"""Numbers from here on are of names that mean nothing outside of the worker,"""
_IDLE: Final = -2
"""and from here down of processes that did nothing on a GPU."""
_FEW: Final = 4096
"""So many names travel with the ids; of more, those that are asked for."""


@dataclass(frozen=True)
class Census:
    """What a file holds of GPUs.

    Attributes:
        work: how many operations each pair has.
        together: the pairs of each GPU.
        devices: what each pair is.
        names: the file's ids of the operations' names, in order.
        texts: what they stand for, where they are few.
        span: from the first start to the last end, on the file's clock; None where there is no
            operation.
    """

    work: Mapping[Pair, int]
    together: tuple[frozenset[Pair], ...]
    devices: Mapping[Pair, Device]
    names: NDArray[np.int64]
    texts: Mapping[int, str]
    span: tuple[int, int] | None


@dataclass(frozen=True)
class Placing:
    """The numbers and the clock of the run.

    Attributes:
        processes: the number of each process of the file.
        ids: some name ids of the file, in order.
        names: the number of each of them.
        shift: nanoseconds to add to all times.
        gpus: those of the file.
    """

    processes: Mapping[Process, int]
    ids: NDArray[np.int64]
    names: NDArray[np.int32]
    shift: int
    gpus: tuple[Gpu, ...]


class RemoteShard(Shard):
    """The GPUs of a file."""

    def count(self) -> Census:
        """Reads the operations, and says whose they are."""
        self.read()
        work: Counter[Pair] = Counter()
        for own in self.operations:
            keys, place = number_ids(pair_keys(own.events))
            counts = np.bincount(place).tolist()
            whose = map(self._pair, map(pair_of, keys.tolist()))
            work.update(dict(zip(whose, counts, strict=True)))
        each = [distinct_ids(own.events.name) for own in self.operations]
        names = distinct_ids(np.concatenate([np.empty(0, np.int64), *each]))
        pairs = [pair for own in self.operations for pair in own.gpu.pairs]
        spans = [own.span for own in self.operations]
        return Census(
            dict(work),
            tuple(frozenset(map(self._pair, own.gpu.pairs)) for own in self.operations),
            {self._pair(pair): self.trace.device(*pair) for pair in pairs},
            names,
            self.trace.names(names) if len(names) <= _FEW else {},
            (min(s.start for s in spans), max(s.end for s in spans)) if spans else None,
        )

    def _pair(self, pair: tuple[int, int]) -> Pair:
        return self.trace.processes[pair[0]], pair[1]

    def place(self, placing: Placing) -> list[GpuSummary]:
        """Gives everything its place in the run."""
        trace = PlacedTrace(self.trace, placing)
        self.trace = trace
        gpu_of = {pair: gpu for gpu in placing.gpus for pair in gpu.pairs}
        return self.take(
            trace.placed(own, gpu_of[trace.pair(own.gpu.pairs[0])]) for own in self.operations
        )

    def move(self, shifts: Mapping[int, int]) -> list[GpuSummary]:
        assert isinstance(self.trace, PlacedTrace)
        self.trace.shift += next((shifts[own.gpu.host] for own in self.operations), 0)
        return super().move(shifts)


class PlacedTrace(Trace):
    """A file's trace in the numbers and on the clock of the run."""

    def __init__(self, trace: Trace, placing: Placing) -> None:
        super().__init__(trace.path)
        self.source, self.quality, self.no_gpu = trace.source, trace.quality, trace.no_gpu
        self.shift = placing.shift
        self._trace, self._number_of = trace, placing.processes
        self._numbers: dict[int, int] = dict(
            zip(placing.ids.tolist(), placing.names.tolist(), strict=True)
        )
        self._ids = {number: id for id, number in self._numbers.items()}

    def pair(self, own: tuple[int, int]) -> tuple[int, int]:
        """A process by the run's number, and what it calls a GPU by, of the file's own."""
        return self._process(own[0]), own[1]

    def placed(self, own: GpuOperations, gpu: Gpu) -> GpuOperations:
        """Operations as the run has them, of a GPU that it calls so."""
        events = self._translated(own.events)
        windows = tuple(self.recorded(gpu.process))
        return GpuOperations(gpu, events, own.classes, windows, when_calls_were(self, gpu))

    def _translated(self, events: Events) -> Events:
        arrays: dict[str, Column] = {name: getattr(events, name) for name in events.columns}
        for name in {"start", "end"} & arrays.keys():
            arrays[name] = arrays[name] + self.shift if self.shift else arrays[name]
        if "process" in arrays and len(events):
            numbers = [self._process(place) for place in range(len(self._trace.processes))]
            arrays["process"] = np.array(numbers, np.int16)[arrays["process"]]
        if "name" in arrays:
            ids, place = number_ids(arrays["name"])
            arrays["name"] = np.array([self._number(id) for id in ids.tolist()], np.int32)[place]
        return Events(arrays)

    def _number(self, id: int) -> int:
        if id == UNKNOWN:
            return UNKNOWN
        if id not in self._numbers:
            number = _FREE + len(self._numbers)
            self._numbers[id], self._ids[number] = number, id
        return self._numbers[id]

    @property
    def kinds(self) -> frozenset[Kind]:
        return self._trace.kinds

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        own = self._own(ids)
        texts = self._trace.names(list(own))
        return {int(id): f"<name {id}>" for id in ids} | {own[id]: texts[id] for id in own}

    def search(self, ids: Collection[int] | Column, pattern: re.Pattern[str]) -> dict[int, str]:
        own = self._own(ids)
        return {own[id]: text for id, text in self._trace.search(list(own), pattern).items()}

    def _own(self, ids: Collection[int] | Column) -> dict[int, int]:
        """The numbers that are known, by the file's own ids."""
        return {self._ids[int(id)]: int(id) for id in ids if int(id) in self._ids}

    def read(
        self,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        if window is not None:
            window = Window(window.start - self.shift, window.end - self.shift)
        return self._translated(self._trace.read(kinds, columns, window, progress))

    def read_parts(
        self, kinds: frozenset[Kind], columns: Sequence[str], progress: Progress | None
    ) -> Iterator[Events]:
        return map(self._translated, self._trace.read_parts(kinds, columns, progress))

    def recorded(self, process: int) -> Sequence[Window]:
        return [self._later(window) for window in self._trace.recorded(self._own_number(process))]

    def calls_recorded(self, process: int) -> Sequence[Window] | None:
        own = self._trace.calls_recorded(self._own_number(process))
        return None if own is None else [self._later(window) for window in own]

    def _process(self, own: int) -> int:
        return self._number_of.get(self._trace.processes[own], _IDLE - own)

    def _own_number(self, process: int) -> int:
        places = range(len(self._trace.processes))
        return next(place for place in places if self._process(place) == process)

    def _later(self, window: Window) -> Window:
        return Window(window.start + self.shift, window.end + self.shift)

    def device(self, process: int, device: int) -> Device:
        return replace(self._trace.device(self._own_number(process), device), process=process)

    def close(self) -> None:
        """The file is closed by who opened it."""
