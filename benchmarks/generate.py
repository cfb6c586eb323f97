"""`python -m benchmarks.generate KIND STEPS PATH`: makes one trace; `inputs.py` calls it.

The run is the one that other tools were compared on: eight GPUs, data waits of 20 ms and input
copies of 4 ms in each step, some 100 ms of computing, 20 all-reduces; rank 5 is 10 % slower.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.synthetic import Plan, simulate, write_kineto, write_nsys, write_nvprof


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


def main(kind: str, steps: int, path: Path) -> None:
    recording = simulate(plan(steps))
    if kind == "nsys":
        write_nsys(recording, path)
    elif kind == "nvprof":
        write_nvprof(recording, path)
    else:
        path.mkdir()
        write_kineto(recording, path)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
