"""What recording costs the program that is recorded, on a machine with a GPU and PyTorch.

Runs the same training in turn without a recorder, under `gputrace record` and under torch.profiler
(CUDA activity only), and prints the paired ratios of the steady steps' median times.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.options import Options
from gputrace.collectors.cupti import has_driver

TRAIN: Final = Path(__file__).with_name("overhead_train.py")
CASES: Final = (("resnet50", 64), ("resnet18", 8))
VARIANTS: Final = ("none", "gputrace", "torch.profiler")


def run(options: Options, processes: int = 2, cases: Sequence[tuple[str, int]] = CASES) -> int:
    """Prints a table per case; 1 where training fails. Without a GPU there is nothing to run."""
    if options.check or not has_driver():
        print("overhead: needs a GPU and PyTorch; see docs/benchmarks.md for measured figures")
        return 0
    for model, batch in cases:
        found: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for turn in range(options.runs):
            for variant in VARIANTS:
                step = _step_ms(variant, processes, model, batch)
                if step is None:
                    return 1
                found[variant].append(step)
                print(f"{model} batch {batch} turn {turn} {variant}: {step:.3f} ms", flush=True)
        _show(f"{model}, batch {batch}, {processes} GPUs", found)
    return 0


def _step_ms(variant: str, processes: int, model: str, batch: int) -> float | None:
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
    return float(json.loads(lines[-1])["median_ms"])


def _show(title: str, found: dict[str, list[float]]) -> None:
    print(f"\n{title}\n\n| recorder | median step ms | ratio to none | 95 % interval |")
    print("| :-- | --: | --: | --: |")
    for variant, times in found.items():
        ratios = [t / n for t, n in zip(times, found["none"], strict=True)]
        mean, half = statistics.mean(ratios), _half_width(ratios)
        print(
            f"| {variant} | {statistics.median(times):.2f} | {mean:.3f} "
            f"| {mean - half:.3f} to {mean + half:.3f} |"
        )
    print(flush=True)


def _half_width(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean, by Student's t."""
    if len(values) < 2:
        return math.nan
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}.get(len(values), 2.26)
    return t * statistics.stdev(values) / math.sqrt(len(values))
