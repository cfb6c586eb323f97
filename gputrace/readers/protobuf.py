"""Wire format of protocol buffers, decoded for one message or for columns of many at a time."""

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
Positions = NDArray[np.int64]

_MOST_VARINT_BYTES: Final = 10
_PADDING: Final = 16
"""Zeros after the data, so that truncated data can be decoded before it is noticed."""


class WireError(ValueError):
    """The bytes are not a protobuf message."""


class Field(NamedTuple):
    """A field of one message."""

    number: int
    wire: int
    value: int
    """A number; of bytes, where they start."""
    end: int
    """End of bytes; the position after a number."""


class Fields(NamedTuple):
    """At most one field of each of many messages."""

    row: Positions
    """Index of the message."""
    number: Positions
    wire: NDArray[np.uint8]
    value: Numbers
    """Values as in `Field`; for numbers of fixed width, where they start."""
    end: Positions


class Wire:
    """Decoder of bytes, which it takes over and pads; raises WireError for invalid messages."""

    def __init__(self, data: bytearray) -> None:
        self.size = len(data)
        data += bytes(_PADDING)
        self._data = data
        self._array = np.frombuffer(self._data, np.uint8)

    def text(self, start: int, end: int) -> str:
        """Decode text, replacing invalid UTF-8."""
        return self._data[start:end].decode("utf-8", "replace")

    def fields(self, start: int, end: int) -> Iterator[Field]:
        """Yield the fields of one message, in order."""
        while start < end:
            tag, start = self._varint(start)
            wire = tag & 7
            if wire == VARINT:
                value, start = self._varint(start)
            elif wire == BYTES:
                size, value = self._varint(start)
                start = value + size
            elif wire in (FIXED64, FIXED32):
                first, start = start, start + (8 if wire == FIXED64 else 4)
                value = int.from_bytes(self._data[first:start], "little")
            else:
                raise WireError(f"wire type {wire} at byte {start:,}")
            if start > end:
                raise WireError(f"cut short at byte {self.size:,}")
            yield Field(tag >> 3, wire, value, start)

    def _varint(self, position: int) -> tuple[int, int]:
        value = shift = 0
        for byte in self._data[position : position + _MOST_VARINT_BYTES]:
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF, position
            shift += 7
        raise WireError(f"no number at byte {position:,}")

    def fields_of_all(self, start: Positions, end: Positions) -> Iterator[Fields]:
        """Yield the first field of all messages that have one, then the second, and so on."""
        row = np.flatnonzero(start < end)
        position, end = start[row], end[row]
        while len(row):
            tag, position = self._varints(position)
            wire = (tag & np.uint64(7)).astype(np.uint8)
            value, position = self._values(wire, position)
            if (position > end).any():
                raise WireError(f"cut short at byte {self.size:,}")
            yield Fields(row, (tag >> np.uint64(3)).astype(np.int64), wire, value, position)
            more = position < end
            row, position, end = row[more], position[more], end[more]

    def _values(self, wire: NDArray[np.uint8], position: Positions) -> tuple[Numbers, Positions]:
        known = np.isin(wire, (VARINT, FIXED64, BYTES, FIXED32))
        if not known.all():
            bad = int(np.argmin(known))
            raise WireError(f"wire type {wire[bad]} at byte {position[bad]:,}")
        value, after = position.astype(np.uint64), position.copy()
        after[wire == FIXED64] += 8
        after[wire == FIXED32] += 4
        for of, is_size in ((VARINT, False), (BYTES, True)):
            rows = np.flatnonzero(wire == of)
            number, after[rows] = self._varints(position[rows])
            value[rows] = after[rows].astype(np.uint64) if is_size else number
            if is_size:
                # A length beyond the data is as wrong as one beyond 64 bits.
                after[rows] += np.minimum(number, np.uint64(self.size + 1)).astype(np.int64)
        return value, after

    def _varints(self, position: Positions) -> tuple[Numbers, Positions]:
        """Return the varint at each position, and the positions after them."""
        # Positions past the end decode as zeros, and exceed the ends of their messages.
        last = len(self._array) - 1
        byte = self._array[np.minimum(position, last)]
        value, after = (byte & 0x7F).astype(np.uint64), position + 1
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

    def messages(
        self, start: int, end: int, number: int
    ) -> tuple[Positions, Positions, list[Field]]:
        """Return starts and ends of the messages in one field of a message, and other fields."""
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
