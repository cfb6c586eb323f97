"""A trace without a file, for tests of analyzers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gputrace.model.events import COLUMN_TYPES, UNKNOWN, Column, Events, Kind
from gputrace.model.options import Window
from gputrace.model.trace import Device, Process, Selection, Trace

Row = Mapping[str, int]


class MemoryTrace(Trace):
    """Rows of the event columns as dictionaries; what a row leaves out is unknown."""

    source = "nsys"

    def __init__(
        self,
        rows: Sequence[Row],
        names: Sequence[str] = (),
        cards: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        """``names`` by id; ``cards`` the physical GPU by process and ordinal."""
        super().__init__(Path("memory"))
        self._rows, self._names, self._cards = rows, names, cards or {}
        processes = max((row.get("process", 0) for row in rows), default=0) + 1
        self.processes = [Process(1000 + index) for index in range(processes)]

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(Kind(row["kind"]) for row in self._rows)

    def names(self, ids: Collection[int] | Column) -> dict[int, str]:
        known = dict(enumerate(self._names))
        return {int(id): known.get(int(id), f"<name {id}>") for id in ids}

    def device(self, process: int, device: int) -> Device:
        return Device(process, device, self._cards.get((process, device), UNKNOWN))

    def read(self, wanted: Selection) -> Events:
        of_kinds = (row for row in self._rows if row["kind"] in wanted.kinds)
        rows = [row for row in of_kinds if _touches(row, wanted.window)]
        return Events({name: _column(name, rows) for name in wanted.columns})

    def close(self) -> None:
        pass


def _touches(row: Row, window: Window | None) -> bool:
    return window is None or (row["start"] < window.end and row["end"] >= window.start)


def _column(name: str, rows: Sequence[Row]) -> np.ndarray[Any, np.dtype[np.signedinteger[Any]]]:
    missing = 0 if name == "process" else UNKNOWN
    return np.array([row.get(name, missing) for row in rows], COLUMN_TYPES[name])


def rows(events: Events) -> list[tuple[int, ...]]:
    """The rows of events, sorted, as their order means nothing."""
    return sorted(zip(*(getattr(events, name).tolist() for name in events.columns), strict=True))
