"""nvprof as the recorder, for GPUs older than compute capability 8.0."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Merged, Plan, other_recorder
from gputrace.collectors.launch import Launch, supervised
from gputrace.errors import MissingError, UsageError
from gputrace.tools import find_tool

LOG: Final = "nvprof.log"
"""nvprof's own output, in the folder of a recording; its processes' is beside it."""
LOGS: Final = "nvprof*.log"

NOTHING: Final = (
    "nvprof recorded nothing; --profiler-api needs a program that calls cudaProfilerStart, --steps "
    "one that reaches the first of them"
)
"""Note on files without rows."""
_CUPTI: Final = "record with --backend cupti"
_CAUSES: Final[supervised.Causes] = (
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
        "nvprof lacks a library of its own ({said}); install its whole CUDA toolkit, or " + _CUPTI,
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
    (r"No CUDA application was profiled", "no process of the program started CUDA"),
    (r"No kernels were profiled|Some profiling data are not recorded", NOTHING),
)


def _explain(folder: Path, otherwise: str) -> str:
    """Return the cause that nvprof's output shows; else ``otherwise`` and its last line."""
    # nvprof marks its lines with ``==PID== Warning:``, or with ``========`` for the PID.
    texts = [p.read_text("utf-8", "replace") for p in sorted(folder.glob(LOGS)) if p.is_file()]
    lines = [" ".join(line.split()) for text in texts for line in text.splitlines()]
    stripped = [re.sub(r"^=+(\d+=+)? ?((Warning|Error): )?", "", line) for line in lines]
    lines = [line.rstrip(".") for line in stripped if line]
    if (cause := supervised.find_cause(_CAUSES, lines)) is not None:
        return cause
    return f"{otherwise}: {lines[-1]}" if lines else otherwise


def run_under_nvprof(
    launch: Launch, folder: Path, _log: Callable[[str], object], meanwhile: Callable[[], None]
) -> int:
    """Run the program and nvprof to their ends; return the program's exit code."""
    return supervised.Supervision(
        "nvprof",
        launch,
        folder,
        apart=False,
        why_not=lambda code: _explain(
            folder, f"nvprof did not start the program (exit code {code})"
        ),
    ).run(meanwhile)


_INSTALL: Final = (
    "nvprof is not on this machine; install a CUDA toolkit before 13 (on Debian, nvidia-profiler), "
    "name it with GPUTRACE_NVPROF, or record with --backend cupti"
)
_INSTALLED: Final = ("/usr/local/cuda*/bin/nvprof", "/usr/lib/nvidia-cuda-toolkit/bin/nvprof")
_NEEDED: Final = ("--profile-child-processes", "--export-profile", "--log-file")
_WANTED: Final = {
    "--openacc-profiling": "off",
    "--openmp-profiling": "off",
    "--unified-memory-profiling": "off",
}
"""Off, where a version knows them: they need libraries or permissions that machines often lack."""
_OPTION: Final = re.compile(r"^\s*(?:-\w,\s*)?(--[a-z][a-z0-9-]*)", re.MULTILINE)


def find_nvprof() -> str | None:
    """Return the nvprof of GPUTRACE_NVPROF, of the PATH, or the newest in the usual folders."""
    return find_tool("nvprof", _INSTALLED)


def _obstacle(inherited: Mapping[str, str]) -> str | None:
    if "NVPROF_ID" in inherited:
        return "this shell runs under nvprof already; run without it"
    return _INSTALL if find_nvprof() is None else other_recorder(inherited)


def _launch(
    plan: Plan, folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    nvprof = find_nvprof()
    if nvprof is None:
        raise MissingError(_INSTALL)
    if plan.delay_ns or plan.duration_ns:
        raise UsageError(
            "nvprof ends the program at its time limit, so it cannot record --delay or --duration; "
            "use --steps or --profiler-api, or --backend cupti"
        )
    # Steps begin and end the recording by calls of CUDA's profiler API, from the hooks.
    is_later = plan.profiler_api or (plan.steps is not None and plan.steps[0] > 0)
    window = {"--profile-from-start": "off"} if is_later else {}
    changed = dict(environment) | {"GPUTRACE_PTHREADS": "1"}
    if plan.steps is not None:
        changed["GPUTRACE_PROFILER_API"] = "1"
    known = frozenset(_OPTION.findall(supervised.ask([nvprof, "--help"])[1]))
    missing = [name for name in _NEEDED if name not in known]
    if missing:
        raise MissingError(
            f"{nvprof} does not know {', '.join(missing)}: it is too old, or not nvprof; name "
            "another with GPUTRACE_NVPROF"
        )
    # nvprof replaces % in names.
    target = str(folder.absolute()).replace("%", "%%")
    options = ["--profile-child-processes", "--force-overwrite"]
    options += ["--export-profile", f"{target}/%p.nvvp", "--log-file", f"{target}/nvprof.%p.log"]
    for name, value in (_WANTED | window).items():
        options += [name, value] if name in known else []
    return Launch((nvprof, *options, *supervised.prefix(folder), *command), changed)


def _merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Make the trace; the writer is imported once the program has ended."""
    from gputrace.collectors.tool_traces import convert_nvprof

    supervised.check_ended(folder, "nvprof")
    no_file = "nvprof left no file, which each process writes at its regular end"
    return convert_nvprof(
        folder, output, meta, lambda files: NOTHING if files else _explain(folder, no_file)
    )


NVPROF: Final = Backend("nvprof", _obstacle, _launch, _merge, run_under_nvprof)
