"""Recordings of nsys and nvprof, joined with what our hooks recorded meanwhile, as traces."""

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

from gputrace.collectors.backend import Merged
from gputrace.collectors.finalize import (
    OWN,
    global_pid,
    hold_something,
    merge,
    write_meta,
    write_process,
    write_session,
    write_signals,
    write_unreadable,
)
from gputrace.collectors.launch.supervised import (
    ask,
)
from gputrace.collectors.nvml.log import read_nvml
from gputrace.collectors.spool.chunks import read_all
from gputrace.collectors.spool.clock_correction import correct_clocks
from gputrace.collectors.spool.host_events import HostEvents, join_hosts, read_host_file
from gputrace.errors import InputError, MissingError
from gputrace.model.names import demangle_all, short
from gputrace.readers.nsys_export import find_nsys, nsys_version, run_export
from gputrace.readers.nsys_schema import string_columns
from gputrace.readers.nvprof import find_skew
from gputrace.readers.nvprof_schema import (
    CALLS,
    DRIVER,
    HAS_TIMES,
    KERNELS,
    OBJECT_THREAD,
    ON_GPU,
    PREFIX,
    RUNTIME,
    TEMPORARY,
    NvprofFile,
    Rows,
    all_rows,
    call_name,
    opened,
    read_file,
    strings_named,
)
from gputrace.store import sqlite_security
from gputrace.store.writer import OVERHEADS, UNKNOWN_OVERHEAD, TraceWriter
from gputrace.units import format_ns

_EVENTS: Final = re.compile(
    r"CUPTI_ACTIVITY_KIND_\w+|CUDA_\w+_EVENTS|NVTX_\w+|OSRT_API|CUBLAS_EVENTS|CUDNN_EVENTS"
    r"|MPI_\w+|PROFILER_OVERHEAD|GPU_METRICS"
)
_OTHERS: Final = re.compile(
    r"ENUM_\w+|TARGET_INFO_(GPU|GPU_METRICS|CUDA_\w+|NVTX_\w+|SESSION_START_TIME)"
    r"|ANALYSIS_DETAILS"
)
_ABOUT: Final = ("META_DATA_EXPORT", "EXPORT_META_DATA")
"""Table about the export, under its name and its old one; paths and the user are in it too."""
_STARTED_CUDA: Final = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL")


def convert_nsys(
    folder: Path, output: Path, meta: Mapping[str, str], why_none: Callable[[], str]
) -> Merged:
    """Write the trace of a recording's folder; without a report, of the host's signals alone.

    Raises InputError where what nsys left cannot be read, MissingError where nsys is not there to
    read it, OSError where the trace cannot be written.
    """
    nsys = find_nsys()
    report = find_report(folder, nsys)
    if report is None:
        merged = merge(folder, output, meta)
        return Merged(0, 0, merged.steps, merged.cut, (why_none(),))
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
    """Return the complaints in nsys's report: errors (3) or warnings (2) too."""
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
"""Paths of the importer, relative to the folder of nsys; the third is Debian's."""
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


THREAD: Final = "pthread."
"""Before the system's id of a thread, what the hooks say of its pthread id."""


@dataclass(frozen=True, slots=True)
class _Process:
    """A file of nvprof, and who wrote it."""

    file: NvprofFile
    pid: int
    host: HostEvents | None


def convert_nvprof(
    folder: Path, output: Path, meta: Mapping[str, str], why_none: Callable[[bool], str]
) -> Merged:
    """Write the trace of a recording's folder; without a file of nvprof, of the host's signals.

    A file that cannot be read costs nothing but itself, and a note. Raises InputError where the
    recording goes on or a file breaks off while it is read, OSError where the trace cannot be
    written.
    """
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
            notes += _write_process(writer, process, start)
        steps = write_signals(writer, folder, hosts, start)
        notes += write_unreadable(writer, problems)
    if not starts:
        notes.append(why_none(bool(files)))
    return Merged(
        processes=len(files),
        kernels=sum(file.kernels for file in files),
        steps=steps,
        cut=sum(not host.whole for host in hosts),
        notes=tuple(notes),
        unread=hold_something(problems) or _are_left(folder, files),
    )


def _are_left(folder: Path, files: Sequence[NvprofFile]) -> bool:
    """Return whether there are non-empty files that could not be read."""
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


def _write_process(writer: TraceWriter, process: _Process, start: int) -> list[str]:
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


_FIRST_UNKNOWN: Final = 1 << 23
"""Above every thread id of Linux, and within the 24 bits that a globalTid has for one."""


class NvprofRows:
    """Writes the rows of one process.

    Attributes:
        late: by how many nanoseconds the GPU's clock was ahead of the host's; it is taken out.
    """

    def __init__(
        self,
        writer: TraceWriter,
        file: NvprofFile,
        pid: int,
        origin: int,
        threads: Mapping[int, int],
    ) -> None:
        """``origin`` is the session's start, ``threads`` system ids by 32 bits of pthread ids."""
        self._writer, self._file, self._origin = writer, file, origin
        self._process = global_pid(pid)
        self._threads = threads
        self.late = 0

    def write(self) -> None:
        """Raises InputError where the file is broken."""
        try:
            with self._writer.attached(self._file.path, "nvprof") as database:
                for name, columns in TEMPORARY.items():
                    database.execute(f"CREATE TEMP TABLE {name} ({columns})")
                self._fill(database)
                self.late = find_skew(database, self._file.columns)
                for rows in all_rows(self._file.columns):
                    self._insert(database, rows)
                self._tell_losses(database)
                for name in TEMPORARY:
                    database.execute(f"DROP TABLE temp.{name}")
        except sqlite_security.ERRORS as error:
            raise InputError(self._file.path, f"broken ({error})") from None

    def _insert(self, database: sqlite3.Connection, rows: Rows) -> None:
        values = {
            "origin": self._origin,
            "late": self.late,
            "process": self._process,
            "unknown": self._writer.string("(no name)"),
        }
        self._writer.make(rows.table)
        database.execute(rows.insert, values)

    def _fill(self, database: sqlite3.Connection) -> None:
        self._fill_names(database)
        self._fill_threads(database)
        self._fill_calls(database)
        kinds = self._distinct(database, ("OVERHEAD",), "r.overheadKind")
        known = [OVERHEADS.get(kind, UNKNOWN_OVERHEAD) for kind in kinds]
        kept = self._writer.strings([name for _, name in known])
        numbers = [number for number, _ in known]
        _insert(database, "overheads", zip(kinds, numbers, kept, strict=True), 3)

    def _fill_names(self, database: sqlite3.Connection) -> None:
        """Only of what is named in rows to be written: others hold the command line."""
        database.text_factory = lambda raw: raw.decode("utf-8", "replace")
        named = {
            id
            for table, expression in strings_named(self._file.columns)
            for id in self._distinct(database, [table], expression)
        }
        strings = database.execute("SELECT _id_, value FROM nvprof.StringTable")
        texts = {id: text for id, text in strings if id in named and id}
        kept = dict(zip(texts, self._writer.strings(list(texts.values())), strict=True))
        kernels = [id for id in self._distinct(database, KERNELS, "r.name") if id in texts]
        known = demangle_all({texts[id] for id in kernels})
        clear = [known[texts[id]] for id in kernels]
        whole = dict(zip(kernels, self._writer.strings(clear), strict=True))
        own = dict(zip(kernels, self._writer.strings([short(n) for n in clear]), strict=True))
        rows = ((id, kept[id], whole.get(id), own.get(id)) for id in texts)
        _insert(database, "names", rows, 4)

    def _fill_threads(self, database: sqlite3.Connection) -> None:
        """Threads whose system id is unknown get numbers of their own, and a name that says so."""
        numbers = set(self._distinct(database, CALLS, "r.threadId & 0xffffffff"))
        objects = self._distinct(database, ("MARKER", "OVERHEAD", "NAME"), OBJECT_THREAD)
        numbers |= {int.from_bytes(raw, "little") for raw in objects}
        unknown = sorted(number for number in numbers - {0} if number not in self._threads)
        ids = {number: _FIRST_UNKNOWN + at for at, number in enumerate(unknown)}
        ids |= {**self._threads, 0: 0}
        rows = [
            (number, number.to_bytes(4, "little"), self._process + ids[number])
            for number in sorted(numbers | {0})
        ]
        _insert(database, "threads", rows, 3)
        names = self._writer.strings([f"pthread {number:#x}" for number in unknown])
        columns = {"nameId": names, "globalTid": [self._process + ids[n] for n in unknown]}
        self._writer.add("ThreadNames", columns)

    def _fill_calls(self, database: sqlite3.Connection) -> None:
        for event_class, table in ((RUNTIME, "RUNTIME"), (DRIVER, "DRIVER")):
            numbers = self._distinct(database, (table,), "r.cbid")
            kept = self._writer.strings([call_name(event_class, number) for number in numbers])
            classes = [event_class] * len(numbers)
            _insert(database, "calls", zip(classes, numbers, kept, strict=True), 3)

    def _distinct(
        self, database: sqlite3.Connection, tables: Iterable[str], expression: str
    ) -> list[Any]:
        """Different values in those of the tables that hold rows."""
        found = {
            value
            for table in tables
            if table in self._file.columns
            for (value,) in database.execute(
                f"SELECT DISTINCT {expression} FROM nvprof.{PREFIX}{table} AS r"
            )
        }
        return sorted(found - {None})

    def _tell_losses(self, database: sqlite3.Connection) -> None:
        for table in (*ON_GPU, *CALLS):
            if table in self._file.columns:
                sql = f"SELECT count(*) FROM nvprof.{PREFIX}{table} AS r WHERE NOT ({HAS_TIMES})"
                count = database.execute(sql).fetchone()[0]
                if count:
                    reason = f"nvprof gave rows of {table} no times: its buffers were full"
                    row = (self._process, None, count, reason)
                    columns = ["globalPid", "timeNs", "records", "reason"]
                    self._writer.add_rows("GPUTRACE_LOSS", columns, [row])


def _insert(
    database: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]], columns: int
) -> None:
    marks = ", ".join("?" * columns)
    database.executemany(f"INSERT INTO temp.{table} VALUES ({marks})", rows)


_KILO = 1000
_COLUMNS = (
    "name",
    "uuid",
    "coreClockRate",
    "globalMemoryBandwidth",
    "globalMemorySize",
    "l2CacheSize",
    "numMultiprocessors",
)


@dataclass(frozen=True, slots=True)
class _Card:
    """A row of DEVICE: one card as one process saw it."""

    pid: int
    ordinal: int
    name: str
    uuid: str
    figures: tuple[int | None, ...]
    """Clock in Hz, bytes a second of memory, bytes of memory and of L2 cache, multiprocessors."""

    @property
    def key(self) -> object:
        """Return the key of a card; without a uuid, each process's cards are its own."""
        return self.uuid or (self.pid, self.ordinal)


def write_cards(writer: TraceWriter, files: Sequence[tuple[NvprofFile, int]], folder: Path) -> None:
    """Writes the cards and which ordinal of a process means which; files come with their pids.

    A card has the number that NVML gives it; without NVML, they are counted as they come.
    """
    seen = [card for file, pid in files for card in _cards(file, pid)]
    known = _nvml_cards(folder)
    first: dict[object, _Card] = {}
    for card in seen:
        first.setdefault(card.key, card)
    ids = _numbers(first.values(), known)
    rows = [
        (0, ids[key], card.name, known.get(card.uuid, (0, None))[1], 1, card.uuid, *card.figures)
        for key, card in first.items()
    ]
    columns = ["vmId", "id", "name", "busLocation", "isDiscrete", "uuid"]
    columns += ["clockRate", "memoryBandwidth", "totalMemory", "l2CacheSize", "smCount"]
    if rows:
        writer.add_rows("TARGET_INFO_GPU", columns, rows)
        devices = [(ids[card.key], card.ordinal, card.pid) for card in seen]
        writer.add_rows("TARGET_INFO_CUDA_DEVICE", ["gpuId", "cudaId", "pid"], devices)


def _numbers(cards: Iterable[_Card], known: dict[str, tuple[int, str]]) -> dict[object, int]:
    listed = list(cards)
    if all(card.uuid in known for card in listed):
        return {card.key: known[card.uuid][0] for card in listed}
    return {card.key: number for number, card in enumerate(listed)}


def _nvml_cards(folder: Path) -> dict[str, tuple[int, str]]:
    """Index and PCI address by uuid (hexadecimal digits alone)."""
    found = {}
    for path in folder.glob("*.nvml.jsonl"):
        for device in read_nvml(path).devices:
            uuid = str(device["uuid"] or "").removeprefix("GPU-").replace("-", "").lower()
            found[uuid] = int(device["gpu"]), str(device["pciBusId"] or "").lower()
    return found


def _cards(file: NvprofFile, pid: int) -> Iterator[_Card]:
    known = file.columns.get("DEVICE", frozenset())
    if "id" not in known:
        return
    selected = ", ".join(f"d.{name}" if name in known else "NULL" for name in _COLUMNS[1:])
    sql = (
        f"SELECT d.id, s.value, {selected} FROM {PREFIX}DEVICE AS d "
        "LEFT JOIN StringTable AS s ON s._id_ = d.name ORDER BY d.id"
    )
    with opened(file.path) as database:
        for ordinal, name, uuid, clock, bandwidth, *rest in database.execute(sql).fetchall():
            scaled = (None if value is None else value * _KILO for value in (clock, bandwidth))
            yield _Card(pid, ordinal, name or "", (uuid or b"").hex(), (*scaled, *rest))
