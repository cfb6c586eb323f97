"""Spool files: what the collector inside each process left behind, as numpy records."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.spool.chunks import (
    LATEST,
    Format,
    Loss,
    read_chunk_file,
    read_info,
    read_numbered,
    read_stop,
)
from gputrace.collectors.spool.host_events import CLOCKS, Records, read_records

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


_MOMENT: Final = re.compile(r"[0-9]{1,19}")
_CAPTURES: Final = {"capture_on": True, "capture_off": False}
_CALLS: Final = {"calls_on": True, "calls_off": False}
_DOMAIN: Final = 3
"""NVTX_DOMAIN of native/spool.h: the creation of a domain, which each file tells."""


@dataclass(slots=True)
class Spool:
    """Recorded activity of one process.

    Attributes:
        pid: its process id.
        host: the machine, from the file's name.
        started: nanoseconds of CLOCK_REALTIME when the file was opened; ``began`` is the same
            moment on CLOCK_MONOTONIC, 0 where that is not known.
        records: by tag, everything of that kind, in the order written.
        names: text by id, as bytes that were written.
        threads: name of a thread by its id in the system.
        info: what the process said of itself; the last of each key.
        captures: when recording began and ended (nanoseconds of CLOCK_REALTIME), in the order
            written: pairs of the moment and whether it was on from then.
        calls: the same of CUDA calls, where they were not recorded all the time that the GPUs were.
        losses: what was dropped, the end of writing included.
        stopped: whether writing failed before the process ended.
        seen_until: the last moment at which the process looked at its clocks.
        after: by tag, how many looks at the clocks came before each record in the file; and in
            captures_after and calls_after, before each of ``captures`` and ``calls``.
        whole: whether the process came to its end and wrote that down.
        continues: whether there was a file before it.
    """

    pid: int
    host: str
    started: int
    records: dict[bytes, Records] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    captures: list[tuple[int, bool]] = field(default_factory=list)
    calls: list[tuple[int, bool]] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    began: int = 0
    seen_until: int = 0
    after: dict[bytes, NDArray[np.int64]] = field(default_factory=dict)
    captures_after: list[int] = field(default_factory=list)
    calls_after: list[int] = field(default_factory=list)
    stopped: bool = False
    whole: bool = False
    continues: bool = False

    def name(self, id: int) -> str:
        """The text of an id; nothing where it was never written."""
        return self.names.get(id, b"").decode("utf-8", "replace")


def read_spool(path: Path) -> Spool:
    """Reads one file; raises InputError where it is no spool of a version that is known."""
    file = read_chunk_file(path, SPOOL)
    spool = Spool(file.pid, file.host, file.started, began=file.began)
    parts: dict[bytes, list[Records]] = {tag: [np.empty(0, kind)] for tag, kind in RECORDS.items()}
    after: dict[bytes, list[int]] = {tag: [0] for tag in RECORDS}
    looks = 0
    for tag, body, is_whole in file.chunks():
        if tag in RECORDS:
            parts[tag].append(read_records(body, RECORDS[tag]))
            after[tag].append(looks)
            looks += len(parts[tag][-1]) if tag == b"CLOK" else 0
        elif is_whole:
            take_text(spool, tag, bytes(body))
            spool.captures_after += [looks] * (len(spool.captures) - len(spool.captures_after))
            spool.calls_after += [looks] * (len(spool.calls) - len(spool.calls_after))
    spool.records = {tag: np.concatenate(p) for tag, p in parts.items()}
    spool.after = {tag: np.repeat(after[tag], [len(p) for p in parts[tag]]) for tag in RECORDS}
    spool.seen_until = int(spool.records[b"CLOK"]["realtime"].max(initial=0))
    spool.whole, spool.continues = "ended" in spool.info, "~" in path.name
    return spool


def join_spools(parts: Sequence[Spool]) -> Spool:
    """Join the files of one process, in their order."""
    first, last = parts[0], parts[-1]
    if first is last:
        return first
    records = {tag: np.concatenate([part.records[tag] for part in parts]) for tag in RECORDS}
    looks = np.cumsum([0, *(len(part.records[b"CLOK"]) for part in parts)]).tolist()
    after = {tag: _joined_after(parts, tag, looks) for tag in RECORDS}
    ranges = records[b"NVTX"]
    again = np.flatnonzero(ranges["kind"] == _DOMAIN)
    _, told = np.unique(ranges["domain"][again], return_index=True)
    repeated = np.delete(again, told)
    records[b"NVTX"] = np.delete(ranges, repeated)
    after[b"NVTX"] = np.delete(after[b"NVTX"], repeated)
    return Spool(
        first.pid,
        first.host,
        first.started,
        records,
        names={id: text for part in parts for id, text in part.names.items()},
        threads={id: name for part in parts for id, name in part.threads.items()},
        info={key: value for part in parts for key, value in part.info.items()},
        captures=[moment for part in parts for moment in part.captures],
        calls=[moment for part in parts for moment in part.calls],
        losses=[loss for part in parts for loss in part.losses],
        began=first.began,
        seen_until=max(part.seen_until for part in parts),
        after=after,
        captures_after=[
            own + n for part, n in zip(parts, looks, strict=False) for own in part.captures_after
        ],
        calls_after=[
            own + n for part, n in zip(parts, looks, strict=False) for own in part.calls_after
        ],
        stopped=any(part.stopped for part in parts),
        whole=last.whole,
        continues=first.continues,
    )


def _joined_after(parts: Sequence[Spool], tag: bytes, looks: Sequence[int]) -> NDArray[np.int64]:
    # Of a recording under way, nobody asks for it.
    known = (part.after.get(tag, np.zeros(len(part.records[tag]), np.int64)) for part in parts)
    return np.concatenate([own + n for own, n in zip(known, looks, strict=False)])


def take_text(spool: Spool, tag: bytes, body: bytes) -> None:
    """Takes in what a chunk says that holds no records."""
    if tag == b"NAME" and (named := read_numbered(body)):
        spool.names[named[0]] = named[1]
    elif tag == b"THRD" and (named := read_numbered(body)):
        spool.threads[named[0]] = named[1].decode("utf-8", "replace")
    elif tag == b"INFO":
        key, value = read_info(body)
        spool.info[key] = value
        moment = int(value) if _MOMENT.fullmatch(value) else LATEST + 1
        if key in _CAPTURES and moment <= LATEST:
            spool.captures.append((moment, _CAPTURES[key]))
        elif key in _CALLS and moment <= LATEST:
            spool.calls.append((moment, _CALLS[key]))
    elif tag == b"FULL" and (stop := read_stop(body)):
        spool.losses.append(stop)
        spool.stopped = True
    elif tag == b"LOSS" and len(body) >= 16:
        time, count = struct.unpack_from("<QQ", body)
        spool.losses.append((time, count, body[16:].decode("utf-8", "replace")))


def windows_of(spool: Spool) -> list[tuple[int, int]]:
    """The stretches in which the GPUs were recorded, in order; the last may reach to the end.

    The first begins at 0 where it began with the process's use of CUDA: nothing is missing before.
    A moment that says what is known already is one that a further file begins with.
    """
    windows = _stretches(spool.captures, _latest(spool))
    if windows and not spool.continues and spool.info.get("capture_from") == "start":
        windows[0] = 0, windows[0][1]
    return windows


def call_windows_of(spool: Spool) -> list[tuple[int, int]] | None:
    """The parts of these stretches in which all CUDA calls were recorded; None where they all were.

    Where none were, one without length.
    """
    if all(on for _, on in spool.calls):
        return None
    windows = windows_of(spool)
    # Without a word before anything is recorded, they are too.
    began = next((moment for moment, _ in spool.captures), 0)
    at_first = [(0, True)] if spool.calls[0][0] > began else []
    with_calls = _stretches([*at_first, *spool.calls], _latest(spool))
    parts = [(max(a, c), min(b, d)) for a, b in windows for c, d in with_calls]
    moment = spool.calls[0][0]
    return [(begin, end) for begin, end in parts if begin < end] or [(moment, moment)]


def _stretches(moments: Sequence[tuple[int, bool]], latest: int) -> list[tuple[int, int]]:
    """From each moment at which something was on to the next at which it was off."""
    found: list[tuple[int, int]] = []
    began = None
    for moment, on in moments:
        if on and began is None:
            began = moment
        elif not on and began is not None:
            found.append((began, max(moment, began)))
            began = None
    if began is not None:
        found.append((began, max(began, latest)))
    return found


def _latest(spool: Spool) -> int:
    """The last moment that is in a process's records."""
    ends = [rows["end"] for rows in spool.records.values() if "end" in (rows.dtype.names or ())]
    return max(spool.seen_until, *(int(of.max(initial=0)) for of in ends))
