"""Rows and steps put together by whose they are, once for all: runs may have thousands of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gputrace.analyzers.results import Step
from gputrace.traces.events import Column


def rows_by(groups: Column, count: int) -> list[NDArray[np.intp]]:
    """For each group from 0 to ``count``, its rows in order; others are in no group."""
    order = np.argsort(groups, kind="stable")
    edges = np.searchsorted(groups[order], np.arange(count + 1))
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [order[first:end] for first, end in pairs]


def steps_by_gpu(steps: Iterable[Step]) -> dict[tuple[Any, int], list[Step]]:
    """The steps by GPU and rank, in order."""
    found: dict[tuple[Any, int], list[Step]] = {}
    for step in steps:
        found.setdefault((step.gpu, step.rank), []).append(step)
    return found
