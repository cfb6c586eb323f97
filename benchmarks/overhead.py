"""What recording costs the program that is recorded, on a machine with a GPU and PyTorch.

Runs the same training in turn without a recorder, under `gputrace record` and under torch.profiler
(CUDA activity only), and prints the paired ratios of the steady steps' median times, and the memory
that each costs a process.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.options import Options
from gputrace.collectors.cuda import has_driver

TRAIN: Final = Path(__file__).with_name("overhead_train.py")
CASES: Final = (("resnet50", 128), ("resnet18", 8))
"""A step that the GPU's work fills, and one that the host's launches fill."""
VARIANTS: Final = ("none", "gputrace", "torch.profiler")


@dataclass(frozen=True, slots=True)
class Run:
    """One training: the median step in ms, and the peak of resident memory in MiB, of rank 0."""

    step_ms: float
    peak_mib: float


def run(options: Options, processes: int = 2, cases: Sequence[tuple[str, int]] = CASES) -> int:
    """Prints a table per case; 1 where training fails. Without a GPU there is nothing to run."""
    if options.check or not has_driver():
        print("overhead: needs a GPU and PyTorch; see docs/benchmarks.md for measured figures")
        return 0
    for model, batch in cases:
        found: dict[str, list[Run]] = {variant: [] for variant in VARIANTS}
        for turn in range(options.runs):
            first = turn % len(VARIANTS)
            for variant in (*VARIANTS[first:], *VARIANTS[:first]):
                ran = _train(variant, processes, model, batch)
                if ran is None:
                    return 1
                found[variant].append(ran)
                told = f"{ran.step_ms:.3f} ms, {ran.peak_mib:.0f} MiB"
                print(f"{model} batch {batch} turn {turn} {variant}: {told}", flush=True)
        _show(f"{model}, batch {batch}, {processes} GPUs", found)
    return 0


def _train(variant: str, processes: int, model: str, batch: int) -> Run | None:
    train = [str(TRAIN), "--model", model, "--batch", str(batch)]
    if variant == "torch.profiler":
        train.append("--profiler")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    with tempfile.TemporaryDirectory() as folder:
        record = [sys.executable, "-m", "gputrace", "record", "-o", f"{folder}/t.sqlite", "--"]
        command = [*(record if variant == "gputrace" else []), *launch, *train]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not lines:
        print(f"overhead: {variant} failed: {ran.stderr.strip().splitlines()[-1:]}")
        return None
    measured = json.loads(lines[-1])
    return Run(float(measured["median_ms"]), float(measured["peak_mib"]))


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
