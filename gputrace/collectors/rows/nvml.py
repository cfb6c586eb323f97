"""The rows of a machine's NVML samples, its cards and how they hang together."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gputrace.collectors.nvml.log import NvmlLog, make_steady, read_nvml, tables
from gputrace.traces.writer import TraceWriter


def write_nvml(writer: TraceWriter, paths: Iterable[Path], start: int) -> None:
    """Writes the cards, their samples and their topology; ``timeNs`` on the session's clock.

    Several files are of recorders that sampled in turn, or of a ring: they describe the same cards.
    """
    logs = []
    for path in paths:
        with suppress(FileNotFoundError):  # a ring has let go of it
            logs.append(read_nvml(path))
    first = next((log.clocks[0] for log in logs if log.clocks), (0, 0))
    for log in logs:
        make_steady(log, first[0] - first[1])
    write_logs(writer, logs, start)


def write_logs(writer: TraceWriter, logs: Iterable[NvmlLog], start: int) -> None:
    """As `write_nvml`, of logs that have been read."""
    described = False
    for log in logs:
        _write_log(writer, log, start, not described)
        described = described or bool(log.devices)


def _write_log(writer: TraceWriter, log: NvmlLog, start: int, describes: bool) -> None:
    for table, (columns, rows) in tables(log).items():
        if not rows or not (describes or "timeNs" in columns):
            continue
        writer.create(table, ", ".join(columns))
        if "timeNs" in columns:
            at = columns.index("timeNs")
            rows = [(*row[:at], row[at] - start, *row[at + 1 :]) for row in rows]
        writer.add_rows(table, columns, rows)
