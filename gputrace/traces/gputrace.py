"""Traces that ``gputrace record`` wrote: nsys's tables, and gputrace's own beside them."""

from __future__ import annotations

from pathlib import Path

from gputrace.traces.nsys.reader import NsysTrace
from gputrace.traces.sqlite import Database
from gputrace.traces.trace import NoGpu


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

    def _without_gpu(self) -> NoGpu:
        database = self._database
        meta = dict(database.query("SELECT name, value FROM GPUTRACE_META"))
        if "no_gpu" in meta and meta.get("driver") == "yes":
            why, _, remedy = meta["no_gpu"].partition("; ")
            return NoGpu(why, remedy or "see `gputrace doctor`")
        if meta.get("backend") == "host":
            lacking = meta.get("driver") == "no"
            why = "there was no NVIDIA driver" if lacking else "--backend host was asked for"
            return NoGpu(why, "record on a machine with an NVIDIA driver")
        if database.has("GPUTRACE_PROCESS", "note"):
            sql = "SELECT note FROM GPUTRACE_PROCESS WHERE note IS NOT NULL LIMIT 1"
            if (row := next(database.query(sql), None)) is not None:
                return NoGpu(str(row[0]), "see `gputrace doctor`")
        why = "no process of the recorded program ran anything on a GPU"
        return NoGpu(why, "check that it is told to use one")
