"""The embedded collector: a C library that the CUDA driver loads into every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Launch, Plan
from gputrace.collectors.cuda import other_recorder
from gputrace.collectors.merge import merge


def collector_library() -> Path | None:
    """The C library that processes load; None where the package was built without a compiler."""
    return next(iter(sorted(Path(__file__).parent.glob("_collector*.so"))), None)


def _obstacle(inherited: Mapping[str, str]) -> str | None:
    library = collector_library()
    if library is None:
        return (
            "gputrace was installed without its collector, which needs a C compiler; install one "
            "and then gputrace again"
        )
    return other_recorder(inherited, library)


def _launch(
    plan: Plan, folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    variables = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "GPUTRACE_LIBRARY")
    changed = dict(environment) | dict.fromkeys(variables, str(collector_library()))
    # A notebook that records its own cells may have set it.
    changed.pop("GPUTRACE_CAPTURE", None)
    if plan.delay_ns:
        changed["GPUTRACE_DELAY_NS"] = str(plan.delay_ns)
    if plan.duration_ns:
        changed["GPUTRACE_DURATION_NS"] = str(plan.duration_ns)
    if plan.profiler_api:
        changed["GPUTRACE_CAPTURE"] = "profiler"
    if plan.steps is not None and plan.steps[0]:
        changed["GPUTRACE_CAPTURE"] = "manual"
    return Launch(tuple(command), changed)


CUPTI: Final = Backend("cupti", _obstacle, _launch, merge, shares=True)
