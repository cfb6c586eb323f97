"""Faults of real training on two GPUs, each recorded with its fault and without, in turn.

Of each recording with the fault: whether the first line names it, and how the predicted step
compares with that of the recordings without it. Needs two GPUs and PyTorch; takes 10 minutes.
GPUTRACE_FAULTS names some of the faults, with commas; GPUTRACE_KEEP the folder that the recordings
are kept in.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.options import Options

TRAIN: Final = Path(__file__).with_name("planted_train.py")
CLOSE: Final = 0.10
"""Part of the step without the fault by which a prediction may be off."""


@dataclass(frozen=True)
class Fault:
    """A fault of a training, and the same training without it."""

    name: str
    sick: str
    cured: str
    first: tuple[str, ...]
    """Ids of findings, of which one must come first."""
    cure: str
    """Id of the prediction."""
    processes: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)


FAULTS: Final = (
    Fault(
        "late host",
        "--batch 256 --late-rank 1 --late-ms 60",
        "--batch 256",
        ("late-host",),
        "late-host",
    ),
    Fault(
        "extra kernels",
        "--batch 256 --slow-rank 1 --extra-products 120",
        "--batch 256",
        ("straggler",),
        "straggler",
    ),
    Fault(
        "slow loader",
        "--batch 128 --wait-ms 250 --workers 2",
        "--batch 128 --wait-ms 250 --workers 12",
        ("data-feeding",),
        "prefetch",
    ),
    Fault(
        "pageable copies",
        "--batch 256 --float-input --pageable",
        "--batch 256 --float-input",
        ("h2d-pageable", "h2d-exposed"),
        "pinned",
    ),
    Fault(".item()", "--batch 96 --items 160", "--batch 96", ("sync-bound",), "sync"),
    Fault(
        "small launches",
        "--model resnet18 --batch 8",
        "--model resnet18 --batch 8 --whole-graph",
        ("launch-bound",),
        "graphs",
    ),
    Fault(
        "P2P off",
        "--model vgg16 --batch 32",
        "--model vgg16 --batch 32",
        ("host-staged-comm", "topology"),
        "peer-access",
        environment={"NCCL_P2P_DISABLE": "1"},
    ),
    Fault(
        "DataParallel",
        "--batch 128 --data-parallel",
        "--batch 64",
        ("gpu0-skew",),
        "ddp",
        processes=1,
    ),
)


def run(options: Options) -> int:
    """Print the table, a row for each fault as soon as it is there."""
    wanted = os.environ.get("GPUTRACE_FAULTS", "")
    heads = ("fault", "first line right", "found first", "recorded", "predicted", "range")
    print(f"| {' | '.join((*heads, 'measured', 'off by'))} |")
    print("| :-- | --: | :-- | --: | --: | --: | --: | --: |")
    for fault in FAULTS:
        if fault.name in wanted.split(",") or not wanted:
            print(_row(fault, min(options.runs, 3)), flush=True)
    return 0


def _row(fault: Fault, runs: int) -> str:
    pairs = [(_analyzed(fault, cured=False), _analyzed(fault, cured=True)) for _ in range(runs)]
    sick, cured = zip(*pairs, strict=True)
    measured = statistics.median(_step(report) for report in cured)
    first = [report["findings"][0]["id"] if report["findings"] else "none" for report in sick]
    found = [_prediction(report, fault.cure) for report in sick]
    right = sum(
        id in fault.first or (cure is not None and cure["finding"] == id)
        for id, cure in zip(first, found, strict=True)
    )
    known = sorted((cure for cure in found if cure), key=lambda cure: cure["step_ns"])
    cells = [
        fault.name,
        f"{right} of {runs}",
        ", ".join(sorted(set(first))),
        f"{statistics.median(map(_step, sick)) / 1e6:.1f}",
    ]
    if known:
        middle = known[len(known) // 2]
        low, high = min(c["low_ns"] for c in known), max(c["high_ns"] for c in known)
        cells += [f"{middle['step_ns'] / 1e6:.1f}", f"{low / 1e6:.1f} to {high / 1e6:.1f}"]
        cells += [f"{measured / 1e6:.1f}", f"{middle['step_ns'] / measured - 1:+.0%}"]
    else:
        cells += ["none", "", f"{measured / 1e6:.1f}", ""]
    return f"| {' | '.join(cells)} |"


def _prediction(report: Mapping[str, Any], cure: str) -> dict[str, Any] | None:
    return next((found for found in report["what_if"] if found["id"] == cure), None)


def _step(report: Mapping[str, Any]) -> float:
    return float(report["steps"]["mean_ns"] or 0)


def _analyzed(fault: Fault, *, cured: bool) -> dict[str, Any]:
    """Record a training, and return what the analysis of it says."""
    processes = 2 if cured else fault.processes
    train = [str(TRAIN), *(fault.cured if cured else fault.sick).split(), "--steps", "40"]
    started = [sys.executable, *train]
    if processes > 1:
        started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *train]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        command = [sys.executable, "-m", "gputrace", "record", "-o", str(path), "--", *started]
        environment = os.environ | ({} if cured else dict(fault.environment))
        recorded = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if recorded.returncode:
            raise RuntimeError(recorded.stderr[-2000:])
        analyze = [sys.executable, "-m", "gputrace", "analyze", str(path), "--json"]
        ran = subprocess.run(analyze, capture_output=True, text=True, check=True)
        kept = os.environ.get("GPUTRACE_KEEP")
        if kept:
            name = f"{fault.name.strip('.()').replace(' ', '-')}-{'cured' if cured else 'sick'}"
            path.replace(Path(kept) / f"{name}-{os.getpid()}-{time.time_ns() % 10**9}.sqlite")
    report: dict[str, Any] = json.loads(ran.stdout)
    return report
