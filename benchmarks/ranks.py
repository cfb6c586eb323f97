"""A run of many ranks, a file each: read by one process, and by the workers of a Dask cluster.

The answers must be the same byte for byte. Without ``--large`` the files are small.
"""

from __future__ import annotations

import json
import sys
from typing import Final

from benchmarks import commands, measure
from benchmarks.inputs import RANKS, ranks_folder
from benchmarks.measure import Failed, Job, Run, machine
from benchmarks.options import Options
from benchmarks.tables import mebibytes, seconds, show

WORKERS: Final = 4
_LIMIT_S: Final = 1_800.0


def run(options: Options) -> int:
    """Prints the table; 1 where the answers differ or a command does not work."""
    print(f"ranks: {machine()}")
    folder = ranks_folder("1 M" if options.large else "16 k")
    one = commands.analyze(folder, "one process")
    more = ("--scheduler", f"local:{WORKERS}")
    several = Job(f"{WORKERS} Dask workers", (*one.command, *more))
    try:
        runs = {job.label: _run(job) for job in (one, several)}
    except Failed as failure:
        print(f"ranks: {failure}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in folder.iterdir())
    show(
        f"{RANKS} ranks, a file each: {mebibytes(size)} MiB, {_kernels(runs[one.label]):,} kernels",
        ("command", "wall s", "CPU s", "peak MiB, all processes"),
        [
            (
                label,
                seconds(ran.wall_s),
                seconds(ran.user_s + ran.system_s),
                mebibytes(ran.peak_bytes),
            )
            for label, ran in runs.items()
        ],
    )
    same = len({ran.output for ran in runs.values()}) == 1
    print(f"\n  The answers are {'the same byte for byte' if same else 'NOT the same'}")
    return 0 if same else 1


def _run(job: Job) -> Run:
    ran = measure.run(job.command, _LIMIT_S)
    if ran.code:
        raise Failed(f"{job.label}: {ran.error.strip()[-500:]}")
    return ran


def _kernels(ran: Run) -> int:
    return sum(int(gpu["kernels"]) for gpu in json.loads(ran.output)["gpus"])
