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
    other_recorder,
)
from gputrace.collectors.launch import Launch
from gputrace.native import built


def collector_library() -> Path | None:
    """Return the C library that processes load; None if it was not built."""
    return built("_collector")


def libcuptis() -> list[Path]:
    """Return each libcupti of NVIDIA's wheels in this Python (extras cuda12 and cuda13)."""
    pattern = "nvidia/*/lib/libcupti.so.1?"
    return sorted(path for folder in sys.path for path in Path(folder).glob(pattern))


def cupti_folders() -> dict[str, str]:
    """Return the environment variable that lists their folders; empty if there are none."""
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
    by_time = plan.every if plan.every is not None and not plan.every.in_steps else None
    from_step = plan.steps is not None and plan.steps[0] > 0
    variables_of_plan: dict[str, object] = {
        "GPUTRACE_API": plan.api,
        "GPUTRACE_CAPTURE": "profiler" * plan.profiler_api or "manual" * from_step,
        "GPUTRACE_CONTROL": "1" * plan.control,
        "GPUTRACE_GRAPH_NODES": plan.graph_nodes,
        "GPUTRACE_HW_TRACE": "1" * plan.hw_trace,
        "GPUTRACE_SAMPLE": "all" if plan.sample == 0 else plan.sample,
        "GPUTRACE_DELAY_NS": plan.delay_ns,
        "GPUTRACE_DURATION_NS": plan.duration_ns,
        "GPUTRACE_EVERY_NS": by_time and by_time.distance,
        "GPUTRACE_FOR_NS": by_time and by_time.length,
    }
    # A recorder around this one, or a notebook that records its own cells, may have set some.
    for name, value in variables_of_plan.items():
        changed.pop(name, None)
        if value:
            changed[name] = str(value)
    return Launch(tuple(command), changed, look_s=plan.look_s)


def _merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Make the trace; the writer is imported once the program has ended."""
    from gputrace.collectors.finalize import merge

    return merge(folder, output, meta)


CUPTI: Final = Backend("cupti", _obstacle, _launch, _merge, shares=True, heeds_long=True)
