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

    try:
        return _declare(ctypes.CDLL(str(LIBRARY)))
    except (OSError, AttributeError):
        return None


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Declare what the functions of the library take and return."""
    import ctypes

    width, count, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    of_set, ids = (pointer, pointer, count), (pointer, width, count, count, count, pointer)
    loaded.gputrace_union.argtypes = (*of_set, pointer, width, width, pointer, pointer)
    loaded.gputrace_contains.argtypes = (*of_set, pointer, count, pointer)
    loaded.gputrace_intersection.argtypes = (*of_set, *of_set, pointer, pointer)
    loaded.gputrace_difference.argtypes = (*of_set, *of_set, pointer, pointer)
    loaded.gputrace_merge.argtypes = (*of_set, *of_set, pointer, pointer)
    loaded.gputrace_cover.argtypes = (*of_set, pointer)
    loaded.gputrace_before.argtypes = (pointer, *of_set, pointer, count, pointer)
    loaded.gputrace_search.argtypes = (pointer, count, pointer, count, width, pointer)
    loaded.gputrace_group.argtypes = (*of_set, count, *(pointer,) * 3)
    loaded.gputrace_sort.argtypes = (pointer, pointer, count)
    loaded.gputrace_mark.argtypes = ids
    for name in ("index", "look_up"):
        getattr(loaded, f"gputrace_{name}").argtypes = (*ids, width, pointer)
    for function in ("union", "intersection", "difference", "merge"):
        getattr(loaded, f"gputrace_{function}").restype = count
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
