"""The rows that say when, how and by what a recording was made."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gputrace import __version__
from gputrace.traces.writer import TraceWriter


def write_session(writer: TraceWriter, start: int, meta: Mapping[str, str]) -> None:
    """Writes when and how a recording was made that is no nsys export."""
    seconds = start / 1e9
    form = "%Y-%m-%dT%H:%M:%S"
    utc, local = (time.strftime(form, t(seconds)) for t in (time.gmtime, time.localtime))
    writer.add_rows(
        "TARGET_INFO_SESSION_START_TIME",
        ["utcEpochNs", "utcTime", "localTime"],
        [(start, utc, local)],
    )
    exported = {
        "EXPORT_PRODUCT_NAME": "gputrace",
        "EXPORT_PRODUCT_VERSION": __version__,
        "EXPORT_SCHEMA_VERSION": "3.20.3",
        "EXPORT_SCHEMA_VERSION_MAJOR": "3",
        "EXPORT_SCHEMA_VERSION_MINOR": "20",
        "EXPORT_SCHEMA_VERSION_MICRO": "3",
    }
    writer.add_enums()
    writer.add_rows("META_DATA_EXPORT", ["name", "value"], exported.items())
    write_meta(writer, start, meta)


def write_meta(writer: TraceWriter, start: int, meta: Mapping[str, str]) -> None:
    """Writes what makes the file a trace of ours; ``start`` is the session's (CLOCK_REALTIME)."""
    own = {"format": "1", "version": __version__, "start_realtime_ns": str(start), **meta}
    writer.add_rows("GPUTRACE_META", ["name", "value"], own.items())
