"""Protobuf's encoding, without its library: protobuf.dev/programming-guides/encoding.

A message is a row of fields: a varint that holds a number and a wire type, then a value. The few
large messages are decoded by plain loops; of the many small ones, the n-th field of all at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

Numbers = NDArray[np.uint64]
Places = NDArray[np.int64]

_MOST_VARINT_BYTES: Final = 10
_PADDING: Final = 16
"""Zeros after the data, so that what is cut short can be decoded before it is found out."""


class WireError(ValueError):
    """The bytes are no protobuf message."""


class Field(NamedTuple):
    """A field of one message."""

    number: int
    wire: int
    value: int
    """A number; of bytes, where they start."""
    end: int
    """Where bytes end; the place after a number."""


class Fields(NamedTuple):
    """At most one field of each of many messages."""

    row: Places
    """Index of the message."""
    number: Places
    wire: NDArray[np.uint8]
    value: Numbers
    """As in `Field`; of numbers of fixed width, where they start."""
    end: Places


class Wire:
    """Bytes to decode, which it takes over; all places are offsets in them.

    Raises WireError for what is no message.
    """

    def __init__(self, data: bytearray) -> None:
        self.size = len(data)
        data += bytes(_PADDING)
        self._data = data
        self._array = np.frombuffer(self._data, np.uint8)

    def text(self, start: int, end: int) -> str:
        """Bytes as text; what is not UTF-8 is replaced."""
        return self._data[start:end].decode("utf-8", "replace")

    def fields(self, start: int, end: int) -> Iterator[Field]:
        """The fields of one message, in order."""
        while start < end:
            tag, start = self._varint(start)
            value, start = self._value(tag & 7, start)
            if start > end:
                raise WireError(f"cut short at byte {self.size:,}")
            yield Field(tag >> 3, tag & 7, value, start)

    def _value(self, wire: int, place: int) -> tuple[int, int]:
        """A value, and the place after it."""
        if wire == VARINT:
            return self._varint(place)
        if wire == BYTES:
            size, place = self._varint(place)
            return place, place + size
        if wire in (FIXED64, FIXED32):
            width = 8 if wire == FIXED64 else 4
            return int.from_bytes(self._data[place : place + width], "little"), place + width
        raise WireError(f"wire type {wire} at byte {place:,}")

    def _varint(self, place: int) -> tuple[int, int]:
        value = shift = 0
        for byte in self._data[place : place + _MOST_VARINT_BYTES]:
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF, place
            shift += 7
        raise WireError(f"no number at byte {place:,}")

    def fields_of_all(self, start: Places, end: Places) -> Iterator[Fields]:
        """The first field of all messages that have one, then the second, and so on."""
        row = np.flatnonzero(start < end)
        place, end = start[row], end[row]
        while len(row):
            tag, place = self._varints(place)
            wire = (tag & np.uint64(7)).astype(np.uint8)
            value, place = self._values(wire, place)
            if (place > end).any():
                raise WireError(f"cut short at byte {self.size:,}")
            yield Fields(row, (tag >> np.uint64(3)).astype(np.int64), wire, value, place)
            more = place < end
            row, place, end = row[more], place[more], end[more]

    def _values(self, wire: NDArray[np.uint8], place: Places) -> tuple[Numbers, Places]:
        known = np.isin(wire, (VARINT, FIXED64, BYTES, FIXED32))
        if not known.all():
            bad = int(np.argmin(known))
            raise WireError(f"wire type {wire[bad]} at byte {place[bad]:,}")
        value, after = place.astype(np.uint64), place.copy()
        after[wire == FIXED64] += 8
        after[wire == FIXED32] += 4
        for of, is_size in ((VARINT, False), (BYTES, True)):
            rows = np.flatnonzero(wire == of)
            number, after[rows] = self._varints(place[rows])
            value[rows] = after[rows].astype(np.uint64) if is_size else number
            if is_size:
                # A length beyond the data is as wrong as one beyond 64 bits.
                after[rows] += np.minimum(number, np.uint64(self.size + 1)).astype(np.int64)
        return value, after

    def _varints(self, place: Places) -> tuple[Numbers, Places]:
        """A varint at each place, and the places after them."""
        # Places past the end decode as zeros, and are found out by their messages' ends.
        last = len(self._array) - 1
        byte = self._array[np.minimum(place, last)]
        value, after = (byte & 0x7F).astype(np.uint64), place + 1
        rows = np.flatnonzero(byte >= 0x80)
        shift = 7
        while len(rows):
            if shift >= 7 * _MOST_VARINT_BYTES:
                raise WireError(f"no number at byte {int(after[rows[0]]):,}")
            byte = self._array[np.minimum(after[rows], last)]
            value[rows] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
            after[rows] += 1
            rows = rows[byte >= 0x80]
            shift += 7
        return value, after

    def messages(self, start: int, end: int, number: int) -> tuple[Places, Places, list[Field]]:
        """Starts and ends of the messages in one field of a message, and its other fields."""
        starts, ends, others = array("q"), array("q"), []
        data, tag = self._data, number << 3 | BYTES
        while start < end:
            if data[start] == tag and (size := data[start + 1]) < 0x80:  # As nearly all do.
                starts.append(start + 2)
                start += 2 + size
                ends.append(start)
                continue
            field = next(self.fields(start, end))
            if field.number == number and field.wire == BYTES:
                starts.append(field.value)
                ends.append(field.end)
            else:
                others.append(field)
            start = field.end
        if start > end:
            raise WireError(f"cut short at byte {self.size:,}")
        return np.array(starts, np.int64), np.array(ends, np.int64), others
