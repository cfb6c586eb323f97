"""Encoding of operations on a shard, and of their results, as bytes.

Decoding creates only plain values and dataclasses of the analyzers, and resolves only functions of
the analyzers.
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

from gputrace.analyzers.result_cache import dump_columns, load_any_columns
from gputrace.store.cache import Kept

_HOME: Final = ("gputrace.analyzers.", "gputrace.model.")
"""Packages of the callable functions."""
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
"""Methods of a shard that may be called."""
_PLACES: Final = "gputrace.cluster.placed"
"""Module with more dataclasses, beside those of the analyzers."""


class _Column(msgspec.Struct, array_like=True):
    type: str
    shape: tuple[int, ...]
    data: bytes


class _Record(msgspec.Struct, array_like=True):
    text: bytes
    columns: list[_Column]


def to_bytes(value: Any) -> bytes:
    """Encode a value of the analyzers."""
    kept = dump_columns(value)
    record = _Record(kept.text, [_column(column) for column in kept.columns])
    return zlib.compress(msgspec.msgpack.encode(record), 1)


def from_bytes(raw: bytes) -> Any:
    """Decode a value; lists become tuples.

    Raises ValueError, zlib.error or msgspec's errors for invalid bytes; see `messages.understood`.
    """
    record = msgspec.msgpack.decode(zlib.decompress(raw), type=_Record)
    return load_any_columns(
        Kept(record.text, [_array(column) for column in record.columns]), _PLACES
    )


def _column(array: NDArray[Any]) -> _Column:
    return _Column(array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes())


def _array(column: _Column) -> NDArray[Any]:
    kind = np.dtype(column.type)
    if kind.kind not in "biuf":
        raise ValueError(f"a column of {kind}")
    array: NDArray[Any] = np.frombuffer(column.data, kind, prod(column.shape))
    return array.reshape(column.shape)


def name_of(work: Callable[..., Any] | str) -> str:
    """Return the name of a function on the wire; of a method of a shard, its own name."""
    return work if isinstance(work, str) else f"{work.__module__}:{work.__qualname__}"


def work_of(name: str) -> Callable[..., Any] | str:
    """Resolve a name on the wire; raises ValueError for anything but an analyzer's function."""
    if name in _METHODS:
        return name
    module, _, attribute = name.rpartition(":")
    work = getattr(import_module(module), attribute, None) if module.startswith(_HOME) else None
    if not isfunction(work) or work.__module__ != module:
        raise ValueError(f"{name!r} is no function of an analyzer")
    return work
