"""The C libraries: where they are, and how the one of the analysis is called.

`setup.py` compiles them into this folder: ``_collector`` and ``_ticker``, which recorded programs
load, and ``_analysis``, from the C files in the ``native`` folders of ``model``, ``store``,
``readers`` and ``analyzers/whatif``. Without a compiler there are none. Then nothing is recorded,
but traces are read and analyzed, more slowly: who calls `library` says how.
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

# ctypes is imported when it is needed: a result from the cache does without.

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MALLOC: Final = {
    _M_ARENA_MAX: 1,  # Threads that decode files share what is kept.
    _M_TRIM_THRESHOLD: 1 << 26,
    _M_MMAP_THRESHOLD: 1 << 25,
}


def built(name: str) -> Path | None:
    """Return the path of a library; None if the package was built without a compiler."""
    path = Path(__file__).with_name(f"{name}.so")
    return path if path.exists() else None


@cache
def library() -> ctypes.CDLL | None:
    """Return the library of the analysis, with its functions declared; None where the package was
    built without a compiler, or is newer than the library in its folder.
    """
    import ctypes

    if (path := built("_analysis")) is None:
        return None
    try:
        return _declare(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):
        return None


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Declare what each function returns and takes; columns and structs are pointers."""
    import ctypes

    int32, int64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    one_set = (pointer, pointer, int64)
    ids = (pointer, int32, int64, int64, int64, pointer)
    declared: dict[str, tuple[Any, ...]] = {
        "join_intervals": (int64, *one_set, pointer, int32, int32, pointer, pointer),
        "intersect": (int64, *one_set, *one_set, pointer, pointer),
        "subtract": (int64, *one_set, *one_set, pointer, pointer),
        "merge_sets": (int64, *one_set, *one_set, pointer, pointer),
        "sum_lengths": (None, *one_set, pointer),
        "covered_before": (None, pointer, *one_set, pointer, int64, pointer),
        "contains": (None, *one_set, pointer, int64, pointer),
        "search_sorted": (None, pointer, int64, pointer, int64, int32, pointer),
        "order_by_group": (None, *one_set, int64, pointer, pointer, pointer),
        "streams_in_order": (
            *(int32, *(pointer,) * 5, *(int64,) * 2, int32, *(int64,) * 2, pointer),
        ),
        "sort_numbers": (None, pointer, pointer, int64),
        "mark_ids": (None, *ids),
        "index_ids": (None, *ids, int32, pointer),
        "look_up_ids": (None, *ids, int32, pointer),
        "list_leaves": (int64, pointer, int32, int64, int64, pointer, pointer, int64, pointer),
        "scan_leaves": (
            *(int64, pointer, pointer, pointer, int64, int64, int64, int64, int32),
            *(pointer, int32, pointer, int32, int64, int64),
        ),
        "scan_events": (int64, pointer, int64, pointer, int64, pointer, int64, pointer),
        "replay": (int32, *(pointer,) * 3, *(int64,) * 4, pointer),
    }
    for name, (result, *arguments) in declared.items():
        function = getattr(loaded, f"gputrace_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


def address(column: NDArray[Any]) -> int:
    """Return where the elements of a contiguous column are; the caller keeps the column alive."""
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


def keep_freed_memory() -> None:
    """Have malloc keep freed columns for the next ones; the system clears all pages it gives."""
    import ctypes

    with suppress(OSError, AttributeError):  # musl has no mallopt.
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in _MALLOC.items():
            mallopt(option, value)
