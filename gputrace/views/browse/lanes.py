"""A lane on the axis, what it is called, and below which GPU it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gputrace.analyzers.scene.scene import SceneLane
from gputrace.cleaning import clean

CURVE_NAMES: Final = {
    "utilization": "use",
    "smClock": "SM clock",
    "power": "power",
    "memoryUsed": "memory",
    "temperature": "heat",
}
"""What the lanes of curves are called."""


@dataclass(frozen=True, eq=False)
class ShownLane:
    """A lane on the axis."""

    trace: int
    """Which trace it is of."""
    number: int
    """Its place among the GPUs of its trace; -1 of a part of one."""
    lane: SceneLane
    label: str
    zero: int
    """The moment of its trace that the axis calls 0."""


@dataclass(frozen=True, slots=True)
class Picked:
    """An operation that a person picked."""

    lane: ShownLane
    row: int


def label_of(lane: SceneLane, others: Sequence[SceneLane]) -> str:
    """``gpu 3``; with the rank where ranks are other numbers than those of the GPUs."""
    if lane.part:
        return f" {clean(CURVE_NAMES.get(lane.part, lane.part), 24)}"
    if lane.gpu is None:
        return f"rank {lane.rank}"
    several = len({other.rank for other in others}) > 1
    told = several and any(other.gpu != other.rank for other in others)
    return f"{'gpu' if lane.gpu_known else 'dev'} {lane.gpu}" + (f" r{lane.rank}" if told else "")


def belongs(part: ShownLane, gpu: ShownLane, last: bool) -> bool:
    """Whether a part is shown below a GPU; threads below the last GPU of their rank."""
    if part.trace != gpu.trace or part.lane.rank != gpu.lane.rank:
        return False
    if part.lane.operations is None:
        return last
    return part.lane.gpu == gpu.lane.gpu
