"""Traces of PyTorch's profiler (Kineto): decoded from JSON, whole or a window at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from gputrace.errors import STOP, ErrorPolicy, UsageError
from gputrace.model.events import (
    GPU_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    Mask,
    Memory,
    distinct_ids,
    is_among,
)
from gputrace.model.options import Window
from gputrace.model.trace import (
    GIVES_WORK,
    Device,
    NoGpu,
    Process,
    Selection,
    Session,
    Trace,
)
from gputrace.readers.chrome_json import NOT_JSON, Document
from gputrace.readers.compressed import Content
from gputrace.readers.in_memory import MemoryTrace, Names
from gputrace.readers.kineto_events import (
    HAS_ELEMENT,
    HAS_GROUP,
    NO_ARGS,
    Args,
    DecodedEvents,
    EventBatch,
    Ints,
    MemoryEvent,
    Pairs,
    Properties,
    Value,
    integer,
    nanoseconds,
    properties,
    tabulate,
)
from gputrace.readers.kineto_stacks import Stacks
from gputrace.readers.operators import SHAPED, CallSpan, Operators


class Copy(NamedTuple):
    """Properties of a copy that its name shows."""

    kind: Kind
    source: Memory
    destination: Memory


_DIRECTION: Final = re.compile(r"([HDAP])(?:ost|evice|rray|eer)?to([HDAP])", re.IGNORECASE)
_ENDS: Final = re.compile(r"\(([\w ]+) -> ([\w ]+)\)")

_KINDS: Final = {
    **dict.fromkeys(("HD", "HA"), Kind.COPY_H2D),
    **dict.fromkeys(("DH", "AH"), Kind.COPY_D2H),
    **dict.fromkeys(("DD", "DA", "AD", "AA"), Kind.COPY_D2D),
    "PP": Kind.COPY_PEER,
}

_MEMORY: Final = {memory.name.replace("_", " ").lower(): memory for memory in Memory}


def copy_of(name: str) -> Copy:
    """Parse ``Memcpy HtoD (Pinned -> Device)`` or ``CopyHostToDevice``."""
    direction, ends = _DIRECTION.search(name), _ENDS.search(name)
    way = "".join(direction.groups()).upper() if direction else ""
    source, destination = (
        _MEMORY.get(end.lower(), Memory.UNKNOWN) for end in (ends.groups() if ends else ("", ""))
    )
    return Copy(_KINDS.get(way, Kind.COPY_OTHER), source, destination)


_SIZES: Final = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4,
    "Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Bytes of an element by the name that PyTorch gives its type (c10/core/ScalarType.h)."""
_MOST_ELEMENTS: Final = 1 << 48
"""Elements beyond any message: a PiB of floats."""


def message_bytes(args: Args) -> int:
    """Return the bytes of a collective's larger side, its size in nccl-tests, or `UNKNOWN`."""
    element = str(args.element)
    size = 1 if element.startswith("Float8") else _SIZES.get(element, 0)
    count = max(integer(args.taken), integer(args.given)) if size else 0
    return size * count if 0 < count < _MOST_ELEMENTS else UNKNOWN


class ProcessGroup(NamedTuple):
    """A process group of torch.distributed, as the events of its collectives describe it."""

    name: str
    description: str
    size: int
    ranks: tuple[int, ...]
    """Global ranks in order; the first ones where there are many, and nothing regular in them."""

    @property
    def id(self) -> int:
        """Return a number of 63 bits, the same in the file of each member."""
        from hashlib import sha256  # Imports OpenSSL, for 0.003 s.

        text = f"{self.name}\0{self.size}\0{self.ranks}"
        return int.from_bytes(sha256(text.encode("utf-8", "replace")).digest()[:8], "big") >> 1


def group_of(args: Args) -> ProcessGroup:
    """Return the process group of a collective."""
    size, first, stride = map(integer, (args.size, args.first, args.stride))
    ranks = tuple(map(int, _RANK.findall(bytes(args.ranks))))
    if len(ranks) < size <= MOST_RANKS and first >= 0 and stride > 0:
        ranks = tuple(range(first, first + size * stride, stride))
    description = str(args.description)
    given = "" if description == "undefined" else description  # PyTorch's word for none.
    return ProcessGroup(str(args.group), given, max(size, len(ranks)), ranks)


MOST_RANKS: Final = 1 << 15
"""Maximum number of ranks that the columns can distinguish."""
_RANK: Final = re.compile(rb"\b\d{1,5}\b")


FAR_BEFORE_NS: Final = 3_600 * 1_000_000_000
"""A time of 0 so far before all others, in nanoseconds, is none."""

NOTHING: Final = Window(-(1 << 62), -(1 << 62))


class RowSelection:
    """Rows that touch a window, and on each side of it the nearest of each stream and thread.

    Rows with impossible times are kept, so that they are counted.
    """

    def __init__(self, window: Window = NOTHING, first: int = 0) -> None:
        """``window`` is in the file's own times; ``first`` is the earliest of them."""
        self._window, self._zero_is_lost = window, first > FAR_BEFORE_NS
        self.nearest: dict[tuple[object, ...], tuple[int, EventBatch]] = {}
        """The rows nearest to the window that do not touch it, in a table each, and how far each
        is; by side of the window, category, process and thread.
        """
        self.touched = False
        """True if any row touches the window."""

    def choose(self, events: EventBatch, start: Ints, end: Ints) -> Mask:
        """Return the mask of the rows to keep, apart from those of `nearest`."""
        window = self._window
        odd = (start == UNKNOWN) | (end == UNKNOWN) | (end < start)
        if self._zero_is_lost or window == NOTHING:
            odd |= start == 0
        touching = self.touching(start, end)
        if window != NOTHING:
            self._note(False, events, end - window.start, ~odd & (end <= window.start))
            self._note(True, events, window.end - start, ~odd & (start >= window.end))
        self.touched |= bool((touching & ~odd).any())
        touching |= odd
        return touching

    def touching(self, start: Ints, end: Ints) -> Mask:
        """Return the mask of the rows that touch the window."""
        touching: Mask = (start < self._window.end) & (end > self._window.start)
        return touching

    def _note(self, after: bool, events: EventBatch, closeness: Ints, rows: Mask) -> None:
        """Keep the closest of some rows on one side of the window."""
        here = np.flatnonzero(rows)
        here = here[np.argsort(closeness[here], kind="stable")]
        numbers = (events[name][here].tolist() for name in ("cat", "pid", "tid"))
        last = dict(zip(zip(*numbers, strict=True), here.tolist(), strict=True))
        for of_key, row in last.items():
            key = after, *(events.values[number] for number in of_key)
            close = int(closeness[row])
            if key not in self.nearest or self.nearest[key][0] < close:
                self.nearest[key] = close, events.copied(row)


Columns = dict[str, Ints]

_GPU: Final[dict[Value, Kind]] = {
    "kernel": Kind.KERNEL,
    "Kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY_OTHER,
    "Memcpy": Kind.COPY_OTHER,
    "gpu_memset": Kind.MEMSET,
    "Memset": Kind.MEMSET,
    "CUDA functions": Kind.KERNEL,
}
_HOST: Final[dict[Value, Kind]] = {
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "Runtime", "Driver"), Kind.API),
    **dict.fromkeys(("user_annotation", "cpu_op", "Operator"), Kind.RANGE),
    **dict.fromkeys(("overhead", "Overhead"), Kind.OVERHEAD),
}
"""Categories; those of the profiler's first versions are capitalised."""

_TIMED: Final = "CUDA functions"
_WITHOUT_KINETO: Final[dict[Value, str]] = {"CPU functions": "Operator", _TIMED: _TIMED}
"""Categories by process of events without one: the list of a PyTorch without Kineto."""

_OPERATORS: Final = {"cpu_op", "Operator"}
_ANNOTATIONS: Final = ("ProfilerStep", "enumerate(DataLoader)", "Optimizer.")
"""Beginnings of annotations, which the older profiler calls operators, as all the rest there."""

_PYTHON, _MODULE = "python_function", "nn.Module: "
"""Category, and beginning of the name, of a call of a module."""

_STEP: Final = re.compile(r"ProfilerStep#?\d*$")
_NUMBER: Final = re.compile(r"-?\d+$")
_LABEL: Final = re.compile(r"(.*\d.*\D)\d+\s*$")
_OF_MEMORY: Final = ("process", "device", "bytes", "correlation", "name")
_COPY_ENDS: Final = ("source_memory", "destination_memory")
_HALF: Final = 1 << 31
_NO_TIME: Final = np.iinfo(np.int64).max

_DATA: Final = re.compile(r"enumerate\(DataLoader\)#.*__next__")


class _Group(IntEnum):
    """Categories that are read alike."""

    NONE, GPU, HOST, OPERATOR, PYTHON = range(5)


def _group_of(cat: Value) -> _Group:
    if cat in _OPERATORS:
        return _Group.OPERATOR
    if cat == _PYTHON:
        return _Group.PYTHON
    return _Group.GPU if cat in _GPU else _Group.HOST if cat in _HOST else _Group.NONE


class FileRows:
    """Rows of one file while it is decoded."""

    def __init__(self, kept: RowSelection | None = None) -> None:
        """``kept`` selects rows to keep; the attributes describe all rows."""
        self.names = Names()
        self.pids: dict[Value, int] = {}
        """Number in the column ``process`` by process of the host's rows."""
        self.has_gpu = False
        self._kept = kept
        self._calls: Counter[int] = Counter()
        self._first = _NO_TIME
        self._from_zero = False
        self._threads: dict[Value, int] = {}
        self._on_gpu: list[Columns] = []
        self._on_host: list[Columns] = []
        self._program = Operators(self.names)
        self._stacks = Stacks(self.names)
        self._groups: dict[tuple[Value, bytes, Value], ProcessGroup] = {}
        self._seen: dict[tuple[int, ProcessGroup], int] = {}
        """First moment of each process group, by label and group."""
        self._labels: dict[Value, int] = {}
        """Numbers of what GPU rows have as process id: the label before it (``[TP00] 4242``), if
        any, where ranks were merged."""
        self._mains: list[int] = []
        """Process that a label's GPU rows belong to."""

    def add(self, events: EventBatch) -> None:
        """Add events with a duration, if of `_GPU` or `_HOST`, and operators and modules."""
        events = events.categorized(_WITHOUT_KINETO)
        group = events.map("cat", _group_of)
        on_gpu, on_host = group == _Group.GPU, group == _Group.HOST
        operators, modules = (np.flatnonzero(group == g) for g in (_Group.OPERATOR, _Group.PYTHON))
        if len(operators):
            named = events.select(operators)
            annotates = named.map("name", lambda name: str(name).startswith(_ANNOTATIONS)) == 1
            on_host[operators[annotates]] = True
            counts = named.map("name", lambda name: name in SHAPED) == 1
            counts |= named["sequence"] != UNKNOWN
            operators = operators[counts & (named["args_end"] > 0) & ~annotates]
        if len(modules):
            called = events.select(modules)
            self._stacks.add(self._shown(called), self._thread)
            modules = modules[called.map("name", lambda name: str(name).startswith(_MODULE)) == 1]
        self._add_calls(events.select(np.concatenate([operators, modules])))
        self.has_gpu |= bool(on_gpu.any())
        self._take(events.select(on_gpu), events.select(on_host), self._kept)

    def add_memory(self, events: Sequence[MemoryEvent]) -> None:
        """Add events of memory."""
        at = nanoseconds([event.ts for event in events])
        rows = [
            (self._process(event.pid), event.args.device, event.args.held, UNKNOWN, UNKNOWN)
            for event in events
        ]
        values = np.array(rows, object).reshape(-1, len(_OF_MEMORY))
        kept = at != UNKNOWN if self._kept is None else self._kept.touching(at, at + 1)
        columns = {
            name: np.array([integer(value) for value in column], np.int64)[kept]
            for name, column in zip(_OF_MEMORY, values.T, strict=True)
        }
        columns |= {"start": at[kept], "end": at[kept]}
        if kept.any():
            self._on_host.append(columns | {"kind": np.full(len(at[kept]), Kind.MEMORY)})

    def _take(self, on_gpu: EventBatch, on_host: EventBatch, kept: RowSelection | None) -> None:
        if len(on_gpu) and len((timed := self._times(on_gpu, kept))[0]):
            self._on_gpu.append(self._gpu_rows(*timed))
            self._on_gpu += self._message_rows(*timed)
        if len(on_host):
            # The calls of all rows count, not of those kept alone.
            processes = on_host.map("pid", self._process)
            is_call = on_host.map("cat", lambda cat: _HOST[cat] == Kind.API) == 1
            for process, count in enumerate(np.bincount(processes[is_call]).tolist()):
                self._calls[process] += count
            if len((timed := self._times(on_host, kept))[0]):
                self._on_host.append(self._host_rows(*timed))

    @property
    def first(self) -> int:
        """The earliest time of a row, in nanoseconds; the profiler writes 0 for one it lost."""
        if self._first == _NO_TIME or (self._from_zero and self._first <= FAR_BEFORE_NS):
            return 0
        return self._first

    def ranks(self, rank: int) -> list[int]:
        """Return the rank of each process, and ``rank`` if they are all of one.

        Ranks that were merged into one file are numbered in the order of their labels, or of their
        process ids; a process without GPU rows or the label of one has an unknown rank.
        """
        labels = [_label(pid) or str(pid) for pid in self.pids]
        merged = {labels[main] for main in self._mains if main < len(labels)}
        if len(merged) < 2:
            return [rank] * max(len(labels), 1)
        ordered = sorted(merged, key=lambda label: [*map(int, re.findall(r"\d+", label))])
        return [ordered.index(label) if label in merged else UNKNOWN for label in labels]

    def parts(self, shift: int, rank: int) -> list[Events]:
        """Return all rows of the process of a rank, with nanoseconds added to their times."""
        if self._kept is not None:
            for _, event in self._kept.nearest.values():
                is_gpu = event.map("cat", _group_of) == _Group.GPU
                self._take(event.select(is_gpu), event.select(~is_gpu), None)
        self._mains = self._find_mains() or [0]
        if self._seen:
            ranks = self.ranks(rank)
            self._on_gpu.append(self._group_rows([ranks[process] for process in self._mains]))
        for columns in self._on_gpu:
            columns["process"] = np.array(self._mains)[columns["process"]]
        program: list[Columns] = []
        if self._on_gpu:
            program = [*self._program.columns(self.first), *self._stacks.columns(self.pids)]
        parts = []
        for columns in self._on_gpu + self._on_host + program:
            lost = columns["start"] == (0 if -shift > FAR_BEFORE_NS else UNKNOWN)
            shifted = {
                edge: np.where(lost | (columns[edge] == UNKNOWN), UNKNOWN, columns[edge] + shift)
                for edge in ("start", "end")
            }
            parts.append(Events.fitting(columns | shifted))
        return parts

    def _find_mains(self) -> list[int]:
        """Return the process of each label's GPU rows, which do not say whose they are: of those
        with the label, or without any, the one whose calls issued most of them, by correlation id,
        or that makes most CUDA calls.
        """
        issued: Counter[tuple[int, int]] = Counter()
        for process in self._calls if len(self._calls) > 1 else ():
            calls = [rows["correlation"][rows["process"] == process] for rows in self._on_host]
            ids = np.setdiff1d(np.concatenate([[UNKNOWN], *calls]), UNKNOWN)
            for rows in self._on_gpu:
                mine = np.isin(rows["correlation"], ids) & (rows["kind"] < Kind.API)
                counts = np.bincount(rows["process"][mine]).tolist()
                issued.update({(label, process): count for label, count in enumerate(counts)})
        mains = []
        for pid, number in self._labels.items():
            label = _label(pid)
            labelled = [process for of, process in self.pids.items() if _label(of) == label]
            if label and not labelled and len(self._labels) > 1:
                labelled = [self._process(pid)]
            most = ((-issued[number, of], -self._calls[of], of) for of in labelled)
            mains.append(min(most, default=(0,))[-1])
        return mains

    def _label(self, pid: Value) -> int:
        """Return the number of the label of GPU rows: a number after it makes it a process's id."""
        label = _label(pid)
        return self._labels.setdefault(f"{label}0" if label else pid, len(self._labels))

    def _gpu_rows(self, events: EventBatch, columns: Columns) -> Columns:
        columns["kind"] = events.map("cat", _GPU.__getitem__)
        columns["name"] = events.map("name", lambda name: self.names.number(str(name)))
        columns["process"] = events.map("pid", self._label)
        for name, others in (("device", ("pid", "tid")), ("stream", ("tid",))):
            columns[name] = events[name]
            for other in others:
                if (lacking := columns[name] == UNKNOWN).any():
                    columns[name] = np.where(lacking, events.map(other, integer), columns[name])
        # Operators that are timed on a GPU, which nest, are on no stream.
        timed = events.map("cat", lambda cat: cat == _TIMED) == 1
        columns["stream"] = np.where(timed, UNKNOWN, columns["stream"])
        columns["correlation"], columns["bytes"] = events["correlation"], events["bytes"]
        messages = (events["flags"] & HAS_ELEMENT > 0) & (columns["bytes"] == UNKNOWN)
        for row in np.flatnonzero(messages).tolist():
            args = events.args(row)
            if args is not None and args.element:
                columns["bytes"][row] = message_bytes(args)
        rows = np.flatnonzero(columns["kind"] == Kind.COPY_OTHER)
        if len(rows):
            columns["source_device"] = events["source"]
            columns["destination_device"] = events["destination"]
            ids, index = np.unique(columns["name"][rows], return_inverse=True)
            copies = np.array([copy_of(self.names.texts[id]) for id in ids.tolist()])
            for column, values in zip(("kind", *_COPY_ENDS), copies.T, strict=True):
                whole = columns.setdefault(column, np.full(len(events), Memory.UNKNOWN))
                whole[rows] = values[index]
        return columns

    def _message_rows(self, events: EventBatch, columns: Columns) -> list[Columns]:
        """Return a row for each operation of a process group."""
        chosen = np.flatnonzero(events["flags"] & HAS_GROUP)
        if not len(chosen):
            return []
        args = [events.args(row) or NO_ARGS for row in chosen.tolist()]
        groups = [
            self._groups.setdefault((a.group, bytes(a.ranks), a.size), group_of(a)) for a in args
        ]
        peers = [
            _place(group, integer(a.receiver if integer(a.receiver) >= 0 else a.sender))
            for a, group in zip(args, groups, strict=True)
        ]
        names = {a.operation: self.names.number(str(a.operation)) for a in args}
        taken = ("start", "end", "process", "stream", "bytes")
        messages = {name: columns[name][chosen] for name in taken} | {
            "kind": np.full(len(chosen), Kind.MESSAGE),
            "name": np.array([names[a.operation] for a in args]),
            "correlation": np.array([group.id for group in groups]),
            "device": np.array(peers),
        }
        seen = zip(messages["start"].tolist(), messages["process"].tolist(), groups, strict=True)
        for start, label, group in seen:
            self._seen.setdefault((label, group), start)
        return [messages]

    def _group_rows(self, ranks: Sequence[int]) -> Columns:
        """Return a row for each process group that a label, of such a rank, was seen in."""
        times = np.array(list(self._seen.values()), np.int64)
        rows = [
            (
                *(self.names.number(group.description), group.id, group.size),
                *(_place(group, ranks[label]), label),
            )
            for label, group in self._seen
        ]
        values = np.array(rows, np.int64).reshape(-1, 5).T
        named = ("name", "correlation", "bytes", "device", "process")
        return dict(zip(named, values, strict=True)) | {
            "start": times,
            "end": times,
            "kind": np.full(len(rows), Kind.COMMUNICATOR),
        }

    def _host_rows(self, events: EventBatch, columns: Columns) -> Columns:
        columns["kind"] = events.map("cat", _HOST.__getitem__)
        columns["name"] = events.map("name", lambda name: self.names.number(str(name)))
        ranges = columns["kind"] == Kind.RANGE
        if ranges.any():
            columns["kind"][ranges] = events.select(ranges).map("name", _kind_of)
        columns["process"] = events.map("pid", self._process)
        columns["thread"] = events.map("tid", self._thread)
        columns["correlation"] = events["correlation"]
        return columns

    def _shown(self, events: EventBatch) -> EventBatch:
        """Return the events that are shown: all, or those that touch the window."""
        if self._kept is None:
            return events
        start = events["start"]
        return events.select(self._kept.touching(start, start + events["length"]))

    def _add_calls(self, events: EventBatch) -> None:
        """Add calls of operators and of modules to `Operators`."""
        start, end = events["start"], events["start"] + events["length"]
        known = (start != UNKNOWN) & (end > start)
        shown = known if self._kept is None else known & self._kept.touching(start, end)
        rows = np.flatnonzero(known)
        known_events = events.select(rows)
        columns = (
            *(shown[rows], events.map("cat", lambda cat: cat == _PYTHON)[rows]),
            *(known_events["name"], known_events.map("pid", self._process)),
            *(known_events.map("tid", self._thread), start[rows], end[rows]),
            *(known_events["sequence"], known_events["forward"] > 0),
        )
        listed = zip(*(column.tolist() for column in columns), strict=True)
        for row, (is_shown, is_module, name_, *place, sequence, is_backward) in enumerate(listed):
            name, at = str(events.values[name_]), CallSpan(*place)
            if is_module:
                self._program.modules.append((at, name.removeprefix(_MODULE)))
                continue
            self._program.add_operator(name, sequence, is_backward, at)
            if is_shown and name in SHAPED:
                args = known_events.args(row) or NO_ARGS
                shapes, types, values = map(bytes, (args.shapes, args.types, args.values))
                self._program.add_work(name, shapes, types, values, at)

    def _times(self, events: EventBatch, kept: RowSelection | None) -> tuple[EventBatch, Columns]:
        """Return the events to keep, and their times."""
        start, length = events["start"], events["length"]
        known = (start != UNKNOWN) & (length != UNKNOWN)
        self._first = int(start[known & (start != 0)].min(initial=self._first))
        self._from_zero |= bool((known & (start == 0)).any())
        end = np.where(known, start + length, UNKNOWN)
        if kept is not None and not (rows := kept.choose(events, start, end)).all():
            events, start, end = events.select(rows), start[rows], end[rows]
        return events, {"start": start, "end": end}

    def _process(self, pid: Value) -> int:
        return self.pids.setdefault(pid, len(self.pids))

    def _thread(self, tid: Value) -> int:
        """Return the thread's id in 32 bits; one that is no number gets one that no thread has."""
        if (known := self._threads.get(tid)) is None:
            number = integer(tid) if isinstance(tid, int) or _NUMBER.match(str(tid)) else UNKNOWN
            if number == UNKNOWN:
                number = -2 - len(self._threads)
            known = self._threads[tid] = (number + _HALF) % (2 * _HALF) - _HALF
        return known


def _label(pid: Value) -> str:
    """Return the text before the number of a process, by which tools that merge ranks tell them."""
    match = _LABEL.match(pid) if isinstance(pid, str) else None
    return match[1] if match else ""


def _place(group: ProcessGroup, rank: int) -> int:
    """Return the place of a global rank in a group, or `UNKNOWN`."""
    return group.ranks.index(rank) if rank in group.ranks else UNKNOWN


def _kind_of(name: Value) -> Kind:
    if _STEP.match(str(name)):
        return Kind.STEP
    return Kind.DATA_WAIT if _DATA.match(str(name)) else Kind.RANGE


BEFORE: Final = 1_000_000_000
"""Nanoseconds of the columns' clock before the first event: a time of 0 would seem lost."""

_WALL_CLOCK: Final = range(10**18, 4 * 10**18)
"""Nanoseconds since 1970, of the years 2001 to 2096."""


def _why_no_gpu(parts: Sequence[Events], texts: Sequence[str]) -> NoGpu:
    """Return why there is no GPU activity, as the CUDA calls tell."""
    why = "PyTorch's profiler recorded none"
    ids = [distinct_ids(part.name[part.kind == Kind.API]) for part in parts]
    calls = {texts[id] for of_part in ids for id in of_part.tolist()}
    if any(re.search(GIVES_WORK, call) for call in calls):
        return NoGpu(
            f"{why}, though CUDA calls gave a GPU work",
            "it received none of it from the driver: see the profiler's messages; virtual GPUs, "
            "WSL and other profilers of the card can cause this",
        )
    if calls:
        return NoGpu(f"{why}, and no CUDA call gives a GPU work", "record while the GPU works")
    return NoGpu(
        why,
        "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], on a machine with "
        "a GPU",
    )


def open_kineto(path: Path, breaks: ErrorPolicy = STOP) -> Trace:
    """Read a file whole; raise InputError if it is broken or holds nothing to analyze."""
    return decode(path, breaks)[0]


def decode(
    path: Path, breaks: ErrorPolicy = STOP, kept: RowSelection | None = None
) -> tuple[MemoryTrace, FileRows]:
    """Return the trace of a file, with all rows or those of a selection, and these rows."""
    rows, pairs, decoder = FileRows(kept), Pairs(), DecodedEvents()
    with Content(path) as text:
        document = Document(text, decoder.decode, breaks)
        for part in document.parts():
            rows.add(tabulate(pairs.whole(part)) if isinstance(part, list) else part)
    rows.add_memory(decoder.memory)
    about, broken = properties(document.around)
    trace = _trace(path, rows, about)
    if broken is not None:
        trace.quality.warnings.append(f"properties left out: {document.broken_around(broken)}")
    trace.quality.drop(NOT_JSON, document.skipped)
    trace.quality.drop("not an event of the profiler", decoder.odd)
    trace.quality.drop("an end without a beginning, or the other way round", pairs.odd)
    if not document.closed:
        trace.quality.warnings.append("the file ends without an end of its list: it was cut off")
    return trace, rows


def _trace(path: Path, rows: FileRows, about: Properties) -> MemoryTrace:
    rank, size = UNKNOWN, UNKNOWN
    if about.distributed is not None:
        rank, size = integer(about.distributed.rank), integer(about.distributed.world_size)
    host = str(about.host or "")
    parts = rows.parts(BEFORE - rows.first, rank)
    pids, ranks = list(rows.pids) or [0], rows.ranks(rank)
    has_gpu = any(is_among(part.kind, GPU_KINDS).any() for part in parts)
    # Times without a base may be of the wall clock themselves.
    epoch = max(integer(about.base), 0) + rows.first
    trace = MemoryTrace(
        path,
        "kineto",
        parts,
        rows.names.texts,
        [
            Process(max(integer(pid), 0), 0, of_pid, host_name=host)
            for pid, of_pid in zip(pids, ranks, strict=True)
        ],
        [
            Device(process, integer(card.id), name=str(card.name))
            for process in range(len(pids))
            for card in about.cards
        ],
        Session(
            epoch_ns=epoch - BEFORE if epoch in _WALL_CLOCK else None,
            hosts=frozenset({host} - {""}),
            ranks=frozenset(ranks) - {UNKNOWN},
            world_size=size if size > 0 else None,
        ),
        # Steps and waits for data are worth reporting without a GPU, too.
        no_gpu=None if has_gpu else _why_no_gpu(parts, rows.names.texts),
    )
    trace.origin = BEFORE
    return trace


class LargeKineto(Trace):
    """Large trace of which opening keeps only a ``look``: the run, and the origin of its times.

    Read without a window, it is held like any other. ``allowed`` is the error policy for a broken
    file, ``first`` the moment of the first event in the file's own times.
    """

    held = False

    def __init__(self, path: Path, breaks: ErrorPolicy = STOP) -> None:
        """Scan the file; raise InputError if it is broken."""
        super().__init__(path)
        look, rows = decode(path, breaks, RowSelection())
        look.no_gpu = None if rows.has_gpu else look.no_gpu
        self.allowed, self.first, self.look = breaks.allowed, rows.first, look
        self.source, self.origin, self.quality = look.source, look.origin, look.quality
        self.processes, self.no_gpu = look.processes, look.no_gpu

    @property
    def session(self) -> Session:
        return self.look.session

    def part(self, window: Window) -> MemoryTrace:
        """Read the rows that touch a window, and their neighbours; raise UsageError without any."""
        shift = BEFORE - self.first
        kept = RowSelection(Window(window.start - shift, window.end - shift), self.first)
        trace, _ = decode(self.path, ErrorPolicy(self.allowed), kept)
        if not kept.touched:
            raise UsageError(f"{self.path}: nothing was recorded in that window")
        trace.no_gpu = self.no_gpu
        trace.quality.notes += self.quality.notes
        trace.quality.left_out += self.quality.left_out
        return trace

    @cached_property
    def _whole(self) -> Trace:
        return open_kineto(self.path, ErrorPolicy(self.allowed))

    @property
    def kinds(self) -> frozenset[Kind]:
        return self._whole.kinds

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        return self._whole.names(ids)

    def device(self, process: int, device: int) -> Device:
        return self.look.device(process, device)

    def read(self, wanted: Selection) -> Events:
        return self._whole.read(wanted)

    def close(self) -> None:
        self.look.close()
        self.__dict__.pop("_whole", self.look).close()
