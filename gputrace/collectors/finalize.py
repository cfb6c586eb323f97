"""Making of a recording's trace file from the files of its processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.attempts import first_number, rank_of, read_lives
from gputrace.collectors.backend import Merged
from gputrace.collectors.clock_correction import correct_clocks
from gputrace.collectors.nvml.log import NvmlLog, make_steady, read_nvml, tables
from gputrace.collectors.spool import Loss, activity, read_all
from gputrace.collectors.spool.host_events import (
    HostEvents,
    Records,
    counts,
    read_hosts,
    take_backward_passes,
)
from gputrace.errors import InputError
from gputrace.model.attempts import choose_attempt, describe_lives
from gputrace.model.names import demangle, short
from gputrace.store.writer import (
    DOMAIN,
    GRAPH_NODE,
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
    """Write the trace of a recording's folder.

    Raises InputError if nothing in the folder can be read, OSError if the trace cannot be written.
    """
    problems: list[InputError] = []
    spools: list[activity.Spool] = read_all(
        folder, "*.spool", activity.read_spool, activity.join_spools, problems
    )
    hosts = read_hosts(folder, problems)
    if hold_something(problems) and not spools and not hosts:
        raise problems[0]
    correct_clocks(spools, hosts)
    if not spools:
        take_backward_passes(hosts)
    starts = [spool.started for spool in spools] + [host.started for host in hosts]
    start = min(starts, default=time.time_ns()) - LEAD_NS
    with TraceWriter(output) as writer:
        processes = write_all(writer, spools, hosts, start, meta)
        steps = write_signals(writer, folder, hosts, start)
        lost = [
            *write_lives(writer, folder, spools, hosts, start),
            *write_unreadable(writer, problems),
        ]
    sorts = {"step": "steps", "data_wait": "waits for data", "annotation": "annotations"}
    sorts["sample"] = "lines"
    return Merged(
        processes=processes,
        kernels=sum(len(spool.records[b"KERN"]) for spool in spools),
        steps=steps,
        of_host=tuple(s for name, s in sorts.items() if any(len(h.records[name]) for h in hosts)),
        cut=sum(not spool.whole and not spool.stopped for spool in spools),
        notes=(*_notes(spools, hosts, start, meta), *lost),
        unread=hold_something(problems),
    )


def write_all(
    writer: TraceWriter,
    spools: Sequence[activity.Spool],
    hosts: Sequence[HostEvents],
    start: int,
    meta: Mapping[str, str],
) -> int:
    """Write the session and its processes with the collector's records; return their number.

    ``start`` is the session's on CLOCK_REALTIME.
    """
    write_session(writer, start, meta)
    cards = _write_cards(writer, spools)
    # A process that runs another program (exec) leaves a host file for each. Information from the
    # collector takes precedence, then the last host file's.
    infos: dict[tuple[str, int], dict[str, str]] = {}
    whole: dict[tuple[str, int], bool] = {}
    files: list[HostEvents | activity.Spool] = [*hosts, *spools]
    for file in files:
        key = file.host, file.pid
        infos[key] = infos.get(key, {}) | file.info
        whole[key] = file.whole and (isinstance(file, activity.Spool) or whole.get(key, True))
    for (host, pid), info in infos.items():
        row = (global_pid(pid), pid, info.get("program", ""))
        writer.add_rows("PROCESSES", ["globalPid", "pid", "name"], [row])
        write_process(writer, pid, host, info, whole[host, pid])
    for spool in spools:
        dropped = activity.drop_unsettled_nodes(spool)
        if dropped:
            note = f"nodes of CUDA graphs without an end from CUPTI, left out: {dropped:,}"
            writer.add_rows("GPUTRACE_NOTE", ["globalPid", "text"], [(global_pid(spool.pid), note)])
        _Activity(writer, spool, start).write(cards)
    return len(infos)


def _notes(
    spools: Sequence[activity.Spool],
    hosts: Sequence[HostEvents],
    start: int,
    meta: Mapping[str, str],
) -> list[str]:
    """Return why processes have no GPU activity, each reason once, and whose files end early."""
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
_TYPES: Final = np.array([PUSH_POP, MARK, START_END, DOMAIN])
_MARK, _START_END, DOMAIN_CREATED = 1, 2, 3
"""Kinds of NVTX records, as native/spool.h numbers them."""


class _Activity:
    """Writer of the collector's records of one process."""

    def __init__(self, writer: TraceWriter, spool: activity.Spool, start: int) -> None:
        self._writer, self._spool, self._start = writer, spool, start
        self._pid = global_pid(spool.pid)

    def write(self, cards: Mapping[bytes, int]) -> None:
        """Write all tables; ``cards`` are the ids of TARGET_INFO_GPU by uuid."""
        self._write_process(cards)
        self._write_gpu()
        self._write_ranges(self._spool.records[b"NVTX"])
        rows = self._spool.records[b"MESG"]
        bytes_, ids = (rows[name].astype(np.int64) for name in ("bytes", "communicator"))
        columns = self._span(rows) | {
            "globalTid": self._threads(rows["thread"]),
            "nameId": self._strings(rows["name"]),
            "communicator": _where(ids != 0, ids),
            "bytes": _where(bytes_ >= 0, bytes_),
            "peer": _where(rows["peer"] >= 0, rows["peer"]),
            "ranks": _where(rows["ranks"] > 0, rows["ranks"]),
        }
        self._writer.add("GPUTRACE_MESSAGE", columns)
        rows = self._spool.records[b"API "]
        columns = self._span(rows) | {
            "eventClass": rows["driver"],
            "globalTid": self._threads(rows["thread"]),
            "correlationId": rows["correlation"],
            "nameId": self._strings(rows["name"]),
            "returnValue": rows["result"],
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_RUNTIME", columns)
        rows = self._spool.records[b"OVER"]
        kinds = [OVERHEADS.get(kind, UNKNOWN_OVERHEAD) for kind in rows["kind"].tolist()]
        columns = self._span(rows) | {
            "eventClass": [0] * len(rows),
            "globalTid": self._threads(rows["thread"]),
            "nameId": self._writer.strings([name for _, name in kinds]),
            "overheadType": [number for number, _ in kinds],
        }
        self._writer.add("CUPTI_ACTIVITY_KIND_OVERHEAD", columns)
        rows = self._spool.records[b"NODE"]
        columns = self._span(rows) | {
            "eventClass": [GRAPH_NODE] * len(rows),
            "globalTid": self._threads(rows["thread"]),
            "nameId": self._writer.strings(["Graph Node Creation"] * len(rows)),
            "graphNodeId": rows["node"].astype(np.int64),
            "originalGraphNodeId": _where(rows["original"] != 0, rows["original"].astype(np.int64)),
        }
        self._writer.add("CUDA_GRAPH_NODE_EVENTS", columns)

    def _write_process(self, cards: Mapping[bytes, int]) -> None:
        spool, add = self._spool, self._writer.add
        names = self._writer.strings(list(spool.threads.values()))
        threads = self._threads(np.array(list(spool.threads), np.uint32))
        add("ThreadNames", {"nameId": names, "globalTid": threads})
        devices = {int(row["ordinal"]): cards[bytes(row["uuid"])] for row in spool.records[b"DEVI"]}
        columns = {"gpuId": list(devices.values()), "cudaId": list(devices)}
        add("TARGET_INFO_CUDA_DEVICE", columns | {"pid": [spool.pid] * len(devices)})
        clocks = spool.records[b"CLOK"]
        looks: dict[str, Any] = {
            "globalPid": [self._pid] * len(clocks),
            "realtimeNs": clocks["realtime"].astype(np.int64),
            "monotonicNs": clocks["monotonic"].astype(np.int64),
            "monotonicRawNs": clocks["raw"].astype(np.int64),
        }
        add("GPUTRACE_CLOCK", looks)
        control, idle = activity.control_stretches_of(spool)
        for table, stretches, more in (
            ("GPUTRACE_WINDOW", activity.windows_of(spool), {}),
            ("GPUTRACE_API_WINDOW", activity.call_windows_of(spool) or [], {}),
            ("GPUTRACE_CONTROL", control, {"idleCupti": idle}),
            ("GPUTRACE_GRAPH_NODES", activity.node_stretches_of(spool), {}),
        ):
            edges = session_time(np.array(stretches, np.uint64).reshape(-1, 2).T, self._start)
            span: dict[str, Any] = dict(zip(("start", "end"), edges, strict=True))
            add(table, span | {"globalPid": [self._pid] * len(stretches)} | more)
        losses = list(spool.losses)
        if "left_out" in spool.info and len(spool.records[b"DEVI"]) > 1:
            losses.append((spool.started, 0, spool.info["left_out"]))
        write_losses(self._writer, self._pid, losses, self._start)

    def _write_gpu(self) -> None:
        records, add = self._spool.records, self._writer.add
        rows = records[b"KERN"]
        types = rows["launch_type"].astype(np.int64)
        columns = self._on_gpu(rows) | {
            "demangledName": self._strings(rows["name"], demangle),
            "shortName": self._strings(rows["name"], lambda name: short(demangle(name))),
            "mangledName": self._strings(rows["name"]),
            "registersPerThread": rows["registers"],
            "staticSharedMemory": rows["static_shared"],
            "dynamicSharedMemory": rows["dynamic_shared"],
            "localMemoryPerThread": rows["local_per_thread"],
            "localMemoryTotal": rows["local_total"],
            # CUPTI counts from regular, nsys from unknown.
            "launchType": np.where(types < _LAUNCH_TYPES, types + 1, 0),
            "gridId": rows["grid_id"],
            "graphId": _where(rows["graph"] != 0, rows["graph"]),
            "graphNodeId": _where(rows["node"] != 0, rows["node"].astype(np.int64)),
        }
        for i, axis in enumerate("XYZ"):
            columns |= {f"grid{axis}": rows["grid"][:, i], f"block{axis}": rows["block"][:, i]}
        add("CUPTI_ACTIVITY_KIND_KERNEL", columns)
        rows = records[b"COPY"]
        columns = self._on_gpu(rows) | {
            "bytes": rows["bytes"].astype(np.int64),
            "copyKind": rows["copy_kind"],
            "srcKind": _nsys_memory(rows["source_kind"]),
            "dstKind": _nsys_memory(rows["destination_kind"]),
            "srcDeviceId": _where(rows["source_device"] != _NOT_GIVEN, rows["source_device"]),
            "dstDeviceId": _where(
                rows["destination_device"] != _NOT_GIVEN, rows["destination_device"]
            ),
        }
        add("CUPTI_ACTIVITY_KIND_MEMCPY", columns)
        rows = records[b"MSET"]
        columns = self._on_gpu(rows) | {
            "value": rows["value"],
            "bytes": rows["bytes"].astype(np.int64),
            "memKind": _nsys_memory(rows["memory_kind"]),
        }
        add("CUPTI_ACTIVITY_KIND_MEMSET", columns)
        rows = records[b"GRPH"]
        columns = self._on_gpu(rows) | {"graphId": rows["graph"], "graphExecId": rows["graph"]}
        add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", columns)

    def _write_ranges(self, rows: Records) -> None:
        kinds, span = rows["kind"], self._span(rows)
        threads, enders = self._threads(rows["thread"]), self._threads(rows["end_thread"])
        texts = np.array(self._strings(rows["name"]), np.int64)
        domains = zip(rows["domain"].tolist(), kinds == DOMAIN_CREATED, strict=True)
        columns = {
            "start": span["start"],
            "end": _where((kinds != _MARK) & (kinds != DOMAIN_CREATED), span["end"]),
            "eventType": _TYPES.take(kinds.astype(np.int64), mode="clip"),
            "rangeId": _where(kinds == _START_END, rows["range"]),
            "text": [self._spool.name(id) if created else None for id, created in domains],
            "globalTid": threads,
            "endGlobalTid": _where((kinds == _START_END) & (enders != threads), enders),
            "textId": _where(kinds != DOMAIN_CREATED, texts),
            "domainId": rows["domain"],
        }
        self._writer.add("NVTX_EVENTS", columns)

    def _on_gpu(self, rows: Records) -> dict[str, Any]:
        # Unfinished operations that CUPTI had to hand over have one time or both 0.
        timed = (rows["start"] != 0) & (rows["end"] != 0)
        span = {name: np.where(timed, times, 0) for name, times in self._span(rows).items()}
        return span | {
            "deviceId": rows["device"],
            "contextId": rows["context"],
            "streamId": rows["stream"],
            "correlationId": rows["correlation"],
            "globalPid": [self._pid] * len(rows),
        }

    def _span(self, rows: Records) -> dict[str, Any]:
        return {edge: session_time(rows[edge], self._start) for edge in ("start", "end")}

    def _threads(self, threads: NDArray[np.uint32]) -> NDArray[np.int64]:
        return global_tids(self._spool.pid, threads)

    def _strings(self, ids: NDArray[np.uint32], form: Callable[[str], str] = str) -> list[int]:
        return _string_ids(self._writer, ids, lambda id: form(self._spool.name(id)))


def _string_ids(
    writer: TraceWriter, ids: NDArray[np.uint32], text: Callable[[int], str]
) -> list[int]:
    """Return the ids in StringIds of the texts of a file's ids."""
    # All at once: a program may give each range a new name.
    unique, inverse = np.unique(ids, return_inverse=True)
    known = writer.strings([text(id) for id in unique.tolist()])
    return [known[i] for i in inverse.tolist()]


def _nsys_memory(kinds: NDArray[Any]) -> NDArray[np.int64]:
    numbers = kinds.astype(np.int64)
    return np.where((numbers >= 1) & (numbers <= _UNKNOWN_MEMORY), numbers - 1, _UNKNOWN_MEMORY)


def _where(there: NDArray[np.bool_], values: NDArray[Any]) -> list[Any]:
    """Return the values, with None for missing ones."""
    return [value if here else None for here, value in zip(there, values.tolist(), strict=True)]


def _write_cards(writer: TraceWriter, spools: Sequence[activity.Spool]) -> dict[bytes, int]:
    """Write the cards of all processes in order of PCI address; return their ids by uuid."""
    seen: dict[bytes, Any] = {}
    for spool in spools:
        for row in spool.records[b"DEVI"]:
            seen.setdefault(bytes(row["uuid"]), row)
    ids: dict[bytes, int] = {}
    for row in sorted(seen.values(), key=lambda row: row["bus"].lower()):
        uuid = bytes(row["uuid"])
        ids[uuid] = len(ids)
        # What the driver did not say is NULL.
        card = {
            "vmId": global_pid(0),
            "id": ids[uuid],
            "name": _text(row["name"]),
            "busLocation": _text(row["bus"]).lower(),
            "isDiscrete": 1,
            "l2CacheSize": int(row["l2_cache"]) or None,
            "totalMemory": int(row["memory"]) % LARGEST or None,
            "memoryBandwidth": int(row["bandwidth"]) % LARGEST or None,
            "clockRate": int(row["clock"]) % LARGEST or None,
            "smCount": int(row["multiprocessors"]) or None,
            "uuid": str(UUID(bytes=uuid)),
            "computeMajor": int(row["compute_major"]) or None,
            "computeMinor": int(row["compute_minor"]) if row["compute_major"] else None,
        }
        writer.add_rows("TARGET_INFO_GPU", list(card), [tuple(card.values())])
    return ids


def _text(value: bytes) -> str:
    return value.split(b"\0")[0].decode("utf-8", "replace")


LARGEST: Final = 1 << 62
"""Largest integer of SQLite, which a corrupt file may exceed."""
THIS_MACHINE: Final = 1
"""Upper 16 bits of global ids, unless nsys has numbered the machine."""


def session_time(moments: NDArray[np.uint64], start: int) -> NDArray[np.int64]:
    """Convert CLOCK_REALTIME to nanoseconds since the session's start; 0 means none, and stays."""
    signed = moments.astype(np.int64)
    return np.where(signed == 0, 0, signed - start)


def global_pid(pid: int, machine: int = THIS_MACHINE) -> int:
    """Return nsys's globalPid of a process: 16 bits of host, 24 of pid, 24 of thread."""
    return machine << 48 | (pid & 0xFFFFFF) << 24


def global_tids(
    pid: int, threads: NDArray[np.uint32], machine: int = THIS_MACHINE
) -> NDArray[np.int64]:
    """Return nsys's globalTid of threads of a process."""
    return threads.astype(np.int64) & 0xFFFFFF | global_pid(pid, machine)


_RANGES: Final = {
    **{"data_wait": 1, "annotation": 2, "gc": 3, "phase": 4, "compilation": 6},
    "source": 8,
}
_LOADER, _MODULE = 5, 7
"""Values of ``kind`` in GPUTRACE_HOST_RANGE."""


def write_signals(
    writer: TraceWriter,
    folder: Path,
    hosts: Sequence[HostEvents],
    start: int,
    machine: int = THIS_MACHINE,
) -> int:
    """Write what every backend records of the host and the cards; return the number of steps."""
    cores = folder.glob("*.cores.jsonl")
    write_nvml(writer, [*sorted(folder.glob("*.nvml.jsonl")), *sorted(cores)], start)
    return sum(write_host(writer, host, start, machine) for host in hosts)


def write_host(
    writer: TraceWriter, host: HostEvents, start: int, machine: int = THIS_MACHINE
) -> int:
    """Write the records of a process's hooks; return the number of steps.

    ``start`` is the session's on CLOCK_REALTIME, ``machine`` the upper 16 bits of global ids.
    """

    def strings(ids: NDArray[np.uint32]) -> list[int]:
        return _string_ids(writer, ids, lambda id: host.names.get(id, "?"))

    def spans(rows: Records) -> dict[str, Any]:
        return {
            "start": session_time(rows["start"], start),
            "end": session_time(rows["end"], start),
            "globalTid": global_tids(host.pid, rows["thread"], machine),
            "nameId": strings(rows["name"]),
        }

    steps = host.records["step"]
    writer.add("GPUTRACE_STEP", spans(steps) | {"step": steps["number"]})
    for name, kind in _RANGES.items():
        rows = host.records[name]
        writer.add("GPUTRACE_HOST_RANGE", spans(rows) | {"kind": [kind] * len(rows)})
    rows = host.records["module"]
    modules = {"kind": [_MODULE] * len(rows), "number": rows["rank"]}
    writer.add("GPUTRACE_HOST_RANGE", spans(rows) | modules)
    rows = host.records["loader"]
    numbers = rows["rank"].astype(np.int64) << 32 | rows["number"]
    loader = {"kind": [_LOADER] * len(rows), "number": numbers}
    writer.add("GPUTRACE_HOST_RANGE", spans(rows) | loader)
    counters = host.records["counter"]
    writer.add("GPUTRACE_HOST_COUNTER", spans(counters) | {"value": counts(counters)})
    samples = spans(host.records["sample"])
    samples["waitedNs"] = samples.pop("end") - samples["start"]
    samples["innerNameId"] = strings(host.records["sample"]["number"])
    writer.add("GPUTRACE_PYTHON_SAMPLE", samples)
    notes, process = host.records["note"], global_pid(host.pid, machine)
    columns: dict[str, Any] = {
        "globalPid": [process] * len(notes),
        "timeNs": session_time(notes["start"], start),
        "text": [host.names.get(id, "?") for id in notes["name"].tolist()],
    }
    writer.add("GPUTRACE_NOTE", columns)
    write_losses(writer, process, [host.stopped] if host.stopped else [], start)
    return len(steps)


def write_losses(writer: TraceWriter, process: int, losses: Sequence[Loss], start: int) -> None:
    """Write the losses of a process; ``process`` is its globalPid."""
    rows = [
        (process, (at - start) % LARGEST, count % LARGEST or None, why) for at, count, why in losses
    ]
    if rows:
        writer.add_rows("GPUTRACE_LOSS", ["globalPid", "timeNs", "records", "reason"], rows)


def write_unreadable(writer: TraceWriter, problems: Sequence[InputError]) -> list[str]:
    """Write which files could not be read, and why; return a line for each."""
    lost = [f"{problem.path.name}: {problem.problem}" for problem in problems]
    writer.add("GPUTRACE_LOSS", {"reason": lost})
    return lost


def hold_something(problems: Sequence[InputError]) -> bool:
    """Return True if any unreadable file is not empty, and thus worth keeping."""
    return any(problem.path.stat().st_size for problem in problems)


def write_nvml(writer: TraceWriter, paths: Iterable[Path], start: int) -> None:
    """Write the cards, their samples and their topology; ``timeNs`` is on the session's clock.

    Several files, of successive recorders or a ring, describe the same cards.
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
        for table, (columns, rows) in tables(log).items():
            if "timeNs" in columns:
                at = columns.index("timeNs")
                rows = [(*row[:at], row[at] - start, *row[at + 1 :]) for row in rows]
            if rows and ("timeNs" in columns or not described):
                writer.make(table, ", ".join(columns))
                writer.add_rows(table, columns, rows)
        described = described or bool(log.devices)


def write_process(
    writer: TraceWriter,
    pid: int,
    host: str,
    info: Mapping[str, str],
    whole: bool,
    machine: int = THIS_MACHINE,
) -> None:
    """Write a process's identity, from its environment."""
    rank, size, local = rank_of(info), first_number(info, _SIZES), first_number(info, _LOCAL)
    note = info.get("no_gpu_activity", info.get("last_flush"))
    columns = ["globalPid", "pid", "host", "rank", "worldSize", "localRank", "whole", "note"]
    row = (global_pid(pid, machine), pid, host, rank, size, local, int(whole), note)
    writer.add_rows("GPUTRACE_PROCESS", columns, [row])


def write_lives(
    writer: TraceWriter,
    folder: Path,
    spools: Sequence[activity.Spool],
    hosts: Sequence[HostEvents],
    start: int,
    machine: int = THIS_MACHINE,
) -> list[str]:
    """Write when processes began and ended, how, and in which attempt; return lines for the user.

    ``start`` is the session's on CLOCK_REALTIME, ``machine`` the upper 16 bits of global ids.
    """
    lives = list(read_lives(folder, spools, hosts).values())
    rows = [
        (
            *(global_pid(life.process, machine), life.attempt),
            *(life.start - start, life.end - start, life.exit_code, life.steps),
            *(moment - start if moment else None for moment in (life.first_step, life.last_step)),
        )
        for life in lives
    ]
    columns = "globalPid attempt startNs endNs exitCode steps firstStepNs lastStepNs"
    writer.add_rows("GPUTRACE_LIFE", columns.split(), rows)
    return list(describe_lives(lives, choose_attempt(lives), start))


_SIZES: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL: Final = (
    *("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
)


def write_session(writer: TraceWriter, start: int, meta: Mapping[str, str]) -> None:
    """Write when and how a recording other than an nsys export was made."""
    seconds = start / 1e9
    form = "%Y-%m-%dT%H:%M:%S"
    utc, local = (time.strftime(form, t(seconds)) for t in (time.gmtime, time.localtime))
    times: dict[str, list[Any]] = {"utcEpochNs": [start], "utcTime": [utc], "localTime": [local]}
    writer.add("TARGET_INFO_SESSION_START_TIME", times)
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
    """Write GPUTRACE_META; ``start`` is the session's on CLOCK_REALTIME."""
    rows = {"format": "1", "version": __version__, "start_realtime_ns": str(start), **meta}
    writer.add_rows("GPUTRACE_META", ["name", "value"], rows.items())
