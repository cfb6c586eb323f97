"""How each peer is found and called. To add one, write a function and name it in PEERS.

Each works on copies of the input: two of them write into or beside the file that they are given.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.inputs import USUAL, kineto_folder, remove
from benchmarks.measure import Job, run

_HTA: Final = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
print(analysis.get_temporal_breakdown(visualize=False))
print(analysis.get_idle_time_breakdown(ranks=list(range(8)), visualize=False)[0])
"""


NSYS, KINETO = "nsys", "kineto"
"""Forms of the recording that peers read."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs for peers."""

    export: Path
    """The nsys export, not to be given to a peer itself."""
    folder: Path
    """Empty, for copies and results; vanishes afterwards."""

    def copy(self, name: str) -> Path:
        """An own copy of the export, alone in a new folder."""
        folder = self.folder / name
        remove(folder)
        folder.mkdir()
        return Path(shutil.copy(self.export, folder / "trace.sqlite"))


@dataclass(frozen=True, slots=True)
class Found:
    """A peer of this machine; no jobs where it is not installed."""

    name: str
    version: str = ""
    note: str = ""
    jobs: tuple[Job, ...] = ()
    reads: str = NSYS


def nsys(inputs: Inputs) -> Found:
    """Nsight Systems: its rule for idle GPUs, and its summary of kernels."""
    program = os.environ.get("GPUTRACE_BENCH_NSYS") or shutil.which("nsys")
    if program is None:
        return Found("nsys")
    version = run((program, "--version")).output.strip().rsplit(" ", 1)[-1]
    rules = run((program, "analyze", "--help-rules")).output
    reports = run((program, "stats", "--help-reports")).output
    rule = "gpu_gaps" if "gpu_gaps" in rules else "gpu-starv"
    report = "cuda_gpu_kern_sum" if "cuda_gpu_kern_sum" in reports else "gpukernsum"
    path = str(inputs.copy("nsys"))
    gaps = Job(f"nsys analyze -r {rule}:gap=10", (program, "analyze", "-r", f"{rule}:gap=10", path))
    kernels = Job(f"nsys stats -r {report}", (program, "stats", "-r", report, path))
    return Found("nsys", version, "gaps of over 10 ms; a summary of kernels", (gaps, kernels))


def nsys_ai(inputs: Inputs) -> Found:
    """nsys-ai: its report of everything, without and with the cache that it keeps."""
    python = _python("GPUTRACE_BENCH_NSYS_AI_PYTHON", "nsys-ai")
    version = _version(python, "nsys-ai")
    if python is None or not version:
        return Found("nsys-ai")
    path = inputs.folder / "nsys-ai" / "trace.sqlite"
    program, findings = str(python.with_name("nsys-ai")), str(path.with_name("findings.json"))
    command = (program, "agent", "analyze", str(path), "-o", findings)
    first = Job("nsys-ai agent analyze, first", command, partial(inputs.copy, "nsys-ai"))
    again = Job("nsys-ai agent analyze, again", command)
    return Found("nsys-ai", version, "all its analyses; keeps a cache", (first, again))


def hta(_: Inputs) -> Found:
    """Holistic Trace Analysis: temporal and idle-time breakdown of all ranks."""
    python = _python("GPUTRACE_BENCH_HTA_PYTHON")
    version = _version(python, "HolisticTraceAnalysis")
    if python is None or not version:
        return Found("HTA")
    job = Job("HTA, temporal + idle breakdown", (str(python), "-c", _HTA, _kineto()))
    return Found("HTA", version, "breakdowns by rank, from Kineto JSON", (job,), KINETO)


def tracelens(inputs: Inputs) -> Found:
    """AMD's TraceLens (PyPI has another project of that name): the report of collectives."""
    script = "TraceLens_generate_multi_rank_collective_report_pytorch"
    python = _python("GPUTRACE_BENCH_TRACELENS_PYTHON", script)
    version = _version(python, "TraceLens")
    if python is None or not python.with_name(script).exists():
        return Found("TraceLens")
    results = str(inputs.folder / "tracelens")
    command = (str(python.with_name(script)), "--trace_pattern", f"{_kineto()}/rank*.pt.trace.json",
               "--world_size", "8", "--output_csvs_dir", results)  # fmt: skip
    job = Job("TraceLens, collectives of all ranks", command)
    return Found("TraceLens", version, "collectives only, from Kineto JSON", (job,), KINETO)


PEERS: Final[tuple[Callable[[Inputs], Found], ...]] = (nsys, nsys_ai, hta, tracelens)


def _kineto() -> str:
    return str(kineto_folder(USUAL))


def _python(variable: str, script: str = "") -> Path | None:
    """The interpreter that a variable names, or the one beside a script of the PATH."""
    if named := os.environ.get(variable):
        return Path(named)
    found = shutil.which(script) if script else None
    return Path(found).with_name("python") if found else None


def _version(python: Path | None, distribution: str) -> str:
    """The version of a package in an interpreter's environment; nothing where there is none."""
    if python is None or not python.exists():
        return ""
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    result = run((str(python), "-c", code))
    return "" if result.code else result.output.strip()
