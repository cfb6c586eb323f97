"""Minutes of recording on a GPU: whether what it costs stays what it is in the first one.

Records two trainings at once, each on a GPU of its own: one whole, one into a ring (``--keep``).
Within each the recorder is turned off for a few steps again and again, so that each minute tells
the ratio of the steps with it to those without; and the processor time of the collector's thread,
the memory of program and recorder, and what is on disk.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.commands import gputrace
from benchmarks.measure import Failed, machine
from benchmarks.options import Options
from benchmarks.overhead_train import LINE_S
from benchmarks.processes import collector_s, cpu_s, descendants, folder_of, resident
from benchmarks.tables import mebibytes, show
from gputrace.collectors.backend import has_driver

TRAIN: Final = Path(__file__).with_name("overhead_train.py")
KINDS: Final[dict[str, tuple[str, ...]]] = {"whole": (), "ring": ("--keep", "1min")}
MODEL: Final = ("--model", "resnet18", "--batch", "8")
A_MINUTE: Final = round(60 / LINE_S)


@dataclass(frozen=True, slots=True)
class Sample:
    """Ten seconds of a recording: its steps' medians, and what was used up or held at their end."""

    on_ms: float
    off_ms: float
    steps: int
    """Since the start."""
    collector_s: float
    recorder_s: float
    program_bytes: int
    recorder_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """One training, recorded."""

    samples: list[Sample]
    bytes: int
    said: str
    """Last lines of the recorder."""


def run(options: Options) -> int:
    """Prints a table of a line for each minute of each recording; 1 where one failed."""
    if options.check or not options.minutes or not has_driver():
        print("minutes: needs GPUs, PyTorch and --minutes 4; see docs/benchmarks.md for figures")
        return 0
    print(f"minutes: {machine()}", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        runs = {
            kind: pool.submit(_record, Path(folder, f"{kind}.sqlite"), gpu, how, options.minutes)
            for gpu, (kind, how) in enumerate(KINDS.items())
        }
        try:
            recorded = {kind: future.result() for kind, future in runs.items()}
        except Failed as failure:
            print(f"minutes: {failure}", file=sys.stderr)
            return 1
    for kind, found in recorded.items():
        _show(kind, found)
    return 0


def _record(output: Path, gpu: int, how: Sequence[str], minutes: float) -> Recorded:
    train = (sys.executable, str(TRAIN), *MODEL, "--minutes", str(minutes))
    command = (*gputrace(), "record", *how, "-o", str(output), "--", *train)
    variables = {"CUDA_VISIBLE_DEVICES": str(gpu), "GPUTRACE_HOLD_NS": str(60 * 10**9)}
    with (
        output.with_suffix(".err").open("w+") as said,
        subprocess.Popen(
            command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=said, text=True
        ) as recorder,
    ):
        samples = list(_samples(recorder, output))
        recorder.wait()
        said.seek(0)
        told = said.read()[-1500:].strip()
        if recorder.returncode or not samples:
            raise Failed(f"{output.stem}: it ended with {recorder.returncode}: {told}")
        return Recorded(samples, output.stat().st_size, told)


def _samples(recorder: subprocess.Popen[str], output: Path) -> Iterator[Sample]:
    """Until the program's output ends."""
    assert recorder.stdout is not None
    spools = output.with_name(f"{output.name}.spool")
    for line in recorder.stdout:
        if line.startswith("{"):
            told: dict[str, Any] = json.loads(line)
            yield _sample(told, recorder.pid, spools)


def _sample(told: dict[str, Any], recorder: int, spools: Path) -> Sample:
    below = descendants(recorder)
    program = max(below, key=collector_s)
    others = [recorder, *(pid for pid in below if pid != program)]
    return Sample(
        told["on_ms"],
        told["off_ms"],
        told["steps"],
        collector_s(program),
        sum(cpu_s(folder_of(pid)) for pid in others),
        resident(program),
        sum(map(resident, others)),
        sum(path.stat().st_size for path in spools.iterdir()),
    )


def _show(kind: str, recorded: Recorded) -> None:
    header = (
        *("minute", "step without ms", "with", "ratio", "collector % of a core"),
        *("recorder %", "program MiB", "recorder MiB", "on disk MiB, most"),
    )
    samples = recorded.samples
    minutes = [samples[at : at + A_MINUTE] for at in range(0, len(samples), A_MINUTE)]
    show(kind, header, [_line(at, minute) for at, minute in enumerate(minutes)])
    size = mebibytes(recorded.bytes)
    print(f"\n  {samples[-1].steps:,} steps; trace of {size} MiB\n  {recorded.said}", flush=True)


def _line(at: int, minute: list[Sample]) -> tuple[str, ...]:
    first, last = minute[0], minute[-1]
    seconds = LINE_S * max(len(minute) - 1, 1)
    return (
        str(at),
        f"{statistics.median(sample.off_ms for sample in minute):.2f}",
        f"{statistics.median(sample.on_ms for sample in minute):.2f}",
        f"{statistics.mean(sample.on_ms / sample.off_ms for sample in minute):.3f}",
        f"{100 * (last.collector_s - first.collector_s) / seconds:.2f}",
        f"{100 * (last.recorder_s - first.recorder_s) / seconds:.2f}",
        mebibytes(last.program_bytes),
        mebibytes(last.recorder_bytes),
        mebibytes(max(sample.disk_bytes for sample in minute)),
    )
