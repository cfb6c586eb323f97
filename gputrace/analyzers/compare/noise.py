"""How well the steps of a recording pin down a mean, and whether two means differ.

The variance of a mean takes into account that steps resemble their neighbours (Newey and West
1987; Kendall 1954 on the bias of their likeness); two means are compared as Welch (1947) does.
Nothing is drawn at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CONFIDENCE: Final = 0.95
"""How often bounds hold; those of the rows of one table hold all at once."""

FEWEST: Final = 3
"""Steps from which bounds can be given."""

_MOST_FREEDOM: Final = 1000
_LEAST_FREEDOM: Final = 4
"""However much steps resemble their neighbours, if there are as many: fewer make bounds wider, and
no more often right."""
_MOST_MEMORY: Final = 0.9
"""Of a step in the next; more cannot be told from a drift in so few steps."""

Series = NDArray[np.number[Any]]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over steps and its standard error, in one unit."""

    value: float
    error: float | None
    """None where there are too few steps to tell."""
    freedom: float
    """Degrees of freedom of the error: independent steps less one."""


ABSENT: Final = Mean(0.0, 0.0, _MOST_FREEDOM)
"""Of what does not occur at all."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a difference, or a ratio, is at least and at most."""

    low: float
    high: float


def means_of(table: Series) -> list[Mean]:
    """The mean of each column of a table of shape (steps, columns)."""
    count = len(table)
    values = table.mean(axis=0, dtype=float) if count else np.zeros(table.shape[1])
    if count < FEWEST:
        return [Mean(value, None, 0.0) for value in values.tolist()]
    rest = table - values
    alone = (rest**2).sum(axis=0) / (count - 1)
    inflation = _inflation(rest)
    errors = np.sqrt(alone * inflation / count)
    freedom = np.maximum(count / inflation - 1, min(_LEAST_FREEDOM, count - 1))
    return [
        Mean(*row) for row in zip(values.tolist(), errors.tolist(), freedom.tolist(), strict=True)
    ]


def _inflation(rest: Series) -> NDArray[np.float64]:
    """How many times the variance of a mean is that of independent steps; at least 1.

    The larger of two estimates: one from all neighbours up to a distance, which falls short where
    steps remember long, and, where neighbours are more alike than by chance, that of a series in
    which each remembers a part of the one before.
    """
    count, squares = len(rest), (rest**2).sum(axis=0)
    squares = np.where(squares > 0, squares, 1)
    reach = int(count**0.5)
    total = np.ones(rest.shape[1])
    for lag in range(1, reach + 1):
        alike = (rest[lag:] * rest[:-lag]).sum(axis=0) / squares
        total += 2 * (1 - lag / (reach + 1)) * alike
    memory = (rest[1:] * rest[:-1]).sum(axis=0) / squares
    beyond_chance = memory > count**-0.5
    memory = np.clip((count * memory + 1) / max(count - 3, 1), 0, _MOST_MEMORY) * beyond_chance
    inflation: NDArray[np.float64] = np.maximum(total, (1 + memory) / (1 - memory))
    return np.maximum(inflation, 1)


def difference(a: Mean, b: Mean, rows: int = 1) -> Bounds | None:
    """Bounds of ``b - a``, one of so many rows that shall hold together; None if unknown."""
    if a.error is None or b.error is None:
        return None
    middle = b.value - a.value
    reach = _reach((a.error, a.freedom), (b.error, b.freedom), rows)
    return Bounds(middle - reach, middle + reach)


def ratio(a: Mean, b: Mean) -> Bounds | None:
    """Bounds of ``a / b`` of positive means, by the difference of their logarithms."""
    if a.error is None or b.error is None or min(a.value, b.value) <= 0:
        return None
    reach = _reach((a.error / a.value, a.freedom), (b.error / b.value, b.freedom), 1)
    return Bounds(a.value / b.value * exp(-reach), a.value / b.value * exp(reach))


def _reach(a: tuple[float, float], b: tuple[float, float], rows: int) -> float:
    """How far from the middle the bounds are, of two errors with their freedoms."""
    squares = a[0] ** 2, b[0] ** 2
    if not sum(squares):
        return 0.0
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / a[1] + squares[1] ** 2 / b[1])
    return float(sum(squares) ** 0.5 * student(rows, min(int(freedom), _MOST_FREEDOM)))


@lru_cache(maxsize=4096)
def student(rows: int, freedom: int) -> float:
    """Standard errors on either side that hold for all rows together (Bonferroni).

    The quantile of Student's distribution, by integration over ``t = sqrt(freedom) tan(angle)``.
    """
    freedom = max(freedom, 1)
    angles = np.linspace(0, np.pi / 2, 20_001)
    middles = (angles[1:] + angles[:-1]) / 2
    area = np.concatenate([[0.0], np.cumsum(np.cos(middles) ** (freedom - 1))])
    wanted = 1 - (1 - CONFIDENCE) / rows
    return float(np.sqrt(freedom) * np.tan(np.interp(wanted, area / area[-1], angles)))
