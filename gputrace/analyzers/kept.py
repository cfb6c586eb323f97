"""A scene as text and columns, and back: what the cache keeps of a trace.

Only the classes named here are ever made of an entry, and only by their own constructors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers import results
from gputrace.analyzers.cells import Layers
from gputrace.analyzers.gap_table import GapTable
from gputrace.analyzers.gpus import Gpu
from gputrace.analyzers.intervals import Intervals
from gputrace.analyzers.operations import GpuOperations
from gputrace.analyzers.scene import Scene, SceneLane
from gputrace.analyzers.steps import FoundSteps, StepWindows
from gputrace.analyzers.steps.windows import Interlude
from gputrace.traces.cache import Kept
from gputrace.traces.events import Events
from gputrace.traces.trace import Process, Window

_SCENE: Final = (
    *(Scene, SceneLane, Layers, Intervals, GpuOperations, Gpu, GapTable, FoundSteps, StepWindows),
    *(Interlude, Process, Window),
)
_KNOWN: Final[dict[str, Any]] = {one.__name__: one for one in _SCENE} | {
    name: one for name, one in vars(results).items() if isinstance(one, type) and is_dataclass(one)
}
"""By name; `Events` are told apart, as they take a mapping of columns."""


def freeze(scene: Scene) -> Kept:
    """The scene as an entry of the cache."""
    packer = _Packer()
    return Kept(msgspec.json.encode(packer.pack(scene)), packer.columns)


def thaw(entry: Kept) -> Scene | None:
    """The scene of an entry; None where it makes no sense."""
    try:
        scene = _unpack(msgspec.json.decode(entry.text), entry.columns)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError):
        return None
    return scene if isinstance(scene, Scene) else None


class _Packer:
    """Turns values into plain ones, in which columns are numbers of `columns`."""

    def __init__(self) -> None:
        self.columns: list[NDArray[Any]] = []
        self._places: dict[int, int] = {}

    def pack(self, value: Any) -> Any:
        """Plain values as they are; others as ``[letter, content]``."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, np.ndarray):
            return ["c", self._place(value)]
        if isinstance(value, Events):
            return ["e", {name: self.pack(getattr(value, name)) for name in value.columns}]
        if type(value).__name__ in _KNOWN:
            return ["o", type(value).__name__, [self.pack(part) for part in _parts(value)]]
        if isinstance(value, Mapping):
            return ["m", [[key, self.pack(part)] for key, part in value.items()]]
        if isinstance(value, (tuple, list)):
            return ["t", [self.pack(part) for part in value]]
        raise TypeError(f"a {type(value).__name__} cannot be kept")

    def _place(self, column: NDArray[Any]) -> int:
        """Equal columns that are one object are kept once; they stay alive in the list."""
        place = self._places.setdefault(id(column), len(self.columns))
        if place == len(self.columns):
            self.columns.append(column)
        return place


def _parts(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return list(value)
    return [getattr(value, field.name) for field in fields(value)]


def _unpack(packed: Any, columns: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    letter, content = packed[0], packed[1]
    if letter == "c":
        return columns[content]
    if letter == "e":
        return Events({name: _unpack(column, columns) for name, column in content.items()})
    if letter == "o":
        return _KNOWN[content](*(_unpack(part, columns) for part in packed[2]))
    if letter == "m":
        return {key: _unpack(part, columns) for key, part in content}
    return tuple(_unpack(part, columns) for part in content)
