"""Recording without GPU activity: the host's signals alone, which every backend records too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Merged, Plan, look_s
from gputrace.collectors.launch import Launch


def _obstacle(_inherited: Mapping[str, str]) -> str | None:
    return None


def _launch(
    plan: Plan, _folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    return Launch(tuple(command), environment, look_s=look_s(plan))


def unheeded(plan: Plan) -> str:
    """A line that names the options that this backend cannot heed; nothing where there are none."""
    given = {
        "--steps": plan.steps is not None,
        "--delay": plan.delay_ns > 0,
        "--duration": plan.duration_ns > 0,
        "--profiler-api": plan.profiler_api,
        "--every": plan.every is not None,
        "--api": plan.api != "all",
    }
    names = ", ".join(name for name, is_given in given.items() if is_given)
    why = "without a GPU to record, the host's signals are recorded from start to end"
    return f"{names}: not heeded: {why}; `gputrace analyze --steps` takes a part" if names else ""


def _merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Make the trace; what it takes is imported once the program has ended."""
    from gputrace.collectors.finalize import merge

    return merge(folder, output, meta)


HOST: Final = Backend("host", _obstacle, _launch, _merge, shares=True, heeds_long=True)
