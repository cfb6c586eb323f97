"""The measured steps of a run as series: a row a step, each class its mean over the GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.compare.noise import Mean, means_of
from gputrace.analyzers.results import CLASSES, Analysis, Step

NAMES: Final = (*CLASSES, "communication_wait", "host_data")
"""The classes; the wait, a part of communication; the host's time in the loader, beside them."""

_STRAY: Final = 0.01
"""Part of what the busiest GPU of its rank does below which a GPU does not count."""

Key = tuple[int | None, int]
"""Index and rank of a GPU."""


@dataclass(frozen=True, slots=True)
class Loop:
    """The steps, or iterations, that are measured.

    The classes among `classes` sum to `length`, each a mean over steps and GPUs.
    """

    numbers: NDArray[np.int64]
    length: Mean
    classes: Mapping[str, Mean]
    """Those that are known, of `NAMES`."""
    of_gpu: Mapping[Key, Mapping[str, float]]
    """Means of each GPU."""


def working_gpus(analysis: Analysis) -> list[Key]:
    """The GPUs that do the work: none on which a process has a context and hardly more.

    Where no GPU was seen, the ranks.
    """
    busy = {(row.gpu, row.rank): row.span_ns - row.idle_ns for row in analysis.gpus}
    most: dict[int, int] = {}
    for (_, rank), amount in busy.items():
        most[rank] = max(most.get(rank, 0), amount)
    if not busy:
        return [(row.gpu, row.rank) for row in analysis.breakdown]
    return [key for key, amount in busy.items() if amount >= _STRAY * most[key[1]]]


def measured_steps(analysis: Analysis, chosen: tuple[int, int] | None) -> list[Step]:
    """The steps that a person chose, else the steady ones, on the GPUs that do the work."""
    working = set(working_gpus(analysis))
    first, end = chosen or (0, 1 << 62)
    return [
        step
        for step in analysis.step_list
        if (step.gpu, step.rank) in working
        and (first <= step.step < end if chosen else step.phase == "steady")
    ]


def measure_loop(steps: Sequence[Step]) -> Loop | None:
    """Means over the steps; None where there are none."""
    if not steps:
        return None
    numbers, place = np.unique([step.step for step in steps], return_inverse=True)
    lengths = np.array([step.end_ns - step.start_ns for step in steps], float)
    known = [name for name in NAMES if all(of(step, name) is not None for step in steps)]
    table = np.array([[of(step, name) for name in known] for step in steps], float)
    table = np.concatenate([lengths[:, None], table.reshape(len(steps), -1)], axis=1)
    length, *classes = means_of(_mean_of_groups(table, place, len(numbers)))
    return Loop(
        numbers=numbers,
        length=length,
        classes=dict(zip(known, classes, strict=True)),
        of_gpu=_of_gpus(steps, table, known),
    )


def of(step: Step, name: str) -> int | None:
    """Nanoseconds of one of `NAMES`; None where unknown."""
    value: int | None = getattr(step, f"{name}_ns")
    return value


def _mean_of_groups(
    table: NDArray[np.float64], place: NDArray[np.intp], count: int
) -> NDArray[np.float64]:
    """The mean of the rows of each group, in order of group."""
    total = np.zeros((count, table.shape[1]))
    np.add.at(total, place, table)
    return total / np.bincount(place, minlength=count)[:, None]


def _of_gpus(
    steps: Sequence[Step], table: NDArray[np.float64], known: Sequence[str]
) -> dict[Key, dict[str, float]]:
    rows: dict[Key, list[int]] = {}
    for row, step in enumerate(steps):
        rows.setdefault((step.gpu, step.rank), []).append(row)
    names = ("total", *known)
    return {
        key: dict(zip(names, table[own].mean(axis=0).tolist(), strict=True))
        for key, own in rows.items()
    }
