"""How well `compare` tells what differs between generated runs, whose truth is planted.

Pairs of one plan that differ in nothing but chance, which must show no difference; and pairs with
one change, of which the class that changed most in truth must be told, by about the true amount.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

import gputrace
from benchmarks.options import Options
from gputrace.model.comparison import ClassChange, Comparison
from gputrace.model.time_class import CLASSES
from tests.synthetic import Plan, Recording, random_plan, simulate, write_nsys
from tests.synthetic.variants import gpu_step_ns

PAIRS: Final = 200
"""Number of pairs of each sort."""
MATTERS: Final = 0.02
"""Part of a step from which a true change must be found."""
NEAR: Final = 0.02
"""Part of a step by which the amount may be off."""
LEAST_RIGHT: Final = 0.95

CHANGES: Final[dict[str, Callable[[Plan], Plan]]] = {
    "kernels 20 % shorter": lambda plan: replace(plan, kernel_ns=int(plan.kernel_ns * 0.8)),
    "longer waits for data": lambda plan: replace(
        plan, data_wait_ns=plan.data_wait_ns + gpu_step_ns(plan) // 5, sync_every_step=True
    ),
    "input copies of twice the time": lambda plan: replace(plan, h2d_ns=2 * plan.h2d_ns),
    "slower all-reduces": lambda plan: replace(
        plan, allreduce_ns=plan.allreduce_ns + gpu_step_ns(plan) // 10
    ),
    "six allocations a step": lambda plan: replace(
        plan, allocs_per_step=plan.allocs_per_step + 6, alloc_ns=gpu_step_ns(plan) // 60
    ),
    "a slower host": lambda plan: replace(plan, python_ns=3 * plan.python_ns + 5_000),
}


@dataclass(frozen=True, slots=True)
class Score:
    """How one pair was understood."""

    change: str
    """Nothing where only chance differs."""
    verdict: str
    wrong: str
    """Nothing where all is right."""


def run(options: Options) -> int:
    """Prints the table; gives 1 where too few pairs are understood."""
    scores = [*map(same, range(PAIRS)), *map(changed, range(PAIRS))]
    print(table(scores))
    sorts = [[s for s in scores if bool(s.change) == planted] for planted in (False, True)]
    right = min(sum(not s.wrong for s in sort) / len(sort) for sort in sorts)
    return int(right < LEAST_RIGHT) if options.check else 0


def same(seed: int) -> Score:
    """Two runs of a plan, of which only the dice differ."""
    plan = random_plan(seed)
    _, found = compared(plan, replace(plan, seed=seed + 10_000, model_seed=seed))
    pair = found.pair
    assert pair is not None
    wrong = [] if found.verdict in ("same", "unclear") else [found.verdict]
    wrong += [row.name for row in pair.classes if row.changed]
    wrong += ["a kernel" for row in pair.kernels if row.changed][:1]
    return Score("", found.verdict, ", ".join(wrong))


def changed(seed: int) -> Score:
    """Two runs that differ in one planted way, and by chance."""
    plan, name = random_plan(seed), list(CHANGES)[seed % len(CHANGES)]
    truths, found = compared(
        plan, CHANGES[name](replace(plan, seed=seed + 10_000, model_seed=seed))
    )
    return Score(name, found.verdict, ", ".join(_wrong(truths, found)))


def _wrong(truths: list[dict[str, float]], found: Comparison) -> Iterator[str]:
    pair = found.pair
    if pair is None or pair.step is None:
        yield "no steps"
        return
    step = truths[0]["total"]
    true = {name: truths[1][name] - truths[0][name] for name in (*CLASSES, "total")}
    rows = {row.name: row for row in pair.classes}
    most = max(CLASSES, key=lambda name: abs(true[name]))
    if abs(true[most]) >= MATTERS * step and not (rows[most].changed or _noise(rows[most], true)):
        yield f"{most} not told"
    for name, row in rows.items():
        off = abs(row.difference_ns - true.get(name, row.difference_ns)) / step
        if off > NEAR and not _inside(row, true[name]):
            yield f"{name} off by {off:.1%}"
    if abs(true["total"]) < 0.005 * step and found.verdict in ("faster", "slower"):
        yield found.verdict


def _noise(row: ClassChange, true: dict[str, float]) -> bool:
    """Return True if the steps scatter so much that the true change and none are both possible."""
    return _inside(row, 0) and _inside(row, true[row.name])


def _inside(row: ClassChange, value: float) -> bool:
    return row.low_ns is not None and row.high_ns is not None and row.low_ns <= value <= row.high_ns


def compared(a: Plan, b: Plan) -> tuple[list[dict[str, float]], Comparison]:
    """Planted and found change of each class, per step and GPU."""
    with tempfile.TemporaryDirectory() as folder:
        paths, truths = [Path(folder) / "a.sqlite", Path(folder) / "b.sqlite"], []
        for plan, path in zip((a, b), paths, strict=True):
            recording = simulate(plan)
            write_nsys(recording, path, nvtx=("nccl",) if plan.input_copies else ("nccl", "data"))
            truths.append(truth(recording))
        return truths, gputrace.compare(*paths)


def truth(recording: Recording) -> dict[str, float]:
    """Nanoseconds of each class and in all, mean over the whole steady steps and the GPUs."""
    windows = recording.truth.windows
    steps = sum(w.phase == "steady" and w.whole for w in windows) / len(recording.processes)
    rows = [
        {name: row.get(name, 0) / max(steps, 1) for name in CLASSES}
        for row in recording.truth.breakdown.values()
    ]
    means = {name: float(np.mean([row[name] for row in rows])) for name in CLASSES}
    return means | {"total": sum(means.values())}


def table(scores: list[Score]) -> str:
    """Markdown: a row for each sort of pair, then the pairs that are wrong."""
    lines = ["| what differs | pairs | right | verdicts |", "| :-- | --: | --: | :-- |"]
    for change in dict.fromkeys(score.change for score in scores):
        own = [score for score in scores if score.change == change]
        verdicts = Counter(score.verdict for score in own)
        told = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        right = sum(not score.wrong for score in own)
        lines.append(f"| {change or 'nothing but chance'} | {len(own)} | {right} | {told} |")
    wrong = [
        f"- {score.change or 'chance'}, pair {number % PAIRS}: {score.wrong}"
        for number, score in enumerate(scores)
        if score.wrong
    ]
    return "\n".join([*lines, "", *wrong])
