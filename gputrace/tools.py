"""Tools of others: where they are, and what they say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess


def find_tool(name: str, installed: Sequence[str]) -> str | None:
    """Return the path of a tool: what the variable GPUTRACE_ and its name holds, what is on the
    PATH, or the newest that matches a pattern of ``installed``; None if there is none.
    """
    import shutil
    from glob import glob

    if tool := os.environ.get(f"GPUTRACE_{name.upper()}") or shutil.which(name):
        return tool
    found = (path for pattern in installed for path in sorted(glob(pattern), reverse=True))
    return next(found, None)


def ask_tool(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without input and return what it says, whatever its exit code.

    Raises OSError if it cannot be run.
    """
    import subprocess

    return subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        **options,
    )
