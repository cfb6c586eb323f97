"""Steps that are marked where CUDA calls were not recorded, between stretches where they were.

Marks are put into the GPU's time by the calls within them. Where there are none, the operation that
begins each step with calls is counted: if it runs as often between two of these as the steps that
are marked there require, it begins them too. Steps of which that is not so are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.steps.anchors import Rows
from gputrace.analyzers.steps.windows import Interlude

_MOST: Final = 0.9
"""Part of the steps with calls that must begin alike, and hold what begins them equally often."""

Numbers = NDArray[np.intp]
Found = tuple[Numbers, Rows, Rows]


def fill_in(operations: GpuOperations, marks: Numbers, first: Rows, last: Rows) -> Found:
    """The marks, and first and last rows, of the steps that have calls and of those between them.

    Of the first step of a stretch it is not known what was issued for it before its mark: it counts
    as one without calls.
    """
    known = np.diff(marks, prepend=-1) == 1
    marks, first, last = marks[known], first[known], last[known]
    if len(marks) < 2:
        return marks, first, last
    rows = _like(operations, first)
    place = np.searchsorted(rows, first)
    alike = rows[np.minimum(place, len(rows) - 1)] == first
    counts = np.diff(place)[np.diff(marks) == 1]
    each = int(np.median(counts)) if len(counts) else 0
    if not each or np.mean(counts == each) < _MOST or np.mean(alike) < _MOST:
        return marks, first, last
    found = [(marks, first, last)]
    for before in np.flatnonzero(np.diff(marks) > 1).tolist():
        after, steps = before + 1, int(marks[before + 1] - marks[before])
        if alike[[before, after]].all() and place[after] - place[before] == each * steps:
            begins = rows[place[before] + each * np.arange(1, steps)]
            numbers = marks[before] + np.arange(1, steps)
            found.append((numbers, begins, np.append(begins[1:], first[after]) - 1))
    marks, first, last = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(marks)
    return marks[order], first[order], last[order]


def _like(operations: GpuOperations, first: Rows) -> Rows:
    """The operations that are as most of some are."""
    events = operations.events
    keys = np.stack([events.name[first], events.kind[first], events.bytes[first]], axis=-1)
    distinct, counts = np.unique(keys, axis=0, return_counts=True)
    name, kind, size = distinct[np.argmax(counts)]
    rows: Rows = np.flatnonzero(
        (events.name == name) & (events.kind == kind) & (events.bytes == size)
    )
    return rows


def between_neighbours(interludes: Sequence[Interlude], marks: Numbers) -> tuple[Interlude, ...]:
    """Those that lie between two steps that follow each other: elsewhere are steps not found."""
    follows = np.diff(marks) == 1
    return tuple(interlude for interlude in interludes if follows[interlude.after])
