"""Write a recording as PyTorch's profiler does: one JSON file per rank, microseconds as text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tests.synthetic.recording import Kind, Process, Recording, Table

BASE = 1_711_964_646_000_000_000
"""Nanoseconds since 1970 at 0 of the recording's clock."""

COPIES = {Kind.H2D: "HtoD", Kind.D2H: "DtoH", Kind.PEER: "PtoP"}


NAMES = {
    "step": '"ProfilerStep#{}"',
    "data": '"enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"',
}
"""What the profiler calls steps and waits for data."""

PLAIN = {"step": '"step {}"', "data": '"data"'}
"""What a program may call them in annotations of its own."""


def write_kineto(
    recording: Recording,
    folder: str | Path,
    *,
    packed: bool = False,
    annotations: Mapping[str, str] | None = NAMES,
) -> list[Path]:
    """Write a file for each rank into the folder, and return them in order of rank.

    Ranges have the names of ``annotations``; without it, their own.
    """
    return [
        _write(recording, process, Path(folder), packed, annotations)
        for process in recording.processes
    ]


def _write(
    recording: Recording,
    process: Process,
    folder: Path,
    packed: bool,
    annotations: Mapping[str, str] | None,
) -> Path:
    path = folder / f"rank{process.rank}.pt.trace.json{'.gz' if packed else ''}"
    cards = [{"id": device, "name": f"GPU {gpu}"} for device, gpu in process.devices]
    run = {"backend": "nccl", "rank": process.rank, "world_size": len(recording.processes)}
    around = {"schemaVersion": 1, "deviceProperties": cards, "distributedInfo": run}
    head = json.dumps(around | {"host_name": "node0", "baseTimeNanoseconds": BASE}, indent=2)[:-2]
    with gzip.open(path, "wt") if packed else path.open("w") as file:
        file.write(f'{head},\n  "traceEvents": [\n  ')
        file.write(",\n  ".join(_events(recording, process, annotations)))
        file.write('\n  ],\n  "traceName": "trace.json",\n  "displayTimeUnit": "ms"\n}\n')
    return path


def _events(
    recording: Recording, process: Process, annotations: Mapping[str, str] | None
) -> Iterator[str]:
    names = [json.dumps(name) for name in recording.names]
    for row in _of(process, recording.ops):
        yield _operation(names, row)
    for row in _of(process, recording.api):
        own = f'"tid": {row["thread"]}, {_times(row)}'
        args = f'{{"cbid": 211, "correlation": {row["correlation"]}}}'
        cat = "cuda_runtime" if names[row["name"]].startswith('"cuda') else "cuda_driver"
        yield _event(cat, names[row["name"]], process.pid, own, args)
    for row in _of(process, recording.nvtx):
        text, own = recording.names[row["name"]], f'"tid": {row["thread"]}, {_times(row)}'
        kind, _, number = text.partition(" ")
        if annotations is None or kind in annotations:
            name = json.dumps(text) if annotations is None else annotations[kind].format(number)
            yield _event("user_annotation", name, process.pid, own, '{"External id": 1}')


def _operation(names: list[str], row: np.void) -> str:
    stream, device = row["stream"], row["device"]
    more = f'"device": {device}, "stream": {stream}, "correlation": {row["correlation"]}'
    cat, name = "kernel", names[row["name"]]
    if row["kind"] in COPIES:
        cat, name = "gpu_memcpy", _copy(row)
        more += f', "bytes": {row["bytes"]}'
        if row["kind"] == Kind.PEER:
            more += f', "fromDevice": {device}, "inDevice": {device}, "toDevice": {row["peer"]}'
    elif row["kind"] == Kind.MEMSET:
        cat, name = "gpu_memset", '"Memset (Device)"'
        more += f', "bytes": {row["bytes"]}'
    own = f'"tid": {stream}, {_times(row)}'
    return _event(cat, name, device, own, f'{{"External id": 7, "context": 1, {more}}}')


def _copy(row: np.void) -> str:
    host = "Pageable" if row["pageable"] else "Pinned"
    ends = {Kind.H2D: f"{host} -> Device", Kind.D2H: f"Device -> {host}"}
    return f'"Memcpy {COPIES[row["kind"]]} ({ends.get(row["kind"], "Device -> Device")})"'


def _event(cat: str, name: str, pid: int, own: str, args: str) -> str:
    return f'{{"ph": "X", "cat": "{cat}", "name": {name}, "pid": {pid}, {own}, "args": {args}}}'


def _times(row: np.void) -> str:
    length = row["end"] - row["start"]
    return f'"ts": {_microseconds(row["start"])}, "dur": {_microseconds(length)}'


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _of(process: Process, rows: Table) -> Table:
    own: Table = rows[rows["rank"] == process.rank]
    return own
