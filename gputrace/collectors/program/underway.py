"""Programs that go on after the recorder of theirs was killed."""

from __future__ import annotations

import os
from pathlib import Path


def processes_of(folder: Path) -> list[int]:
    """The processes of this machine that were started to write into a recording's folder.

    Those of other users are not seen.
    """
    wanted = os.path.realpath(folder)
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = os.fsdecode(path.read_bytes()).split("\0")
        except OSError:
            continue
        named = [v.partition("=")[2] for v in variables if v.startswith("GPUTRACE_DIR=")]
        if any(os.path.realpath(name) == wanted for name in named):
            found.append(int(path.parent.name))
    return sorted(found)
