"""How well steps and causes are found in generated runs, whose truth is planted.

A run counts as right if its steps are called training, their number is exact on every rank, and
no boundary is off by more than 1 % of a step. Causes are compared over the true steady steps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.options import Options
from gputrace.analyzers.gpu_shards import GpuShardView, PerGpu
from gputrace.analyzers.steps import FoundSteps
from gputrace.model.intervals import Times
from gputrace.model.time_class import IDLE_CAUSES
from gputrace.readers.registry import open_trace
from tests.helpers.per_gpu import gpus_with_lanes
from tests.synthetic import Plan, Recording, Window, random_plan, simulate, write_nsys

RUNS: Final = 200
BOUNDARY: Final = 0.01
"""Part of a step by which a boundary may be off."""
CAUSE: Final = 0.02
"""Part of the time by which a cause may be off."""
LEAST_RIGHT: Final = 0.97


@dataclass(frozen=True, slots=True)
class Score:
    """How one run was understood."""

    seed: int
    steps: str
    """Nothing where all is right, else what is wrong."""
    causes: dict[str, float]
    """The largest error of each cause over the GPUs, as a part of the time."""

    @property
    def causes_right(self) -> bool:
        return all(error <= CAUSE for error in self.causes.values())


def run(options: Options) -> int:
    """Prints the table; gives 1 where too few runs are understood."""
    scores = [score(seed) for seed in range(RUNS)]
    print(table(scores))
    right = sum(not s.steps for s in scores)
    return int(right < LEAST_RIGHT * len(scores)) if options.check else 0


def score(seed: int) -> Score:
    """Simulates a run, writes it as an nsys export, and compares what is found with the truth."""
    plan = random_plan(seed)
    recording = simulate(plan)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        write_nsys(recording, path, nvtx=_ranges(plan))
        with open_trace(path) as trace:
            gpus, found = gpus_with_lanes(trace)
            errors = _cause_errors(recording, gpus)
    return Score(seed, ", ".join(_wrong_steps(recording, found)), errors)


def _ranges(plan: Plan) -> tuple[str, ...]:
    """Without an input copy nothing but a named range can prove that data was waited for."""
    return ("nccl",) if plan.input_copies else ("nccl", "data")


def _wrong_steps(recording: Recording, found: FoundSteps) -> Iterator[str]:
    for rank in sorted({window.rank for window in recording.truth.windows}):
        true = _windows(recording, rank, "warmup", "steady")
        windows = found.by_rank.get(rank)
        if windows is None or windows.kind != "training":
            yield f"rank {rank}: no training steps for {len(true)}"
        elif len(windows) != len(true):
            yield f"rank {rank}: {len(windows)} steps for {len(true)}"
        else:
            off = np.abs(windows.start - [w.start for w in true])
            off = np.maximum(off, np.abs(windows.end - [w.end for w in true]))
            worst = float(off.max()) / float(np.median([w.end - w.start for w in true]))
            if worst > BOUNDARY:
                yield f"rank {rank}: a boundary is off by {worst:.0%} of a step"


def _windows(recording: Recording, rank: int, *phases: str) -> list[Window]:
    return [
        window
        for window in recording.truth.windows
        if window.rank == rank and window.phase in phases and window.whole
    ]


def _cause_errors(recording: Recording, gpus: PerGpu) -> dict[str, float]:
    errors = dict.fromkeys(IDLE_CAUSES, 0.0)
    steady = [_windows(recording, lane.gpu.rank, "steady") for lane in gpus.lanes]
    having = [(lane, own) for lane, own in zip(gpus.lanes, steady, strict=True) if own]
    found = gpus.each(_idle_in, (lane for lane, _ in having), (own for _, own in having))
    for (lane, _), by_cause in zip(having, found, strict=True):
        truth = recording.truth.breakdown[lane.gpu.gpu]
        for cause, nanoseconds in zip(IDLE_CAUSES, by_cause.tolist(), strict=True):
            error = abs(nanoseconds - truth.get(cause, 0)) / truth["total"]
            errors[cause] = max(errors[cause], error)
    return errors


def _idle_in(one: GpuShardView, windows: list[Window]) -> Times:
    """Nanoseconds by cause."""
    spans = [w.start for w in windows], [w.end for w in windows]
    found: Times = one.lane.causes.within(*spans).sum(axis=0)
    return found


def table(scores: list[Score]) -> str:
    """The figures, as Markdown."""
    count = len(scores)
    right, proven = (sum(not s.steps for s in scores), sum(s.causes_right for s in scores))
    lines = [
        "| of the runs | |",
        "| :-- | --: |",
        f"| number of steps exact, boundaries within 1 % | {right} of {count} |",
        f"| every cause within 2 % of the time | {proven} of {count} |",
        "",
        "| cause | mean error | largest error |",
        "| :-- | --: | --: |",
    ]
    for cause in IDLE_CAUSES:
        errors = [s.causes[cause] for s in scores]
        lines.append(f"| {cause} | {np.mean(errors):.3%} | {max(errors):.2%} |")
    wrong = [f"- run {s.seed}: {s.steps}" for s in scores if s.steps]
    return "\n".join([*lines, "", *(wrong and ["Not right:", "", *wrong])])
