"""Compact encoding of integer columns: deltas in the narrowest unsigned type, compressed."""

from __future__ import annotations

import zlib
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputrace.model.events import COLUMN_TYPES, Column, Events

_Ints = NDArray[np.int64]
_FAR: Final = 1 << 62
"""Columns with larger values are sent without deltas, which might overflow."""


class PackedColumn(msgspec.Struct, array_like=True, frozen=True):
    """Unsigned offsets above ``low``; with ``steps``, deltas to be summed up from ``first``."""

    name: str
    type: str
    low: int
    first: int
    steps: bool
    data: bytes


class PackedEvents(msgspec.Struct, array_like=True, frozen=True):
    """Rows of event columns; ends are encoded as durations."""

    rows: int
    columns: tuple[PackedColumn, ...]

    @property
    def size(self) -> int:
        """Return the encoded size of the columns in bytes."""
        return sum(len(column.data) for column in self.columns)


def pack(events: Events) -> PackedEvents:
    """Encode the rows, without loss."""
    columns = []
    for name in events.columns:
        values = getattr(events, name).astype(np.int64)
        if name == "end" and "start" in events.columns:
            values = values - events.start
        columns.append(_pack(name, values))
    return PackedEvents(len(events), tuple(columns))


def unpack(packed: PackedEvents) -> Events:
    """Decode the rows."""
    arrays: dict[str, Column] = {
        column.name: _unpack(column, packed.rows) for column in packed.columns
    }
    if {"start", "end"} <= arrays.keys():
        arrays["end"] = arrays["start"] + arrays["end"]
    return Events({name: arrays[name] for name in COLUMN_TYPES if name in arrays})


def _pack(name: str, values: _Ints) -> PackedColumn:
    if not len(values):
        return PackedColumn(name, "u1", 0, 0, False, b"")
    plain = _above(values)
    close = abs(int(values.min())) < _FAR and abs(int(values.max())) < _FAR
    steps = _above(np.diff(values)) if close and len(values) > 1 else plain
    stepwise = steps[1].itemsize < plain[1].itemsize
    low, numbers = steps if stepwise else plain
    data = zlib.compress(np.ascontiguousarray(numbers).tobytes(), 1)
    return PackedColumn(name, numbers.dtype.str[1:], low, int(values[0]), stepwise, data)


def _above(values: _Ints) -> tuple[int, NDArray[np.unsignedinteger]]:
    """Return the minimum, and all values minus it in the narrowest unsigned type."""
    low, high = int(values.min()), int(values.max())
    kind = np.min_scalar_type(high - low)
    return low, (values.view(np.uint64) - np.uint64(low % (1 << 64))).astype(kind)


def _unpack(column: PackedColumn, rows: int) -> _Ints:
    kind = np.dtype(f"<{column.type}")
    if kind.kind != "u":
        raise ValueError(f"a column of {kind}")
    length = max(rows - column.steps, 0)
    raw = zlib.decompressobj().decompress(column.data, length * kind.itemsize) if length else b""
    numbers = np.frombuffer(raw, kind, length).astype(np.uint64)
    values = (numbers + np.uint64(column.low % (1 << 64))).view(np.int64)
    if not column.steps:
        return values
    return np.concatenate([[column.first], column.first + np.cumsum(values)])
