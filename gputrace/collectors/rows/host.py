"""The rows of a process's host signals and of a machine's NVML samples, in the trace file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.files.chunks import Loss
from gputrace.collectors.files.host_events import HostEvents, Records
from gputrace.collectors.nvml.log import NvmlLog, read_nvml, tables
from gputrace.collectors.rows.clock import LARGEST, OWN, global_pid, global_tids, session_time
from gputrace.traces.writer import TraceWriter

DATA_WAIT: Final = 1
ANNOTATION: Final = 2
"""Values of ``kind`` in GPUTRACE_HOST_RANGE."""


def write_host(writer: TraceWriter, host: HostEvents, start: int, machine: int = OWN) -> int:
    """Writes steps, data waits, annotations and samples; gives back the number of steps.

    ``start`` is the session's on CLOCK_REALTIME, ``machine`` the upper 16 bits of global ids.
    """

    def spans(rows: Records) -> dict[str, Any]:
        return _spans(writer, host, rows, start, machine)

    steps = host.records["step"]
    writer.add("GPUTRACE_STEP", spans(steps) | {"step": steps["number"].tolist()})
    for kind, records in ((DATA_WAIT, "data_wait"), (ANNOTATION, "annotation")):
        rows = host.records[records]
        columns = spans(rows) | {"kind": [kind] * len(rows)}
        writer.add("GPUTRACE_HOST_RANGE", columns)
    samples = spans(host.records["sample"])
    del samples["end"]
    samples["innerNameId"] = _strings(writer, host, host.records["sample"]["number"])
    writer.add("GPUTRACE_PYTHON_SAMPLE", samples)
    notes = host.records["note"]
    columns = {
        "globalPid": [global_pid(host.pid, machine)] * len(notes),
        "timeNs": session_time(notes["start"], host.clocks, start).tolist(),
        "text": [host.name(note) for note in notes],
    }
    writer.add("GPUTRACE_NOTE", columns)
    if host.stopped:
        write_losses(writer, global_pid(host.pid, machine), [host.stopped], start)
    return len(steps)


def write_losses(writer: TraceWriter, process: int, losses: Sequence[Loss], start: int) -> None:
    """Writes what a process lost; ``process`` is its globalPid."""
    rows = [
        (process, (at - start) % LARGEST, count % LARGEST or None, why) for at, count, why in losses
    ]
    writer.add_rows("GPUTRACE_LOSS", ["globalPid", "timeNs", "records", "reason"], rows)


def _spans(
    writer: TraceWriter, host: HostEvents, rows: Records, start: int, machine: int
) -> dict[str, Any]:
    return {
        "start": session_time(rows["start"], host.clocks, start).tolist(),
        "end": session_time(rows["end"], host.clocks, start).tolist(),
        "globalTid": global_tids(host.pid, rows["thread"], machine).tolist(),
        "nameId": _strings(writer, host, rows["name"]),
    }


def _strings(writer: TraceWriter, host: HostEvents, names: NDArray[np.uint32]) -> list[int]:
    ids = {int(id): writer.string(host.names.get(int(id), "?")) for id in np.unique(names)}
    return [ids[id] for id in names.tolist()]


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
