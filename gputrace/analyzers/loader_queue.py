"""Simulation of a data loader's queue: how long a batch takes with other numbers of workers.

Batches go to the workers in turn, so many ahead as the prefetch factor says, and are taken in
order. A worker sends one batch while it makes the next, as far as that leaves it its processor: a
process of Python has one for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

_LEAST_BATCHES: Final = 200
_ROUNDS: Final = 20
"""Batches simulated: at least so many, and so many rounds of the workers."""


@dataclass(frozen=True)
class Feed:
    """Measured times of batches, in nanoseconds.

    Attributes:
        work, send, processor: of batches: fetching and collating; sending, in processor time;
            processor time of all that. A row for each worker where workers differ, else one row.
        receive: of a batch in the process that trains.
        train: of that process between two batches, without any wait.
        prefetch: batches per worker that are made ahead.
        pins: whether a thread receives, beside the one that trains.
        cores: for this process and its workers.
        busy: processor time of the process that trains, between two batches.
    """

    work: Sequence[NDArray[np.float64]]
    send: Sequence[NDArray[np.float64]]
    processor: Sequence[NDArray[np.float64]]
    receive: float
    train: float
    prefetch: int
    pins: bool
    cores: float
    busy: float

    def without(self, part: Sequence[NDArray[np.float64]]) -> Feed:
        """Return the feed with some of the work left out."""
        work = [np.maximum(all - less, 0) for all, less in zip(self.work, part, strict=True)]
        return replace(self, work=work)


def batch_ns(feed: Feed, workers: int) -> float:
    """Return the mean nanoseconds from batch to batch in the long run."""
    mean_work = float(np.mean([row.mean() for row in feed.work]))
    if not workers:
        return mean_work + feed.train
    processor = float(np.mean([row.mean() for row in feed.processor]))
    return max(_in_turn(feed, workers), (processor + feed.busy) / max(feed.cores, 1))


def _in_turn(feed: Feed, workers: int) -> float:
    count = max(_LEAST_BATCHES, _ROUNDS * workers)
    ahead = feed.prefetch * workers
    free, received, taken = [0.0] * workers, 0.0, [0.0] * count
    given = [0] * len(feed.work)
    now = 0.0
    for number in range(count):
        worker = number % workers
        row = worker % len(feed.work)
        at = given[row] % len(feed.work[row])
        given[row] += 1
        work, send = float(feed.work[row][at]), float(feed.send[row][at])
        arrived = taken[number - ahead] if number >= ahead else 0.0
        start = max(free[worker], arrived)
        free[worker] = start + max(work, float(feed.processor[row][at]))
        ready = start + work + send
        if feed.pins:
            received = max(received, ready) + feed.receive
            now = max(now, received)
        else:
            now = max(now, ready) + feed.receive
        taken[number] = now
        now += feed.train
    half = count // 2 // workers * workers
    rounds = (count - 1 - half) // workers * workers
    # Whole rounds, so that each worker counts as often as any other.
    return (taken[half + rounds] - taken[half]) / rounds
