"""The machine that a run is simulated on: a log of rows, host threads and GPUs. Times are ns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.synthetic.recording import API, NVTX, OSRT, STATES, Ints, State, Table

LATENCY_NS = 2_500  # from the beginning of a call to the earliest start on the GPU
STREAM_GAP_NS = 1_000  # between two operations of one stream
WAKE_NS = 6_000  # from the end of GPU work to the return of the call that waited for it


class Log:
    """Collects rows by table (no two dtypes are equal), and the names that they point to."""

    def __init__(self) -> None:
        self.names: list[str] = ["[Unknown]"]
        self._ids: dict[str, int] = {"[Unknown]": 0}
        self._chunks: dict[npt.DTypeLike, list[Table]] = {}

    def name(self, text: str) -> int:
        """The id of a name."""
        if text not in self._ids:
            self._ids[text] = len(self.names)
            self.names.append(text)
        return self._ids[text]

    def add(self, dtype: np.dtype[np.void], count: int = 1, **columns: object) -> Table:
        """Append `count` rows; columns are scalars or arrays, those left out are 0."""
        rows = np.zeros(count, dtype)
        for name, values in columns.items():
            rows[name] = values
        self._chunks.setdefault(dtype, []).append(rows)
        return rows

    def table(self, dtype: np.dtype[np.void]) -> Table:
        """All rows of one table, by start."""
        # As bytes: numpy would compare the dtypes of every two pieces.
        rows = np.frombuffer(b"".join(rows.data for rows in self._chunks.get(dtype, [])), dtype)
        return rows[np.lexsort((rows["rank"], rows["start"]))]


class Call(NamedTuple):
    """One CUDA API call."""

    start: int
    end: int
    correlation: int


@dataclass
class Host:
    """A process: its threads share the counter of correlation ids."""

    log: Log
    rank: int
    correlation: int = 1_000
    unit: int = 0  # the step or phase under way

    def correlations(self, count: int) -> Ints:
        first, self.correlation = self.correlation + 1, self.correlation + count
        return np.arange(first, first + count)


@dataclass
class Thread:
    """A host thread; `now` is how far its time has come."""

    host: Host
    id: int
    now: int

    def call(self, name: str, ns: int, until: int = 0) -> Call:
        """One API call of `ns`, longer where it has to wait `until` then."""
        start, self.now = self.now, max(self.now + ns, until)
        correlation = int(self.host.correlations(1)[0])
        self._row(API, start, name=self.host.log.name(name), correlation=correlation)
        return Call(start, self.now, correlation)

    def calls(self, names: Ints | int, ns: Ints, between: Ints, slots: Ints) -> tuple[Ints, Ints]:
        """Many API calls: (starts, correlations).

        Each begins `between` after the one before and lasts `ns`, or until its queue slot is free.
        """
        work = np.cumsum(ns + between)
        ends = work + np.maximum(np.maximum.accumulate(slots - work), self.now)
        starts = np.concatenate(([self.now], ends[:-1])) + between
        correlations = self.host.correlations(len(ns))
        self._row(API, starts, ends, name=names, correlation=correlations)
        self.now = int(ends[-1])
        return starts, correlations

    def os_call(self, name: str, ns: int) -> None:
        """One call of the operating system's, of `ns`."""
        start, self.now = self.now, self.now + ns
        self._row(OSRT, start, name=self.host.log.name(name))

    def os_wait_until(self, name: str, end: int) -> None:
        """Sleep until another thread, at `end`, wakes this one."""
        if end > self.now:
            self.os_call(name, end - self.now)

    def mark(self, state: State, start: int) -> None:
        """Note the state of this thread from `start` to now."""
        if self.now > start:
            self._row(STATES, start, state=state, unit=self.host.unit)

    def range(self, name: str, start: int, domain: int = 0) -> None:
        """An NVTX range, from `start` to now."""
        self._row(NVTX, start, name=self.host.log.name(name), domain=domain)

    def _row(
        self,
        dtype: np.dtype[np.void],
        start: int | Ints,
        end: int | Ints | None = None,
        **columns: object,
    ) -> None:
        count = len(start) if isinstance(start, np.ndarray) else 1
        columns |= {"start": start, "end": self.now if end is None else end}
        self.host.log.add(dtype, count, rank=self.host.rank, thread=self.id, **columns)


@dataclass
class Gpu:
    """A GPU: streams are first in, first out; `free` says until when each is taken (ns)."""

    device: int  # CUDA ordinal
    gpu: int  # physical index
    queue_depth: int
    free: dict[int, int] = field(default_factory=dict)
    slots: Ints = field(init=False)  # when the latest `queue_depth` launches left the queue

    def __post_init__(self) -> None:
        self.slots = np.zeros(self.queue_depth, np.int64)

    def run(self, stream: int, ready: Ints, ns: Ints) -> tuple[Ints, Ints]:
        """(starts, ends) of operations of one stream, `ready` to start at the earliest."""
        taken = np.cumsum(ns + STREAM_GAP_NS)
        before = taken - ns - STREAM_GAP_NS
        first = self.free.get(stream, 0) + STREAM_GAP_NS
        starts = before + np.maximum(np.maximum.accumulate(ready - before), first)
        ends: Ints = starts + ns
        self.free[stream] = int(ends[-1])
        return starts, ends

    def queue(self, starts: Ints) -> None:
        """Launches that left the queue at `starts`, in the order of issue."""
        self.slots = np.concatenate((self.slots, starts))[-self.queue_depth :]

    @property
    def drained(self) -> int:
        """When the GPU will have done all it was given."""
        return max(self.free.values(), default=0)
