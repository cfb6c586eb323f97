"""Phases of a step and what the host's side of recording costs, by the clocks of three loops.

transformers' Trainer, Lightning's and a plain loop of DistributedDataParallel time their own
calls. Of each, the phases that `gputrace analyze` tells are held against these clocks; and whole
runs without a recorder against runs with all that is recorded of hosts and nothing of GPUs
(``--backend host``): on two GPUs at once, each with half of the cores, and then swapped, so that
neither the GPU nor the hour is in the ratio; on one in turn.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.experiment import (
    ROUNDS,
    WORKLOADS,
    Check,
    Figure,
    Journal,
    analysis,
    at_once,
    cards,
    completed,
    half_width,
    in_lane,
    in_turn,
    lacks,
    printed_result,
    program,
    recorded,
    unfit,
)
from benchmarks.measure import Failed
from benchmarks.options import Options

TRAIN: Final = WORKLOADS / "torch_trainers.py"
TRAINERS: Final = {
    "transformers": ("transformers", "accelerate"),
    "lightning": ("pytorch_lightning",),
    "plain": (),
}
"""Loops, and what they need besides PyTorch."""
STEPS, WARMUP = 200, 20
PAIRS: Final = 4
"""Pairs of runs, each with its swap on two GPUs."""
OFF: Final = 0.03
"""Part of a phase by which it may be off, or of a tenth of the step where that is more."""
COST: Final = 0.01


def run(options: Options) -> int:
    """Print the phases of each loop beside its clocks; 1 where something is missed."""
    if why := unfit(options, "torch"):
        print(f"phases: {why}")
        return 0
    journal = Journal("phases", options)
    return journal.each(TRAINERS, lambda part: _try(journal, part, options))


def _try(journal: Journal, part: str, options: Options) -> None:
    if why := lacks(*TRAINERS[part]):
        return journal.skip(part, why)
    ranks = 1 if options.cpu else min(max(len(cards()), 1), 2)
    device = ("--device", "cpu", "--layers", "2") if options.cpu else ("--layers", "12")
    words = (str(TRAIN), "--trainer", part, "--clocks", "--steps", str(STEPS))
    train = program(*words, "--warmup", str(WARMUP), "--gpus", str(ranks), *device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "t.sqlite")
        found = in_turn(journal, {"": partial(_analyzed, trace, train)}, options.runs_or(ROUNDS))
        for check in phases(found[""]):
            journal.check(part, check)
        alone = program(*words, "--warmup", str(WARMUP), "--gpus", "1", *device)
        hosts = recorded(trace, alone, "--backend", "host", "--no-nvml")
        lanes = (0, 1) if ranks > 1 else (None,)
        turns = in_turn(journal, {"": partial(_ratio, alone, hosts, lanes)}, options.runs_or(PAIRS))
    ratios = Figure(tuple(turns[""]))
    journal.row(part, host_recorded_beside_not=ratios)
    journal.check(part, cost(ratios))
    return None


def _told(command: Sequence[str]) -> dict[str, Any]:
    return printed_result(completed(command))


def _ratio(bare: tuple[str, ...], hosts: tuple[str, ...], lanes: Sequence[int | None]) -> float:
    """Return the ratio of the step with the host's side recorded to that without."""
    logs = 0.0
    for lane in lanes:
        pair = ((hosts, lane), (bare, None if lane is None else 1 - lane))
        runs = [partial(_told, in_lane(command, own)) for command, own in pair]
        own, other = at_once(runs) if len(lanes) > 1 else [run() for run in runs]
        logs += math.log(own["step"] / other["step"])
    return math.exp(logs / len(lanes))


def _analyzed(trace: Path, command: tuple[str, ...]) -> dict[str, Any]:
    """Record, and add to what the program says what analysis says of the same steps.

    Of control stretches analysis tells no phases, but the program's clocks have them.
    """
    line = _told(recorded(trace, command, "--no-control"))
    rows = analysis(trace, "--steps", f"{WARMUP}:{STEPS}")["step_phases"]
    first = next((row for row in rows if row["rank"] == 0), None)
    if first is None:
        raise Failed("analysis tells no phases")
    return line | {"found": {row["name"]: row["host_ns"] / 1e9 for row in first["phases"]}}


def phases(rounds: list[dict[str, Any]]) -> list[Check]:
    """Hold each phase as analysis tells it against the loop's clock, in ms of a step.

    Of the rounds, the one counts whose phase is off by the median.
    """
    checks = []
    for name in rounds[0]["phases"]:
        if name == "other":  # It has what no clock was around.
            continue
        pairs = sorted((_pair(line, name) for line in rounds), key=lambda pair: pair[0] - pair[1])
        found, clock = pairs[len(pairs) // 2]
        step = 1e3 * rounds[0]["step"]
        checks.append(Check(f"{name}, ms", found, clock, OFF * max(clock, step / 10)))
    return checks


def _pair(line: Mapping[str, Any], name: str) -> tuple[float, float]:
    return 1e3 * line["found"].get(name, 0.0), 1e3 * line["phases"][name]


def cost(ratios: Figure) -> Check:
    """Ask that what is recorded of hosts lengthens a step by a hundredth at most."""
    lengthened, noise = statistics.mean(ratios.rounds) - 1, half_width(ratios.rounds)
    what = "the host's side lengthens a step by"
    return Check(what, lengthened, COST, 0.0, 0.0 if math.isnan(noise) else noise, at_most=True)
