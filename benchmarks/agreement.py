"""Comparison of two recorders: gputrace's collector and nsys, over the same training.

On a machine with GPUs, PyTorch and nsys, trains on one GPU, as DistributedDataParallel and as
DataParallel, cuDNN's search off and seeds fixed, and compares the traces: kernels by name in each
step, copies, and each name's median duration. As a control each training is recorded a second time
by gputrace: by as much as these two differ, runs differ without any change of the recorder.
`python -m benchmarks.agreement A.sqlite B.sqlite` compares two files.
"""

from __future__ import annotations

import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.options import Options
from gputrace.collectors.backend import has_driver

TRAIN: Final = Path(__file__).with_name("overhead_train.py")
_LAUNCH: Final = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
_MODEL: Final = ("--model", "resnet50", "--batch", "32", "--steps", "40", "--warmup", "10")
CASES: Final = {
    "one GPU": (sys.executable, str(TRAIN), *_MODEL),
    "DistributedDataParallel, 2 GPUs": (*_LAUNCH, str(TRAIN), *_MODEL),
    "DataParallel, all GPUs": (sys.executable, str(TRAIN), *_MODEL, "--data-parallel"),
}
_FIRST_STEP: Final = 10
"""Steps before it warm up: allocations and library choices differ from run to run."""
_CLOSE: Final = 0.03
_COMMUNICATION: Final = re.compile(r"nccl", re.IGNORECASE)

_ISSUED: Final = """
SELECT s.step, g.start, g.end, {what}
FROM {table} AS g
JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS r
  ON r.correlationId = g.correlationId AND r.globalTid >> 24 = g.globalPid >> 24
JOIN GPUTRACE_STEP AS s
  ON s.globalTid >> 24 = g.globalPid >> 24 AND r.start >= s.start AND r.start < s.end
{join} WHERE s.step >= ?
"""


@dataclass(slots=True)
class Seen:
    """Contents of a trace in the steps after the first ones, over all processes."""

    steps: set[int] = field(default_factory=set)
    kernels: Counter[tuple[int, str]] = field(default_factory=Counter)
    """How many of a name in a step."""
    copies: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """How many of a kind and a size in a step."""
    durations: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Nanoseconds, by name."""


def read(path: Path) -> Seen:
    """Reads a trace with the tables of nsys and GPUTRACE_STEP."""
    seen = Seen()
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        names = "JOIN StringIds AS n ON n.id = g.mangledName"
        for step, start, end, name in _rows(database, "KERNEL", "n.value", names):
            seen.steps.add(step)
            seen.kernels[step, name] += 1
            seen.durations[name].append(end - start)
        for step, _, _, kind, size in _rows(database, "MEMCPY", "g.copyKind, g.bytes", ""):
            seen.copies[step, kind, size] += 1
    return seen


def _rows(database: sqlite3.Connection, kind: str, what: str, join: str) -> list[Any]:
    table = f"CUPTI_ACTIVITY_KIND_{kind}"
    query = _ISSUED.format(table=table, what=what, join=join)
    return database.execute(query, (_FIRST_STEP,)).fetchall()


def compare(a: Seen, b: Seen) -> bool:
    """Prints what both saw; whether they agree."""
    steps = a.steps & b.steps
    kernels = [_of_steps(seen.kernels, steps) for seen in (a, b)]
    copies = [_of_steps(seen.copies, steps) for seen in (a, b)]
    print(f"steps that both have: {len(steps)}")
    print(f"kernels: {kernels[0].total():,} and {kernels[1].total():,}; {_difference(kernels)}")
    print(f"copies: {copies[0].total():,} and {copies[1].total():,}; {_difference(copies)}")
    return kernels[0] == kernels[1] and copies[0] == copies[1] and _durations_agree(a, b)


def _of_steps(counts: Counter[Any], steps: set[int]) -> Counter[Any]:
    return Counter({key: count for key, count in counts.items() if key[0] in steps})


def _difference(counts: Sequence[Counter[Any]]) -> str:
    first, second = counts
    only = [(first - second).total(), (second - first).total()]
    return f"only in the first {only[0]:,}, only in the second {only[1]:,}"


def _durations_agree(a: Seen, b: Seen) -> bool:
    """Communication is left out: its kernels wait for each other, and so for the hosts."""
    names = [n for n in a.durations if not _COMMUNICATION.search(n) and n in b.durations]
    first, second = ({n: statistics.median(seen.durations[n]) for n in names} for seen in (a, b))
    ratios = {name: second[name] / first[name] for name in names}
    far = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > _CLOSE}
    weights = {name: sum(a.durations[name]) for name in names}
    share = sum(weights[name] for name in far) / sum(weights.values()) if names else 0.0
    print(
        f"median durations of {len(names)} names: {len(names) - len(far)} within {_CLOSE:.0%}; "
        f"the others hold {share:.1%} of the time"
    )
    for name, ratio in sorted(far.items(), key=lambda item: -weights[item[0]])[:10]:
        times = len(a.durations[name])
        print(f"  {ratio:.3f} of {first[name]:,.0f} ns, {times} times: {name[:90]}")
    return not far


def run(options: Options) -> int:
    """Records and compares; 1 where a recording fails. Without GPUs there is nothing to run."""
    if options.check or not has_driver():
        print("agreement: needs GPUs, PyTorch and nsys; see docs/benchmarks.md for what was seen")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for title, command in CASES.items():
            paths = [Path(folder) / f"{name}.sqlite" for name in ("cupti", "nsys", "cupti-again")]
            for path in paths:
                if not _record(path, path.stem.removesuffix("-again"), command):
                    return 1
            first, other, again = map(read, paths)
            print(f"\n{title}: cupti, then nsys", flush=True)
            compare(first, other)
            print(f"\n{title}: cupti, then cupti again")
            compare(first, again)
    return 0


def _record(path: Path, backend: str, command: Sequence[str]) -> bool:
    words = (sys.executable, "-m", "gputrace", "record", "--no-nvml", "--force", "-o", str(path))
    ran = subprocess.run(
        [*words, "--backend", backend, "--", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode or not path.exists():
        print(f"agreement: {backend} failed: {ran.stderr.strip()[-500:]}")
    return ran.returncode == 0 and path.exists()


if __name__ == "__main__":
    sys.exit(0 if compare(*(read(Path(word)) for word in sys.argv[1:3])) else 1)
