"""Workers of a Dask cluster: files stay open there, and functions are run where their rows are.

What travels is pickled: dataclasses and columns between a user's own scheduler and workers, never
the content of a file that somebody else wrote (docs/security.md).
"""

from __future__ import annotations

import pickle
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.gpu_shards import GpuShardView, Shard
from gputrace.analyzers.operations import Gpu, GpuOperations, GpuSummary, pair_keys, pair_of
from gputrace.errors import GputraceError
from gputrace.model.attempts import Life
from gputrace.model.events import UNKNOWN, Column, Events, Kind, distinct_ids, number_ids
from gputrace.model.options import Window
from gputrace.model.trace import (
    Coverage,
    Device,
    NoGpu,
    Process,
    Quality,
    Selection,
    Session,
    Trace,
)
from gputrace.native import keep_freed_memory
from gputrace.readers.registry import open_trace
from gputrace.store.slice import slice_window
from gputrace.store.spill_file import SpillFile
from gputrace.version import __version__

Pair = tuple[Process, int]
"""A process, which files number in the order they meet them, and its ordinal of a GPU."""
_FREE: Final = 1 << 30
"""Numbers from here on are of names that mean nothing outside of the worker,"""
_IDLE: Final = -2
"""and from here down of processes that did nothing on a GPU."""
_FEW: Final = 4096
"""Maximum number of names that travel with rows or ids; more are sent on request."""


@dataclass(frozen=True, slots=True)
class File:
    """File of a run, as it is to be opened; ``run`` distinguishes the runs of a cluster."""

    run: str
    path: str
    keep_going: bool = False
    windows: bool = False
    part: Window | None = None
    """Window that is cut out of a large file and read."""


@dataclass(frozen=True, slots=True)
class Request:
    """A function to be called with an `OpenFile` and arguments, where the file is open."""

    file: File
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of a file."""

    source: str
    origin: int
    session: Session
    kinds: frozenset[Kind]
    no_gpu: NoGpu | None
    held: bool
    cut_bytes: int
    idle_unknown: str = ""
    lives: Sequence[Life] = ()
    attempt: int = 0


@dataclass(slots=True)
class Reply:
    """Answer to a `Request`: the function's result, and what reading has brought with it."""

    version: str
    worker: str
    """Address of the worker that answers."""
    again: bool = False
    """True if the file had to be opened for this answer."""
    problem: GputraceError | None = None
    value: Any = None
    processes: list[Process] = field(default_factory=list)
    coverage: list[Coverage] = field(default_factory=list)
    """Coverage of each process."""
    news: Quality = field(default_factory=Quality)
    """Quality problems found since the last answer; of dropped rows, all."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a file, and their names if these are few."""

    events: Events
    names: dict[int, str]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks for the shard of a file: function, GPU and arguments, pickled once for all shards."""

    changes: bool
    """True if the tasks change the shard."""
    tasks: list[tuple[bytes, bytes, list[bytes]]] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    """Index of each task among those of all shards."""


def dump(value: Any) -> bytes:
    """Serialize a value for the way between a client and its workers."""
    return zlib.compress(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), 1)


def load(raw: bytes) -> Any:
    """Deserialize what `dump` made."""
    return pickle.loads(zlib.decompress(raw))


class OpenFile:
    """File that is open in this process, for one request at a time."""

    def __init__(self, file: File) -> None:
        keep_freed_memory()  # Dask's own settings return each column to the system.
        self.closing = ExitStack()
        self.lock = Lock()
        self.trace = open_trace(Path(file.path), file.keep_going, file.windows)
        self.closing.callback(self.trace.close)
        self._reported = 0, 0, 0
        self.shard: RemoteShard | None = None
        self.past = 0
        """Number of batches that have changed the shard."""
        if file.part is not None:
            folder = self.closing.enter_context(tempfile.TemporaryDirectory(prefix="gputrace-"))
            self.trace = slice_window(self.trace, file.part, Path(folder), self.closing)

    def news(self) -> Quality:
        """Return the quality problems found since the last call; of dropped rows, all."""
        quality, (warnings, notes, left_out) = self.trace.quality, self._reported
        self._reported = len(quality.warnings), len(quality.notes), len(quality.left_out)
        return Quality(
            quality.warnings[warnings:],
            quality.notes[notes:],
            quality.left_out[left_out:],
            quality.places,
        )


_open: Final[dict[File, OpenFile]] = {}
_opening: Final = Lock()


def forget(run: str) -> None:
    """Close the files of a run; one that is being read is closed when that is done."""
    for file in [file for file in list(_open) if file.run == run]:
        opened = _open.pop(file)
        if opened.lock.acquire(blocking=False):
            opened.closing.close()
            opened.lock.release()


def answer(requests: Sequence[Request]) -> list[bytes]:
    """Return the `Reply` to each request, serialized."""
    return [dump(_reply(request)) for request in requests]


def _reply(request: Request) -> Reply:
    from distributed import get_worker

    reply = Reply(__version__, get_worker().address)
    try:
        with _opening:
            reply.again = request.file not in _open
            if reply.again:
                _open[request.file] = OpenFile(request.file)
            opened = _open[request.file]
        with opened.lock:
            trace = opened.trace
            reply.value = request.function(opened, *request.arguments)
            reply.processes = trace.processes
            reply.coverage = list(map(trace.coverage, range(len(trace.processes))))
            reply.news = opened.news()
    except GputraceError as error:
        reply.problem = error
    return reply


def about(opened: OpenFile) -> About:
    """Return a file's metadata."""
    return About(*(getattr(opened.trace, field.name) for field in fields(About)))


def read(opened: OpenFile, wanted: Selection) -> Rows:
    """Read rows, as `Trace.read` does."""
    events = opened.trace.read(wanted)
    ids = distinct_ids(events.name) if "name" in wanted.columns else ()
    return Rows(events, opened.trace.names(ids) if len(ids) <= _FEW else {})


def call(opened: OpenFile, method: str, *arguments: Any) -> Any:
    """Call a method of the open `Trace`."""
    return getattr(opened.trace, method)(*arguments)


def device_of(opened: OpenFile, process: Process, device: int) -> Device:
    """Return the device of an ordinal in a process, even before any of its rows is read here."""
    trace = opened.trace
    if process not in trace.processes:
        trace.read(Selection(trace.kinds, ("process",)))
    return trace.device(trace.processes.index(process), device)


def run_batches(
    opened: OpenFile, batches: Sequence[Batch], past: int, large: bool, anew: bool
) -> list[Any] | None:
    """Run tasks on a file's shard and return the results of the last batch.

    Returns None if the shard is not in the state that the client assumes: it has seen ``past``
    changing batches, or none if it starts ``anew``. Without batches, the shard is given back.
    """
    if past != (0 if anew else opened.past):
        return None
    shard = None if anew else opened.shard
    opened.shard, opened.past = None, 0  # As it stays if anything goes wrong.
    if not batches:
        return []
    shard = shard or RemoteShard(opened.trace, SpillFile() if large else None)
    results: list[Any] = []
    for batch in batches:
        results = []
        for work, dumped, arguments in batch.tasks:
            gpu = load(dumped)
            rows = shard if gpu is None else GpuShardView(shard, gpu)
            results.append(load(work)(rows, *map(load, arguments)))
        past += batch.changes
    shard.rest()
    opened.shard, opened.past = shard, past
    return results


@dataclass(frozen=True)
class Census:
    """GPUs of a file and the work on them."""

    work: Mapping[Pair, int]
    """Number of operations."""
    together: tuple[frozenset[Pair], ...]
    """Pairs of each GPU."""
    devices: Mapping[Pair, Device]
    names: NDArray[np.int64]
    """Ids of the operations' names in the file, sorted."""
    texts: Mapping[int, str]
    """Names themselves, if they are few."""
    span: tuple[int, int] | None
    """First start and last end, on the file's clock; None without operations."""


@dataclass(frozen=True)
class RunNumbering:
    """Mapping of a file, with its GPUs, to the numbering and the clock of the run."""

    processes: Mapping[Process, int]
    ids: NDArray[np.int64]
    """Name ids of the file, sorted."""
    names: NDArray[np.int32]
    """The run's number of each of them."""
    shift: int
    """Nanoseconds to add to all times."""
    gpus: tuple[Gpu, ...] = ()

    def pair(self, pair: Pair) -> tuple[int, int]:
        """Return the run's number of the process, and the ordinal."""
        return self.processes[pair[0]], pair[1]


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

    def renumber(self, numbering: RunNumbering) -> list[GpuSummary]:
        """Map the shard to the numbering and clock of the run."""
        trace = RenumberedTrace(self.trace, numbering)
        self.trace = trace
        gpu_of = {pair: gpu for gpu in numbering.gpus for pair in gpu.pairs}
        return self.take(
            trace.renumbered(operations, gpu_of[trace.pair(operations.gpu.pairs[0])])
            for operations in self.operations
        )

    def move(self, shifts: Mapping[int, int]) -> list[GpuSummary]:
        assert isinstance(self.trace, RenumberedTrace)
        processes = [operations.gpu.process for operations in self.operations]
        self.trace.shift += next((shifts[process] for process in processes), 0)
        return super().move(shifts)


class RenumberedTrace(Trace):
    """Trace of a file in the numbering and on the clock of the run."""

    def __init__(self, trace: Trace, numbering: RunNumbering) -> None:
        super().__init__(trace.path)
        self.source, self.quality, self.no_gpu = trace.source, trace.quality, trace.no_gpu
        self.shift = numbering.shift
        self._trace, self._number_of = trace, numbering.processes
        self._numbers: dict[int, int] = dict(
            zip(numbering.ids.tolist(), numbering.names.tolist(), strict=True)
        )
        self._ids = {number: id for id, number in self._numbers.items()}

    def pair(self, pair: tuple[int, int]) -> tuple[int, int]:
        """Map a pair of the file to one with the run's process number."""
        return self._process(pair[0]), pair[1]

    def renumbered(self, operations: GpuOperations, gpu: Gpu) -> GpuOperations:
        """Map the operations of a GPU to the run."""
        events = self._translated(operations.events)
        return GpuOperations(gpu, events, operations.classes, self.coverage(gpu.process))

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
        numbers = self._numbers_of(ids)
        texts = self._trace.names(list(numbers))
        unknown = {int(id): f"<name {id}>" for id in ids}
        return unknown | {number: texts[id] for id, number in numbers.items()}

    def search(self, ids: Collection[int] | Column, pattern: str) -> dict[int, str]:
        numbers = self._numbers_of(ids)
        texts = self._trace.search(list(numbers), pattern)
        return {numbers[id]: text for id, text in texts.items()}

    def _numbers_of(self, ids: Collection[int] | Column) -> dict[int, int]:
        """Return the run's number of each known name by its id in the file."""
        return {self._ids[int(id)]: int(id) for id in ids if int(id) in self._ids}

    def read(self, wanted: Selection) -> Events:
        return self._translated(self._trace.read(wanted.moved(-self.shift)))

    def read_parts(self, wanted: Selection) -> Iterator[Events]:
        return map(self._translated, self._trace.read_parts(wanted))

    def coverage(self, process: int) -> Coverage:
        return self._trace.coverage(self._local(process)).moved(self.shift)

    def _process(self, number: int) -> int:
        return self._number_of.get(self._trace.processes[number], _IDLE - number)

    def _local(self, process: int) -> int:
        numbers = range(len(self._trace.processes))
        return next(number for number in numbers if self._process(number) == process)

    def device(self, process: int, device: int) -> Device:
        return replace(self._trace.device(self._local(process), device), process=process)

    def close(self) -> None:
        """Do nothing: whoever opened the file closes it."""
