"""The rows of a process's host signals and of a machine's NVML samples, in the trace file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.clock import OWN, global_pid, global_tids, session_time
from gputrace.collectors.host_events import HostEvents, Records
from gputrace.collectors.nvml_log import read_nvml, tables
from gputrace.collectors.spool import Spool
from gputrace.traces.writer import TraceWriter

DATA_WAIT: Final = 1
ANNOTATION: Final = 2
"""Values of ``kind`` in GPUTRACE_HOST_RANGE."""

_RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES: Final = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "HOROVOD_SIZE",
    "PMI_SIZE",
    "SLURM_NTASKS",
)
_LOCAL: Final = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def write_process(
    writer: TraceWriter, process: int, file: Spool | HostEvents, note: str | None = None
) -> None:
    """Writes who a process was, by its globalPid and what it said of itself."""
    rank, size, local = (_number(file.info, keys) for keys in (_RANKS, _SIZES, _LOCAL))
    columns = ["globalPid", "pid", "host", "rank", "worldSize", "localRank", "whole", "note"]
    row = (process, file.pid, file.host, rank, size, local, int(file.whole), note)
    writer.add_rows("GPUTRACE_PROCESS", columns, [row])


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
    return len(steps)


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


def write_nvml(writer: TraceWriter, path: Path, start: int) -> None:
    """Writes the cards, their samples and their topology; ``timeNs`` on the session's clock."""
    for table, (columns, rows) in tables(read_nvml(path)).items():
        if not rows:
            continue
        writer.create(table, ", ".join(columns))
        if "timeNs" in columns:
            at = columns.index("timeNs")
            rows = [(*row[:at], row[at] - start, *row[at + 1 :]) for row in rows]
        writer.add_rows(table, columns, rows)


def _number(info: Mapping[str, str], keys: Sequence[str]) -> int | None:
    found = (info[key] for key in keys if info.get(key, "").isdecimal())
    return next((int(text) for text in found), None)
