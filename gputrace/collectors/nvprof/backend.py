"""nvprof as the recorder, for GPUs older than compute capability 8.0."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Launch, Merged, Plan
from gputrace.collectors.cuda import other_recorder
from gputrace.collectors.nvprof.run import run_under_nvprof
from gputrace.collectors.program.supervised import supervised
from gputrace.collectors.program.tool import ask
from gputrace.errors import MissingError, UsageError

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
    """The nvprof of GPUTRACE_NVPROF, of the PATH, or the newest in the usual places."""
    return next(_candidates(), None)


def _candidates() -> Iterator[str]:
    if named := os.environ.get("GPUTRACE_NVPROF"):
        yield named
    if found := shutil.which("nvprof"):
        yield found
    for pattern in _INSTALLED:
        yield from sorted(glob(pattern), reverse=True)


def _obstacle(inherited: Mapping[str, str]) -> str | None:
    if find_nvprof() is None:
        return _INSTALL
    if "NVPROF_ID" in inherited:
        return "this shell runs under nvprof already; run without it"
    return other_recorder(inherited)


def _launch(
    plan: Plan, folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    nvprof = find_nvprof()
    if nvprof is None:
        raise MissingError(_INSTALL)
    if plan.delay_ns or plan.duration_ns:
        raise UsageError(
            "nvprof ends a program with its time limit, so it can record no --delay or --duration; "
            "take --steps or --profiler-api, or --backend cupti"
        )
    options = _options(nvprof, _window(plan), folder)
    changed = dict(environment) | {"GPUTRACE_PTHREADS": "1"}
    if plan.steps is not None:
        changed["GPUTRACE_PROFILER_API"] = "1"
    return Launch((nvprof, *options, *supervised(folder), *command), changed)


def _options(nvprof: str, window: dict[str, str], folder: Path) -> list[str]:
    """Those wanted that this nvprof knows; raises MissingError where it lacks one needed."""
    known = frozenset(_OPTION.findall(ask([nvprof, "--help"])[1]))
    missing = [name for name in _NEEDED if name not in known]
    if missing:
        raise MissingError(
            f"{nvprof} does not know {', '.join(missing)}: it is too old, or no nvprof; name "
            "another with GPUTRACE_NVPROF"
        )
    # nvprof replaces % in names.
    place = str(folder.absolute()).replace("%", "%%")
    options = ["--profile-child-processes", "--force-overwrite"]
    options += ["--export-profile", f"{place}/%p.nvvp", "--log-file", f"{place}/nvprof.%p.log"]
    for name, value in (_WANTED | window).items():
        options += [name, value] if name in known else []
    return options


def _window(plan: Plan) -> dict[str, str]:
    """Steps begin and end the recording by calls of CUDA's profiler API, from the hooks."""
    later = plan.profiler_api or (plan.steps is not None and plan.steps[0] > 0)
    return {"--profile-from-start": "off"} if later else {}


def _merge(folder: Path, output: Path, told: Mapping[str, str]) -> Merged:
    from gputrace.collectors.nvprof.convert import convert

    return convert(folder, output, told)


NVPROF: Final = Backend("nvprof", _obstacle, _launch, _merge, run_under_nvprof)
