"""Which ids occur in a column, and where: counted, not sorted, where ids are dense, as they
mostly are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.events import UNKNOWN, Column

_DENSE: Final = 4
"""So many times as many ids as rows, from the lowest to the highest, are dense."""
_BLOCK: Final = 1 << 15
"""Ids that are made indices at once, in memory that stays in the processor's cache."""


def distinct_ids(ids: Column) -> NDArray[np.int64]:
    """The ids that occur, in order."""
    if _are_dense(ids, _DENSE):
        return _counted(ids)
    ordered = np.sort(ids).astype(np.int64, copy=False)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    distinct: NDArray[np.int64] = ordered[first]
    return distinct


def number_ids(ids: Column) -> tuple[NDArray[np.int64], NDArray[np.signedinteger[Any]]]:
    """The ids that occur, in order, and which of them each row has."""
    if not _are_dense(ids, 4 * _DENSE):
        distinct, place = np.unique(ids, return_inverse=True)
        return distinct.astype(np.int64), place
    distinct = _counted(ids)
    low = int(distinct[0])
    places = np.empty(int(distinct[-1]) - low + 1, np.int32)
    places[distinct - low] = np.arange(len(distinct))
    numbers = np.empty(ids.size, np.int32)
    for rows in _blocks(ids):
        places.take(ids[rows].astype(np.intp) - low, out=numbers[rows], mode="clip")
    return distinct, numbers


class Lookup:
    """The first row of each id, by the id: a table where ids are dense, else a search."""

    def __init__(self, ids: Column, rows: NDArray[np.signedinteger[Any]]) -> None:
        """Takes at least one id, and the row of each in the order that tells which is first."""
        self._dense = _are_dense(ids, _DENSE)
        if self._dense:
            self._low, high = int(ids.min()), int(ids.max())
            self._rows = np.full(high - self._low + 1, UNKNOWN, np.int32)
            self._rows[ids[::-1] - self._low] = rows[::-1]
        else:
            order = np.argsort(ids, kind="stable")
            self._ids, self._rows = ids[order], rows[order].astype(np.int32)

    def rows(self, ids: Column) -> NDArray[np.int32]:
        """The row of each, or `UNKNOWN`."""
        if self._dense:
            place = ids - self._low
            known = (place >= 0) & (place < len(self._rows))
        else:
            place = np.searchsorted(self._ids, ids)
            known = self._ids.take(place, mode="clip") == ids
        found = self._rows.take(place, mode="clip")
        return found if known.all() else np.where(known, found, np.int32(UNKNOWN))


def _are_dense(ids: Column, times: int) -> bool:
    return ids.size > 0 and int(ids.max()) - int(ids.min()) <= times * ids.size


def _counted(ids: Column) -> NDArray[np.int64]:
    low, high = int(ids.min()), int(ids.max())
    seen = np.zeros(high - low + 1, bool)
    for rows in _blocks(ids):
        seen[ids[rows].astype(np.intp) - low] = True
    return np.flatnonzero(seen) + low


def _blocks(ids: Column) -> Iterator[slice]:
    return (slice(first, first + _BLOCK) for first in range(0, ids.size, _BLOCK))
