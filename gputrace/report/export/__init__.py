"""Export of a trace for other programs.

A format is a function that takes a job, with an entry in `FORMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

from gputrace.analyzers.timeline_model import Scene
from gputrace.errors import UsageError
from gputrace.model.options import Window
from gputrace.model.trace import Progress, Trace
from gputrace.store.redact import redaction_for
from gputrace.store.slice import slice_trace
from gputrace.store.sqlite_reader import SqliteTrace

FORMS: Final = {
    "trace": "gputrace.report.export.write",
    "perfetto": "gputrace.report.export.perfetto.write",
    "parquet": "gputrace.report.export.tables.write_parquet",
    "csv": "gputrace.report.export.tables.write_csv",
    "speedscope": "gputrace.report.export.line_costs.write_speedscope",
    "cpuprofile": "gputrace.report.export.line_costs.write_cpuprofile",
}


@dataclass(frozen=True)
class Job:
    """Export request: the trace, its part, and the target."""

    trace: Trace
    target: Path
    """Path to write; replaced if it exists."""
    window: Window | None
    """Part to export, on the trace's clock; None for all."""
    redact: bool
    """Replace names of hosts, users, paths and programs."""
    read: Callable[[int], Scene]
    """Analyze the window and list so many of its gaps; reads the whole trace."""
    progress: Progress | None = None


def export(job: Job, form: str) -> None:
    """Write one of `FORMS`; raise UsageError for others, and for traces that lack this form."""
    if form not in FORMS:
        raise UsageError(f"nothing is exported as {form!r}; there are {', '.join(FORMS)}")
    module, _, function = FORMS[form].rpartition(".")
    getattr(import_module(module), function)(job)


def write(job: Job) -> None:
    """Write the window as a trace; raise UsageError for traces that cannot be sliced."""
    if not isinstance(job.trace, SqliteTrace):
        several = len(job.trace.paths) > 1
        why = "it is not an SQLite file"
        if several:
            why = "several files are not one trace; export each"
        raise UsageError(f"{job.trace.title}: no trace can be cut out of it: {why}")
    if job.window is None and not job.redact:
        raise UsageError("a trace without --time or --redact would be a copy; name the part")
    tables = job.trace.tables
    only = redaction_for(tables.database) if job.redact else None
    slice_trace(tables, job.target, job.window, only, job.progress)
