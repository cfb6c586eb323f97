"""A smaller trace of the same kind, that the programs for the whole one read too."""

from __future__ import annotations

from gputrace.errors import UsageError
from gputrace.traces.cut import cut
from gputrace.traces.redaction import redaction_of
from gputrace.views.exports import Job


def write(job: Job) -> None:
    """Cuts the window out; raises UsageError for traces that cannot be cut."""
    tables = job.trace.tables
    if tables is None:
        several = len(job.trace.paths) > 1
        why = "several files are no one trace; export each" if several else "it is no SQLite file"
        raise UsageError(f"{job.trace.title}: no trace can be cut out of it: {why}")
    if job.window is None and not job.redact:
        raise UsageError("a trace without --time or --redact would be a copy; name the part")
    only = redaction_of(tables.database) if job.redact else None
    cut(tables, job.target, job.window, only, job.progress)
