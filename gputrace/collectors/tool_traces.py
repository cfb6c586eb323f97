"""Conversion of recordings of nsys and nvprof, joined with the records of our hooks, to traces."""

from __future__ import annotations

import re
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any, Final

from gputrace.collectors import finalize
from gputrace.collectors.backend import Merged
from gputrace.collectors.clock_correction import correct_clocks
from gputrace.collectors.launch.supervised import ask
from gputrace.collectors.nvml.log import read_nvml
from gputrace.collectors.spool.host_events import HostEvents, read_hosts
from gputrace.errors import InputError, MissingError
from gputrace.model.names import demangle_all, short
from gputrace.readers import nvprof_schema as schema
from gputrace.readers.gpu_clock_skew import moved
from gputrace.readers.nsys_export import find_nsys, nsys_version, run_export
from gputrace.readers.nsys_schema import string_columns
from gputrace.readers.nvprof import find_skew
from gputrace.store import sqlite_security
from gputrace.store.sqlite_reader import Database
from gputrace.store.writer import OVERHEADS, UNKNOWN_OVERHEAD, TraceWriter

_EVENTS: Final = re.compile(
    r"CUPTI_ACTIVITY_KIND_\w+|CUDA_\w+_EVENTS|NVTX_\w+|OSRT_API|CUBLAS_EVENTS|CUDNN_EVENTS"
    r"|MPI_\w+|PROFILER_OVERHEAD|GPU_METRICS"
)
_OTHERS: Final = re.compile(
    r"ENUM_\w+|TARGET_INFO_(GPU|GPU_METRICS|CUDA_\w+|NVTX_\w+|SESSION_START_TIME)"
    r"|ANALYSIS_DETAILS"
)
_ABOUT: Final = ("META_DATA_EXPORT", "EXPORT_META_DATA")
"""Table about the export under its present and its old name; also has paths and the user."""
_STARTED_CUDA: Final = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL")


def convert_nsys(
    folder: Path, output: Path, meta: Mapping[str, str], why_none: Callable[[], str]
) -> Merged:
    """Write the trace of a recording's folder; without a report, of the host's signals alone.

    Raises InputError if nsys's report cannot be read, MissingError if it takes an nsys that is not
    there, OSError if the trace cannot be written.
    """
    nsys = find_nsys()
    report = find_report(folder, nsys)
    if report is None:
        merged = finalize.merge(folder, output, meta)
        return Merged(0, 0, merged.steps, merged.cut, (why_none(),))
    if nsys is None:
        raise MissingError(f"{report}: only nsys can export it, and it is not installed here")
    problems: list[InputError] = []
    hosts = read_hosts(folder, problems)
    correct_clocks([], hosts)
    with tempfile.TemporaryDirectory(prefix="gputrace-") as local:
        export = report.with_name("export.sqlite")
        export.unlink(missing_ok=True)
        try:
            run_export(nsys, report, export)
        except InputError as error:
            export.unlink(missing_ok=True)
            if "lock" not in error.problem.lower():
                raise
            # Its file system has no locks.
            export = Path(local) / export.name
            run_export(nsys, report, export)
        with TraceWriter(output) as writer:
            merged = _write(writer, export, folder, hosts, {**meta, "nsys": nsys_version(nsys)})
            lost = finalize.write_unreadable(writer, problems)
        export.unlink()
    return replace(merged, notes=(*merged.notes, *lost), unread=finalize.hold_something(problems))


def _write(
    writer: TraceWriter,
    export: Path,
    folder: Path,
    hosts: Sequence[HostEvents],
    meta: Mapping[str, str],
) -> Merged:
    with closing(sqlite3.connect(export)) as database:
        sql = "SELECT name, sql FROM sqlite_master WHERE type = 'table'"
        declared = dict(database.execute(sql))
    tables = _kept(declared, {host.pid for host in hosts})
    writer.copy(export, tables)
    table = "TARGET_INFO_SESSION_START_TIME"
    rows = writer.query(f"SELECT utcEpochNs FROM {table}") if table in tables else []
    if not rows or rows[0][0] is None:
        raise InputError(writer.path, "nsys's export does not say when it began; try a newer nsys")
    # Nanoseconds of CLOCK_REALTIME, from which the export's times count.
    start = int(rows[0][0])
    # This machine in the upper 16 bits of the export's global ids.
    with_events = [name for name in tables if _EVENTS.fullmatch(name)]
    machine = next(
        (process >> 24 for process in _processes(writer, with_events)), finalize.THIS_MACHINE
    )
    finalize.write_meta(writer, start, meta)
    for host in hosts:
        finalize.write_process(writer, host.pid, host.host, host.info, host.whole, machine)
    lines = finalize.write_lives(writer, folder, [], hosts, start, machine)
    kernels, complaints = 0, list[str]()
    if (table := "CUPTI_ACTIVITY_KIND_KERNEL") in tables:
        kernels = int(writer.query(f"SELECT count(*) FROM {table}")[0][0])
    if (table := "DIAGNOSTIC_EVENT") in declared:
        # Errors (3) alone, or warnings (2) too.
        least = 3 if kernels else 2
        sql = f"SELECT DISTINCT text FROM {table} WHERE severity IN ({least}, 3) LIMIT 3"
        with closing(sqlite3.connect(export)) as database:
            complaints = [text for (text,) in database.execute(sql)]
    return Merged(
        processes=len(_processes(writer, [name for name in _STARTED_CUDA if name in tables])),
        kernels=kernels,
        steps=finalize.write_signals(writer, folder, hosts, start, machine),
        cut=sum(not host.whole for host in hosts),
        notes=(*lines, *(f"nsys: {' '.join(str(text).split())}" for text in complaints)),
    )


def _kept(declared: Mapping[str, str], pids: Iterable[int]) -> dict[str, str]:
    """Return the tables to copy, each with the SQL condition of the rows to copy."""
    events = {name: sql for name, sql in declared.items() if _EVENTS.fullmatch(name)}
    kept = {name: "1" for name in declared if name in events or _OTHERS.fullmatch(name)}
    for name in declared.keys() & set(_ABOUT):
        kept[name] = "name LIKE 'EXPORT_PRODUCT%' OR name LIKE 'EXPORT_SCHEMA%'"
    # Processes that have events or left a file of ours.
    selects = [f"SELECT {pid & 0xFFFFFF}" for pid in sorted(pids)]
    for name, sql in events.items():
        if process := re.search(r"\bglobal[PT]id\b", sql):
            selects.append(f'SELECT {process[0]} >> 24 & 0xFFFFFF FROM source."{name}"')
    for name, column in (("PROCESSES", "globalPid"), ("ThreadNames", "globalTid")):
        if name in declared:
            kept[name] = (
                f"{column} >> 24 & 0xFFFFFF IN ({' UNION '.join(selects) or 'SELECT NULL'})"
            )
    if "StringIds" in declared:
        selects = [
            f'SELECT "{column}" FROM source."{name}" WHERE {condition}'
            for name, condition in kept.items()
            for column in sorted(string_columns(declared[name]))
        ]
        kept["StringIds"] = f"id IN ({' UNION '.join(selects) or 'SELECT NULL'})"
    return kept


def _processes(writer: TraceWriter, tables: Iterable[str]) -> set[int]:
    """Return the processes of rows: globalPids without their thread bits."""
    processes: set[int] = set()
    for table in tables:
        columns = {row[1] for row in writer.query(f'PRAGMA table_info("{table}")')}
        for column in columns & {"globalPid", "globalTid"}:
            sql = f'SELECT DISTINCT {column} >> 24 FROM "{table}" WHERE {column} IS NOT NULL'
            processes |= {int(row[0]) for row in writer.query(sql)}
    return processes


_IMPORTERS: Final = (
    "../host-linux-*/QdstrmImporter",
    "../linux-desktop-*/QdstrmImporter",
    "../../host-linux-*/QdstrmImporter",
    "../../../nsight-systems/host-linux-*/QdstrmImporter",
)
"""Paths of the importer, relative to the folder of nsys; the third is Debian's."""
_PACKAGES: Final = {"libdw.so.1": "libdw1", "libelf.so.1": "libelf1", "libssh.so.4": "libssh-4"}
"""Debian's packages of libraries that importers have been seen to lack."""


def find_report(folder: Path, nsys: str | None) -> Path | None:
    """Return the largest report in a folder, if any; raise MissingError if it is not importable."""
    files = [path for path in folder.iterdir() if path.is_file()]
    files.sort(key=lambda path: -path.stat().st_size)
    for path in files:
        if path.suffix in (".nsys-rep", ".qdrep"):
            return path
    raw = next((path for path in files if path.suffix == ".qdstrm"), None)
    if raw is None:
        return None
    importer = find_importer(nsys) if nsys is not None else None
    if importer is None:
        raise MissingError(
            f"nsys left a raw recording ({raw.name}), and its QdstrmImporter is not next to it; "
            "install all of Nsight Systems"
        )
    report = raw.with_suffix(".nsys-rep")
    code, said = ask([importer, "-i", str(raw), "-o", str(report)])
    if code or not report.exists():
        report.unlink(missing_ok=True)
        raise MissingError(_why_not_imported(said))
    return report


def find_importer(nsys: str) -> str | None:
    """Return the importer that belongs to an nsys."""
    here = Path(nsys).resolve().parent
    return next((p for pattern in _IMPORTERS for p in sorted(glob(str(here / pattern)))), None)


def importer_obstacle(nsys: str) -> str | None:
    """Return why the importer of an nsys cannot run here, and what to do; None if it can."""
    importer = find_importer(nsys)
    if importer is None:
        return "its QdstrmImporter is not next to it; install all of Nsight Systems"
    code, said = ask([importer, "--version"])
    return _why_not_imported(said) if code else None


def _why_not_imported(output: str) -> str:
    if missing := re.search(r"loading shared libraries: (\S+): cannot open", output):
        library = missing[1]
        package = f" (package {_PACKAGES[library]})" if library in _PACKAGES else ""
        return f"nsys's QdstrmImporter needs {library}: install it{package}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = lines[-1] if lines else "it said nothing"
    return f"nsys's QdstrmImporter could not read the raw recording: {said}"


THREAD: Final = "pthread."
"""Prefix of the hooks' keys for the pthread id of a thread, before its system id."""


def convert_nvprof(
    folder: Path, output: Path, meta: Mapping[str, str], why_none: Callable[[bool], str]
) -> Merged:
    """Write the trace of a recording's folder; without a file of nvprof, of the host's signals.

    An unreadable file is left out with a note. Raises InputError if a file turns out to be broken
    while it is copied, OSError if the trace cannot be written.
    """
    files: list[schema.NvprofFile] = []
    notes: list[str] = []
    problems: list[InputError] = []
    unread = False
    for path in sorted(folder.glob("*.nvvp")):
        try:
            files.append(schema.read_file(path))
        except InputError as error:
            notes.append(f"the activity of a process is lost: {path.name} is {error.problem}")
            unread = unread or path.stat().st_size > 0
    # nvprof's times are the wall clock's, and must stay in line with the hooks'.
    hosts = read_hosts(folder, problems)
    starts = [file.start for file in files if file.start is not None]
    start = min(starts + [host.started for host in hosts], default=time.time_ns())
    with TraceWriter(output) as writer:
        finalize.write_session(writer, start, meta)
        _write_cards(writer, files, folder)
        for file in files:
            notes += _write_process(writer, file, hosts, start)
        steps = finalize.write_signals(writer, folder, hosts, start)
        notes += finalize.write_lives(writer, folder, [], hosts, start)
        notes += finalize.write_unreadable(writer, problems)
    if not starts:
        notes.append(why_none(bool(files)))
    return Merged(
        processes=len(files),
        kernels=sum(file.kernels for file in files),
        steps=steps,
        cut=sum(not host.whole for host in hosts),
        notes=tuple(notes),
        unread=unread or finalize.hold_something(problems),
    )


def _pid(file: schema.NvprofFile) -> int:
    name = file.path.stem
    return file.pid or (int(name) if name.isdecimal() else 0)


def _write_process(
    writer: TraceWriter, file: schema.NvprofFile, hosts: Sequence[HostEvents], start: int
) -> list[str]:
    """Write one process; return notes on it for the user."""
    pid = _pid(file)
    host = next((host for host in hosts if host.pid == pid), HostEvents(pid, "", start))
    process = finalize.global_pid(pid)
    writer.add_rows("PROCESSES", ["globalPid", "pid", "name"], [(process, pid, host.host)])
    finalize.write_process(writer, pid, host.host, host.info, host.whole)
    said = {
        int(key.removeprefix(THREAD)): int(value) & 0xFFFFFFFF
        for key, value in host.info.items()
        if key.startswith(THREAD)
    }
    uses = Counter(said.values())  # An id that was used again is of no single thread.
    threads = {pthread: thread for thread, pthread in said.items() if uses[pthread] == 1}
    late = _NvprofRows(writer, file, process, start, threads).write()
    if not late:
        return []
    note = f"process {pid}: {moved(late)}"
    writer.add_rows("GPUTRACE_NOTE", ["globalPid", "text"], [(process, note)])
    return [note]


_FIRST_UNKNOWN: Final = 1 << 23
"""Above every thread id of Linux, and within the 24 bits that a globalTid has for one."""


@dataclass(frozen=True)
class _NvprofRows:
    writer: TraceWriter
    file: schema.NvprofFile
    process: int
    origin: int
    """Start of the session."""
    threads: Mapping[int, int]
    """System ids by the low 32 bits of pthread ids."""

    def write(self) -> int:
        """Write the rows; return the nanoseconds by which the GPU's clock was ahead."""
        try:
            with self.writer.attached(self.file.path, "nvprof") as database:
                for name, columns in schema.TEMPORARY.items():
                    database.execute(f"CREATE TEMP TABLE {name} ({columns})")
                self._fill_names(database)
                self._fill_threads(database)
                self._fill_numbered(database)
                late = find_skew(database, self.file.columns)
                values = {
                    "origin": self.origin,
                    "late": late,
                    "process": self.process,
                    "unknown": self.writer.string("(no name)"),
                }
                for rows in schema.table_inserts(self.file.columns):
                    self.writer.make(rows.table)
                    database.execute(rows.insert, values)
                for table in (*schema.ON_GPU, *schema.CALLS):
                    if table in self.file.columns:
                        self._write_losses(database, table)
                for name in schema.TEMPORARY:
                    database.execute(f"DROP TABLE temp.{name}")
        except sqlite_security.ERRORS as error:
            raise InputError(self.file.path, f"broken ({error})") from None
        return late

    def _fill_names(self, database: sqlite3.Connection) -> None:
        """Fill in the strings that written rows name: others hold the command line."""
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")
        named = {
            id
            for table, expression in schema.strings_named(self.file.columns)
            for id in self._distinct(database, [table], expression)
        }
        strings = database.execute("SELECT _id_, value FROM nvprof.StringTable")
        texts = {id: text for id, text in strings if id in named and id}
        kept = dict(zip(texts, self.writer.strings(list(texts.values())), strict=True))
        kernels = [id for id in self._distinct(database, schema.KERNELS, "r.name") if id in texts]
        known = demangle_all({texts[id] for id in kernels})
        clear = [known[texts[id]] for id in kernels]
        long = dict(zip(kernels, self.writer.strings(clear), strict=True))
        brief = dict(zip(kernels, self.writer.strings([short(n) for n in clear]), strict=True))
        rows = ((id, kept[id], long.get(id), brief.get(id)) for id in texts)
        _insert(database, "names", rows, 4)

    def _fill_threads(self, database: sqlite3.Connection) -> None:
        """Fill in the threads; those of unknown system id get a number and a name that says so."""
        numbers = set(self._distinct(database, schema.CALLS, "r.threadId & 0xffffffff"))
        objects = self._distinct(database, ("MARKER", "OVERHEAD", "NAME"), schema.OBJECT_THREAD)
        numbers |= {int.from_bytes(raw, "little") for raw in objects}
        unknown = sorted(number for number in numbers - {0} if number not in self.threads)
        ids = {number: _FIRST_UNKNOWN + at for at, number in enumerate(unknown)}
        ids |= {**self.threads, 0: 0}
        rows = [
            (number, number.to_bytes(4, "little"), self.process + ids[number])
            for number in sorted(numbers | {0})
        ]
        _insert(database, "threads", rows, 3)
        names = self.writer.strings([f"pthread {number:#x}" for number in unknown])
        columns = {"nameId": names, "globalTid": [self.process + ids[n] for n in unknown]}
        self.writer.add("ThreadNames", columns)

    def _fill_numbered(self, database: sqlite3.Connection) -> None:
        """Fill in calls and kinds of overhead, which are named by number."""
        for event_class, table in ((schema.RUNTIME, "RUNTIME"), (schema.DRIVER, "DRIVER")):
            numbers = self._distinct(database, (table,), "r.cbid")
            kept = self.writer.strings(
                [schema.call_name(event_class, number) for number in numbers]
            )
            classes = [event_class] * len(numbers)
            _insert(database, "calls", zip(classes, numbers, kept, strict=True), 3)
        kinds = self._distinct(database, ("OVERHEAD",), "r.overheadKind")
        known = [OVERHEADS.get(kind, UNKNOWN_OVERHEAD) for kind in kinds]
        kept = self.writer.strings([name for _, name in known])
        numbers = [number for number, _ in known]
        _insert(database, "overheads", zip(kinds, numbers, kept, strict=True), 3)

    def _distinct(
        self, database: sqlite3.Connection, tables: Iterable[str], expression: str
    ) -> list[Any]:
        """Return the distinct values in those of the tables that hold rows."""
        values = {
            value
            for table in tables
            if table in self.file.columns
            for (value,) in database.execute(
                f"SELECT DISTINCT {expression} FROM nvprof.{schema.PREFIX}{table} AS r"
            )
        }
        return sorted(values - {None})

    def _write_losses(self, database: sqlite3.Connection, table: str) -> None:
        rows = f"nvprof.{schema.PREFIX}{table} AS r"
        sql = f"SELECT count(*) FROM {rows} WHERE NOT ({schema.HAS_TIMES})"
        if count := database.execute(sql).fetchone()[0]:
            reason = f"nvprof gave rows of {table} no times: its buffers were full"
            columns = ["globalPid", "records", "reason"]
            self.writer.add_rows("GPUTRACE_LOSS", columns, [(self.process, count, reason)])


def _insert(
    database: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]], columns: int
) -> None:
    marks = ", ".join("?" * columns)
    database.executemany(f"INSERT INTO temp.{table} VALUES ({marks})", rows)


_KILO: Final = 1000
_FIGURES: Final = {
    "coreClockRate": "clockRate",
    "globalMemoryBandwidth": "memoryBandwidth",
    "globalMemorySize": "totalMemory",
    "l2CacheSize": "l2CacheSize",
    "numMultiprocessors": "smCount",
}
"""Columns of nvprof's DEVICE and of TARGET_INFO_GPU; the first two are in thousands in DEVICE."""


def _write_cards(writer: TraceWriter, files: Sequence[schema.NvprofFile], folder: Path) -> None:
    """Write the cards, by NVML's index if it knows all, and the ordinals that processes use."""
    cards: dict[object, tuple[Any, ...]] = {}
    ordinals: list[tuple[object, int, int]] = []
    for file in files:
        for ordinal, name, uuid, *figures in _devices(file):
            # Without a uuid, cards of different processes are not identified.
            key = uuid or (_pid(file), ordinal)
            cards.setdefault(key, (name, uuid, *figures))
            ordinals.append((key, ordinal, _pid(file)))
    known: dict[object, tuple[int, str]] = {}
    for path in folder.glob("*.nvml.jsonl"):
        for device in read_nvml(path).devices:
            uuid = str(device["uuid"] or "").removeprefix("GPU-").replace("-", "").lower()
            known[uuid] = int(device["gpu"]), str(device["pciBusId"] or "").lower()
    by_nvml = all(key in known for key in cards)
    ids = {key: known[key][0] if by_nvml else at for at, key in enumerate(cards)}
    rows = [
        (0, ids[key], name, known.get(key, (0, None))[1], 1, *rest)
        for key, (name, *rest) in cards.items()
    ]
    columns = ["vmId", "id", "name", "busLocation", "isDiscrete", "uuid", *_FIGURES.values()]
    if rows:
        writer.add_rows("TARGET_INFO_GPU", columns, rows)
        devices = [(ids[key], ordinal, pid) for key, ordinal, pid in ordinals]
        writer.add_rows("TARGET_INFO_CUDA_DEVICE", ["gpuId", "cudaId", "pid"], devices)


def _devices(file: schema.NvprofFile) -> Iterator[tuple[Any, ...]]:
    """Yield ordinal, name, uuid (hexadecimal digits) and figures of a process's cards."""
    known = file.columns.get("DEVICE", frozenset())
    if "id" not in known:
        return
    selected = ", ".join(f"d.{name}" if name in known else "NULL" for name in ("uuid", *_FIGURES))
    sql = (
        f"SELECT d.id, s.value, {selected} FROM {schema.PREFIX}DEVICE AS d "
        "LEFT JOIN StringTable AS s ON s._id_ = d.name ORDER BY d.id"
    )
    with closing(Database(file.path)) as database:
        for ordinal, name, uuid, clock, bandwidth, *rest in database.query(sql):
            scaled = (None if value is None else value * _KILO for value in (clock, bandwidth))
            yield ordinal, name or "", (uuid or b"").hex(), *scaled, *rest
