"""Which GPUs are late to the collectives beyond chance, in which steps, and with what.

A GPU that is late has more of something than the others, who wait instead: computing, copies, or
idle time of one cause. Which it is tells a slow GPU from a host that comes late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.lanes import LaneSummary
from gputrace.analyzers.late.lateness import Lateness
from gputrace.analyzers.results import CLASSES, Step
from gputrace.traces.events import Mask

_FEWEST: Final = 4
"""Steps that are needed to tell a habit from an accident."""
_SURE: Final = 4.0
"""Standard errors by which a constant lag must exceed nothing."""
_CONSTANT: Final = 0.03
"""Part of a step from which a constant lag is worth a word."""
_SPIKE: Final = 0.15
_DEVIATIONS: Final = 5.0
"""A step in which a GPU is late beyond its usual lag by so much of a step, and so many robust
standard deviations, stands out."""
_WORTH: Final = 0.025
"""Part of the whole time that steps which stand out must cost."""

_OWN: Final = tuple(name for name in CLASSES if name != "communication")
_WORK: Final = ("compute", "h2d", "other_copy", "memset")


@dataclass(frozen=True)
class Late:
    """A GPU for which others wait.

    Attributes:
        lane: the GPU.
        pattern: ``constant``; ``one-step``, ``burst`` (steps in a row) or ``scattered``.
        steps: numbers of the steps in which it is late.
        cost_ns: what another GPU loses by waiting for it, a step, spread over all measured steps.
        last: part of the collectives to which it came last, 0 to 1.
        more: nanoseconds of each class but communication that it has in such a step beyond the
            middle one of the others; negative where it has less.
    """

    lane: LaneSummary
    pattern: str
    steps: tuple[int, ...]
    cost_ns: int
    last: float
    more: Mapping[str, int]

    @property
    def by_work(self) -> bool:
        """Whether it is late with work of the GPU rather than idle."""
        gains = {name: max(ns, 0) for name, ns in self.more.items()}
        return 2 * sum(gains[name] for name in _WORK) > sum(gains.values())

    @property
    def cause(self) -> str:
        """The class that it has most more of: work, or idle time, as `by_work` says."""
        names = [name for name in self.more if (name in _WORK) == self.by_work]
        return max(names, key=lambda name: self.more[name])


def find_late(lateness: Lateness, measured: Sequence[Step]) -> tuple[Late, ...]:
    """The GPUs that are late, the costliest first; none in a balanced run."""
    found = sorted(_found(lateness, measured), key=lambda late: -late.cost_ns)
    return tuple(found)


def _found(lateness: Lateness, measured: Sequence[Step]) -> Iterator[Late]:
    table = _table(lateness, measured)
    for row, lane in enumerate(lateness.lanes):
        bad = late_steps(lateness.excess[row], lateness.length_ns)
        if bad.any():
            yield Late(
                lane,
                _pattern(bad),
                tuple(lateness.steps[bad].tolist()),
                int(lateness.caused[row, bad].sum()) // len(bad),
                float(lateness.last[row]),
                _more(table[:, bad], row),
            )


def late_steps(excess: NDArray[np.float64], length_ns: float) -> Mask:
    """In which steps one GPU is late beyond chance: all, some that stand out, or none.

    Args:
        excess: what others wait for it beyond what the middle GPU makes them wait, by step.
        length_ns: of a step.
    """
    if len(excess) < _FEWEST:
        return np.zeros(len(excess), bool)
    middle = float(np.median(excess))
    scatter = 1.4826 * float(np.median(np.abs(excess - middle)))
    spikes: Mask = excess > middle + max(_DEVIATIONS * scatter, _SPIKE * length_ns)
    usual = excess[~spikes]
    error = float(usual.std(ddof=1)) / len(usual) ** 0.5 if len(usual) > 1 else np.inf
    if usual.mean() >= max(_CONSTANT * length_ns, _SURE * error):
        return np.ones(len(excess), bool)
    worth = excess[spikes].sum() >= _WORTH * length_ns * len(excess)
    chosen: Mask = spikes & worth
    return chosen


def _pattern(bad: Mask) -> str:
    where = np.flatnonzero(bad)
    if bad.all():
        return "constant"
    if len(where) == 1:
        return "one-step"
    return "burst" if where[-1] - where[0] < 2 * len(where) else "scattered"


def _table(lateness: Lateness, measured: Sequence[Step]) -> NDArray[np.float64]:
    """Nanoseconds by GPU, step and class but communication; nan where a GPU lacks the step."""
    rows = {(lane.gpu.gpu, lane.gpu.rank): row for row, lane in enumerate(lateness.lanes)}
    column = {int(number): place for place, number in enumerate(lateness.steps)}
    table = np.full((len(rows), len(column), len(_OWN)), np.nan)
    for step in measured:
        row = rows.get((step.gpu, step.rank)) if step.gpu is not None else None
        if row is not None:
            table[row, column[step.step]] = [getattr(step, f"{name}_ns") for name in _OWN]
    return table


def _more(table: NDArray[np.float64], row: int) -> dict[str, int]:
    """By class, how much more a GPU has than the middle one of the others, in the mean step."""
    others = np.nanmedian(np.delete(table, row, axis=0), axis=0)
    more = np.nanmean(table[row] - others, axis=0)
    return {name: int(ns) for name, ns in zip(_OWN, np.nan_to_num(more), strict=True)}
