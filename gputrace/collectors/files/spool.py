"""Spool files: what the collector inside each process left behind, as numpy records.

The format is described in native/spool.h. A chunk cut short at the end is what a killed process was
writing; reading stops there and keeps all before it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from gputrace.collectors.files.chunks import (
    CLOCKS,
    Format,
    Loss,
    Records,
    read_chunk_file,
    read_info,
    read_numbered,
    read_records,
    read_stop,
)

SPOOL: Final = Format(b"GPUTRSPL", 2, "a spool", "a spool file of gputrace")


def _record(*fields: tuple[str, str] | tuple[str, str, tuple[int, ...]]) -> np.dtype[Any]:
    return np.dtype(list(fields))


_SPAN: Final = (("start", "<u8"), ("end", "<u8"))
_ON_GPU: Final = (("device", "<u4"), ("context", "<u4"), ("stream", "<u4"), ("correlation", "<u4"))

RECORDS: Final[dict[bytes, np.dtype[Any]]] = {
    b"KERN": _record(
        *_SPAN,
        *_ON_GPU,
        ("name", "<u4"),
        ("graph", "<u4"),
        ("grid", "<i4", (3,)),
        ("block", "<i4", (3,)),
        ("registers", "<u4"),
        ("static_shared", "<i4"),
        ("dynamic_shared", "<i4"),
        ("local_per_thread", "<u4"),
        ("local_total", "<u4"),
        ("launch_type", "<u4"),
        ("grid_id", "<i8"),
    ),
    b"COPY": _record(
        *_SPAN,
        ("bytes", "<u8"),
        *_ON_GPU,
        ("source_device", "<u4"),
        ("destination_device", "<u4"),
        ("copy_kind", "u1"),
        ("source_kind", "u1"),
        ("destination_kind", "u1"),
        ("flags", "u1"),
        ("reserved", "<u4"),
    ),
    b"MSET": _record(*_SPAN, ("bytes", "<u8"), *_ON_GPU, ("value", "<u4"), ("memory_kind", "<u4")),
    b"API ": _record(
        *_SPAN,
        ("name", "<u4"),
        ("thread", "<u4"),
        ("correlation", "<u4"),
        ("driver", "<u4"),
        ("result", "<i4"),
        ("reserved", "<u4"),
    ),
    b"SYNC": _record(
        *_SPAN,
        ("type", "<u4"),
        ("context", "<u4"),
        ("stream", "<u4"),
        ("correlation", "<u4"),
        ("event", "<u4"),
        ("reserved", "<u4"),
    ),
    b"GRPH": _record(*_SPAN, *_ON_GPU, ("graph", "<u4"), ("reserved", "<u4")),
    b"OVER": _record(*_SPAN, ("kind", "<u4"), ("thread", "<u4")),
    b"NVTX": _record(
        *_SPAN,
        ("thread", "<u4"),
        ("name", "<u4"),
        ("domain", "<u4"),
        ("kind", "<u4"),
        ("end_thread", "<u4"),
        ("range", "<u4"),
    ),
    b"CLOK": CLOCKS,
    b"DEVI": _record(
        ("ordinal", "<u4"),
        ("multiprocessors", "<u4"),
        ("bus", "S32"),
        ("name", "S96"),
        ("uuid", "V16"),
        ("memory", "<u8"),
        ("bandwidth", "<u8"),
        ("clock", "<u8"),
        ("l2_cache", "<u4"),
        ("compute_major", "<u4"),
        ("compute_minor", "<u4"),
        ("reserved", "<u4"),
    ),
}
"""Fields of the records of each kind of chunk, as native/spool.h declares them."""


@dataclass(slots=True)
class Spool:
    """What one process left.

    Attributes:
        pid: its process id.
        host: the machine, from the file's name.
        started: nanoseconds of CLOCK_REALTIME when the file was opened.
        records: by tag, everything of that kind, in the order written.
        names: text by id, as bytes that were written.
        threads: name of a thread by its id in the system.
        info: what the process said of itself; the last of each key.
        losses: what was dropped, the end of writing included.
        stopped: whether writing failed before the process ended.
        whole: whether the process came to its end and wrote that down.
    """

    pid: int
    host: str
    started: int
    records: dict[bytes, Records] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    stopped: bool = False
    whole: bool = False

    def name(self, id: int) -> str:
        """The text of an id; nothing where it was never written."""
        return self.names.get(id, b"").decode("utf-8", "replace")


def read_spool(path: Path) -> Spool:
    """Reads one file; raises InputError where it is no spool of a version that is known."""
    file = read_chunk_file(path, SPOOL)
    spool = Spool(file.pid, file.host, file.started)
    parts: dict[bytes, list[Records]] = {tag: [] for tag in RECORDS}
    for tag, body, is_whole in file.chunks():
        if not is_whole:
            break
        if tag in RECORDS:
            parts[tag].append(read_records(body, RECORDS[tag]))
        else:
            take_text(spool, tag, bytes(body))
    empty = {tag: np.empty(0, kind) for tag, kind in RECORDS.items()}
    spool.records = {tag: np.concatenate(p) if p else empty[tag] for tag, p in parts.items()}
    spool.whole = "ended" in spool.info
    return spool


def take_text(spool: Spool, tag: bytes, body: bytes) -> None:
    """Takes in what a chunk says that holds no records."""
    if tag == b"NAME" and (named := read_numbered(body)):
        spool.names[named[0]] = named[1]
    elif tag == b"THRD" and (named := read_numbered(body)):
        spool.threads[named[0]] = named[1].decode("utf-8", "replace")
    elif tag == b"INFO":
        key, value = read_info(body)
        spool.info[key] = value
    elif tag == b"FULL" and (stop := read_stop(body)):
        spool.losses.append(stop)
        spool.stopped = True
    elif tag == b"LOSS" and len(body) >= 16:
        time, count = struct.unpack_from("<QQ", body)
        spool.losses.append((time, count, body[16:].decode("utf-8", "replace")))
