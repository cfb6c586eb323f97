"""Traces that ``gputrace record`` wrote: nsys's tables, and gputrace's own beside them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from gputrace.model.trace import FROM_THE_START, NoGpu, Window
from gputrace.readers.nsys import NsysTrace
from gputrace.store.sqlite import Database


def is_own(database: Database) -> bool:
    """Return whether gputrace wrote the file."""
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
        sql = "SELECT value FROM GPUTRACE_META WHERE name = 'slow_step'"
        self.quality.notes += [
            f"the stretch around a slow step: {why}" for (why,) in database.query(sql)
        ]

    def recorded(self, process: int) -> Sequence[Window]:
        return self._windows.get(process, ())

    def calls_recorded(self, process: int) -> Sequence[Window] | None:
        own = self._call_windows.get(process)
        return None if own is None else [window for window in own if window.start < window.end]

    @cached_property
    def _windows(self) -> dict[int, list[Window]]:
        return self._windows_in("GPUTRACE_WINDOW")

    @cached_property
    def _call_windows(self) -> dict[int, list[Window]]:
        return self._windows_in("GPUTRACE_API_WINDOW")

    def _windows_in(self, table: str) -> dict[int, list[Window]]:
        """The windows of each process in one of our tables."""
        found: dict[int, list[Window]] = {}
        rows = self._database.select(table, "globalPid", "start", "end", where="1 ORDER BY start")
        for process, start, end in rows:
            window = Window(start if start > 0 else FROM_THE_START, end)
            found.setdefault(self._process_index(process >> 24), []).append(window)
        return found

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
        for (note,) in database.select(
            "GPUTRACE_PROCESS", "note", where="note IS NOT NULL LIMIT 1"
        ):
            return NoGpu(str(note), "see `gputrace doctor`")
        why = "no process of the recorded program ran anything on a GPU"
        return NoGpu(why, "check that it is told to use one")
