"""Out-of-core columns in an unnamed spill file, memory-mapped for reading.

Mapped pages count as memory of the process until they are released; they then belong to the page
cache, which keeps them while there is room. The file vanishes with the process, however it ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from functools import cache, cached_property
from typing import Any, Final, TypeVar, overload

import numpy as np
from msgspec.structs import force_setattr
from numpy.typing import NDArray

from gputrace.errors import MissingError
from gputrace.model.events import Events, IdLookup
from gputrace.model.struct import Struct
from gputrace.store.cache import cache_folder

LARGE: Final = 1 << 30
"""Bytes of trace files above which columns are spilled; columns take 1.5 times as much."""
_EXTENT: Final = 1 << 28
"""Minimum bytes per mapping, so that few mappings serve many columns."""
_KEPT: Final = 1 << 27
"""Bytes, mapped or freed, by which a process may grow until they are released."""
_LEAST_SPILLED: Final = 1 << 14
"""Bytes below which a column stays in memory."""

_Value = TypeVar("_Value")
Array = NDArray[Any]


class SpillFile:
    """Spill file. Its columns are read-only and stay valid as long as they are referenced."""

    def __init__(self) -> None:
        folder = cache_folder()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            import tempfile

            with tempfile.TemporaryFile(dir=folder) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise _no_room(error) from None
        weakref.finalize(self, os.close, self._descriptor)
        self._mapped: list[mmap.mmap] = []
        self._free = self._start = self._end = 0
        self._shared, self._anonymous = _memory()[0], 0

    def room(self, kind: Any, length: int) -> Room:
        """Reserve space for a column that is written in parts."""
        kind = np.dtype(kind)
        if not length:
            return Room(self, 0, np.empty(0, kind))
        offset = self._allocate(kind.itemsize * length)
        view = np.frombuffer(self._mapped[-1], kind, length, offset - self._start)
        return Room(self, offset, view)

    def spill(self, value: _Value) -> _Value:
        """Copy a column, events, a struct, or a dict or tuple of them, with columns in the file.

        Cached properties of structs are computed now, and spilled, too.
        """
        spilled: Any = value
        if isinstance(value, np.ndarray):
            spilled = self._spill_array(value)
        elif isinstance(value, Events):
            spilled = Events({name: self.spill(getattr(value, name)) for name in value.columns})
        elif isinstance(value, dict):
            spilled = {key: self.spill(item) for key, item in value.items()}
        elif type(value) is tuple:
            spilled = tuple(map(self.spill, spilled))
        elif hasattr(value, "__dict__") and isinstance(value, (Struct, IdLookup)):
            spilled = self._spill_fields(value)
        return spilled  # type: ignore[no-any-return]

    def _spill_fields(self, value: Any) -> Any:
        spilled = copy(value)
        vars(spilled).update(vars(value))  # Structs are copied without what they have cached.
        for name, attribute in vars(type(value)).items():
            if isinstance(attribute, cached_property):
                getattr(spilled, name)
        vars(spilled).pop("_memory", None)  # Addresses of columns that are elsewhere now.
        for name in getattr(value, "__struct_fields__", ()):
            force_setattr(spilled, name, self.spill(getattr(spilled, name)))
        vars(spilled).update({name: self.spill(item) for name, item in vars(spilled).items()})
        return spilled

    def let_go(self) -> None:
        """Release the mapped pages read so far, and freed memory, to the system if it is much."""
        shared, anonymous = _memory()
        if shared - self._shared > _KEPT:
            for mapped in self._mapped:
                mapped.madvise(mmap.MADV_DONTNEED)
            self._shared = _memory()[0]
        if anonymous - self._anonymous > _KEPT:
            with suppress(OSError, AttributeError):  # Not glibc.
                ctypes.CDLL(None).malloc_trim(0)
            self._anonymous = _memory()[1]

    def _spill_array(self, column: Array) -> Array:
        base: Any = column.base
        base = base.base if isinstance(base, np.ndarray) else base  # A part of a column.
        spilled = isinstance(base, memoryview) and base.obj in self._mapped
        if spilled or column.nbytes < _LEAST_SPILLED or not any(column.strides):
            return column
        room = self.room(column.dtype, len(column))
        room.append(column)
        return room.column

    def write(self, column: Array, offset: int) -> None:
        """Write to the file, not the mapping, so that a full disk raises and does not signal."""
        left = np.ascontiguousarray(column).data.cast("B")
        try:
            while left:
                done = os.pwrite(self._descriptor, left, offset)
                left, offset = left[done:], offset + done
        except OSError as error:
            raise _no_room(error) from None

    def _allocate(self, size: int) -> int:
        """Reserve bytes in the last mapping, or a new one; return their offset in the file."""
        offset = -(-self._free // 64) * 64
        if offset + size > self._end:
            offset = self._start = self._end
            page = mmap.ALLOCATIONGRANULARITY
            extent = max(_EXTENT, -(-size // page) * page)
            self._end += extent
            try:
                os.ftruncate(self._descriptor, self._end)
                access = mmap.MAP_SHARED, mmap.PROT_READ
                mapped = mmap.mmap(self._descriptor, extent, *access, offset=offset)
            except OSError as error:
                raise _no_room(error) from None
            self._mapped.append(mapped)
        self._free = offset + size
        return offset


class LazySequence(Sequence[_Value]):
    """Sequence of items with spilled columns; releases pages on access to another item."""

    def __init__(self, items: Sequence[_Value], scratch: SpillFile) -> None:
        self._items, self._scratch = items, scratch
        self._last = 0

    @overload
    def __getitem__(self, index: int) -> _Value: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Value]: ...
    def __getitem__(self, index: int | slice) -> _Value | Sequence[_Value]:
        if isinstance(index, int) and index != self._last:
            self._scratch.let_go()
            self._last = index
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class Room:
    """Column in the spill file that is being appended to."""

    def __init__(self, scratch: SpillFile, offset: int, column: Array) -> None:
        self.column = column
        self._scratch, self._offset = scratch, offset

    def append(self, part: Array) -> None:
        """Append a part; raise MissingError if the disk is full."""
        part = part.astype(self.column.dtype, copy=False)
        self._scratch.write(part, self._offset)
        self._offset += part.nbytes


@cache
def _statm() -> int:
    """Return a descriptor of this process's counts of pages: they are asked for very often."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _memory() -> tuple[int, int]:
    """Return the bytes of files that this process has mapped and read, and of all else it has."""
    try:
        _, resident, shared, *_ = map(int, os.pread(_statm(), 80, 0).split())
    except OSError:  # Not Linux.
        return 0, 0
    return shared * mmap.PAGESIZE, (resident - shared) * mmap.PAGESIZE


def _no_room(error: OSError) -> MissingError:
    return MissingError(
        f"{cache_folder()}: no room for a trace that is larger than what is held in memory "
        f"({error.strerror}); make some, or name another folder in XDG_CACHE_HOME"
    )
