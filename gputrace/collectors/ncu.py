"""Nsight Compute (ncu): profiles of some launches of one kernel, and their reports."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from gputrace.collectors.launch import find_program, run
from gputrace.errors import InputError, MissingError
from gputrace.tools import ask_tool, find_tool

_INSTALLED: Final = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_WHERE: Final = (
    "install Nsight Compute (it comes with the CUDA toolkit), put its ncu on the PATH, or name it "
    "in GPUTRACE_NCU"
)
_HIGH: Final = 60.0
"""Per cent of the peak from which ncu's rules call a kernel bound by something."""

COMPUTE: Final = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY: Final = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
METRICS: Final = {
    "gpu__time_duration.sum": "duration",
    COMPUTE: "compute, of the peak",
    MEMORY: "memory, of the peak",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "DRAM, of the peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy reached",
    "launch__registers_per_thread": "registers a thread",
    "launch__grid_size": "blocks",
    "launch__block_size": "threads a block",
    "launch__waves_per_multiprocessor": "waves",
}
"""Metrics to show, from the sections that ncu collects by default, and their labels."""


@dataclass(frozen=True, slots=True)
class LaunchFilter:
    """Selection of launches to profile."""

    pattern: str
    """Regular expression on the demangled name."""
    skip: int
    count: int
    device: int


@dataclass(frozen=True, slots=True)
class LaunchMetrics:
    """Launch in a report."""

    name: str
    figures: dict[str, tuple[float, str]]
    """Value and unit by the labels of `METRICS`, as far as the report has them."""

    @property
    def verdict(self) -> str:
        """Return what bounds the kernel, by the rule of ncu's section Speed Of Light."""
        compute, memory = (self.figures.get(METRICS[name]) for name in (COMPUTE, MEMORY))
        if compute is None or memory is None:
            return "the report does not say what bounds it"
        if max(compute[0], memory[0]) < _HIGH:
            return "bound by latency: neither computing nor memory is near its peak"
        return "bound by computing" if compute[0] >= memory[0] else "bound by memory"


def find_ncu() -> str | None:
    """Return the ncu of GPUTRACE_NCU, of the PATH, or the newest in the usual folders."""
    return find_tool("ncu", _INSTALLED)


def words(chosen: LaunchFilter, report: Path, command: Sequence[str]) -> list[str]:
    """Return the command that profiles launches of a program into a report."""
    return [
        *("ncu", "--target-processes", "all", "--devices", str(chosen.device)),
        *("--kernel-name-base", "demangled", "--kernel-name", f"regex:{chosen.pattern}"),
        *("--launch-skip", str(chosen.skip), "--launch-count", str(chosen.count)),
        *("--force-overwrite", "--export", str(report), *command),
    ]


def profile(chosen: LaunchFilter, report: Path, command: Sequence[str]) -> None:
    """Run the program under ncu, which writes a report.

    Raises MissingError without ncu or a report, CannotRun if there is no such program.
    """
    ncu = find_ncu()
    if ncu is None:
        raise MissingError(f"ncu is not installed here; {_WHERE}")
    find_program(command[0])
    report.unlink(missing_ok=True)
    code = run([ncu, *words(chosen, report, command)[1:]], os.environ)
    if not report.exists():
        raise MissingError(
            f"ncu wrote no report (exit code {code}; its messages are above); if it found no "
            "matching launch, the run may be shorter than the one in the trace: try --skip 0"
        )


def read_report(report: Path) -> list[LaunchMetrics] | None:
    """Read the launches in a report; return None if ncu-report is not installed, or crashes.

    Raises InputError if the report cannot be read.
    """
    if find_spec("ncu_report") is None:
        return None
    # In a process of its own: NVIDIA's native code may crash (seen with Nsight Compute 2025.3).
    reader = [sys.executable, "-P", "-m", "gputrace.collectors.ncu"]
    path = os.pathsep.join(filter(None, sys.path))
    command = [*reader, str(report.absolute()), *METRICS]
    ran = ask_tool(command, env=os.environ | {"PYTHONPATH": path})
    if ran.returncode:
        return None
    said = json.loads(ran.stdout.splitlines()[-1])
    if isinstance(said, dict):
        raise InputError(report, f"cannot be read by ncu-report ({said['error']})")
    if not said:
        raise InputError(report, "holds no launch of a kernel")
    return [
        LaunchMetrics(name, {METRICS[metric]: (value, unit) for metric, (value, unit) in figures})
        for name, figures in said
    ]


def show_report(report: Path) -> str:
    """Return the report as ncu prints it; raise MissingError if it cannot."""
    command = [find_ncu() or "ncu", "--import", str(report), "--page", "details"]
    try:
        ran = ask_tool(command)
    except OSError as error:
        raise MissingError(f"{report}: ncu cannot show it ({error})") from None
    if ran.returncode:
        said = (ran.stdout + ran.stderr).split("\n")
        why = next((line for line in said if line.strip()), f"exit code {ran.returncode}")
        raise MissingError(f"{report}: ncu cannot show it ({why.strip()})")
    return ran.stdout


def _print_report(report: str, *metrics: str) -> None:
    """Print JSON: name and [metric, [value, unit]] of each launch, or an object with the error."""
    launches: Any = []
    try:
        context = import_module("ncu_report").load_report(report)
        for i in range(context.num_ranges()):
            kernels = context.range_by_idx(i)
            for action in (kernels.action_by_idx(j) for j in range(kernels.num_actions())):
                known = set(action.metric_names())
                values = [(name, action.metric_by_name(name)) for name in metrics if name in known]
                figures = [(name, (float(v.as_double()), str(v.unit()))) for name, v in values]
                launches.append((str(action.name()), figures))
    except Exception as error:  # Whatever NVIDIA's package raises.
        launches = {"error": str(error)}
    sys.stdout.write(json.dumps(launches) + "\n")


if __name__ == "__main__":
    _print_report(*sys.argv[1:])
