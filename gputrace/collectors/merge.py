"""Spool files of all processes into one trace file, on one clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID

from gputrace import __version__
from gputrace.collectors.backend import Merged
from gputrace.collectors.files.host_events import HostEvents, read_host
from gputrace.collectors.files.spool import Spool, read_spool
from gputrace.collectors.rows.activity import ProcessRows
from gputrace.collectors.rows.clock import LARGEST, OWN, global_pid
from gputrace.collectors.rows.host import write_host, write_nvml
from gputrace.collectors.rows.processes import write_processes
from gputrace.errors import InputError
from gputrace.traces.writer import TraceWriter

_LEAD_NS: Final = 1000
"""The trace's clock starts before the first file, so that nothing is at 0: that means no time."""


def merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Writes the trace of a recording's folder.

    Raises InputError where nothing in the folder can be read, OSError where the file cannot be
    written.
    """
    problems: list[InputError] = []
    spools: list[Spool] = read_all(folder, "*.spool", read_spool, problems)
    hosts: list[HostEvents] = read_all(folder, "*.host", read_host, problems)
    if problems and not spools and not hosts:
        raise problems[0]
    starts = [spool.started for spool in spools] + [host.started for host in hosts]
    start = min(starts, default=time.time_ns()) - _LEAD_NS
    with TraceWriter(output) as writer:
        write_session(writer, start, meta)
        cards = _write_cards(writer, spools)
        processes = write_processes(writer, spools, hosts)
        for spool in spools:
            ProcessRows(writer, spool, start).write(cards)
        steps = write_signals(writer, folder, hosts, start)
        lost = write_unreadable(writer, problems)
    return Merged(
        processes=processes,
        kernels=sum(len(spool.records[b"KERN"]) for spool in spools),
        steps=steps,
        cut=sum(not spool.whole and not spool.stopped for spool in spools),
        notes=(*_notes(spools, hosts, start, meta), *lost),
        unread=any(problem.path.stat().st_size for problem in problems),
    )


def write_signals(
    writer: TraceWriter, folder: Path, hosts: Sequence[HostEvents], start: int, machine: int = OWN
) -> int:
    """Writes what every backend records of the host and of the cards; the number of steps."""
    write_nvml(writer, sorted(folder.glob("*.nvml.jsonl")), start)
    return sum(write_host(writer, host, start, machine) for host in hosts)


def write_unreadable(writer: TraceWriter, problems: Sequence[InputError]) -> list[str]:
    """Writes which files of a recording could not be read, and why; a line each."""
    lost = [f"{problem.path.name}: {problem.problem}" for problem in problems]
    if lost:
        writer.add_rows("GPUTRACE_LOSS", ["reason"], [(line,) for line in lost])
    return lost


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


_File = TypeVar("_File")


def read_all(
    folder: Path, pattern: str, read: Callable[[Path], _File], problems: list[InputError]
) -> list[_File]:
    """The files that can be read; one that cannot be costs nothing but itself, and is told."""
    files = []
    for path in sorted(folder.glob(pattern)):
        try:
            files.append(read(path))
        except InputError as error:
            problems.append(error)
    return files


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


def _write_cards(writer: TraceWriter, spools: Sequence[Spool]) -> dict[bytes, int]:
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
