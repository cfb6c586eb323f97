"""Events of PyTorch's profiler, decoded from JSON into rows of the event columns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from msgspec import DecodeError, Raw, Struct, ValidationError, field, structs
from msgspec.json import Decoder
from numpy.typing import NDArray

from gputrace.model.events import COLUMN_TYPES, UNKNOWN, Events, Kind, Mask, Memory
from gputrace.model.trace import Window
from gputrace.readers.chrome_json import BadJson
from gputrace.readers.in_memory import Names

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


class Card(Struct):
    """A GPU that the process could see."""

    id: Value = UNKNOWN
    name: Value = ""


class Distributed(Struct):
    """The process in its distributed run."""

    rank: Value = None
    world_size: Value = None


class Properties(Struct):
    """Properties around the list of events."""

    cards: list[Card] = field(default_factory=list, name="deviceProperties")
    distributed: Distributed | None = field(default=None, name="distributedInfo")
    base: Value = field(default=None, name="baseTimeNanoseconds")
    host: Value = field(default="", name="host_name")


_EVENTS: Final = Decoder(list[Event])
_EACH: Final = Decoder(list[Raw])
_EVENT: Final = Decoder(Event)
_PROPERTIES: Final = Decoder(Properties)


class DecodedEvents:
    """Decodes lists of events, and counts what is no event.

    Attributes:
        odd: how many were not.
    """

    def __init__(self) -> None:
        self.odd = 0

    def decode(self, text: bytes) -> list[Event]:
        """The events of a JSON list; raises BadJson."""
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
    """Return the properties of a document without its events; those of an unknown form are left
    out.
    """
    try:
        return _PROPERTIES.decode(_repair(text))
    except ValidationError:
        return Properties()
    except (DecodeError, RecursionError) as error:
        raise _bad(error) from error


def _repair(text: bytes) -> bytes:
    """With 0 for numbers that are none, and without bytes that are not UTF-8; of equal length."""
    text = text.decode("utf-8", "surrogateescape").encode("utf-8", "replace")
    return _NO_NUMBER.sub(lambda found: found[1] + b"0".ljust(len(found[2])), text)


def _bad(error: DecodeError | RecursionError) -> BadJson:
    if isinstance(error, RecursionError):
        return BadJson("nested too deep", 0)
    found = _BYTE.search(str(error))
    problem = _BYTE.sub("", str(error)).removeprefix("JSON is malformed: ")
    return BadJson(problem, int(found[1]) if found else None)


def integer(value: Any) -> int:
    """An integer of 64 bits, as a number or as digits in a text (``stream 7``), or `UNKNOWN`."""
    if isinstance(value, str):
        found = re.search(r"-?\d{1,19}(?!\d)", value)
        value = int(found[0]) if found else UNKNOWN
    if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        return UNKNOWN
    return value


_PLAIN: Final = b"0123456789.,"
_DECIMALS: Final = 3
"""Decimals of microseconds that nanoseconds take."""

_DIGITS: Final = 19
"""Digits of the largest integer of 64 bits, whose first one is 9."""

_LARGEST: Final = Decimal((1 << 63) - 1).scaleb(-_DECIMALS)
"""In microseconds."""


def nanoseconds(texts: Sequence[bytes]) -> NDArray[np.int64]:
    """The nanoseconds of numbers of microseconds, rounded where they have more than 3 decimals.

    What is not a number, or beyond 64 bits, is `UNKNOWN`.
    """
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
    found = np.fromstring(joined.replace(b".", b""), np.int64, sep=",")
    return found * 10 ** (_DECIMALS - decimals)


def _one_by_one(texts: Sequence[bytes]) -> NDArray[np.int64]:
    exact = np.full(len(texts), UNKNOWN, np.int64)
    for row, text in enumerate(texts):
        with suppress(InvalidOperation, UnicodeDecodeError):
            number = Decimal(bytes(text).decode().strip('" '))
            if number.is_finite() and abs(number) < _LARGEST:
                exact[row] = round(number * 10**_DECIMALS)
    return exact


class Copy(NamedTuple):
    """A copy of one name."""

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
    """``Memcpy HtoD (Pinned -> Device)``, ``CopyHostToDevice``; what it leaves open is unknown."""
    direction, ends = _DIRECTION.search(name), _ENDS.search(name)
    kind = _KINDS.get("".join(direction.groups()).upper(), Kind.COPY_OTHER) if direction else None
    source, destination = (
        _MEMORY.get(end.lower(), Memory.UNKNOWN) for end in (ends.groups() if ends else ("", ""))
    )
    return Copy(Kind.COPY_OTHER if kind is None else kind, source, destination)


_SIZES: Final = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4,
    "Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Bytes of an element by the name that PyTorch gives its type (c10/core/ScalarType.h)."""


def message_bytes(args: Args) -> int:
    """Bytes of the larger side of a collective, or `UNKNOWN`.

    An all-gather gives more than it takes and a reduce-scatter takes more than it gives; the larger
    is what nccl-tests calls the size.
    """
    element = str(args.element)
    size = 1 if element.startswith("Float8") else _SIZES.get(element, 0)
    count = max(integer(args.taken), integer(args.given)) if size else 0
    return size * count if count > 0 else UNKNOWN


class Pairs:
    """Pairs beginnings with ends, which nest within a thread; goes on from part to part."""

    def __init__(self) -> None:
        self._open: dict[tuple[Value, Value], list[Event]] = {}
        self._unbegun = 0

    @property
    def odd(self) -> int:
        """Return how many have no partner so far."""
        return self._unbegun + sum(map(len, self._open.values()))

    def whole(self, events: Sequence[Event]) -> list[Event]:
        """The events with a duration (``ph`` X), and those made of a pair (B and E)."""
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

_Place = tuple[bool, str | None, Value, Value]
"""Before the window or after it, and of which stream, or of which thread's rows of one sort."""


class RowSelection:
    """Rows that touch a window, and on each side of it the nearest of each stream and thread.

    Rows whose times make no sense are kept, so that they are counted.

    Attributes:
        touched: whether any row touches the window.
    """

    def __init__(self, window: Window = NOTHING, first: int = 0) -> None:
        """``window`` is of the file's own times, of which ``first`` is the earliest."""
        self._window, self._zero_is_lost = window, first > FAR
        self._nearest: dict[_Place, tuple[int, Event]] = {}
        self.touched = False

    def choose(
        self, events: Sequence[Event], start: NDArray[np.int64], end: NDArray[np.int64]
    ) -> Mask:
        """Return the mask of the rows to keep; the nearest ones are added at the end, by
        `nearest`.
        """
        window = self._window
        odd = (start == UNKNOWN) | (end == UNKNOWN) | (end < start)
        if self._zero_is_lost or window == NOTHING:
            odd |= start == 0
        touching: Mask = (start < window.end) & (end > window.start)
        if window != NOTHING:
            self._note(False, events, end - window.start, ~odd & (end <= window.start))
            self._note(True, events, window.end - start, ~odd & (start >= window.end))
        self.touched |= bool((touching & ~odd).any())
        chosen: Mask = touching | odd
        return chosen

    def _note(
        self, after: bool, events: Sequence[Event], closeness: NDArray[np.int64], rows: Mask
    ) -> None:
        """Takes the closest of some rows that are on one side of the window."""
        here = np.flatnonzero(rows)
        here = here[np.argsort(closeness[here], kind="stable")]
        last = {
            (after, event.cat, event.pid, event.tid): (close, event)
            for event, close in zip(
                map(events.__getitem__, here.tolist()), closeness[here].tolist(), strict=True
            )
        }
        for place, (close, event) in last.items():
            known = self._nearest.get(place)
            if known is None or known[0] < close:
                self._nearest[place] = close, event.copied()

    def nearest(self) -> list[Event]:
        """The rows nearest to the window, which it does not touch."""
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

_STEP: Final = re.compile(r"ProfilerStep#?\d*$")
_NUMBER: Final = re.compile(r"-?\d+$")
_COPY_ENDS: Final = ("source_memory", "destination_memory")
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

    def __init__(self, kept: RowSelection | None = None) -> None:
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

    def _take(self, on_gpu: list[Event], on_host: list[Event], kept: RowSelection | None) -> None:
        if on_gpu and (own := self._times(on_gpu, kept))[0]:
            self._on_gpu.append(self._gpu_rows(*own))
        if on_host:
            # The calls of all rows count, not of those kept alone.
            pairs = Counter([(event.cat, event.pid) for event in on_host])
            for (cat, pid), count in pairs.items():
                process = self._process(pid)
                if _HOST[cat or ""] == Kind.API:
                    self._calls[process] += count
            if (own := self._times(on_host, kept))[0]:
                self._on_host.append(self._host_rows(*own))

    @property
    def first(self) -> int:
        """The earliest time of a row, in nanoseconds; the profiler writes 0 for one it lost."""
        if self._first == _NEVER or (self._from_zero and self._first <= FAR):
            return 0
        return self._first

    def parts(self, shift: int) -> list[Events]:
        """All rows, with so many nanoseconds added to their times."""
        # A GPU's rows do not say whose they are: the process that makes most CUDA calls.
        main = min(self._calls, key=lambda process: (-self._calls[process], process), default=0)
        if self._kept is not None:
            nearest = self._kept.nearest()
            self._take(
                [e for e in nearest if e.cat in _GPU], [e for e in nearest if e.cat in _HOST], None
            )
        for columns in self._on_gpu:
            columns["process"] = np.full(len(columns["start"]), main)
        return [_shifted(columns, shift) for columns in self._on_gpu + self._on_host]

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

    def _times(self, events: list[Event], kept: RowSelection | None) -> tuple[list[Event], Columns]:
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
