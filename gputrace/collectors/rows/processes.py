"""The rows of processes in the trace file: who they were, and their ranks in a distributed run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gputrace.collectors.files.host_events import HostEvents
from gputrace.collectors.files.spool import Spool
from gputrace.collectors.rows.clock import global_pid
from gputrace.traces.writer import TraceWriter

_RANKS: Final = (
    *("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"),
    *("PMI_RANK", "PMIX_RANK", "SLURM_PROCID"),
)
_SIZES: Final = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "HOROVOD_SIZE",
    "PMI_SIZE",
    "SLURM_NTASKS",
)
_LOCAL: Final = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
)


@dataclass(slots=True)
class Known:
    """What all files of one process say of it."""

    pid: int
    host: str
    info: dict[str, str] = field(default_factory=dict)
    whole: bool = True


def write_processes(
    writer: TraceWriter, spools: Sequence[Spool], hosts: Sequence[HostEvents]
) -> int:
    """Writes a row for every process that left a file; gives back how many there are.

    A process that runs another program (exec) leaves a host file of each. Of what the files say,
    the collector's counts, then the last host file's.
    """
    found: dict[tuple[str, int], Known] = {}
    files: list[HostEvents | Spool] = [*hosts, *spools]
    for file in files:
        known = found.setdefault((file.host, file.pid), Known(file.pid, file.host))
        known.info |= file.info
        known.whole = file.whole if isinstance(file, Spool) else known.whole and file.whole
    for known in found.values():
        row = (global_pid(known.pid), known.pid, known.info.get("program", ""))
        writer.add_rows("PROCESSES", ["globalPid", "pid", "name"], [row])
        write_process(writer, global_pid(known.pid), known)
    return len(found)


def write_process(writer: TraceWriter, process: int, known: Known | HostEvents) -> None:
    """Writes who a process was, by its globalPid and what it said of itself."""
    rank, size, local = (_number(known.info, keys) for keys in (_RANKS, _SIZES, _LOCAL))
    note = known.info.get("no_gpu_activity", known.info.get("last_flush"))
    columns = ["globalPid", "pid", "host", "rank", "worldSize", "localRank", "whole", "note"]
    row = (process, known.pid, known.host, rank, size, local, int(known.whole), note)
    writer.add_rows("GPUTRACE_PROCESS", columns, [row])


def rank_of(info: Mapping[str, str]) -> int | None:
    """The rank of a process by what it said of itself."""
    return _number(info, _RANKS)


def _number(info: Mapping[str, str], keys: Sequence[str]) -> int | None:
    found = (info[key] for key in keys if info.get(key, "").isdecimal())
    return next((int(text) for text in found), None)
