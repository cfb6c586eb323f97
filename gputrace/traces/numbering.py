"""Ids of several traces under one numbering.

An id means something only within its trace, and ids may be any integers: rows of a table, texts
kept elsewhere (below 0). In the order met, each (trace, id) gets the next number from 0 on, so the
numbers stay dense, which what counts instead of sorting relies on.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.events import UNKNOWN, Column

_Ids = NDArray[np.int64]


class Numbering:
    """Numbers for the ids of all traces; `UNKNOWN` stays what it is."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[_Ids, _Ids]] = {}
        """For each trace, its ids in order, and their numbers."""
        self._places: dict[int, int] = {}
        """The place of each trace in that order."""
        self._count = 0
        self._given: list[tuple[int, _Ids]] = []
        """The place of a trace in `_known`, and its own ids, in the order of their numbers."""
        self._owned: tuple[_Ids, _Ids] | None = None

    def number(self, part: int, ids: Column) -> NDArray[np.int32]:
        """The numbers of a trace's ids."""
        distinct, place = _distinct(ids)
        return self._numbers(part, distinct)[place]

    def by_part(self, numbers: _Ids) -> Iterator[tuple[int, _Ids, _Ids]]:
        """For each trace that has some of the numbers: which it is, its own ids, the numbers."""
        wanted = np.unique(numbers)
        wanted = wanted[(wanted >= 0) & (wanted < self._count)]
        if not len(wanted):
            return
        places, ids = (column[wanted] for column in self._owners())
        order = np.lexsort((ids, places))
        parts = list(self._known)
        for rows in np.split(order, np.flatnonzero(np.diff(places[order])) + 1):
            yield parts[int(places[rows[0]])], ids[rows], wanted[rows]

    def _owners(self) -> tuple[_Ids, _Ids]:
        """Of each number, whose it is and what it stands for there."""
        if self._owned is None:
            lengths = [len(ids) for _, ids in self._given]
            places = np.repeat([place for place, _ in self._given], lengths)
            self._owned = places, np.concatenate([ids for _, ids in self._given])
        return self._owned

    def _numbers(self, part: int, distinct: _Ids) -> NDArray[np.int32]:
        """Of different ids in order."""
        ids, numbers = self._known.get(part, (np.empty(0, np.int64), np.empty(0, np.int64)))
        new = np.setdiff1d(distinct[distinct != UNKNOWN], ids, assume_unique=True)
        if len(new):
            fresh = np.arange(self._count, self._count + len(new))
            self._count += len(new)
            order = np.argsort(both := np.concatenate([ids, new]), kind="stable")
            ids, numbers = both[order], np.concatenate([numbers, fresh])[order]
            self._known[part] = ids, numbers
            place = self._places.setdefault(part, len(self._places))
            self._given.append((place, new))
            self._owned = None
        found = np.full(len(distinct), UNKNOWN, np.int32)
        known = distinct != UNKNOWN
        found[known] = numbers[np.searchsorted(ids, distinct[known])]
        return found


def _distinct(ids: Column) -> tuple[_Ids, NDArray[np.intp]]:
    """The different ids in order, and the place of each among them; by counting where dense."""
    if not len(ids):
        return np.empty(0, np.int64), np.empty(0, np.intp)
    low, high = int(ids.min()), int(ids.max())
    if high - low > 4 * len(ids):
        distinct, place = np.unique(ids, return_inverse=True)
        return distinct.astype(np.int64), place
    offsets = ids - low
    seen = np.zeros(high - low + 1, bool)
    seen[offsets] = True
    return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[offsets]
