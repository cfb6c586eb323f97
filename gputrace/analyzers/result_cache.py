"""Cache of earlier analyses of unchanged files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.pipeline import Options
from gputrace.model.events import Events
from gputrace.plugins import plugins
from gputrace.store.cache import Kept, is_known, key_of, load, store_in_background

_Answer = TypeVar("_Answer")


class ResultCache:
    """Cached results of files and folders, as they are when this is created.

    Where readers or analyzers of plugins are installed, nothing: their code may change unseen.
    """

    def __init__(self, paths: Sequence[Path | str], windows: bool = False) -> None:
        self._paths = [Path(path) for path in paths]
        # Names are shown as they were given, and windows alone may be read in another way.
        self._given = f"{[str(path) for path in paths]} {windows}"
        plugged = plugins("readers") or plugins("analyzers")
        self._files = None if plugged else key_of(self._paths, "")

    @property
    def any(self) -> bool:
        """Return whether anything is cached for these files, which means that they could
        be opened.
        """
        return is_known(self._files)

    def find(self, kind: type[_Answer], options: Options) -> _Answer | None:
        """An analysis, or a scene, that was made with the same options; None where none was."""
        if not self.any:
            return None
        entry = load(self._key(kind, options))
        return entry and load_columns(entry, kind)

    def keep(self, answer: object, options: Options) -> None:
        """Keeps one for the next time, unless its files changed since."""
        if self._files is not None and key_of(self._paths, "") == self._files:
            store_in_background(self._key(type(answer), options), lambda: dump_columns(answer))

    def _key(self, kind: type, options: Options) -> str | None:
        return key_of(self._paths, f"{kind.__name__} {options} {self._given}")


_PACKAGES: Final = ("gputrace.analyzers.", "gputrace.model.")
"""Modules of the classes that may be cached."""
_Record = TypeVar("_Record")


def dump_columns(value: Any) -> Kept:
    """A value as an entry of the cache; raises TypeError for what no analyzer makes."""
    packer = _Packer()
    return Kept(json.dumps(packer.pack(value)).encode(), packer.columns)


def load_columns(entry: Kept, kind: type[_Record]) -> _Record | None:
    """The value of an entry; None where it makes no sense, or is of another kind."""
    try:
        value = load_any_columns(entry)
    except ValueError:
        return None
    return value if isinstance(value, kind) else None


def load_any_columns(entry: Kept, *packages: str) -> Any:
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
