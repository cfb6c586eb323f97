"""Data model that the layers exchange, the memory of its columns, and the C library of loops over
them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import ctypes

    from numpy.typing import NDArray

LIBRARY: Final = Path(__file__).with_name("_columns.so")
_OF_TWO: Final = ("intersection", "difference", "merge")
"""Functions of the library that take two sets and make one."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MALLOC: Final = {
    _M_ARENA_MAX: 1,  # Threads that decode files share what is kept.
    _M_TRIM_THRESHOLD: 1 << 26,
    _M_MMAP_THRESHOLD: 1 << 25,
}


@cache
def library() -> ctypes.CDLL | None:
    """Return the C library; None where the package was built without a compiler, or is newer than
    the library beside it.
    """
    import ctypes

    width, count, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    of_set, ids = (pointer, pointer, count), (pointer, width, count, count, count, pointer)
    arguments = {
        "union": (*of_set, pointer, width, width, pointer, pointer),
        "contains": (*of_set, pointer, count, pointer),
        **dict.fromkeys(_OF_TWO, (*of_set, *of_set, pointer, pointer)),
        "cover": (*of_set, pointer),
        "before": (pointer, *of_set, pointer, count, pointer),
        "search": (pointer, count, pointer, count, width, pointer),
        "group": (*of_set, count, *(pointer,) * 3),
        "sort": (pointer, pointer, count),
        "mark": ids,
        **dict.fromkeys(("index", "look_up"), (*ids, width, pointer)),
    }
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        for name, types in arguments.items():
            getattr(loaded, f"gputrace_{name}").argtypes = types
        for name in ("union", *_OF_TWO):
            getattr(loaded, f"gputrace_{name}").restype = count
    except (OSError, AttributeError):
        return None
    return loaded


def keep_freed_memory() -> None:
    """Have malloc keep freed columns for the next ones; the system clears all pages it gives."""
    import ctypes

    with suppress(OSError, AttributeError):  # musl has no mallopt.
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in _MALLOC.items():
            mallopt(option, value)


def address(column: NDArray[Any]) -> int:
    """Return where the elements of a contiguous column are, which it keeps there."""
    from_buffer, addressof = _by_buffer()
    try:
        return addressof(from_buffer(column))
    except TypeError:  # It is read-only.
        where: int = column.ctypes.data
        return where


@cache
def _by_buffer() -> tuple[Callable[..., Any], Callable[[Any], int]]:
    """Return what gives an address in a fifth of the time that numpy's ``ctypes.data`` takes."""
    import ctypes

    return (ctypes.c_char * 0).from_buffer, ctypes.addressof
