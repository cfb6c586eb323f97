"""Writes a recording as PyTorch's profiler (Kineto) does, for peers that read nothing else.

Only what those peers look at: kernels, copies, memsets, CUDA calls and the step marks, with the
same numbers as in the nsys export. Nothing of CPU operators, which makes the files smaller, and
the peers faster, than real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.synthetic.recording import Kind, Process, Recording, Table

_COPIES = {
    Kind.H2D: "Memcpy HtoD (Pinned -> Device)",
    Kind.D2H: "Memcpy DtoH (Device -> Pinned)",
    Kind.PEER: "Memcpy PtoP (Device -> Device)",
}


def write_kineto(recording: Recording, folder: Path) -> None:
    """One file a rank, in a folder that must not exist."""
    folder.mkdir()
    for process in recording.processes:
        path = folder / f"rank{process.rank}.json"
        with path.open("w", encoding="utf-8") as file:
            file.write(_head(process.rank, len(recording.processes)))
            file.write(",\n".join(_events(recording, process)))
            file.write("\n]}\n")


def _head(rank: int, world: int) -> str:
    info = f'"distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {world}}}'
    return f'{{"schemaVersion": 1,\n{info},\n"traceEvents": [\n'


def _events(recording: Recording, process: Process) -> Iterator[str]:
    of_rank = process.rank
    names = [name.replace("\\", "\\\\").replace('"', '\\"') for name in recording.names]
    for row in _rows(recording.ops, of_rank):
        yield _operation(row, names)
    for row in _rows(recording.api, of_rank):
        name, category = names[row["name"]], "cuda_runtime"
        where = f'"pid": {process.pid}, "tid": {row["thread"]}'
        yield _event(name, category, row, where, f'"correlation": {row["correlation"]}')
    for row in _rows(recording.nvtx, of_rank):
        name = names[row["name"]]
        if row["domain"] == 0 and name.startswith("step "):
            where = f'"pid": {process.pid}, "tid": {row["thread"]}'
            yield _event(f"ProfilerStep#{name[5:]}", "user_annotation", row, where, "")


def _operation(row: np.void, names: list[str]) -> str:
    kind = Kind(int(row["kind"]))
    extra = ""
    if kind in _COPIES:
        name, category = _COPIES[kind], "gpu_memcpy"
        extra = f', "bytes": {row["bytes"]}'
    elif kind == Kind.MEMSET:
        name, category = "Memset (Device)", "gpu_memset"
    else:
        name, category = names[row["name"]], "kernel"
    place = f'"device": {row["device"]}, "stream": {row["stream"]}'
    where = f'"pid": {row["device"]}, "tid": {row["stream"]}'
    details = f'"correlation": {row["correlation"]}, {place}{extra}'
    return _event(name, category, row, where, details)


def _event(name: str, category: str, row: np.void, where: str, details: str) -> str:
    """Times in microseconds, to the nanosecond."""
    start, ns = int(row["start"]), int(row["end"]) - int(row["start"])
    when = f'"ts": {start // 1000}.{start % 1000:03d}, "dur": {ns // 1000}.{ns % 1000:03d}'
    return (
        f'{{"ph": "X", "cat": "{category}", "name": "{name}", {where}, {when}, '
        f'"args": {{{details}}}}}'
    )


def _rows(table: Table, rank: int) -> Table:
    chosen: Table = table[table["rank"] == rank]
    return chosen
