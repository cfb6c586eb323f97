"""What nvprof left, a file for each process, and our hooks beside it, into one trace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Merged
from gputrace.collectors.files.chunks import read_all
from gputrace.collectors.files.host_events import HostEvents, join_hosts, read_host_file
from gputrace.collectors.nvprof.cards import write_cards
from gputrace.collectors.nvprof.log import NOTHING, why_none
from gputrace.collectors.nvprof.rows import NvprofRows
from gputrace.collectors.nvprof.run import TOOL
from gputrace.collectors.program.supervised import check_ended
from gputrace.collectors.rows.clock import global_pid
from gputrace.collectors.rows.host import write_signals
from gputrace.collectors.rows.losses import hold_something, write_unreadable
from gputrace.collectors.rows.processes import write_process
from gputrace.collectors.rows.session import write_session
from gputrace.errors import InputError
from gputrace.traces.nvprof.file import NvprofFile, read_file
from gputrace.traces.writer import TraceWriter
from gputrace.units import format_ns

THREAD: Final = "pthread."
"""Before the system's id of a thread, what the hooks say of its pthread id."""


@dataclass(frozen=True, slots=True)
class _Process:
    """A file of nvprof, and who wrote it."""

    file: NvprofFile
    pid: int
    host: HostEvents | None


def convert(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Writes the trace of a recording's folder; without a file of nvprof, of the host's signals.

    A file that cannot be read costs nothing but itself, and a note. Raises InputError where the
    recording goes on or a file breaks off while it is read, OSError where the trace cannot be
    written.
    """
    check_ended(folder, TOOL.name)
    files, notes = _read_files(folder)
    # nvprof's times are the wall clock's, and must stay in line with the hooks'.
    problems: list[InputError] = []
    hosts: list[HostEvents] = read_all(folder, "*.host", read_host_file, join_hosts, problems)
    processes = [_process(file, hosts) for file in files]
    starts = [file.start for file in files if file.start is not None]
    start = min(starts + [host.started for host in hosts], default=time.time_ns())
    with TraceWriter(output) as writer:
        write_session(writer, start, meta)
        write_cards(writer, [(process.file, process.pid) for process in processes], folder)
        for process in processes:
            notes += _write(writer, process, start)
        steps = write_signals(writer, folder, hosts, start)
        notes += write_unreadable(writer, problems)
    if not starts:
        notes.append(NOTHING if files else why_none(folder))
    return Merged(
        processes=len(files),
        kernels=sum(file.kernels for file in files),
        steps=steps,
        cut=sum(not host.whole for host in hosts),
        notes=tuple(notes),
        unread=hold_something(problems) or _are_left(folder, files),
    )


def _are_left(folder: Path, files: Sequence[NvprofFile]) -> bool:
    """Whether there are files with something in them that could not be read."""
    read = {file.path for file in files}
    return any(path.stat().st_size for path in folder.glob("*.nvvp") if path not in read)


def _read_files(folder: Path) -> tuple[list[NvprofFile], list[str]]:
    files, notes = [], []
    for path in sorted(folder.glob("*.nvvp")):
        try:
            files.append(read_file(path))
        except InputError as error:
            notes.append(f"the activity of a process is lost: {path.name} is {error.problem}")
    return files, notes


def _process(file: NvprofFile, hosts: Sequence[HostEvents]) -> _Process:
    name = file.path.stem
    pid = file.pid or (int(name) if name.isdecimal() else 0)
    return _Process(file, pid, next((host for host in hosts if host.pid == pid), None))


def _write(writer: TraceWriter, process: _Process, start: int) -> list[str]:
    """Writes one process; what a person should know of it."""
    pid, host = process.pid, process.host
    who = host or HostEvents(pid, "", start)
    writer.add_rows("PROCESSES", ["globalPid", "pid", "name"], [(global_pid(pid), pid, who.host)])
    write_process(writer, global_pid(pid), who)
    rows = NvprofRows(writer, process.file, pid, start, _threads(host) if host else {})
    rows.write()
    if not rows.late:
        return []
    way = "after" if rows.late > 0 else "before"
    told = (
        f"nvprof's times of process {pid}'s GPU work were {format_ns(abs(rows.late))} {way} "
        "its CUDA calls: moved by as much"
    )
    columns = ["globalPid", "timeNs", "text"]
    writer.add_rows("GPUTRACE_NOTE", columns, [(global_pid(pid), None, told)])
    return [told]


def _threads(host: HostEvents) -> dict[int, int]:
    """The system's ids of threads by the low 32 bits of their pthread ids.

    A pthread id that two threads had, one after the other, tells neither.
    """
    said = {
        int(key.removeprefix(THREAD)): int(value) & 0xFFFFFFFF
        for key, value in host.info.items()
        if key.startswith(THREAD)
    }
    uses = Counter(said.values())
    return {pthread: thread for thread, pthread in said.items() if uses[pthread] == 1}
