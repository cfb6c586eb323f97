"""What nsys left, and what our hooks left beside it, into one trace.

Of nsys's export only tables known to hold events and devices are taken, and of its strings only
those that they name: others hold the environment, the command line and the program's output.
"""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Merged
from gputrace.collectors.files.chunks import read_all
from gputrace.collectors.files.host_events import HostEvents, join_hosts, read_host_file
from gputrace.collectors.files.steady import make_steady
from gputrace.collectors.merge import merge
from gputrace.collectors.nsys.log import why_no_report
from gputrace.collectors.nsys.reports import find_report
from gputrace.collectors.nsys.run import TOOL
from gputrace.collectors.program.supervised import check_ended
from gputrace.collectors.rows.clock import OWN, global_pid
from gputrace.collectors.rows.host import write_signals
from gputrace.collectors.rows.losses import hold_something, write_unreadable
from gputrace.collectors.rows.processes import write_process
from gputrace.collectors.rows.session import write_meta
from gputrace.errors import InputError, MissingError
from gputrace.traces.nsys.report import find_nsys, nsys_version, run_export
from gputrace.traces.nsys.tables import string_columns
from gputrace.traces.writer import TraceWriter

_EVENTS: Final = re.compile(
    r"CUPTI_ACTIVITY_KIND_\w+|CUDA_\w+_EVENTS|NVTX_\w+|OSRT_API|CUBLAS_EVENTS|CUDNN_EVENTS"
    r"|MPI_\w+|PROFILER_OVERHEAD|GPU_METRICS"
)
_OTHERS: Final = re.compile(
    r"ENUM_\w+|TARGET_INFO_(GPU|GPU_METRICS|CUDA_\w+|NVTX_\w+|SESSION_START_TIME)"
    r"|ANALYSIS_DETAILS"
)
_ABOUT: Final = ("META_DATA_EXPORT", "EXPORT_META_DATA")
"""What made the export, under its name and its old one; paths and the user are in it too."""
_STARTED_CUDA: Final = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL")


def convert(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Writes the trace of a recording's folder; without a report, of the host's signals alone.

    Raises InputError where what nsys left cannot be read, MissingError where nsys is not there to
    read it, OSError where the trace cannot be written.
    """
    check_ended(folder, TOOL.name)
    nsys = find_nsys()
    report = find_report(folder, nsys)
    if report is None:
        merged = merge(folder, output, meta)
        return Merged(0, 0, merged.steps, merged.cut, (why_no_report(folder),))
    if nsys is None:
        raise MissingError(f"{report}: an nsys must export it, and there is none here")
    problems: list[InputError] = []
    hosts: list[HostEvents] = read_all(folder, "*.host", read_host_file, join_hosts, problems)
    make_steady([], hosts)
    with tempfile.TemporaryDirectory(prefix="gputrace-") as local:
        export = _export(nsys, report, Path(local))
        with TraceWriter(output) as writer:
            merged = _write(writer, export, folder, hosts, {**meta, "nsys": nsys_version(nsys)})
            lost = write_unreadable(writer, problems)
        export.unlink()
    return replace(merged, notes=(*merged.notes, *lost), unread=hold_something(problems))


def _export(nsys: str, report: Path, local: Path) -> Path:
    """The report as SQLite: beside it, or where its file system has no locks, in a local folder."""
    beside = report.with_name("export.sqlite")
    beside.unlink(missing_ok=True)
    try:
        run_export(nsys, report, beside)
    except InputError as error:
        beside.unlink(missing_ok=True)
        if "lock" not in error.problem.lower():
            raise
        beside = local / beside.name
        run_export(nsys, report, beside)
    return beside


def _write(
    writer: TraceWriter,
    export: Path,
    folder: Path,
    hosts: Sequence[HostEvents],
    meta: Mapping[str, str],
) -> Merged:
    declared = _declared(export)
    tables = _kept(declared, {host.pid for host in hosts})
    writer.copy(export, tables)
    start, machine = _start(writer, tables), _machine(writer, tables)
    write_meta(writer, start, meta)
    for host in hosts:
        write_process(writer, global_pid(host.pid, machine), host)
    kernels = _count(writer, tables, "CUPTI_ACTIVITY_KIND_KERNEL")
    return Merged(
        processes=len(_processes(writer, [name for name in _STARTED_CUDA if name in tables])),
        kernels=kernels,
        steps=write_signals(writer, folder, hosts, start, machine),
        cut=sum(not host.whole for host in hosts),
        notes=tuple(_complaints(export, declared, "(3)" if kernels else "(2, 3)")),
    )


def _declared(export: Path) -> dict[str, str]:
    """The tables of the export, with their declarations."""
    with closing(sqlite3.connect(export)) as database:
        sql = "SELECT name, sql FROM sqlite_master WHERE type = 'table'"
        return dict(database.execute(sql))


def _complaints(export: Path, declared: Mapping[str, str], wanted: str) -> list[str]:
    """What nsys complains of in its report: errors (3) or warnings (2) too."""
    if "DIAGNOSTIC_EVENT" not in declared:
        return []
    with closing(sqlite3.connect(export)) as database:
        sql = f"SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity IN {wanted} LIMIT 3"
        return [f"nsys: {' '.join(str(text).split())}" for (text,) in database.execute(sql)]


def _kept(declared: Mapping[str, str], pids: Iterable[int]) -> dict[str, str]:
    """The tables to take, each with the condition of the rows to take."""
    events = {name: sql for name, sql in declared.items() if _EVENTS.fullmatch(name)}
    kept = dict.fromkeys([n for n in declared if n in events or _OTHERS.fullmatch(n)], "1")
    ours = _processes_of(events, pids)
    for name in declared.keys() & set(_ABOUT):
        kept[name] = "name LIKE 'EXPORT_PRODUCT%' OR name LIKE 'EXPORT_SCHEMA%'"
    if "PROCESSES" in declared:
        kept["PROCESSES"] = f"globalPid >> 24 & 0xFFFFFF IN ({ours})"
    if "ThreadNames" in declared:
        kept["ThreadNames"] = f"globalTid >> 24 & 0xFFFFFF IN ({ours})"
    if "StringIds" in declared:
        kept["StringIds"] = f"id IN ({_strings_of({n: declared[n] for n in kept}, kept)})"
    return kept


def _processes_of(events: Mapping[str, str], pids: Iterable[int]) -> str:
    """SQL of the pids that have events or left a file of their own."""
    selects = [f"SELECT {pid & 0xFFFFFF}" for pid in sorted(pids)]
    for name, sql in events.items():
        column = re.search(r"\bglobal[PT]id\b", sql)
        if column:
            selects.append(f'SELECT {column[0]} >> 24 & 0xFFFFFF FROM source."{name}"')
    return " UNION ".join(selects or ["SELECT NULL"])


def _strings_of(declared: Mapping[str, str], kept: Mapping[str, str]) -> str:
    """SQL of the ids of strings that rows to be taken name."""
    selects = [
        f'SELECT "{column}" FROM source."{name}" WHERE {kept[name]}'
        for name, sql in declared.items()
        for column in sorted(string_columns(sql))
    ]
    return " UNION ".join(selects or ["SELECT NULL"])


def _start(writer: TraceWriter, tables: Mapping[str, str]) -> int:
    """The session's start, nanoseconds of CLOCK_REALTIME, from which the export's times count."""
    if "TARGET_INFO_SESSION_START_TIME" in tables:
        rows = writer.query("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME")
        if rows and rows[0][0] is not None:
            return int(rows[0][0])
    raise InputError(writer.path, "nsys's export does not say when it began; try a newer nsys")


def _machine(writer: TraceWriter, tables: Mapping[str, str]) -> int:
    """This machine in the upper 16 bits of the export's global ids."""
    for process in _processes(writer, [name for name in tables if _EVENTS.fullmatch(name)]):
        return process >> 24
    return OWN


def _processes(writer: TraceWriter, tables: Iterable[str]) -> set[int]:
    """The processes of rows: globalPids without their thread bits."""
    found = set()
    for table in tables:
        columns = {row[1] for row in writer.query(f'PRAGMA table_info("{table}")')}
        for column in columns & {"globalPid", "globalTid"}:
            sql = f'SELECT DISTINCT {column} >> 24 FROM "{table}" WHERE {column} IS NOT NULL'
            found |= {int(row[0]) for row in writer.query(sql)}
    return found


def _count(writer: TraceWriter, tables: Mapping[str, str], table: str) -> int:
    return int(writer.query(f"SELECT count(*) FROM {table}")[0][0]) if table in tables else 0
