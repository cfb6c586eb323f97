"""Whole processes, measured from outside: wall time, processor time and peak memory."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
"""The checkout; every command runs here."""
CORES: Final = 2
"""Cores for commands, so that figures of larger machines compare with those of CI."""
LIMIT_S: Final = 300.0
_LAUNCH: Final = str(ROOT / "benchmarks" / "launch.py")
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One process, from its start to its end."""

    wall_s: float
    user_s: float
    system_s: float
    peak_bytes: int
    """Peak memory of all processes together, where the command starts others."""
    anonymous_bytes: int
    """Peak of the memory that no file backs, looked at every 20 ms."""
    code: int
    """The exit status, or minus the signal that ended it."""
    output: str
    error: str
    each_s: tuple[float, ...] = ()
    """Processor time of each process that lived for 20 ms, the command's own first."""


@dataclass(frozen=True, slots=True)
class Job:
    """A command to be measured."""

    label: str
    command: tuple[str, ...]
    before: Callable[[], object] | None = None
    """Preparation before each run, outside the measurement."""


@dataclass(slots=True)
class Series:
    """The runs of one job."""

    runs: list[Run] = field(default_factory=list)

    @property
    def walls(self) -> list[float]:
        return [run.wall_s for run in self.runs]

    @property
    def wall_s(self) -> float:
        return statistics.median(self.walls)

    @property
    def cpu_s(self) -> float:
        return statistics.median(run.user_s + run.system_s for run in self.runs)

    @property
    def user_s(self) -> float:
        return statistics.median(run.user_s for run in self.runs)

    @property
    def peak_bytes(self) -> int:
        return max(run.peak_bytes for run in self.runs)

    @property
    def anonymous_bytes(self) -> int:
        return max(run.anonymous_bytes for run in self.runs)

    def times(self, other: Series) -> float:
        """How many times as long as another job: the median over the turns both had."""
        pairs = zip(self.walls, other.walls, strict=False)
        return statistics.median(mine / theirs for mine, theirs in pairs)


class Failed(Exception):
    """A command that must work did not."""


def run(command: Sequence[str], limit_s: float = LIMIT_S) -> Run:
    """Runs a command to its end, or ends it, and all it started, after `limit_s`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        launch = (sys.executable, "-I", "-S", _LAUNCH, str(limit_s), str(out), str(err))
        done = subprocess.run((*launch, *command), cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return Run(0.0, 0.0, 0.0, 0, 0, done.returncode, "", done.stderr)
        *times, peak, anonymous, code = done.stdout.split()[:6]
        each = tuple(map(float, done.stdout.split()[6:]))
        texts = [path.read_text(errors="replace") for path in (out, err)]
    wall, user, system = map(float, times)
    sizes = int(peak) * 1024, int(anonymous) * 1024
    return Run(wall, user, system, *sizes, int(code), texts[0], texts[1], each)


def alternate(
    jobs: Sequence[Job],
    turns: int,
    patience_s: float = float("inf"),
    limit_s: float = LIMIT_S,
) -> dict[str, Series]:
    """Runs the jobs in turn, so that what else the machine does falls on all of them alike.

    A job that fails, or has had `patience_s` in all, gets no further turn.
    """
    series = {job.label: Series() for job in jobs}
    for _ in range(turns):
        for job in jobs:
            runs = series[job.label].runs
            if runs and (runs[-1].code or sum(run.wall_s for run in runs) > patience_s):
                continue
            if job.before:
                job.before()
            runs.append(run(job.command, limit_s))
    return series


def alternate_all(jobs: Sequence[Job], turns: int) -> dict[str, Series]:
    """Alternate jobs that must succeed, after one run of each that does not count."""
    for job in jobs:
        _require(job, run(job.command))
    series = alternate(jobs, turns)
    for job in jobs:
        _require(job, series[job.label].runs[-1])
    return series


def pin() -> None:
    """Keeps this process and all that it starts on `CORES` cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def machine() -> str:
    """Return what the figures depend on, and nothing that names the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    return f"{cores} cores, {platform.machine()}, {platform.system()}, {python}"


def _require(job: Job, result: Run) -> None:
    if result.code:
        last = (result.error.strip().splitlines() or ["it said nothing"])[-1]
        raise Failed(f"{job.label}: exit status {result.code} ({last})")
