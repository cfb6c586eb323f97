"""Columns that are worked on but not held in memory: in a file without a name, mapped when read.

What is mapped counts as memory of the process until it lets go of it; the file's pages then are the
system's, which keeps them as long as it has room. The file ends with the process, however that
ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from copy import copy
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any, Final, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from gputrace.errors import MissingError
from gputrace.traces.events import Events
from gputrace.traces.ids import Lookup
from gputrace.traces.nsys.report import cache_folder
from gputrace.traces.trace import Trace

LARGE: Final = 1 << 30
"""Bytes of a trace's files from which on it is not held: its columns are half as much again."""
_EXTENT: Final = 1 << 28
"""Bytes that are mapped at once, at least: few mappings serve many columns."""
_SMALL: Final = 1 << 14
"""Bytes of a column that is not worth a place in the file."""
_ALIGNED: Final = 64

_Value = TypeVar("_Value")
Array = NDArray[Any]


def scratch_for(trace: Trace) -> Scratch | None:
    """Where the columns of a trace go that is too large to hold; None where it is not."""
    return Scratch() if trace.cut_bytes > LARGE else None


class Scratch:
    """The file. Columns in it stay readable as long as anybody has them, and are never written."""

    def __init__(self) -> None:
        folder = cache_folder()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise _no_room(error) from None
        weakref.finalize(self, os.close, self._descriptor)
        self._mapped: list[mmap.mmap] = []
        self._free = self._start = self._end = 0

    def room(self, kind: Any, length: int) -> Room:
        """A place for a column that comes in parts."""
        kind = np.dtype(kind)
        if not length:
            return Room(self, 0, np.empty(0, kind))
        place = self._place(kind.itemsize * length)
        return Room(self, place, np.frombuffer(self._mapped[-1], kind, length, place - self._start))

    def keep(self, value: _Value) -> _Value:
        """The same with its columns in the file: of a column, events, a dataclass, or several.

        What a dataclass works out once is worked out now, and kept too.
        """
        found: Any = value
        if isinstance(value, np.ndarray):
            found = self._kept(value)
        elif isinstance(value, Events):
            found = Events({name: self.keep(getattr(value, name)) for name in value.columns})
        elif isinstance(value, dict):
            found = {key: self.keep(one) for key, one in value.items()}
        elif type(value) is tuple:
            found = tuple(map(self.keep, found))
        elif hasattr(value, "__dict__") and (is_dataclass(value) or isinstance(value, Lookup)):
            found = copy(value)
            for name in _worked_out_once(type(value)):
                getattr(found, name)
            vars(found).update({name: self.keep(one) for name, one in vars(found).items()})
        return found  # type: ignore[no-any-return]

    def let_go(self) -> None:
        """Gives the memory of all that was read back to the system."""
        for mapped in self._mapped:
            mapped.madvise(mmap.MADV_DONTNEED)

    def _kept(self, column: Array) -> Array:
        base: Any = column.base
        here = isinstance(base, memoryview) and base.obj in self._mapped
        if here or column.nbytes < _SMALL:
            return column
        room = self.room(column.dtype, len(column))
        room.append(column)
        return room.column

    def write(self, column: Array, place: int) -> None:
        """Writes to the file itself, where a full disk is an error and not a signal."""
        left = np.ascontiguousarray(column).data.cast("B")
        try:
            while left:
                done = os.pwrite(self._descriptor, left, place)
                left, place = left[done:], place + done
        except OSError as error:
            raise _no_room(error) from None

    def _place(self, size: int) -> int:
        """Where so many bytes go, in the last mapping."""
        place = -(-self._free // _ALIGNED) * _ALIGNED
        if place + size > self._end:
            place = self._start = self._end
            extent = max(
                _EXTENT, -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            )
            self._end += extent
            self._map(place, extent)
        self._free = place + size
        return place

    def _map(self, place: int, size: int) -> None:
        try:
            os.ftruncate(self._descriptor, place + size)
            mapped = mmap.mmap(
                self._descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ, offset=place
            )
        except OSError as error:
            raise _no_room(error) from None
        self._mapped.append(mapped)


class OneByOne(Sequence[_Value]):
    """Things whose columns are in a scratch file, of which one is looked at after another."""

    def __init__(self, things: Sequence[_Value], scratch: Scratch) -> None:
        self._things, self._scratch = things, scratch
        self._last = 0

    @overload
    def __getitem__(self, index: int) -> _Value: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Value]: ...
    def __getitem__(self, index: int | slice) -> _Value | Sequence[_Value]:
        if isinstance(index, int) and index != self._last:
            self._scratch.let_go()
            self._last = index
        return self._things[index]

    def __len__(self) -> int:
        return len(self._things)


class Room:
    """A column that is being written from its start on."""

    def __init__(self, scratch: Scratch, place: int, column: Array) -> None:
        self.column = column
        self._scratch, self._place = scratch, place

    def append(self, part: Array) -> None:
        """Takes the next part; raises MissingError where the disk is full."""
        part = part.astype(self.column.dtype, copy=False)
        self._scratch.write(part, self._place)
        self._place += part.nbytes


def _worked_out_once(kind: type) -> list[str]:
    return [name for name, what in vars(kind).items() if isinstance(what, cached_property)]


def _no_room(error: OSError) -> MissingError:
    return MissingError(
        f"{cache_folder()}: no room for a trace that is larger than what is held in memory "
        f"({error.strerror}); make some, or name another folder in XDG_CACHE_HOME"
    )
