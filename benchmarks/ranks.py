"""Runs of many ranks, a file each: read by one process, and by the workers of a Dask cluster.

The answers must be the same byte for byte.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks import commands
from benchmarks.inputs import ranks_folder
from benchmarks.measure import Failed, Job, Run, Series, alternate, machine, pin
from benchmarks.options import Options
from benchmarks.tables import mebibytes, seconds, show, verdict

USUAL: Final = "64 ranks of 16 k"
LARGE: Final = "64 ranks of 1 M"
MANY: Final = "1,000 ranks of 10 k"
HUGE: Final = ("1,000 ranks of 100 k", "10,000 ranks of 10 k")
WORKERS: Final = (1, 2)
"""Numbers of workers, up to the cores that commands get."""
ALONE: Final = "one process"
TARGET_LARGE_S: Final = 40.0
TARGET_TIMES: Final = 2 / 1.3
_LIMIT_S: Final = 3_600.0
_HEADER: Final = (
    *("command", "runs", "wall s", "CPU s", "of the client", "of each worker"),
    *("peak MiB", "anonymous MiB"),
)


def run(options: Options) -> int:
    """Prints the tables; 1 where the answers differ or a command does not work."""
    if options.check:
        return 0
    pin()
    print(f"ranks: {machine()}")
    try:
        if options.huge:
            return max(_measure(size, (), 1) for size in HUGE)
        if options.large:
            return max(_measure(LARGE, WORKERS, options.runs), _measure(MANY, (), options.runs))
        return _measure(USUAL, WORKERS, options.runs)
    except Failed as failure:
        print(f"ranks: {failure}", file=sys.stderr)
        return 1


def jobs(size: str, workers: Sequence[int]) -> list[Job]:
    """The analysis of a run by one process, and by so many workers."""
    alone = commands.analyze(ranks_folder(size), ALONE)
    cluster = [
        Job(_label(count), (*alone.command, "--scheduler", f"local:{count}")) for count in workers
    ]
    return [alone, *cluster]


def _label(workers: int) -> str:
    return f"Dask, {workers} worker{'s' if workers > 1 else ''}"


def _measure(size: str, workers: Sequence[int], turns: int) -> int:
    folder = ranks_folder(size)
    series = alternate(jobs(size, workers), turns, limit_s=_LIMIT_S)
    for label, one in series.items():
        if one.runs[-1].code:
            raise Failed(f"{label}: {one.runs[-1].error.strip()[-500:]}")
    length = sum(path.stat().st_size for path in folder.iterdir())
    kernels = sum(int(gpu["kernels"]) for gpu in json.loads(series[ALONE].runs[0].output)["gpus"])
    show(
        f"{size}, a file each: {mebibytes(length)} MiB, {kernels:,} kernels",
        _HEADER,
        [_row(label, one) for label, one in series.items()],
    )
    same = len({one.output for each in series.values() for one in each.runs}) == 1
    print(f"\n  The answers are {'the same byte for byte' if same else 'NOT the same'}")
    if size == LARGE:
        least = min(one.wall_s for one in series.values())
        print(f"  Target {TARGET_LARGE_S:.0f} s: {verdict(least < TARGET_LARGE_S)}")
    if workers:
        _show_gain(*(series[_label(count)] for count in workers))
    return 0 if same else 1


def _row(label: str, one: Series) -> tuple[str, ...]:
    client, *each = one.runs[-1].each_s
    return (
        label,
        str(len(one.runs)),
        seconds(one.wall_s),
        seconds(one.cpu_s),
        seconds(client),
        " ".join(seconds(worker) for worker in each if worker > 1) or "-",
        mebibytes(one.peak_bytes),
        mebibytes(one.anonymous_bytes),
    )


def _show_gain(one: Series, two: Series) -> None:
    """By the clock, and by the processor: on idle cores the client and the longest worker."""
    least = [statistics.median(_alone_s(run) for run in each.runs) for each in (one, two)]
    gains = {"by the clock": one.times(two), "by the processor's time": least[0] / least[1]}
    for how, gain in gains.items():
        print(f"  2 workers, {how}: {gain:.2f} times 1's pace ", end="")
        print(f"(target {TARGET_TIMES:.2f}: {verdict(gain >= TARGET_TIMES)})")


def _alone_s(run: Run) -> float:
    """Seconds on as many idle cores as processes, if the client only worked when no worker did."""
    client, *each = run.each_s
    return client + max(each)
