"""Arrow integer arrays copied into numpy columns, NULL as -1."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NULL: Final = -1
"""What NULL becomes."""
_WORD: Final = 4
"""Bytes of a 32-bit number in a BLOB."""

Integers = NDArray[np.signedinteger[Any]]


class Growing:
    """A column being filled; doubles where the number of rows is not known beforehand."""

    def __init__(self, room: Integers) -> None:
        self._values = room
        self._length = 0

    def append(self, chunk: Any) -> None:
        """Adds an Arrow integer array; raises ValueError for any other type."""
        end = self._length + len(chunk)
        if end > len(self._values):
            self._values = np.resize(self._values, max(end, 2 * len(self._values)))
        self._values[self._length : end] = fitting(_plain_values(chunk), self._values.dtype)
        self._length = end

    def array(self) -> Integers:
        return self._values[: self._length]


def fitting(values: Any, kind: np.dtype[Any]) -> Any:
    """Values that a narrower type cannot hold as NULL: no id of that size was ever given."""
    if kind.itemsize == 8 or not isinstance(values, np.ndarray) or not len(values):
        return values
    limits = np.iinfo(kind)
    if values.max() <= limits.max and values.min() >= limits.min:
        return values
    return np.where((values > limits.max) | (values < limits.min), NULL, values)


def _plain_values(chunk: Any) -> Any:
    """What numpy can copy out of an Arrow integer array; its own ways to it import pandas."""
    import pyarrow

    if pyarrow.types.is_null(chunk.type):
        return NULL
    if pyarrow.types.is_binary(chunk.type):
        return _words(chunk)
    if not pyarrow.types.is_int64(chunk.type):
        raise ValueError(f"{chunk.type} in an integer column")
    if not len(chunk):
        return ()
    known, values = chunk.buffers()
    full = np.frombuffer(values, np.int64, len(chunk), 8 * chunk.offset)
    if not chunk.null_count:
        return full
    bits = np.unpackbits(np.frombuffer(known, np.uint8), bitorder="little")
    return np.where(bits[chunk.offset : chunk.offset + len(chunk)], full, NULL)


def _words(chunk: Any) -> NDArray[np.uint32]:
    """BLOBs of four bytes as little-endian numbers."""
    offsets = np.frombuffer(chunk.buffers()[1], np.int32, len(chunk) + 1, 4 * chunk.offset)
    if chunk.null_count or (np.diff(offsets) != _WORD).any():
        raise ValueError("BLOBs that are no 32-bit numbers in an integer column")
    if not len(chunk):
        return np.empty(0, np.uint32)
    return np.frombuffer(chunk.buffers()[2], "<u4", len(chunk), int(offsets[0]))
