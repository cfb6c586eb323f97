"""Spool files: records of the collector in each process, as numpy arrays."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gputrace.collectors.spool import (
    LATEST,
    Format,
    Loss,
    read_chunk_file,
    read_numbered,
    read_stop,
)
from gputrace.collectors.spool.host_events import CLOCKS, Records, read_records

SPOOL: Final = Format(b"GPUTRSPL", 3, "a spool", "a spool file of gputrace")


_Field = tuple[str, str] | tuple[str, str, tuple[int, ...]]


def _record(*fields: _Field) -> np.dtype[Any]:
    return np.dtype(list(fields))


def _u4(*names: str) -> list[_Field]:
    return [(name, "<u4") for name in names]


_SPAN: Final = (("start", "<u8"), ("end", "<u8"))
_ON_GPU: Final = _u4("device", "context", "stream", "correlation")

Switch = tuple[int, bool, int]
"""Time of a switch (nanoseconds of CLOCK_REALTIME), True for on, and the number of clock readings
before it in the files."""

RECORDS: Final[dict[bytes, np.dtype[Any]]] = {
    b"KERN": _record(
        *(*_SPAN, *_ON_GPU, *_u4("name", "graph"), ("grid", "<i4", (3,)), ("block", "<i4", (3,))),
        *(("registers", "<u4"), ("static_shared", "<i4"), ("dynamic_shared", "<i4")),
        *_u4("local_per_thread", "local_total", "launch_type"),
        *(("grid_id", "<i8"), ("node", "<u8")),
    ),
    b"COPY": _record(
        *(*_SPAN, ("bytes", "<u8"), *_ON_GPU, *_u4("source_device", "destination_device")),
        *(("copy_kind", "u1"), ("source_kind", "u1"), ("destination_kind", "u1"), ("flags", "u1")),
        ("reserved", "<u4"),
    ),
    b"MSET": _record(*_SPAN, ("bytes", "<u8"), *_ON_GPU, *_u4("value", "memory_kind")),
    b"API ": _record(
        *(*_SPAN, *_u4("name", "thread", "correlation", "driver")),
        *(("result", "<i4"), ("reserved", "<u4")),
    ),
    b"SYNC": _record(*_SPAN, *_u4("type", "context", "stream", "correlation", "event", "reserved")),
    b"GRPH": _record(*_SPAN, *_ON_GPU, *_u4("graph", "reserved")),
    b"NODE": _record(
        *(*_SPAN, ("node", "<u8"), ("original", "<u8"), *_u4("thread", "reserved")),
    ),
    b"OVER": _record(*_SPAN, *_u4("kind", "thread")),
    b"NVTX": _record(*_SPAN, *_u4("thread", "name", "domain", "kind", "end_thread", "range")),
    b"MESG": _record(
        *(*_SPAN, ("communicator", "<u8"), ("bytes", "<u8"), *_u4("thread", "name")),
        *(("peer", "<i4"), ("ranks", "<i4")),
    ),
    b"CLOK": CLOCKS,
    b"DEVI": _record(
        *_u4("ordinal", "multiprocessors"),
        *(("bus", "S32"), ("name", "S96"), ("uuid", "V16")),
        *(("memory", "<u8"), ("bandwidth", "<u8"), ("clock", "<u8")),
        *_u4("l2_cache", "compute_major", "compute_minor", "reserved"),
    ),
}
"""Fields of the records of each kind of chunk, as native/spool.h declares them."""
ON_GPU: Final = (b"KERN", b"COPY", b"MSET", b"GRPH")
"""Kinds of operations of a GPU."""

_MOMENT: Final = re.compile(r"[0-9]{1,19}")
SWITCHES: Final[Mapping[str, Mapping[str, bool]]] = {
    "captures": {"capture_on": True, "capture_off": False},
    "calls": {"calls_on": True, "calls_off": False},
    "control": {"let_go": True, "idle": True, "capture_on": False, "paused": False},
    "idle": {"idle": True, "capture_on": False, "paused": False},
    "nodes": {"nodes_on": True, "nodes_off": False},
}
"""Keys of INFO that switch something on or off: recording; that of CUDA calls, if they are not
always recorded with the GPUs; stretches in which CUPTI records nothing; those of them in which it
stays in the process; recording of the nodes of CUDA graphs."""
_CLOCK_NOISE_NS: Final = np.uint64(100_000)
"""By how much CUPTI's times of one replay may overlap those of the next."""
_DOMAIN: Final = 3
"""NVTX_DOMAIN of native/spool.h: creation of a domain, repeated in each file."""


@dataclass(slots=True)
class Spool:
    """Recorded activity of one process.

    Attributes:
        pid: its process id.
        host: the machine, from the file's name.
        started: nanoseconds of CLOCK_REALTIME when the file was opened; ``began`` is the same
            moment on CLOCK_MONOTONIC, 0 if unknown.
        records: records by tag, in the order written.
        names: text by id, as bytes.
        threads: name by system thread id.
        info: key-value pairs that the process wrote; the last of each key.
        switches: starts and ends of each of `SWITCHES`, in the order written.
        losses: dropped records, including the end of writing.
        stopped: True if writing failed before the process ended.
        seen_until: last time that the process read its clocks.
        after: number of clock readings before each record in the file, by tag.
        whole: True if the process recorded its regular end.
        continues: True if another file precedes it.
    """

    pid: int
    host: str
    started: int
    records: dict[bytes, Records] = field(default_factory=dict)
    names: dict[int, bytes] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)
    switches: dict[str, list[Switch]] = field(default_factory=lambda: {n: [] for n in SWITCHES})
    losses: list[Loss] = field(default_factory=list)
    began: int = 0
    seen_until: int = 0
    after: dict[bytes, NDArray[np.int64]] = field(default_factory=dict)
    stopped: bool = False
    whole: bool = False
    continues: bool = False

    def name(self, id: int) -> str:
        """Return the text of an id; empty if it was never written."""
        return self.names.get(id, b"").decode("utf-8", "replace")

    @property
    def latest(self) -> int:
        """The last time in the records."""
        ends = [rows["end"] for rows in self.records.values() if "end" in (rows.dtype.names or ())]
        return max(self.seen_until, *(int(of.max(initial=0)) for of in ends))


def read_spool(path: Path) -> Spool:
    """Read one file; raise InputError if it is not a spool of a known version."""
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
            take_text(spool, tag, bytes(body), looks)
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
    # Not known for a recording in progress, and not needed.
    after = {
        tag: np.concatenate(
            [
                part.after.get(tag, np.zeros(len(part.records[tag]), np.int64)) + before
                for part, before in zip(parts, looks, strict=False)
            ]
        )
        for tag in RECORDS
    }
    ranges = records[b"NVTX"]
    domains = np.flatnonzero(ranges["kind"] == _DOMAIN)
    _, first_of_each = np.unique(ranges["domain"][domains], return_index=True)
    repeated = np.delete(domains, first_of_each)
    records[b"NVTX"] = np.delete(ranges, repeated)
    after[b"NVTX"] = np.delete(after[b"NVTX"], repeated)
    joined = replace(
        first,
        records=records,
        after=after,
        seen_until=max(part.seen_until for part in parts),
        stopped=any(part.stopped for part in parts),
        whole=last.whole,
    )
    for part, before in zip(parts[1:], looks[1:], strict=False):
        joined.names = joined.names | part.names
        joined.threads = joined.threads | part.threads
        joined.info = joined.info | part.info
        joined.switches = {
            name: [*switches, *((at, on, n + before) for at, on, n in part.switches[name])]
            for name, switches in joined.switches.items()
        }
        joined.losses = joined.losses + part.losses
    return joined


def take_text(spool: Spool, tag: bytes, body: bytes, looks: int = 0) -> None:
    """Parse a chunk without records, after a number of clock readings."""
    if tag == b"NAME" and (named := read_numbered(body)):
        spool.names[named[0]] = named[1]
    elif tag == b"THRD" and (named := read_numbered(body)):
        spool.threads[named[0]] = named[1].decode("utf-8", "replace")
    elif tag == b"INFO":
        key, _, value = body.decode("utf-8", "replace").partition("=")
        spool.info[key] = value
        moment = int(value) if _MOMENT.fullmatch(value) else LATEST + 1
        for name, keys in SWITCHES.items():
            if key in keys and moment <= LATEST:
                spool.switches[name].append((moment, keys[key], looks))
    elif tag == b"FULL" and (stop := read_stop(body)):
        spool.losses.append(stop)
        spool.stopped = True
    elif tag == b"LOSS" and len(body) >= 16:
        time, count = struct.unpack_from("<QQ", body)
        spool.losses.append((time, count, body[16:].decode("utf-8", "replace")))


def windows_of(spool: Spool) -> list[tuple[int, int]]:
    """Return the ordered windows in which the GPUs were recorded; the last may reach to the end.

    The first begins at 0 if it began with the process's use of CUDA. A repeated switch is the
    beginning of a further file.
    """
    windows = _stretches(spool.switches["captures"], spool.latest)
    if windows and not spool.continues and spool.info.get("capture_from") == "start":
        windows[0] = 0, windows[0][1]
    return windows


def control_stretches_of(spool: Spool) -> tuple[list[tuple[int, int]], list[bool]]:
    """Return the ordered stretches in which CUPTI records nothing, the last of which may reach to
    the end, and whether it stays in the process.

    They follow a window: nothing is known of the time before the first one.
    """
    stretches = _stretches(spool.switches["control"], spool.latest)
    idle = {start for start, _ in _stretches(spool.switches["idle"], spool.latest)}
    return stretches, [start in idle for start, _ in stretches]


def drop_unsettled_nodes(spool: Spool) -> int:
    """Remove the nodes of CUDA graphs that CUPTI gave no end of their own; return their number.

    A replay ends before the next one of its graph that is launched begins. Of what was recorded
    last with its nodes, CUPTI 13.0 gives some no times, or an end of up to a second later, when it
    hands them over; of many the start is as late.
    """
    kernels, replays = spool.records[b"KERN"], spool.records[b"GRPH"]
    nodes = kernels[kernels["graph"] != 0]
    if not len(nodes):
        return 0
    nodes = nodes[np.lexsort((nodes["start"], nodes["start"] == 0, nodes["correlation"]))]
    calls, first = np.unique(nodes["correlation"], return_index=True)
    begun, graphs = nodes["start"][first], nodes["graph"][first]
    until = np.full(len(calls), LATEST, np.uint64)
    for graph in np.unique(graphs):
        mine, whole = graphs == graph, replays[replays["graph"] == graph]
        launches = np.append(calls[mine], whole["correlation"])
        order = np.argsort(launches)
        starts = np.append(begun[mine], whole["start"])[order] + _CLOCK_NOISE_NS
        following = np.searchsorted(launches[order], calls[mine], side="right")
        until[mine] = np.append(starts, np.uint64(LATEST))[following]
    dropped = 0
    for tag in (b"KERN", b"COPY", b"MSET"):
        rows = spool.records[tag]
        replay = np.minimum(np.searchsorted(calls, rows["correlation"]), len(calls) - 1)
        start, end = rows["start"], rows["end"]
        bad = (calls[replay] == rows["correlation"]) & (
            (start == 0) | (end < start) | (end > until[replay])
        )
        if tag == b"KERN":
            bad &= rows["graph"] != 0
        if bad.any():
            spool.records[tag] = rows[~bad]
            dropped += int(np.count_nonzero(bad))
    return dropped


def node_stretches_of(spool: Spool) -> list[tuple[int, int]]:
    """Return the ordered stretches in which the nodes of CUDA graphs were recorded.

    Each lasts until the GPU is done with the replays that were launched in it: of those whose nodes
    were left out, until the next one begins.
    """
    calls, kernels = spool.records[b"API "], spool.records[b"KERN"]
    nodes, replays = kernels[kernels["graph"] != 0], spool.records[b"GRPH"]
    launching = [id for id, name in spool.names.items() if b"GraphLaunch" in name]
    stretches = []
    for begin, end in _stretches(spool.switches["nodes"], spool.latest):
        inside = calls[(calls["start"] >= begin) & (calls["start"] < end)]
        launches = inside["correlation"][np.isin(inside["name"], launching)]
        ends = nodes["end"][np.isin(nodes["correlation"], inside["correlation"])]
        lost = np.setdiff1d(launches, nodes["correlation"])
        if len(lost):
            following = replays["start"][replays["correlation"] > lost[-1]]
            ends = np.append(ends, np.sort(following)[:1])
        stretches.append((begin, max(end, int(ends.max(initial=0)))))
    return stretches


def call_windows_of(spool: Spool) -> list[tuple[int, int]] | None:
    """Return the parts of the windows with all CUDA calls recorded; None if all parts have them.

    An empty window stands for no part.
    """
    calls, captures = spool.switches["calls"], spool.switches["captures"]
    if all(on for _, on, _ in calls):
        return None
    first = calls[0][0]
    # Without a switch before anything is recorded, they were recorded.
    at_first = [(0, True, 0)] if first > (captures[0][0] if captures else 0) else []
    with_calls = _stretches([*at_first, *calls], spool.latest)
    parts = [(max(a, c), min(b, d)) for a, b in windows_of(spool) for c, d in with_calls]
    return [(begin, end) for begin, end in parts if begin < end] or [(first, first)]


def _stretches(switches: Sequence[Switch], latest: int) -> list[tuple[int, int]]:
    """Return the intervals from each switch on to the next switch off."""
    stretches: list[tuple[int, int]] = []
    began = None
    for moment, on, _ in switches:
        if on and began is None:
            began = moment
        elif not on and began is not None:
            stretches.append((began, max(moment, began)))
            began = None
    if began is not None:
        stretches.append((began, max(began, latest)))
    return stretches
