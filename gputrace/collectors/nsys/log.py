"""What nsys said, in words that help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from gputrace.collectors.program.tool import Causes, find_cause

LOG: Final = "nsys.log"
"""nsys's own output, in the folder of a recording."""

_CAUSES: Final[Causes] = (
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
_NOTHING: Final = (
    "nsys recorded nothing, since the window never began: cudaProfilerStart was not called, "
    "no step of --steps was reached, or --delay is longer than the run"
)
"""nsys says no more than that it generated nothing."""
_COMPLAINT: Final = re.compile(r"\b(error|failed|fatal|unable|cannot|exception)\b", re.IGNORECASE)


def why_no_report(folder: Path) -> str:
    """For a run that left nothing to make a trace of."""
    return _cause(folder) or _NOTHING


def why_not_started(folder: Path, code: int) -> str:
    """For a run in which nsys ended before the program began."""
    said = _cause(folder) or (_lines(folder) or ["it said nothing"])[-1]
    return f"nsys did not start the program (exit code {code}): {said}"


def _cause(folder: Path) -> str | None:
    """What was wrong, by what nsys said; None where it complained of nothing."""
    lines = _lines(folder)
    if (cause := find_cause(_CAUSES, lines)) is not None:
        return cause
    complaints = [line for line in lines if _COMPLAINT.search(line)]
    return f"nsys left no report: {complaints[-1]}" if complaints else None


def _lines(folder: Path) -> list[str]:
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = [" ".join(line.split()) for line in re.split(r"[\r\n]+", text)]
    return [line for line in lines if line and not re.match(r"\[\d+/\d+\] \[", line)]
