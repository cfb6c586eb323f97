"""Recording without GPU activity: the host's signals alone, which every backend records too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Merged, Plan
from gputrace.collectors.launch import Launch


def _launch(
    plan: Plan, _folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    return Launch(tuple(command), environment, look_s=plan.look_s)


def _merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Make the trace; what it takes is imported once the program has ended."""
    from gputrace.collectors.finalize import merge

    return merge(folder, output, meta)


HOST: Final = Backend("host", lambda _: None, _launch, _merge, shares=True, heeds_long=True)
