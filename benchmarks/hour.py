"""An hour of recording into a ring: whether what it costs stays what it is in the first minutes.

`gputrace record --keep` records a program that launches kernels all the time; CUPTI is the tests'
stand-in, so that no GPU is needed and what CUPTI itself costs is not in it. Each minute tells the
processor time of the collector's thread, of the rest of the program and of the recorder, their
resident memory, and what is on disk.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.commands import gputrace
from benchmarks.measure import Failed, machine
from benchmarks.options import Options
from benchmarks.processes import collector_s, cpu_s, descendants, folder_of, name_of, resident
from benchmarks.tables import mebibytes, show
from tests.native.build import compile_all

KEEP_S: Final = 300
A_MILLISECOND: Final = 22
"""Launches before each pause of a millisecond: some 20,000 a second."""
MINUTE_S: Final = 60
BYTES_A_LAUNCH: Final = 150
"""A kernel's record and its call's, as in docs/recording-details.md."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds used up, and bytes held, at one moment."""

    at_s: float
    launches: int
    collector_s: float
    program_s: float
    recorder_s: float
    program_bytes: int
    recorder_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Minute:
    """From one sample to the next."""

    before: Sample
    after: Sample

    @property
    def launches(self) -> int:
        return self.after.launches - self.before.launches

    @property
    def seconds(self) -> float:
        return self.after.at_s - self.before.at_s

    @property
    def rate(self) -> float:
        return self.launches / self.seconds

    @property
    def collector_us(self) -> float:
        """Processor time of the collector's thread for each launch, in microseconds."""
        return 1e6 * (self.after.collector_s - self.before.collector_s) / self.launches

    @property
    def program_us(self) -> float:
        """Processor time of the other threads, the stand-in's included, for each launch, in us."""
        return 1e6 * (self.after.program_s - self.before.program_s) / self.launches

    @property
    def recorder_share(self) -> float:
        """Processor time of the recorder as a share of one core."""
        return (self.after.recorder_s - self.before.recorder_s) / self.seconds


def run(options: Options) -> int:
    """Prints a table of a line for each ten minutes; 1 where the ring was not bounded."""
    if options.check or not options.minutes:
        print("hour: give --minutes 60; see docs/benchmarks.md for measured figures")
        return 0
    print(f"hour: {machine()}; a stand-in for CUPTI, no GPU", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            samples = list(_record(Path(folder), round(options.minutes)))
    except Failed as failure:
        print(f"hour: {failure}", file=sys.stderr)
        return 1
    minutes = [Minute(*pair) for pair in pairwise(samples)]
    _show(minutes)
    return _judge(minutes)


def _record(folder: Path, minutes: int) -> Iterator[Sample]:
    """A sample when the program has begun, and one each minute."""
    compile_all(folder)
    output = folder / "trace.sqlite"
    each = f"run {1000 * MINUTE_S} 1 {A_MILLISECOND} calls ".split()
    # Still there when its last line is looked at.
    program = (str(folder / "workload"), "inject", "calls", *each * minutes, "sleep", "2000")
    options = ("--backend", "cupti", "--no-nvml", "--keep", f"{KEEP_S}s", "-o", str(output))
    environment = os.environ | {
        "GPUTRACE_CUPTI": str(folder / "libcupti.so.13"),
        "LD_LIBRARY_PATH": str(folder),
    }
    command = (*gputrace(), "record", *options, "--", *program)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as recorder:
        assert recorder.stdout is not None
        for line in recorder.stdout:
            sample = _sample(recorder.pid, int(line), output.with_name(f"{output.name}.spool"))
            print(f"hour: {sample}", file=sys.stderr, flush=True)
            yield sample
    if recorder.returncode:
        raise Failed(f"gputrace record ended with {recorder.returncode}")


def _sample(recorder: int, launches: int, spools: Path) -> Sample:
    """While the program waits for nobody: its line has just come."""
    below = descendants(recorder)
    program = next(pid for pid in below if name_of(folder_of(pid)) == "workload")
    collector = collector_s(program)
    others = [recorder, *(pid for pid in below if pid != program)]
    return Sample(
        time.monotonic(),
        launches,
        collector,
        cpu_s(folder_of(program)) - collector,
        sum(cpu_s(folder_of(pid)) for pid in others),
        resident(program),
        sum(map(resident, others)),
        sum(path.stat().st_size for path in spools.iterdir()),
    )


def _show(minutes: list[Minute]) -> None:
    tens = [minutes[start : start + 10] for start in range(0, len(minutes), 10)]
    header = (
        *("minutes", "launches a second", "collector µs a launch", "program µs a launch"),
        *("recorder % of a core", "program MiB", "recorder MiB", "on disk MiB, most"),
    )
    show(
        f"{len(minutes)} minutes with --keep {KEEP_S}s: medians of ten minutes each",
        header,
        [_line(10 * number, ten) for number, ten in enumerate(tens)],
    )


def _line(first: int, ten: list[Minute]) -> tuple[str, ...]:
    def middle(figure: Callable[[Minute], float]) -> float:
        return statistics.median(map(figure, ten))

    return (
        f"{first} to {first + len(ten)}",
        f"{middle(lambda minute: minute.rate):,.0f}",
        f"{middle(lambda minute: minute.collector_us):.2f}",
        f"{middle(lambda minute: minute.program_us):.2f}",
        f"{100 * middle(lambda minute: minute.recorder_share):.2f}",
        mebibytes(middle(lambda minute: minute.after.program_bytes)),
        mebibytes(middle(lambda minute: minute.after.recorder_bytes)),
        mebibytes(max(minute.after.disk_bytes for minute in ten)),
    )


def _judge(minutes: list[Minute]) -> int:
    """Return 1 if more was on disk than the bound at the fastest minute's rate, else 0."""
    bound = (1.1 * KEEP_S + 1) * BYTES_A_LAUNCH * max(minute.rate for minute in minutes)
    most = max(minute.after.disk_bytes for minute in minutes)
    print(f"\n  On disk {mebibytes(most)} MiB at most; the stated bound is {mebibytes(bound)} MiB")
    return int(most > bound)
