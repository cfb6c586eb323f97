"""Report of sketches: the steps and kernels of each job, what changed, and cards over many runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gputrace.analyzers.sketch_changes import OWN, WARM_UP, find_changes
from gputrace.analyzers.sketch_kernels import (
    compare_cards,
    grown_kernels,
    kernel_times,
    read_windows,
    slow_cards,
)
from gputrace.model.sketches import KernelTime, RankSummary, SketchReport, Slowdown
from gputrace.store.sketches import RankSketch, Steps, latest_of_each_rank


def report_sketches(sketches: Sequence[RankSketch]) -> SketchReport:
    """Return what each rank's steps took, and what changed; ``sketches`` are of any jobs."""
    latest = latest_of_each_rank(sketches)
    jobs: dict[str, list[RankSketch]] = defaultdict(list)
    for sketch in latest:
        jobs[sketch.job].append(sketch)
    rows: dict[tuple[str, int], RankSummary] = {}

    def keep(sketch: RankSketch, steps: Steps) -> None:
        rows[sketch.host, sketch.pid] = _summary(sketch, steps)

    changes: list[Slowdown] = []
    summaries: list[RankSummary] = []
    kernels: list[KernelTime] = []
    # Ranks that train alone are compared with each other.
    runs = [read_windows([ranks[0] for ranks in jobs.values() if len(ranks) == 1])]
    for ranks in jobs.values():
        rows.clear()
        found = find_changes(ranks, keep)
        those = [rows.get((rank.host, rank.pid)) or _summary(rank, rank.load()) for rank in ranks]
        windows = read_windows(ranks)
        if windows.ranks:
            step_ns = round(float(np.median([row.median_ns for row in those])))
            found += [*slow_cards(windows, step_ns), *grown_kernels(windows, step_ns)]
            kernels += kernel_times(windows)
            runs += [windows] if len(ranks) > 1 else []
        changes += sorted(found, key=lambda change: -change.ns)
        summaries += those
    cards = compare_cards(runs) if len(jobs) > 1 else ()
    results = tuple(summaries), tuple(changes), tuple(kernels), tuple(cards)
    return SketchReport(1, "sketches", *results)


def _summary(sketch: RankSketch, steps: Steps) -> RankSummary:
    steps = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps
    middle, late = np.quantile(steps["length"], (0.5, 0.95))
    data, gc, compilation, checkpoint, queued = (
        round(float(steps[part].mean())) for part in (*OWN, "queued")
    )
    return RankSummary(
        job=sketch.job,
        rank=sketch.rank,
        host=sketch.host,
        pid=sketch.pid,
        steps=sketch.last + 1,
        median_ns=round(float(middle)),
        p95_ns=round(float(late)),
        data_ns=data,
        gc_ns=gc,
        compilation_ns=compilation,
        checkpoint_ns=checkpoint,
        queued_ns=queued,
        resident_bytes=int(steps["resident_bytes"][-1]),
    )
