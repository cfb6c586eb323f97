"""Perfetto's own format: a stream of protocol buffers, smaller than JSON and quicker to open.

A process is a track whose children are its threads' tracks; a slice is the packet of its beginning
and that of its end. Field numbers are those of perfetto/trace/trace_packet.proto and
track_event/*.proto. Names are written once, before the first packet that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any, BinaryIO, Final

from gputrace.model.events import Events, Kind

_SEQUENCE: Final = 1
_CLEARED, _NEEDED = 1, 2
"""Flags of packets: what was written once before no longer counts, or is needed."""
_BEGIN, _END = 1, 2
"""Types of events of a track."""
_ROWS_AT_ONCE: Final = 8_192

KIND_NAMES: Final = {
    int(kind): kind.name.lower().replace("_", " ").replace("h2d", "host to device")
    .replace("d2h", "device to host").replace("d2d", "device to device")
    for kind in Kind
}  # fmt: skip
"""Names of events that have none, by their kind."""

Slice = tuple[int, int, str, Mapping[str, object]]
"""Start, end, name, arguments."""


def _varint(number: int) -> bytes:
    data = bytearray()
    number &= (1 << 64) - 1
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _data(field: int, value: bytes | str) -> bytes:
    content = value.encode(errors="replace") if isinstance(value, str) else value
    return _varint(field << 3 | 2) + _varint(len(content)) + content


class PacketWriter:
    """Writer of packets; its methods are those of the writer of JSON."""

    def __init__(self, file: BinaryIO, origin: int) -> None:
        self._file, self._origin = file, origin
        self._processes: set[int] = set()
        self._tracks = count(1 << 32)
        self._names: dict[str, int] = {}
        self._arguments: dict[str, int] = {}
        self._packet(_number(13, _CLEARED))

    def process(self, id: int, name: str) -> None:
        """Name a process, and sort it below earlier ones."""
        if id not in self._processes:
            self._processes.add(id)
            about = _number(1, id) + _data(6, name) + _number(3, id)
            self._packet(_data(60, _number(1, id) + _data(2, name) + _data(3, about)))

    def thread(self, process: int, name: str, order: int | None = None) -> int:
        """Add a thread, which is a track, and return its id; sort it by ``order``, else last."""
        id = next(self._tracks)
        rank = id - (1 << 32) if order is None else order
        track = _number(1, id) + _data(2, name) + _number(5, process) + _number(12, rank)
        self._packet(_data(60, track))
        return id

    def slices(self, process: int, thread: int, slices: Iterable[Slice]) -> None:
        """Write nested slices, each after the one that encloses it."""
        self._events(
            thread,
            (
                (start, end, self._name(name), self._annotations(arguments))
                for start, end, name, arguments in slices
            ),
        )

    def rows(self, process: int, thread: int, events: Events, names: Mapping[int, str]) -> None:
        """Write events as slices; also those of zero length, so that all are clickable."""
        columns: list[Any] = [events.start, events.end, events.kind, events.name]
        more = "bytes" in events.columns
        columns += [events.correlation, events.bytes] if more else []

        def each() -> Iterator[tuple[int, int, int, bytes]]:
            for first in range(0, len(events), _ROWS_AT_ONCE):
                part = (column[first : first + _ROWS_AT_ONCE].tolist() for column in columns)
                for start, end, kind, id, *values in zip(*part, strict=True):
                    name = self._name(names[id] if id in names else KIND_NAMES[kind])
                    pairs = zip(("correlation", "bytes"), values, strict=False)
                    about = {key: value for key, value in pairs if key != "bytes" or value >= 0}
                    yield start, end, name, self._annotations(about)

        self._events(thread, each())

    def _events(self, thread: int, slices: Iterable[tuple[int, int, int, bytes]]) -> None:
        """Write the beginnings and ends of slices in order of time."""
        track, open_ends = _number(11, thread), list[int]()
        for start, end, name, arguments in slices:
            while open_ends and open_ends[-1] <= start:
                self._event(open_ends.pop(), _number(9, _END) + track)
            self._event(start, _number(9, _BEGIN) + track + _number(10, name) + arguments)
            open_ends.append(end)
        while open_ends:
            self._event(open_ends.pop(), _number(9, _END) + track)

    def _event(self, time: int, event: bytes) -> None:
        self._packet(_number(8, time - self._origin) + _number(13, _NEEDED) + _data(11, event))

    def _name(self, text: str) -> int:
        return self._interned(2, self._names, text)

    def _interned(self, field: int, known: dict[str, int], text: str) -> int:
        """Return the number of a text, which is written if it is new."""
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            entry = _data(field, _number(1, number) + _data(2, text))
            self._packet(_number(13, _NEEDED) + _data(12, entry))
        return number

    def _annotations(self, arguments: Mapping[str, object]) -> bytes:
        parts = b""
        for key, value in arguments.items():
            name = _number(1, self._interned(3, self._arguments, key))
            whole = isinstance(value, int) and not isinstance(value, bool)
            content = _number(4, value) if whole else _data(6, str(value))  # type: ignore[arg-type]
            parts += _data(4, name + content)
        return parts

    def _packet(self, content: bytes) -> None:
        self._file.write(_data(1, content + _number(10, _SEQUENCE)))
