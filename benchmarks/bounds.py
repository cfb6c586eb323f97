"""Bounds of predictions: no step without a cause is shorter than its compute.

In generated runs, the compute of a step is found anew, as the union of the kernels that the
simulator made in it, apart from all that the analysis makes of the file; in recordings, it is what
the breakdown says. A prediction must leave the busiest GPU its compute. Where the cure takes work
from GPUs, that is of `straggler` the busiest rank that is not slower than the median, and of `ddp`
the first GPU, or in the range the GPU with least.
"""

from __future__ import annotations

import lzma
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.diagnosis import plant_of
from benchmarks.options import Options
from gputrace.analyzers.pipeline import analyze
from gputrace.errors import GputraceError
from gputrace.model.results import Analysis, Step, WhatIf
from gputrace.readers.registry import open_trace
from tests.helpers.recordings import SHARED
from tests.synthetic import Kind, Plan, Recording, mixed_plan, random_plan, simulate, write_nsys

RUNS: Final = 1_000
FEWER: Final = 100
"""Runs with ``--check``."""
STEPS: Final = 16
"""Steps of a run at most, of which a prediction needs 5 and a planted burst 14."""
Place = tuple[int, int | None]
"""Rank and GPU."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one GPU in a mean measured step."""

    compute_ns: float
    """Time in which any kernel computes."""
    kernel_ns: float
    """The kernels' own time, one after another."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """One prediction of a run, and what is wrong with it."""

    run: int | str
    """Seed of a generated run, or name of a recording."""
    cure: WhatIf
    wrong: tuple[str, ...]


def run(options: Options) -> int:
    """Prints the table and each violation; gives 1 if there is any."""
    seeds = range(FEWER if options.check else RUNS)
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        found = [one for own in pool.map(bounded, seeds, chunksize=4) for one in own]
        print(table(f"{len(seeds):,} generated runs", found))
        files = [] if options.check else _recordings()
        real = [own for own in pool.map(of_recording, files) if own is not None]
    if real:
        print("\n" + table(f"{len(real)} recordings", [one for own in real for one in own]))
    return int(options.check and any(one.wrong for one in found))


def _recordings() -> list[Path]:
    """Return the files of the folder ``GPUTRACE_RECORDINGS``, or of the shared one."""
    folder = Path(os.environ.get("GPUTRACE_RECORDINGS", SHARED / "traces"))
    return sorted(path for path in folder.rglob("*") if path.is_file())


def of_recording(path: Path) -> list[Bounded] | None:
    """Return the predictions for a recording, each with what is wrong with it; None for a file
    that cannot be analyzed.
    """
    with tempfile.TemporaryDirectory() as folder:
        opened = path
        if path.suffix == ".xz":
            opened = Path(folder) / path.stem
            opened.write_bytes(lzma.decompress(path.read_bytes()))
        try:
            with open_trace(opened) as trace:
                analysis = analyze(trace)
        except GputraceError:
            return None
    each = [(row, row.of("compute") / max(row.steps, 1)) for row in analysis.breakdown]
    work = {(row.rank, row.gpu): Work(ns, ns) for row, ns in each if ns}
    return [Bounded(path.name, cure, tuple(wrong(cure, work))) for cure in analysis.what_if]


def bounded(seed: int) -> list[Bounded]:
    """Return the predictions for a generated run, each with what is wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sqlite"
        recording = _write(seed, path)
        with open_trace(path) as trace:
            analysis = analyze(trace)
    work = measured_work(analysis, recording) if analysis.what_if else {}
    return [Bounded(seed, cure, tuple(wrong(cure, work))) for cure in analysis.what_if]


def _write(seed: int, path: Path) -> Recording:
    """Make a run at random, with one plant or with several causes, in turn."""
    if seed % 3 == 1:
        # Whether the plant lengthens the run does not matter here.
        plant, rng = plant_of(seed // 3), np.random.default_rng((seed, 7))
        recording = simulate(plant.alter(rng, _short(plant.base(rng, seed))))
        plant.write(recording, path)
        return recording
    recording = simulate(_short(mixed_plan(seed) if seed % 3 else random_plan(seed)))
    write_nsys(recording, path, nvtx=("nccl",) if recording.plan.input_copies else ("nccl", "data"))
    return recording


def _short(plan: Plan) -> Plan:
    """Return the plan with fewer steps: their number changes no bound."""
    steps = min(plan.steps, STEPS)
    return replace(
        plan,
        steps=steps,
        validation_after=tuple(min(step, steps - 3) for step in plan.validation_after),
        checkpoint_after=tuple(min(step, steps - 3) for step in plan.checkpoint_after),
    )


def wrong(cure: WhatIf, work: Mapping[Place, Work]) -> Iterator[str]:
    """Yield what is wrong with a prediction, given the work of each GPU."""
    if not cure.low_ns <= cure.step_ns <= cure.high_ns <= cure.now_ns:
        yield "the range does not hold it"
    if not 0 < cure.gain_ns == cure.now_ns - cure.step_ns:
        yield "no gain"
    likely, least = compute_left(cure.id, work)
    for name, step, floor in (("step", cure.step_ns, likely), ("range", cure.low_ns, least)):
        if step < floor:
            yield f"{name} of {step:,} ns, with {floor:,.0f} ns to compute"


def compute_left(cure: str, work: Mapping[Place, Work]) -> tuple[float, float]:
    """Return the compute of a step that a cure leaves, in all likelihood and at least."""
    every = [own.compute_ns for own in work.values()]
    if cure == "ddp":
        return work[min(work)].compute_ns, min(every)
    if cure == "straggler":
        median = sorted(own.kernel_ns for own in work.values())[(len(work) - 1) // 2]
        keeps = [own.compute_ns for own in work.values() if own.kernel_ns <= median]
        return max(keeps), max(keeps)
    return max(every), max(every)


def measured_work(analysis: Analysis, recording: Recording) -> dict[Place, Work]:
    """Return the work of each GPU in a mean steady step."""
    steps: dict[Place, list[Step]] = {}
    for step in analysis.step_list:
        if step.phase == "steady":
            steps.setdefault((step.rank, step.gpu), []).append(step)
    return {place: _work(recording, place, own) for place, own in steps.items()}


def _work(recording: Recording, place: Place, steps: Sequence[Step]) -> Work:
    kernels = recording.of_kind(Kind.KERNEL, Kind.GRAPH)
    kernels = kernels[(kernels["rank"] == place[0]) & (kernels["gpu"] == place[1])]
    compute = kernel = 0
    for step in steps:
        inside = kernels[(kernels["end"] > step.start_ns) & (kernels["start"] < step.end_ns)]
        start = np.maximum(inside["start"], step.start_ns)
        end = np.minimum(inside["end"], step.end_ns)
        kernel += int((end - start).sum())
        compute += _united(start.tolist(), end.tolist())
    return Work(compute / len(steps), kernel / len(steps))


def _united(starts: Sequence[int], ends: Sequence[int]) -> int:
    """Return the nanoseconds that any of some intervals cover."""
    covered, reach = 0, 0
    for start, end in sorted(zip(starts, ends, strict=True)):
        covered += max(0, end - max(start, reach))
        reach = max(reach, end)
    return covered


def table(runs: str, found: Sequence[Bounded]) -> str:
    """The figures by cure, as Markdown, and each violation; `runs` says how many, of what."""
    lines = ["| cure | predictions | violations |", "| :-- | --: | --: |"]
    for id in sorted({one.cure.id for one in found}):
        own = [one for one in found if one.cure.id == id]
        lines.append(f"| {id} | {len(own):,} | {sum(bool(one.wrong) for one in own)} |")
    with_any = len({one.run for one in found})
    broken = [one for one in found if one.wrong]
    lines += [
        "",
        f"{len(found):,} predictions for {with_any:,} of {runs}, of which "
        f"{len(broken):,} are wrong.",
        "",
    ]
    lines += [f"- {one.run}, {one.cure.id}: {'; '.join(one.wrong)}" for one in broken]
    return "\n".join(lines).rstrip()
