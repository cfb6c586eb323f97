"""Dataclasses of analyzers as text and columns, and back: what the cache keeps, and what travels.

Only dataclasses and named tuples of the analyzers are ever made of an entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.cache import Kept
from gputrace.traces.events import Events

_PACKAGES: Final = ("gputrace.analyzers.", "gputrace.traces.trace")
"""Where the classes are that may be kept."""
_Record = TypeVar("_Record")


def freeze(value: Any) -> Kept:
    """A value as an entry of the cache; raises TypeError for what no analyzer makes."""
    packer = _Packer()
    return Kept(json.dumps(packer.pack(value)).encode(), packer.columns)


def thaw(entry: Kept, kind: type[_Record]) -> _Record | None:
    """The value of an entry; None where it makes no sense, or is of another kind."""
    try:
        value = thaw_any(entry)
    except ValueError:
        return None
    return value if isinstance(value, kind) else None


def thaw_any(entry: Kept, *packages: str) -> Any:
    """The value of an entry, lists as tuples; raises ValueError where it makes no sense.

    ``packages`` have more classes that may be made.
    """
    try:
        return _Unpacker(entry.columns, (*_PACKAGES, *packages)).unpack(json.loads(entry.text))
    except (LookupError, TypeError, AttributeError, ImportError, RecursionError) as error:
        raise ValueError(f"no value: {error!r}") from error


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


class _Packer:
    """Turns values into plain ones, in which columns are numbers of `columns`."""

    def __init__(self) -> None:
        self.columns: list[NDArray[Any]] = []
        self._places: dict[int, int] = {}

    def pack(self, value: Any) -> Any:
        """Plain values as they are; others as ``[letter, content]``."""
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.ndarray):
            return ["c", self._place(value)]
        if isinstance(value, Events):
            return ["e", {name: self.pack(getattr(value, name)) for name in value.columns}]
        if _is_record(kind := type(value)):
            name = f"{kind.__module__}:{kind.__name__}"
            return ["o", name, [self.pack(part) for part in _parts(value)]]
        if isinstance(value, Mapping):
            return ["m", [[self.pack(key), self.pack(part)] for key, part in value.items()]]
        if isinstance(value, (tuple, list, set, frozenset)):
            letter = "t" if isinstance(value, (tuple, list)) else "s"
            return [letter, [self.pack(part) for part in value]]
        raise TypeError(f"a {type(value).__name__} cannot be kept")

    def _place(self, column: NDArray[Any]) -> int:
        """Equal columns that are one object are kept once; they stay alive in the list."""
        place = self._places.setdefault(id(column), len(self.columns))
        if place == len(self.columns):
            self.columns.append(column)
        return place


def _parts(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return list(value)
    return [getattr(value, field.name) for field in fields(value)]


class _Unpacker:
    """Makes values of plain ones; raises LookupError for classes that no analyzer has."""

    def __init__(self, columns: Sequence[NDArray[Any]], packages: tuple[str, ...]) -> None:
        self._columns, self._packages = columns, packages

    def unpack(self, packed: Any) -> Any:
        if not isinstance(packed, list):
            return packed
        letter, content = packed[0], packed[1]
        if letter == "c":
            return self._columns[content]
        if letter == "e":
            return Events({name: self.unpack(column) for name, column in content.items()})
        if letter == "o":
            return self._class(content)(*map(self.unpack, packed[2]))
        if letter == "m":
            return {self.unpack(key): self.unpack(part) for key, part in content}
        return (frozenset if letter == "s" else tuple)(map(self.unpack, content))

    def _class(self, name: str) -> Any:
        """The dataclass or named tuple of that name."""
        module, _, own = name.partition(":")
        if not module.startswith(self._packages):
            raise LookupError(name)
        found = getattr(import_module(module), own, None)
        if not isinstance(found, type) or not _is_record(found):
            raise LookupError(name)
        return found
