"""What `gputrace export` did to a trace, kept in it so that an analysis of it says so."""

from __future__ import annotations

from typing import Final

from gputrace.traces.sqlite import Database
from gputrace.traces.trace import Window
from gputrace.traces.writer import TraceWriter
from gputrace.units import format_window

_TABLE: Final = "GPUTRACE_EXPORT"

REDACTED: Final = "redacted: names of hosts, users, paths and programs are replaced"


def write_about(writer: TraceWriter, window: Window | None, redacted: bool) -> None:
    """Writes down the window that was cut out, and whether names were replaced."""
    about = {"redacted": "yes"} if redacted else {}
    if window is not None:
        about |= {"start_ns": str(window.start), "end_ns": str(window.end)}
    # That of a trace that was cut before came with it.
    writer.create(_TABLE, "name TEXT NOT NULL, value TEXT")
    writer.add_rows(_TABLE, ["name", "value"], about.items())


def read_notes(database: Database) -> list[str]:
    """What a person should know of a trace that is an export of another."""
    if not database.has(_TABLE, "name", "value"):
        return []
    about = dict(database.query(f"SELECT name, CAST(value AS TEXT) FROM {_TABLE}"))
    notes = [REDACTED] if "redacted" in about else []
    if {"start_ns", "end_ns"} <= about.keys():
        try:
            window = format_window(int(about["start_ns"]), int(about["end_ns"]))
        except ValueError:
            return notes
        notes.append(
            f"cut out of a larger trace, {window}: steps are counted within it, and what waits for "
            "data is told only where it holds several"
        )
    return notes
