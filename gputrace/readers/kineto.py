"""Traces of PyTorch's profiler (Kineto): decoded from JSON, whole or a window at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from functools import cached_property
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from msgspec import DecodeError, Raw, Struct, ValidationError, field, structs
from msgspec.json import Decoder
from numpy.typing import NDArray

from gputrace.errors import STOP, ErrorPolicy, UsageError
from gputrace.model.events import (
    COLUMN_TYPES,
    GPU_KINDS,
    UNKNOWN,
    Column,
    Events,
    Kind,
    Mask,
    Memory,
)
from gputrace.model.options import Window
from gputrace.model.trace import Device, NoGpu, Process, Progress, Session, Trace
from gputrace.readers.chrome_json import BadJson, Document
from gputrace.readers.gzip_io import Content
from gputrace.readers.in_memory import MemoryTrace, Names
from gputrace.readers.operators import SHAPED, Operators, Place

Value = int | float | str | None
"""Value of a field that should be an integer."""

_BYTE: Final = re.compile(r" \(byte (\d+)\)")
_NO_NUMBER: Final = re.compile(rb"([:\[,]\s*)(-?(?:inf(?:inity)?|nan))(?=\s*[,}\]])", re.IGNORECASE)
"""Not-a-number as C++ prints it, for which JSON has no word."""


class Args(Struct, gc=False):
    """Arguments of an event that are read."""

    device: Value = UNKNOWN
    stream: Value = UNKNOWN
    correlation: Value = UNKNOWN
    bytes: Value = UNKNOWN
    source: Value = field(default=UNKNOWN, name="fromDevice")
    destination: Value = field(default=UNKNOWN, name="toDevice")
    taken: Value = field(default=UNKNOWN, name="In msg nelems")
    given: Value = field(default=UNKNOWN, name="Out msg nelems")
    element: Value = field(default="", name="dtype")
    group: Value = field(default=None, name="Process Group Name")
    description: Value = field(default="", name="Process Group Description")
    ranks: Raw = field(default=Raw(b""), name="Process Group Ranks")
    size: Value = field(default=UNKNOWN, name="Group size")
    first: Value = field(default=UNKNOWN, name="Global rank start")
    stride: Value = field(default=UNKNOWN, name="Global rank stride")
    operation: Value = field(default="", name="Collective name")
    sender: Value = field(default=UNKNOWN, name="Src Rank")
    receiver: Value = field(default=UNKNOWN, name="Dst Rank")
    sequence: Value = field(default=UNKNOWN, name="Sequence number")
    forward: Value = field(default=0, name="Fwd thread id")
    shapes: Raw = field(default=Raw(b""), name="Input Dims")
    types: Raw = field(default=Raw(b""), name="Input type")
    values: Raw = field(default=Raw(b""), name="Concrete Inputs")


NO_ARGS: Final = Args()


class Event(Struct, gc=False):
    """One event."""

    ph: str = ""
    cat: str | None = None
    name: Value = ""
    pid: Value = None
    tid: Value = None
    ts: Raw = Raw(b"")
    dur: Raw = Raw(b"")
    args: Args | None = None

    def copied(self) -> Event:
        """Return a copy that does not keep the decoded text alive."""
        return structs.replace(self, ts=self.ts.copy(), dur=self.dur.copy())


class CardProperties(Struct):
    """A GPU that the process could see."""

    id: Value = UNKNOWN
    name: Value = ""


class Distributed(Struct):
    """The process in its distributed run."""

    rank: Value = None
    world_size: Value = None


class Properties(Struct):
    """Properties around the list of events."""

    cards: list[CardProperties] = field(default_factory=list, name="deviceProperties")
    distributed: Distributed | None = field(default=None, name="distributedInfo")
    base: Value = field(default=None, name="baseTimeNanoseconds")
    host: Value = field(default="", name="host_name")


_EVENTS: Final = Decoder(list[Event])
_EACH: Final = Decoder(list[Raw])
_EVENT: Final = Decoder(Event)
_PROPERTIES: Final = Decoder(Properties)


class DecodedEvents:
    """Decoder of lists of events."""

    def __init__(self) -> None:
        self.odd = 0
        """Number of items that are no event."""

    def decode(self, text: bytes) -> list[Event]:
        """Return the events of a JSON list; raise BadJson."""
        try:
            return self._decode(text)
        except (DecodeError, UnicodeDecodeError, RecursionError):
            pass
        try:
            return self._decode(_repair(text))
        except (DecodeError, RecursionError) as error:
            raise _bad(error) from error

    def _decode(self, text: bytes) -> list[Event]:
        try:
            return _EVENTS.decode(text)
        except ValidationError:
            return list(filter(None, map(self._one, _EACH.decode(text))))

    def _one(self, text: Raw) -> Event | None:
        try:
            return _EVENT.decode(text)
        except ValidationError:
            self.odd += 1
            return None


def properties(text: bytes) -> Properties:
    """Return the properties of a document without its events, if they have the known form."""
    try:
        return _PROPERTIES.decode(_repair(text))
    except ValidationError:
        return Properties()
    except (DecodeError, RecursionError) as error:
        raise _bad(error) from error


def _repair(text: bytes) -> bytes:
    """Replace not-a-numbers by 0, and bytes that are not UTF-8, keeping the length."""
    text = text.decode("utf-8", "surrogateescape").encode("utf-8", "replace")
    return _NO_NUMBER.sub(lambda match: match[1] + b"0".ljust(len(match[2])), text)


def _bad(error: DecodeError | RecursionError) -> BadJson:
    if isinstance(error, RecursionError):
        return BadJson("nested too deep", 0)
    match = _BYTE.search(str(error))
    problem = _BYTE.sub("", str(error)).removeprefix("JSON is malformed: ")
    return BadJson(problem, int(match[1]) if match else None)


def integer(value: Any) -> int:
    """Return an integer of 64 bits, given as such or in a text (``stream 7``), or `UNKNOWN`."""
    if isinstance(value, str):
        match = re.search(r"-?\d{1,19}(?!\d)", value)
        value = int(match[0]) if match else UNKNOWN
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        return UNKNOWN
    return value


_PLAIN: Final = b"0123456789.,"
_DECIMALS: Final = 3
"""Decimals of microseconds in nanoseconds."""
_DIGITS: Final = 19
"""Digits of the largest integer of 64 bits, whose first one is 9."""
_LARGEST: Final = Decimal((1 << 63) - 1).scaleb(-_DECIMALS)
"""In microseconds."""


def nanoseconds(texts: Sequence[bytes]) -> NDArray[np.int64]:
    """Convert microseconds, rounded to 3 decimals; `UNKNOWN` if no number or beyond 64 bits."""
    joined = b",".join(texts)
    if not joined or joined.translate(None, _PLAIN) or b",," in b",%b," % joined:
        return _one_by_one(texts)
    characters = np.frombuffer(joined, np.uint8)
    ends = np.append(np.flatnonzero(characters == ord(",")), len(joined))
    points = np.flatnonzero(characters == ord("."))
    owner = np.searchsorted(ends, points)
    decimals = np.zeros(len(texts), np.int64)
    decimals[owner] = ends[owner] - points - 1
    starts = np.append(0, ends[:-1] + 1)
    digits = ends - starts - decimals + _DECIMALS
    digits[owner] -= 1
    large = (digits > _DIGITS) | (digits == _DIGITS) & (characters[starts] == ord("9"))
    if (large | (decimals > _DECIMALS)).any() or (np.diff(owner) == 0).any():
        return _one_by_one(texts)
    numbers = np.fromstring(joined.replace(b".", b""), np.int64, sep=",")
    return numbers * 10 ** (_DECIMALS - decimals)


def _one_by_one(texts: Sequence[bytes]) -> NDArray[np.int64]:
    exact = np.full(len(texts), UNKNOWN, np.int64)
    for row, text in enumerate(texts):
        with suppress(InvalidOperation, UnicodeDecodeError):
            number = Decimal(bytes(text).decode().strip('" '))
            if number.is_finite() and abs(number) < _LARGEST:
                exact[row] = round(number * 10**_DECIMALS)
    return exact


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


def message_bytes(args: Args) -> int:
    """Return the bytes of a collective's larger side, its size in nccl-tests, or `UNKNOWN`."""
    element = str(args.element)
    size = 1 if element.startswith("Float8") else _SIZES.get(element, 0)
    count = max(integer(args.taken), integer(args.given)) if size else 0
    return size * count if count > 0 else UNKNOWN


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
        text = f"{self.name}\0{self.size}\0{self.ranks}"
        return int.from_bytes(sha256(text.encode("utf-8", "replace")).digest()[:8], "big") >> 1


def group_of(args: Args) -> ProcessGroup:
    """Return the process group of a collective."""
    size, first, stride = map(integer, (args.size, args.first, args.stride))
    ranks = tuple(map(int, _RANK.findall(bytes(args.ranks))))
    if len(ranks) < size <= MOST_RANKS and first >= 0 and stride > 0:
        ranks = tuple(range(first, first + size * stride, stride))
    return ProcessGroup(str(args.group), str(args.description), max(size, len(ranks)), ranks)


MOST_RANKS: Final = 1 << 15
"""Ranks that the columns can tell apart."""
_RANK: Final = re.compile(rb"\b\d{1,5}\b")


class Pairs:
    """Matching of beginnings with ends, which nest within a thread, across parts of a file."""

    def __init__(self) -> None:
        self._open: dict[tuple[Value, Value], list[Event]] = {}
        self._unbegun = 0

    @property
    def odd(self) -> int:
        """Number of events without a partner so far."""
        return self._unbegun + sum(map(len, self._open.values()))

    def whole(self, events: Sequence[Event]) -> list[Event]:
        """Return the events with a duration (``ph`` X), and those made of a pair (B and E)."""
        if {event.ph for event in events}.isdisjoint("BE"):
            return [event for event in events if event.ph == "X"]
        return list(self._paired(events))

    def _paired(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            if event.ph == "X":
                yield event
            elif event.ph == "B":
                self._open.setdefault((event.pid, event.tid), []).append(event.copied())
            elif event.ph != "E":
                continue
            elif begun := self._open.get((event.pid, event.tid)):
                pair = begun.pop()
                try:
                    start, end = (Decimal(bytes(at.ts).decode()) for at in (pair, event))
                    pair.dur = Raw(str(end - start))
                except (InvalidOperation, UnicodeDecodeError):
                    pair.dur = Raw(b"")
                yield pair
            else:
                self._unbegun += 1


FAR: Final = 3_600 * 1_000_000_000
"""A time of 0 so far before all others, in nanoseconds, is none."""

NOTHING: Final = Window(-(1 << 62), -(1 << 62))


class RowSelection:
    """Rows that touch a window, and on each side of it the nearest of each stream and thread.

    Rows with impossible times are kept, so that they are counted.
    """

    def __init__(self, window: Window = NOTHING, first: int = 0) -> None:
        """``window`` is of the file's own times, of which ``first`` is the earliest."""
        self._window, self._zero_is_lost = window, first > FAR
        self._nearest: dict[tuple[object, ...], tuple[int, Event]] = {}
        """Distance and event by side of the window, category, process and thread."""
        self.touched = False
        """True if any row touches the window."""

    def choose(
        self, events: Sequence[Event], start: NDArray[np.int64], end: NDArray[np.int64]
    ) -> Mask:
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

    def touching(self, start: NDArray[np.int64], end: NDArray[np.int64]) -> Mask:
        """Return the mask of the rows that touch the window."""
        touching: Mask = (start < self._window.end) & (end > self._window.start)
        return touching

    def _note(
        self, after: bool, events: Sequence[Event], closeness: NDArray[np.int64], rows: Mask
    ) -> None:
        """Keep the closest of some rows on one side of the window."""
        here = np.flatnonzero(rows)
        here = here[np.argsort(closeness[here], kind="stable")]
        last = {}
        for row, close in zip(here.tolist(), closeness[here].tolist(), strict=True):
            event = events[row]
            last[after, event.cat, event.pid, event.tid] = close, event
        for key, (close, event) in last.items():
            if key not in self._nearest or self._nearest[key][0] < close:
                self._nearest[key] = close, event.copied()

    def nearest(self) -> list[Event]:
        """Return the rows nearest to the window, which do not touch it."""
        return [event for _, event in self._nearest.values()]


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
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "Runtime", "Driver"), Kind.API),
    **dict.fromkeys(("user_annotation", "cpu_op", "Operator"), Kind.RANGE),
    **dict.fromkeys(("overhead", "Overhead"), Kind.OVERHEAD),
}
"""Categories; those of the profiler's first versions are capitalised."""

_OPERATORS: Final = {"cpu_op", "Operator"}
_ANNOTATIONS: Final = ("ProfilerStep", "enumerate(DataLoader)", "Optimizer.")
"""Beginnings of annotations, which the older profiler calls operators, as all the rest there."""

_PYTHON, _MODULE = "python_function", "nn.Module: "
"""Category, and beginning of the name, of a call of a module."""

_STEP: Final = re.compile(r"ProfilerStep#?\d*$")
_NUMBER: Final = re.compile(r"-?\d+$")
_COPY_ENDS: Final = ("source_memory", "destination_memory")
_HALF: Final = 1 << 31
_NEVER: Final = np.iinfo(np.int64).max

_DATA: Final = re.compile(r"enumerate\(DataLoader\)#.*__next__")


class Rows:
    """Rows of one file while it is decoded."""

    def __init__(self, kept: RowSelection | None = None) -> None:
        """``kept`` selects rows to keep; the attributes describe all rows."""
        self.names = Names()
        self.pids: dict[Value, int] = {}
        """Number in the column ``process`` by process of the host's rows."""
        self.has_gpu = False
        self._kept = kept
        self._calls: Counter[int] = Counter()
        self._first = _NEVER
        self._from_zero = False
        self._threads: dict[Value, int] = {}
        self._on_gpu: list[Columns] = []
        self._on_host: list[Columns] = []
        self._program = Operators(self.names)
        self._groups: dict[tuple[Value, bytes, Value], ProcessGroup] = {}
        self._seen: dict[ProcessGroup, int] = {}
        """First moment of each process group."""

    def add(self, events: Iterable[Event]) -> None:
        """Add events with a start and a duration, if of `_GPU` or `_HOST`."""
        on_gpu, on_host, operators, modules = [], [], [], []
        for event in events:
            if event.cat in _GPU:
                on_gpu.append(event)
            elif event.cat in _HOST and (
                event.cat not in _OPERATORS or str(event.name).startswith(_ANNOTATIONS)
            ):
                on_host.append(event)
            elif event.cat in _OPERATORS and (args := event.args) is not None:
                if args.sequence != UNKNOWN or event.name in SHAPED:
                    operators.append(event)
            elif event.cat == _PYTHON and str(event.name).startswith(_MODULE):
                modules.append(event)
        self._add_calls(operators, modules)
        self.has_gpu |= bool(on_gpu)
        self._take(on_gpu, on_host, self._kept)

    def _take(self, on_gpu: list[Event], on_host: list[Event], kept: RowSelection | None) -> None:
        if on_gpu and (timed := self._times(on_gpu, kept))[0]:
            self._on_gpu.append(self._gpu_rows(*timed))
            self._on_gpu += self._message_rows(*timed)
        if on_host:
            # The calls of all rows count, not of those kept alone.
            pairs = Counter([(event.cat, event.pid) for event in on_host])
            for (cat, pid), count in pairs.items():
                process = self._process(pid)
                if _HOST[cat or ""] == Kind.API:
                    self._calls[process] += count
            if (timed := self._times(on_host, kept))[0]:
                self._on_host.append(self._host_rows(*timed))

    @property
    def first(self) -> int:
        """The earliest time of a row, in nanoseconds; the profiler writes 0 for one it lost."""
        if self._first == _NEVER or (self._from_zero and self._first <= FAR):
            return 0
        return self._first

    def parts(self, shift: int, rank: int) -> list[Events]:
        """Return all rows of the process of a rank, with nanoseconds added to their times."""
        # A GPU's rows do not say whose they are: the process that makes most CUDA calls.
        main = min(self._calls, key=lambda process: (-self._calls[process], process), default=0)
        if self._kept is not None:
            nearest = self._kept.nearest()
            self._take(
                [e for e in nearest if e.cat in _GPU], [e for e in nearest if e.cat in _HOST], None
            )
        if self._seen:
            self._on_gpu.append(self._group_rows(rank))
        for columns in self._on_gpu:
            columns["process"] = np.full(len(columns["start"]), main)
        program = self._program.columns(self.first) if self._on_gpu else []
        return [_shifted(columns, shift) for columns in self._on_gpu + self._on_host + program]

    def _gpu_rows(self, events: Sequence[Event], columns: Columns) -> Columns:
        args = [event.args or NO_ARGS for event in events]
        columns["kind"] = _mapped([event.cat for event in events], lambda cat: _GPU[cat or ""])
        columns["name"] = self._names(events)
        columns["device"] = _either([a.device for a in args], lambda: [e.pid for e in events])
        columns["stream"] = _either([a.stream for a in args], lambda: [e.tid for e in events])
        columns["correlation"] = _integers([a.correlation for a in args])
        columns["bytes"] = _either(
            [a.bytes for a in args],
            lambda: [message_bytes(a) if a.element else UNKNOWN for a in args],
        )
        rows = np.flatnonzero(columns["kind"] == Kind.COPY_OTHER)
        if len(rows):
            columns["source_device"] = _integers([a.source for a in args])
            columns["destination_device"] = _integers([a.destination for a in args])
            ids, index = np.unique(columns["name"][rows], return_inverse=True)
            copies = np.array([copy_of(self.names.texts[id]) for id in ids.tolist()])
            for column, values in zip(("kind", *_COPY_ENDS), copies.T, strict=True):
                whole = columns.setdefault(column, np.full(len(events), Memory.UNKNOWN))
                whole[rows] = values[index]
        return columns

    def _message_rows(self, events: Sequence[Event], columns: Columns) -> list[Columns]:
        """Return a row for each operation of a process group."""
        rows = [n for n, event in enumerate(events) if (event.args or NO_ARGS).group is not None]
        if not rows:
            return []
        args = [cast(Args, events[row].args) for row in rows]
        groups = [
            self._groups.setdefault((a.group, bytes(a.ranks), a.size), group_of(a)) for a in args
        ]
        peers = [
            _place(group, integer(a.receiver if integer(a.receiver) >= 0 else a.sender))
            for a, group in zip(args, groups, strict=True)
        ]
        chosen = np.array(rows)
        messages = {name: columns[name][chosen] for name in ("start", "end", "stream", "bytes")} | {
            "kind": np.full(len(rows), Kind.MESSAGE),
            "name": _mapped([a.operation for a in args], lambda text: self.names.number(str(text))),
            "correlation": np.array([group.id for group in groups]),
            "device": np.array(peers),
        }
        for start, group in zip(columns["start"][chosen].tolist(), groups, strict=True):
            self._seen.setdefault(group, start)
        return [messages]

    def _group_rows(self, rank: int) -> Columns:
        """Return a row for each process group that the process, of this rank, was seen in."""
        times = np.array(list(self._seen.values()), np.int64)
        rows = [
            (self.names.number(group.description), group.id, group.size, _place(group, rank))
            for group in self._seen
        ]
        values = np.array(rows, np.int64).reshape(-1, 4).T
        return dict(zip(("name", "correlation", "bytes", "device"), values, strict=True)) | {
            "start": times,
            "end": times,
            "kind": np.full(len(rows), Kind.COMMUNICATOR),
        }

    def _host_rows(self, events: Sequence[Event], columns: Columns) -> Columns:
        columns["kind"] = _mapped([event.cat for event in events], lambda cat: _HOST[cat or ""])
        columns["name"] = self._names(events)
        ranges = np.flatnonzero(columns["kind"] == Kind.RANGE)
        texts = [self.names.texts[id] for id in columns["name"][ranges].tolist()]
        columns["kind"][ranges] = _mapped(texts, _kind_of)
        columns["process"] = _mapped([event.pid for event in events], self._process)
        columns["thread"] = _mapped([event.tid for event in events], self._thread)
        columns["correlation"] = _integers([(e.args or NO_ARGS).correlation for e in events])
        return columns

    def _add_calls(self, operators: Sequence[Event], modules: Sequence[Event]) -> None:
        """Add calls of operators and of modules to `Operators`."""
        events = [*operators, *modules]
        start = nanoseconds([event.ts for event in events])
        end = start + nanoseconds([event.dur for event in events])
        known = (start != UNKNOWN) & (end > start)
        shown = known if self._kept is None else known & self._kept.touching(start, end)
        for row in np.flatnonzero(known).tolist():
            event = events[row]
            name, args = str(event.name), event.args or NO_ARGS
            thread = self._process(event.pid), self._thread(event.tid)
            at = Place(*thread, int(start[row]), int(end[row]))
            if event.cat == _PYTHON:
                self._program.add_module(name.removeprefix(_MODULE), at)
                continue
            is_backward = integer(args.forward) > 0
            self._program.add_operator(name, integer(args.sequence), is_backward, at)
            if name in SHAPED and shown[row]:
                shapes, types, values = map(bytes, (args.shapes, args.types, args.values))
                self._program.add_work(name, shapes, types, values, at)

    def _times(self, events: list[Event], kept: RowSelection | None) -> tuple[list[Event], Columns]:
        """Return the events to keep, and their times."""
        start = nanoseconds([event.ts for event in events])
        length = nanoseconds([event.dur for event in events])
        known = (start != UNKNOWN) & (length != UNKNOWN)
        self._first = int(start[known & (start != 0)].min(initial=self._first))
        self._from_zero |= bool((known & (start == 0)).any())
        end = np.where(known, start + length, UNKNOWN)
        if kept is not None and not (rows := kept.choose(events, start, end)).all():
            events = list(compress(events, rows.tolist()))
            start, end = start[rows], end[rows]
        return events, {"start": start, "end": end}

    def _names(self, events: Sequence[Event]) -> Ints:
        return _mapped([event.name for event in events], lambda name: self.names.number(str(name)))

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


def _place(group: ProcessGroup, rank: int) -> int:
    """Return the place of a global rank in a group, or `UNKNOWN`."""
    return group.ranks.index(rank) if rank in group.ranks else UNKNOWN


def _kind_of(name: str) -> Kind:
    if _STEP.match(name):
        return Kind.STEP
    return Kind.DATA_WAIT if _DATA.match(name) else Kind.RANGE


def _mapped(values: Sequence[T], function: Callable[[T], int]) -> Ints:
    """Map each value to a number, calling the function once for equal values."""
    known = {value: function(value) for value in dict.fromkeys(values)}
    return np.fromiter(map(known.__getitem__, values), np.int64, len(values))


def _either(values: list[Value], others: Callable[[], Sequence[Value]]) -> Ints:
    numbers = _integers(values)
    lacking = numbers == UNKNOWN
    return np.where(lacking, _integers(others()), numbers) if lacking.any() else numbers


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
    for name, values in moved.items():
        limits = np.iinfo(COLUMN_TYPES[name])
        moved[name] = np.where((values < limits.min) | (values > limits.max), UNKNOWN, values)
    return Events(moved)


BEFORE: Final = 1_000_000_000
"""Nanoseconds of the columns' clock before the first event: a time of 0 would seem lost."""

_WALL_CLOCK: Final = range(10**18, 4 * 10**18)
"""Nanoseconds since 1970, of the years 2001 to 2096."""
_NO_GPU: Final = NoGpu(
    "PyTorch's profiler recorded none",
    "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], where a GPU is",
)


def open_kineto(path: Path, breaks: ErrorPolicy = STOP) -> Trace:
    """Read a file whole; raise InputError if it is broken or holds nothing to analyze."""
    return decode(path, breaks)[0]


def decode(
    path: Path, breaks: ErrorPolicy = STOP, kept: RowSelection | None = None
) -> tuple[MemoryTrace, Rows]:
    """Return the trace of a file, with all rows or those of a selection, and these rows."""
    rows, pairs, decoder = Rows(kept), Pairs(), DecodedEvents()
    with Content(path) as text:
        document = Document(text, decoder.decode, breaks)
        for part in document.parts():
            rows.add(pairs.whole(part))
    try:
        about = properties(document.around)
    except BadJson as error:
        breaks.meet(document.broken_around(error))
        about = Properties()
        with suppress(BadJson):
            about = properties(document.beginning)
    trace = _trace(path, rows, about)
    trace.quality.drop("not an event of the profiler", decoder.odd)
    trace.quality.drop("an end without a beginning, or the other way round", pairs.odd)
    if not document.closed:
        trace.quality.warnings.append("the file ends without an end of its list: it was cut off")
    return trace, rows


def _trace(path: Path, rows: Rows, about: Properties) -> MemoryTrace:
    rank, size = UNKNOWN, UNKNOWN
    if about.distributed is not None:
        rank, size = integer(about.distributed.rank), integer(about.distributed.world_size)
    host = str(about.host or "")
    pids = list(rows.pids) or [0]
    parts = rows.parts(BEFORE - rows.first, rank)
    has_gpu = any(np.isin(part.kind, GPU_KINDS).any() for part in parts)
    # Times without a base may be of the wall clock themselves.
    epoch = max(integer(about.base), 0) + rows.first
    trace = MemoryTrace(
        path,
        "kineto",
        parts,
        rows.names.texts,
        [Process(max(integer(pid), 0), 0, rank, host_name=host) for pid in pids],
        [
            Device(process, integer(card.id), name=str(card.name))
            for process in range(len(pids))
            for card in about.cards
        ],
        Session(
            epoch_ns=epoch - BEFORE if epoch in _WALL_CLOCK else None,
            hosts=frozenset({host} - {""}),
            ranks=frozenset({rank} - {UNKNOWN}),
            world_size=size if size > 0 else None,
        ),
        # Steps and waits for data are worth reporting without a GPU, too.
        no_gpu=None if has_gpu else _NO_GPU,
    )
    trace.origin = BEFORE
    return trace


class LargeKineto(Trace):
    """Large trace of which opening keeps only a ``look``: the run, and the origin of its times.

    Read without a window, it is held like any other. ``allowed`` is the error policy for a broken
    file, ``first`` the moment of the first event in the file's own times.
    """

    held = False

    def __init__(
        self,
        path: Path,
        breaks: ErrorPolicy = STOP,
        look: MemoryTrace | None = None,
        first: int = 0,
    ) -> None:
        """Scan the file, unless another process has and gives `look` and `first`.

        Raises InputError if the file is broken.
        """
        super().__init__(path)
        if look is None:
            look, rows = decode(path, breaks, RowSelection())
            look.no_gpu = None if rows.has_gpu else look.no_gpu
            first = rows.first
        self.allowed, self.first, self.look = breaks.allowed, first, look
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

    def read(
        self,
        kinds: frozenset[Kind],
        columns: Sequence[str],
        window: Window | None,
        progress: Progress | None,
    ) -> Events:
        return self._whole.read(kinds, columns, window, progress)

    def close(self) -> None:
        self.look.close()
        self.__dict__.pop("_whole", self.look).close()
