"""Activity of the parts of a card over time, by GPM, NVML's counters of Hopper and newer cards.

A card takes stock of its counters every 100 ms, and shows them up to 0.1 s later (H100 and H200,
driver 580), however often they are read. They are therefore read every few milliseconds around the
moment when they should change: what lies between two changes is the activity of whole stretches of
100 ms. Following the changes takes 1.4 % of a core: ten in turn are read, then none for as long as
the allowed share of a core asks for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import suppress
from threading import Event, Thread
from typing import Any, Final

_MIB: Final = 2**20
METRICS: Final = {
    "smActive": (2, 1, "% of the SMs' time with a warp on them, mean of all SMs"),
    "smOccupancy": (3, 1, "% of the warps that the SMs have room for"),
    "integerActive": (4, 1, "% of the time that the integer pipe works"),
    "tensorActive": (5, 1, "% of the time that the tensor cores work, in any precision"),
    "dramActive": (10, 1, "% of the bandwidth of the card's memory"),
    "fp64Active": (11, 1, "% of the time that the fp64 pipe works"),
    "fp32Active": (12, 1, "% of the time that the fp32 pipe works"),
    "fp16Active": (13, 1, "% of the time that the fp16 pipe works"),
    "pcieTxRate": (20, _MIB, "bytes a second sent over PCIe"),
    "pcieRxRate": (21, _MIB, "bytes a second received over PCIe"),
    "nvlinkRxRate": (60, _MIB, "bytes a second received over all NVLinks"),
    "nvlinkTxRate": (61, _MIB, "bytes a second sent over all NVLinks"),
}
"""Number of each metric, what its unit is in ours, and its meaning."""
_UNITS: Final = {number: unit for number, unit, _ in METRICS.values()}
ACTIVITY: Final = {
    "timeNs": "ns of CLOCK_REALTIME at the end of the time that the row is of",
    "periodNs": "ns since its start",
} | {name: meaning for name, (*_, meaning) in METRICS.items()}
"""Columns of a row; `gpu` comes before them in the table."""

Row = tuple[int, int, list[float | None]]

_CHANGE: Final = METRICS["dramActive"][0]
"""The metric that is not a number if the counters did not change between two samples."""
_EARLIEST_NS: Final = 94_000_000
"""Time from a change to the first look for the next one, 100 ms later."""
_POLL_S: Final = 0.003
_SEEN_NS: Final = 12_000_000
"""Maximum time between two readings for a change between them to be known well enough."""
_LONGEST_NS: Final = 500_000_000
_CHANGES: Final = 10
"""Changes that are read in turn."""


class ActivityReader(Thread):
    """Reader of one card's counters on a thread of its own, at the pace of the card.

    Attributes:
        rows: end on CLOCK_MONOTONIC, nanoseconds since the start, and the values of `METRICS`.
        ending: set when no more is wanted.
    """

    def __init__(self, nv: Any, handle: Any, share: float) -> None:
        """``share`` is the maximum part of a core that the reading takes."""
        super().__init__(daemon=True)
        self.rows: deque[Row] = deque()
        self.ending = Event()
        self._nv, self._handle, self._share = nv, handle, share

    def run(self) -> None:
        """Read until the end; at once nothing where the card, the driver or the binding cannot."""
        with suppress(self._nv.NVMLError, AttributeError):
            if not self._nv.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return
            self._held, self._fresh = (self._nv.nvmlGpmSampleAlloc() for _ in range(2))
            self._change = self._question([_CHANGE])
            self._all = self._question([number for number, *_ in METRICS.values()])
            self._nv.nvmlGpmSampleGet(self._handle, self._held)
            last = math.inf
            while not self.ending.is_set():
                began, cost = time.monotonic_ns(), time.thread_time_ns()
                self._read_changes()
                cost = time.thread_time_ns() - cost
                # One burst may be slow, as while CUDA starts: then the one before it counts.
                pause = min(cost, last) / self._share - (time.monotonic_ns() - began)
                last = cost
                self.ending.wait(max(0, pause) / 1e9)

    def _read_changes(self) -> None:
        """Read a few changes in turn; what is between two that were seen is a row."""
        polled = 0
        changed: int | None = None
        for _ in range(_CHANGES):
            began = time.monotonic_ns()
            wait_s = _POLL_S if changed is None else (changed + _EARLIEST_NS - began) / 1e9
            while not self.ending.wait(wait_s):
                self._nv.nvmlGpmSampleGet(self._handle, self._fresh)
                before, polled, wait_s = polled, time.monotonic_ns(), _POLL_S
                if self._answer(self._change) != [None]:
                    break
                if polled - began > _LONGEST_NS:
                    return
            else:
                return
            last = changed
            changed = (before + polled) // 2 if polled - before <= _SEEN_NS else None
            if changed is not None and last is not None:
                self.rows.append((changed, changed - last, self._answer(self._all)))
            self._held, self._fresh = self._fresh, self._held

    def _question(self, numbers: list[int]) -> Any:
        asked = self._nv.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = self._nv.NVML_GPM_METRICS_GET_VERSION, len(numbers)
        for at, number in enumerate(numbers):
            asked.metrics[at].metricId = number
        return asked

    def _answer(self, asked: Any) -> list[float | None]:
        """Compute metrics between the two samples, in our units; None where unknown."""
        asked.sample1, asked.sample2 = self._held, self._fresh
        self._nv.nvmlGpmMetricsGet(asked)
        return [
            round(metric.value * _UNITS[metric.metricId], 4)
            if metric.nvmlReturn == 0 and 0 <= metric.value < 2**40
            else None
            for metric in asked.metrics[: asked.numMetrics]
        ]
