"""The embedded collector: a C library that the CUDA driver loads into every process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import (
    HOW_TO_BUILD,
    Backend,
    Merged,
    Plan,
    built_library,
    other_recorder,
)
from gputrace.collectors.launch import Launch


def collector_library() -> Path | None:
    """The C library that processes load; None where the package was built without a compiler."""
    return built_library("_collector")


def libcuptis() -> list[Path]:
    """Each libcupti of NVIDIA's wheels in this Python, as the extras cuda12 and cuda13 bring it."""
    pattern = "nvidia/*/lib/libcupti.so.1?"
    return sorted(path for folder in sys.path for path in Path(folder).glob(pattern))


def cupti_folders() -> dict[str, str]:
    """The variable that tells the collector where they are; nothing where there are none."""
    folders = dict.fromkeys(str(path.parent) for path in libcuptis())
    return {"GPUTRACE_CUPTI_FOLDERS": ":".join(folders)} if folders else {}


def _obstacle(inherited: Mapping[str, str]) -> str | None:
    library = collector_library()
    if library is None:
        needs = "gputrace was installed without its collector, which needs a C compiler"
        return f"{needs}; {HOW_TO_BUILD}"
    return other_recorder(inherited, library)


def _launch(
    plan: Plan, folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    variables = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "GPUTRACE_LIBRARY")
    library = str(collector_library())
    changed = dict(environment) | dict.fromkeys(variables, library) | cupti_folders()
    # A notebook that records its own cells may have set it.
    for variable in ("GPUTRACE_CAPTURE", "GPUTRACE_CONTROL"):
        changed.pop(variable, None)
    changed["GPUTRACE_API"] = plan.api
    if plan.control:
        changed["GPUTRACE_CONTROL"] = "1"
    if plan.delay_ns:
        changed["GPUTRACE_DELAY_NS"] = str(plan.delay_ns)
    if plan.duration_ns:
        changed["GPUTRACE_DURATION_NS"] = str(plan.duration_ns)
    if plan.profiler_api:
        changed["GPUTRACE_CAPTURE"] = "profiler"
    if plan.steps is not None and plan.steps[0]:
        changed["GPUTRACE_CAPTURE"] = "manual"
    if plan.every is not None and not plan.every.in_steps:
        changed["GPUTRACE_EVERY_NS"] = str(plan.every.distance)
        changed["GPUTRACE_FOR_NS"] = str(plan.every.length)
    return Launch(tuple(command), changed, look_s=plan.look_s)


def _merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Make the trace; what it takes is imported once the program has ended."""
    from gputrace.collectors.finalize import merge

    return merge(folder, output, meta)


CUPTI: Final = Backend("cupti", _obstacle, _launch, _merge, shares=True, heeds_long=True)
