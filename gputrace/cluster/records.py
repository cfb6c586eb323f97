"""What is to be done with a shard, and what is found, as bytes.

No more is made of them than dataclasses of the analyzers and plain values, and no more is called
than functions of the analyzers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from inspect import isfunction
from math import prod
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.kept import freeze, thaw_any
from gputrace.traces.cache import Kept

_HOME: Final = "gputrace.analyzers."
"""Where the functions are."""
_METHODS: Final = (
    "count",
    "place",
    "move",
    "read_calls",
    "forget_calls",
    "find_steps",
    "build_lanes",
    "add_waits",
)
"""What else may be asked of a shard."""
_PLACES: Final = "gputrace.cluster.placed"
"""What has dataclasses beside those of the analyzers."""


class _Column(msgspec.Struct, array_like=True):
    type: str
    shape: tuple[int, ...]
    data: bytes


class _Record(msgspec.Struct, array_like=True):
    text: bytes
    columns: list[_Column]


def to_bytes(value: Any) -> bytes:
    """A value of the analyzers as it travels."""
    kept = freeze(value)
    record = _Record(kept.text, [_column(column) for column in kept.columns])
    return zlib.compress(msgspec.msgpack.encode(record), 1)


def from_bytes(raw: bytes) -> Any:
    """The value that it was, lists as tuples.

    Raises ValueError, zlib.error or msgspec's errors for anything else; see `messages.understood`.
    """
    record = msgspec.msgpack.decode(zlib.decompress(raw), type=_Record)
    return thaw_any(Kept(record.text, [_array(column) for column in record.columns]), _PLACES)


def _column(array: NDArray[Any]) -> _Column:
    return _Column(array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())


def _array(column: _Column) -> NDArray[Any]:
    kind = np.dtype(column.type)
    if kind.kind not in "biuf":
        raise ValueError(f"a column of {kind}")
    array: NDArray[Any] = np.frombuffer(column.data, kind, prod(column.shape))
    return array.reshape(column.shape)


def name_of(work: Callable[..., Any] | str) -> str:
    """How a function travels; a method of a shard by its name."""
    return work if isinstance(work, str) else f"{work.__module__}:{work.__qualname__}"


def work_of(name: str) -> Callable[..., Any] | str:
    """What is to be called; raises ValueError for anything but an analyzer's function."""
    if name in _METHODS:
        return name
    module, _, own = name.rpartition(":")
    found = getattr(import_module(module), own, None) if module.startswith(_HOME) else None
    if not isfunction(found) or found.__module__ != module:
        raise ValueError(f"{name!r} is no function of an analyzer")
    return found
