"""The rows of what is recorded beside the GPUs' activity, whatever the backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.files.host_events import HostEvents
from gputrace.collectors.files.records import Records
from gputrace.collectors.rows.clock import OWN, global_pid, global_tids, session_time
from gputrace.collectors.rows.losses import write_losses
from gputrace.collectors.rows.nvml import write_nvml
from gputrace.traces.writer import TraceWriter

DATA_WAIT: Final = 1
ANNOTATION: Final = 2
"""Values of ``kind`` in GPUTRACE_HOST_RANGE."""


def write_signals(
    writer: TraceWriter, folder: Path, hosts: Sequence[HostEvents], start: int, machine: int = OWN
) -> int:
    """Writes what every backend records of the host and of the cards; the number of steps."""
    write_nvml(writer, sorted(folder.glob("*.nvml.jsonl")), start)
    return sum(write_host(writer, host, start, machine) for host in hosts)


def write_host(writer: TraceWriter, host: HostEvents, start: int, machine: int = OWN) -> int:
    """Writes steps, data waits, annotations, samples and notes; gives back the number of steps.

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
    _write_notes(writer, host, start, machine)
    if host.stopped:
        write_losses(writer, global_pid(host.pid, machine), [host.stopped], start)
    return len(steps)


def _write_notes(writer: TraceWriter, host: HostEvents, start: int, machine: int) -> None:
    notes = host.records["note"]
    columns = {
        "globalPid": [global_pid(host.pid, machine)] * len(notes),
        "timeNs": session_time(notes["start"], start).tolist(),
        "text": [host.name(note) for note in notes],
    }
    writer.add("GPUTRACE_NOTE", columns)


def _spans(
    writer: TraceWriter, host: HostEvents, rows: Records, start: int, machine: int
) -> dict[str, Any]:
    return {
        "start": session_time(rows["start"], start).tolist(),
        "end": session_time(rows["end"], start).tolist(),
        "globalTid": global_tids(host.pid, rows["thread"], machine).tolist(),
        "nameId": _strings(writer, host, rows["name"]),
    }


def _strings(writer: TraceWriter, host: HostEvents, names: NDArray[np.uint32]) -> list[int]:
    found = np.unique(names).tolist()
    texts = writer.strings([host.names.get(id, "?") for id in found])
    ids = dict(zip(found, texts, strict=True))
    return [ids[id] for id in names.tolist()]
