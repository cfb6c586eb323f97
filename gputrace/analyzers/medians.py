"""The middle one of all others, for each: found at once for all, since runs may have thousands."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def of_others(values: NDArray[Any]) -> NDArray[np.float64]:
    """For each row, the median of all other rows, column by column; at least two rows."""
    order = np.argsort(values, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, axis=0).astype(np.float64)
    place = np.argsort(order, axis=0, kind="stable")
    others = len(values) - 1
    low, high = (
        np.where(place <= middle, ordered[middle + 1], ordered[middle])
        for middle in ((others - 1) // 2, others // 2)
    )
    found: NDArray[np.float64] = (low + high) / 2
    return found
