"""Spool files of all processes into one trace file, on one clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from gputrace import __version__
from gputrace.collectors.backend import Merged
from gputrace.collectors.host_events import HostEvents, read_host
from gputrace.collectors.host_rows import write_host, write_nvml
from gputrace.collectors.process_rows import ProcessRows
from gputrace.collectors.processes import write_processes
from gputrace.collectors.spool import Spool, read_spool
from gputrace.errors import InputError
from gputrace.traces.writer import TraceWriter

_LEAD_NS: Final = 1000
"""The trace's clock starts before the first file, so that nothing is at 0: that means no time."""


def merge(folder: Path, output: Path, meta: Mapping[str, str]) -> Merged:
    """Writes the trace of a recording's folder.

    Raises InputError where nothing in the folder can be read, OSError where the file cannot be
    written.
    """
    spools: list[Spool] = _read_all(folder, "*.spool", read_spool)
    hosts: list[HostEvents] = _read_all(folder, "*.host", read_host)
    starts = [spool.started for spool in spools] + [host.started for host in hosts]
    start = min(starts, default=time.time_ns()) - _LEAD_NS
    steps = 0
    with TraceWriter(output) as writer:
        _write_session(writer, start, meta)
        cards = _write_cards(writer, spools)
        processes = write_processes(writer, spools, hosts)
        for spool in spools:
            ProcessRows(writer, spool, start).write(cards)
        for host in hosts:
            steps += write_host(writer, host, start)
        for path in sorted(folder.glob("*.nvml.jsonl")):
            write_nvml(writer, path, start)
    notes = {spool.info["no_gpu_activity"] for spool in spools if "no_gpu_activity" in spool.info}
    if not spools and meta.get("backend") != "host":
        notes.add("no process of the program started CUDA")
    return Merged(
        processes=processes,
        kernels=sum(len(spool.records[b"KERN"]) for spool in spools),
        steps=steps,
        cut=sum(not spool.whole for spool in spools),
        notes=tuple(sorted(notes)),
    )


_File = TypeVar("_File")


def _read_all(folder: Path, pattern: str, read: Callable[[Path], _File]) -> list[_File]:
    """The files that can be read; one that cannot be costs nothing but itself."""
    files, problems = [], []
    for path in sorted(folder.glob(pattern)):
        try:
            files.append(read(path))
        except InputError as error:
            problems.append(error)
    if problems and not files:
        raise problems[0]
    return files


def _write_session(writer: TraceWriter, start: int, meta: Mapping[str, str]) -> None:
    seconds = start / 1e9
    form = "%Y-%m-%dT%H:%M:%S"
    utc, local = (time.strftime(form, t(seconds)) for t in (time.gmtime, time.localtime))
    writer.add_rows(
        "TARGET_INFO_SESSION_START_TIME",
        ["utcEpochNs", "utcTime", "localTime"],
        [(start, utc, local)],
    )
    exported = {"EXPORT_PRODUCT_NAME": "gputrace", "EXPORT_SCHEMA_VERSION": "3.20.3"}
    writer.add_rows("META_DATA_EXPORT", ["name", "value"], exported.items())
    own = {"format": "1", "version": __version__, "start_realtime_ns": str(start), **meta}
    writer.add_rows("GPUTRACE_META", ["name", "value"], own.items())


def _write_cards(writer: TraceWriter, spools: Sequence[Spool]) -> dict[bytes, int]:
    """The cards that any process saw, numbered by PCI address; their numbers by uuid."""
    seen: dict[bytes, Any] = {}
    for spool in spools:
        for row in spool.records[b"DEVI"]:
            seen.setdefault(bytes(row["uuid"]), row)
    ordered = sorted(seen.values(), key=lambda row: row["bus"].lower())
    rows = [
        (0, i, _text(row["name"]), _text(row["bus"]).lower(), 1, bytes(row["uuid"]).hex())
        for i, row in enumerate(ordered)
    ]
    columns = ["vmId", "id", "name", "busLocation", "isDiscrete", "uuid"]
    if rows:
        writer.add_rows("TARGET_INFO_GPU", columns, rows)
    return {bytes(row["uuid"]): i for i, row in enumerate(ordered)}


def _text(value: bytes) -> str:
    return value.split(b"\0")[0].decode("utf-8", "replace")
