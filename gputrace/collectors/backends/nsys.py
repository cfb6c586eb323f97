"""NVIDIA Nsight Systems as the recorder: run around the program, and its report made a trace."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Final

from gputrace.collectors.backend import Backend, Merged, Plan, other_recorder
from gputrace.collectors.finalize import (
    OWN,
    global_pid,
    hold_something,
    merge,
    write_meta,
    write_process,
    write_signals,
    write_unreadable,
)
from gputrace.collectors.launch import Launch
from gputrace.collectors.launch.supervised import (
    Causes,
    Supervision,
    Tool,
    ask,
    check_ended,
    find_cause,
    supervised,
)
from gputrace.collectors.spool.chunks import read_all
from gputrace.collectors.spool.clock_correction import correct_clocks
from gputrace.collectors.spool.host_events import HostEvents, join_hosts, read_host_file
from gputrace.errors import InputError, MissingError
from gputrace.readers.nsys_export import find_nsys, nsys_version, run_export
from gputrace.readers.nsys_schema import string_columns
from gputrace.store.writer import TraceWriter

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
    correct_clocks([], hosts)
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


_IMPORTERS: Final = (
    "../host-linux-*/QdstrmImporter",
    "../linux-desktop-*/QdstrmImporter",
    "../../host-linux-*/QdstrmImporter",
    "../../../nsight-systems/host-linux-*/QdstrmImporter",
)
"""Where the importer lies, from the folder of nsys itself; the third is Debian's."""
_PACKAGES: Final = {"libdw.so.1": "libdw1", "libelf.so.1": "libelf1", "libssh.so.4": "libssh-4"}
"""Debian's packages of libraries that importers have been seen to lack."""


def find_report(folder: Path, nsys: str | None) -> Path | None:
    """The report in a folder; None where there is none, nor anything to make one of.

    Raises MissingError where there is a raw recording that cannot be imported here.
    """
    reports = [path for path in _sorted(folder) if path.suffix in (".nsys-rep", ".qdrep")]
    if reports:
        return reports[0]
    raw = [path for path in _sorted(folder) if path.suffix == ".qdstrm"]
    return _imported(raw[0], nsys) if raw else None


def _sorted(folder: Path) -> list[Path]:
    """Files, the largest first."""
    return sorted(
        (path for path in folder.iterdir() if path.is_file()), key=lambda p: -p.stat().st_size
    )


def find_importer(nsys: str) -> str | None:
    """The importer that belongs to an nsys."""
    here = Path(nsys).resolve().parent
    found = (path for pattern in _IMPORTERS for path in sorted(glob(str(here / pattern))))
    return next(found, None)


def importer_obstacle(nsys: str) -> str | None:
    """Why the importer of an nsys cannot run here, and what to do; None where it can."""
    importer = find_importer(nsys)
    if importer is None:
        return "its QdstrmImporter is not beside it; install all of Nsight Systems"
    code, said = ask([importer, "--version"])
    return _why_not_imported(said) if code else None


def _imported(raw: Path, nsys: str | None) -> Path:
    importer = find_importer(nsys) if nsys is not None else None
    if importer is None:
        raise MissingError(
            f"nsys left a raw recording ({raw.name}), and its QdstrmImporter is not beside it; "
            "install all of Nsight Systems"
        )
    report = raw.with_suffix(".nsys-rep")
    code, said = ask([importer, "-i", str(raw), "-o", str(report)])
    if code or not report.exists():
        report.unlink(missing_ok=True)
        raise MissingError(_why_not_imported(said))
    return report


def _why_not_imported(output: str) -> str:
    missing = re.search(r"loading shared libraries: (\S+): cannot open", output)
    if missing:
        library = missing[1]
        package = f" (package {_PACKAGES[library]})" if library in _PACKAGES else ""
        return f"nsys's QdstrmImporter needs {library}: install it{package}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = lines[-1] if lines else "it said nothing"
    return f"nsys's QdstrmImporter could not read the raw recording: {said}"


LOG: Final = "nsys.log"
"""nsys's own output, in the folder of a recording."""

_CAUSES: Final[Causes] = (
    (
        r"unrecogni[sz]ed option|illegal|cannot be specified",
        "nsys does not take an option that gputrace gave it ({said}); try another version of nsys",
    ),
    (
        r"permission denied|insufficient permission|operation not permitted",
        "nsys lacks a permission ({said}); in a container, start it with --cap-add=SYS_ADMIN or "
        "a seccomp profile that allows perf_event_open",
    ),
    (
        r"no space left",
        "no space is left for nsys's files ({said}); set TMPDIR to a larger folder",
    ),
    (
        r"multiple.?subscribers|another (profiler|tool)|already (in use|subscribed)",
        "another tool holds CUDA's one place for a recorder ({said}); switch it off",
    ),
)
_NOTHING: Final = (
    "nsys recorded nothing, since the window never began: cudaProfilerStart was not called, "
    "no step of --steps was reached, or --delay is longer than the run"
)
"""nsys says no more than that it generated nothing."""
_COMPLAINT: Final = re.compile(r"\b(error|failed|fatal|unable|cannot|exception)\b", re.IGNORECASE)


def why_no_report(folder: Path) -> str:
    """For a run that left nothing to make a trace of."""
    return _cause(folder) or _NOTHING


def why_not_started(folder: Path, code: int) -> str:
    """For a run in which nsys ended before the program began."""
    said = _cause(folder) or (_lines(folder) or ["it said nothing"])[-1]
    return f"nsys did not start the program (exit code {code}): {said}"


def _cause(folder: Path) -> str | None:
    """What was wrong, by what nsys said; None where it complained of nothing."""
    lines = _lines(folder)
    if (cause := find_cause(_CAUSES, lines)) is not None:
        return cause
    complaints = [line for line in lines if _COMPLAINT.search(line)]
    return f"nsys left no report: {complaints[-1]}" if complaints else None


def _lines(folder: Path) -> list[str]:
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = [" ".join(line.split()) for line in re.split(r"[\r\n]+", text)]
    return [line for line in lines if line and not re.match(r"\[\d+/\d+\] \[", line)]


TOOL: Final = Tool("nsys", apart=True, why_not_started=why_not_started)
_PATIENCE_S: Final = 3.0
"""So long nsys may write after the program's end before we say that it does."""


def run_under_nsys(
    launch: Launch, folder: Path, tell: Callable[[str], object], meanwhile: Callable[[], None]
) -> int:
    """Runs the program to its end and nsys to its own; the program's exit code.

    Raises CannotRun where the program cannot be run, MissingError where nsys does not start it.
    """
    supervision = Supervision(TOOL, launch, folder)
    window, patience = _Window(launch, folder), _Patience(tell)

    def look() -> None:
        if supervision.has_begun():
            window.end_when_due()
        if supervision.is_writing():
            patience.lose()
        meanwhile()

    return supervision.run(look)


class _Window:
    """Ends the recording some time after the program's start, by a command of nsys."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._stop, self._after_s = launch.stop, launch.stop_after_ns / 1e9
        self._log = folder / LOG
        self._began_at = 0.0

    def end_when_due(self) -> None:
        """To be called from the program's start on."""
        if not self._stop:
            return
        self._began_at = self._began_at or time.monotonic()
        if time.monotonic() - self._began_at >= self._after_s:
            with self._log.open("ab") as log:
                # It ends when nsys has written the report, which the program need not wait for.
                subprocess.Popen(self._stop, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self._stop = ()


class _Patience:
    """Says once that nsys is still at work, when it has been for a while."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell, self._since = tell, 0.0

    def lose(self) -> None:
        """To be called while nsys writes."""
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > _PATIENCE_S:
            self._since = float("inf")
            self._tell("the program has ended; nsys is still writing its report")


_INSTALL: Final = (
    "nsys is not on this machine; install NVIDIA Nsight Systems (nsight-systems-cli), name it with "
    "GPUTRACE_NSYS, or record with --backend cupti"
)
_NEEDED: Final = ("--trace", "--output", "--force-overwrite")
_WANTED: Final = {
    "--trace": "cuda,nvtx",
    "--sample": "none",
    "--cpuctxsw": "none",
    "--cuda-graph-trace": "graph",
    "--wait": "primary",
    "--kill": "none",
    "--stop-on-exit": "true",
    "--export": "none",
    "--force-overwrite": "true",
}
"""OS calls (osrt) are left out: they make a recording many times larger and slower."""
_OPTION: Final = re.compile(r"^\s*(?:-\w,\s*)?(--[a-z][a-z0-9-]*)(?:[=\[<].*)?$")
_SECOND: Final = 1_000_000_000


def options_known(nsys: str) -> dict[str, str]:
    """The options of `nsys profile` by name, each with what its help says of it.

    Raises MissingError where nsys cannot be run.
    """
    known: dict[str, str] = {}
    name = ""
    for line in ask([nsys, "profile", "--help"])[1].splitlines():
        found = _OPTION.match(line)
        if found:
            name = found[1]
            known[name] = ""
        elif name:
            known[name] += f"{line}\n"
    return known


def _obstacle(inherited: Mapping[str, str]) -> str | None:
    if find_nsys() is None:
        return _INSTALL
    return other_recorder(inherited)


def _launch(
    plan: Plan, folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    nsys = find_nsys()
    if nsys is None:
        raise MissingError(_INSTALL)
    window = _window(plan)
    options = _options(nsys, window, folder)
    changed = dict(environment)
    if plan.steps is not None:
        changed["GPUTRACE_PROFILER_API"] = "1"
    words = (nsys, "profile", *options, *supervised(folder), *command)
    if not plan.duration_ns:
        return Launch(words, changed)
    stop = (nsys, "stop", f"--session={window['--session-new']}")
    return Launch(words, changed, stop, plan.delay_ns + plan.duration_ns)


def _options(nsys: str, window: dict[str, str], folder: Path) -> list[str]:
    """Those wanted that this nsys knows; raises MissingError where it lacks one that is needed."""
    known = options_known(nsys)
    missing = [name for name in (*_NEEDED, *window) if name not in known]
    if missing:
        raise MissingError(
            f"{nsys} (version {nsys_version(nsys)}) is too old: it does not know "
            f"{', '.join(missing)}; install Nsight Systems 2022.1 or newer, or name one with "
            "GPUTRACE_NSYS"
        )
    wanted = {n: v for n, v in _WANTED.items() if n in known and _takes(known[n], v)} | window
    # nsys replaces % in names.
    wanted["--output"] = str(folder.absolute() / "report").replace("%", "%%")
    return [f"{name}={value}" for name, value in wanted.items()]


def _window(plan: Plan) -> dict[str, str]:
    """The options that record a part; steps begin and end it by calls of CUDA's profiler API."""
    options = {}
    if plan.delay_ns:
        # All that every version takes are whole seconds.
        options["--delay"] = str(max(1, round(plan.delay_ns / _SECOND)))
    if plan.duration_ns:
        # With --duration nsys would end before the program.
        options["--session-new"] = f"gputrace{os.getpid()}"
    if plan.profiler_api or plan.steps is not None:
        options["--capture-range"] = "cudaProfilerApi"
        options["--capture-range-end"] = "stop"
    if options:
        # Else nsys ends the program with the window.
        options["--kill"] = "none"
    return options


def _takes(help_text: str, value: str) -> bool:
    """Whether an option's help lists the value, or lists none."""
    return "Possible values" not in help_text or value.split(",", maxsplit=1)[0] in help_text


def _merge(folder: Path, output: Path, told: Mapping[str, str]) -> Merged:

    return convert(folder, output, told)


NSYS: Final = Backend("nsys", _obstacle, _launch, _merge, run_under_nsys)
