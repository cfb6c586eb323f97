"""The trace file of a recording, made of what its processes left behind."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.backend import Merged
from gputrace.collectors.nvml.log import NvmlLog, make_steady, read_nvml, tables
from gputrace.collectors.spool.activity import (
    Spool,
    call_windows_of,
    join_spools,
    read_spool,
    windows_of,
)
from gputrace.collectors.spool.chunks import Loss, read_all
from gputrace.collectors.spool.clock_correction import correct_clocks
from gputrace.collectors.spool.host_events import HostEvents, Records, join_hosts, read_host_file
from gputrace.errors import InputError
from gputrace.model.names import demangle, short
from gputrace.store.writer import (
    DOMAIN,
    MARK,
    OVERHEADS,
    PUSH_POP,
    START_END,
    UNKNOWN_OVERHEAD,
    TraceWriter,
)
from gputrace.version import __version__

LEAD_NS: Final = 1000
"""The trace's clock starts before the first file, so that nothing is at 0: that means no time."""


def merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Writes the trace of a recording's folder.

    Raises InputError where nothing of what the folder holds can be read, OSError where the file
    cannot be written.
    """
    problems: list[InputError] = []
    spools: list[Spool] = read_all(folder, "*.spool", read_spool, join_spools, problems)
    hosts: list[HostEvents] = read_all(folder, "*.host", read_host_file, join_hosts, problems)
    if hold_something(problems) and not spools and not hosts:
        raise problems[0]
    correct_clocks(spools, hosts)
    starts = [spool.started for spool in spools] + [host.started for host in hosts]
    start = min(starts, default=time.time_ns()) - LEAD_NS
    with TraceWriter(output) as writer:
        processes = write_all(writer, spools, hosts, start, meta)
        steps = write_signals(writer, folder, hosts, start)
        lost = write_unreadable(writer, problems)
    return Merged(
        processes=processes,
        kernels=sum(len(spool.records[b"KERN"]) for spool in spools),
        steps=steps,
        cut=sum(not spool.whole and not spool.stopped for spool in spools),
        notes=(*_notes(spools, hosts, start, meta), *lost),
        unread=hold_something(problems),
    )


def write_all(
    writer: TraceWriter,
    spools: Sequence[Spool],
    hosts: Sequence[HostEvents],
    start: int,
    meta: Mapping[str, str],
) -> int:
    """Writes the session, its processes and what the collector saw of each; how many there are.

    ``start`` is the session's on CLOCK_REALTIME. What the hooks and NVML saw is not in it.
    """
    write_session(writer, start, meta)
    cards = write_cards(writer, spools)
    processes = write_processes(writer, spools, hosts)
    for spool in spools:
        ProcessRows(writer, spool, start).write(cards)
    return processes


def _notes(
    spools: Sequence[Spool], hosts: Sequence[HostEvents], start: int, meta: Mapping[str, str]
) -> list[str]:
    """Why processes have no GPU activity, each reason once; and whose files end early."""
    reasons = {spool.info.get("no_gpu_activity", "") for spool in spools}
    if not spools and meta.get("backend") != "host":
        reasons.add("no process of the program started CUDA")
    stops = [(spool.pid, loss) for spool in spools if spool.stopped for loss in spool.losses[:1]]
    stops += [(host.pid, host.stopped) for host in hosts if host.stopped]
    ends = {
        f"process {pid}, {why}; all after {(at - start) / 1e9:.1f} s is missing"
        for pid, (at, _, why) in stops
    }
    return [*sorted(reasons - {""}), *sorted(ends)]


_NOT_GIVEN: Final = 0xFFFFFFFF
_UNKNOWN_MEMORY: Final = 7
"""Memory kinds of nsys's ENUM_CUDA_MEM_KIND, which counts from pageable; CUPTI counts from
unknown."""
_LAUNCH_TYPES: Final = 3
_CLOCKS: Final = ("realtime", "monotonic", "raw")


class ProcessRows:
    """Writes the rows of one process."""

    def __init__(self, writer: TraceWriter, spool: Spool, start: int) -> None:
        self._writer, self._spool, self._start = writer, spool, start
        self._pid = global_pid(spool.pid)
        self._texts: dict[tuple[int, str], int] = {}

    def write(self, cards: Mapping[bytes, int]) -> None:
        self._process(cards)
        self._kernels(self._spool.records[b"KERN"])
        self._copies(self._spool.records[b"COPY"])
        self._memsets(self._spool.records[b"MSET"])
        self._graphs(self._spool.records[b"GRPH"])
        self._calls(self._spool.records[b"API "])
        self._ranges(self._spool.records[b"NVTX"])
        self._overheads(self._spool.records[b"OVER"])

    def _process(self, cards: Mapping[bytes, int]) -> None:
        spool, add = self._spool, self._writer.add_rows
        names = self._writer.strings(list(spool.threads.values()))
        threads = self._threads(np.array(list(spool.threads), np.uint32))
        self._writer.add("ThreadNames", {"nameId": names, "globalTid": threads})
        devices = {int(row["ordinal"]): row for row in spool.records[b"DEVI"]}
        rows = [(cards[bytes(r["uuid"])], o, spool.pid) for o, r in devices.items()]
        if rows:
            add("TARGET_INFO_CUDA_DEVICE", ["gpuId", "cudaId", "pid"], rows)
        times = [spool.records[b"CLOK"][name].astype(np.int64).tolist() for name in _CLOCKS]
        clocks = [(self._pid, *row) for row in zip(*times, strict=True)]
        columns = ["globalPid", "realtimeNs", "monotonicNs", "monotonicRawNs"]
        if clocks:
            add("GPUTRACE_CLOCK", columns, clocks)
        self._windows("GPUTRACE_WINDOW", windows_of(spool))
        self._windows("GPUTRACE_API_WINDOW", call_windows_of(spool) or [])
        if spool.losses:
            write_losses(self._writer, self._pid, spool.losses, self._start)

    def _windows(self, table: str, stretches: Sequence[tuple[int, int]]) -> None:
        windows = np.array(stretches, np.uint64).reshape(-1, 2)
        span = {"start": self._time(windows[:, 0]), "end": self._time(windows[:, 1])}
        self._writer.add(table, {**span, "globalPid": [self._pid] * len(windows)})

    def _span(self, rows: Records) -> dict[str, Any]:
        return {"start": self._time(rows["start"]), "end": self._time(rows["end"])}

    def _time(self, moments: NDArray[np.uint64]) -> NDArray[np.int64]:
        return session_time(moments, self._start)

    def _on_gpu(self, rows: Records) -> dict[str, Any]:
        # Of what the GPU was still at when CUPTI had to hand it over, one time or both are 0.
        timed = (rows["start"] != 0) & (rows["end"] != 0)
        span = {name: np.where(timed, times, 0) for name, times in self._span(rows).items()}
        return span | {
            "deviceId": rows["device"],
            "contextId": rows["context"],
            "streamId": rows["stream"],
            "correlationId": rows["correlation"],
            "globalPid": [self._pid] * len(rows),
        }

    def _strings(self, ids: NDArray[np.uint32], form: str = "") -> list[int]:
        """StringIds of spool names; ``form`` demangles or shortens."""
        new = [id for id in np.unique(ids).tolist() if (id, form) not in self._texts]
        # All at once: a program may name each of its ranges anew.
        added = self._writer.strings([self._text(id, form) for id in new])
        self._texts.update(((id, form), text) for id, text in zip(new, added, strict=True))
        return [self._texts[id, form] for id in ids.tolist()]

    def _text(self, id: int, form: str) -> str:
        text = self._spool.name(id)
        if form:
            text = demangle(text)
        return short(text) if form == "short" else text

    def _kernels(self, rows: Records) -> None:
        columns = self._on_gpu(rows) | {
            "demangledName": self._strings(rows["name"], "demangled"),
            "shortName": self._strings(rows["name"], "short"),
            "mangledName": self._strings(rows["name"]),
            "registersPerThread": rows["registers"],
            "staticSharedMemory": rows["static_shared"],
            "dynamicSharedMemory": rows["dynamic_shared"],
            "localMemoryPerThread": rows["local_per_thread"],
            "localMemoryTotal": rows["local_total"],
            "launchType": _nsys_launch(rows["launch_type"]),
            "gridId": rows["grid_id"],
        }
        for axis, name in enumerate("XYZ"):
            columns |= {
                f"grid{name}": rows["grid"][:, axis],
                f"block{name}": rows["block"][:, axis],
            }
        self._writer.add("CUPTI_ACTIVITY_KIND_KERNEL", columns)

    def _copies(self, rows: Records) -> None:
        columns = self._on_gpu(rows) | {
            "bytes": rows["bytes"].astype(np.int64),
            "copyKind": rows["copy_kind"],
            "srcKind": _nsys_memory(rows["source_kind"]),
            "dstKind": _nsys_memory(rows["destination_kind"]),
            "srcDeviceId": _given(rows["source_device"]),
            "dstDeviceId": _given(rows["destination_device"]),
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_MEMCPY", columns)

    def _memsets(self, rows: Records) -> None:
        columns = self._on_gpu(rows) | {
            "value": rows["value"],
            "bytes": rows["bytes"].astype(np.int64),
            "memKind": _nsys_memory(rows["memory_kind"]),
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_MEMSET", columns)

    def _graphs(self, rows: Records) -> None:
        columns = self._on_gpu(rows) | {"graphId": rows["graph"], "graphExecId": rows["graph"]}
        self._writer.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", columns)

    def _calls(self, rows: Records) -> None:
        columns = self._span(rows) | {
            "eventClass": rows["driver"],
            "globalTid": self._threads(rows["thread"]),
            "correlationId": rows["correlation"],
            "nameId": self._strings(rows["name"]),
            "returnValue": rows["result"],
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_RUNTIME", columns)

    def _ranges(self, rows: Records) -> None:
        texts = self._strings(rows["name"])
        columns = nvtx_columns(self._spool, rows, self._span(rows), texts)
        self._writer.add("NVTX_EVENTS", columns)

    def _overheads(self, rows: Records) -> None:
        kinds = [OVERHEADS.get(kind, UNKNOWN_OVERHEAD) for kind in rows["kind"].tolist()]
        columns = self._span(rows) | {
            "eventClass": [0] * len(rows),
            "globalTid": self._threads(rows["thread"]),
            "nameId": self._writer.strings([name for _, name in kinds]),
            "overheadType": [number for number, _ in kinds],
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_OVERHEAD", columns)

    def _threads(self, threads: NDArray[np.uint32]) -> NDArray[np.int64]:
        return global_tids(self._spool.pid, threads)


def _nsys_memory(kinds: NDArray[Any]) -> NDArray[np.int64]:
    numbers = kinds.astype(np.int64)
    return np.where((numbers >= 1) & (numbers <= _UNKNOWN_MEMORY), numbers - 1, _UNKNOWN_MEMORY)


def _nsys_launch(types: NDArray[np.uint32]) -> NDArray[np.int64]:
    """CUPTI counts from regular, nsys from unknown."""
    return np.where(types < _LAUNCH_TYPES, types.astype(np.int64) + 1, 0)


def _given(devices: NDArray[np.uint32]) -> list[int | None]:
    return [None if device == _NOT_GIVEN else device for device in devices.tolist()]


def write_cards(writer: TraceWriter, spools: Sequence[Spool]) -> dict[bytes, int]:
    """The cards that any process saw, numbered by PCI address; their numbers by uuid."""
    seen: dict[bytes, Any] = {}
    for spool in spools:
        for row in spool.records[b"DEVI"]:
            seen.setdefault(bytes(row["uuid"]), row)
    ordered = sorted(seen.values(), key=lambda row: row["bus"].lower())
    if ordered:
        rows = [_card(i, row) for i, row in enumerate(ordered)]
        writer.add_rows("TARGET_INFO_GPU", list(rows[0]), [tuple(row.values()) for row in rows])
    return {bytes(row["uuid"]): i for i, row in enumerate(ordered)}


def _card(id: int, row: Any) -> dict[str, Any]:
    """A row of TARGET_INFO_GPU; what the driver did not say is NULL."""
    return {
        "vmId": global_pid(0),
        "id": id,
        "name": _text(row["name"]),
        "busLocation": _text(row["bus"]).lower(),
        "isDiscrete": 1,
        "l2CacheSize": int(row["l2_cache"]) or None,
        "totalMemory": int(row["memory"]) % LARGEST or None,
        "memoryBandwidth": int(row["bandwidth"]) % LARGEST or None,
        "clockRate": int(row["clock"]) % LARGEST or None,
        "smCount": int(row["multiprocessors"]) or None,
        "uuid": str(UUID(bytes=bytes(row["uuid"]))),
        "computeMajor": int(row["compute_major"]) or None,
        "computeMinor": int(row["compute_minor"]) if row["compute_major"] else None,
    }


def _text(value: bytes) -> str:
    return value.split(b"\0")[0].decode("utf-8", "replace")


LARGEST: Final = 1 << 62
"""Largest integer of SQLite, which a corrupt file may exceed."""
OWN: Final = 1
"""This machine in the upper 16 bits of global ids, where no nsys has numbered it."""


def session_time(moments: NDArray[np.uint64], start: int) -> NDArray[np.int64]:
    """Nanoseconds since the session's start on CLOCK_REALTIME; 0 means no moment, and stays."""
    signed = moments.astype(np.int64)
    return np.where(signed == 0, 0, signed - start)


def global_pid(pid: int, machine: int = OWN) -> int:
    """A process in the form of nsys's globalPid: 16 bits of host, 24 of pid, 24 of thread."""
    return machine << 48 | (pid & 0xFFFFFF) << 24


def global_tids(pid: int, threads: NDArray[np.uint32], machine: int = OWN) -> NDArray[np.int64]:
    """Threads of a process in the form of nsys's globalTid."""
    return threads.astype(np.int64) & 0xFFFFFF | global_pid(pid, machine)


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


def write_losses(writer: TraceWriter, process: int, losses: Sequence[Loss], start: int) -> None:
    """Writes what a process lost; ``process`` is its globalPid."""
    rows = [
        (process, (at - start) % LARGEST, count % LARGEST or None, why) for at, count, why in losses
    ]
    writer.add_rows("GPUTRACE_LOSS", ["globalPid", "timeNs", "records", "reason"], rows)


def write_unreadable(writer: TraceWriter, problems: Sequence[InputError]) -> list[str]:
    """Writes which files of a recording could not be read, and why; a line each."""
    lost = [f"{problem.path.name}: {problem.problem}" for problem in problems]
    if lost:
        writer.add_rows("GPUTRACE_LOSS", ["reason"], [(line,) for line in lost])
    return lost


def hold_something(problems: Sequence[InputError]) -> bool:
    """Return whether any unreadable file is worth keeping: an empty one is not."""
    return any(problem.path.stat().st_size for problem in problems)


def write_nvml(writer: TraceWriter, paths: Iterable[Path], start: int) -> None:
    """Writes the cards, their samples and their topology; ``timeNs`` on the session's clock.

    Several files are of recorders that sampled in turn, or of a ring: they describe the same cards.
    """
    logs = []
    for path in paths:
        with suppress(FileNotFoundError):  # a ring has let go of it
            logs.append(read_nvml(path))
    first = next((log.clocks[0] for log in logs if log.clocks), (0, 0))
    for log in logs:
        make_steady(log, first[0] - first[1])
    write_logs(writer, logs, start)


def write_logs(writer: TraceWriter, logs: Iterable[NvmlLog], start: int) -> None:
    """Write NVML's rows from logs that have been read already."""
    described = False
    for log in logs:
        _write_log(writer, log, start, not described)
        described = described or bool(log.devices)


def _write_log(writer: TraceWriter, log: NvmlLog, start: int, describes: bool) -> None:
    for table, (columns, rows) in tables(log).items():
        if not rows or not (describes or "timeNs" in columns):
            continue
        writer.make(table, ", ".join(columns))
        if "timeNs" in columns:
            at = columns.index("timeNs")
            rows = [(*row[:at], row[at] - start, *row[at + 1 :]) for row in rows]
        writer.add_rows(table, columns, rows)


_TYPES: Final = np.array([PUSH_POP, MARK, START_END, DOMAIN])
_MARK, _START_END, DOMAIN_CREATED = 1, 2, 3
"""Texts of the losses that native/spool.h counts."""


def nvtx_columns(
    spool: Spool, rows: Records, span: Mapping[str, Any], texts: Sequence[int]
) -> dict[str, Any]:
    """Columns of NVTX_EVENTS; ``texts`` are the StringIds of the rows' names."""
    kinds = rows["kind"]
    threads = global_tids(spool.pid, rows["thread"])
    enders = global_tids(spool.pid, rows["end_thread"])
    elsewhere = (kinds == _START_END) & (enders != threads)
    domains = zip(rows["domain"].tolist(), kinds == DOMAIN_CREATED, strict=True)
    return {
        "start": span["start"],
        "end": _where((kinds != _MARK) & (kinds != DOMAIN_CREATED), span["end"]),
        "eventType": _TYPES.take(kinds.astype(np.int64), mode="clip"),
        "rangeId": _where(kinds == _START_END, rows["range"]),
        "text": [spool.name(domain) if created else None for domain, created in domains],
        "globalTid": threads,
        "endGlobalTid": _where(elsewhere, enders),
        "textId": _where(kinds != DOMAIN_CREATED, np.array(texts, np.int64)),
        "domainId": rows["domain"],
    }


def _where(there: NDArray[np.bool_], values: NDArray[Any]) -> list[Any]:
    """The values, and None where there is none."""
    return [value if here else None for here, value in zip(there, values.tolist(), strict=True)]


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
class KnownProcesses:
    """Identity of a process, from all of its files."""

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
    found: dict[tuple[str, int], KnownProcesses] = {}
    files: list[HostEvents | Spool] = [*hosts, *spools]
    for file in files:
        known = found.setdefault((file.host, file.pid), KnownProcesses(file.pid, file.host))
        known.info |= file.info
        known.whole = file.whole if isinstance(file, Spool) else known.whole and file.whole
    for known in found.values():
        row = (global_pid(known.pid), known.pid, known.info.get("program", ""))
        writer.add_rows("PROCESSES", ["globalPid", "pid", "name"], [row])
        write_process(writer, global_pid(known.pid), known)
    return len(found)


def write_process(writer: TraceWriter, process: int, known: KnownProcesses | HostEvents) -> None:
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


def write_session(writer: TraceWriter, start: int, meta: Mapping[str, str]) -> None:
    """Writes when and how a recording was made that is no nsys export."""
    seconds = start / 1e9
    form = "%Y-%m-%dT%H:%M:%S"
    utc, local = (time.strftime(form, t(seconds)) for t in (time.gmtime, time.localtime))
    writer.add_rows(
        "TARGET_INFO_SESSION_START_TIME",
        ["utcEpochNs", "utcTime", "localTime"],
        [(start, utc, local)],
    )
    exported = {
        "EXPORT_PRODUCT_NAME": "gputrace",
        "EXPORT_PRODUCT_VERSION": __version__,
        "EXPORT_SCHEMA_VERSION": "3.20.3",
        "EXPORT_SCHEMA_VERSION_MAJOR": "3",
        "EXPORT_SCHEMA_VERSION_MINOR": "20",
        "EXPORT_SCHEMA_VERSION_MICRO": "3",
    }
    writer.add_enums()
    writer.add_rows("META_DATA_EXPORT", ["name", "value"], exported.items())
    write_meta(writer, start, meta)


def write_meta(writer: TraceWriter, start: int, meta: Mapping[str, str]) -> None:
    """Writes what makes the file a trace of ours; ``start`` is the session's (CLOCK_REALTIME)."""
    own = {"format": "1", "version": __version__, "start_realtime_ns": str(start), **meta}
    writer.add_rows("GPUTRACE_META", ["name", "value"], own.items())
