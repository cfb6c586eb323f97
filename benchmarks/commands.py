"""The commands that are measured, other programs' apart."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Final

from benchmarks.measure import Failed, Job, Series

FLOOR: Final = "floor: SQLite, one C pass over two tables"
ANALYZE: Final = "gputrace analyze FILE --json"
AGAIN: Final = "the same, again, with the cache it has made"
_FLOOR_SCRIPT: Final = str(Path(__file__).with_name("floor.py"))


def gputrace() -> tuple[str, ...]:
    """The command of this environment, or the one that GPUTRACE_BENCH_COMMAND names."""
    if named := os.environ.get("GPUTRACE_BENCH_COMMAND"):
        return tuple(shlex.split(named))
    installed = Path(sys.executable).with_name("gputrace")
    return (str(installed),) if installed.exists() else (sys.executable, "-m", "gputrace")


def analyze(path: Path, label: str = ANALYZE, cache: str = "off") -> Job:
    """The whole command; with nothing kept from before, unless a cache folder is given."""
    variable = f"GPUTRACE_CACHE={cache}"
    return Job(label, ("env", variable, *gputrace(), "analyze", str(path), "--json"))


def floor(path: Path, label: str = FLOOR) -> Job:
    return Job(label, (sys.executable, _FLOOR_SCRIPT, str(path)))


def python(code: str, label: str) -> Job:
    return Job(label, (sys.executable, "-c", code))


def rows(floors: Series) -> tuple[int, int]:
    """Kernels and API calls in the file, as the floor counted them."""
    kernels, calls = json.loads(floors.runs[0].output)["rows"]
    return int(kernels), int(calls)


def seconds_inside(floors: Series) -> float:
    """The floor's time without the start of Python, at its best."""
    return min(float(json.loads(run.output)["seconds"]) for run in floors.runs)


def require_right(analyses: Series, kernels: int) -> None:
    """A fast wrong answer is no result: all kernels counted, all classes summing to the span."""
    for gpu in json.loads(analyses.runs[-1].output)["gpus"]:
        kernels -= int(gpu["kernels"])
        classes = ("compute", "communication", "h2d", "other_copy", "memset", "idle")
        if sum(int(gpu[f"{name}_ns"]) for name in classes) != int(gpu["span_ns"]):
            raise Failed(f"the classes of GPU {gpu['gpu']} do not sum to its span")
    if kernels:
        raise Failed(f"gputrace missed {kernels:,} kernels")


def usage(label: str = "gputrace --help") -> Job:
    return Job(label, (*gputrace(), "--help"))
