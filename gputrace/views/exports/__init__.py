"""A trace as files for other programs and other people.

A form is a module with ``write(job)`` and an entry in `FORMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from gputrace.analyzers.results import Analysis
from gputrace.errors import UsageError
from gputrace.traces.trace import Progress, Trace, Window

FORMS: Final = {
    "trace": "gputrace.views.exports.trace",
    "perfetto": "gputrace.views.exports.perfetto",
    "parquet": "gputrace.views.exports.parquet",
    "csv": "gputrace.views.exports.csv",
}


@dataclass(frozen=True)
class Job:
    """What to export, and where to."""

    trace: Trace
    target: Path
    """Is replaced if it exists."""
    window: Window | None
    """Of the trace's own clock."""
    redact: bool
    """Whether names of hosts, users, paths and programs are replaced."""
    analyze: Callable[[int], Analysis]
    """Gives the analysis of the window with so many of its gaps; reads the whole trace."""
    progress: Progress | None = None


def export(job: Job, form: str) -> None:
    """Writes one of `FORMS`; raises UsageError for any other, and for what it has no form for."""
    if form not in FORMS:
        raise UsageError(f"nothing is exported as {form!r}; there are {', '.join(FORMS)}")
    import_module(FORMS[form]).write(job)
