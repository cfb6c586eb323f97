"""NVTX ranges and marks in nvprof's files: a range is two rows of one id."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gputrace.traces.arrow import Integers
from gputrace.traces.events import Column, Kind
from gputrace.traces.trace import Window

MOMENT, START, END = 1, 2, 4
"""Flags of a marker (CUpti_ActivityFlag)."""


def join_markers(raw: dict[str, Integers], window: Window | None) -> dict[str, Column]:
    """Start, end and kind of ranges and marks that touch a window; name and thread if they are in.

    Takes the columns flags, id and timestamp of the rows of markers, and some of name and thread.

    A range whose end was not recorded ends where it starts; an end without a start is left out.
    """
    flags = raw["flags"]
    starts, marks = np.flatnonzero(flags & START), np.flatnonzero(flags & MOMENT)
    rows = np.concatenate([starts, marks])
    begin = raw["timestamp"][rows]
    end = begin.copy()
    end[: len(starts)] = _ends(raw, starts)
    kinds = np.full(len(rows), Kind.RANGE, np.int8)
    kinds[len(starts) :] = Kind.MARK
    columns: dict[str, Column] = {
        name: raw[name][rows] for name in ("name", "thread") if name in raw
    }
    columns |= {"start": begin, "end": end, "kind": kinds}
    if window is None:
        return columns
    inside = (begin < window.end) & (end >= window.start)
    return {name: column[inside] for name, column in columns.items()}


def _ends(raw: dict[str, Integers], starts: NDArray[np.intp]) -> Integers:
    """When the ranges that start in some rows end."""
    ends = np.flatnonzero(raw["flags"] & END)
    begin = raw["timestamp"][starts]
    if not len(ends):
        return begin
    ends = ends[np.argsort(raw["id"][ends], kind="stable")]
    ids, wanted = raw["id"][ends], raw["id"][starts]
    place = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[place] == wanted, raw["timestamp"][ends][place], begin)
