"""Events of the profiler to rows of the event columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.events import COLUMN_TYPES, UNKNOWN, Events, Kind, Memory
from gputrace.traces.kineto.copies import copy_of
from gputrace.traces.kineto.decimals import nanoseconds
from gputrace.traces.kineto.decode import NO_ARGS, Event, Value, integer
from gputrace.traces.kineto.kept import FAR, Kept
from gputrace.traces.kineto.messages import message_bytes
from gputrace.traces.memory import Names

T = TypeVar("T")
Ints = NDArray[np.int64]
Columns = dict[str, Ints]

_GPU: Final = {
    "kernel": Kind.KERNEL,
    "Kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY_OTHER,
    "Memcpy": Kind.COPY_OTHER,
    "gpu_memset": Kind.MEMSET,
    "Memset": Kind.MEMSET,
}
_HOST: Final = {
    "cuda_runtime": Kind.API,
    "cuda_driver": Kind.API,
    "Runtime": Kind.API,
    "Driver": Kind.API,
    "user_annotation": Kind.RANGE,
    "cpu_op": Kind.RANGE,
    "Operator": Kind.RANGE,
    "overhead": Kind.OVERHEAD,
    "Overhead": Kind.OVERHEAD,
}
"""Categories; those of the profiler's first versions are capitalised."""

_OPERATORS: Final = {"cpu_op", "Operator"}
_ANNOTATIONS: Final = ("ProfilerStep", "enumerate(DataLoader)", "Optimizer.")
"""Beginnings of annotations, which the older profiler calls operators, as all the rest there."""

_STEP: Final = re.compile(r"ProfilerStep#?\d*$")
_NUMBER: Final = re.compile(r"-?\d+$")
_ENDS: Final = ("source_memory", "destination_memory")
_HALF: Final = 1 << 31
_NEVER: Final = np.iinfo(np.int64).max

_DATA: Final = re.compile(r"enumerate\(DataLoader\)#.*__next__")


class Rows:
    """Rows of one file under way.

    Attributes:
        names: of all rows.
        pids: the processes of the host's rows, numbered as the column ``process`` is.
        has_gpu: whether anything of a GPU was among them.
    """

    def __init__(self, kept: Kept | None = None) -> None:
        """``kept`` chooses rows; what is told of them all is the same whichever those are."""
        self.names = Names()
        self.pids: dict[Value, int] = {}
        self.has_gpu = False
        self._kept = kept
        self._calls: Counter[int] = Counter()
        self._first = _NEVER
        self._from_zero = False
        self._threads: dict[Value, int] = {}
        self._on_gpu: list[Columns] = []
        self._on_host: list[Columns] = []

    def add(self, events: Iterable[Event]) -> None:
        """Takes events that have a start and a duration; those of no interest are passed over."""
        on_gpu, on_host = [], []
        for event in events:
            if event.cat in _GPU:
                on_gpu.append(event)
            elif event.cat in _HOST and (
                event.cat not in _OPERATORS or str(event.name).startswith(_ANNOTATIONS)
            ):
                on_host.append(event)
        self.has_gpu |= bool(on_gpu)
        self._take(on_gpu, on_host, self._kept)

    def _take(self, on_gpu: list[Event], on_host: list[Event], kept: Kept | None) -> None:
        if on_gpu and (own := self._times(on_gpu, kept))[0]:
            self._on_gpu.append(self._gpu_rows(*own))
        if on_host:
            self._note_processes(on_host)
            if (own := self._times(on_host, kept))[0]:
                self._on_host.append(self._host_rows(*own))

    def _note_processes(self, on_host: Iterable[Event]) -> None:
        """Numbers the processes, and counts their calls, of all rows: not of those kept alone."""
        for (cat, pid), count in Counter([(event.cat, event.pid) for event in on_host]).items():
            process = self._process(pid)
            if _HOST[cat or ""] == Kind.API:
                self._calls[process] += count

    @property
    def first(self) -> int:
        """The earliest time of a row, in nanoseconds; the profiler writes 0 for one it lost."""
        if self._first == _NEVER or (self._from_zero and self._first <= FAR):
            return 0
        return self._first

    def parts(self, shift: int) -> list[Events]:
        """All rows, with so many nanoseconds added to their times."""
        main = self._main_process()
        if self._kept is not None:
            nearest = self._kept.nearest()
            self._take(
                [e for e in nearest if e.cat in _GPU], [e for e in nearest if e.cat in _HOST], None
            )
        for columns in self._on_gpu:
            columns["process"] = np.full(len(columns["start"]), main)
        return [_shifted(columns, shift) for columns in self._on_gpu + self._on_host]

    def _main_process(self) -> int:
        """The one that makes most CUDA calls; a GPU's rows do not say whose they are."""
        return min(self._calls, key=lambda process: (-self._calls[process], process), default=0)

    def _gpu_rows(self, events: Sequence[Event], times: Columns) -> Columns:
        args = [event.args or NO_ARGS for event in events]
        columns = times
        columns["kind"] = _mapped([event.cat for event in events], lambda cat: _GPU[cat or ""])
        columns["name"] = self._names(events)
        columns["device"] = _either([a.device for a in args], lambda: [e.pid for e in events])
        columns["stream"] = _either([a.stream for a in args], lambda: [e.tid for e in events])
        columns["correlation"] = _integers([a.correlation for a in args])
        columns["bytes"] = _either(
            [a.bytes for a in args],
            lambda: [message_bytes(a) if a.element else UNKNOWN for a in args],
        )
        if (columns["kind"] == Kind.COPY_OTHER).any():
            columns["source_device"] = _integers([a.source for a in args])
            columns["destination_device"] = _integers([a.destination for a in args])
            self._tell_copies(columns)
        return columns

    def _tell_copies(self, columns: Columns) -> None:
        """Adds what the copies' names say."""
        rows = np.flatnonzero(columns["kind"] == Kind.COPY_OTHER)
        ids, place = np.unique(columns["name"][rows], return_inverse=True)
        copies = np.array([copy_of(self.names.texts[id]) for id in ids.tolist()])
        for column, values in zip(("kind", *_ENDS), copies.T, strict=True):
            whole = columns.setdefault(column, np.full(len(columns["kind"]), Memory.UNKNOWN))
            whole[rows] = values[place]

    def _host_rows(self, events: Sequence[Event], times: Columns) -> Columns:
        columns = times
        columns["kind"] = _mapped([event.cat for event in events], lambda cat: _HOST[cat or ""])
        columns["name"] = self._names(events)
        ranges = np.flatnonzero(columns["kind"] == Kind.RANGE)
        texts = [self.names.texts[id] for id in columns["name"][ranges].tolist()]
        columns["kind"][ranges] = _mapped(texts, _kind_of)
        columns["process"] = _mapped([event.pid for event in events], self._process)
        columns["thread"] = _mapped([event.tid for event in events], self._thread)
        columns["correlation"] = _integers([(e.args or NO_ARGS).correlation for e in events])
        return columns

    def _times(self, events: list[Event], kept: Kept | None) -> tuple[list[Event], Columns]:
        """The events to keep, and their times."""
        start = nanoseconds([event.ts for event in events])
        length = nanoseconds([event.dur for event in events])
        known = (start != UNKNOWN) & (length != UNKNOWN)
        self._first = int(start[known & (start != 0)].min(initial=self._first))
        self._from_zero |= bool((known & (start == 0)).any())
        end = np.where(known, start + length, UNKNOWN)
        if kept is not None and not (rows := kept.choose(events, start, end)).all():
            events = [event for event, one in zip(events, rows.tolist(), strict=True) if one]
            start, end = start[rows], end[rows]
        return events, {"start": start, "end": end}

    def _names(self, events: Sequence[Event]) -> Ints:
        return _mapped([event.name for event in events], lambda name: self.names.number(str(name)))

    def _process(self, pid: Value) -> int:
        return self.pids.setdefault(pid, len(self.pids))

    def _thread(self, tid: Value) -> int:
        """The thread's id in 32 bits; one that is no number gets one that no thread has."""
        if (known := self._threads.get(tid)) is None:
            number = integer(tid) if isinstance(tid, int) or _NUMBER.match(str(tid)) else UNKNOWN
            if number == UNKNOWN:
                number = -2 - len(self._threads)
            known = self._threads[tid] = (number + _HALF) % (2 * _HALF) - _HALF
        return known


def _kind_of(name: str) -> Kind:
    """The kind of an annotation."""
    if _STEP.match(name):
        return Kind.STEP
    return Kind.DATA_WAIT if _DATA.match(name) else Kind.RANGE


def _mapped(values: Sequence[T], function: Callable[[T], int]) -> Ints:
    """A number for each value; the function is asked once for equal ones, of which are many."""
    known = {value: function(value) for value in dict.fromkeys(values)}
    return np.fromiter(map(known.__getitem__, values), np.int64, len(values))


def _either(values: list[Value], others: Callable[[], Sequence[Value]]) -> Ints:
    found = _integers(values)
    lacking = found == UNKNOWN
    return np.where(lacking, _integers(others()), found) if lacking.any() else found


def _integers(values: Sequence[Value]) -> Ints:
    if set(map(type, values)) == {int}:
        with suppress(OverflowError):
            return np.fromiter(cast(Sequence[int], values), np.int64, len(values))
    return np.array([integer(value) for value in values], np.int64)


def _shifted(columns: Columns, shift: int) -> Events:
    moved = dict(columns)
    lost = columns["start"] == (0 if -shift > FAR else UNKNOWN)
    for edge in ("start", "end"):
        unknown = lost | (columns[edge] == UNKNOWN)
        moved[edge] = np.where(unknown, UNKNOWN, columns[edge] + shift)
    return Events({name: _fitting(values, COLUMN_TYPES[name]) for name, values in moved.items()})


def _fitting(values: Ints, kind: type[np.signedinteger[Any]]) -> Ints:
    """The values, `UNKNOWN` where one is too large for its column."""
    limits = np.iinfo(kind)
    return np.where((values < limits.min) | (values > limits.max), UNKNOWN, values)
