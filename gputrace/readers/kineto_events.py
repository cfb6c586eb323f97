"""Events of PyTorch's profiler: scanned in C or decoded from JSON, into columns of integers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from json import JSONDecoder
from typing import Any, Final, cast

import numpy as np
from msgspec import DecodeError, Raw, Struct, ValidationError, convert, field, structs
from msgspec.json import Decoder
from numpy.typing import NDArray

from gputrace.model.events import UNKNOWN, Mask
from gputrace.native import address, library
from gputrace.readers.chrome_json import BadJson, repair

Value = int | float | str | None
"""Value of a field that should be an integer."""

_BYTE: Final = re.compile(r" \(byte (\d+)\)")


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
_ARGS: Final = Decoder(Args)
_VALUE: Final = Decoder(Value)


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


class MemoryArgs(Struct, gc=False):
    """Arguments of a memory event."""

    held: Value = field(default=UNKNOWN, name="Total Allocated")
    reserved: Value = field(default=UNKNOWN, name="Total Reserved")
    bytes: Value = field(default=UNKNOWN, name="Bytes")
    address: Value = field(default=UNKNOWN, name="Addr")
    device: Value = field(default=UNKNOWN, name="Device Id")
    sort: Value = field(default=UNKNOWN, name="Device Type")


class MemoryEvent(Struct, gc=False):
    """Allocation or release of memory (``profile_memory=True``), an instant."""

    args: MemoryArgs
    pid: Value = None
    tid: Value = None
    ts: Raw = Raw(b"")

    @property
    def is_of_gpu(self) -> bool:
        """Return whether all is known, and the memory is not the host's (device type 0)."""
        numbers = (self.args.held, self.args.device, self.args.sort)
        return all(isinstance(number, int) and number >= 0 for number in numbers) and (
            self.args.sort != 0
        )


_MEMORY_NAME: Final = b'"[memory]"'
_MEMORY_EVENT: Final = Decoder(MemoryEvent)


def memory_events(text: bytes) -> Iterator[MemoryEvent]:
    """Yield the events of memory of GPUs in a JSON list; those that are not as usual are left out.

    They are instants, which the scan in C leaves out.
    """
    at = text.find(_MEMORY_NAME)
    while at >= 0:
        begin, end = text.rfind(b"{", 0, at), text.find(b"}", text.find(b"}", at) + 1) + 1
        with suppress(DecodeError, UnicodeDecodeError):
            event = _MEMORY_EVENT.decode(text[max(begin, 0) : end])
            if event.is_of_gpu:
                yield structs.replace(event, ts=event.ts.copy())
        at = text.find(_MEMORY_NAME, at + 1)


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


Ints = NDArray[np.int64]

COLUMNS: Final = (
    *("cat", "name", "pid", "tid", "start", "length"),
    *("device", "stream", "correlation", "bytes", "source", "destination", "sequence", "forward"),
    *("flags", "args_begin", "args_end"),
)
"""Columns of a scan, in the order of `native/event_scan.c`."""
HAS_GROUP, HAS_ELEMENT = 1, 2
"""Flags of events whose arguments name a process group, and a type of elements."""
_NOT_TEXTS: Final = COLUMNS.index("start")
"""Position of the first column that is not of numbers in `EventBatch.values`."""
_SHORTEST: Final = 32
"""Bytes of the shortest event that profilers write; a list with shorter ones is decoded."""
_SPARE_SPANS: Final = 16
"""Values that a short list may have beside one for each event: it repeats few."""


class EventBatch:
    """Columns of events that have a duration, from one part of a file.

    ``cat``, ``name``, ``pid`` and ``tid`` are positions in ``values``, ``start`` and ``length`` are
    nanoseconds, and the rest are arguments; what is lacking or no integer is `UNKNOWN`.
    """

    def __init__(
        self,
        columns: Mapping[str, Ints],
        values: Sequence[Value],
        args: Callable[[int], Args | None],
        rows: Ints | None = None,
    ) -> None:
        """``args`` decodes the arguments of a row of the columns; ``rows`` selects some rows."""
        self.values = values
        self._columns, self._args, self._rows = columns, args, rows

    def __len__(self) -> int:
        return len(self._columns["cat"] if self._rows is None else self._rows)

    def __getitem__(self, column: str) -> Ints:
        whole = self._columns[column]
        return whole if self._rows is None else whole[self._rows]

    def select(self, rows: Mask | Ints) -> EventBatch:
        """Return a table of some of the rows."""
        all_rows = np.arange(len(self)) if self._rows is None else self._rows
        return EventBatch(self._columns, self.values, self._args, all_rows[rows])

    def args(self, row: int) -> Args | None:
        """Return the arguments of a row; None where it has none."""
        return self._args(row if self._rows is None else int(self._rows[row]))

    def value(self, column: str, row: int) -> Value:
        """Return the value behind a position in ``cat``, ``name``, ``pid`` or ``tid``."""
        return self.values[int(self[column][row])]

    def categorized(self, categories: Mapping[Value, str]) -> EventBatch:
        """Return a table in which rows of certain processes have a category by process."""
        if categories.keys().isdisjoint(self.values):
            return self
        number = {pid: len(self.values) + index for index, pid in enumerate(categories)}
        cat = self.map("pid", lambda pid: number.get(pid, UNKNOWN))
        columns = {name: self[name] for name in COLUMNS}
        columns["cat"] = np.where(cat == UNKNOWN, columns["cat"], cat)
        return EventBatch(columns, [*self.values, *categories.values()], self.args)

    def copied(self, row: int) -> EventBatch:
        """Return a table of one row that does not keep the text of the others alive."""
        columns = {name: self[name][row : row + 1].copy() for name in COLUMNS}
        values = [self.value(name, row) for name in COLUMNS[:_NOT_TEXTS]]
        args = self.args(row)
        for position, name in enumerate(COLUMNS[:_NOT_TEXTS]):
            columns[name][:] = position
        return EventBatch(columns, values, lambda _: args)

    def map(self, column: str, function: Callable[[Value], int]) -> Ints:
        """Map each value of a column to a number, calling the function once for equal positions.

        It is called in the order in which the values come.
        """
        numbers = self[column]
        first = np.full(len(self.values), len(numbers))
        first[numbers[::-1]] = np.arange(len(numbers) - 1, -1, -1)
        used = np.flatnonzero(first < len(numbers))
        mapped = np.zeros(len(self.values), np.int64)
        for position in used[np.argsort(first[used])].tolist():
            mapped[position] = function(self.values[position])
        return mapped[numbers]


def tabulate(events: Sequence[Event]) -> EventBatch:
    """Return the columns of decoded events: the twin of the scan."""
    numbers: dict[tuple[type, Value], int] = {}
    columns = {
        name: np.array(
            [
                numbers.setdefault((type(value), value), len(numbers))
                for value in (getattr(event, name) for event in events)
            ],
            np.int64,
        )
        for name in COLUMNS[:4]
    }
    args = [event.args or NO_ARGS for event in events]
    columns |= {
        "start": nanoseconds([event.ts for event in events]),
        "length": nanoseconds([event.dur for event in events]),
        "flags": np.array(
            [HAS_GROUP * (a.group is not None) | HAS_ELEMENT * (a.element != "") for a in args],
            np.int64,
        ),
        "args_begin": np.zeros(len(events), np.int64),
        "args_end": np.array([event.args is not None for event in events], np.int64),
    }
    for name in COLUMNS[6:14]:
        columns[name] = _integers([getattr(a, name) for a in args])
    return EventBatch(columns, [value for _, value in numbers], lambda row: events[row].args)


class EventScanner:
    """Scan in C of JSON lists of events; a table is valid until the next scan."""

    def __init__(self) -> None:
        self._columns = np.empty((len(COLUMNS), 0), np.int64)
        self._spans = np.empty((0, 2), np.int64)

    def scan(self, text: bytes) -> EventBatch | None:
        """Return the events with a duration; None where the list has to be decoded.

        That is so without the library, and where anything is not usual: beginnings and ends in
        place of durations, text that is not JSON to the letter, numbers of unusual size.
        """
        if (loaded := library()) is None:
            return None
        most = len(text) // _SHORTEST + 1
        if most > self._columns.shape[1]:
            # Kept for the next list: the system clears each page of new memory.
            self._columns = np.empty((len(COLUMNS), most), np.int64)
            self._spans = np.empty((most + _SPARE_SPANS, 2), np.int64)
        columns, spans, count = self._columns, self._spans, ctypes.c_int64()
        memory = address(columns), columns.shape[1], address(spans), len(spans)
        rows = loaded.gputrace_scan_events(text, len(text), *memory, ctypes.byref(count))
        try:
            if rows < 0 or not (text.isascii() or text.decode()):
                return None
            texts = (text[begin:end] for begin, end in spans[: count.value].tolist())
            values = [_VALUE.decode(value) for value in texts]
        except (UnicodeDecodeError, DecodeError):
            return None
        named = {name: column[:rows] for name, column in zip(COLUMNS, columns, strict=True)}
        begins, ends = named["args_begin"], named["args_end"]

        def args(row: int) -> Args | None:
            begin, end = int(begins[row]), int(ends[row])
            return _ARGS.decode(text[begin:end]) if end else None

        return EventBatch(named, [*values, "", None], args)


_EVENTS: Final = Decoder(list[Event])
_EACH: Final = Decoder(list[Raw])
_EVENT: Final = Decoder(Event)
_PROPERTIES: Final = Decoder(Properties)
_JSON: Final = JSONDecoder(strict=False)


class DecodedEvents:
    """Decoder of lists of events."""

    def __init__(self) -> None:
        self.odd = 0
        """Number of items that are not events."""
        self.memory: list[MemoryEvent] = []
        """Events of memory so far."""
        self._scanner = EventScanner()

    def decode(self, text: bytes) -> EventBatch | list[Event]:
        """Return the events of a JSON list, or those with a duration as a table; raise BadJson."""
        self.memory += memory_events(text)
        if (table := self._scanner.scan(text)) is not None:
            return table
        try:
            return self._decode(text)
        except (DecodeError, UnicodeDecodeError, RecursionError):
            text = repair(text)
        if (table := self._scanner.scan(text)) is not None:
            return table
        try:
            return self._decode(text)
        except (DecodeError, RecursionError) as error:
            raise _bad(error) from error

    def _decode(self, text: bytes) -> list[Event]:
        try:
            return _EVENTS.decode(text)
        except ValidationError:
            events: list[Event] = []
            for each in _EACH.decode(text):
                try:
                    events.append(_EVENT.decode(each))
                except ValidationError:
                    self.odd += 1
            return events


def properties(text: bytes) -> tuple[Properties, BadJson | None]:
    """Return the properties of a document without its events, and where it is not JSON.

    Those that are broken, or have an unknown form, are left out.
    """
    text = repair(text)
    try:
        return _PROPERTIES.decode(text), None
    except (DecodeError, RecursionError) as error:
        problem = None if isinstance(error, ValidationError) else _bad(error)
    about, characters = Properties(), text.decode()
    for known in structs.fields(Properties):
        with suppress(ValueError, RecursionError):
            start = characters.index(f'"{known.encode_name}"') + len(known.encode_name) + 2
            start = characters.index(":", start) + 1
            value, _ = _JSON.raw_decode(characters[start:].lstrip())
            setattr(about, known.name, convert(value, known.type))
    return about, problem


def _bad(error: DecodeError | RecursionError) -> BadJson:
    if isinstance(error, RecursionError):
        return BadJson("nested too deep", 0)
    match = _BYTE.search(str(error))
    problem = _BYTE.sub("", str(error)).removeprefix("JSON is malformed: ")
    return BadJson(problem, int(match[1]) if match else None)


def integer(value: Any) -> int:
    """Return an integer of 64 bits, given as such or last in a text (``GPU 7``), or `UNKNOWN`."""
    if isinstance(value, str):
        numbers = re.findall(r"-?\d+", value)
        value = int(numbers[-1]) if numbers and len(numbers[-1]) <= _DIGITS else UNKNOWN
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


def _integers(values: Sequence[Value]) -> NDArray[np.int64]:
    if set(map(type, values)) == {int}:
        with suppress(OverflowError):
            return np.fromiter(cast(Sequence[int], values), np.int64, len(values))
    return np.array([integer(value) for value in values], np.int64)


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
        whole = []
        for event in events:
            if event.ph == "X":
                whole.append(event)
            elif event.ph == "B":
                # A copy that does not keep the decoded text alive.
                begun = structs.replace(event, ts=event.ts.copy(), dur=event.dur.copy())
                self._open.setdefault((event.pid, event.tid), []).append(begun)
            elif event.ph != "E":
                continue
            elif waiting := self._open.get((event.pid, event.tid)):
                pair = waiting.pop()
                try:
                    start, end = (Decimal(bytes(at.ts).decode()) for at in (pair, event))
                    pair.dur = Raw(str(end - start))
                except (InvalidOperation, UnicodeDecodeError):
                    pair.dur = Raw(b"")
                whole.append(pair)
            else:
                self._unbegun += 1
        return whole
