"""Programs that should end under the recorder as they do without: exit code, output, kernels.

Small programs of each framework, some with their own profiler inside the recording, run many times
without, with ``gputrace record`` and with ``gputrace arm``, several at once. A run is whole if its
exit code and its standard output are those of the runs without, and if the trace has as many
kernels (and replays of CUDA graphs) as most traces of the program have, one a step at least, and
all steps, where hooks see them.
"""

from __future__ import annotations

import math
import os
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

from benchmarks.experiment import (
    WORKLOADS,
    Check,
    Ended,
    Journal,
    arm,
    execute,
    lacks,
    program,
    recorded,
    unfit,
)
from benchmarks.measure import Failed
from benchmarks.options import Options

RUNS: Final = 30
STEPS: Final = 24
"""Steps of each program without options."""
AT_ONCE: Final = 10
LIMIT_S: Final = 180.0
_FRAMEWORKS: Final = WORKLOADS / "frameworks"
_ROWS: Final = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    "GPUTRACE_STEP",
)


@dataclass(frozen=True, slots=True)
class Program:
    """A program, what it needs, and what of it no trace has."""

    words: tuple[str, ...]
    modules: tuple[str, ...]
    needs_gpu: bool = False
    marks_steps: bool = False
    """The hooks see its steps."""
    has_profiler: bool = False
    """Its own profiler runs for a while, of which a recording need not have all kernels."""
    how: tuple[str, ...] = ()
    """Options of `gputrace record`."""


def _torch(*more: str, gpu: bool = False, how: tuple[str, ...] = ()) -> Program:
    words = ("torch_steps.py", *more)
    return Program(words, ("torch",), gpu, "graph" not in more, "--profiler" in more, how)


def _jax(*more: str) -> Program:
    words = ("jax_steps.py", *more)
    return Program(words, ("jax",), marks_steps=True, has_profiler="--profiler" in more)


PROGRAMS: Final = {
    "torch": _torch(),
    "torch.compile": _torch("--mode", "compile", gpu=True),
    "torch-graph": _torch("--mode", "graph", gpu=True),
    "torch-callables": _torch("--mode", "callables", gpu=True),
    "torch-graph-nodes": _torch("--mode", "graph", gpu=True, how=("--graph-nodes",)),
    "torch-hw-trace": _torch(gpu=True, how=("--hw-trace",)),
    "torch.profiler": _torch("--profiler"),
    "jax": _jax(),
    "jax-buffers": _jax("--buffers"),
    "jax.profiler": _jax("--profiler"),
    "cupy": Program(("cupy_steps.py",), ("cupy",), needs_gpu=True),
    "numba": Program(("numba_steps.py",), ("numba",), needs_gpu=True),
    "triton": Program(("triton_steps.py",), ("triton", "torch"), needs_gpu=True),
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded run, and the rows of its trace; -1 without one."""

    ended: Ended
    kernels: int
    replays: int
    steps: int


@dataclass(frozen=True, slots=True)
class Least:
    """The least that a trace has to have."""

    work: int
    """Kernels and replays; 0: how many there are is not asked."""
    steps: int


def run(options: Options) -> int:
    """Print a line for each program; 1 if a run is not whole."""
    if why := unfit(options):
        print(f"harmless: {why}")
        return 0
    journal = Journal("harmless", options)
    return journal.each(PROGRAMS, lambda part: _try(journal, part, options))


def _try(journal: Journal, part: str, options: Options) -> None:
    chosen = PROGRAMS[part]
    if why := lacks(*chosen.modules) or ("needs a GPU" if chosen.needs_gpu and options.cpu else ""):
        return journal.skip(part, why)
    command = program(str(_FRAMEWORKS / chosen.words[0]), *chosen.words[1:])
    began = monotonic()
    first = execute(command, LIMIT_S)
    if first.code:
        return journal.skip(part, f"does not run by itself: {first.last_words}")
    at_once = min(AT_ONCE, max((os.cpu_count() or 1) // 2, 1))
    runs = affordable(options.runs_or(RUNS), journal.left_s, at_once / (monotonic() - began))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        bare = list(pool.map(lambda _: execute(command, LIMIT_S), range(runs)))
        traces = [Path(folder, f"{number}.sqlite") for number in range(runs)]
        runs_of = list(pool.map(lambda trace: _recorded(command, chosen.how, trace), traces))
        armed = list(pool.map(lambda _: execute(arm(command), LIMIT_S), range(runs)))
    least = Least(
        0 if options.cpu or chosen.has_profiler else STEPS, STEPS if chosen.marks_steps else 0
    )
    whole, why = whole_runs(bare, runs_of, least)
    kernels, replays, steps = usual(runs_of)
    cells = {"kernels": kernels, "replays": replays, "steps": steps, "not_whole": why or "–"}
    same = sum((ended.code, ended.output) == (0, bare[0].output) for ended in armed)
    journal.row(part, whole=f"{whole} of {runs}", armed=f"{same} of {runs}", **cells)
    journal.check(part, Check("whole runs", whole, runs, 0))
    journal.check(part, Check("armed runs", same, runs, 0))
    return None


def affordable(wanted: int, left_s: float, per_s: float) -> int:
    """Return how many runs without and with a recorder there is time for; three at least.

    A recorded run is taken to last half as long again as one without, an armed one as long.
    """
    if math.isinf(left_s):
        return wanted
    return max(min(wanted, int(left_s * per_s / 3.5)), min(wanted, 3))


def _recorded(command: Sequence[str], how: Sequence[str], trace: Path) -> Recorded:
    ended = execute(recorded(trace, command, *how), LIMIT_S)
    try:
        counts = _counts(trace)
    except sqlite3.Error:
        counts = [-1, -1, -1]
    trace.unlink(missing_ok=True)
    return Recorded(ended, *counts)


def _counts(trace: Path) -> list[int]:
    """Return the kernels of a trace, the replays of graphs that it has as a whole, the steps."""
    with closing(sqlite3.connect(f"file:{trace}?mode=ro", uri=True)) as database:
        found = database.execute("SELECT name FROM sqlite_master").fetchall()
        return [
            database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            if (table,) in found
            else 0
            for table in _ROWS
        ]


def usual(runs: Sequence[Recorded]) -> tuple[int, int, int]:
    """Return the kernels, replays and steps that most traces have."""
    counts = Counter((run.kernels, run.replays, run.steps) for run in runs)
    return counts.most_common(1)[0][0]


def whole_runs(bare: Sequence[Ended], runs: Sequence[Recorded], least: Least) -> tuple[int, str]:
    """Return how many recorded runs are whole, and what the others lack."""
    outputs = {ended.output for ended in bare}
    if any(ended.code for ended in bare):
        raise Failed("without a recorder a run failed")
    if len(outputs) > 1:
        raise Failed("without a recorder runs differ in what they print")
    kernels = usual(runs)[:2]
    lacking = Counter(filter(None, (_lacks(run, outputs, least, kernels) for run in runs)))
    return len(runs) - lacking.total(), "; ".join(f"{why}: {n}" for why, n in lacking.items())


def _lacks(run: Recorded, outputs: Set[str], least: Least, kernels: tuple[int, int]) -> str:
    """Return what one run lacks; empty if it is whole."""
    wrong = {
        f"exit status {run.ended.code}": run.ended.code != 0,
        "another output": run.ended.output not in outputs,
        "no trace": run.kernels < 0,
        "fewer steps": run.steps < least.steps,
        "less than a kernel a step": run.kernels + run.replays < least.work,
        "not the kernels of most": least.work > 0 and (run.kernels, run.replays) != kernels,
    }
    return next((why for why, is_wrong in wrong.items() if is_wrong), "")
