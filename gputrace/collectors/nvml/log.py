"""Reader of the NVML sampler's files, as columns and as tables of the trace file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.neighbours import PROCESS
from gputrace.collectors.nvml.queries import (
    ACTIVITY,
    COLUMNS,
    DEVICE,
    METRICS,
    NULL,
    SAMPLE,
    TOPOLOGY,
    Row,
)
from gputrace.units import format_ranges

_STEADY_NS: Final = 100_000
"""Drift of the wall clock below which it is not corrected, as for processes."""

Table = tuple[list[str], list[tuple[Any, ...]]]


@dataclass(slots=True)
class NvmlLog:
    """Log of one machine's sampler.

    Attributes:
        host: its name.
        driver: version of the NVIDIA driver, or empty.
        interval_ns: requested time between ticks.
        devices: the columns of DEVICE for each card; and `lostNs`, CLOCK_REALTIME, or None.
        topology: the columns of TOPOLOGY for each ordered pair of cards.
        samples: `gpu` and the columns of SAMPLE, a row for each card and tick, in the order of
            time; int64, `utilization` float64; NULL is -1.
        activity: `gpu` and the columns of ACTIVITY, and `leadNs`, that of CLOCK_REALTIME over
            CLOCK_MONOTONIC when the row was written; float64 but for the times; NULL is -1.
        processes: the columns of PROCESS, of cards and of the cores.
        clocks: (CLOCK_REALTIME, CLOCK_MONOTONIC) in ns at each tick.
        cpu_ns: processor time of the sampling; None if it was killed.
        skipped: number of invalid lines, including an incomplete last one.
    """

    host: str = ""
    driver: str = ""
    interval_ns: int = 0
    devices: list[dict[str, Any]] = field(default_factory=list)
    topology: list[tuple[Any, ...]] = field(default_factory=list)
    samples: dict[str, NDArray[Any]] = field(default_factory=dict)
    activity: dict[str, NDArray[Any]] = field(default_factory=dict)
    processes: list[list[Any]] = field(default_factory=list)
    clocks: list[tuple[int, int]] = field(default_factory=list)
    cpu_ns: int | None = None
    skipped: int = 0


class NvmlLines:
    """Parser of a file line by line, whatever it holds; ``rows`` are the samples kept."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._activity: list[Row] = []
        self._log, self._columns, self._metrics = NvmlLog(), list(SAMPLE), list(METRICS)

    def take(self, line: bytes) -> None:
        """Parse one line, without its end."""
        if not line:
            return
        try:
            parsed, log = json.loads(line), self._log
            if "devices" in parsed:
                devices = [{name: card.get(name) for name in DEVICE} for card in parsed["devices"]]
                log.devices = [device | {"lostNs": None} for device in devices]
                pairs = map(tuple, parsed["topology"])
                log.topology = [pair for pair in pairs if len(pair) == len(TOPOLOGY)]
                log.host, log.driver = str(parsed["host"]), str(parsed["driver"] or "")
                log.interval_ns = int(parsed["interval_ns"])
                self._columns = [str(name) for name in parsed["columns"]]
                self._metrics = [str(name) for name in parsed.get("metrics", ())]
            elif "gpus" in parsed or "processes" in parsed:
                if "gpus" in parsed:
                    self._take_tick(parsed)
                log.processes += filter(_is_process, parsed.get("processes", ()))
            else:
                log.cpu_ns = int(parsed["end"]["cpu_ns"])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self._log.skipped += 1

    def _take_tick(self, parsed: dict[str, Any]) -> None:
        now, monotonic = int(parsed["time_ns"]), int(parsed["monotonic_ns"])
        rows: list[Row] = []
        for gpu, values in enumerate(parsed["gpus"]):
            row = {"timeNs": now} if values is None else zip(self._columns, values, strict=True)
            named = dict(row)
            rows.append([gpu, *(_checked(named.get(name)) for name in SAMPLE)])
        active: list[Row] = []
        for gpu, end, period, values in parsed.get("activity", ()):
            named = dict(zip(self._metrics, values, strict=True))
            times = gpu, end + now - monotonic, period
            known = map(_checked, (*times, *(named.get(name) for name in METRICS)))
            active.append([*known, now - monotonic])
        for gpu in parsed.get("lost", {}):
            self._log.devices[int(gpu)]["lostNs"] = now
        self._log.clocks.append((now, monotonic))
        self.rows += rows
        self._activity += active

    def let_go(self, before: int) -> None:
        """Drop samples from before a moment of CLOCK_REALTIME."""
        time = COLUMNS.index("timeNs")
        self.rows = [row for row in self.rows if (row[time] or 0) >= before]
        self._activity = [row for row in self._activity if (row[time] or 0) >= before]
        self._log.clocks = [clock for clock in self._log.clocks if clock[0] >= before]
        self._log.processes = [row for row in self._log.processes if row[0] >= before]

    def log(self) -> NvmlLog:
        """Return everything that was parsed and kept."""
        samples, activity = {}, {}
        for at, name in enumerate(COLUMNS):
            kind = float if name == "utilization" else np.int64
            samples[name] = np.array([row[at] for row in self.rows], kind)
        for at, name in enumerate(("gpu", *ACTIVITY, "leadNs")):
            kind = float if name in METRICS else np.int64
            activity[name] = np.array([row[at] for row in self._activity], kind)
        return replace(self._log, samples=samples, activity=activity)


def read_nvml(path: Path) -> NvmlLog:
    """Read a file, however incomplete; no content of it raises an error."""
    lines = NvmlLines()
    for line in path.read_bytes().split(b"\n"):
        lines.take(line)
    return lines.log()


def make_steady(log: NvmlLog, axis: int) -> None:
    """Undo changes of the wall clock, in place; ``axis`` is its lead over CLOCK_MONOTONIC."""
    realtime, monotonic = np.array(log.clocks, np.int64).reshape(-1, 2).T
    shift = realtime - monotonic - axis
    if np.abs(shift).max(initial=0) <= _STEADY_NS:
        return
    cards = len(log.samples["timeNs"]) // len(shift)
    log.samples["timeNs"] = log.samples["timeNs"] - np.repeat(shift, cards)
    log.activity["timeNs"] = log.activity["timeNs"] - (log.activity["leadNs"] - axis)
    moved = dict(zip(realtime.tolist(), (realtime - shift).tolist(), strict=True))
    for device in log.devices:
        device["lostNs"] = moved.get(device["lostNs"])
    for row in log.processes:
        ticks = np.searchsorted(realtime, row[0])
        row[0] -= int(shift[min(ticks, len(shift) - 1)])


def _is_process(row: Any) -> bool:
    """Return whether a row can be one of GPUTRACE_PROCESS_USE."""
    return (
        isinstance(row, list)
        and len(row) == len(PROCESS)
        and isinstance(row[0], int)
        and all(value is None or isinstance(value, str) or _is_number(value) for value in row)
    )


def _is_number(value: Any) -> TypeGuard[float | int]:
    return isinstance(value, int | float) and abs(value) < 2**63


def _checked(value: Any) -> float | int:
    if value is None:
        return NULL
    if not _is_number(value):
        raise ValueError(value)
    return value


def tables(log: NvmlLog) -> dict[str, Table]:
    """Return columns and rows by table of the trace file; NULL is None.

    GPUTRACE_NVML_DEVICE has the columns of DEVICE, driverVersion, and lostNs: CLOCK_REALTIME when
    the card was lost. GPUTRACE_NVML_SAMPLE has gpu and the columns of SAMPLE,
    GPUTRACE_NVML_ACTIVITY gpu and those of ACTIVITY, GPUTRACE_TOPOLOGY those of TOPOLOGY,
    GPUTRACE_PROCESS_USE those of PROCESS.
    """
    active = ["gpu", *ACTIVITY]
    samples, activity = (
        [[None if v == NULL else v for v in columns[name].tolist()] for name in names]
        for columns, names in ((log.samples, COLUMNS), (log.activity, active))
    )
    devices = []
    for device in log.devices:
        cpus = format_ranges(sorted(device["cpuAffinity"] or ())).replace(" ", "")
        shown = device | {"cpuAffinity": cpus or None}
        described = (shown[name] for name in DEVICE)
        devices.append((*described, log.driver or None, device["lostNs"]))
    return {
        "GPUTRACE_NVML_DEVICE": ([*DEVICE, "driverVersion", "lostNs"], devices),
        "GPUTRACE_NVML_SAMPLE": (COLUMNS, list(zip(*samples, strict=True))),
        "GPUTRACE_NVML_ACTIVITY": (active, list(zip(*activity, strict=True))),
        "GPUTRACE_TOPOLOGY": (list(TOPOLOGY), log.topology),
        "GPUTRACE_PROCESS_USE": (list(PROCESS), [tuple(row) for row in log.processes]),
    }
