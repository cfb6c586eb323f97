"""Profiles of TensorFlow and JAX, written from rows of events, in both forms."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gputrace.model.events import GPU_KINDS, Kind, Memory
from gputrace.model.trace import Trace

NAMES = {
    Kind.COPY_H2D: "MemcpyH2D",
    Kind.COPY_D2H: "MemcpyD2H",
    Kind.COPY_D2D: "MemcpyD2D",
    Kind.COPY_PEER: "MemcpyP2P",
    Kind.COPY_OTHER: "MemcpyOther",
    Kind.MEMSET: "Memset",
}


@dataclass(frozen=True)
class Event:
    """Times in nanoseconds."""

    name: str
    start: int
    end: int
    stats: dict[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A line of a plane."""

    plane: str
    name: str
    id: int
    events: Sequence[Event]


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    low = bytes([number & 0x7F | (0x80 if number > 0x7F else 0)])
    return low + varint(number >> 7) if number > 0x7F else low


def number(of: int, value: int) -> bytes:
    return varint(of << 3) + varint(value)


def message(of: int, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return varint(of << 3 | 2) + varint(len(content)) + content


def xspace(rows: Sequence[Row], host: str = "node0", **plane_stats: str) -> bytes:
    """An XSpace message; ``plane_stats`` are texts that are told of each GPU."""
    planes = dict.fromkeys(row.plane for row in rows)
    found = [_plane(name, [r for r in rows if r.plane == name], plane_stats) for name in planes]
    return b"".join(message(1, plane) for plane in found) + message(4, host)


def _plane(name: str, rows: Sequence[Row], stats: dict[str, str]) -> bytes:
    ids: dict[str, int] = {}
    stat_ids: dict[str, int] = {}
    lines = b"".join(message(3, _line(row, ids, stat_ids)) for row in rows)
    told = stats if name.startswith("/device") else {}
    own = b"".join(message(6, _stat(key, text, stat_ids)) for key, text in told.items())
    events = b"".join(message(4, _metadata(id, text)) for text, id in ids.items())
    metadata = b"".join(message(5, _metadata(id, text)) for text, id in stat_ids.items())
    return message(2, name) + lines + events + metadata + own


def _metadata(id: int, name: str) -> bytes:
    return number(1, id) + message(2, number(1, id) + message(2, name))


def _line(row: Row, ids: dict[str, int], stat_ids: dict[str, int]) -> bytes:
    began = min((event.start for event in row.events), default=0)
    events = b"".join(message(4, _event(e, began, ids, stat_ids)) for e in row.events)
    return number(1, row.id) + message(2, row.name) + number(3, began) + events


def _event(event: Event, began: int, ids: dict[str, int], stat_ids: dict[str, int]) -> bytes:
    id = ids.setdefault(event.name, len(ids) + 1)
    times = number(2, (event.start - began) * 1000) + number(3, (event.end - event.start) * 1000)
    stats = (message(4, _stat(key, value, stat_ids)) for key, value in event.stats.items())
    return number(1, id) + times + b"".join(stats)


def _stat(name: str, value: int | str, stat_ids: dict[str, int]) -> bytes:
    key = number(1, stat_ids.setdefault(name, len(stat_ids) + 1))
    if isinstance(value, int):
        return key + number(4, value)
    if name == "memcpy_details":  # As the profiler does with texts that may repeat.
        return key + number(7, stat_ids.setdefault(value, len(stat_ids) + 1))
    return key + message(5, value)


def trace_viewer(rows: Sequence[Row]) -> bytes:
    """Write a ``.trace.json.gz``, where times are microseconds and all arguments text."""
    pids = {plane: pid for pid, plane in enumerate(dict.fromkeys(r.plane for r in rows), 1)}
    events = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": plane}}
        for plane, pid in pids.items()
    ]
    events += [
        {
            "ph": "M", "pid": pids[row.plane], "tid": row.id, "name": "thread_name",
            "args": {"name": row.name},
        }
        for row in rows
    ]  # fmt: skip
    events += [
        {
            "ph": "X", "pid": pids[row.plane], "tid": row.id, "name": event.name,
            "ts": event.start / 1000, "dur": (event.end - event.start) / 1000,
            "args": {key: str(value) for key, value in event.stats.items()},
        }
        for row in rows for event in row.events
    ]  # fmt: skip
    whole = {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": events}
    return gzip.compress(json.dumps(whole).encode())


def rows_of(trace: Trace) -> list[Row]:
    """Return what TensorFlow's profiler would have written of the process of a trace.

    A call goes by the name of what it issued, and steps have a number.
    """
    columns = ("start", "end", "kind", "name", "device", "stream", "thread", "correlation", "bytes",
               "source_memory", "destination_memory", "destination_device")  # fmt: skip
    events = trace.events([*GPU_KINDS, Kind.API, Kind.STEP, Kind.RANGE, Kind.DATA_WAIT], columns)
    names = trace.names(np.unique(events.name))
    issued: dict[int, str] = {}
    lines: dict[tuple[str, str, int], list[Event]] = {}
    table = zip(*(getattr(events, name).tolist() for name in columns), strict=True)
    for values in sorted(table, key=lambda values: values[2]):
        of = dict(zip(columns, values, strict=True))
        kind, name = Kind(of["kind"]), names[of["name"]]
        stats: dict[str, int | str] = {}
        if of["correlation"] > 0:
            stats["correlation_id"] = of["correlation"]
        if kind in GPU_KINDS:
            name = NAMES.get(kind, "CudaGraphExec:7" if kind == Kind.GRAPH else name)
            stats |= _details(kind, of)
            issued[of["correlation"]] = name.replace("GraphExec:7", "Graph:7")
            line = (f"/device:GPU:{of['device']}", f"Stream #{of['stream']}(x)", of["stream"])
        else:
            name = issued.get(of["correlation"], name) if kind == Kind.API else name
            stats |= {"step_num": 1} if kind == Kind.STEP else {}
            line = ("/host:CPU", f"python/{of['thread']}", of["thread"])
        lines.setdefault(line, []).append(Event(name, of["start"], of["end"], stats))
    return [Row(*line, own) for line, own in lines.items()]


def _details(kind: Kind, of: dict[str, int]) -> Iterator[tuple[str, str]]:
    if kind == Kind.MEMSET:
        yield "Memset_details", f"kind:device num_bytes:{of['bytes']} async:1"
    elif kind in NAMES:
        ends = [Memory(of[side]).name.lower() for side in ("source_memory", "destination_memory")]
        to = of["destination_device"] if kind == Kind.COPY_PEER else of["device"]
        text = f"kind_src:{ends[0]} kind_dst:{ends[1]} size:{of['bytes']} dest:{to} async:1"
        yield "memcpy_details", text


def write(rows: Sequence[Row], folder: Path) -> tuple[Path, Path]:
    """Both files."""
    space, viewer = folder / "run.xplane.pb", folder / "run.trace.json.gz"
    space.write_bytes(xspace(rows, gpu_device_name="NVIDIA H200"))
    viewer.write_bytes(trace_viewer(rows))
    return space, viewer
