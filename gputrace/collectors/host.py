"""No GPU activity: the host's signals alone, which every backend records too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Launch, Plan
from gputrace.collectors.merge import merge


def _obstacle(_inherited: Mapping[str, str]) -> str | None:
    return None


def _launch(
    _plan: Plan, _folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    return Launch(tuple(command), environment)


HOST: Final = Backend("host", _obstacle, _launch, merge, shares=True)
