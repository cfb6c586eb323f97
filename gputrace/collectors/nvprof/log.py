"""What nvprof said, in words that help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from gputrace.collectors.program.tool import Causes, find_cause

LOG: Final = "nvprof.log"
"""nvprof's own output, in the folder of a recording; its processes' is beside it."""
LOGS: Final = "nvprof*.log"

NOTHING: Final = (
    "nvprof recorded nothing; --profiler-api needs a program that calls cudaProfilerStart, --steps "
    "one that reaches the first of them"
)
"""Of files that hold no rows."""
_CUPTI: Final = "record with --backend cupti"
_CAUSES: Final[Causes] = (
    (
        r"not supported on devices with compute capability",
        "nvprof records no GPU of compute capability 8.0 (A100) or newer; " + _CUPTI,
    ),
    (
        r"ERR_NVGPUCTRPERM|permission|unified memory profiling failed",
        "nvprof lacks a permission ({said}); in a container, start it with --privileged or "
        "--cap-add=SYS_ADMIN; else load the driver with NVreg_RestrictProfilingToAdminUsers=0, or "
        + _CUPTI,
    ),
    (
        r"unable to locate cuda driver library",
        "nvprof found no CUDA driver (libcuda.so.1); on a machine with a GPU, install the driver; "
        "in a container, run with --gpus all",
    ),
    (
        r"unable to locate .*librar",
        "nvprof lacks a library of its own ({said}); install the whole CUDA toolkit it is of, or "
        + _CUPTI,
    ),
    (
        r"invalid option",
        "nvprof does not take an option that gputrace gave it ({said}); name another version with "
        "GPUTRACE_NVPROF",
    ),
    (
        r"no space left",
        "no space is left for nvprof's files ({said}); set TMPDIR to a larger folder",
    ),
    (
        r"GPU profiling skipped|internal profiling error|internal error",
        "nvprof could not record the GPU ({said}); see `gputrace doctor`, or " + _CUPTI,
    ),
    (
        r"No CUDA application was profiled",
        "no process of the program started CUDA",
    ),
    (
        r"No kernels were profiled|Some profiling data are not recorded",
        NOTHING,
    ),
)


def why_not_started(folder: Path, code: int) -> str:
    """For a run in which nvprof ended before the program began."""
    return _explain(folder, f"nvprof did not start the program (exit code {code})")


def why_none(folder: Path) -> str:
    """For a run that left no file of nvprof."""
    return _explain(folder, "nvprof left no file, which each process writes at its regular end")


def _explain(folder: Path, otherwise: str) -> str:
    """The first cause that nvprof's words show; ``otherwise`` is told with its last words."""
    lines = _lines(folder)
    if (cause := find_cause(_CAUSES, lines)) is not None:
        return cause
    return f"{otherwise}: {lines[-1]}" if lines else otherwise


def _lines(folder: Path) -> list[str]:
    """nvprof marks its lines with ``==PID== Warning:``, or with ``========`` for the PID."""
    texts = [p.read_text("utf-8", "replace") for p in sorted(folder.glob(LOGS)) if p.is_file()]
    lines = [" ".join(line.split()) for text in texts for line in text.splitlines()]
    stripped = [re.sub(r"^=+(\d+=+)? ?((Warning|Error): )?", "", line) for line in lines]
    return [line.rstrip(".") for line in stripped if line]
