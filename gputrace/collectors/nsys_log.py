"""What nsys said, in words that help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

LOG: Final = "nsys.log"
"""nsys's own output, in the folder of a recording."""

_CAUSES: Final = (
    (
        r"no reports were generated|waiting for capture range|capture range .*never",
        "nsys recorded nothing: the window never began; --profiler-api needs a program that calls "
        "cudaProfilerStart, --steps one that reaches the first of them",
    ),
    (
        r"unrecogni[sz]ed option|illegal|cannot be specified",
        "nsys does not take an option that gputrace gave it ({said}); try another version of nsys",
    ),
    (
        r"permission denied|insufficient permission|operation not permitted",
        "nsys lacks a permission ({said}); in a container, start it with --cap-add=SYS_ADMIN or "
        "a seccomp profile that allows perf_event_open",
    ),
    (
        r"no space left",
        "no space is left for nsys's files ({said}); set TMPDIR to a larger folder",
    ),
    (
        r"multiple.?subscribers|another (profiler|tool)|already (in use|subscribed)",
        "another tool holds CUDA's one place for a recorder ({said}); switch it off",
    ),
)


def explain(folder: Path, otherwise: str) -> str:
    """Why nsys left no report, by what it said; ``otherwise`` begins what is told if unknown."""
    lines = _lines(folder)
    for pattern, told in _CAUSES:
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE):
                return told.format(said=line)
    telling = [line for line in lines if re.search(r"error|fail|unable|cannot", line, re.I)]
    said = (telling or lines or ["it said nothing"])[-1]
    return f"{otherwise}: {said}"


def why_not_started(folder: Path, code: int) -> str:
    """For a run in which nsys ended before the program began."""
    return explain(folder, f"nsys did not start the program (exit code {code})")


def _lines(folder: Path) -> list[str]:
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = [" ".join(line.split()) for line in re.split(r"[\r\n]+", text)]
    return [line for line in lines if line and not re.match(r"\[\d+/\d+\] \[", line)]
