"""`python -m benchmarks.generate KIND PATH STEPS TIMES [HOSTS]`: makes one trace, for `inputs.py`.

The run is the one that other tools were compared on: eight GPUs, data waits of 20 ms and input
copies of 4 ms in each step, some 100 ms of computing, 20 all-reduces; rank 5 is 10 % slower.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from benchmarks.repeated import repeat
from tests.helpers.rank_files import Node, write_parts
from tests.synthetic import Plan, Recording, simulate, write_kineto, write_nsys, write_nvprof


def plan(steps: int) -> Plan:
    """With its all-reduces, copies and warm-up it makes 1,000 kernels a step and rank."""
    return Plan(
        ranks=8,
        steps=steps,
        kernels_per_step=970,
        layers=24,
        distinct_kernels=60,
        kernel_ns=100_000,
        sync_every_step=True,
        data_wait_ns=20_000_000,
        h2d_ns=4_000_000,
        allreduces=20,
        slow_rank=5,
        slow_factor=1.1,
    )


def dense(steps: int) -> Plan:
    """Short kernels, each launched late: as many gaps as kernels, on one GPU."""
    return Plan(
        ranks=1,
        steps=steps,
        kernels_per_step=330,
        layers=20,
        distinct_kernels=55,
        kernel_ns=6_000,
        launch_ns=7_000,
        python_ns=14_000,
        sync_every_step=True,
        h2d_ns=90_000,
    )


def write_ranks(recording: Recording, folder: Path, times: int, hosts: int) -> None:
    """The run on many machines at once: each machine has the eight ranks of the recording.

    A file of each rank of the recording is made once, and copied with another rank and host in it.
    """
    nodes = [Node("node", (rank,)) for rank in range(len(recording.processes))]
    for place, path in enumerate(write_parts(recording, folder, nodes)):
        with closing(sqlite3.connect(path)) as database:
            database.execute("VACUUM")
        repeat(path, times)
        for host in range(hosts):
            rank = host * len(nodes) + place
            target = folder / f"rank{rank:05}.sqlite"
            shutil.copy(path, target)
            with closing(sqlite3.connect(target)) as database, database:
                database.execute("PRAGMA synchronous = OFF")
                own = (f"node{host}", rank, hosts * len(nodes))
                database.execute(
                    "UPDATE GPUTRACE_PROCESS SET host = ?, rank = ?, worldSize = ?", own
                )
                database.execute(
                    "UPDATE GPUTRACE_META SET value = ? WHERE name = 'hostname'", own[:1]
                )
        path.unlink()


def main(kind: str, path: Path, steps: int, times: int, hosts: int = 1) -> None:
    recording = simulate(dense(steps) if kind == "dense" else plan(steps))
    if kind in ("nsys", "dense"):
        write_nsys(recording, path)
        repeat(path, times)
    elif kind == "nvprof":
        write_nvprof(recording, path)
    elif kind == "ranks":
        write_ranks(recording, path, times, hosts)
    else:
        path.mkdir()
        write_kineto(recording, path)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
