"""The row of one process in the trace file: who it was, and its rank in a distributed run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gputrace.collectors.clock import global_pid
from gputrace.collectors.host_events import HostEvents
from gputrace.collectors.spool import Spool
from gputrace.traces.writer import TraceWriter

_RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES: Final = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "HOROVOD_SIZE",
    "PMI_SIZE",
    "SLURM_NTASKS",
)
_LOCAL: Final = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


@dataclass(slots=True)
class _Process:
    """What all files of one process say of it."""

    info: dict[str, str]
    whole: bool


def write_processes(
    writer: TraceWriter, spools: Sequence[Spool], hosts: Sequence[HostEvents]
) -> int:
    """Writes a row for every process that left a file; gives back how many there are.

    A process that runs another program (exec) leaves a host file of each. Of what the files say,
    the collector's counts, then the last host file's.
    """
    found: dict[tuple[str, int], _Process] = {}
    files: list[HostEvents | Spool] = [*hosts, *spools]
    for file in files:
        known = found.setdefault((file.host, file.pid), _Process({}, True))
        known.info |= file.info
        known.whole = file.whole if isinstance(file, Spool) else known.whole and file.whole
    for (host, pid), process in found.items():
        _write(writer, host, pid, process)
    return len(found)


def _write(writer: TraceWriter, host: str, pid: int, process: _Process) -> None:
    rank, size, local = (_number(process.info, keys) for keys in (_RANKS, _SIZES, _LOCAL))
    note = process.info.get("no_gpu_activity")
    writer.add_rows("PROCESSES", ["globalPid", "pid", "name"], [(global_pid(pid), pid, host)])
    writer.add_rows(
        "GPUTRACE_PROCESS",
        ["globalPid", "pid", "host", "rank", "worldSize", "localRank", "whole", "note"],
        [(global_pid(pid), pid, host, rank, size, local, int(process.whole), note)],
    )


def _number(info: Mapping[str, str], keys: Sequence[str]) -> int | None:
    found = (info[key] for key in keys if info.get(key, "").isdecimal())
    return next((int(text) for text in found), None)
