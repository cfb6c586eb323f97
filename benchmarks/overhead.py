"""Cost of recording for the program that is recorded, on a machine with a GPU and PyTorch.

Runs the same training in turn without a recorder, under `gputrace record` and under torch.profiler
(CUDA activity only), and prints the paired ratios of the steady steps' median times, and the memory
that each costs a process. Where the host is shared, runs of the same differ by more than a recorder
costs: so it also turns each recorder off and on every few steps within a run, and prints the ratio
of the turns. There the hooks and the sampling of NVML run throughout, and are in neither.

The turns tell what the records of calls cost: ``--api all``, the default, against ``none``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from benchmarks.options import Options
from gputrace.collectors.backend import has_driver

TRAIN: Final = Path(__file__).with_name("overhead_train.py")
CASES: Final = (("resnet50", 128), ("resnet18", 8))
"""A step that the GPU's work fills, and one that the host's launches fill."""
VARIANTS: Final = ("none", "gputrace", "torch.profiler")
TURNS: Final = {
    "gputrace --api all": (70, 6),
    "gputrace --api none": (70, 6),
    "torch.profiler": (14, 30),
}
"""Turns of each kind in a run, and steps in a turn; torch.profiler takes a second to start."""
COLLECTOR: Final = {"GPUTRACE_HOLD_NS": str(60 * 10**9)}
"""CUPTI is held through the turns without it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training: the median step in ms, and the peak of resident memory in MiB, of rank 0."""

    step_ms: float
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Turns:
    """The median step of each turn of one run, in ms, without and with the recorder."""

    off_ms: list[float]
    on_ms: list[float]

    @property
    def ratio(self) -> float:
        """Ratio of the mean turn with it to that without."""
        return statistics.mean(self.on_ms) / statistics.mean(self.off_ms)


def run(options: Options, processes: int = 2, cases: Sequence[tuple[str, int]] = CASES) -> int:
    """Prints two tables per case; 1 where training fails. Without a GPU there is nothing to run."""
    if options.check or not has_driver():
        print("overhead: needs a GPU and PyTorch; see docs/benchmarks.md for measured figures")
        return 0
    return by_turns(options, processes, cases) or by_runs(options, processes, cases)


def by_turns(options: Options, processes: int, cases: Sequence[tuple[str, int]]) -> int:
    """Recorders turned off and on within each of the runs."""
    for model, batch in cases:
        found: dict[str, list[Turns]] = {variant: [] for variant in TURNS}
        for turn in range(options.runs):
            for variant, runs in found.items():
                turns, steps = map(str, TURNS[variant])
                more = ("--turns", turns, "--turn-steps", steps)
                told = _train(variant, processes, model, batch, more, COLLECTOR)
                if told is None:
                    return 1
                runs.append(Turns(told["off_ms"], told["on_ms"]))
                print(
                    f"{model} batch {batch} run {turn} {variant}: {runs[-1].ratio:.3f}", flush=True
                )
        _show_turns(f"{model}, batch {batch}, {processes} GPUs, by turns within a run", found)
    return 0


def by_runs(options: Options, processes: int, cases: Sequence[tuple[str, int]]) -> int:
    """Runs with and without recorders, in turn."""
    for model, batch in cases:
        found: dict[str, list[Run]] = {variant: [] for variant in VARIANTS}
        for turn in range(options.runs):
            first = turn % len(VARIANTS)
            for variant in (*VARIANTS[first:], *VARIANTS[:first]):
                told = _train(variant, processes, model, batch)
                if told is None:
                    return 1
                ran = Run(told["median_ms"], told["peak_mib"])
                found[variant].append(ran)
                figures = f"{ran.step_ms:.3f} ms, {ran.peak_mib:.0f} MiB"
                print(f"{model} batch {batch} turn {turn} {variant}: {figures}", flush=True)
        _show(f"{model}, batch {batch}, {processes} GPUs", found)
    return 0


def _train(
    variant: str,
    processes: int,
    model: str,
    batch: int,
    more: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any] | None:
    """Return what the training prints; None if it failed."""
    train = [str(TRAIN), "--model", model, "--batch", str(batch), *more]
    if variant == "torch.profiler":
        train.append("--profiler")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node", str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        name, *how = variant.split()
        record = [
            sys.executable,
            "-m",
            "gputrace",
            "record",
            "-o",
            f"{folder}/t.sqlite",
            *how,
            "--",
        ]
        command = [*(record if name == "gputrace" else []), *launch, *train]
        environment = os.environ | variables
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not lines:
        print(f"overhead: {variant} failed:\n{ran.stderr.strip()[-2000:]}")
        return None
    told: dict[str, Any] = json.loads(lines[-1])
    return told


def _show_turns(title: str, found: dict[str, list[Turns]]) -> None:
    print(f"\n{title}\n\n| recorder | step without ms | with | ratio | 95 % interval |")
    print("| :-- | --: | --: | --: | --: |")
    for variant, runs in found.items():
        ratios = [run.ratio for run in runs]
        off = statistics.mean(statistics.mean(run.off_ms) for run in runs)
        on = statistics.mean(statistics.mean(run.on_ms) for run in runs)
        mean, half = statistics.mean(ratios), _half_width(ratios)
        interval = f"{mean - half:.3f} to {mean + half:.3f}"
        print(f"| {variant} | {off:.2f} | {on:.2f} | {mean:.3f} | {interval} |")
    print(flush=True)


def _show(title: str, found: dict[str, list[Run]]) -> None:
    print(f"\n{title}\n\n| recorder | median step ms | ratio to none | 95 % interval | MiB more |")
    print("| :-- | --: | --: | --: | --: |")
    for variant, runs in found.items():
        pairs = list(zip(runs, found["none"], strict=True))
        ratios = [run.step_ms / none.step_ms for run, none in pairs]
        mean, half = statistics.mean(ratios), _half_width(ratios)
        more = statistics.median(run.peak_mib - none.peak_mib for run, none in pairs)
        print(
            f"| {variant} | {statistics.median(run.step_ms for run in runs):.2f} | {mean:.3f} "
            f"| {mean - half:.3f} to {mean + half:.3f} | {more:.0f} |"
        )
    print(flush=True)


def _half_width(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean, by Student's t."""
    if len(values) < 2:
        return math.nan
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(values), 2.26)
    return t * statistics.stdev(values) / math.sqrt(len(values))
