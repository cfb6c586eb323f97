"""nvprof as the recorder, for GPUs older than compute capability 8.0, and its files made a trace."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Final

from gputrace.collectors.backend import Backend, Merged, Plan, other_recorder
from gputrace.collectors.finalize import (
    global_pid,
    hold_something,
    write_process,
    write_session,
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
from gputrace.collectors.nvml.log import read_nvml
from gputrace.collectors.spool.chunks import read_all
from gputrace.collectors.spool.host_events import HostEvents, join_hosts, read_host_file
from gputrace.errors import InputError, MissingError, UsageError
from gputrace.model.names import demangle_all, short
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
        """The same for the same card; without a uuid, each process's are its own."""
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


LOG: Final = "nvprof.log"
"""nvprof's own output, in the folder of a recording; its processes' is beside it."""
LOGS: Final = "nvprof*.log"

NOTHING: Final = (
    "nvprof recorded nothing; --profiler-api needs a program that calls cudaProfilerStart, --steps "
    "one that reaches the first of them"
)
"""Of files that hold no rows."""
_CUPTI: Final = "record with --backend cupti"
_CAUSES: Final[Causes] = (
    (
        r"not supported on devices with compute capability",
        "nvprof records no GPU of compute capability 8.0 (A100) or newer; " + _CUPTI,
    ),
    (
        r"ERR_NVGPUCTRPERM|permission|unified memory profiling failed",
        "nvprof lacks a permission ({said}); in a container, start it with --privileged or "
        "--cap-add=SYS_ADMIN; else load the driver with NVreg_RestrictProfilingToAdminUsers=0, or "
        + _CUPTI,
    ),
    (
        r"unable to locate cuda driver library",
        "nvprof found no CUDA driver (libcuda.so.1); on a machine with a GPU, install the driver; "
        "in a container, run with --gpus all",
    ),
    (
        r"unable to locate .*librar",
        "nvprof lacks a library of its own ({said}); install the whole CUDA toolkit it is of, or "
        + _CUPTI,
    ),
    (
        r"invalid option",
        "nvprof does not take an option that gputrace gave it ({said}); name another version with "
        "GPUTRACE_NVPROF",
    ),
    (
        r"no space left",
        "no space is left for nvprof's files ({said}); set TMPDIR to a larger folder",
    ),
    (
        r"GPU profiling skipped|internal profiling error|internal error",
        "nvprof could not record the GPU ({said}); see `gputrace doctor`, or " + _CUPTI,
    ),
    (
        r"No CUDA application was profiled",
        "no process of the program started CUDA",
    ),
    (
        r"No kernels were profiled|Some profiling data are not recorded",
        NOTHING,
    ),
)


def why_not_started(folder: Path, code: int) -> str:
    """For a run in which nvprof ended before the program began."""
    return _explain(folder, f"nvprof did not start the program (exit code {code})")


def why_none(folder: Path) -> str:
    """For a run that left no file of nvprof."""
    return _explain(folder, "nvprof left no file, which each process writes at its regular end")


def _explain(folder: Path, otherwise: str) -> str:
    """The first cause that nvprof's words show; ``otherwise`` is told with its last words."""
    lines = _lines(folder)
    if (cause := find_cause(_CAUSES, lines)) is not None:
        return cause
    return f"{otherwise}: {lines[-1]}" if lines else otherwise


def _lines(folder: Path) -> list[str]:
    """nvprof marks its lines with ``==PID== Warning:``, or with ``========`` for the PID."""
    texts = [p.read_text("utf-8", "replace") for p in sorted(folder.glob(LOGS)) if p.is_file()]
    lines = [" ".join(line.split()) for text in texts for line in text.splitlines()]
    stripped = [re.sub(r"^=+(\d+=+)? ?((Warning|Error): )?", "", line) for line in lines]
    return [line.rstrip(".") for line in stripped if line]


TOOL: Final = Tool("nvprof", apart=False, why_not_started=why_not_started)


def run_under_nvprof(
    launch: Launch, folder: Path, _tell: Callable[[str], object], meanwhile: Callable[[], None]
) -> int:
    """Runs the program to its end and nvprof to its own; the program's exit code.

    Raises CannotRun where the program cannot be run, MissingError where nvprof does not start it.
    """
    return Supervision(TOOL, launch, folder).run(meanwhile)


_INSTALL: Final = (
    "nvprof is not on this machine; install a CUDA toolkit before 13 (on Debian, nvidia-profiler), "
    "name it with GPUTRACE_NVPROF, or record with --backend cupti"
)
_INSTALLED: Final = ("/usr/local/cuda*/bin/nvprof", "/usr/lib/nvidia-cuda-toolkit/bin/nvprof")
_NEEDED: Final = ("--profile-child-processes", "--export-profile", "--log-file")
_WANTED: Final = {
    "--openacc-profiling": "off",
    "--openmp-profiling": "off",
    "--unified-memory-profiling": "off",
}
"""Off, where a version knows them: they need libraries or permissions that machines often lack."""
_OPTION: Final = re.compile(r"^\s*(?:-\w,\s*)?(--[a-z][a-z0-9-]*)", re.MULTILINE)


def find_nvprof() -> str | None:
    """The nvprof of GPUTRACE_NVPROF, of the PATH, or the newest in the usual places."""
    return next(_candidates(), None)


def _candidates() -> Iterator[str]:
    if named := os.environ.get("GPUTRACE_NVPROF"):
        yield named
    if found := shutil.which("nvprof"):
        yield found
    for pattern in _INSTALLED:
        yield from sorted(glob(pattern), reverse=True)


def _obstacle(inherited: Mapping[str, str]) -> str | None:
    if find_nvprof() is None:
        return _INSTALL
    if "NVPROF_ID" in inherited:
        return "this shell runs under nvprof already; run without it"
    return other_recorder(inherited)


def _launch(
    plan: Plan, folder: Path, command: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    nvprof = find_nvprof()
    if nvprof is None:
        raise MissingError(_INSTALL)
    if plan.delay_ns or plan.duration_ns:
        raise UsageError(
            "nvprof ends a program with its time limit, so it can record no --delay or --duration; "
            "take --steps or --profiler-api, or --backend cupti"
        )
    options = _options(nvprof, _window(plan), folder)
    changed = dict(environment) | {"GPUTRACE_PTHREADS": "1"}
    if plan.steps is not None:
        changed["GPUTRACE_PROFILER_API"] = "1"
    return Launch((nvprof, *options, *supervised(folder), *command), changed)


def _options(nvprof: str, window: dict[str, str], folder: Path) -> list[str]:
    """Those wanted that this nvprof knows; raises MissingError where it lacks one needed."""
    known = frozenset(_OPTION.findall(ask([nvprof, "--help"])[1]))
    missing = [name for name in _NEEDED if name not in known]
    if missing:
        raise MissingError(
            f"{nvprof} does not know {', '.join(missing)}: it is too old, or no nvprof; name "
            "another with GPUTRACE_NVPROF"
        )
    # nvprof replaces % in names.
    place = str(folder.absolute()).replace("%", "%%")
    options = ["--profile-child-processes", "--force-overwrite"]
    options += ["--export-profile", f"{place}/%p.nvvp", "--log-file", f"{place}/nvprof.%p.log"]
    for name, value in (_WANTED | window).items():
        options += [name, value] if name in known else []
    return options


def _window(plan: Plan) -> dict[str, str]:
    """Steps begin and end the recording by calls of CUDA's profiler API, from the hooks."""
    later = plan.profiler_api or (plan.steps is not None and plan.steps[0] > 0)
    return {"--profile-from-start": "off"} if later else {}


def _merge(folder: Path, output: Path, told: Mapping[str, str]) -> Merged:

    return convert(folder, output, told)


NVPROF: Final = Backend("nvprof", _obstacle, _launch, _merge, run_under_nvprof)
