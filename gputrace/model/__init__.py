"""Data model that the layers exchange, and the C library of its loops over columns."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import ctypes

    from numpy.typing import NDArray

LIBRARY: Final = Path(__file__).with_name("_columns.so")


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
    loaded.gputrace_before.argtypes = (pointer, *of_set, pointer, count, pointer)
    loaded.gputrace_search.argtypes = (pointer, count, pointer, count, width, pointer)
    loaded.gputrace_sort.argtypes = (pointer, pointer, count)
    loaded.gputrace_mark.argtypes = ids
    loaded.gputrace_look_up.argtypes = (*ids, width, pointer)
    for function in ("union", "intersection", "difference"):
        getattr(loaded, f"gputrace_{function}").restype = count
    return loaded


def address(column: NDArray[Any]) -> int:
    """Return where the elements of a column are, which it keeps there."""
    where: int = column.ctypes.data
    return where
