"""Steps by number of loader workers: what recordings predict, by whole runs with these numbers.

A training is recorded with one, two and four workers, a number a round, and `gputrace analyze`
predicts its step with one, two, four and eight. Each is held against runs without a recorder.
Workers that decode want a core each: numbers that this machine has no cores for are left out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from benchmarks.experiment import (
    ROUNDS,
    Check,
    Figure,
    Journal,
    analysis,
    completed,
    in_turn,
    lacks,
    near,
    printed_result,
    program,
    recorded,
    unfit,
)
from benchmarks.options import Options

TRAIN: Final = Path(__file__).with_name("loader_train.py")
SAMPLES: Final = {"sleeping": (), "decoding": ("PIL",), "mixed": ("PIL",)}
"""Kinds of samples, and what they need besides PyTorch."""
WORKERS: Final = (1, 2, 4, 8)
RECORDED: Final = (1, 2, 4)
OFF: Final = 0.10


def run(options: Options) -> int:
    """Print predicted steps beside those of whole runs; 1 where one is off by more than 10 %."""
    if why := unfit(options, "numpy", "torch"):
        print(f"loaders: {why}")
        return 0
    journal = Journal("loaders", options)
    return journal.each(SAMPLES, lambda part: _try(journal, part, options))


def _try(journal: Journal, part: str, options: Options) -> None:
    needs = SAMPLES[part]
    if why := lacks(*needs):
        return journal.skip(part, why)
    cores = len(os.sched_getaffinity(0))
    # Workers that sleep share cores with the process that trains.
    counts = [count for count in WORKERS if count < cores or not needs]
    if left := [str(count) for count in WORKERS if count not in counts]:
        journal.skip(part, f"{', '.join(left)} workers: no core for each, of {cores}")
    if not counts:
        return None
    train = partial(_train, part, options)
    turns = cycle(count for count in RECORDED if count in counts)
    variants = {
        "bare": lambda: printed_result(completed(train(counts))),
        "recorded": lambda: _recorded(train, next(turns)),
    }
    found = in_turn(journal, variants, options.runs_or(ROUNDS))
    truth = steps(found["bare"])
    journal.row(part, runs="bare", **{f"{count}_ms": step for count, step in truth.items()})
    for workers in RECORDED:
        own = [line for line in found["recorded"] if line["workers"] == workers]
        predicting = [line for line in own if line["loader"].get("predictions")]
        if predicting:
            _compare(journal, part, predicting, truth)
        if len(predicting) < len(own):
            of = f"{len(own) - len(predicting)} of {len(own)} recordings with {workers} workers"
            journal.fail(part, f"analysis predicts nothing from {of}")
    return None


def _train(part: str, options: Options, counts: Sequence[int]) -> tuple[str, ...]:
    cpu = ("--cpu",) if options.cpu else ()
    return program(str(TRAIN), "--samples", part, "--workers", ",".join(map(str, counts)), *cpu)


def _recorded(train: partial[tuple[str, ...]], workers: int) -> dict[str, Any]:
    """Record a run; add what analysis tells of its loader to what the program printed."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "t.sqlite")
        line = printed_result(completed(recorded(trace, train([workers]))))
        rows = analysis(trace).get("loader") or [{}]
    return line | {"workers": workers, "loader": rows[0]}


def _compare(
    journal: Journal, part: str, own: Sequence[Mapping[str, Any]], truth: Mapping[int, Figure]
) -> None:
    """Say and keep what recordings with a number of workers predict."""
    workers = own[0]["workers"]
    shown = {
        f"{name}_ms": Figure(tuple(line["loader"].get(f"{name}_ns", 0) / 1e6 for line in own))
        for name in ("step", "wait", "batch", "processor", "receive")
    }
    journal.row(part, recorded_with=workers, **shown)
    for check in checks(own, truth):
        journal.check(part, check)


def steps(runs: Sequence[Mapping[str, Any]]) -> dict[int, Figure]:
    """Return the steps that runs printed, by number of workers."""
    return {
        int(count): Figure(tuple(line["step_ms"][count] for line in runs))
        for count in runs[0]["step_ms"]
    }


def checks(own: Sequence[Mapping[str, Any]], truth: Mapping[int, Figure]) -> list[Check]:
    """Hold what recordings with one number of workers predict against whole runs, in ms."""
    found = []
    for count, figure in truth.items():
        rounds = [
            row["step_ns"] / 1e6
            for line in own
            for row in line["loader"]["predictions"]
            if row["workers"] == count
        ]
        if rounds:
            what = f"step with {count} by a recording with {own[0]['workers']}, ms"
            found.append(near(what, Figure(tuple(rounds)).median, figure, OFF))
    return found
