"""Where the processor's time goes, as a sampling profiler of native code sees it.

py-spy (`pip install py-spy`; GPUTRACE_BENCH_PYSPY names the program) looks at the stacks of C and
of Python hundreds of times a second. It stops the process each time, so that shares count and
seconds do not. What kernels of the system do, as clearing pages, counts for who asked.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from benchmarks import commands
from benchmarks.inputs import USUAL, kineto_folder, nsys_export, nvprof_folder
from benchmarks.measure import Failed, Job, machine, pin
from benchmarks.measure import run as run_once
from benchmarks.options import Options
from benchmarks.tables import show

RATE: Final = 400
"""Samples a second."""
MOST: Final = 16
"""Functions in a table."""

WORK: Final = (
    ("imports, and Python's start", r"importlib|dataclasses\.py|typing|ld-linux|<module>"),
    ("SQLite: steps and pages", r"sqlite3[A-Z]|libsqlite3|pread64|vdbe"),
    ("ADBC and Arrow: values into columns", r"adbc|Arrow|libarrow|pyarrow"),
    ("decoding JSON", r"_json\.c|msgspec|json/|orjson"),
    ("gathering by index", r"mapiter|take|Take|subscript|choose|compress"),
    ("sorting", r"sort|partition|bincount|unique"),
    ("searching", r"binsearch|searchsorted"),
    ("arithmetic and casts over columns", r"_multiarray_umath|numpy/"),
    ("copying and clearing memory", r"libc\.so"),
)
"""Kind of work of a sample, by the first pattern in its innermost function; else Python."""
_PYTHON: Final = "Python between them"
_OURS: Final = re.compile(r"(?P<name>[^;(]+) \(gputrace/(?P<file>[^:;)]+):\d+\)")


def run(options: Options) -> int:
    """Prints two tables for each hot path; 1 where one cannot be profiled."""
    if options.check:
        return 0
    program = os.environ.get("GPUTRACE_BENCH_PYSPY") or shutil.which("py-spy")
    if program is None:
        print("profile: no py-spy (pip install py-spy); nothing is profiled")
        return 0
    pin()
    print(f"profile: {machine()}")
    try:
        with tempfile.TemporaryDirectory(prefix="gputrace-profile-") as folder:
            for job in _jobs(Path(folder)):
                samples = _profiled(program, job, Path(folder) / "stacks", options.runs)
                _show(job.label, samples)
    except Failed as failure:
        print(f"profile: {failure}", file=sys.stderr)
        return 1
    return 0


def _jobs(folder: Path) -> Iterator[Job]:
    usual, page = nsys_export(USUAL), str(folder / "page.html")
    yield commands.analyze(usual, "analyze, nsys")
    yield commands.analyze(nvprof_folder(USUAL), "analyze, nvprof, eight files")
    yield commands.analyze(kineto_folder(USUAL), "analyze, Kineto, eight files")
    words = ("report", str(usual), "--force", "-o", page)
    yield Job("report", ("env", "GPUTRACE_CACHE=off", *commands.gputrace(), *words))


def _profiled(program: str, job: Job, target: Path, turns: int) -> Counter[str]:
    """How often each stack was seen, outermost frame first, in all processes of some runs."""
    seen: Counter[str] = Counter()
    options = ("record", "--native", "--subprocesses", "-r", str(RATE), "-f", "raw", "-o")
    for _ in range(turns):
        done = run_once((program, *options, str(target), "--", *job.command))
        if done.code or not target.exists():
            raise Failed(f"{job.label}: {done.error.strip()[-300:]}")
        for line in target.read_text(encoding="utf-8").splitlines():
            stack, _, count = line.rpartition(" ")
            seen[stack] += int(count)
    return seen


def _show(label: str, samples: Counter[str]) -> None:
    by_work: Counter[str] = Counter()
    by_function: Counter[str] = Counter()
    for stack, count in samples.items():
        by_work[work_of(stack)] += count
        by_function[function_of(stack)] += count
    total = sum(samples.values())
    show(f"{label}: what the processor does, {total:,} samples", ("work", "share"),
         _shares(by_work.most_common(), total))  # fmt: skip
    show(f"{label}: for which function of ours", ("function", "share"),
         _shares(by_function.most_common(MOST), total))  # fmt: skip


def _shares(counts: Iterable[tuple[str, int]], total: int) -> list[tuple[str, str]]:
    return [(name, f"{100 * count / total:.1f} %") for name, count in counts]


def work_of(stack: str) -> str:
    """Return the kind of work of the innermost function."""
    leaf = stack.rpartition(";")[2]
    if "<module>" in stack and "importlib" in stack:
        return WORK[0][0]
    return next((work for work, pattern in WORK if re.search(pattern, leaf)), _PYTHON)


def function_of(stack: str) -> str:
    """The innermost function of gputrace."""
    if "<module>" in stack and "importlib" in stack:
        return WORK[0][0]
    found = list(_OURS.finditer(stack))
    return f"{found[-1]['name']}, {found[-1]['file']}" if found else _PYTHON
