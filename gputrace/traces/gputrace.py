"""Traces that ``gputrace record`` wrote: nsys's tables, and gputrace's own beside them."""

from __future__ import annotations

from pathlib import Path

from gputrace.errors import InputError
from gputrace.traces.nsys.reader import NsysTrace
from gputrace.traces.sqlite import Database
from gputrace.traces.trace import Trace


def is_own(database: Database) -> bool:
    """Whether gputrace wrote the file."""
    return database.has("GPUTRACE_META", "name", "value")


class OwnTrace(NsysTrace):
    """A trace of ours; ranks, steps and data waits are recorded in it."""

    source = "gputrace"

    def __init__(self, path: Path, database: Database) -> None:
        super().__init__(path, database)
        if database.has("GPUTRACE_LOSS", "records", "reason"):
            rows = database.query("SELECT reason, sum(records) FROM GPUTRACE_LOSS GROUP BY reason")
            for reason, count in rows:
                told = f"{count:,} records lost: {reason}" if count else reason
                self.quality.warnings.append(told)


def open_own(path: Path, database: Database) -> Trace:
    """Raises InputError where nothing was recorded of a GPU, and says why."""
    try:
        return OwnTrace(path, database)
    except InputError:
        raise InputError(path, _nothing_recorded(database)) from None


def _nothing_recorded(database: Database) -> str:
    meta = dict(database.query("SELECT name, value FROM GPUTRACE_META"))
    if meta.get("backend") == "host":
        return "no GPU activity: recorded where there is no NVIDIA driver (host signals only)"
    if database.has("GPUTRACE_PROCESS", "note"):
        notes = database.query("SELECT note FROM GPUTRACE_PROCESS WHERE note IS NOT NULL LIMIT 1")
        if (row := next(notes, None)) is not None:
            return f"no GPU activity was recorded: {row[0]}; see `gputrace doctor`"
    return "no GPU activity: no process of the recorded program ran anything on a GPU"
