"""File of a run on a worker, mapped to the numbering and the clock of the run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.execution import Shard
from gputrace.analyzers.operations import (
    Gpu,
    GpuOperations,
    GpuSummary,
    call_windows,
    pair_keys,
    pair_of,
)
from gputrace.model.events import UNKNOWN, Column, Events, Kind, distinct_ids, number_ids
from gputrace.model.trace import Device, Process, Progress, Trace, Window

Pair = tuple[Process, int]
"""A process (its number differs from file to file) and its CUDA device ordinal."""
_FREE: Final = 1 << 30
"""First number for names that are unknown outside of this worker."""
_IDLE: Final = -2
"""First number, counting down, for processes without GPU work."""
_FEW: Final = 4096
"""Up to this many names are sent with the ids; otherwise only on request."""


@dataclass(frozen=True)
class Census:
    """GPUs of a file and the work on them.

    Attributes:
        work: number of operations of each pair.
        together: the pairs of each GPU.
        devices: the device of each pair.
        names: the file's ids of the operations' names, sorted.
        texts: the names themselves, if they are few.
        span: first start and last end, on the file's clock; None without operations.
    """

    work: Mapping[Pair, int]
    together: tuple[frozenset[Pair], ...]
    devices: Mapping[Pair, Device]
    names: NDArray[np.int64]
    texts: Mapping[int, str]
    span: tuple[int, int] | None


@dataclass(frozen=True)
class Placing:
    """Mapping of a file to the numbering and the clock of the run.

    Attributes:
        processes: the run's number of each process of the file.
        ids: name ids of the file, sorted.
        names: the run's number of each of them.
        shift: nanoseconds to add to all times.
        gpus: the GPUs of the file.
    """

    processes: Mapping[Process, int]
    ids: NDArray[np.int64]
    names: NDArray[np.int32]
    shift: int
    gpus: tuple[Gpu, ...]


class RemoteShard(Shard):
    """Shard with the GPUs of one file."""

    def count(self) -> Census:
        """Read the operations and count them by process and device."""
        self.read()
        work: Counter[Pair] = Counter()
        for operations in self.operations:
            keys, inverse = number_ids(pair_keys(operations.events))
            counts = np.bincount(inverse).tolist()
            whose = map(self._pair, map(pair_of, keys.tolist()))
            work.update(dict(zip(whose, counts, strict=True)))
        each = [distinct_ids(operations.events.name) for operations in self.operations]
        names = distinct_ids(np.concatenate([np.empty(0, np.int64), *each]))
        pairs = [pair for operations in self.operations for pair in operations.gpu.pairs]
        spans = [operations.span for operations in self.operations]
        return Census(
            dict(work),
            tuple(frozenset(map(self._pair, each.gpu.pairs)) for each in self.operations),
            {self._pair(pair): self.trace.device(*pair) for pair in pairs},
            names,
            self.trace.names(names) if len(names) <= _FEW else {},
            (min(s.start for s in spans), max(s.end for s in spans)) if spans else None,
        )

    def _pair(self, pair: tuple[int, int]) -> Pair:
        return self.trace.processes[pair[0]], pair[1]

    def place(self, placing: Placing) -> list[GpuSummary]:
        """Map the shard to the numbering and clock of the run."""
        trace = PlacedTrace(self.trace, placing)
        self.trace = trace
        gpu_of = {pair: gpu for gpu in placing.gpus for pair in gpu.pairs}
        return self.take(
            trace.placed(operations, gpu_of[trace.pair(operations.gpu.pairs[0])])
            for operations in self.operations
        )

    def move(self, shifts: Mapping[int, int]) -> list[GpuSummary]:
        assert isinstance(self.trace, PlacedTrace)
        self.trace.shift += next((shifts[operations.gpu.host] for operations in self.operations), 0)
        return super().move(shifts)


class PlacedTrace(Trace):
    """Trace of a file in the numbering and on the clock of the run."""

    def __init__(self, trace: Trace, placing: Placing) -> None:
        super().__init__(trace.path)
        self.source, self.quality, self.no_gpu = trace.source, trace.quality, trace.no_gpu
        self.shift = placing.shift
        self._trace, self._number_of = trace, placing.processes
        self._numbers: dict[int, int] = dict(
            zip(placing.ids.tolist(), placing.names.tolist(), strict=True)
        )
        self._ids = {number: id for id, number in self._numbers.items()}

    def pair(self, pair: tuple[int, int]) -> tuple[int, int]:
        """Map a pair of the file to one with the run's process number."""
        return self._process(pair[0]), pair[1]

    def placed(self, operations: GpuOperations, gpu: Gpu) -> GpuOperations:
        """Map the operations of a GPU to the run."""
        events = self._translated(operations.events)
        windows = tuple(self.recorded(gpu.process))
        return GpuOperations(gpu, events, operations.classes, windows, call_windows(self, gpu))

    def _translated(self, events: Events) -> Events:
        arrays: dict[str, Column] = {name: getattr(events, name) for name in events.columns}
        for name in {"start", "end"} & arrays.keys():
            arrays[name] = arrays[name] + self.shift if self.shift else arrays[name]
        if "process" in arrays and len(events):
            numbers = [self._process(index) for index in range(len(self._trace.processes))]
            arrays["process"] = np.array(numbers, np.int16)[arrays["process"]]
        if "name" in arrays:
            ids, inverse = number_ids(arrays["name"])
            arrays["name"] = np.array([self._number(id) for id in ids.tolist()], np.int32)[inverse]
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
        numbers = self._own(ids)
        texts = self._trace.names(list(numbers))
        unknown = {int(id): f"<name {id}>" for id in ids}
        return unknown | {number: texts[id] for id, number in numbers.items()}

    def search(self, ids: Collection[int] | Column, pattern: re.Pattern[str]) -> dict[int, str]:
        numbers = self._own(ids)
        texts = self._trace.search(list(numbers), pattern)
        return {numbers[id]: text for id, text in texts.items()}

    def _own(self, ids: Collection[int] | Column) -> dict[int, int]:
        """Return the run's number of each known name by its id in the file."""
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
        windows = self._trace.calls_recorded(self._own_number(process))
        return None if windows is None else [self._later(window) for window in windows]

    def _process(self, number: int) -> int:
        return self._number_of.get(self._trace.processes[number], _IDLE - number)

    def _own_number(self, process: int) -> int:
        numbers = range(len(self._trace.processes))
        return next(number for number in numbers if self._process(number) == process)

    def _later(self, window: Window) -> Window:
        return Window(window.start + self.shift, window.end + self.shift)

    def device(self, process: int, device: int) -> Device:
        return replace(self._trace.device(self._own_number(process), device), process=process)

    def close(self) -> None:
        """Do nothing: whoever opened the file closes it."""
