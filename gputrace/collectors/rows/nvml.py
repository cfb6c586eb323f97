"""The rows of a machine's NVML samples, its cards and how they hang together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gputrace.collectors.nvml.log import NvmlLog, read_nvml, tables
from gputrace.traces.writer import TraceWriter


def write_nvml(writer: TraceWriter, paths: Iterable[Path], start: int) -> None:
    """Writes the cards, their samples and their topology; ``timeNs`` on the session's clock.

    Several files are of recorders that sampled in turn: they describe the same cards.
    """
    described = False
    for path in paths:
        log = read_nvml(path)
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
